"""``dlrover-run --backend ray --detach``: the job's masters are kept in the cluster, and the command returns."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dlrover_adapters.cli import backends, groups, ray_attached, ray_reach
from dlrover_adapters.cli import options as cli_options
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_adapters.cli.torchrun_flags import Options
    from dlrover_backends.ray.mastery import Plan
    from dlrover_backends.ray.settings import Settings
    from dlrover_core.runtime.backends import BackendContext, Choice
    from dlrover_core.spec import JobSpec


def run(options: Options, choice: Choice, found: Sequence[groups.Plan]) -> int:
    """Claim the name, have masters kept, and say how to look at them; the exit status. Raises `SpecError`, `CoreError`."""
    from dlrover_adapters.http.token import load_token, make_token
    from dlrover_backends.ray import settings

    _check(options)
    job = cli_options.job_name(options)
    spec = groups.spec(options, job, found)
    token = load_token(os.environ, options.token_file) or make_token()
    backends.say_counted(options, "dlrover-run")
    run_ = options.owner or secrets.token_hex(6)
    here = context(options, choice, spec, token, run_)
    told = settings.read(here)
    env = environment(here, told)
    cluster = ray_reach.connect(told.address, job, run_)
    return _make(options, cluster, here, told, env)


def _make(options: Options, cluster: Any, here: BackendContext, told: Settings, env: Mapping[str, Any]) -> int:
    from dlrover_backends.ray import masters, private

    fault = private.label_fault(told.labels())
    if fault:
        raise SpecError("label", f"Ray refuses it: {fault}")
    say, address = f"dlrover-run: job {here.job}", cluster.address
    head = "" if options.log else masters.head_name()
    try:
        masters.claim(here.job, here.run, here.token)
    except masters.InUse as error:
        raise SpecError("job-id", str(error)) from error
    try:
        _refuse_others(cluster, here)
        made = plan(options, here, told._replace(address=address), cluster.sent(env))
        masters.settle(made, masters.keep(made))
        masters.await_ready(made)
    except BaseException:
        try:
            masters.release(here.job, here.run)
        except masters.StillKept as left:
            print(f"{say}: {left}: dlrover ray rm {here.job}", file=sys.stderr)
        raise
    for words in (ray_attached.joined(address), *words_of(made, head, persistent=masters.persistent())):
        print(f"{say}: {words}", file=sys.stderr)
    return 0


def _refuse_others(cluster: Any, here: BackendContext) -> None:
    """Raises `SpecError` where nodes of an earlier run live, though nobody keeps masters of it."""
    for run_, nodes in cluster.others():
        raise SpecError(
            "job-id",
            f"{here.job!r} is in use in this cluster, where {nodes} nodes of its run {run_} live: end them with "
            f"dlrover ray rm {here.job}, or give this job another --job-id",
        )


def words_of(made: Plan, head: str, *, persistent: bool) -> list[str]:
    """What a person is told of a job that was started."""
    place = f"ray:{made.job}"
    kept = (
        f"its masters are kept by {made.keepers} actors of the cluster, and its log is in etcd"
        if made.log
        else f"its masters and its log are on {head}, the host of the head: when that is gone, decisions end and training goes "
        "on; with --log etcd://HOST:2379 masters are on two hosts"
    )
    return [
        kept,
        *(() if persistent else (ray_attached.MEMORY,)),
        f"dlrover status|events|explain|drain {place} is for any host of the cluster; dlrover stop {place} ends and removes it",
    ]


def _check(options: Options) -> None:
    """Refuse what says where masters are: a keeper says it. Raises `SpecError`."""
    for dest, why in (
        ("bind", "masters in the cluster listen at a free port of their host"),
        ("masters", "masters in the cluster are found by what it keeps of them"),
        ("tls_cert", "a certificate of masters in the cluster would have to name addresses that they do not have yet"),
    ):
        if options.given(dest):
            raise SpecError(dest.replace("_", "-"), f"{getattr(options, dest)!r}: {why}; leave it out with --detach")
    if options.log and not options.log.startswith("etcd"):
        raise SpecError(
            "log",
            f"{options.log.partition(':')[0]}: is no log that masters in the cluster share; say etcd://HOST:2379, or leave it "
            "out for SQLite on the host of the head",
        )


def context(options: Options, choice: Choice, spec: JobSpec, token: str, run_: str) -> BackendContext:
    """What the backend's arguments are read from."""
    from dlrover_core.runtime.backends import BackendContext

    return BackendContext(
        spec.job,
        run_,
        (),
        token,
        arguments=tuple(options.argv),
        env=backends.passed(os.environ),
        cwd=os.getcwd(),
        args=choice.args,
        stop_grace_s=spec.stop_grace_s,
    )


def environment(here: BackendContext, told: Settings) -> dict[str, Any]:
    """The nodes' runtime environment, that of ``ray job submit`` below the file's. Raises `SpecError`."""
    from dlrover_backends.ray import runtime_env

    return runtime_env.read(told.runtime_env, here.cwd, runtime_env.submitted(os.environ))


def plan(options: Options, here: BackendContext, told: Settings, env: Mapping[str, Any]) -> Plan:
    """What masters there will be. ``env``: the nodes' runtime environment, with its folders in the cluster."""
    from dlrover_backends.ray import mastery, settings

    log = options.log or ""
    return mastery.Plan(
        here.job,
        here.run,
        here.arguments,
        here.token,
        backend=f"ray:{settings.text(told._replace(runtime_env=''))}",
        env=ray_attached.passed(os.environ),
        cwd="" if env.get("working_dir") else here.cwd,
        log=log,
        state_dir=os.path.abspath(options.state_dir) if options.state_dir else "",
        pinned="" if log else mastery.HEAD,
        keepers=2 if log else 1,
        runtime_env=dict(env),
    )

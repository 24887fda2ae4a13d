"""``dlrover-run --backend k8s --detach``: the job's masters become pods, and the command returns."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlrover_adapters.cli import backends, groups, k8s_log
from dlrover_adapters.cli import options as cli_options
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_adapters.cli.torchrun_flags import Options
    from dlrover_backends.k8s.masters import MasterPlan
    from dlrover_backends.k8s.transport import Transport
    from dlrover_core.runtime.backends import BackendContext, Choice
    from dlrover_core.spec import JobSpec

KEPT = ("pull", "gpu", "gang", "queue", "user", "grace_s", "account", "command", "rack")
"""Arguments of the backend that masters in pods are given as they were typed."""


def run(options: Options, choice: Choice, found: Sequence[groups.Plan]) -> int:
    """Make everything, and say how to look at it; the exit status. Raises `SpecError`, `CoreError`."""
    from dlrover_adapters.http.token import load_token, make_token
    from dlrover_backends.k8s import settings
    from dlrover_backends.k8s.transport import Transport

    _check(options)
    job = cli_options.job_name(options)
    spec = groups.spec(options, job, found)
    token = load_token(os.environ, options.token_file) or make_token()
    backends.say_counted(options, "dlrover-run")
    here = context(options, choice, spec, token)
    told = settings.read(here)
    plan(options, here, spec, told.namespace or "default")  # what is wrong with it is told before anybody is asked
    made = asyncio.run(_made(Transport(told.kubeconfig, told.context), options, here, spec))
    place, say = f"k8s:{made.namespace}/{job}", f"dlrover-run: job {job}"
    print(f"{say}: its masters are pods of the Job {made.called} in namespace {made.namespace}", file=sys.stderr)
    print(
        f"{say}: dlrover status|events|explain {place} show it; dlrover stop {place} ends and removes it",
        file=sys.stderr,
    )
    return 0


def _check(options: Options) -> None:
    """Refuse what says where masters are, or whose the run is: a pod's own. Raises `SpecError`."""
    for dest, why in (
        ("bind", "masters in pods listen at a port of their own"),
        ("masters", "masters in pods are found by their Service"),
        ("owner", "a job in pods is named by the uid of what owns it"),
        ("tls_cert", "a certificate of masters in pods would have to name addresses that they do not have yet"),
        ("tls_key", "masters in pods show no certificate"),
        ("tls_ca", "masters in pods show no certificate"),
        ("state_dir", "masters in pods keep their state in the cluster; --backend k8s:claim=NAME says where"),
    ):
        if options.given(dest):
            name = {"owner": "run"}.get(dest, dest.replace("_", "-"))
            raise SpecError(name, f"{getattr(options, dest)!r}: {why}; leave it out with --detach")


def context(options: Options, choice: Choice, spec: JobSpec, token: str) -> BackendContext:
    """What the backend's arguments are read from."""
    from dlrover_core.runtime.backends import BackendContext

    return BackendContext(
        spec.job,
        "",
        (),
        token,
        arguments=backends.words(options),
        env=backends.passed(os.environ),
        cwd=os.getcwd(),
        args=choice.args,
        stop_grace_s=spec.stop_grace_s,
    )


def plan(
    options: Options,
    here: BackendContext,
    spec: JobSpec,
    namespace: str,
    *,
    password: str | None = None,
    key: str | None = None,
) -> MasterPlan:
    """What masters there will be. ``password``, ``key``: what stands for etcd's; None: the true ones. Raises `SpecError`."""
    from dlrover_backends.k8s import budgets, masters, render, settings
    from dlrover_core.runtime.backend import sizes_of

    told = settings.read(here)
    if not told.image:
        raise SpecError("image", "missing: masters and nodes run in it; say --image IMG")
    template = render.template_of(here, told)
    log = k8s_log.read(options.log or "", masters.FILES_PATH, password=password, key=key)
    typed = here.options(**dict.fromkeys(settings.Settings._fields, ""))
    made = masters.MasterPlan(
        namespace,
        masters.name_of(spec.job),
        told.image,
        here.arguments,
        here.token,
        job=spec.job,
        etcd=log.url,
        etcd_files=log.files,
        claim=told.claim,
        templates=None if template is None else {"": template},
        backend={key: typed[key] for key in KEPT if typed[key]},
        env=dict(here.env),
        pod=_placed(template),
        standby=any(one.standby for one in spec.groups),
        nodes_kept=budgets.nodes_kept(sizes_of(spec)),
    )
    masters.objects(made)
    return made


def _placed(template: object) -> dict[str, object]:
    """What masters take over from the template of nodes: how images are pulled. Where nodes may run is the nodes' matter."""
    spec = template.get("spec") if isinstance(template, dict) else None
    return {key: spec[key] for key in ("imagePullSecrets",) if isinstance(spec, dict) and key in spec}


async def _made(api: Transport, options: Options, here: BackendContext, spec: JobSpec) -> MasterPlan:
    """Ask the cluster for all of it. Raises `SpecError`, `CoreError`."""
    from dlrover_backends.k8s import making, settings

    try:
        await api.open()
        namespace = settings.read(here).namespace or api.namespace or "default"
        return await making.make(api, plan(options, here, spec, namespace))
    finally:
        await api.close()

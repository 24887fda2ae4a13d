"""The backend that ``--backend`` names: found and looked at by the launcher, made in every master."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dlrover_adapters.cli import backend_flags, ray_flags
from dlrover_adapters.cli.backend_flags import KUBERNETES, LOCAL
from dlrover_adapters.cli.ray_flags import RAY
from dlrover_adapters.cli.torchrun_flags import Options
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_adapters.cli.settings import Settings
    from dlrover_core.runtime.backend import Backend
    from dlrover_core.runtime.backends import BackendContext, Choice

OURS = {
    LOCAL: "dlrover_backends.local:backend",
    KUBERNETES: "dlrover_backends.k8s:backend",
    RAY: "dlrover_backends.ray:backend",
}
"""Backends of this distribution by name, so that they work from a checkout that was never installed."""

CLOSE_S = 5.0

_PASSED = ("PYTHON_EXEC", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "DLROVER_WARM", "DLROVER_CGROUP")
"""Variables that say how workers are started, as options do; with all of torchrun's ``PET_``."""


class Apart(NamedTuple):
    """What `Settings` hold of a job whose nodes a backend of somebody's starts. ``agent``: words of each node's `dlrover-run`."""

    backend: str
    agent: tuple[str, ...]
    cwd: str
    apart: bool = True


def chosen(options: Options) -> Choice | None:
    """The backend that starts the nodes, looked at; None: this command. Raises `SpecError`."""
    text = backend_flags.named(options)
    if text is None:
        return None
    from dlrover_core.runtime import backends

    choice = backends.read(text)
    if choice.name == LOCAL:
        if choice.args:
            raise SpecError(
                "backend", f"{options.backend!r}: local takes no arguments; --local-nodes N says how many nodes"
            )
        return None
    _check(options)
    _check_standbys(options, choice)
    ray_flags.check(options)
    if choice.name == RAY:
        choice = ray_flags.carried(choice)
    importlib.import_module("dlrover_adapters.telemetry.light")
    # Made of nothing that counts: a class that does not fit, and arguments that it refuses, end the command here.
    blank = backends.BackendContext("job", "", ("127.0.0.1:1",), "", ("true",), cwd=os.getcwd(), args=choice.args)
    backends.make(backends.find(choice, OURS), blank, choice.text)
    return choice


def _check(options: Options) -> None:
    """Refuse what says where nodes are, beside a backend that knows. Raises `SpecError`."""
    wrong = {
        "local-nodes": options.given("local_nodes"),
        "master": options.given("master"),
        "standalone": bool(options.standalone),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise SpecError(
                name,
                f"not with --backend {options.backend}, which starts the nodes: leave one of them out; --nnodes sizes the job",
            )


def _check_standbys(options: Options, choice: Choice) -> None:
    """Refuse standbys where the nodes' scheduler has none. Raises `SpecError`."""
    groups = [int(one.options.get("standby", 0)) for one in getattr(options, "groups", ())]
    asked = max([getattr(options, "standby", 0), *groups])
    if asked <= 0:
        return
    if choice.name not in {KUBERNETES, RAY}:
        raise SpecError(
            "standby",
            f"{asked}, but the nodes of --backend {options.backend} have none: local nodes, pods (--backend k8s) and actors "
            "(--backend ray) are kept warm; leave it out",
        )
    for part in choice.args.split(","):
        key, _, value = part.partition("=")
        if value and key in {"gang", "queue"}:
            raise SpecError(
                "standby",
                f"{asked}, with {key} {value}: a standby would be "
                f"{'no part of its gang' if key == 'gang' else 'taken from the quota of MIN'}; leave one of them out",
            )


def settled(choice: Choice, agent: Sequence[str]) -> Apart:
    """What the launcher writes down of the choice, for its masters."""
    return Apart(choice.text, tuple(agent), os.getcwd())


def words(options: Options) -> tuple[str, ...]:
    """The words of the line, as nodes and masters elsewhere are given them: without ``--log``, which may hold a password.

    Other people read the arguments of pods. Agents need no log, and masters in pods are told theirs in another way.
    """
    own = len(options.argv) - len(options.arguments)  # what follows is the script's
    left = iter(options.argv[:own])
    kept: list[str] = []
    for word in left:
        if word == "--log":
            next(left, None)
        elif not word.startswith("--log="):
            kept.append(word)
    return (*kept, *options.argv[own:])


def made(settings: Settings, token: str) -> Backend:
    """The backend of a job that is not joining, for a master of it. Raises `SpecError`."""
    from dlrover_core.runtime import backends

    choice = backends.read(settings.backend or LOCAL, settings.cwd or None)
    context = _context(settings, token, choice.args if settings.apart else settings.node_host)
    return backends.make(backends.find(choice, OURS, settings.cwd or None), context, choice.text)


async def closed(backend: object) -> None:
    """Let a backend close its connections; None has none."""
    import asyncio

    import structlog

    from dlrover_core.runtime.backend import Closing

    if isinstance(backend, Closing):
        try:
            await asyncio.wait_for(backend.close(), CLOSE_S)
        except Exception as error:  # noqa: BLE001  # somebody's own code; the job's end is not its business
            told = f"{type(error).__name__}: {error}"
            structlog.get_logger("dlrover.master").warning("the backend was not closed", error=told)


def _context(settings: Settings, token: str, args: str) -> BackendContext:
    from dlrover_adapters.agent.spawn import module_command
    from dlrover_core.runtime.backends import BackendContext

    directory = Path(settings.directory) / "backend"
    if settings.apart:
        directory.mkdir(mode=0o700, exist_ok=True)
    return BackendContext(
        job=settings.job.job,
        run=settings.run,
        masters=settings.masters,
        token=token,
        command=(*module_command("dlrover_adapters.cli.run"), *settings.agent) if settings.agent else (),
        arguments=settings.agent,
        env=passed(os.environ),
        cwd=settings.cwd or os.getcwd(),
        directory=str(directory),
        args=args,
        stop_grace_s=settings.job.stop_grace_s,
    )


def passed(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a launcher from which its nodes' agents read options too."""
    return {name: value for name, value in environ.items() if name.startswith("PET_") or name in _PASSED}


def masters(options: Options, own: str) -> tuple[str, ...]:
    """Where nodes find the masters: ``own`` first, then those of ``--masters``. Raises `SpecError`."""
    from dlrover_adapters.cli.meeting import parse_endpoint

    found = [own]
    for text in filter(None, map(str.strip, (options.masters or "").split(","))):
        host, port = parse_endpoint("masters", text)
        found.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return tuple(dict.fromkeys(found))


def say_counted(options: Options, command: str) -> None:
    """Warn where the devices of this host were counted for nodes that are elsewhere."""
    if options.nproc_per_node in ("auto", "gpu", "xpu", "cpu"):
        print(
            f"{command}: --nproc-per-node {options.nproc_per_node} has counted this host's devices, for all nodes; a number says "
            "what they have",
            file=sys.stderr,
        )

"""A job of Ray that is attached: its masters are beside the command that was typed, and the cluster keeps others for its death.

The job's name is claimed in the cluster before anything is started. Some seconds later, for the start needs the processor first,
an actor is made that keeps masters: on this host, with this log, once this command is dead; or, where hosts share the log, on
another host from now on. At the job's end it is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from dlrover_adapters.cli import backends, in_pod, platform_away, ray_flags
from dlrover_adapters.cli.meeting import parse_endpoint
from dlrover_core.errors import SpecError
from dlrover_core.runtime.within import within

if TYPE_CHECKING:
    from dlrover_adapters.cli.settings import Settings
    from dlrover_adapters.cli.torchrun_flags import Options
    from dlrover_backends.ray.client import RayBackend
    from dlrover_backends.ray.mastery import Plan

ETCD_PASSWORD = "DLROVER_ETCD_PASSWORD"  # noqa: S105  # the variable's name
KEEP_AFTER_S, KEEP_AGAIN_S, CLAIM_S, RELEASE_S = 5.0, 5.0, 10.0, 10.0
INTERRUPTED, AWAY_S = 128, 2.0
UNFINISHED = (70, 75)
"""As `apart` has it: the job goes on, and is led in the cluster."""

MEMORY = (
    "this cluster keeps its state in memory alone: when its head dies, Ray ends all of it within 60 s; with "
    "RAY_gcs_storage=rocksdb or Redis training goes on (docs/ray.md)"
)

log = structlog.get_logger("dlrover.launcher")


@dataclass
class End:
    """How the launcher has ended.

    status: its exit status, once it is known
    gone:   why the cluster is taken for gone, so that nothing can be removed there; empty: it is not
    """

    status: int = UNFINISHED[0]
    gone: str = ""


@contextlib.asynccontextmanager
async def outlived(options: Options, settings: Settings, token: str) -> AsyncIterator[End]:
    """While it lasts, the job outlives this process, if Ray has its nodes. Raises `SpecError` where its name is in use."""
    end = End()
    if not ray_flags.is_ray(options) or in_pod.is_pod(options):
        yield end
        return
    from dlrover_backends.ray.client import RayBackend

    backend = backends.made(settings, token)
    assert isinstance(backend, RayBackend)
    claimed = await _claimed(backend, settings)
    keeping = asyncio.ensure_future(_keep(backend, plan(options, settings, token), None if claimed else settings))
    try:
        yield end
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        if end.status > INTERRUPTED:  # somebody waits, and a cluster that comes back later is cleared by hand
            end.gone = await platform_away.silent(backend, AWAY_S)
        if end.status not in UNFINISHED and not end.gone:
            await _released(backend)
        await backends.closed(backend)


async def _claimed(backend: RayBackend, settings: Settings) -> bool:
    """Is the job's name claimed? Raises `SpecError` where it is in use."""
    try:
        await within(CLAIM_S, _claim(backend, settings))
    except SpecError:
        raise
    except Exception as error:  # noqa: BLE001  # a cluster that is away now is waited for, as by `apart`
        log.warning("the job's name is not claimed in the cluster", error=f"{type(error).__name__}: {error}")
        return False
    return True


async def _claim(backend: RayBackend, settings: Settings) -> None:
    """Claim the name, and say in which cluster that is: it may have been found on this host, or by a variable."""
    persistent = await backend.claim(settings.masters[0], encrypts=bool(settings.tls_cert))
    for words in (joined(backend.cluster), *(() if persistent else (MEMORY,))):
        print(f"dlrover-run: job {settings.job.job}: {words}", file=sys.stderr)


def joined(address: str) -> str:
    """Where the job's nodes are, for people."""
    return f"its nodes are actors of the Ray cluster at {address}"


async def _keep(backend: RayBackend, plan: Plan, unclaimed: Settings | None) -> None:
    """Have masters kept soon, and again until they are. ``unclaimed``: the job, if its name is still to be claimed."""
    await asyncio.sleep(KEEP_AFTER_S)
    warned = False
    while True:
        try:
            if unclaimed is not None:
                await _claim(backend, unclaimed)
                unclaimed = None
            await backend.keep(plan)
        except SpecError as error:  # another job has the name now
            log.warning("nobody leads the job when this command dies", error=str(error))
            return
        except Exception as error:  # noqa: BLE001  # training needs none of it; the desk or the cluster may be away
            if not warned:
                said = f"{type(error).__name__}: {error}"
                log.warning("nobody leads the job when this command dies; it is tried again", error=said)
            warned = True
            await asyncio.sleep(KEEP_AGAIN_S)
            continue
        if warned:
            log.info("masters are kept in the cluster now")
        return


async def _released(backend: RayBackend) -> None:
    try:
        await within(RELEASE_S, backend.release())
    except Exception as error:  # noqa: BLE001  # the job is over all the same
        log.warning("masters may be left in the cluster: dlrover ray rm", error=f"{type(error).__name__}: {error}")


def plan(options: Options, settings: Settings, token: str) -> Plan:
    """What masters there will be once this command is dead."""
    from dlrover_backends.ray import mastery
    from dlrover_backends.ray.masters_keeper import started_at

    shared = settings.log if settings.shared else ""
    _, port = parse_endpoint("masters", settings.masters[0])
    return mastery.Plan(
        settings.job.job,
        settings.run,
        settings.agent,
        token,
        env=passed(os.environ),
        cwd=settings.cwd,
        log=shared,
        state_dir=str(Path(settings.directory).parents[1]),
        bind=parse_endpoint("bind", options.bind, 0)[0] if options.bind else mastery.EVERYWHERE,
        port=0 if shared else port,
        driver="" if shared else f"{os.getpid()}:{started_at(os.getpid())}",
    )


def passed(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of this command from which masters in the cluster read options too."""
    return {**backends.passed(environ), **{one: environ[one] for one in (ETCD_PASSWORD,) if environ.get(one)}}

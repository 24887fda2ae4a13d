"""A job that nobody can lead: its last leader died, and its log's folder takes no writes.

The launcher knows from its agents how the workers fare. Training needs no master; but a job whose workers have ended, well or
not, must end though no log can be told.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from dlrover_adapters.cli.settings import Settings
from dlrover_core.job.incidents import ReportExit
from dlrover_core.job.world import ReportFinished
from dlrover_core.runtime.within import within
from dlrover_core.words import plain

LOOK_S, UNLED_S = 1.0, 30.0
"""How often it is looked; how long a job whose work is done waits for its log."""
PROBE_BYTES, PROBE_S = 4096, 10.0
WHY_CHARS_MAX = 300
WORKS, WELL, FAILED = "works", "well", "failed"


class Agent(Protocol):
    """How the workers of one node fare."""

    @property
    def working(self) -> bool:
        """Are there workers, alive or ended?"""

    @property
    def result(self) -> ReportFinished | ReportExit | None:
        """How they ended; None: they have not."""


def said(agent: Agent) -> dict[str, object]:
    """What an agent tells its launcher: ``work``, empty where it has none, and ``why`` that failed or is not all on storage."""
    match agent.result:
        case ReportFinished() as finished:
            return {"work": WELL, "why": plain(finished.unstored, WHY_CHARS_MAX)}
        case ReportExit() as failed:
            return {"work": FAILED, "why": f"rank {failed.rank} on {failed.node} failed"}
    return {"work": WORKS if agent.working else "", "why": ""}


class Standing(NamedTuple):
    """How all nodes of a job fare."""

    alone: bool
    """No node hears a master."""
    work: str
    """`WORKS` while a worker may still do something; `WELL`, `FAILED`; empty: nothing was begun."""
    why: str = ""
    """What failed; of work that ended well, why its last state is not on storage, or nothing."""


def standing(nodes: Mapping[str, Mapping[str, Any]]) -> Standing:
    """How a job fares by what its launcher knows of its nodes."""
    alone = all(one.get("alone") or one["phase"] != "running" for one in nodes.values())
    for name, one in nodes.items():
        if one["phase"] == "failed":
            return Standing(alone, FAILED, f"node {name} failed")
    by = {work: [one for one in nodes.values() if one.get("work") == work] for work in (FAILED, WORKS, WELL)}
    for work, found in by.items():
        if found:
            return Standing(alone, work, next((why for one in found if (why := one.get("why"))), ""))
    return Standing(alone, "")


def refusal(folder: Path) -> str:
    """Why a folder takes no writes; empty: it takes them. Blocks."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def folder_of(settings: Settings) -> Path:
    """Where the job's log lies."""
    parts = urlsplit(settings.log)
    if parts.scheme == "sqlite" and parts.path:
        return Path(unquote(parts.path, errors="surrogateescape")).absolute().parent
    return Path(settings.directory)


class End(NamedTuple):
    """How a job ended that no master could lead. ``failed``: why it failed; ``owed``: why its last state is not on storage."""

    failed: str = ""
    owed: str = ""


class Unled:
    """Watches for a job that nobody can lead; ``nodes`` are what is known of them, ``say`` tells people."""

    def __init__(
        self, settings: Settings, nodes: Callable[[], Mapping[str, Mapping[str, Any]]], say: Callable[[str], None]
    ) -> None:
        self._settings, self._nodes, self._say = settings, nodes, say
        self.wrong = ""
        """Why nobody can lead, while that is so."""

    async def end(self) -> End:
        """Return when the job is over though nobody leads it."""
        loop = asyncio.get_running_loop()
        work, since = "", 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            known = self._nodes()
            if not known:  # none was begun yet, or a signal ends them all
                continue
            found = standing(known)
            await self._look(alone=found.alone)
            if not self.wrong:
                since = 0.0
                continue
            if not since or found.work != work:
                work, since = found.work, loop.time()
                self._tell(found)
            if work != WORKS and loop.time() - since >= self._bound_s(work):
                return self._ended(found)

    def _bound_s(self, work: str) -> float:
        """How long work that is done waits for its log; what failed, as a node that is silent does."""
        return UNLED_S if work == WELL else self._settings.job.unreachable_s

    async def _look(self, *, alone: bool) -> None:
        before, folder = self.wrong, folder_of(self._settings)
        why = ""
        if alone:
            try:
                why = await within(PROBE_S, asyncio.to_thread(refusal, folder))
            except asyncio.TimeoutError:
                why = f"no answer within {PROBE_S:g} s"
            except RuntimeError:  # no thread to look in: nothing is known
                why = ""
        self.wrong = f"{plain(str(folder))} takes no writes ({why})" if why else ""
        name = self._settings.job.job
        if self.wrong and not before:
            self._say(
                f"no master can lead job {name}: {self.wrong}; training goes on, but who fails is not restarted: free room "
                "there, or make the disk writable, and a master leads again by itself"
            )
        elif before and not self.wrong:
            self._say(f"job {name} can be led again")

    def _tell(self, found: Standing) -> None:
        if found.work == FAILED or not found.work:
            what = f"{found.why}, and cannot be restarted" if found.work else "no worker runs, and none can be started"
            remedy = "unless the log can be written to until then (--set unreachable_s=SECONDS waits longer)"
            self._say(f"{what}: the job ends in {self._bound_s(found.work):g} s {remedy}")

    def _ended(self, found: Standing) -> End:
        if found.work == WELL:
            missing = f"; {found.why}" if found.why else ""
            self._say(f"all workers ended well, which the log cannot take: {self.wrong}{missing}")
            return End(owed=found.why)
        why = f"{found.why or 'no worker could be started'}, and nobody could lead it: {self.wrong}"
        return End(failed=why)

"""Our memory control group: how often the OOM killer took a process of it, and whether its limit was the reason.

Version 2 counts in ``memory.events``, version 1 in ``memory.oom_control`` and ``memory.failcnt``. A kill is counted in the group
of its victim, whosever shortage it was: the host's, or that of a limit here or above. So the limits that can be seen from here
are looked at as well; where there is none, or none was ever reached, the host itself ran out.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import NamedTuple

from dlrover_core.diagnosis.sightings import SECOND_US

ROOT = Path("/")
LIMIT_BYTES_MAX = 2**60  # version 1 says "no limit" by a number close to 2**63
DEATH_S = 2.0
"""A kill and the death that it caused are noticed at most this far apart."""

SIGKILLED = -9


class Memory(NamedTuple):
    """``kills`` of processes of our group so far, and how often a limit was reached that can be seen from here."""

    kills: int
    pressed: int


class MemoryGroup:
    """Our group, or none (`found`). ``folders``: it and those above, as far as they can be seen."""

    def __init__(self, version: int, folders: list[Path], name: str) -> None:
        self.version, self.folders, self.name = version, folders, name
        self._limits = [one for one in folders if _limited(version, one)]

    @property
    def limited(self) -> bool:
        """Is there a limit that can be seen from here?"""
        return bool(self._limits)

    def look(self) -> Memory:
        """Count now. Raises `OSError` where the group is gone."""
        if self.version == 2:
            events = [_table(one / "memory.events") for one in (self.folders[0], *self._limits)]
            return Memory(events[0].get("oom_kill", 0), sum(one.get("oom", 0) for one in events[1:]))
        kills = _table(self.folders[0] / "memory.oom_control").get("oom_kill", 0)
        return Memory(kills, sum(int((one / "memory.failcnt").read_text()) for one in self._limits))


def found(root: Path = ROOT) -> MemoryGroup | None:
    """The group that this process is in; None where no kills are counted."""
    try:
        lines = os.fsdecode((root / "proc/self/cgroup").read_bytes()).split("\n")
    except OSError:
        return None
    base = root / "sys/fs/cgroup"
    for line in filter(None, lines):
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            mounts, version, counter = [base, base / "unified"], 2, "memory.events"
        elif "memory" in controllers.split(","):
            mounts, version, counter = [base / controllers, base / "memory"], 1, "memory.oom_control"
        else:
            continue
        inside = Path(name.lstrip("/"))
        for mount in mounts:
            # In a container the name may be the host's, and only the mount's own root is there.
            folders = [mount / one for one in (inside, *inside.parents) if (mount / one / counter).exists()]
            if folders:
                return MemoryGroup(version, folders, name if folders[0] == mount / inside else "")
    return None


def _limited(version: int, folder: Path) -> bool:
    try:
        limit = (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).read_text().strip()
    except OSError:
        return False
    return limit.isdigit() and int(limit) < LIMIT_BYTES_MAX


def _table(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


class Killed(NamedTuple):
    """The OOM killer took ``rank`` (-1: so many ``processes`` of ours that are no workers). ``limit``: a limit's doing."""

    generation: int
    rank: int
    processes: int
    limit: bool


class Kills:
    """Brings kills that were counted and workers that died of SIGKILL together, whichever is heard first."""

    def __init__(self) -> None:
        self._before: Memory | None = None
        self._first: Memory | None = None
        self._dead: deque[tuple[int, int, int]] = deque(maxlen=64)
        self._untold, self._untold_at, self._limit = 0, 0, False

    def counted(self, memory: Memory, now: int) -> list[Killed]:
        """The counters say this now."""
        if self._before is None or self._first is None:
            self._before = self._first = memory
            return []
        rose, self._before = memory.kills - self._before.kills, memory
        if rose > 0:
            self._untold += rose
            self._untold_at, self._limit = now, memory.pressed > self._first.pressed
        return self._matched(now)

    def died(self, generation: int, rank: int, now: int) -> list[Killed]:
        """A worker died of SIGKILL, and nobody of ours had sent it."""
        self._dead.append((generation, rank, now))
        return self._matched(now)

    def due(self, now: int) -> list[Killed]:
        """Kills for which no worker's death was heard."""
        if not self._untold or now - self._untold_at < DEATH_S * SECOND_US:
            return []
        count, self._untold = self._untold, 0
        return [Killed(0, -1, count, self._limit)]

    def _matched(self, now: int) -> list[Killed]:
        while self._dead and now - self._dead[0][2] > DEATH_S * SECOND_US:
            self._dead.popleft()
        told: list[Killed] = []
        while self._untold and self._dead:
            generation, rank, _ = self._dead.popleft()
            self._untold -= 1
            told.append(Killed(generation, rank, 1, self._limit))
        return told

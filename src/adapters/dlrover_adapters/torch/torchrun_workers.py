"""Seeing the workers of torch's elastic agent from inside its process, without touching them.

They are children of this process, so their deaths can be had as the kernel has them: a pidfd fires at once, and a look that does
not reap (``WNOWAIT``) tells the exit code before torch collects it. Who is who says the environment they were born with.
Under ``--run-path`` there is nothing to see there, and torch's own words have to do.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from .torchrun_desk import Seen

RUN, RANK, LOCAL_RANK, LOCAL_SIZE = "TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
RESTARTS, RESTARTS_MAX, ERROR_FILE = (
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_ERROR_FILE",
)


class _Child(NamedTuple):
    pid: int
    born: int
    environment: dict[str, str]


def find(run: str, first_rank: int) -> tuple[Seen, ...]:
    """The workers of this process that belong to ``run``, each with a pidfd that the caller owns.

    One that died before it could be looked at has no environment any more: it gets the rank that is missing, or ``first_rank``,
    and where no sibling knows whether it was the last, nobody does.
    """
    children = sorted(_children(), key=lambda child: child.born)
    known = [
        child for child in children if child.environment.get(RUN) == run and child.environment.get(RANK, "").isdecimal()
    ]
    ranks = {int(child.environment[RANK]) for child in known}
    size = int(known[0].environment.get(LOCAL_SIZE, "1")) if known else 1
    # Ranks of a node are one block.
    base = int(known[0].environment[RANK]) - int(known[0].environment.get(LOCAL_RANK, "0")) if known else first_rank
    missing = [rank for rank in range(base, base + size) if rank not in ranks]
    found = [_seen(child) for child in known]
    dead = [child for child in children if not child.environment]
    # The youngest: older ones are not of this generation.
    for child, rank in zip(dead[-len(missing) :] if missing else (), missing, strict=False):
        last = _last(known[0]) if known else None
        found.append(_watched(Seen(child.pid, -1, rank, last)))
    return tuple(one for one in found if one.pidfd >= 0)


def exit_code(pidfd: int) -> int | None:
    """How it ended, negative for a signal; None where torch has collected it first, or it lives."""
    try:
        told = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except OSError:
        return None
    if told is None:
        return None
    return told.si_status if told.si_code == os.CLD_EXITED else -told.si_status


def _seen(child: _Child) -> Seen:
    told = child.environment
    return _watched(Seen(child.pid, -1, int(told[RANK]), _last(child), told.get(ERROR_FILE, "")))


def _last(child: _Child) -> bool:
    return child.environment.get(RESTARTS, "") == child.environment.get(RESTARTS_MAX, "-")


def _watched(seen: Seen) -> Seen:
    try:
        return seen._replace(pidfd=os.pidfd_open(seen.pid))
    except OSError:  # collected meanwhile: torch will say what became of it
        return seen


def _children() -> list[_Child]:
    found = (_child(int(entry.name), os.getpid()) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return [child for child in found if child is not None]


def _child(pid: int, parent: int) -> _Child | None:
    """The process, if it is a child of ``parent``; without environment if it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if int(fields[1]) != parent:
            return None
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    except (OSError, IndexError, ValueError):
        return None  # gone between the listing and the look
    return _Child(pid, int(fields[19]), dict(word.split("=", 1) for word in words if "=" in word))

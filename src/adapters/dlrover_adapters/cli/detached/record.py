"""What a detached job has in its directory: how it was started, and how it ended."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RECORD, OUTPUT, ENDED = "detached.json", "output.log", "ended.json"


@dataclass(frozen=True, slots=True)
class Record:
    """How a job was started: enough to start it again.

    ``mark``: of this start, as in `Settings`; ``counts`` and ``standby``: agents by group; ``cwd``: the workers' folder;
    ``where``: the options that lead `dlrover` to it.
    """

    mark: str
    counts: Mapping[str, int]
    standby: Mapping[str, int] = field(default_factory=dict)
    cwd: str = "/"
    where: str = ""

    def write(self, directory: Path) -> None:
        """Write it down whole; what an earlier start left is gone then."""
        (directory / ENDED).unlink(missing_ok=True)
        put(directory / RECORD, asdict(self))


def read(directory: Path) -> Record | None:
    """The record of a job's last detached start; None: it has none that can be read."""
    found = _json(directory / RECORD)
    return Record(**found) if found else None


def ended(directory: Path, mark: str) -> int | None:
    """The exit status of the start with this mark; None: it has not ended."""
    found = _json(directory / ENDED)
    return int(found["status"]) if found.get("mark") == mark else None


def lives(directory: Path) -> bool:
    """Does a launcher, a detached one or its sweeper hold the job?"""
    try:
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def lost(state_dir: Path | None, job: str, run: str = "") -> str:
    """That nothing of a job of this host runs any more, and what goes on with it, in words; empty: not so, or not known.

    ``run``: the run that its log has; empty: whichever this host has started last.
    """
    from dlrover_core.logs.place import default_state_dir

    directory = (state_dir.absolute() if state_dir else default_state_dir()) / "jobs" / job
    settings, known = _json(directory / "settings.json"), read(directory)
    elsewhere = settings.get("backend") or settings.get("joining")
    if not settings or elsewhere or (run and settings.get("run") != run) or lives(directory):
        return ""
    what = f"nothing of job {job} runs any more, and it has not ended"
    if known is None or known.mark != settings.get("mark"):
        return f"{what}; its dlrover-run line, said again, starts it anew"
    if ended(directory, known.mark) is not None:
        return ""
    return f"{what}; dlrover-run --resume {job}{known.where} goes on with it"


def put(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file whole or not at all, readable by this user alone."""
    part = path.with_suffix(".part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(values, file)
    part.replace(path)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

"""What the kernel tells of a process: its state, what it waits in, whether it works. Blocking; called off the loop."""

from __future__ import annotations

import os
from typing import NamedTuple

from dlrover_core.runtime.watchdog import Seen

TICKS_S = os.sysconf("SC_CLK_TCK")
TEXT_BYTES_MAX = 16 * 1024
_FIELDS = ("status", "wchan", "syscall", "stack")


class Look(NamedTuple):
    """One look at a worker. ``cpu_s`` and ``io_bytes`` are its whole session's so far; ``state`` empty: it is gone."""

    state: str
    wchan: str
    cpu_s: float
    io_bytes: int
    on_gpu: bool


def look(pid: int) -> Look:
    """Look at a worker, the leader of its session."""
    stat = _stat(pid)
    cpu, io = 0, 0
    for other in _pids():
        told = _stat(other)
        if len(told) > 12 and told[3] == str(pid):
            cpu += int(told[11]) + int(told[12])
            io += _io(other)
    return Look(stat[0] if stat else "", _read(f"/proc/{pid}/wchan").strip(), cpu / TICKS_S, io, _on_gpu(pid))


def seen(pid: int) -> Seen:
    """What a watchdog asks of one process. Two short files of /proc: quick enough for an event loop."""
    stat = _stat(pid)
    if len(stat) < 13:
        return Seen()
    tracer = _fields(pid).get("TracerPid", "0")
    return Seen(stat[0].upper(), (int(stat[11]) + int(stat[12])) / TICKS_S, int(tracer) if tracer.isdecimal() else 0)


def _fields(pid: int) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in _read(f"/proc/{pid}/status").splitlines() if ":\t" in line)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _stat(pid: int) -> list[str]:
    """From the state on; empty for a process that is gone."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _io(pid: int) -> int:
    """Bytes read and written by any call."""
    fields = dict(line.split(": ", 1) for line in _read(f"/proc/{pid}/io").splitlines() if ": " in line)
    return int(fields.get("rchar", 0)) + int(fields.get("wchar", 0))


def _on_gpu(pid: int) -> bool:
    """Whoever waits for a GPU may spin all the while: that is no work."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as fds:
            return any(os.readlink(one.path).startswith("/dev/nvidia") for one in fds)
    except OSError:
        return False


def catches(pid: int, number: int) -> bool:
    """Does the process handle this signal? One that does not dies of it; False also where nobody can say."""
    try:
        return bool(int(_fields(pid)["SigCgt"], 16) >> (number - 1) & 1)
    except (KeyError, ValueError):
        return False


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(TEXT_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""


def source_line(pid: int, file: str, number: int) -> str:
    """A line of a program as the process would find it; empty where it cannot be read."""
    path = file if os.path.isabs(file) else os.path.join(f"/proc/{pid}/cwd", file)
    try:
        with open(path, encoding="utf-8", errors="replace") as text:
            return next((line.strip() for at, line in enumerate(text, 1) if at == number), "")
    except OSError:
        return ""


def details(pid: int) -> str:
    """What the kernel says of it and of its threads, for people."""
    parts = [f"/proc/{pid}/{name}:\n{told}" for name in _FIELDS if (told := _read(f"/proc/{pid}/{name}").rstrip())]
    try:
        tasks = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        tasks = []
    rows = []
    for task in tasks[:64]:
        stat, wchan = _read(f"/proc/{pid}/task/{task}/stat"), _read(f"/proc/{pid}/task/{task}/wchan").strip()
        rows.append(
            f"{task} {stat.partition('(')[2].rpartition(')')[0]} {(stat.rpartition(')')[2].split() or ['?'])[0]} {wchan}"
        )
    return "\n".join([*parts, "threads (number, name, state, what it waits in):", *rows])

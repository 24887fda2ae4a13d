"""The kernel's log of this machine, from now on: GPUs that fall off the bus, disks, links, and whom the OOM killer chose.

``/dev/kmsg`` gives one record a read: ``PRIORITY,NUMBER,MICROSECONDS,FLAGS;TEXT``, then lines of details that begin with a space.
It belongs to the whole machine: records that programs wrote into it are not the kernel's, and what happened to another
container's processes is not about us. Where it cannot be read (no privilege, a sandbox without one) there is none.
"""

from __future__ import annotations

import os
import re
import stat
from typing import NamedTuple

KMSG = "/dev/kmsg"
VARIABLE = "DLROVER_KERNEL_LOG"
"""Another file or FIFO with records of the same form; ``off``: none is read."""

RECORD_BYTES_MAX = 8192  # the kernel's own bound; a smaller buffer is refused
RECORDS_MAX = 512
FACILITY_BITS = 3
DIGITS_MAX = 20  # of 64 bits

_KILLED = re.compile(r"Killed process (\d+) \(")
_CHOSEN = re.compile(r"oom-kill:constraint=(\w+)")
_TASK_GROUP = re.compile(r"task_memcg=([^,]+)")
_PID = re.compile(r"\bpid=([0-9]{1,10})(?![0-9])|\[([0-9]{1,10})\]: segfault|Killed process ([0-9]{1,10}) \(")


class KernelLine(NamedTuple):
    """One line. ``at_us``: on the monotonic clock."""

    text: str
    at_us: int


class KernelLog:
    """A reader at its end. Raises `OSError` where there is none to read."""

    def __init__(self, path: str = KMSG) -> None:
        self.path, self.lost = path, 0
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._begun = b""
        self._looked_us = 0
        try:
            if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):
                os.lseek(self._fd, 0, os.SEEK_END)  # what was before us explains nothing of ours
        except OSError:
            os.close(self._fd)
            raise

    def read(self, now_us: int) -> list[KernelLine]:
        """What is new, at most so much as a look can take."""
        found: list[KernelLine] = []
        since, self._looked_us = self._looked_us or now_us, now_us
        for _ in range(RECORDS_MAX):
            try:
                data = os.read(self._fd, RECORD_BYTES_MAX)
            except BrokenPipeError:  # the ring overran us: what was overwritten is gone
                self.lost += 1
                continue
            except BlockingIOError:
                break
            if not data:
                break
            *lines, self._begun = (self._begun + data).split(b"\n")
            self._begun = self._begun[-RECORD_BYTES_MAX:]
            for raw in lines:
                line = parsed(raw)
                if line is not None:
                    # The kernel's stamps drift from the clock; what is new now was written since the last look.
                    found.append(line._replace(at_us=min(max(line.at_us, since), now_us)))
        return found

    def close(self) -> None:
        """Read no more."""
        os.close(self._fd)


def parsed(raw: bytes) -> KernelLine | None:
    """One record; None for details, for what programs wrote, and for what is no record."""
    head, semicolon, text = raw.partition(b";")
    fields = head.split(b",")
    if not semicolon or raw[:1] == b" " or len(fields) < 3 or not all(map(_number, fields[:3])):
        return None
    if int(fields[0]) >> FACILITY_BITS != 0:
        return None
    return KernelLine(text.decode("utf-8", errors="replace"), int(fields[2]))


def _number(field: bytes) -> bool:
    return field.isdigit() and len(field) <= DIGITS_MAX


class Ours:
    """Of the lines about processes, those that are about ours.

    ``group``: the path of our memory group as the kernel prints it, empty where that cannot be known; ``numbers``: are the pids
    in those lines the ones that we see?
    """

    def __init__(self, group: str = "", *, numbers: bool = True) -> None:
        self._group, self._numbers = group.rstrip("/"), numbers
        self._chosen: bool | None = None  # by the line before: is the victim ours, as far as that line can tell?

    def keeps(self, text: str, ranks: dict[int, int]) -> bool:
        """Is this line, the next of the log, about us? ``ranks``: of our workers, by pid."""
        if "invoked oom-killer:" in text:
            return False  # who asked for memory; whom it cost is told a few lines below
        chosen = _CHOSEN.search(text)
        if chosen is not None:
            group = _TASK_GROUP.search(text)
            self._chosen = chosen[1] != "CONSTRAINT_MEMCG" or self._mine(group[1] if group else "")
            return False
        if _KILLED.search(text) is None:
            return True
        mine, self._chosen = self._chosen, None
        if self.rank(text, ranks) >= 0:
            return True
        # A shortage of the host is everybody's. That of a group is its own, and ours is counted in our group anyway.
        return mine is True if "Memory cgroup" in text else mine is not False

    def rank(self, text: str, ranks: dict[int, int]) -> int:
        """The rank of the process that the line names, or -1."""
        named = _PID.search(text) if self._numbers else None
        return ranks.get(int(next(filter(None, named.groups()))), -1) if named is not None else -1

    def _mine(self, group: str) -> bool:
        return bool(self._group) and (group == self._group or group.startswith(f"{self._group}/"))


def sees_all_pids() -> bool:
    """Are pids here the kernel's own? In a container with a pid namespace they are not."""
    try:
        return os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"  # PROC_PID_INIT_INO, fixed in the kernel
    except OSError:
        return False


def chosen_path(environ: dict[str, str]) -> str:
    """The file to read; empty: none."""
    told = environ.get(VARIABLE, KMSG)
    return "" if told == "off" else told

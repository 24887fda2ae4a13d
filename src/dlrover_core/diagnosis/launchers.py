"""What launchers and schedulers say of processes that ended: whose, where, and how.

torch's elastic agent and its summary, DeepSpeed, mp.spawn, Open MPI, Hydra and srun each have a form. What they tell is what
a job's own agent would: this rank on this host ended with this code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dlrover_core.diagnosis import clock, who


class Ended(NamedTuple):
    """One process that ended.

    ``line``: the index of the line that says so; ``rank``, ``local``: -1 where it is not said; ``code``: negative for a signal;
    ``before_s``: so long before the summary's last end; ``first``: the launcher takes it for the first failure.
    """

    line: int
    code: int
    rank: int = -1
    local: int = -1
    host: str = ""
    pid: int = 0
    before_s: float = 0.0
    first: bool = False


_SIGNALS = {
    "Killed": -9, "Terminated": -15, "Segmentation fault": -11, "Bus error": -7, "Aborted": -6, "Illegal instruction": -4,
    "Floating point exception": -8, "Out Of Memory": -9, "SIGKILL": -9, "SIGTERM": -15, "SIGSEGV": -11, "SIGBUS": -7,
    "SIGABRT": -6, "SIGFPE": -8, "SIGILL": -4, "SIGINT": -2,
}  # fmt: skip
_FIELD = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*: ?(.*)")
_LOCAL = re.compile(r"(\d+) \(local_rank: (\d+)\)")
_CODE = re.compile(r"(-?\d+) +\(pid: (\d+)\)")
_ROOT = re.compile(r"Root Cause(?: \(first observed failure\))?:?")
_ONE = tuple(
    re.compile(one)
    for one in (
        r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)",
        r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<host>[\w.-]+) exited on signal (?P<signal>\d+)",
        r"^(?P<host>[\w.-]+): rank (?P<rank>\d+) (?:died from signal (?P<signal>\d+)|exited with code (?P<code>\d+))",
        r"--local[_-]rank=(?P<local>\d+)\b.* exits with return code = (?P<code>-?\d+)",
        r"exits with return code = (?P<code>-?\d+)",
        r"\b[Rr]ank (?P<rank>\d+) (?:\(PID (?P<pid>\d+)\) )?(?:crashed with exit code|exited with code) (?P<code>-?\d+)",
        r"--local[_-]rank=(?P<local>\d+)\b.* died with <Signals\.(?P<name>SIG[A-Z]+)",
        r"--local[_-]rank=(?P<local>\d+)\b.* returned non-zero exit status (?P<code>\d+)",
        r"CalledProcessError: .* died with <Signals\.(?P<name>SIG[A-Z]+)",
        r"CalledProcessError: .* returned non-zero exit status (?P<code>-\d+|1[2-5]\d)\b",
        r"\bContainer rank (?P<rank>\d+) status failed\b.* code (?P<code>-?\d+) log ",
        r"process was signaled to shutdown with signal (?P<signal>\d+) rank=(?P<rank>\d+)",
        r"-- Process (?P<rank>\d+) terminated with the following (?P<error>error)",
        r"\b[Pp]rocess (?P<rank>\d{1,5}) terminated with (?:signal (?P<name>SIG[A-Z]+)|exit code (?P<code>\d+))",
    )
)
_SRUN = re.compile(
    r"srun: error: (?P<hosts>[\w.,\[\]-]+): tasks? (?P<ranks>[\d,\-]+): (?P<how>Exited with exit code (?P<code>\d+)"
    r"|[A-Z][A-Za-z ]+?)(?: \(core dumped\))?\s*$"
)
_MPI_NAME = re.compile(r"^\s*Process name: \[\[\d+,\d+\],(?P<rank>\d+)\]")
_MPI_CODE = re.compile(r"^\s*Exit code:\s+(?P<code>\d+)")
_HYDRA = re.compile(r"(?:RANK (?P<rank>\d+) )?\bPID (?P<pid>\d+) RUNNING AT (?:[\w.-]+@)?(?P<host>[\w.-]+)")
# MPICH's process manager prints the status as the system has it: as an exit code, these are rather signals. Others are told by
# what it prints below.
_HYDRA_SIGNALS = frozenset((9, 11, 15))
_HYDRA_HOW = re.compile(r"(?:KILLED BY SIGNAL|EXIT CODE|EXIT STATUS): (?P<number>\d+)")
_HYDRA_STRING = re.compile(r"EXIT STRING: .{0,60}\(signal (?P<signal>\d+)\)")
_HYDRA_LINES = 8
# So many signals there are: a shell's code of one is 128 and its number.
SIGNALS_MAX = 64


def ends(lines: Sequence[str]) -> list[Ended]:
    """All that is said of ends in the lines, in order of the lines."""
    return sorted([*_summaries(lines), *_singles(lines)], key=lambda one: one.line)


def _singles(lines: Sequence[str]) -> Iterator[Ended]:
    named = -1
    hydra: re.Match[str] | None = None
    for number, line in enumerate(lines):
        if "srun: error:" in line:
            yield from _srun(number, line)
            continue
        for pattern in _ONE:
            found = pattern.search(line)
            if found is not None:
                said = {name: value for name, value in found.groupdict().items() if value}
                yield Ended(
                    number,
                    _code(said),
                    int(said.get("rank", -1)),
                    int(said.get("local", -1)),
                    said.get("host", ""),
                    int(said.get("pid", 0)),
                )
                break
        rank = _MPI_NAME.match(line)
        named = int(rank["rank"]) if rank else named
        code_of = _MPI_CODE.match(line) if named >= 0 else None
        if code_of is not None:
            yield Ended(number, int(code_of["code"]), named)
            named = -1
        hydra = _HYDRA.search(line) or hydra
        how = _HYDRA_HOW.search(line) if hydra is not None else None
        if how is not None and hydra is not None:
            yield Ended(
                number,
                _hydra_code(how[0], int(how["number"]), lines[number + 1 : number + 1 + _HYDRA_LINES]),
                int(hydra["rank"] or -1),
                -1,
                hydra["host"],
                int(hydra["pid"]),
            )
            hydra = None


def _hydra_code(how: str, number: int, below: Sequence[str]) -> int:
    """The code of an end that Hydra reports: a signal negative."""
    if 128 < number <= 128 + SIGNALS_MAX:
        return 128 - number
    if "SIGNAL" in how:
        return -number
    signalled = ("CODE" in how and number in _HYDRA_SIGNALS) or any(
        int(said["signal"]) == number for said in map(_HYDRA_STRING.search, below) if said is not None
    )
    return -number if signalled else number


def _code(said: dict[str, str]) -> int:
    """How it ended, by whatever the launcher says of that."""
    if "error" in said:
        return 1
    if "code" in said:
        return int(said["code"])
    return -int(said["signal"]) if "signal" in said else _SIGNALS.get(said["name"], -9)


def _srun(number: int, line: str) -> Iterator[Ended]:
    found = _SRUN.search(line)
    if found is None:
        return
    code = int(found["code"]) if found["code"] else _SIGNALS.get(found["how"].strip())
    if code is None:
        return
    code = 128 - code if 128 < code <= 160 else code
    hosts = who.nodes(found["hosts"])
    for rank in who.ranks(found["ranks"]):
        yield Ended(number, code, rank, -1, hosts[0] if len(hosts) == 1 else "")


def _summaries(lines: Sequence[str]) -> Iterator[Ended]:
    """What the summary of torch's elastic agent lists, by its own times."""
    entries: list[tuple[int, dict[str, str], bool]] = []
    fields: dict[str, str] = {}
    root = False
    for number, line in enumerate(lines):
        if "Root Cause" in line and _ROOT.search(line):
            root = True
        elif root and line.startswith("===="):
            root = False
        found = _FIELD.match(line)
        if found is None:
            continue
        if found[1] in fields:
            fields = {}
        fields[found[1]] = found[2].strip()
        if found[1] == "traceback" and "exitcode" in fields and "rank" in fields:
            entries.append((number, fields, root))
            fields = {}
    times = {number: at.at_s for number, said, _ in entries if (at := clock.moment(said.get("time", ""))) is not None}
    last = max(times.values(), default=0.0)
    for number, said, first in entries:
        rank, code = _LOCAL.match(said["rank"]), _CODE.match(said["exitcode"])
        if rank is None or code is None:
            continue
        before = last - times[number] if number in times else 0.0
        yield Ended(number, int(code[1]), int(rank[1]), int(rank[2]), said.get("host", ""), int(code[2]), before, first)

"""From the command to the first step: how long does a job take to begin?

The same DDP/gloo script (`scripts/ddp_step.py`) with 2 workers under `dlrover-run` and under `torchrun --standalone` of an
environment of its own, in turn. Measured is the time from the moment when the command is executed to the moment when both
ranks have completed the first step, by CLOCK_MONOTONIC. One run of each comes before those that count, so that byte code is
compiled and files are in the page cache: what is compared is starting, not reading a disk.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from _bench import A_JOB, BROKEN, Result, Row, median, options, say
from _jobs import OURS, TORCHRUN, Broken, Line, peer_python, running

MEASURES = (*A_JOB, "src/adapters/dlrover_adapters/torch", "src/dlrover_core/host")

TARGET = 0.7
PHASES = ("begin", "imported", "grouped", "ready", "step")


class Start(NamedTuple):
    """Seconds from the command: to the first common step, and to each point on the way (the last rank's)."""

    step_s: float
    marks: Mapping[str, float]


def start(launcher: str) -> Start:
    """One short job."""
    with running(launcher, ["--steps", "3", "--pause", "0"]) as job:
        code = job.wait()
        lines = job.lines()
        if code != 0:
            raise Broken(f"{launcher} ended with {code}; it said: {job.said()}")
        marks = {what: reached(lines, what) - job.started for what in PHASES}
        return Start(marks["step"], marks)


def reached(lines: Sequence[Line], what: str) -> float:
    """When the last of both ranks had come there for the first time."""
    firsts: dict[int, float] = {}
    for line in lines:
        if line.what == what:
            firsts.setdefault(line.rank, line.at)
    if len(firsts) != 2:
        raise Broken(f"{len(firsts)} ranks came to {what!r}")
    return max(firsts.values())


def main() -> int:
    """Trials in turn."""
    chosen = options(__doc__, trials=10)
    result = Result("cold_start", "torchrun --standalone (torch 2.13.0, its own environment)")
    found: dict[str, list[Start]] = {OURS: [], TORCHRUN: []}
    try:
        peer_python()
        for launcher in found:
            say(f"{launcher}, not counted: {start(launcher).step_s:.2f} s")
        for number in range(chosen.trials):
            for launcher, those in found.items():
                those.append(start(launcher))
                say(f"{number + 1}/{chosen.trials} {launcher}: first step after {those[-1].step_s:.2f} s")
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    ours, peer = ([one.step_s for one in those] for those in found.values())
    begun, peer_begun = ([one.marks["begin"] for one in those] for those in found.values())
    rest, peer_rest = ([one.step_s - one.marks["begin"] for one in those] for those in found.values())
    result.rows += [
        Row("command to first common step", "s", ours, peer, TARGET, "ratio"),
        Row("command to the scripts' first line", "s", begun, peer_begun),
        Row("first line to first common step", "s", rest, peer_rest),
    ]
    result.notes.append("caches are warm: each was run once before")
    result.details = {
        name: {what: median([one.marks[what] for one in those]) for what in PHASES}
        for name, those in (("ours_s", found[OURS]), ("torchrun_s", found[TORCHRUN]))
    }
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())

"""What does looking for signs of failures cost a running script?

The same script (`scripts/fixed_work.py`), 2 ranks of DDP over gloo with 20 ms of matrix products a step, each printing some lines
a step, under `dlrover-run` with ``--detect on`` and with ``--detect off``, in turn: ABAB. The work is counted, not timed, and
with as many ranks as cores every microsecond of a detector is taken from the script.

Measured is the time of a step from the end of step 30 to the end of the last one, by rank 0, all in all and by the median step;
the figures are ratios of medians, on over off. A machine that others use drifts by more than what is looked for, so the
processor time of the agent itself is told too: what it takes from the script, as a share of one core.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from _bench import A_JOB, BROKEN, Result, Row, median, options, say
from _jobs import OURS, Broken, Job, marked, running
from bench_overhead import SCRIPT, WARM_UP, calibrate

if TYPE_CHECKING:
    from typing_extensions import Self

MEASURES = (*A_JOB, "src/adapters/dlrover_adapters/torch", "src/dlrover_core/diagnosis", "src/dlrover_core/host")

TARGET = 1.01
LOOK_S = 0.25
SIDES = ("on", "off")


class Pace(NamedTuple):
    """Of one job: milliseconds a step all in all and by the median, and the agent's share of a core."""

    step_ms: float
    median_ms: float
    agent_percent: float


def processor_s(pid: int) -> float:
    """Processor time of all threads of a process, in seconds; 0 when it is gone."""
    with contextlib.suppress(OSError):
        tasks = [(one / "schedstat").read_text() for one in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int(one.split()[0]) for one in tasks) / 1e9
    return 0.0


class AgentMeter:
    """Reads the agent's processor time now and then, between the first worker's warm-up and its end."""

    def __init__(self, job: Job) -> None:
        self._job, self._ended = job, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seen: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        agent = 0
        while not self._ended.wait(LOOK_S):
            agent = agent or next((pid for pid in marked(self._job.mark) if _name(pid) == "dlrover-agent"), 0)
            used = processor_s(agent) if agent else 0.0
            if used:
                self.seen.append((time.monotonic(), used))

    def percent(self, begin_s: float, end_s: float) -> float:
        """Of one core, between two times of the monotonic clock."""
        within = [one for one in self.seen if begin_s <= one[0] <= end_s]
        if len(within) < 2:
            return 0.0
        (first, before), (last, after) = within[0], within[-1]
        return (after - before) / (last - first) * 100


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def pace(side: str, work: int, steps: int, lines: int) -> Pace:
    """One job."""
    launch = ["--nproc-per-node", "2", "--detect", side]
    arguments = ["--work", str(work), "--steps", str(steps + WARM_UP), "--lines", str(lines)]
    with running(OURS, arguments, launch, script=SCRIPT) as job, AgentMeter(job) as meter:
        code = job.wait()
        if code != 0:
            raise Broken(f"--detect {side} ended with {code}; it said: {job.said()}")
        ends = [int(line) / 1e9 for line in job.diary.read_text().split()][WARM_UP - 1 :]
    each = [after - before for before, after in pairwise(ends)]
    whole = (ends[-1] - ends[0]) / len(each)
    return Pace(whole * 1e3, median(each) * 1e3, meter.percent(ends[0], ends[-1]))


def main() -> int:
    """Trials in turn."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--steps", type=int, default=500, metavar="N", help="steps of a trial (default 500: 10 s)")
        parser.add_argument(
            "--lines", type=int, default=5, metavar="N", help="lines each rank prints a step (default 5)"
        )

    chosen = options(__doc__, trials=15, more=more)
    result = Result("detectors", "--detect off")
    found: dict[str, list[Pace]] = {side: [] for side in SIDES}
    try:
        work = calibrate()
        say(f"{work} matrix products a step")
        for number in range(chosen.trials):
            # Who goes first changes: whatever drifts, drifts for both.
            for side in sorted(found, reverse=bool(number % 2)):
                found[side].append(pace(side, work, chosen.steps, chosen.lines))
                one = found[side][-1]
                say(
                    f"{number + 1}/{chosen.trials} {side}: {one.step_ms:.3f} ms a step, agent {one.agent_percent:.2f} %"
                )
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    on, off = found["on"], found["off"]
    result.rows += [
        Row("a 20 ms step", "ms", [one.step_ms for one in on], [one.step_ms for one in off], TARGET, "ratio"),
        Row("the median step", "ms", [one.median_ms for one in on], [one.median_ms for one in off], TARGET, "ratio"),
        Row("processor time of the agent", "%", [one.agent_percent for one in on], [one.agent_percent for one in off]),
    ]
    by_pairs = [mine.step_ms / other.step_ms for mine, other in zip(on, off, strict=True)]
    result.details = {
        "products_per_step": work,
        "steps": chosen.steps,
        "lines_per_step_and_rank": chosen.lines,
        "median_of_paired_ratios": median(by_pairs),
    }
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())

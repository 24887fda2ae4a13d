"""Is this tree as fast as an older one? ``python -m tools.before_after --old COMMIT``.

Runs both, in turn, with the packages of this environment: cold start (command to the first step of both ranks), SIGKILL of a
worker to the next step of both (several in one job, their median), steps per second of a 20 ms script. The older one's sources
come from git. Each round is a pair, and who goes first changes. The figure is the median of the pairs' ratios, above 1 where this
tree is faster, with its interval (`tools.figures`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT / "benchmarks") not in sys.path:
    sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_cold_start  # noqa: E402
import bench_overhead  # noqa: E402
from _bench import BROKEN, Result, Row, median, number, options, say  # noqa: E402
from _jobs import OURS, Broken, Line, running  # noqa: E402

TARGET = 0.97
KILLS, STEPS_BETWEEN = 8, 15
PACE_STEPS = 200
OLD, NEW = "before", "after"
FASTER, SLOWER = 1, -1
"""Which way a figure is better: more, or less."""


@contextlib.contextmanager
def sources(commit: str) -> Iterator[Path]:
    """The tree of ``commit``, for as long as it is needed. Raises `CalledProcessError`."""
    git = shutil.which("git") or "git"
    packed = subprocess.run([git, "-C", ROOT, "archive", commit, "src"], capture_output=True, check=True).stdout
    with (
        tempfile.TemporaryDirectory(prefix="before-after-") as name,
        tarfile.open(fileobj=io.BytesIO(packed)) as archive,
    ):
        archive.extractall(name, filter="data")
        yield Path(name)


@contextlib.contextmanager
def led_by(tree: Path) -> Iterator[None]:
    """What is started meanwhile imports our packages from ``tree``."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(str(tree / "src" / one) for one in ("", "adapters", "backends"))
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def cold_start() -> float:
    """Seconds from the command to the first common step."""
    return bench_cold_start.start(OURS).step_s


def killed_worker() -> float:
    """Seconds from SIGKILL of a rank to the next step of both: the median of several in one job. Raises `Broken`."""
    found = []
    launch = ("--nproc-per-node", "2", "--max-restarts", str(KILLS))
    with running(OURS, ["--steps", "1000000"], launch) as job:
        for attempt in range(KILLS):
            lines = job.until(lambda lines, of=attempt: far(lines, of, STEPS_BETWEEN))  # type: ignore[misc]
            victim = next(one.pid for one in reversed(lines) if (one.attempt, one.rank) == (attempt, attempt % 2))
            killed = kill(victim)
            lines = job.until(lambda lines, of=attempt + 1: far(lines, of, 1))  # type: ignore[misc]
            found.append(max(firsts(lines, attempt + 1).values()) - killed)
        assert job.process is not None, "it runs"
        job.process.terminate()
        job.wait()
    return median(found)


def kill(pid: int) -> float:
    """SIGKILL; when that was."""
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return at


def firsts(lines: list[Line], attempt: int) -> dict[int, float]:
    """When each rank made its first step of an attempt."""
    found: dict[int, float] = {}
    for one in lines:
        if one.what == "step" and one.attempt == attempt:
            found.setdefault(one.rank, one.at)
    return found


def far(lines: list[Line], attempt: int, steps: int) -> bool:
    """Have both ranks made so many steps in this attempt?"""
    ranks = [one.rank for one in lines if one.what == "step" and one.attempt == attempt]
    return all(ranks.count(rank) >= steps for rank in (0, 1))


def main() -> int:
    """Rounds of pairs."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--old", required=True, metavar="COMMIT", help="the older tree, any name that git has for it"
        )
        parser.add_argument(
            "--only", choices=("cold", "killed", "overhead"), action="append", help="measure only these"
        )

    chosen = options(__doc__, trials=8, more=more)
    kinds: dict[str, tuple[str, str, int, Callable[[], float]]] = {
        "cold": ("command to first common step", "s", SLOWER, cold_start),
        "killed": ("killed worker to next step", "s", SLOWER, killed_worker),
    }
    if not chosen.only or "overhead" in chosen.only:
        work = bench_overhead.calibrate()
        kinds["overhead"] = (
            "steps per second, 20 ms script", "/s", FASTER, lambda: bench_overhead.pace(OURS, work, PACE_STEPS).median_per_s,
        )  # fmt: skip
    kinds = {name: kind for name, kind in kinds.items() if not chosen.only or name in chosen.only}
    result = Result("before_after", f"this tree at {chosen.old}")
    try:
        with sources(chosen.old) as old:
            measure(result, {OLD: old, NEW: ROOT}, kinds, chosen.trials)
    except (Broken, subprocess.CalledProcessError) as error:
        say(f"nothing measured: {error}")
        return BROKEN
    result.notes.append(
        f"before: {chosen.old}; the median of {chosen.trials} pairs' ratios, above 1 where this tree is faster"
    )
    return result.finish(chosen.json)


def measure(
    result: Result,
    trees: dict[str, Path],
    kinds: dict[str, tuple[str, str, int, Callable[[], float]]],
    pairs: int,
) -> None:
    """All figures of all pairs, as rows of the result."""
    found: dict[str, dict[str, list[float]]] = {name: {OLD: [], NEW: []} for name in kinds}
    for tree in trees.values():
        with led_by(tree):
            say(f"not counted: {cold_start():.2f} s")  # compiles byte code
    for turn in range(pairs):
        for name, (_, unit, _, once) in kinds.items():
            for which in sorted(trees, reverse=bool(turn % 2)):
                with led_by(trees[which]):
                    found[name][which].append(once())
                say(f"{turn + 1}/{pairs} {name} {which}: {number(found[name][which][-1])} {unit}")
    for name, (what, unit, better, _) in kinds.items():
        old, new = found[name][OLD], found[name][NEW]
        ratios = [(after / before) ** better for before, after in zip(old, new, strict=True)]
        result.rows += [Row(what, unit, new, old), Row("  as fast as before", "x", ratios, (), TARGET, most=False)]


if __name__ == "__main__":
    sys.exit(main())

"""Is this tree as fast as an older one? ``python -m tools.before_after --old COMMIT``.

Runs both, in turn, with the packages of this environment: cold start (command to the first step of both ranks), SIGKILL of a
worker to the next step of both (several in one job, their median), steps per second of a 20 ms script; and, each by that tree's
own benchmark, commands, heartbeats, replay, the join of 2,000 agents, a simulated job of 2,048 nodes, a crash at every place of a
history, and 16,384 nodes levelled. Where a benchmark can tell it, processor time is compared: others on the machine do not count.
The older tree comes from git. Each round is a pair, and who goes first changes. The figure is the median of the pairs' ratios,
above 1 where this tree is faster, with its interval (`tools.figures`). Rows that were not measured this time stay in the result,
each with its own date, commit and load. ``--small`` runs the benchmarks at their smallest size, to see that they work.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT / "benchmarks") not in sys.path:
    sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_cold_start  # noqa: E402
import bench_overhead  # noqa: E402
from _bench import BROKEN, RESULTS, Result, Row, median, number, options, say  # noqa: E402
from _jobs import OURS, Broken, Line, running  # noqa: E402

TARGET = 0.97
KILLS, STEPS_BETWEEN = 8, 15
PACE_STEPS = 200
OLD, NEW = "before", "after"
FASTER, SLOWER = 1, -1
"""Which way a figure is better: more, or less."""
CPU = ""
"""In the place of a row: the processor time of the whole benchmark, for a fixed amount of work."""
AS_FAST = "  as fast as before"


class Bench(NamedTuple):
    """A figure of a script of the tree. ``row``: a part of its row's name; ``small``: the arguments of its smallest size."""

    what: str
    unit: str
    row: str
    script: str
    full: tuple[str, ...]
    small: tuple[str, ...]

    def measure(self, tree: Path, *, small: bool) -> float:
        """One trial. Raises `Broken`."""
        with tempfile.TemporaryDirectory(prefix="before-after-") as folder:
            told = Path(folder) / "result.json"
            script = (ROOT if self.script.startswith("tools/") else tree) / self.script
            words = [sys.executable, script, "--trials", "1", "--json", told, *(self.small if small else self.full)]
            before = _children_s()
            done = subprocess.run(words, cwd=tree, capture_output=True, text=True, check=False)
            took_s = _children_s() - before
            if not told.exists():
                raise Broken(f"{self.script} of {tree}: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
            rows = json.loads(told.read_text(encoding="utf-8"))["rows"]
        if self.row == CPU:
            return took_s
        found = [one for one in rows if self.row in one["what"]]
        if not found:
            raise Broken(f"{self.script} of {tree} has no row {self.row!r}")
        return float(found[0]["ours"][0])


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


BENCHES = {
    "commands": Bench(
        "90,000 commands of 64 senders, processor time", "s", CPU, "benchmarks/bench_commands.py",
        ("--peer-turns", "1"), ("--turns", "5", "--peer-turns", "1"),
    ),
    "heartbeats": Bench(
        "the master's processor time for one heartbeat", "us", "CPU of the master", "benchmarks/bench_heartbeats.py",
        (), ("--agents", "5", "--seconds", "0.5"),
    ),
    "replay": Bench(
        "1,000,000 events to state", "s", "events to state", "benchmarks/bench_replay.py", (), ("--events", "12000"),
    ),
    "join_2000": Bench(
        "2,000 agents join, the master's processor time", "s", "CPU of the master", "benchmarks/bench_join_2000.py",
        (), ("--agents", "20"),
    ),
    "simulate": Bench(
        "2,048 nodes, 54 days, simulated", "s", "days", "benchmarks/bench_simulate.py",
        (), ("--nodes", "16", "--days", "0.5", "--failures", "4"),
    ),
    "crashes": Bench(
        "a crash at every place of a history", "s", "crash at every index", "benchmarks/bench_crashes.py",
        (), ("--events", "200", "--nodes", "4"),
    ),
    "levelled": Bench(
        "16,384 nodes levelled after an event, processor time", "s", "levelled", "tools/levelled.py",
        (), ("--nodes", "64"),
    ),
}  # fmt: skip


@contextlib.contextmanager
def sources(commit: str) -> Iterator[Path]:
    """The tree of ``commit``, for as long as it is needed. Raises `CalledProcessError`."""
    git = shutil.which("git") or "git"
    packed = subprocess.run([git, "-C", ROOT, "archive", commit], capture_output=True, check=True).stdout
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
            "--only",
            choices=("cold", "killed", "overhead", *BENCHES),
            action="append",
            help="measure only these; their rows take the place of older ones in the result",
        )
        parser.add_argument("--small", action="store_true", help="at the smallest size; without --json nothing is kept")

    chosen = options(__doc__, trials=8, more=more)
    kinds: dict[str, Kind] = {
        "cold": Kind("command to first common step", "s", SLOWER, lambda _: cold_start()),
        "killed": Kind("killed worker to next step", "s", SLOWER, lambda _: killed_worker()),
    }
    if not chosen.only or "overhead" in chosen.only:
        work = bench_overhead.calibrate()
        kinds["overhead"] = Kind(
            "steps per second, 20 ms script", "/s", FASTER,
            lambda _: bench_overhead.pace(OURS, work, PACE_STEPS).median_per_s,
        )  # fmt: skip
    for name, one in BENCHES.items():
        kinds[name] = Kind(one.what, one.unit, SLOWER, partial(one.measure, small=chosen.small))
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
    path = chosen.json or RESULTS / "before_after.json"
    with tempfile.TemporaryDirectory(prefix="before-after-") as folder:
        new = Path(folder) / "result.json"
        code = result.finish(new)
        if chosen.json or not chosen.small:
            path.write_text(
                merged(path.read_text(encoding="utf-8") if path.exists() else "", new.read_text(encoding="utf-8"))
            )
            say(f"merged into {path}")
    return code


def merged(before: str, now: str) -> str:
    """A result with the rows of an older one that were not measured anew. Every row says when and of what it is."""
    told = json.loads(now)
    rows = _pairs(told)
    older = _pairs(json.loads(before)) if before else {}
    told["rows"] = [row for what, pair in (older | rows).items() for row in pair]
    return json.dumps(told, indent=1, ensure_ascii=False) + "\n"


def _pairs(told: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Each figure's row and that of its ratio, by the figure's name."""
    found: dict[str, list[dict[str, Any]]] = {}
    own = {name: told.get(name) for name in ("at", "commit", "peer", "machine", "load_before", "load_after")}
    for row in told["rows"]:
        if row["what"] == AS_FAST:
            found[next(reversed(found))].append({**own, **row})
        else:
            found[row["what"]] = [{**own, **row}]
    return found


class Kind(NamedTuple):
    """One figure: its name and unit, which way it is better, and how one of a tree is measured."""

    what: str
    unit: str
    better: int
    once: Callable[[Path], float]


def measure(result: Result, trees: dict[str, Path], kinds: dict[str, Kind], pairs: int) -> None:
    """All figures of all pairs, as rows of the result. What one of the trees cannot measure is left out, and a note says so."""
    found: dict[str, dict[str, list[float]]] = {name: {OLD: [], NEW: []} for name in kinds}
    for tree in trees.values() if kinds.keys() - BENCHES.keys() else ():
        with led_by(tree):
            say(f"not counted: {cold_start():.2f} s")  # compiles byte code
    for turn in range(pairs):
        for name in list(found):
            try:
                _pair(kinds[name], trees, found[name], backwards=bool(turn % 2))
            except Broken as error:
                del found[name]
                result.notes.append(f"{kinds[name].what}: not measured")
                say(f"{turn + 1}/{pairs} {name}: left out: {error}")
                continue
            say(
                f"{turn + 1}/{pairs} {name}: {', '.join(f'{key} {number(one[-1])}' for key, one in found[name].items())}"
            )
    for name, figures in found.items():
        kind, old, new = kinds[name], figures[OLD], figures[NEW]
        ratios = [(after / before) ** kind.better for before, after in zip(old, new, strict=True)]
        result.rows += [Row(kind.what, kind.unit, new, old), Row(AS_FAST, "x", ratios, (), TARGET, most=False)]
    if not found:
        raise Broken("nothing of it")


def _pair(kind: Kind, trees: dict[str, Path], figures: dict[str, list[float]], *, backwards: bool) -> None:
    """One figure of both trees. Raises `Broken`."""
    for which in sorted(trees, reverse=backwards):
        with led_by(trees[which]):
            figures[which].append(kind.once(trees[which]))


if __name__ == "__main__":
    sys.exit(main())

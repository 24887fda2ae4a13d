"""The campaign `kills`: one training job, and again and again one of our processes dies of SIGKILL at a seeded moment.

The job trains `tests/integration/scripts/curve.py` on two nodes of this host, with a DataLoader child per rank. A kill comes when
the job is whole again after the one before, or, one time in four, while it is still recovering. In the end every loss must be
that of an undisturbed run, no step but the one that was being saved may have been made twice, and nothing may be left: no
process, no shared memory, no file in the temporary folder. The launcher is spared: with it the kernel ends the run.

Kinds, seeds and delays are fixed by the seed; what exists at that moment, and so who exactly dies, is not.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tests" / "integration" / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

from rough import CURVE, Curve, Story, flaws  # noqa: E402
from running import eventually  # noqa: E402

if TYPE_CHECKING:
    from running import Process

RESULT = ROOT / "benchmarks" / "results" / "kills.json"
KILLS = 200
WEIGHTS = {"worker": 4, "loader": 2, "agent": 2, "zygote": 2, "spare": 2, "keeper": 2, "master": 4}
FATAL = frozenset({"worker", "loader", "agent"})
"""Kinds whose death ends a world; all others must die unnoticed by workers."""

BURST, BURST_S, CALM_S = 0.25, 0.4, 0.5
WHOLE_S = 60.0
AGAIN_S = 0.15
NODES = 2
SEGMENTS = ("dlrover", "psm_", "torch_", "sem.")
SHARED = Path("/dev/shm")  # noqa: S108
LOADER = ("--loader",)
PROBE = re.compile("[a-z0-9_]{8}")


class Kill(NamedTuple):
    """One kill: at the job's step ``step``, by CLOCK_MONOTONIC at ``at``; the next step came ``step_s`` later.

    ``burst``: it came while the job was still recovering from the one before.
    """

    number: int
    kind: str
    burst: bool
    step: int
    at: float
    step_s: float = 0.0


class Hunt:
    """The kills of one job."""

    def __init__(self, job: Story, seed: int) -> None:
        self._job, self._seed = job, seed
        self.kills: list[Kill] = []

    def run(self, first: int, last: int, note: Callable[[list[Kill]], None]) -> None:
        """Kills ``first`` to ``last``; each burst is noted when the job has recovered from it."""
        self._settled([], [], 0)
        number = first
        while number <= last:
            burst, victims, lives = list[Kill](), list["Process"](), self._job.lives()[0]
            while number <= last and (not burst or self._dice(number).random() < BURST):
                self._wait(number, BURST_S if burst else CALM_S)
                victims.append(self._strike(number, burst))
                number += 1
            self._settled(burst, victims, lives)
            told = [one._replace(step_s=round(self._back(one) - one.at, 6)) for one in burst]
            self.kills += told
            note(told)

    def _dice(self, number: int) -> random.Random:
        """Of one kill, so that a campaign that was stopped goes on with the same ones."""
        return random.Random(f"{self._seed}.{number}")

    def _wait(self, number: int, most_s: float) -> None:
        threading.Event().wait(random.Random(f"{self._seed}.{number}.delay").uniform(0.0, most_s))

    def _strike(self, number: int, burst: list[Kill]) -> Process:
        dice = random.Random(f"{self._seed}.{number}.who")
        # An empty kind (there is no spare just now) is left out of the draw; somebody always lives.
        living = {kind: found for kind in WEIGHTS if (found := self._living(kind))}
        kind = dice.choices(list(living), [WEIGHTS[one] for one in living])[0]
        victim = living[kind][dice.randrange(len(living[kind]))]
        points = self._job.points
        burst.append(Kill(number, kind, bool(burst), points[-1].step if points else 0, time.monotonic()))
        with contextlib.suppress(ProcessLookupError):  # it was dying anyway; that too may happen to a killer
            victim.kill()
        return victim

    def _living(self, kind: str) -> list[Process]:
        found = self._job.processes()
        workers = {one.pid for one in found if one.name.startswith("worker-")}
        if kind == "worker":
            return [one for one in found if one.pid in workers]
        if kind == "loader":
            return [one for one in found if one.pid not in workers and _parent(one.pid) in workers]
        return [one for one in found if one.name == f"dlrover-{kind}"]

    # ---- recovery

    def _settled(self, burst: list[Kill], victims: list[Process], lives: int) -> None:
        """Wait until the job is whole. Raises AssertionError when it is not within `WHOLE_S`."""
        what = f"the job is whole after {[(one.number, one.kind) for one in burst]}"
        fatal = [one.at for one in burst if one.kind in FATAL]
        since = min(fatal) if fatal else (burst[-1].at if burst else 0.0)
        self._job.alive(lambda: self._recovered(since, bool(fatal), victims), what, WHOLE_S)
        if not fatal and len(burst) == 1:
            assert self._job.lives()[0] == lives, f"a worker was restarted because of {burst[0]}"

    def _recovered(self, since: float, fatal: bool, victims: list[Process]) -> bool:
        """Is everybody there, twice in succession?"""
        first = self._look(since, fatal, victims)
        if not first:
            return False
        threading.Event().wait(AGAIN_S)
        return self._look(since, fatal, victims) == first

    def _look(self, since: float, fatal: bool, victims: list[Process]) -> int:
        """The generation in which the job is whole; 0 if it is not."""
        if any(one.lives for one in victims) or not self._steps_after(since, fatal):
            return 0
        status = self._job.status()
        if status is None or status["open_incidents"] or len(status["nodes"]) != NODES:
            return 0
        joined = all(one["state"] == "running" and one["joined"] for one in status["nodes"].values())
        there = all(
            len(self._living(kind)) == 2 for kind in ("worker", "loader", "agent", "zygote", "keeper", "master")
        )
        return int(status["generation"]) if joined and there else 0

    def _steps_after(self, since: float, fatal: bool) -> bool:
        born = self._births()
        return any(
            point.at > since and (not fatal or born.get(point.pid, 0.0) > since) for point in reversed(self._job.points)
        )

    def _births(self) -> dict[int, float]:
        """When each process of rank 0 began its script."""
        return {int(words[1]): int(words[3]) / 1e9 for words in self._job.told(0) if words[0] == "begin"}

    def _back(self, kill: Kill) -> float:
        """When the first step was made that needed nothing of what died."""
        after, born = [one for one in self._job.points if one.at > kill.at], self._births()
        new = [one for one in after if born.get(one.pid, 0.0) > kill.at]
        return (new or after if kill.kind in FATAL else after)[0].at


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def hunt(
    folder: Path,
    seed: int,
    kills: range,
    note: Callable[[list[Kill]], None],
    *,
    undisturbed: Curve | None = None,
    pause: float,
) -> int:
    """One job with these kills, in ``folder``; how many steps it made. Raises AssertionError for a broken promise."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    before = _segments()
    endless = ("--max-restarts", "1000000", "--relaunch-max", "1000000", "--local-nodes", str(NODES))
    env = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}  # a cache is meant to stay
    with Story(folder, *endless, CURVE, *LOADER, "--pause", str(pause), job="kills", env=env) as job:
        Hunt(job, seed).run(kills.start, kills.stop - 1, note)
        job.finish()
        assert job.ended() == 0, "the job failed"
        assert job.left() == []
        assert job.events("CommandFailed") == []
        assert len(job.events("JobSucceeded")) == 1
        points = job.points
    left = [str(one) for one in temporary.iterdir() if not _momentary(one)]
    assert not left, f"left in the temporary folder: {left}"
    eventually(lambda: not _left(before), f"the end of {_left(before)} in shared memory", 10.0)
    steps = points[-1].step
    wrong = flaws(points, (undisturbed or Curve(folder / "undisturbed", *LOADER)).losses(steps))
    assert not wrong, f"{len(wrong)} flaws in the curve, the first: {wrong[:5]}"
    return steps


def _momentary(path: Path) -> bool:
    """Is it an empty file that `ctypes.util` (tmp...) or `tempfile` (eight letters: may I write here?) makes for a moment?

    A SIGKILL in that moment leaves it, and no code of ours can know of it.
    """
    theirs = path.name.startswith("tmp") or PROBE.fullmatch(path.name)
    return bool(theirs) and path.is_file() and not path.stat().st_size


def _left(before: set[str]) -> set[str]:
    """Segments that are new since, and that no process uses: of the job none lives, and other tests' loaders have some, too."""
    new = _segments() - before
    if new:
        used = set(_mapped())
        new = {one for one in new if _inode(one) not in {None, *used}}
    return new


def _inode(segment: str) -> str | None:
    with contextlib.suppress(OSError):  # it has gone
        return str((SHARED / segment).stat().st_ino)
    return None


def _mapped() -> Iterator[str]:
    """Inodes: a semaphore is made under another name."""
    for one in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            yield from (line.split()[4] for line in one.read_text().splitlines() if str(SHARED) in line)


def _segments() -> set[str]:
    return {one.name for one in SHARED.iterdir() if one.name.startswith(SEGMENTS)}


# ---- as a campaign


def campaign(seed: int, kills: int, machine: dict[str, Any], pause: float = 0.02) -> int:
    """Go on where an earlier one with this seed stopped; 1 where a promise was broken.

    Kills that are done are not done again, but a job cannot outlive its campaign: the rest happens to a new job.
    """
    result: dict[str, Any] = {
        "campaign": "kills", "seed": seed, "machine": machine, "trials": 0, "jobs": 0, "steps": 0, "failures": {},
        "kinds": {}, "took_s": 0.0, "kills": [],
    }  # fmt: skip
    if RESULT.exists():
        found = json.loads(RESULT.read_text())
        if found["seed"] == seed and found["trials"] < kills and not found["failures"]:
            result = found
    began, took = time.monotonic(), result["took_s"]

    def note(those: list[Kill]) -> None:
        result["kills"] += [[one.number, one.kind, one.burst, one.step, one.step_s] for one in those]
        result["trials"] = len(result["kills"])
        result["kinds"] = by_kind(result["kills"])
        result["took_s"] = round(took + time.monotonic() - began, 1)
        save(result)

    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    result["jobs"] += 1
    try:
        result["steps"] += hunt(folder, seed, range(result["trials"] + 1, kills + 1), note, pause=pause)
    except AssertionError as error:
        result["failures"][str(result["trials"] + 1)] = str(error)[:2000]
        save(result)
        print(f"\nthe job's folder is kept: {folder}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder)
    save(result)
    print(file=sys.stderr)
    return 0


def by_kind(kills: list[list[Any]]) -> dict[str, dict[str, float]]:
    """Seconds from a kill to the next step, by kind; those that came in a burst are told apart."""
    groups: dict[str, list[float]] = {}
    for _, kind, burst, _, step_s in kills:
        groups.setdefault(f"{kind}, in a burst" if burst else kind, []).append(step_s)
    return {
        kind: {
            "kills": len(those),
            "median_s": round(statistics.median(those), 4),
            "p99_s": round(sorted(those)[min(len(those) - 1, int(len(those) * 0.99))], 4),
            "max_s": round(max(those), 4),
        }
        for kind, those in sorted(groups.items())
    }


def save(result: dict[str, Any]) -> None:
    """Write the result whole or not at all, and a line of progress."""
    part = RESULT.with_suffix(".part")
    lines = ",\n  ".join(json.dumps(one) for one in result["kills"])
    body = json.dumps({**result, "kills": []}, indent=1).replace('"kills": []', f'"kills": [\n  {lines}\n ]')
    part.write_text(body + "\n")
    part.replace(RESULT)
    last = result["kills"][-1] if result["kills"] else []
    line = f"kills: {result['trials']}, {len(result['failures'])} failures, last {last}, {result['took_s']:.0f} s"
    print(f"\r{line:<100}", end="", file=sys.stderr, flush=True)

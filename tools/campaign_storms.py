"""The campaign `storms`: for twenty minutes processes of a training job are killed and stopped; its curve must not show it.

Each seed is one job of two nodes with two ranks each, on this host. It trains `tests/integration/scripts/stormy.py`, with a
sampler per rank, dropout, a save in memory every 5 steps and on storage every 50. The strikes are drawn from the seed
beforehand: when, at which role, SIGKILL or SIGSTOP, and after how long SIGCONT follows. Any process of the job may be hit,
except the launcher. Which process of a role is hit depends on who lives then.

What must hold: every loss, sampler position and draw of random numbers that any life of any rank wrote down equals the
undisturbed control's, bit for bit; no rank begins anew while storage has a step; the job ends with 0; processes, sockets,
temporary files and shared memory are gone; the log folds and keeps every promise; `dlrover ckpt verify` finds nothing wrong.
Afterwards a second job restores the last step from storage and trains on, and must equal the control too.

    python -m tools.campaign_storms --seed 3 --list         the strikes of a seed
    python -m tools.campaign_storms --seed 3 --seconds 60   one storm; no result is kept of it
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.storming import BIN, SCRIPTS, Control, Job, Life, Storm, Striking, flaws, lives
from tools.trials import Found, Patience, Trials

SEEDS, SECONDS, JOBS = 5, 1200.0, 5
PAUSE_S = 0.25
"""Of the training script, after each step: five storms side by side then leave two cores mostly idle."""
NODES, RANKS = 2, 4
MEAN_S = 4.0
KILL = 0.6
"""Share of strikes that kill; the others stop."""
STOPS_S = ((0.9, 0.1, 6.0), (0.1, 6.0, 25.0))
"""How long a stopped process stays stopped: share, from, to."""
ROLES = {
    "worker": 5, "dlrover-agent": 2, "dlrover-keeper": 2, "dlrover-saver": 2, "dlrover-zygote": 2, "dlrover-master": 3,
    "dlrover-spare": 1, "dlrover-sweeper": 1,
}  # fmt: skip
ENDLESS = (
    "--max-restarts",
    "1000000",
    "--relaunch-max",
    "1000000",
    "--local-nodes",
    str(NODES),
    "--nproc-per-node",
    "2",
)
END_S, FURTHER = 300.0, 15
SHARED = ("dlrover", "psm_", "torch_", "sem.")


class Strike(NamedTuple):
    """One strike.

    ``at_s``: seconds after the job's first step.
    ``role``: the name of the processes of which one is hit.
    ``which``: the one, as a fraction of those that live, by age.
    ``stop_s``: SIGCONT follows SIGSTOP after so long; 0: SIGKILL.
    """

    at_s: float
    role: str
    which: float
    stop_s: float


def drawn(seed: int, seconds: float, mean_s: float = MEAN_S) -> list[Strike]:
    """The strikes of a seed."""
    dice, found, at = random.Random(f"storms.{seed}"), list[Strike](), 0.0
    while True:
        at += dice.expovariate(1 / mean_s)
        role = dice.choices(list(ROLES), list(ROLES.values()))[0]
        which, kills = dice.random(), dice.random() < KILL
        _, low, high = dice.choices(STOPS_S, [one[0] for one in STOPS_S])[0]
        stop_s = 0.0 if kills else round(dice.uniform(low, high), 2)
        if at >= seconds:
            return found
        found.append(Strike(round(at, 2), role, round(which, 3), stop_s))


# ---- the storm itself


class Kills(Striking):
    """Kills and stops the processes of a job."""

    def __init__(self, job: Storm, patience: Patience, diary: Path) -> None:
        super().__init__(job.check_alive, patience)
        self._job, self._diary = job, diary

    def strike(self, strike: Strike, now_s: float) -> None:
        """Kill or stop one of the processes that have the role now."""
        living = self._job.living(strike.role)
        what = "stop" if strike.stop_s else "kill"
        if not living:
            self.done["nobody there"] += 1
            self._note(strike, now_s, "nobody there")
            return
        victim = living[min(int(strike.which * len(living)), len(living) - 1)]  # 0.9996 is rounded to 1
        try:
            self.stop(victim.pid, strike.stop_s)
        except ProcessLookupError:
            self.done["nobody there"] += 1
            return
        self.done[f"{what} {strike.role.removeprefix('dlrover-')}"] += 1
        self._note(strike, now_s, f"{victim} of {len(living)}")

    def _note(self, strike: Strike, now_s: float, whom: str) -> None:
        what = f"stop for {strike.stop_s:g} s" if strike.stop_s else "kill"
        with self._diary.open("a") as file:
            file.write(f"{now_s:8.2f} s (meant {strike.at_s:.2f}): {what} {strike.role}: {whom}\n")


# ---- one storm


def storm(
    folder: Path,
    strikes: Sequence[Strike],
    seconds: float,
    patience: Patience,
    *,
    pause: float,
    options: Sequence[str] = (),
) -> Found:
    """One job with these strikes in ``folder``, which is made. What happened. Raises AssertionError for a broken promise."""
    temporary, url, segments = folder / "tmp", folder / "stored", _segments()
    temporary.mkdir(parents=True)
    (folder / "strikes.json").write_text(json.dumps(strikes))
    line = (*ENDLESS, str(SCRIPTS / "stormy.py"), str(url), "--pause", str(pause), *options)
    env = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    with Storm(folder, *line, job="storm", env=env) as job:
        patience.until(lambda: job.check_alive() or any(one.steps for one in lives(folder)), "the first step", 120.0)
        striking = Kills(job, patience, folder / "diary")
        striking.run(strikes, seconds)
        job.finish()
        status = job.over(patience, END_S)
        broken = [] if status == 0 else [f"the job ended with {status}: {job.said()[-600:]}"]
        broken += [f"left behind: {one}" for one in job.left()]
        broken += log_flaws(job)
    broken += [f"left in the temporary folder: {one.name}" for one in temporary.iterdir() if not _momentary(one)]
    broken += [f"left in shared memory: {one}" for one in _abandoned(segments)]
    broken += stored_flaws(url)
    found = lives(folder)
    last = max(max(one.steps, default=0) for one in found)
    undisturbed = Control(folder / "control", last + FURTHER, RANKS)
    with contextlib.closing(undisturbed):
        further, after = epilogue(folder, url, patience)
        meant = undisturbed.curve(patience)
    curve, later = flaws(found, meant), flaws(after, meant)
    pairs = [(one.rank, step) for one in found for step in one.steps]
    result: Found = {
        "strikes": sum(striking.done.values()), "struck": dict(sorted(striking.done.items())), "last_step": last,
        "steps": len(pairs), "steps_made_again": len(pairs) - len(set(pairs)),
        "restores": dict(sorted(Counter(one.tier for one in found if one.rank == 0).items())),
        "flaws_in_the_curve": len(curve) + len(later),
    }  # fmt: skip
    broken = [*curve[:3], *(f"restored by a later job: {one}" for one in (*further, *later[:3])), *broken]
    if broken:
        result["broken"] = (
            f"{len(curve)} flaws in the curve, {len(later)} after restoring from storage; {'; '.join(broken)}"
        )
    return result


def epilogue(folder: Path, url: Path, patience: Patience) -> tuple[list[str], list[Life]]:
    """A new job restores the newest step from storage and makes a few more: what is wrong, and its lives."""
    again, newest = (
        folder / "again",
        max([int(one.parent.name[5:]) for one in url.glob("step-*/manifest.json")], default=0),
    )
    again.mkdir()
    line = (*ENDLESS, str(SCRIPTS / "stormy.py"), str(url), "--pause", "0", "--steps", str(newest + FURTHER))
    with Storm(again, *line, job="again", env={"TMPDIR": str(folder / "tmp")}) as job:
        status = job.over(patience, END_S)
        broken = [] if status == 0 else [f"the job ended with {status}: {job.said()[-600:]}"]
    found = lives(again)
    if newest and {one.restored for one in found} != {newest}:
        broken.append(f"storage has step {newest}; restored were {sorted({one.restored for one in found})}")
    return broken, found


def log_flaws(job: Job) -> list[str]:
    """What is wrong with the job's log: it must fold, and every promise about histories must hold."""
    from dlrover_core.logs import open_log
    from dlrover_core.testing.invariants import check_history

    async def read() -> list[Any]:
        async with open_log(f"sqlite://{job.state / 'log.db'}") as log:
            return [record async for record in log.read(job.name)]

    try:
        check_history(asyncio.run(read()))
    except Exception as error:  # noqa: BLE001  # whatever it is, the log is not as promised
        return [f"the log: {type(error).__name__}: {error}"[:500]]
    return []


def stored_flaws(url: Path) -> list[str]:
    """What `dlrover ckpt verify` finds wrong with the complete steps on storage; that there is none is a flaw too."""
    complete = sorted(url.glob("step-*/manifest.json"))
    if not complete:
        return ["no step is on storage"]
    steps = [word for one in complete for word in ("--step", str(int(one.parent.name[5:])))]
    line = [str(BIN / "dlrover"), "ckpt", "verify", str(url), *steps]
    done = subprocess.run(line, capture_output=True, text=True, timeout=END_S, check=False)
    return [] if done.returncode == 0 else [f"ckpt verify: {(done.stdout + done.stderr)[-500:]}"]


def _segments() -> set[str]:
    return {one.name for one in Path("/dev/shm").iterdir() if one.name.startswith(SHARED)}  # noqa: S108


def _abandoned(before: set[str]) -> set[str]:
    """Segments of shared memory that are new and that no living process has mapped. Storms side by side see each other's."""
    for _ in range(20):
        left = _segments() - before
        used = "\n".join(_maps())
        if not (left := {one for one in left if one not in used}):
            break
        threading.Event().wait(0.2)
    else:
        return left
    return set()


def _maps() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended since, or is another user's
            yield path.read_text()


def _momentary(path: Path) -> bool:
    """Is it an empty file that `ctypes.util` or `tempfile` makes for a moment? A SIGKILL in that moment leaves it."""
    return path.is_file() and not path.stat().st_size and (path.name.startswith("tmp") or len(path.name) == 8)


# ---- as a campaign


def campaign(seed: int, seeds: int, machine: dict[str, Any], jobs: int, seconds: float, pause: float = PAUSE_S) -> int:
    """Storms of so many seconds, ``jobs`` side by side; 1 where one broke a promise. The folder of such a storm is kept."""

    def trial(number: int, patience: Patience) -> Found:
        folder = Path(tempfile.mkdtemp(prefix=f"storm-{number}-"))
        found: Found = {}
        try:
            found = storm(folder / "job", drawn(number, seconds), seconds, patience, pause=pause)
        except AssertionError as error:
            found = {"broken": f"{error}"[:1500]}
        finally:
            if "broken" in found:
                found["folder"] = str(folder)
                found["again"] = (
                    f"python -m tools.campaign_storms --seed {number} --seconds {seconds:g} --pause {pause:g}"
                )
                print(f"\nthe storm's folder is kept: {folder}", file=sys.stderr)
            else:
                shutil.rmtree(folder)
        return found

    same = {"seed": seed, "seconds": seconds, "pause_s": pause, "nodes": NODES, "ranks": RANKS}
    return int(Trials("storms", range(seed, seed + seeds), same, machine, sums).run(trial, jobs) > 0)


def sums(found: list[Found]) -> Found:
    """What storms came to together."""
    total = Counter[str]()
    struck, restores = Counter[str](), Counter[str]()
    for one in found:
        for key in ("strikes", "steps", "steps_made_again", "flaws_in_the_curve"):
            total[key] += one.get(key, 0)
        struck.update(one.get("struck", {}))
        restores.update(one.get("restores", {}))
    return {**total, "struck": dict(sorted(struck.items())), "restores": dict(sorted(restores.items()))}


def main() -> int:
    """One storm of which no result is kept; 1 if it broke a promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--mean", type=float, default=MEAN_S, help="seconds between two strikes, on average")
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="seconds that the script waits after each step")
    parser.add_argument("--list", action="store_true", help="only print the strikes")
    parser.add_argument("--strikes", type=Path, help="a JSON file of strikes instead: strikes.json of a kept folder")
    options = parser.parse_args()
    strikes = drawn(options.seed, options.seconds, options.mean)
    if options.strikes:
        strikes = [Strike(*one) for one in json.loads(options.strikes.read_text())]
    for one in strikes:
        what = f"stop for {one.stop_s:g} s" if one.stop_s else "kill"
        print(f"{one.at_s:8.2f} s  {what:<16} {one.role.removeprefix('dlrover-'):<8} {one.which:.3f}")
    if options.list:
        return 0
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    found = storm(folder / "job", strikes, options.seconds, Patience(), pause=options.pause)
    print(json.dumps(found, indent=1))
    print(f"its folder is kept: {folder}")
    return int("broken" in found)


if __name__ == "__main__":
    sys.exit(main())

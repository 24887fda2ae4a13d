"""The campaign `restarts`: after a restart on two nodes every checkpoint that is due must be written, from the first one on.

Each trial is one job of two nodes with two ranks each, on this host. It trains `tests/integration/scripts/stormy.py`, with a
save in memory every 5 steps and on storage every 50. When a number of steps that the seed draws has been made, one worker is
killed, or one node: its agent, and with it everything of that node. From the first step after the restart on the job trains for
60 s more, and ends.

What must hold: the job ends with 0; every step that was due on storage in those 60 s is there, sealed. Of saves in memory that
were left out, the number is in the result.

    python -m tools.campaign_restarts --seed 2 --seconds 20    one trial; no result is kept of it
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tools.campaign_storms import ENDLESS, SCRIPTS, Life, Storm, lives
from tools.trials import Found, Patience, Trials

TRIALS, SECONDS, JOBS = 10, 60.0, 2
STORE_EVERY, EVERY, PAUSE_S = 50, 5, 0.1
BEFORE = (30, 90)
"""The kill comes when so many steps have been made."""
BEGIN_S, RESTART_S, END_S = 120.0, 120.0, 120.0


def restart(folder: Path, seed: int, seconds: float, patience: Patience) -> Found:
    """One job in ``folder``, which is made. Raises AssertionError for a broken promise."""
    dice = random.Random(f"restarts.{seed}")
    node, rank, at = seed % 3 == 2, dice.randrange(4), dice.randint(*BEFORE)
    folder.mkdir(parents=True)
    url = folder / "stored"
    line = (*ENDLESS, str(SCRIPTS / "stormy.py"), str(url), "--pause", str(PAUSE_S), "--keep", "100000")
    with Storm(folder, *line, "--every", str(EVERY), "--store-every", str(STORE_EVERY), job="restarts") as job:
        patience.until(lambda: job.check_alive() or _step(lives(folder)) >= at, f"step {at}", BEGIN_S + at)
        victim = job.living("dlrover-agent" if node else "worker")[rank // 2 if node else rank]
        struck = time.monotonic()
        victim.kill()
        what = "a first step after the restart"
        patience.until(lambda: job.check_alive() or _again(lives(folder), struck), what, RESTART_S)
        back = _again(lives(folder), struck)
        patience.sleep(back + seconds - time.monotonic())
        job.finish()
        status = job.over(patience, END_S)
        assert status == 0, f"the job ended with {status}: {job.said()[-600:]}"
        left_out = job.said().count(" was not saved ")
    # Rank 0 has made the first step of all lives; what it makes is due for all.
    made = {
        step: when for one in lives(folder) if one.began > struck and one.rank == 0 for step, when in one.at.items()
    }
    due = sorted(step for step, when in made.items() if step % STORE_EVERY == 0 and when <= back + seconds)
    there = {int(one.parent.name.removeprefix("step-")) for one in url.glob("step-*/manifest.json")}
    missing = [step for step in due if step not in there]
    restored = sorted({one.restored for one in lives(folder) if one.began > struck})
    found: Found = {
        "killed": "node" if node else "worker", "at_step": at, "restored": restored, "back_s": round(back - struck, 2),
        "due": len(due), "written": len(due) - len(missing), "left_out_warnings": left_out,
    }  # fmt: skip
    if missing or not due:
        said = f"of {len(due)} due checkpoints {len(missing)} were never written: {missing}" if due else "none was due"
        found["broken"] = f"{found['killed']} killed at step {at}: {said}"
    return found


def _step(found: list[Life]) -> int:
    return max((max(one.steps, default=0) for one in found), default=0)


def _again(found: list[Life], struck: float) -> float:
    """When rank 0 made its first step in a life that began after ``struck``; 0.0 where it has not yet."""
    return min((min(one.at.values()) for one in found if one.rank == 0 and one.began > struck and one.at), default=0.0)


def campaign(seed: int, trials: int, machine: dict[str, Any], jobs: int, seconds: float) -> int:
    """Go on where an earlier one with this seed stopped; 1 where a due checkpoint was not written."""

    def trial(number: int, patience: Patience) -> Found:
        return tried(number, seconds, patience)

    same = {"seed": seed, "seconds": seconds, "every": EVERY, "store_every": STORE_EVERY, "pause_s": PAUSE_S}
    return int(Trials("restarts", range(seed, seed + trials), same, machine, sums).run(trial, jobs) > 0)


def tried(seed: int, seconds: float, patience: Patience) -> Found:
    """One trial in a folder of its own, which is removed."""
    folder = Path(tempfile.mkdtemp(prefix="restarts-"))
    try:
        return restart(folder / "job", seed, seconds, patience)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sums(found: list[Found]) -> Found:
    """Due and written checkpoints over all trials."""
    total = Counter[str]()
    for one in found:
        for key in ("due", "written"):
            total[key] += one.get(key, 0)
    return dict(total)


def main() -> int:
    """One trial of which no result is kept; 1 if it broke a promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    found = tried(options.seed, options.seconds, Patience())
    print(json.dumps(found, indent=1))
    return int("broken" in found)


if __name__ == "__main__":
    sys.exit(main())

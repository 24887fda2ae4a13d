"""The campaign `rough`: for an hour the world around a training job is rough; a witness that imports nothing of ours judges it.

Each seed is one real job of two nodes with two ranks each, which trains `tests/integration/scripts/stormy.py`. Seeds 1, 3, 6, 8,
... have three hosts, joined by a network that can fail, and their log in an etcd of three members; the others have one host and
SQLite. What happens is drawn from the seed beforehand, a strike each 6.5 s on average:

KINDS

What must hold: the job ends with 0; every loss, sampler position and draw of random numbers equals an undisturbed run's of plain
torch, bit for bit; the log is whole, decides the same when it is replayed, and was told to a follower once; every restart and
every pause has a strike that explains it; no traceback of ours; nothing is left behind. `rough_witness.py` judges that.

examples:
  python -m tools.campaign_rough --seed 3 --seconds 120 --list     the strikes of a seed, and what is not possible here
  python -m tools.campaign_rough --seed 3 --seconds 120            one world; no result is kept of it
  python -m tools.campaign_rough --seed 2 --only kill,clock        only these kinds of its strikes
  python -m tools.campaign_rough --strikes FOLDER/plan.json        the strikes of a kept folder again
  make campaign NAME=rough                                         five seeds side by side, an hour each
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.rough_ground import left_out, namespaces, several, started
from tools.rough_kinds import MEAN_S, NAMED_KINDS, Strike, drawn
from tools.trials import Found, Patience, Trials

SEEDS, SECONDS, JOBS = 5, 3600.0, 5
PAUSE_S = 0.25
"""Of the training script, after each step: five jobs side by side then leave two cores mostly idle."""

WORLD_S = 3600.0
"""A world that has not ended so long after its last strike never will."""

CLOCK = Path(__file__).with_name("rough_clock.c")


def compiled(folder: Path) -> str:
    """The library that moves clocks, made in ``folder``; empty where there is no compiler."""
    if not shutil.which("cc"):
        return ""
    made = folder / "clock.so"
    line = ["/usr/bin/env", "cc", "-shared", "-fPIC", "-O2", "-o", str(made), str(CLOCK), "-ldl", "-lpthread"]
    subprocess.run(line, check=True, capture_output=True)
    return str(made)


def rough(
    folder: Path,
    seed: int,
    strikes: Sequence[Strike],
    seconds: float,
    patience: Patience,
    *,
    pause: float = PAUSE_S,
    epilogue: bool = True,
    options: Sequence[str] = (),
) -> Found:
    """One world in ``folder``, which is made: the witness's verdict, as a campaign keeps it."""
    folder.mkdir(parents=True)
    own = not namespaces()
    plan = {
        "seed": seed, "seconds": seconds, "pause": pause, "strikes": list(strikes), "epilogue": epilogue, "own": own,
        "hosts": several(seed),
        "clock": compiled(folder), "options": list(options),
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan, indent=1))
    with started(folder, own=own) as process:
        patience.until(lambda: process.poll() is not None, "the end of the world", seconds + WORLD_S, look_s=0.2)
    try:
        verdict = json.loads((folder / "verdict.json").read_text())
    except FileNotFoundError:
        said = "".join(
            (folder / name).read_text()[-1500:] for name in ("ground.out", "world.out") if (folder / name).exists()
        )
        return {"broken": f"no verdict: {said}"}
    found: Found = {**verdict["figures"], "not_possible_here": left_out(seed)}
    if verdict["broken"]:
        found["broken"] = "; ".join(verdict["broken"])
    return found


def campaign(seed: int, seeds: int, machine: dict[str, Any], jobs: int, seconds: float, pause: float = PAUSE_S) -> int:
    """Worlds of so many seconds, ``jobs`` side by side; 1 where one broke a promise. The folder of such a world is kept."""

    def trial(number: int, patience: Patience) -> Found:
        folder = Path(tempfile.mkdtemp(prefix=f"rough-{number}-"))
        found: Found = {"broken": "stopped"}
        try:
            found = rough(folder / "w", number, planned(number, seconds), seconds, patience, pause=pause)
        except AssertionError as error:
            found = {"broken": f"{error}"[:1500]}
        finally:
            if found.get("broken", "stopped") != "stopped":
                found["folder"] = str(folder)
                found["again"] = (
                    f"python -m tools.campaign_rough --seed {number} --seconds {seconds:g} --pause {pause:g}"
                )
                print(
                    f"\nseed {number} broke a promise; its folder is kept: {folder}\n  {found['again']}",
                    file=sys.stderr,
                )
            else:
                shutil.rmtree(folder)
        return found

    same = {"seed": seed, "seconds": seconds, "pause_s": pause, "mean_s": MEAN_S}
    return int(Trials("rough", range(seed, seed + seeds), same, machine, sums).run(trial, jobs) > 0)


def planned(seed: int, seconds: float, only: Sequence[str] = (), mean_s: float = MEAN_S) -> list[Strike]:
    """The strikes of a seed that are possible here."""
    out = set(left_out(seed))
    return drawn(seed, seconds, out | (set(NAMED_KINDS) - set(only) if only else set()), mean_s)


def sums(found: list[Found]) -> Found:
    """What worlds came to together."""
    total, struck = Counter[str](), Counter[str]()
    for one in found:
        total.update({key: value for key, value in one.items() if isinstance(value, int) and key != "last_step"})
        struck.update(one.get("struck", {}))
    worst = max((one.get("outage", {}).get("unexplained_s", 0.0) for one in found), default=0.0)
    return {**total, "worst_unexplained_outage_s": worst, "struck": dict(sorted(struck.items()))}


def _described() -> str:
    kinds = "\n".join(f"  {name:<11} {what}" for name, what in NAMED_KINDS.items())
    return (__doc__ or "").replace("KINDS", kinds)


def main() -> int:
    """One world of which no result is kept; 1 if it broke a promise."""
    parser = argparse.ArgumentParser(description=_described(), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="what is drawn, and what kind of job (default 0)")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long it is rough (default 120)")
    parser.add_argument(
        "--mean", type=float, default=MEAN_S, help=f"seconds between two strikes, on average ({MEAN_S:g})"
    )
    parser.add_argument(
        "--pause", type=float, default=PAUSE_S, help=f"seconds after each step of the script ({PAUSE_S:g})"
    )
    parser.add_argument("--only", default="", metavar="KIND,KIND", help="strikes of these kinds only")
    parser.add_argument("--list", action="store_true", help="only print the strikes, and what is not possible here")
    parser.add_argument(
        "--strikes", type=Path, metavar="FILE", help="the strikes, and the seed, of a kept folder's plan.json"
    )
    options = parser.parse_args()
    seed, only = options.seed, [one for one in options.only.split(",") if one]
    if unknown := sorted(set(only) - set(NAMED_KINDS)):
        parser.error(f"--only: no kind {unknown[0]!r}; there are {', '.join(NAMED_KINDS)}")
    strikes = planned(seed, options.seconds, only, options.mean)
    if options.strikes:
        plan = json.loads(options.strikes.read_text())
        seed, strikes = int(plan["seed"]), [Strike(*one) for one in plan["strikes"]]
    print(f"seed {seed}: {'three hosts, etcd' if several(seed) else 'one host, SQLite'}")
    for one in strikes:
        print(one)
    for kind, why in left_out(seed).items():
        print(f"not possible here: {kind}: {why}")
    if options.list:
        return 0
    folder = Path(tempfile.mkdtemp(prefix="rough-"))
    try:
        found = rough(folder / "w", seed, strikes, options.seconds, Patience(), pause=options.pause)
    except KeyboardInterrupt:
        print(f"stopped; its folder is kept: {folder}", file=sys.stderr)
        return 130
    print(json.dumps(found, indent=1))
    print(f"its folder is kept: {folder}")
    return int("broken" in found)


if __name__ == "__main__":
    sys.exit(main())

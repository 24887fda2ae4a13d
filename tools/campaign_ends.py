"""The campaign `ends`: undisturbed jobs end right after a save that was due, and their last state must be on storage.

Each trial is one job that nothing is done to: `tests/integration/scripts/ending.py` with FlashCheckpoint, FlashTrainer or
Lightning's plug-in. The seed draws a state of 10 to 500 MB, what most of it is (a frozen parameter, a buffer, a trained
parameter), one node or two, how often is saved, and how much later than the first each rank comes to `close()`: 0 to 500 ms.

What must hold: the job ends with 0, and nothing is left of it. The last step is on storage: sealed, fine for `dlrover ckpt
verify`, and its values are what they were, as `torch.distributed.checkpoint` reads them (with Lightning: as torch.load reads the
last file). That holds also where the last save was left out, because storage was still being written: `close()` then has to make
up for it. How often that was so is in the result.

    python -m tools.campaign_ends --seed 7 --first 3 --trials 2    two trials; no result is kept of them
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tools.campaign_storms import SCRIPTS, Storm
from tools.trials import Found, Patience, Trials

from running import BIN  # isort: skip  # lies with the tests; campaign_storms knows where

TRIALS, JOBS = 200, 2
KINDS = {"plain": 6, "huggingface": 2, "lightning": 2}
SHAPES = {(1, 2): 6, (2, 1): 2, (2, 2): 2}
"""Nodes and ranks per node, with their weights."""
MIB, SKEW_MS = (10, 500), 500
TRAINED_MIB = 100
"""A trained ballast is no larger: its steps take time."""
END_S = 240.0


class End(NamedTuple):
    """One trial.

    ``kind``: who saves: "plain", "huggingface" or "lightning".
    ``nodes``, ``nproc``: nodes of the job, ranks on each.
    ``mib``: size of the state.
    ``kind_of``: what most of the state is: "frozen", "buffer" or "trained".
    ``every``: steps between two saves in memory.
    ``store_every``: steps between two saves on storage.
    ``steps``: steps that are made at least once memory is populated.
    ``pause``: seconds of a step.
    ``skews``: of each rank, how many milliseconds later it comes to `close()`.
    """

    kind: str
    nodes: int
    nproc: int
    mib: int
    kind_of: str
    every: int
    store_every: int
    steps: int
    pause: float
    skews: tuple[int, ...]


def drawn(seed: int, number: int) -> End:
    """The trial of that number."""
    dice = random.Random(f"ends.{seed}.{number}")
    kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
    nodes, nproc = dice.choices(list(SHAPES), list(SHAPES.values()))[0]
    kind_of = dice.choices(("frozen", "buffer", "trained"), (3, 1, 1))[0]
    mib = min(round(MIB[0] * (MIB[1] / MIB[0]) ** dice.random()), TRAINED_MIB if kind_of == "trained" else MIB[1])
    every = dice.choice((2, 2, 4))
    store_every = dice.choice((1000, 1000, every, 5 * every))
    late = [dice.randint(0, SKEW_MS) for _ in range(nodes * nproc)]
    skews = tuple(one - min(late) for one in late)
    return End(
        kind, nodes, nproc, mib, kind_of, every, store_every, 4 + dice.randint(0, 8), dice.choice((0.005, 0.05)), skews
    )


def end(folder: Path, one: End, patience: Patience) -> Found:
    """Run that job in ``folder``, which is made, and look at what is stored. Raises AssertionError for a broken promise."""
    folder.mkdir(parents=True)
    url = folder / "stored"
    line = ["--local-nodes", str(one.nodes), "--nproc-per-node", str(one.nproc), "--max-restarts", "0"]
    line += ["--relaunch-max", "0", str(SCRIPTS / "ending.py"), one.kind, str(url)]
    told = {
        "mib": one.mib, "kind-of": one.kind_of, "every": one.every, "store-every": one.store_every, "steps": one.steps,
        "pause": one.pause, "skews": ",".join(map(str, one.skews)),
    }  # fmt: skip
    line += [word for key, value in told.items() for word in (f"--{key}", str(value))]
    with Storm(folder, *line, job="ends") as job:
        status = job.over(patience, END_S)
        said = job.said()[-800:]
        assert status == 0, f"the job ended with {status}: {said}"
        assert job.left() == []
    ended = [json.loads((folder / f"ended-{rank}").read_text()) for rank in range(one.nodes * one.nproc)]
    last = {rank["last"] for rank in ended}
    assert len(last) == 1, f"ranks do not agree on their last step: {ended}"
    step, left_out = last.pop(), any(rank["saved"] != rank["last"] for rank in ended)
    flaw = (lightning_flaw if one.kind == "lightning" else flash_flaw)(url, step, one)
    why = "; its save was left out, and close() did not make up for it" if left_out else ""
    assert not flaw, f"step {step}, the last one: {flaw}{why}; it said: {said}"
    return {"kind": one.kind, "mib": one.mib, "shape": f"{one.nodes}x{one.nproc}", "left_out": int(left_out)}


def flash_flaw(url: Path, step: int, one: End) -> str:
    """What is wrong with that step on storage; empty where nothing is."""
    import torch
    import torch.distributed.checkpoint as dcp

    place = url / f"step-{step:010}"
    there = sorted(found.parent.name for found in url.glob("step-*/manifest.json"))
    if place.name not in there:
        return f"it is not on storage, or not sealed; sealed are {there}"
    line = [str(BIN / "dlrover"), "ckpt", "verify", str(url), "--step", str(step)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=END_S, check=False)
    if done.returncode:
        return f"ckpt verify: {(done.stdout + done.stderr)[-500:]}"
    names = [key for key in dcp.FileSystemReader(place).read_metadata().state_dict_metadata if key.startswith("model.")]
    read = {key: torch.empty(4 if key.endswith("mark") else one.mib * 2**18) for key in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it loads without a process group
        dcp.load(read, checkpoint_id=place, no_dist=True)
    return _flaw({key.removeprefix("model."): value for key, value in read.items()}, step, one)


def lightning_flaw(url: Path, step: int, one: End) -> str:
    """The same of Lightning's last file."""
    import torch

    path = url / "last.ckpt"
    if not path.exists():
        return f"there is no last.ckpt, but {sorted(found.name for found in url.glob('*'))}"
    read = torch.load(path, weights_only=True, mmap=True)
    if read["global_step"] != step:
        return f"last.ckpt has step {read['global_step']}"
    return _flaw({key.removeprefix("model."): value for key, value in read["state_dict"].items()}, step, one)


def _flaw(read: dict[str, Any], step: int, one: End) -> str:
    import torch

    trained = float(step) if one.kind_of == "trained" else 0.0
    meant = {
        "mark": torch.full((4,), -float(step)),
        "ballast": torch.arange(one.mib * 2**18, dtype=torch.float32) - trained,
    }
    if read.keys() != meant.keys():
        return f"it has {sorted(read)}, not {sorted(meant)}"
    wrong = [key for key, value in read.items() if not (torch.allclose if trained else torch.equal)(value, meant[key])]
    return f"{wrong} do not have the values of that step: mark is {read['mark'].tolist()}" if wrong else ""


# ---- as a campaign


def campaign(seed: int, trials: int, machine: dict[str, Any], jobs: int) -> int:
    """Go on where an earlier one with this seed stopped; 1 where a last state was not on storage."""

    def trial(number: int, patience: Patience) -> Found:
        return tried(drawn(seed, number), patience)

    return int(Trials("ends", range(trials), {"seed": seed}, machine, sums).run(trial, jobs) > 0)


def tried(one: End, patience: Patience) -> Found:
    """One trial in a folder of its own, which is removed."""
    folder = Path(tempfile.mkdtemp(prefix="ends-"))
    try:
        return end(folder / "job", one, patience)
    except AssertionError as error:
        return {"kind": one.kind, "mib": one.mib, "broken": f"{one}: {error}"[:2000]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sums(found: list[Found]) -> Found:
    """How many of each kind there were, how many of them were lost, and in how many the very last save was left out."""
    kinds = Counter(one["kind"] for one in found if "kind" in one)
    lost = Counter(one["kind"] for one in found if "kind" in one and "broken" in one)
    left_out = sum(one.get("left_out", 0) for one in found)
    return {"runs": dict(sorted(kinds.items())), "broken": dict(sorted(lost.items())), "last_save_left_out": left_out}


def main() -> int:
    """Some trials that no result is kept of; 1 if one broke a promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--kind", choices=sorted(KINDS), help="only trials of this kind")
    options = parser.parse_args()
    broken = 0
    for number in range(options.first, options.first + options.trials):
        one = drawn(options.seed, number)
        if options.kind:
            one = one._replace(kind=options.kind)
        found = tried(one, Patience())
        broken += "broken" in found
        print(json.dumps({"trial": number, **one._asdict(), **found}), flush=True)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())

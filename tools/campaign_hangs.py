"""The campaign `hangs`: real jobs in which one rank hangs, again and again, in a way and at a step that the seed draws.

Ranks train together over gloo on two nodes of this host. One of them hangs: in a receive that nobody answers, in a lock, in C
code that keeps Python's lock, or stopped by a signal. Nobody helps. Of every hang it is noted how long after the threshold it was
suspected and named, whether the rank was the right one, and whether the next life made steps. Each job has a few, so that
budgets for failures of a job, which are not the subject here, are not used up.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "integration" / "scripts" / "hangs.py"
RESULT = ROOT / "benchmarks" / "results" / "hangs.json"
TRIALS = 200

KINDS = ("collective", "lock", "gil", "stop")
NODES, NPROC, PER_JOB = 2, 2, 5
THRESHOLD_S = 2.0
APART = (10, 30)
"""Steps from the beginning of a life to its hang."""
JOB_S = 120.0
ALLOWED_S = 2.0
_SAID = re.compile(r"hangs: (\d+) (\w+) (\d+) ([\d.]+)")


def campaign(seed: int, trials: int, machine: dict[str, Any]) -> int:
    """Go on where the result stopped; how many trials were not as they should be."""
    result: dict[str, Any] = {
        "campaign": "hangs",
        "seed": seed,
        "machine": machine,
        "threshold_s": THRESHOLD_S,
        "trials": [],
    }
    if RESULT.exists():
        before = json.loads(RESULT.read_text())
        if before["seed"] == seed and len(before["trials"]) < trials:
            result = before
    while len(result["trials"]) < trials:
        first = len(result["trials"])
        result["trials"] += job(seed, first, min(PER_JOB, trials - first))
        result["summary"] = summary(result["trials"])
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result["summary"]), flush=True)
    return sum(not _good(one) for one in result["trials"])


def _good(trial: dict[str, Any]) -> bool:
    return bool(trial["right"] and trial["recovered"] and trial["named_s"] <= ALLOWED_S)


def drawn(seed: int, first: int, count: int) -> list[tuple[str, int, int]]:
    """The hangs of one job: kind, rank, step. Fixed by the seed and the trial's number."""
    found, step = [], 0
    for number in range(first, first + count):
        dice = random.Random(f"{seed}.{number}")
        step += dice.randint(*APART)
        found.append((dice.choice(KINDS), dice.randrange(NODES * NPROC), step))
    return found


def job(seed: int, first: int, count: int) -> list[dict[str, Any]]:
    """One job with its hangs; what came of each."""
    plan = drawn(seed, first, count)
    text = ",".join(f"{kind}:{rank}:{step}" for kind, rank, step in plan)
    with tempfile.TemporaryDirectory(prefix="hangs-") as folder:
        state = ["--state-dir", f"{folder}/state"]
        command = [_beside("dlrover-run"), *state, "--job-id", "hangs", "--local-nodes", str(NODES)]
        command += ["--nproc-per-node", str(NPROC), "--max-restarts", "100", "--hang-timeout", str(THRESHOLD_S)]
        command += [str(SCRIPT), text, str(plan[-1][2] + 20)]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=JOB_S, check=False)
            said, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as late:
            said, code = (late.stdout or b"").decode(errors="replace"), -1
        events = subprocess.run(
            [_beside("dlrover"), "events", *state, "--json", "hangs"], capture_output=True, text=True, check=False
        )
    told = [json.loads(line) for line in events.stdout.splitlines()]
    began = {int(one[1]): float(one[4]) for one in _SAID.finditer(said)}
    return [_trial(first + life, hang, began.get(life, 0.0), life + 1, told, code) for life, hang in enumerate(plan)]


def _beside(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _trial(
    number: int, hang: tuple[str, int, int], began: float, generation: int, told: list[dict[str, Any]], code: int
) -> dict[str, Any]:
    """What the log tells of one hang, which the life with that ``generation`` had."""
    suspected = [one for one in told if one["event"] == "HangSuspected" and one["fields"]["generation"] == generation]
    numbers = {one["fields"]["hang"] for one in suspected}
    named = next((one for one in told if one["event"] == "HangNamed" and one["fields"]["hang"] in numbers), None)
    stepped = any(one["event"] == "FirstStep" and one["fields"]["generation"] == generation + 1 for one in told)
    fields = named["fields"] if named is not None else {}
    return {
        "trial": number,
        "kind": hang[0],
        "rank": hang[1],
        "suspected_s": _after(suspected[-1]["at_us"], began) if suspected else None,
        "named_s": _after(named["at_us"], began) if named is not None else None,
        "named": list(fields.get("ranks", ())),
        "rule": fields.get("rule", ""),
        "right": named is not None and list(fields["ranks"])[:1] == [hang[1]],
        "recovered": stepped and code == 0,
    }


def _after(at_us: int, began: float) -> float:
    return round(at_us / 1e6 - began - THRESHOLD_S, 3)


def summary(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are asked for."""
    named = sorted(one["named_s"] for one in trials if one["named_s"] is not None)
    kinds = {}
    for kind in KINDS:
        of_kind = [one for one in trials if one["kind"] == kind]
        kinds[kind] = {"trials": len(of_kind), "right": sum(one["right"] for one in of_kind)}
    return {
        "trials": len(trials),
        "detected": sum(one["suspected_s"] is not None for one in trials),
        "named_right": sum(one["right"] for one in trials),
        "recovered": sum(one["recovered"] for one in trials),
        "named_after_threshold_s": {
            "median": statistics.median(named) if named else None,
            "p99": named[min(len(named) - 1, len(named) * 99 // 100)] if named else None,
            "max": named[-1] if named else None,
        },
        "within_2_s": sum(one <= ALLOWED_S for one in named),
        "kinds": kinds,
    }

"""The campaign `chaos`: seeds of 64 nodes in simulated time, on all cores, every promise asked after every event.

The result does not depend on how many cores there are: seeds are merged in their order. What a seed broke is shrunk there and
then; its token goes into tests/chaos/regressions.txt once it is mended.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.chaos.swarm_seeds import regressions, run, trial

from dlrover_core.sim.faults import ENGINE, kinds
from dlrover_core.testing.coverage import Cell, table

NODES, TRIALS = 64, 1000
PATH = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "chaos.json"
SAVE_S = 2.0
SUMS = ("events", "virtual_s", "steps", "struck", "missed")


def campaign(first: int, trials: int, machine: dict[str, Any]) -> int:
    """All seeds that are still missing. Returns 1 if any seed ever broke a promise, or an old failure is back."""
    result: dict[str, Any] = {
        "campaign": "chaos",
        "seed": first,
        "nodes": NODES,
        "machine": machine,
        "trials": 0,
        "failures": {},
        "regressions": {},
        "sums": dict.fromkeys(SUMS, 0),
        "outcomes": {},
        "logs": "",
        "took_s": 0.0,
        "seeds_per_minute": 0.0,
        "hits": {},
    }
    if PATH.exists():
        before = json.loads(PATH.read_text())
        if before["seed"] == first and before["nodes"] == NODES and before["trials"] < trials:
            result = before
    result["regressions"] = _regressions()
    _seeds(result, range(first + result["trials"], first + trials))
    print(file=sys.stderr)
    print(*_told(result), sep="\n")
    return 1 if result["failures"] or result["regressions"] else 0


def _regressions() -> dict[str, str]:
    """Old failures that are back."""
    back = {}
    for old in regressions():
        try:
            run(old.plan)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is back
            back[old.token] = f"{old.why}: {error}"[:500]
    return back


def _seeds(result: dict[str, Any], seeds: range) -> None:
    began, before = time.monotonic(), result["took_s"]
    saved = began
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for seed, told in zip(seeds, pool.imap(functools.partial(trial, nodes=NODES), seeds, chunksize=4), strict=True):
            _add(result, seed, told)
            now = time.monotonic()
            result["took_s"] = round(before + now - began, 1)
            result["seeds_per_minute"] = round(60 * result["trials"] / max(result["took_s"], 0.1), 1)
            if now - saved > SAVE_S:
                saved = now
                _save(result)
    _save(result)


def _add(result: dict[str, Any], seed: int, told: dict[str, Any]) -> None:
    result["trials"] += 1
    log = told.get("log", "broken")
    result["logs"] = hashlib.blake2b(f"{result['logs']} {log}".encode(), digest_size=8).hexdigest()
    if "failure" in told:
        result["failures"][str(seed)] = told["failure"]
        return
    for name in SUMS:
        result["sums"][name] += told[name]
    result["outcomes"][told["outcome"]] = result["outcomes"].get(told["outcome"], 0) + 1
    for kind, state, many in told["hits"]:
        row = result["hits"].setdefault(kind, {})
        row[state] = row.get(state, 0) + many


def _save(result: dict[str, Any]) -> None:
    PATH.parent.mkdir(parents=True, exist_ok=True)
    ordered = {**result, "hits": {kind: dict(sorted(row.items())) for kind, row in sorted(result["hits"].items())}}
    PATH.write_text(json.dumps(ordered, indent=1) + "\n")
    line = f"chaos: {result['trials']} seeds, {result['seeds_per_minute']} a minute, {len(result['failures'])} broke a promise"
    print(f"\r{line}", end="", file=sys.stderr, flush=True)


def _told(result: dict[str, Any]) -> list[str]:
    """The matrix, and what was found."""
    hits: dict[Cell, int] = {(kind, state): many for kind, row in result["hits"].items() for state, many in row.items()}
    lines = table(hits, kinds(ENGINE))
    for token, told in result["regressions"].items():
        lines += [f"back again: {told}", f"  python -m tests.chaos.swarm_seeds {token}"]
    for seed, one in result["failures"].items():
        lines += [f"seed {seed}: {one['drawn']} faults, shrunk to {len(one['faults'])} in {one['replays']} replays"]
        lines += [f"  {line}" for line in [*one["faults"], one["scenario"], *one["told"]]]
        lines += [f"  python -m tests.chaos.swarm_seeds {one['token']}"]
    return lines

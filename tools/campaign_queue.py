"""The campaign `queue`: two jobs that want more than there is wait for six hours, and must not hold each other for ever.

Time is virtual, masters and agents are real. Each job wants 48 of 64 hosts. Nobody is placed for six hours; then each gets every
second host, so that neither has enough. Waiting must cost nothing, and whoever comes second must start within `gang_s` of room.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.chaos.queued import hours_in_a_queue

HOURS, HOSTS, TRIALS = 6.0, 64, 20
PATH = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "queue.json"
NOTHING = ("incidents", "charged", "lost")


def campaign(first: int, trials: int, machine: dict[str, Any]) -> int:
    """All trials. Returns 1 if waiting cost anything, or a job started too late."""
    told: list[dict[str, Any]] = []
    for seed in range(first, first + trials):
        told.append(hours_in_a_queue(HOURS, HOSTS, seed=seed))
        sys.stderr.write(
            f"\rqueue: {len(told)} trials, the second started after {_worst(told, 'second_starts_s')} s at most"
        )
        _save(first, machine, told)
    sys.stderr.write("\n")
    late = _worst(told, "second_starts_s") > told[0]["gang_s"]
    return 1 if late or any(one[name] for one in told for name in NOTHING) else 0


def _worst(told: list[dict[str, Any]], name: str) -> float:
    return float(max(one[name] for one in told))


def _save(first: int, machine: dict[str, Any], told: list[dict[str, Any]]) -> None:
    starts = ("first_starts_s", "second_starts_s")
    result = {
        "campaign": "queue",
        "seed": first,
        "machine": machine,
        "trials": len(told),
        **{name: told[0][name] for name in ("hosts", "wanted", "queued_s", "gang_s")},
        **{name: sum(one[name] for one in told) for name in (*NOTHING, "given_back")},
        "records_while_queued": max(one["records_while_queued"] for one in told),
        **{f"{name}_max": _worst(told, name) for name in starts},
        **{name: [one[name] for one in told] for name in starts},
    }
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(json.dumps(result, indent=1) + "\n")

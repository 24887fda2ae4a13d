"""Writes the measured constants of simulations from benchmarks/results: ``python -m tools.measured_constants``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FILE = ROOT / "src" / "dlrover_core" / "sim" / "measured.json"


def _row(result: dict[str, Any], what: str) -> float:
    """The median of ours in the row that begins so."""
    return float(next(row["ours_median"] for row in result["rows"] if row["what"].startswith(what)))


def _phase(result: dict[str, Any], what: str) -> float:
    """A phase of a killed worker's recovery, in seconds."""
    phases = result["details"]["plain script"]["ours_phases_ms"]
    return float(next(ms for name, ms in phases.items() if name.startswith(what))) / 1000


def constants() -> list[dict[str, Any]]:
    """Each with its unit, its source, and what it is."""
    names = ("killed_worker", "join_2000", "etcd_latency", "failover")
    worker, join, etcd, failover = (json.loads((RESULTS / f"{name}.json").read_text()) for name in names)
    agents = join["details"]["agents"]
    rows = (
        (
            "exit_s",
            _phase(worker, "kill -> the agent"),
            "killed_worker.json",
            "from a worker's death to its agent's notice",
        ),
        ("start_s", _phase(worker, "world -> commit"), "killed_worker.json", "from a world to its scripts' first line"),
        (
            "form_s_per_node",
            _row(join, "2,000 agents: first Hello") / agents,
            "join_2000.json",
            "a world formed and told, for each node of it",
        ),
        (
            "append_s",
            _row(etcd, "3 members: one event committed, p50") / 1000,
            "etcd_latency.json",
            "one append to the log",
        ),
        (
            "failover_s",
            _row(failover, "host of the leader killed: a command is durable again, p50"),
            "failover.json",
            "from the death of the leader's host to its successor's first durable answer",
        ),
    )
    return [
        {"name": name, "value": float(f"{value:.4g}"), "unit": "s", "source": source, "doc": doc}
        for name, value, source, doc in rows
    ]


def text() -> str:
    """The whole file."""
    machine = json.loads((RESULTS / "killed_worker.json").read_text())["machine"]
    return json.dumps({"machine": machine, "constants": constants()}, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())

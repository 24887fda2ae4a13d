"""Writes the table of benchmarks/README.md from benchmarks/results/*.json: ``python -m tools.benchmark_table``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
PAGE = BENCHMARKS / "README.md"
NAMES = (
    "killed_worker",
    "killed_node",
    "killed_master",
    "hung_master",
    "cold_start",
    "join",
    "overhead",
    "heartbeats",
    "join_2000",
    "idle",
    "commands",
    "replay",
    "etcd_append",
    "etcd_latency",
    "etcd_read",
    "failover",
    "etcd_growth",
    "simulate",
    "crashes",
    "goodput",
    "matcher",
    "diagnosis",
    "straggler",
    "detectors",
    "import",
    "checkpoint",
)
HEAD, TAIL = "## Latest results", "## Reading them"


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return ""
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text}{unit}"


def _row(row: dict[str, Any]) -> str:
    unit = f" {row['unit']}"
    target = ""
    if row["target"] is not None:
        sign, of = "<=" if row["most"] else ">=", "x" if row["of"] == "ratio" else unit
        target = f"{sign} {_number(row['target'], of)}"
    ratio = _number(row["ratio"], "x") if row["ratio"] else ""
    met = {None: "", True: "yes", False: "**no**"}[row["met"]]
    cells = (row["what"], _number(row["ours_median"], unit), _number(row["peer_median"], unit), ratio, target, met)
    return f"| {' | '.join(cells)} |"


def section() -> str:
    """The section with the table."""
    results = [json.loads((BENCHMARKS / "results" / f"{name}.json").read_text()) for name in NAMES]
    made = results[0]["machine"]
    where = f"{made['cores']} shared cores of {made['cpu']}, {made['memory_gib']} GiB, Linux {made['kernel']}"
    about = f"{results[0]['at'][:10]}, {where}, Python {made['python']}, torch {made['torch']}."
    rows = [_row(row) for result in results for row in result["rows"]]
    table = ["| figure | ours | peer | ratio | target | met |", "|---|---|---|---|---|---|", *rows]
    note = "Figures of two runs may differ by a third; all trials are in `results/*.json`."
    return "\n".join([HEAD, "", about, note, "", *table, "", ""])


def page() -> str:
    """The whole page, with the section as the results say."""
    text = PAGE.read_text()
    return text[: text.index(HEAD)] + section() + text[text.index(TAIL) :]


if __name__ == "__main__":
    PAGE.write_text(page())

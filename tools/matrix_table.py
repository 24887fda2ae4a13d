"""Writes the tables of docs/checkpoint.md from benchmarks/results/matrix.json: ``python -m tools.matrix_table``.

A table stands between two comments, ``<!-- matrix -->`` and ``<!-- /matrix -->``; the rest of the page is written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.matrix.cells import DISTURBANCES, REFUSED, ROWS, Cell, Row, cells

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "checkpoint.md"
RESULT = ROOT / "benchmarks" / "results" / "matrix.json"
BEGIN, END = "<!-- matrix -->\n", "<!-- /matrix -->"


def _shown(row: Row, nodes: int, disturbance: str, results: dict[str, Any]) -> str:
    """One cell of the table."""
    run = "restart" if row.words else disturbance
    found = results.get(Cell(row, nodes, run).name)
    if found is None:
        return "not run"
    if not found["met"]:
        return "**no**"
    if found["expected"] == REFUSED:
        return "refused"
    return "restored" if disturbance == "other_world" else "equal"


def table() -> list[str]:
    """The table, and a sentence that counts it."""
    result = json.loads(RESULT.read_text())
    results = result["cells"]
    told = [results[one.name] for one in cells() if one.name in results]
    equal = sum(one["met"] and one["expected"] != REFUSED for one in told)
    refused = sum(one["met"] and one["expected"] == REFUSED for one in told)
    compared = sum(one.get("compared", 0) for one in told)
    wrong = sum(not one["met"] for one in told)
    missing = len(cells()) - len(told)
    head = ["what is trained", "nodes", *DISTURBANCES.values()]
    rows = [
        [row.says if nodes == 1 else "", str(nodes), *(_shown(row, nodes, one, results) for one in DISTURBANCES)]
        for row in ROWS
        for nodes in (1, 2)
    ]
    lines = [head, ["---"] * len(head), *rows]
    rest = [
        *([f"**{wrong} {'do' if wrong > 1 else 'does'} not hold**"] if wrong else []),
        *([f"{missing} {'are' if missing > 1 else 'is'} not run yet"] if missing else []),
    ]
    restored = f"{equal} of {len(cells())} runs restore the right state"
    counted = ", ".join([restored, f"{refused} are refused, as they must be", *rest])
    return [
        f"{counted}. {compared:,} steps were compared with those of undisturbed runs, rank by rank.",
        "",
        *("|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in lines),
    ]


def page(text: str) -> str:
    """The page with its table made anew."""
    assert text.count(BEGIN) == text.count(END) == 1, f"{PAGE.name} has no one place for the matrix"
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n".join(table()) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

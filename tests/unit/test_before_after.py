"""Two trees compared: rows of an earlier day stay in the result, and each names a row that its benchmark has."""

from __future__ import annotations

import json

import pytest
from tools.before_after import AS_FAST, BENCHES, CPU, ROOT, Bench, merged


def result(at: str, *rows: tuple[str, float]) -> str:
    """A result of a day, of figures with their ratios."""
    told = [row for what, ratio in rows for row in ({"what": what}, {"what": AS_FAST, "ratio": ratio})]
    return json.dumps({"at": at, "commit": f"of {at}", "peer": "p", "rows": told, "notes": [at]})


def test_rows_that_are_not_measured_anew_stay() -> None:
    """Each with its own day; those that are take the place of the older ones."""
    once = merged("", result("monday", ("replay", 0.9), ("join", 0.8)))
    told = json.loads(merged(once, result("tuesday", ("join", 1.0), ("commands", 1.1))))
    assert [(row["what"], row["at"], row["commit"]) for row in told["rows"]] == [
        (what, day, f"of {day}")
        for name, day in (("replay", "monday"), ("join", "tuesday"), ("commands", "tuesday"))
        for what in (name, AS_FAST)
    ]
    assert [row["ratio"] for row in told["rows"] if row["what"] == AS_FAST] == [0.9, 1.0, 1.1]
    assert told["notes"] == ["tuesday"]


def test_what_is_recorded_can_be_merged() -> None:
    """The result of the repository is one that rows can be added to, and stays as it is otherwise."""
    recorded = (ROOT / "benchmarks" / "results" / "before_after.json").read_text()
    told = json.loads(merged(recorded, result("now", ("levelled", 1.0))))
    assert [row["what"] for row in told["rows"]] == [
        *(row["what"] for row in json.loads(recorded)["rows"]), "levelled", AS_FAST,
    ]  # fmt: skip


@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES)
def test_each_names_a_row_of_its_benchmark(bench: Bench) -> None:
    """The script is there, and what it recorded last has the row."""
    assert (ROOT / bench.script).is_file()
    if bench.script.startswith("benchmarks/") and bench.row != CPU:
        name = bench.script.removeprefix("benchmarks/bench_").removesuffix(".py")
        told = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        assert any(bench.row in row["what"] for row in told["rows"])

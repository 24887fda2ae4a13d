"""Writes the tables of docs/chaos.md from the code, so that the two cannot differ: ``python -m tools.chaos_tables``.

A table stands between two comments, ``<!-- faults -->`` and ``<!-- /faults -->``; the rest of the page is written by hand.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "chaos.md"


def faults() -> list[str]:
    """Every kind of fault."""
    from dlrover_core.sim.faults import KINDS, LEVELS

    rows = []
    for name, kind in KINDS.items():
        usual = f"{kind.default:g} {kind.unit}" if kind.default else (kind.unit and f"0 {kind.unit}")
        there = ["x" if level in kind.levels else "" for level in LEVELS]
        rows.append((f"`{name}`", kind.target, kind.doc, usual, *there))
    return _table(("kind", "target", "what it does", "amount", *LEVELS), rows)


def moments() -> list[str]:
    """Every text that names a moment."""
    from dlrover_core.sim.triggers import ABOUT_NODES, PHRASES, STATES, parse

    texts = {
        "12.5 s": "that long after the job was submitted",
        "step 100": "this many steps are made",
        "event 57": "the log's record of this number",
        "NodeJoined worker-1": "the next record of this event, of this node if one is named",
        "world 3 formed": "workers are told to begin, in this generation",
    }
    texts |= {f"node worker-1 {verb}": f"the next `{event}` of this node" for verb, event in ABOUT_NODES.items()}
    texts["node worker-1 relaunched"] = "the next `NodePlanned` of this node that is not its first"
    texts |= {phrase: f"the next `{' '.join((event, *words))}`" for phrase, (event, words) in PHRASES.items()}
    known = {
        "all running": "every worker of every group is started and has made a step in this generation",
        "job over": "the job has ended, well or not",
    }
    texts |= {state: known[state] for state in STATES}
    for text in texts:
        parse(text)
    return _table(("moment", "when it has come"), [(f"`{text}`", doc) for text, doc in texts.items()])


def scenario() -> list[str]:
    """Every field of a scenario."""
    from dlrover_core.sim.scenario import Scenario

    return _table(
        ("field", "default", "meaning"),
        [(f"`{one.name}`", f"`{one.default!r}`", one.metadata["doc"]) for one in dataclasses.fields(Scenario)],
    )


def options() -> list[str]:
    """Every option of the plugin."""
    from dlrover_core.testing import plugin

    told: list[tuple[str, str]] = []

    class Noted:
        """A parser that remembers what it is given."""

        def getgroup(self, *_: Any) -> Noted:
            return self

        def addoption(self, name: str, *, help: str, metavar: str = "", **_: Any) -> None:  # noqa: A002  # pytest's
            told.append((f"`{' '.join(filter(None, (name, metavar)))}`", help))

        def addini(self, name: str, help: str, **_: Any) -> None:  # noqa: A002  # pytest's
            told.append((f"`{name}` (ini file)", help))

    plugin.pytest_addoption(Noted())  # type: ignore[arg-type]  # all of it that is asked for
    return _table(("option", "meaning"), told)


def promises() -> list[str]:
    """Every promise that is asked by default."""
    from dlrover_core.testing import invariants

    rows = [(f"`{one.__name__}`", _first_sentence(one)) for one in invariants.DEFAULT]
    return _table(("promise", "what must hold after every event"), rows)


def contracts() -> list[str]:
    """Every promise of the conformance kits."""
    from dlrover_core.testing.conformance import KITS, promises

    return _table(
        ("contract", "promise", "in words"),
        [(kind, f"`{one.name}`", one.text) for kind, kit in KITS.items() for one in promises(kit)],
    )


def classes() -> list[str]:
    """Where time goes."""
    from dlrover_core.sim.run import CLASSES

    return _table(("class", "meaning"), [(f"`{name}`", doc) for name, doc in CLASSES.items()])


TABLES: tuple[Callable[[], list[str]], ...] = (faults, moments, scenario, options, promises, contracts, classes)


def _first_sentence(one: type) -> str:
    return " ".join((inspect.getdoc(one) or "").partition("\n\n")[0].split()).rstrip(".")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in row] for row in lines)
    return ["|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in cells]


def page(text: str) -> str:
    """The page, its tables made anew. A table that the page has no place for is an error, as is a place without a table."""
    for table in TABLES:
        name = table.__name__
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        assert text.count(begin) == text.count(end) == 1, f"docs/chaos.md has no one place for {name}"
        before, _, rest = text.partition(begin)
        text = before + begin + "\n".join(table()) + "\n" + end + rest.partition(end)[2]
    known = {table.__name__ for table in TABLES}
    assert set(re.findall(r"<!-- (\w+) -->", text)) == known
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

"""Leaving one source out: what only that source supports is taken out of the table, and nothing else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dlrover_core.diagnosis import signatures
from dlrover_core.diagnosis.signatures import Signature, Table

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "_leaving_out.py"


@pytest.fixture(name="leaving_out")
def _leaving_out(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_leaving_out", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "_leaving_out", module)
    spec.loader.exec_module(module)
    return module


def _table(*patterns: str) -> Table:
    made = Signature("rack.cooling", "cooling", "HW", "check", "host", 0.9, ("log",), patterns)
    return Table((made,))


def test_branches_are_those_of_the_outermost_choice(leaving_out: ModuleType) -> None:
    """A bar within a group, a class or behind a backslash parts nothing."""
    assert leaving_out.branches(r"a(?:b|c)d|[x|y]e|f\|g") == [r"a(?:b|c)d", "[x|y]e", r"f\|g"]
    every = [pattern for one in signatures.table().by_id.values() for pattern in one.patterns]
    assert all("|".join(leaving_out.branches(pattern)) == pattern for pattern in every)


def test_only_what_one_group_alone_supports_is_taken_out(leaving_out: ModuleType) -> None:
    """Other branches, and other groups' tables, stay as they are."""
    table = _table("coolant lost|pump stopped", "leak found")
    support = leaving_out.supported(
        table, [("a", "[rank0]: coolant lost\npump stopped"), ("b", "the pump stopped"), ("c", "nothing")]
    )
    extra = leaving_out.without(table, support, "a", leaving_out.STRICT)
    left = signatures.table(extra).by_id["rack.cooling"]
    assert left.patterns == ("pump stopped", "leak found")
    assert left.verdict == "HW"
    assert leaving_out.without(table, support, "b", leaving_out.STRICT) == ""
    assert leaving_out.without(table, support, "c", leaving_out.STRICT) == ""


def test_what_is_older_than_the_corpus_is_spared(leaving_out: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """TAUGHT leaves what the table held before the corpus was read."""
    table = _table("coolant lost")
    support = leaving_out.supported(table, [("a", "coolant lost")])
    assert leaving_out.without(table, support, "a", leaving_out.TAUGHT)
    monkeypatch.setattr(leaving_out, "earlier", lambda: frozenset([leaving_out.mark_of("coolant lost")]))
    assert leaving_out.without(table, support, "a", leaving_out.TAUGHT) == ""


def test_the_record_of_what_is_older_is_there(leaving_out: ModuleType) -> None:
    """Most of the table is older than the corpus."""
    older = leaving_out.earlier()
    assert len(older) > 900
    assert all(len(one) == leaving_out.FIGURES for one in older)

"""What is folded and packed is read by somebody: a field of the state that nobody reads costs every snapshot, for nothing."""

from __future__ import annotations

import ast
from pathlib import Path

from dlrover_core.job.state import JobState
from dlrover_core.kernel.state import _describe

SOURCES = Path(__file__).parents[2] / "src"


def _fields() -> list[str]:
    """``Class.field`` of everything in the state."""
    lines: list[str] = []
    _describe(JobState, lines, set())
    return [line.partition(":")[0] for line in lines]


def _read() -> set[str]:
    """Every name that is read as an attribute somewhere, or stands in a string (`Remembering.listed`)."""
    found: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_every_field_of_the_state_is_read() -> None:
    """A name that is only ever written is no part of the state. (Of two fields with one name this sees one reader.)"""
    fields, read = _fields(), _read()
    assert len(fields) > 200
    assert [field for field in fields if field.partition(".")[2] not in read] == []

"""The public names of dlrover_core are pinned: adding or removing one is a decision, not an accident."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dlrover_core

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"
PINNED = [line for line in (HERE / "exports.txt").read_text().splitlines() if line and not line.startswith("#")]
# What `import dlrover_core` must not pay for.
HEAVY = ("aiohttp", "asyncio", "sqlite3", "structlog", "torch", "transitions")


def test_exports() -> None:
    """`dlrover_core.__all__` is exactly the sorted list in exports.txt."""
    assert sorted(dlrover_core.__all__) == PINNED


def test_exports_are_sorted_once() -> None:
    """exports.txt names each export once, in order, so that its differences read well."""
    assert sorted(set(PINNED)) == PINNED


def test_every_name_resolves() -> None:
    """Every public name resolves, and dir() shows it."""
    assert {name for name in PINNED if getattr(dlrover_core, name, None) is None} == set()
    assert set(PINNED) <= set(dir(dlrover_core))


def test_unknown_name() -> None:
    """A name that is not public is an AttributeError that repeats it, as for any module."""
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = dlrover_core.no_such_name


def test_visible_to_type_checkers() -> None:
    """Every public name is bound where a type checker looks: at the top or under TYPE_CHECKING."""
    tree = ast.parse(Path(dlrover_core.__file__).read_text())
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {one.asname or one.name for one in node.names}
        elif isinstance(node, ast.Assign):
            bound |= {one.id for one in node.targets if isinstance(one, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            bound.add(node.target.id)
    assert set(PINNED) - bound == set()


def test_import_is_cheap() -> None:
    """`import dlrover_core` loads no third party but msgpack, and none of the standard library's heavy modules."""
    code = f"import sys; sys.path.insert(0, {str(SRC)!r}); before = set(sys.modules); import dlrover_core; "
    code += "print(*sorted({one.partition('.')[0] for one in set(sys.modules) - before}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    assert loaded & set(HEAVY) == set()
    foreign = loaded - set(sys.stdlib_module_names) - {"dlrover_core", "msgpack"}
    assert foreign == set()

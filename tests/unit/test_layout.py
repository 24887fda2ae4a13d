"""The shape of the code: sizes, purity of the core, and folders that must stay namespace-free."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
MODULES = sorted(SRC.rglob("*.py"))
PURE = sorted(
    path
    for name in ("kernel", "job", "diagnosis", "checkpoint")
    for path in (SRC / "dlrover_core" / name).rglob("*.py")
)
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 600

# What would make two runs of the same history differ, or reach outside.
IMPURE_MODULES = {
    "asyncio",
    "datetime",
    "multiprocessing",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
IMPURE_OF_OS = {"environ", "environb", "getenv", "getpid", "urandom"}
# hash() and id() differ from process to process.
IMPURE_CALLS = {"hash", "id", "input", "open", "print"}


def _name(path: Path) -> str:
    return str(path.relative_to(SRC))


def _impurities(tree: ast.AST) -> list[str]:
    """The clock, chance and I/O that ``tree`` can reach, each with its line."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, one.name) for one in node.names if one.name.partition(".")[0] in IMPURE_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.partition(".")[0] in IMPURE_MODULES:
                found.append((node.lineno, node.module))
            elif node.module == "os":
                found += [(node.lineno, f"os.{one.name}") for one in node.names if one.name in IMPURE_OF_OS]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            found += [(node.lineno, f"os.{node.attr}")] if node.attr in IMPURE_OF_OS else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            found.append((node.lineno, f"{node.func.id}()"))
    return [f"line {line}: {what}" for line, what in sorted(found)]


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_sizes(path: Path) -> None:
    """No module is longer than 600 lines, no function longer than 70."""
    text = path.read_text()
    assert len(text.splitlines()) <= MODULE_LINES_MAX, "two ideas in one module: split it"
    functions = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {one.name: (one.end_lineno or one.lineno) - one.lineno + 1 for one in functions}
    assert {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES_MAX} == {}


@pytest.mark.parametrize("path", PURE, ids=_name)
def test_purity(path: Path) -> None:
    """Kernel, job, diagnosis, checkpoint: no clock, no randomness, no environment, no I/O: the same seed, the same history."""
    assert _impurities(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    ["import time", "from random import choice", "import os; os.environ['A']", "from os import urandom", "hash('a')"],
)
def test_purity_is_checked(code: str) -> None:
    """The purity check finds what it is meant to find."""
    assert _impurities(ast.parse(code)) != []


@pytest.mark.parametrize("folder", ["adapters", "backends"])
def test_no_top_level_packages(folder: str) -> None:
    """src/adapters and src/backends are folders, never packages: their names belong to other distributions."""
    assert not (SRC / folder / "__init__.py").exists()


def test_packages_are_typed() -> None:
    """Each package tells type checkers that its annotations count."""
    packages = [SRC / "dlrover_core", SRC / "adapters" / "dlrover_adapters", SRC / "backends" / "dlrover_backends"]
    assert [str(one) for one in packages if not (one / "py.typed").exists()] == []

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
    for name in ("kernel", "job", "rules", "diagnosis", "checkpoint", "data")
    for path in (SRC / "dlrover_core" / name).rglob("*.py")
)
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 600
HOLDS_FUNCTIONS = (ast.stmt, ast.excepthandler, ast.match_case)

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


def _too_long(text: str) -> list[str]:
    """What of a module's ``text`` is two ideas in one place: split it."""
    lines = len(text.splitlines())
    found = [f"{lines} lines"] if lines > MODULE_LINES_MAX else []
    left: list[ast.AST] = [ast.parse(text)]
    while left:
        one = left.pop()
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (one.end_lineno or one.lineno) - one.lineno + 1
            found += [f"{one.name}: {lines} lines"] if lines > FUNCTION_LINES_MAX else []
        # Expressions hold no functions with a name, and are most of a tree.
        left += [inner for inner in ast.iter_child_nodes(one) if isinstance(inner, HOLDS_FUNCTIONS)]
    return found


def test_sizes() -> None:
    """No module is longer than 600 lines, no function longer than 70."""
    assert len(MODULES) > 300
    assert {_name(path): found for path in MODULES if (found := _too_long(path.read_text()))} == {}


def test_sizes_are_checked() -> None:
    """The size check finds a module and a function of one line too many, and lets the longest that may be pass."""
    function = "    def long():\n" + "        pass\n" * FUNCTION_LINES_MAX
    for around in ("class A:\n", "try:\n    pass\nexcept E:\n", "match 1:\n  case 2:\n"):
        assert _too_long(around + function) == ["long: 71 lines"]
    assert _too_long("x = 1\n" * (MODULE_LINES_MAX + 1)) == ["601 lines"]
    assert _too_long("def long():\n" + "    pass\n" * (FUNCTION_LINES_MAX - 1) + "x = 1\n" * 530) == []


def test_purity() -> None:
    """Kernel, job, diagnosis, checkpoint: no clock, no randomness, no environment, no I/O: the same seed, the same history."""
    assert len(PURE) > 60
    assert {_name(path): found for path in PURE if (found := _impurities(ast.parse(path.read_text())))} == {}


@pytest.mark.parametrize(
    "code",
    ["import time", "from random import choice", "import os; os.environ['A']", "from os import urandom", "hash('a')"],
)
def test_purity_is_checked(code: str) -> None:
    """The purity check finds what it is meant to find."""
    assert _impurities(ast.parse(code)) != []


# Where "worker" is a process and no group: what a fault strikes, what a worker's process is called, and the word in a sentence.
OF_PROCESSES = {
    "history/words/nodes.py",
    "sim/datasets.py",
    "sim/faults.py",
    "sim/generator.py",
    "testing/processes.py",
}


def _of_one_group(tree: ast.AST) -> list[str]:
    """Where code takes it that a job has one group, or groups of certain names."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = node.value in {"worker", "ps", "chief"} or node.value.startswith("worker-")
            found += [f"{node.lineno}: {node.value!r}"] if named and " " not in node.value else []
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            first = node.value.attr == "groups" and isinstance(node.slice, ast.Constant) and node.slice.value == 0
            found += [f"{node.lineno}: groups[0]"] if first else []
    return found


def test_the_core_knows_no_group_by_name() -> None:
    """A job has several groups, and its user names them: none is the one that trains, but `DEFAULT_GROUP` of a job of one."""
    core = [path for path in MODULES if path.is_relative_to(SRC / "dlrover_core")]
    found = {_name(path).removeprefix("dlrover_core/"): _of_one_group(ast.parse(path.read_text())) for path in core}
    mine = {name for name, lines in found.items() if lines} - OF_PROCESSES
    # Its definition, and the names that jobs made by chance have.
    assert {name: found[name] for name in mine - {"spec.py", "testing/swarm_groups.py"}} == {}
    assert len(found["spec.py"]) == 1
    assert [line.split(": ")[1] for line in found["testing/swarm_groups.py"]] == ["'chief'"]


@pytest.mark.parametrize("code", ["if group == 'ps': pass", "spec.groups[0]", "f'worker-{index}'", "GROUP = 'worker'"])
def test_groups_by_name_are_found(code: str) -> None:
    """That check finds what it is meant to find."""
    assert _of_one_group(ast.parse(code)) != []


@pytest.mark.parametrize("folder", ["adapters", "backends"])
def test_no_top_level_packages(folder: str) -> None:
    """src/adapters and src/backends are folders, never packages: their names belong to other distributions."""
    assert not (SRC / folder / "__init__.py").exists()


def test_packages_are_typed() -> None:
    """Each package tells type checkers that its annotations count."""
    packages = [SRC / "dlrover_core", SRC / "adapters" / "dlrover_adapters", SRC / "backends" / "dlrover_backends"]
    assert [str(one) for one in packages if not (one / "py.typed").exists()] == []

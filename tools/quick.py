"""Runs the unit tests that a change most probably breaks: ``python -m tools.quick [words for pytest]``; `make quick`.

What changed is what differs from the branch that yours began on (``BASE``; origin/main, else main), and what is not committed.
Tests are chosen by imports, the nearest first: tests that changed, tests that import a changed module, then those that import
one of its importers, and so on, up to `FILES_MAX` files. Of a changed file that is no Python it takes the tests that name it.
`make test` runs all.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES_MAX = 40
ROOTS = ("src/adapters", "src/backends", "src", "")
ALWAYS = ("test_docs.py", "test_exports.py", "test_layout.py", "test_lifecycle.py")
"""Rules over the whole tree, in seconds."""


def changed(root: Path = ROOT, base: str = "") -> list[str]:
    """The files that differ from where this branch began, by path."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)  # noqa: S607
        return done.stdout.splitlines() if done.returncode == 0 else []

    began = next(
        (found[0] for one in (base, "origin/main", "main") if one and (found := git("merge-base", "HEAD", one))), "HEAD"
    )
    return sorted({*git("diff", "--name-only", began), *git("ls-files", "--others", "--exclude-standard")})


def module_of(path: str) -> str:
    """The name that a file is imported by."""
    for root in ROOTS:
        if path.startswith(f"{root}/" if root else ""):
            found = path.removeprefix(f"{root}/").removesuffix(".py").removesuffix("/__init__")
            return found.replace("/", ".")
    return path


def imports(path: Path) -> set[str]:
    """Everything that a file imports, at the top or anywhere else: packages too, and names in them that may be modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return found


def graph(root: Path = ROOT) -> dict[str, set[str]]:
    """By path, the paths of our own files that each imports."""
    files = [one for part in ("src", "tests", "tools", "examples") for one in (root / part).rglob("*.py")]
    names = {module_of(path): path for path in (str(one.relative_to(root)) for one in files)}
    names |= {Path(path).stem: path for path in names.values() if path.startswith("tests/")}
    return {
        str(one.relative_to(root)): {names[name] for name in imports(one) if name in names}
        - {str(one.relative_to(root))}
        for one in files
    }


def near(files: Iterable[str], imported: Mapping[str, set[str]]) -> dict[str, int]:
    """How many imports each file is away from one of ``files``; those that do not reach any are left out."""
    importers: dict[str, set[str]] = {}
    for path, others in imported.items():
        for other in others:
            importers.setdefault(other, set()).add(path)
    found = {one: 0 for one in files if one in imported}
    left = deque(found)
    while left:
        one = left.popleft()
        for path in importers.get(one, ()):
            if path not in found:
                found[path] = found[one] + 1
                left.append(path)
    return found


def chosen(files: Iterable[str], root: Path = ROOT) -> tuple[list[str], int]:
    """The unit tests to run, the nearest first, and how many that reach a changed file were left out."""
    files = list(files)
    far = near(files, graph(root))
    tests = {path: away for path, away in far.items() if re.fullmatch(r"tests/unit/test_\w+\.py", path)}
    named = [re.escape(Path(one).name) for one in files if not one.endswith(".py")]
    if named:
        for one in (root / "tests" / "unit").glob("test_*.py"):
            if re.search("|".join(named), one.read_text(encoding="utf-8")):
                tests[str(one.relative_to(root))] = 0
    nearest = sorted(tests, key=lambda path: (tests[path], path))
    always = [f"tests/unit/{one}" for one in ALWAYS if (root / "tests" / "unit" / one).exists()]
    return list(dict.fromkeys([*always, *nearest[:FILES_MAX]])), max(0, len(nearest) - FILES_MAX)


def main(words: list[str]) -> int:
    """Choose, say what was chosen, and run it."""
    files = changed(base=os.environ.get("BASE", ""))
    tests, left_out = chosen(files)
    print(
        f"{len(files)} files differ; {len(tests)} test files; {left_out} that reach them from further off are left to `make test`"
    )
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not nightly", *words, *tests], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Checks a change in at most `BUDGET_S` seconds: ``python -m tools.quick [words for pytest]``; `make quick`.

`make check` and the unit tests nearest to the change run side by side, each until the time is over. Nothing that was still to
come then counts as passed or failed: the last lines say what was not run, and `make test` runs all.

The change is what differs from where this branch began (``BASE``; origin/main, else main), committed or not. Tests are
chosen by imports, the nearest first: tests that changed, tests that import a changed module, then those that import one of its
importers, and so on, up to `FILES_MAX` files. For a changed file that is not Python, the tests that name it are chosen.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES_MAX = 40
"""Collecting more would take a large part of the time."""
BUDGET_S = 90.0
STOP_S, KILL_S = 76.0, 82.0
"""When no further test begins, and when tests under way are killed. The rest is for pytest's own end."""
ROOTS = ("src/adapters", "src/backends", "src", "")
FIRST = 10
"""Files that run before the rules over the whole tree."""
IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]*(\([^)]*\)|[^\n#;]*)|import[ \t]+([\w., \t]+))", re.MULTILINE
)
"""A statement, wherever it stands in its line's beginning."""
ALWAYS = ("test_docs.py", "test_exports.py", "test_layout.py", "test_lifecycle.py")
"""Rules over the whole tree."""


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


def imports(path: Path, package: str = "") -> set[str]:
    """Everything that a file of ``package`` imports, at the top or anywhere else: packages too, and names that may be modules.

    By the lines that look so, which takes a tenth of the time that parsing takes. A script in a string counts with the file.
    """
    found = set()
    for module, names, plain in IMPORT.findall(path.read_text(encoding="utf-8")):
        if module:
            module = absolute(module, package)
            found |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))}
        else:
            found |= {one.split()[0] for one in plain.split(",") if one.strip()}
    return found


def absolute(module: str, package: str) -> str:
    """The name of a module that a file of ``package`` imports; each leading dot after the first is one package further up."""
    name = module.lstrip(".")
    dots = len(module) - len(name)
    if not dots:
        return name
    parts = package.split(".")
    return ".".join([*parts[: max(0, len(parts) - dots + 1)], *filter(None, [name])])


def package_of(path: str) -> str:
    """The package that a file's relative imports begin in: an ``__init__.py`` is its own."""
    name = module_of(path)
    return name if Path(path).name == "__init__.py" else name.rpartition(".")[0]


def graph(root: Path = ROOT) -> dict[str, set[str]]:
    """By path, the paths of our own files that each imports."""
    files = [one for part in ("src", "tests", "tools", "examples") for one in (root / part).rglob("*.py")]
    paths = [str(one.relative_to(root)) for one in files]
    names = {module_of(path): path for path in paths}
    names |= {Path(path).stem: path for path in names.values() if path.startswith("tests/")}
    return {
        path: {names[name] for name in imports(root / path, package_of(path)) if name in names} - {path}
        for path in paths
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
    kept = nearest[:FILES_MAX]
    return list(dict.fromkeys([*kept[:FIRST], *always, *kept[FIRST:]])), len(nearest) - len(kept)


class Budget:
    """A pytest plugin that counts, and ends the run: no test begins ``stop_s`` from now on, none runs on after ``kill_s``."""

    def __init__(self, stop_s: float, kill_s: float) -> None:
        self._until = time.monotonic() + stop_s
        self.counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        self.over = False
        self.spared: set[int] = set()
        """Children of this process that are not pytest's."""
        self._interrupted = threading.Event()
        self._timer = threading.Timer(kill_s, self._interrupt)
        self._timer.daemon = True
        self._timer.start()

    def _interrupt(self) -> None:
        self.over = True
        os.kill(os.getpid(), signal.SIGINT)
        self._interrupted.wait(
            1
        )  # a worker that dies before pytest has heard of the interrupt would count as a failure
        for one in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if int(one) not in self.spared:
                os.kill(int(one), signal.SIGKILL)

    def pytest_keyboard_interrupt(self) -> None:
        """Pytest reports nothing more of its workers."""
        self._interrupted.set()

    def close(self) -> None:
        """Interrupt nothing any more."""
        self._timer.cancel()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count each test once, a failing fixture as a failure."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Take xdist's session, which ends a run side by side."""
        self._side = config.pluginmanager.get_plugin("dsession")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Any:
        """Take the session, which ends a run in one process."""
        self._session = session
        return (yield)

    def pytest_runtest_logfinish(self) -> None:
        """End the run after a test, if the time is over."""
        if time.monotonic() >= self._until and not self.over:
            self.over = True
            (self._side or self._session).shouldstop = "the time is over"

    def line(self) -> str:
        """What came of it, in words."""
        found = ", ".join(f"{count} {word}" for word, count in self.counts.items() if count) or "no test ran"
        return f"{found}; the time was over before all had run" if self.over else found


class Checks:
    """`make check`, beside the tests, in a process group of its own."""

    def __init__(self, line: tuple[str, ...] = ("make", "--no-print-directory", "check")) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `end`
        self._process = subprocess.Popen(
            line, cwd=ROOT, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.pid = self._process.pid

    def end(self, until: float) -> tuple[int, str]:
        """Its exit status (-1: it was not over in time) and its output."""
        try:
            code = self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = -1
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with self._output as output:
            output.seek(0)
            return code, output.read().decode(errors="replace")


def main(words: list[str]) -> int:
    """Choose, say what was chosen, run it beside the checks, and say what came of both."""
    until = time.monotonic() + BUDGET_S
    beside, budget = Checks(), Budget(STOP_S, KILL_S)
    budget.spared.add(beside.pid)
    try:
        files = changed(base=os.environ.get("BASE", ""))
        tests, left_out = chosen(files)
        print(f"{len(files)} files differ; {len(tests)} test files are near, {left_out} are further off", flush=True)
        os.chdir(ROOT)
        code = int(pytest.main(["-q", "-m", "not nightly", *words, *tests], plugins=[budget]))
    finally:
        budget.close()
        checked, output = beside.end(until)
    if budget.over and not budget.counts["failed"]:
        code = 0
    print(output if checked else "", end="")
    print(f"tests: {budget.line()}")
    print("check:", {0: "passed", -1: "not over in time; run `make check`"}.get(checked, f"failed, exit {checked}"))
    return code or max(0, checked)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

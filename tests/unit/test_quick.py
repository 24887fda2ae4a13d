"""`make quick` chooses the tests that a change most probably breaks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tools import quick

TREE = {
    "src/dlrover_core/deep.py": "",
    "src/dlrover_core/near.py": "from dlrover_core import deep",
    "src/dlrover_core/other.py": "import json",
    "src/adapters/dlrover_adapters/far.py": "def late():\n    from dlrover_core.near import name",
    "src/adapters/dlrover_adapters/torch/__init__.py": "def late():\n    from .data.stream import Stream",
    "src/adapters/dlrover_adapters/torch/data/stream.py": "from ..world import here\nfrom . import left",
    "src/adapters/dlrover_adapters/torch/data/left.py": "",
    "src/adapters/dlrover_adapters/torch/world.py": "",
    "docs/page.md": "words",
    "tests/unit/helper.py": "from dlrover_core.near import name",
    "tests/unit/test_a.py": "from dlrover_adapters.far import late",
    "tests/unit/test_b.py": "from dlrover_core.deep import name",
    "tests/unit/test_c.py": "import helper",
    "tests/unit/test_d.py": "import dlrover_core.other",
    "tests/unit/test_e.py": "PAGE = 'docs/page.md'",
    "tests/unit/test_g.py": "from dlrover_adapters.torch import Stream",
    "tests/unit/test_layout.py": "",
    "tests/chaos/test_f.py": "import dlrover_core.deep",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small house."""
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(paths: list[str]) -> list[str]:
    """Without folder and ending."""
    return [Path(one).stem.removeprefix("test_") for one in paths]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["src/dlrover_core/deep.py"], "bac"),
        (["src/adapters/dlrover_adapters/far.py"], "a"),
        (["tests/unit/helper.py"], "c"),
        (["tests/unit/test_d.py"], "d"),
        (["src/adapters/dlrover_adapters/torch/data/left.py"], "g"),
        (["src/adapters/dlrover_adapters/torch/world.py"], "g"),
        (["docs/page.md"], "e"),
        (["docs/page.md", "src/dlrover_core/other.py"], "ed"),
        (["src/dlrover_core/gone.py"], ""),
        ([], ""),
    ],
)
def test_the_nearest_come_first(tree: Path, changed: list[str], expected: str) -> None:
    """By imports, also relative ones, those in functions and of helpers; tests that name a page; rules over the tree always."""
    tests, left_out = quick.chosen(changed, tree)
    assert (names(tests), left_out) == ([*expected, "layout"], 0)


def test_what_counts_as_an_import(tmp_path: Path) -> None:
    """Statements of every form, wherever they begin a line; words in the middle of one do not."""
    (tmp_path / "a.py").write_text(
        "import a.b, c as d\nfrom e import (\n    f,  # why\n    g as h,\n)\nif x:\n    from i.j import k; import_ = 1\n"
        "words = 'we import z'\n"
    )
    found = quick.imports(tmp_path / "a.py")
    assert {"a.b", "c", "e", "e.f", "e.g", "i.j", "i.j.k"} <= found
    assert not found & {"d", "z", "import_", "i.j.import_"}


def test_the_nearest_come_before_the_rules(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where time is short, a rule over the whole tree must not keep a change's own tests from running."""
    monkeypatch.setattr(quick, "FIRST", 1)
    assert names(quick.chosen(["src/dlrover_core/deep.py"], tree)[0]) == ["b", "layout", "a", "c"]


def test_no_more_than_fit(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The furthest are left out, and counted."""
    monkeypatch.setattr(quick, "FILES_MAX", 1)
    assert quick.chosen(["src/dlrover_core/deep.py"], tree) == (
        ["tests/unit/test_b.py", "tests/unit/test_layout.py"],
        2,
    )


def test_what_has_changed(tree: Path) -> None:
    """Commits since the branch began, what is not committed, and files that git does not know yet; outside git nothing."""

    def git(*words: str) -> None:
        line = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        subprocess.run(line, cwd=tree, check=True, capture_output=True)

    assert quick.changed(tree) == []
    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-qm", "all")
    git("checkout", "-qb", "mine")
    (tree / "docs/page.md").write_text("other words")
    git("commit", "-qam", "page")
    (tree / "tests/unit/test_d.py").write_text("")
    (tree / "new.py").write_text("")
    assert quick.changed(tree) == ["docs/page.md", "new.py", "tests/unit/test_d.py"]
    assert quick.changed(tree, "HEAD") == ["new.py", "tests/unit/test_d.py"]


BOUNDED = """
import sys, pytest
from tools.quick import Budget
budget = Budget(*map(float, sys.argv[1:3]))
try: pytest.main(sys.argv[3:], plugins=[budget])
finally: budget.close()
print(budget.line())
"""
MANY = """
import pytest
@pytest.mark.parametrize("number", range(9))
def test_one(number): assert number != 3
"""
ENDLESS = "import threading\ndef test_one(): threading.Event().wait()"


@pytest.mark.parametrize(
    ("text", "stop_s", "kill_s", "side", "expected"),
    [
        (MANY, 600, 600, False, "8 passed, 1 failed"),
        (MANY, 0, 600, True, "; the time was over before all had run"),
        (ENDLESS, 600, 4, True, "no test ran; the time was over before all had run"),
    ],
    ids=["all", "some", "none"],
)
def test_the_time_is_kept(tmp_path: Path, text: str, stop_s: int, kill_s: int, side: bool, expected: str) -> None:
    """When the time is over no test begins, then one that still runs is interrupted; only what has run is counted."""
    (tmp_path / "test_it.py").write_text(text)
    words = [*(("-n", "1", "--maxschedchunk", "1") if side else ()), "-q", "-c", "/dev/null", str(tmp_path)]
    line = [sys.executable, "-c", BOUNDED, str(stop_s), str(kill_s), *words]
    done = subprocess.run(line, cwd=quick.ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1].endswith(expected)


@pytest.mark.parametrize(("code", "patience_s", "expected"), [(0, 60, 0), (3, 60, 3), (None, 0.2, -1)])
def test_checks_run_beside(code: int | None, patience_s: float, expected: int) -> None:
    """Their exit status and their words; those that are not over in time are ended, with all that they started."""
    script = f"echo checking; exit {code}" if code is not None else "echo checking; sleep 600 & wait"
    checks = quick.Checks(("sh", "-c", script))
    assert checks.end(time.monotonic() + patience_s) == (expected, "checking\n")


def test_this_tree() -> None:
    """Of the real tree a module's own tests are among the nearest, and a core module is reached by most tests."""
    tests, left_out = quick.chosen(["src/dlrover_core/kernel/engine.py"])
    assert "tests/unit/test_engine.py" in tests
    assert left_out > 50

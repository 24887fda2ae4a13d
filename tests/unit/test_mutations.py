"""Bugs that are planted to try the tests: each can be planted, is taken out again, and dies or survives by what tests say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tools import mutations
from tools.mutations import MUTATIONS, ROOT, Mutation, Nursery
from tools.trials import Patience


def test_every_mutation_can_be_planted() -> None:
    """Its text stands once in its file, what replaces it is a program, and its tests are there."""
    assert len(MUTATIONS) >= 40
    assert len(set(MUTATIONS)) == len(MUTATIONS)
    for one in MUTATIONS:
        text = one.source(ROOT).read_text()
        assert ast.dump(ast.parse(one.planted(text))) != ast.dump(ast.parse(text)), one
        assert [name for name in one.tests if not (ROOT / name.partition("::")[0]).exists()] == [], one


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with a function and two tests, one of which looks at it."""
    for name, text in {
        "src/it.py": "def double(x):\n    return x + x\n",
        "tests/test_it.py": "from it import double\ndef test_one(): assert double(1) == 2\n",
        "tests/test_other.py": "def test_nothing(): pass\n",
        "tests/test_bad.py": "def test_bad(): assert False\n",
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['nightly']\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "COPIED", ("src", "tests"))
    return tmp_path


def test_a_bug_dies_or_survives(small: Path) -> None:
    """It dies by the test that fails; one that no test sees survives, which is said; the tree and its copy are as they were."""
    before = (small / "src/it.py").read_text()
    nursery = Nursery()
    try:
        bug = Mutation("it.py", "x + x", "x * x", ("tests/test_it.py",))
        assert nursery.trial(bug, Patience())["killed_by"] == "tests/test_it.py::test_one"
        with pytest.raises(AssertionError, match=r"survived: it\.py"):
            nursery.trial(bug._replace(tests=("tests/test_other.py",)), Patience())
        with pytest.raises(AssertionError, match="fail without any bug"):
            nursery.trial(bug._replace(tests=("tests/test_bad.py",)), Patience())
        with nursery.tree() as tree:
            assert (tree / "src/it.py").read_text() == before
    finally:
        nursery.close()
    assert (small / "src/it.py").read_text() == before


def test_a_text_that_has_changed_is_told() -> None:
    """A mutation whose text is gone, or stands there twice, names its file."""
    for text in ("", "ab ab"):
        with pytest.raises(AssertionError, match=r"it\.py: 'ab' stands there"):
            Mutation("it.py", "ab", "b", ()).planted(text)

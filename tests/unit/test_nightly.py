"""`make nightly` runs what `make test` leaves out, and says what it ran."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from tools import nightly
from tools.nightly import Told

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

def test_good(): pass
def test_bad(): assert False
def test_here(): pytest.skip("no disk")
def test_there(): pytest.skip("no disk")

@pytest.fixture
def broken(): raise ValueError
def test_error(broken): pass
"""


def test_counts(tmp_path: Path) -> None:
    """Each test counts once, a broken fixture as a failure, and reasons of skips are counted."""
    (tmp_path / "test_it.py").write_text(TESTS)
    told = nightly.part("these", [str(tmp_path), "-c", "/dev/null", "--rootdir", str(tmp_path)])
    assert told.counts == {"passed": 1, "failed": 2, "skipped": 2}
    assert told.skipped == {"no disk": 2}
    assert not told.good


def test_a_run_that_cannot_begin_has_failed(tmp_path: Path) -> None:
    """No test ran, and pytest does not say that there was none to run."""
    assert not nightly.part("these", [str(tmp_path / "nowhere"), "-c", "/dev/null"]).good
    assert (
        nightly.part("none", [str(tmp_path), "-c", "/dev/null"])
        .line()
        .startswith("none                         no test in ")
    )


def test_an_interpreter_that_runs(tmp_path: Path) -> None:
    """A stub that runs nothing, and one of another version, are passed over."""
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\necho not found >&2\nexit 127\n")
    stub.chmod(0o755)
    here = Path(sys.executable)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert nightly.interpreter(version, [stub, here]) == str(here)
    assert nightly.interpreter("2.0", [stub, here]) == ""


def test_the_last_words() -> None:
    """A table with a line for each part, those that were not run too; then why tests were skipped."""
    one = Told("unit")
    one.counts.update(passed=7, skipped=2)
    one.skipped["no disk"] = 2
    said = nightly.summary([one, Told("Python 3.14: unit, stories", absent="no python3.14")])
    assert said.splitlines() == [
        "",
        "what was run:",
        "  unit                         7 passed, 2 skipped in 0 s",
        "  Python 3.14: unit, stories   not here: no python3.14",
        "",
        "skipped in unit:",
        "      2 x no disk",
    ]


def test_everything_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts are run whatever became of those before them; one failure is enough for the exit status."""
    ran: list[str] = []

    def part(name: str, words: list[str], python: str = "") -> Told:
        ran.append(name)
        told = Told(name)
        told.counts["failed" if name == "unit" else "passed"] += 1
        return told

    monkeypatch.setattr(nightly, "part", part)
    monkeypatch.setattr(nightly, "record", lambda version, told: None)
    monkeypatch.setattr(nightly, "interpreter", lambda version: "" if version == "3.14" else "python")
    monkeypatch.setattr(nightly, "environment", lambda version, python: python)
    monkeypatch.setattr(nightly, "below", lambda version: "python")
    assert nightly.main([]) == 1
    assert ran == [
        *("unit", "stories", "integration, side by side", "integration, alone"),
        *(f"Python {one}: unit, stories" for one in ("3.10", "3.12", "3.13")),
        *(f"Ray {one}: its backend" for one in nightly.RAYS),
    ]


def test_nothing_is_left_out() -> None:
    """`make test` and `make nightly` have opposite marks, suite by suite."""
    rules = (ROOT / "Makefile").read_text()
    for suite in ("unit", "chaos", "integration"):
        assert re.search(
            rf'tests/{suite}( tests/\w+)? -m "not nightly"|tests/{suite} -m "not alone and not nightly"', rules
        )
    assert '-m "alone and not nightly"' in rules


def test_every_ray_is_run() -> None:
    """The releases of Ray that the extra allows are the one of `make test`, and those of `make nightly`."""
    [least, beyond] = re.findall(r'"ray>=2\.(\d+),<2\.(\d+)', (ROOT / "pyproject.toml").read_text())[0]
    [ours] = re.findall(r"(?m)^ray==2\.(\d+)", (ROOT / "constraints.txt").read_text())
    assert [*nightly.RAYS, f"2.{ours}"] == [f"2.{one}" for one in range(int(least), int(beyond))]
    for one in nightly.RAY_TESTS:
        assert (ROOT / "tests" / "integration" / f"test_ray_{one}.py").exists()


def test_classifiers_name_what_ran() -> None:
    """A Python that the classifiers name is the one that CI runs, or ran all unit tests and stories without a failure.

    ``mended`` says by hand how many of those that failed have passed since, run by themselves, at the commit ``mended_at``.
    """
    named = set(re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text()))
    ran = json.loads(nightly.RECORD.read_text())
    good = {version for version, one in ran.items() if one["failed"] == one.get("mended", 0) and one["passed"] > 5000}
    assert named <= {"3.11", *good}
    assert set(ran) <= set(nightly.PYTHONS)


def test_a_record_of_what_ran(tmp_path: Path) -> None:
    """The newest run of each Python, oldest Python first; one that could not be run leaves the record as it is."""
    path = tmp_path / "pythons.json"
    one = Told("unit")
    one.counts.update(passed=7, skipped=2)
    for version in ("3.13", "3.9"):
        nightly.record(version, one, path)
    nightly.record("3.13", Told("unit", absent="no python3.13"), path)
    written = json.loads(path.read_text())
    assert list(written) == ["3.9", "3.13"]
    assert {key: written["3.13"][key] for key in ("passed", "failed", "skipped")} == {
        "passed": 7,
        "failed": 0,
        "skipped": 2,
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", written["3.9"]["date"])

"""The gates of tests/conftest.py close when they should: each is shown a test that must not pass."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = """
[pytest]
addopts = --strict-markers --import-mode=importlib -p no:cacheprovider -rA
markers =
    slow_loop(reason): as ours
    alone(reason): as ours
"""

UNIT = """
import asyncio, time
import pytest

async def compute():
    end = time.thread_time() + 0.08
    while time.thread_time() < end:
        pass

async def wait():
    time.sleep(0.08)

def test_computes():
    asyncio.run(compute())

def test_waits():
    asyncio.run(wait())

@pytest.mark.slow_loop(reason="to see")
def test_excused():
    asyncio.run(compute())

@pytest.mark.slow_loop
def test_unexplained():
    pass
"""

INTEGRATION = """
import os, pathlib, socket, subprocess, sys
import pytest

KEPT = []

def test_process():
    KEPT.append(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]))

def test_orphan():
    double = "import os, signal\\nif not os.fork():\\n    os.setsid(); signal.pause()"
    subprocess.run([sys.executable, "-c", double], check=True)

def test_socket():
    KEPT.append(socket.socket())

def test_segment(segment):
    segment.touch()

@pytest.mark.alone(reason="to see")
def test_clean():
    subprocess.run([sys.executable, "-c", ""], check=True)

@pytest.mark.alone
def test_unexplained():
    pass
"""


SKIPPING = """
import pytest

@pytest.mark.skipif(True, reason="no disk here: 5")
def test_allowed():
    pass

@pytest.mark.parametrize("one", [1, 2])
def test_allowed_in_a_fixture(one, skipping):
    pass

@pytest.fixture
def skipping():
    pytest.skip("no disk here")

def test_another_reason():
    pytest.skip("no time")

def test_not_named():
    pytest.skip("no disk here")

@pytest.mark.xfail(reason="to see", strict=True)
def test_expected_to_fail():
    assert False
"""

WITHOUT = """
import pytest
pytest.importorskip("no_such_library")

def test_it():
    pass
"""

LACKING = """
import no_such_library

def test_it():
    pass
"""

LACKING_LATER = """
def test_needs_it():
    from no_such_library import part

def test_ours():
    import dlrover_core.no_such_module
"""

ALLOWED = """# A comment.
unit/test_it.py::test_allowed: no disk here
unit/test_it.py::test_allowed_in_a_fixture: no disk
unit/test_it.py::test_another_reason: no disk here
"""


def _outcomes(suite: Path, *words: str) -> tuple[dict[str, set[str]], str]:
    """What became of each test of ``suite``, and the whole output."""
    command = [sys.executable, "-m", "pytest", str(suite), *words]
    done = subprocess.run(command, cwd=suite.parent, capture_output=True, text=True, check=False, timeout=100)
    seen: dict[str, set[str]] = {}
    for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", done.stdout, re.MULTILINE):
        seen.setdefault(name, set()).add(outcome)
    return seen, done.stdout + done.stderr


def _tree(root: Path, suite: str, text: str) -> Path:
    folder = root / "tests" / suite
    folder.mkdir(parents=True)
    (root / "pytest.ini").write_text(SETTINGS)
    gates = (Path(__file__).parents[1] / "conftest.py").read_text()
    for long, short in (("DYING_S = 5.0", "DYING_S = 0.2"), ("SHARED_S = 30.0", "SHARED_S = 1.0")):
        assert long in gates
        gates = gates.replace(long, short)
    (root / "tests" / "conftest.py").write_text(gates)
    (folder / "test_it.py").write_text(text)
    return folder


def test_slow_callbacks(tmp_path: Path) -> None:
    """A callback that computes for more than 50 ms fails its test, unless the test says why; one that waits does not."""
    seen, output = _outcomes(_tree(tmp_path, "unit", UNIT))
    assert seen == {
        "test_computes": {"PASSED", "ERROR"},
        "test_waits": {"PASSED"},
        "test_excused": {"PASSED"},
        "test_unexplained": {"ERROR"},
    }, output
    assert "compute()" in output


def test_leftovers(tmp_path: Path) -> None:
    """A process, an orphan, an open socket and a shared-memory segment each fail the test that left them.

    One that none may run beside says why.
    """
    segment = Path("/dev/shm") / f"dlrover-gate-{tmp_path.name}"
    fixture = f"import pathlib, pytest\n\n@pytest.fixture\ndef segment():\n    return pathlib.Path({str(segment)!r})\n"
    folder = _tree(tmp_path, "integration", INTEGRATION)
    (folder / "conftest.py").write_text(fixture)
    try:
        seen, output = _outcomes(folder)
    finally:
        segment.unlink(missing_ok=True)
    bad = {"PASSED", "ERROR"}
    expected = {f"test_{name}": bad for name in ("process", "orphan", "socket", "segment")}
    assert seen == {**expected, "test_clean": {"PASSED"}, "test_unexplained": {"ERROR"}}, output


def test_skips(tmp_path: Path) -> None:
    """A test that is skipped fails, and so does a module, unless the file of skips names it with that reason."""
    folder = _tree(tmp_path, "unit", SKIPPING)
    (folder / "test_without.py").write_text(WITHOUT)
    (folder.parent / "skips.txt").write_text(ALLOWED)
    seen, output = _outcomes(folder, "--continue-on-collection-errors")
    assert seen == {"test_another_reason": {"FAILED"}, "test_not_named": {"FAILED"}}, output
    assert "unit/test_it.py::test_another_reason: no time" in output
    assert "unit/test_without.py: could not import 'no_such_library'" in output
    assert re.search(r"^=+ 2 failed, 3 skipped, 1 xfailed, .*1 error in ", output, re.MULTILINE), output
    (folder / "test_lacking.py").write_text(LACKING)
    (folder / "test_later.py").write_text(LACKING_LATER)
    seen, output = _outcomes(folder, "--any-skip")
    assert seen == {"test_ours": {"FAILED"}}, output
    assert re.search(r"^=+ 1 failed, 8 skipped, 1 xfailed", output, re.MULTILINE), output
    assert "no_such_library is not here" in output


def test_allowed_skips_exist() -> None:
    """Each test that may be skipped exists, and is named in order with a reason that some skip gives."""
    tests = Path(__file__).parents[1]
    testing = ROOT / "src/dlrover_core/testing"
    contracts = "".join(one.read_text() for name in ("*conformance.py", "*_stories.py") for one in testing.glob(name))
    lines = [line for line in (tests / "skips.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(lines)
    for line in lines:
        name, _, reason = line.partition(": ")
        reason = reason.removesuffix(": ")  # what an implementation has no notion of, without its words about it
        file, *_, function = name.split("::")
        text = (tests / file).read_text()
        known = text if f"def {function}(" in text else contracts
        assert f"def {function}(" in known, line
        assert reason in re.sub(r"\{\w+\}", "::1", known), line

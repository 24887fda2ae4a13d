"""docs/chaos.md: its examples run, and what it says of a failure is what one prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tools.chaos_tables import PAGE

SOURCES = [str(Path(__file__).parents[2] / one) for one in ("src", "src/adapters", "src/backends")]
BOUND_S = 200.0
TOLD = (
    r"^  \S.*: kill_host \d+$",
    r"^scenario: Scenario\(nodes=1, steps=\d+\)$",
    r"^broken: AssertionError at \S*tests/test_\w+\.py:\d+: a world waited a minute for a node$",
    r"^replay: pytest tests/test_\w+\.py::test_nobody_waits_long --chaos-replay chaos1-\S+$",
    r"^to replay it first from now on, add to CHAOS_REGRESSIONS:$",
    r"^  chaos1-\S+ tests/test_\w+\.py::test_nobody_waits_long$",
)
BLOCKS = re.findall(r"^```python( fails)?\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def pytest_over(folder: Path, *blocks: str, words: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Pytest over these examples, each a file of its own as somebody who copies it has it."""
    (folder / "tests").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    for number, block in enumerate(blocks):
        (folder / "tests" / f"test_{number}.py").write_text(block)
    plugin = ("-p", "dlrover_core.testing.plugin", "-p", "no:cacheprovider")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, *words, "tests"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES), "DLROVER_WARM": "core"},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            (), id="all", marks=pytest.mark.nightly(reason="the same with fewer seeds stands for it in make test")
        ),
        pytest.param(("--chaos-seeds", "2"), id="few"),
    ],
)
def test_examples_run(tmp_path: Path, words: Sequence[str]) -> None:
    """Every example can be copied into a file and does what it says."""
    examples = [code for fails, code in BLOCKS if not fails]
    assert len(examples) >= 8
    done = pytest_over(tmp_path, *examples, words=words)
    assert done.returncode == 0, done.stdout + done.stderr
    tests = sum(len(re.findall(r"^def test_", code, re.MULTILINE)) for code in examples)
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None
    assert int(found[1]) >= tests


@pytest.mark.timeout(240)
def test_a_failure_reads_as_it_is_told(tmp_path: Path) -> None:
    """What the page shows of a failure is what the example prints, and its token replays it."""
    (failing,) = [code for fails, code in BLOCKS if fails]
    done = pytest_over(tmp_path, failing)
    assert done.returncode == 1, done.stdout + done.stderr
    for words in (r"^seed \d+, number \d+: \d+ faults, shrunk to 2 in \d+ replays$", *TOLD):
        for text in (PAGE.read_text(), done.stdout):
            assert re.search(words, text, re.MULTILINE), (words, text)
    token = re.search(r"--chaos-replay (chaos1-\S+)", done.stdout)
    assert token is not None
    again = subprocess.run(
        [*done.args, "--chaos-replay", token[1]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert again.returncode == 1
    assert "a world waited a minute for a node" in again.stdout


@pytest.mark.parametrize("name", ["ToyBackend", "TestToyBackend"])
def test_the_toy_keeps_its_contract_in_the_shell_too(tmp_path: Path, name: str) -> None:
    """The backend of the page is tried by `dlrover conformance`, as the page says it is."""
    (code,) = [code for _, code in BLOCKS if "class TestToyBackend" in code]
    (tmp_path / "mine.py").write_text(code)
    line = [sys.executable, "-m", "dlrover_adapters.cli.main", "conformance", f"mine:{name}"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = {"ToyBackend": "8 of 23 promises kept, 0 broken, 15 not tried"}
    assert kept.get(name, "14 of 23 promises kept, 0 broken, 9 not tried") in done.stdout

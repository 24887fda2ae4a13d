"""Two storeys: what is known asks nothing of the whole state, and reading a log needs no rule."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOB = ROOT / "src" / "dlrover_core" / "job"

_READING = """
import sys
from dlrover_adapters.cli import read
from dlrover_core.history import Headlines, ReportBuilder, explanation_of, incident_of, render, render_story, status_of
from dlrover_core.history import plain, story
from dlrover_core.job.state import CODEC, FOLD
print(sorted(name for name in sys.modules if name.startswith("dlrover_core.rules")))
"""


def test_no_fact_is_given_the_whole_state() -> None:
    """No function of `job` has a parameter ``state``, and only `job.state` names `JobState`."""
    found = []
    for path in JOB.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg) and node.arg == "state":
                found.append(f"{path.name}:{node.lineno}")
            if isinstance(node, ast.Name) and node.id == "JobState" and path.name != "state.py":
                found.append(f"{path.name}:{node.lineno}")
    assert found == []


def test_reading_a_log_needs_no_rule() -> None:
    """What `dlrover events`, ``status``, ``explain`` and ``report`` import decides nothing."""
    done = subprocess.run([sys.executable, "-c", _READING], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"

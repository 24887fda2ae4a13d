"""The examples run as their docstrings say. The demonstration is in tests/integration/test_dlrover_run_demo.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_scheduler_of_ones_own_is_a_page_of_code() -> None:
    """`custom_scheduler.py` stays under 60 lines, needs `dlrover_core` alone, and its job survives the loss of a node."""
    script = EXAMPLES / "custom_scheduler.py"
    source = script.read_text()
    assert len(source.splitlines()) < 60
    assert "dlrover_adapters" not in source
    assert "dlrover_backends" not in source
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    first, events = done.stdout.splitlines()[-2:]
    assert first == "succeeded after 100 steps:"
    assert "NodeFailed IncidentOpened" in events
    assert events.count("IncidentClosed") == 1

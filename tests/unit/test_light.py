"""What our processes do not load."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["dlrover_adapters.cli.master", "dlrover_adapters.cli.agent_process"])
def test_structlog_without_rich(module: str) -> None:
    """Neither masters nor agents load it for tracebacks that nobody sees; a hook of a user's may, afterwards."""
    pytest.importorskip("rich")
    code = f"import sys, {module}; print('structlog' in sys.modules, 'rich' in sys.modules); import rich"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"

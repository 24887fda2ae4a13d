"""What our processes do not load."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["cli.master", "cli.agent_process", "cli.main"])
def test_structlog_without_rich(module: str) -> None:
    """Neither masters nor agents nor commands load it for tracebacks that nobody sees; a hook of a user's may, afterwards."""
    pytest.importorskip("rich")
    code = (
        f"import sys, dlrover_adapters.{module}; print('structlog' in sys.modules, 'rich' in sys.modules); import rich"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"

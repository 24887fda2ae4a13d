"""What torch's own tests ask of a rendezvous handler, over ours: each case in a process of its own, with handlers and masters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import SCRIPTS

nightly = pytest.mark.nightly(reason="closed stands for it in make test")
CASES = [
    pytest.param(case, marks=() if case == "closed" else nightly)
    for case in (
        "alone_again",
        "nowhere",
        "meets",
        "meets_again",
        "too_few",
        "too_many",
        "reserve",
        "closed",
        "closed_before",
        "shut_down",
        "nobody",
    )
]


@pytest.mark.timeout(450)  # against a hang: the machine that runs these at night is busy
@pytest.mark.parametrize("case", CASES)
def test_a_handler_in_somebodys_own_hands(case: str, tmp_path: Path) -> None:
    """What `scripts/handler_cases.py` says of the case holds."""
    told = subprocess.run(
        [sys.executable, str(SCRIPTS / "handler_cases.py"), case],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr

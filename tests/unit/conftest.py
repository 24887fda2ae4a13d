"""What the unit tests share: `drive.py` on the path, logs as they were, and Hypothesis without chance: the same examples on
every run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

# deadline=None: a busy machine is no bug. No database: what was found once becomes a test or a golden file.
settings.register_profile(
    "bounded",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("bounded")


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """A command that is run in this process sends logs to the stderr of its own test, which is closed after it."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is no rank of anything, whatever it was started by."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DLROVER_AGENT_SOCKET"):
        monkeypatch.delenv(name, raising=False)

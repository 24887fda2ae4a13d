"""What the unit tests share: `drive.py` on the path, logs as they were, and Hypothesis without chance: the same examples on
every run.
"""

from __future__ import annotations

import sys
import threading
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


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How many threads of each name the system is to refuse from now on, by the beginning of the name (`ulimit -u`)."""
    begin, left = threading.Thread.start, dict[str, int]()

    def start(thread: threading.Thread) -> None:
        for name in left:
            if thread.name.startswith(name) and left[name]:
                left[name] -= 1
                raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    yield left
    assert not any(left.values()), "refused less often than meant"

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Iterator

import pytest
import structlog

from dlrover_adapters.telemetry.logs import Uncaught, run_threaded


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One with our handler."""
    made = asyncio.new_event_loop()
    made.set_exception_handler(Uncaught())
    yield made
    made.close()


def test_no_descriptors_for_a_connection_is_one_line(
    loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    """Asyncio tells each of a hundred tries a second with a traceback: we say it once, and why."""
    error = OSError(errno.EMFILE, "Too many open files")
    with structlog.testing.capture_logs() as told:
        for _ in range(100):
            loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": error})
    assert [(one["event"], one["reason"]) for one in told] == [
        ("connections wait until they can be taken", "[Errno 24] Too many open files")
    ]
    assert caplog.records == []


def test_a_surprise_is_shown_as_asyncio_shows_it(
    loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    """With the traceback: it is a fault of ours."""
    with caplog.at_level(logging.ERROR, "asyncio"):
        loop.call_exception_handler({"message": "Task exception was never retrieved", "exception": ValueError("x")})
        loop.call_exception_handler({"message": "another", "exception": OSError(errno.EMFILE, "Too many open files")})
    assert [one.getMessage() for one in caplog.records] == ["Task exception was never retrieved", "another"]


def test_no_thread_is_one_line() -> None:
    """A master or agent that can start no thread ends with a status by which its launcher starts another one."""

    def main() -> int:
        raise RuntimeError("can't start new thread")

    def faulty() -> int:
        raise RuntimeError("a fault")

    with structlog.testing.capture_logs() as told:
        assert run_threaded(main, 75) == 75
    assert [one["event"] for one in told] == ["this process ends: it can start no thread"]
    assert "pids.max" in told[0]["remedy"]
    with pytest.raises(RuntimeError, match="a fault"):
        run_threaded(faulty, 75)

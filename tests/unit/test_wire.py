"""Frames between the agent and its processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlrover_adapters.agent import wire
from dlrover_adapters.agent.config import LaunchConfig
from dlrover_adapters.agent.seat import from_wire, seat_for, to_wire
from dlrover_core.errors import LaunchFailed, MalformedMessage
from dlrover_core.runtime.launcher import WorkersLaunch

LAUNCH = WorkersLaunch("run", 3, 2, 2, 4, 1, 2, "127.0.0.1:1", 2, 3, 60)


def test_a_seat_travels_with_its_streams() -> None:
    """A seat arrives as it was sent, with open file descriptors that no exec inherits."""
    mine, theirs = wire.pair()
    with mine, theirs, Path(os.devnull).open("wb") as sink:
        seat = seat_for(LaunchConfig(("train.py", "--lr=1")), LAUNCH, 1, "/run/agent.sock", "/run/error.json")
        wire.send(mine, to_wire(seat), (sink.fileno(), sink.fileno()))
        frame = wire.receive(theirs)
        assert frame is not None
        assert from_wire(frame.body) == seat
        assert seat.rank == 3
        assert [os.get_inheritable(fd) for fd in frame.fds] == [False, False]
        for fd in frame.fds:
            os.close(fd)


def test_the_end_is_told() -> None:
    """A peer that is gone, with words of ours unread or not, is the end and no error."""
    mine, theirs = wire.pair()
    with mine:
        wire.send(mine, {"unread": 1})
        theirs.close()
        assert wire.receive(mine) is None


def test_frames_are_bounded() -> None:
    """Arguments that do not fit are refused with what to do about it."""
    mine, theirs = wire.pair()
    with mine, theirs, pytest.raises(LaunchFailed, match="shorten"):
        wire.send(mine, {"argv": "x" * wire.FRAME_BYTES_MAX})


@pytest.mark.parametrize("payload", [b"\xc1", b"\x93\x01\x02\x03", b"\x81"])
def test_garbage_is_malformed(payload: bytes) -> None:
    """What is not a msgpack map raises our own error."""
    with pytest.raises(MalformedMessage):
        wire.unpack(payload)


@pytest.mark.parametrize("body", [{}, {"launch": [1]}, {"launch": [*LAUNCH], "mode": "script"}])
def test_half_a_seat_is_malformed(body: dict[str, object]) -> None:
    """A seat that lacks anything is refused."""
    with pytest.raises(MalformedMessage):
        from_wire(body)

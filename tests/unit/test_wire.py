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


def test_arguments_need_not_be_text() -> None:
    """Bytes that are no UTF-8 arrive as the same bytes, and whatever else a Python string can hold."""
    argv = ("train.py", os.fsdecode(b"--data=/data/caf\xe9"), "\ud800", "\u00e9")
    mine, theirs = wire.pair()
    with mine, theirs:
        wire.send(mine, to_wire(seat_for(LaunchConfig(argv), LAUNCH, 0, "/run/agent.sock", os.fsdecode(b"/\xff"))))
        frame = wire.receive(theirs)
        assert frame is not None
        seat = from_wire(frame.body)
        assert seat.argv == argv
        assert os.fsencode(seat.argv[1]) == b"--data=/data/caf\xe9"
        assert os.fsencode(seat.error_file) == b"/\xff"


def test_a_frame_that_no_packet_holds_arrives_with_its_descriptors() -> None:
    """As many arguments as Linux takes: 2 MiB by default, 6 MiB at most."""
    argv = ("train.py", *(f"{number:04}" * 25_000 for number in range(60)))
    mine, theirs = wire.pair()
    with mine, theirs, Path(os.devnull).open("wb") as sink:
        before = sum(1 for _ in Path("/proc/self/fd").iterdir())
        wire.send(mine, {"argv": list(argv)}, (sink.fileno(),))
        frame = wire.receive(theirs)
        assert frame is not None
        assert tuple(frame.body["argv"]) == argv
        assert os.fstat(frame.fds[0]).st_rdev == os.fstat(sink.fileno()).st_rdev
        assert not os.get_inheritable(frame.fds[0])
        os.close(*frame.fds)
        assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before
        wire.send(mine, {"next": 1})
        following = wire.receive(theirs)
        assert following is not None
        assert following.body == {"next": 1}


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

"""How workers' output reaches the console."""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_adapters.agent.config import LaunchConfig
from dlrover_adapters.agent.logs import PUNCH_BYTES, LogPump, StreamFile, made_all, unwritten
from dlrover_core.runtime.launcher import WorkersLaunch

BOUND_S = 10.0


class Console:
    """A console to look at: a pipe."""

    def __init__(self) -> None:
        self.reader, self.fd = os.pipe()

    def read(self, size: int) -> bytes:
        """Exactly ``size`` bytes, or fewer if they do not come in time."""
        got = b""
        while len(got) < size and select.select([self.reader], [], [], BOUND_S)[0]:
            got += os.read(self.reader, size - len(got))
        return got

    def close(self) -> bytes:
        """What else was written."""
        os.close(self.fd)
        rest = b"".join(iter(lambda: os.read(self.reader, 65536), b""))
        os.close(self.reader)
        return rest


@pytest.fixture
def console() -> Iterator[Console]:
    """One that is closed in the end."""
    made = Console()
    yield made
    for fd in (made.reader, made.fd):
        try:
            os.close(fd)
        except OSError:
            continue


@pytest.fixture
def pump() -> Iterator[LogPump]:
    """One that runs."""
    made = LogPump()
    made.open()
    yield made
    made.close(BOUND_S)


def test_lines_are_shown_as_they_come(tmp_path: Path, console: Console, pump: LogPump) -> None:
    """What was written before the pump looked, what comes later, and what a prefix is put before: all of it, in order."""
    path = tmp_path / "stdout.log"
    with path.open("ab", buffering=0) as file:
        file.write(b"one\n")
        pump.follow(StreamFile(str(path), console.fd, b"[default0]:", keep=True))
        assert console.read(15) == b"[default0]:one\n"
        file.write(b"two\nthree\nhal")
        assert console.read(32) == b"[default0]:two\n[default0]:three\n"
        file.write(b"f\n")
        assert console.read(16) == b"[default0]:half\n"
    pump.close(BOUND_S)
    assert console.close() == b""
    assert path.read_bytes() == b"one\ntwo\nthree\nhalf\n"


def test_a_prompt_is_shown_without_a_line_end(tmp_path: Path, console: Console, pump: LogPump) -> None:
    """Half a line that rests is shown, and its rest is not prefixed again."""
    path = tmp_path / "stdout.log"
    with path.open("ab", buffering=0) as file:
        pump.follow(StreamFile(str(path), console.fd, b"> ", keep=True))
        file.write(b"password:")
        assert console.read(11) == b"> password:"
        file.write(b"x\ny\n")
        assert console.read(6) == b"x\n> y\n"


def test_ranks_do_not_tear_each_others_lines(tmp_path: Path, console: Console, pump: LogPump) -> None:
    """Lines written in pieces, as unbuffered Python writes them, arrive whole."""
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        pump.follow(StreamFile(str(path), console.fd, b"", keep=True))
    files = [path.open("ab", buffering=0) for path in paths]
    for _ in range(100):
        for piece in (b"step", b" done", b"\n"):
            for file in files:
                file.write(piece)
    for file in files:
        file.close()
    assert set(console.read(200 * 10).splitlines()) == {b"step done"}


def test_finish_shows_the_rest_and_removes_the_file(tmp_path: Path, console: Console, pump: LogPump) -> None:
    """The last words need no line end; a file that nobody asked for does not stay, one asked for does."""
    for name, keep in (("a", False), ("b", True)):
        path = tmp_path / name
        path.write_bytes(b"last words")
        stream = StreamFile(str(path), console.fd, b"", keep)
        pump.follow(stream)
        pump.finish(stream)
        assert console.read(10) == b"last words"
    pump.close(BOUND_S)
    assert [one.name for one in tmp_path.iterdir()] == ["b"]


def test_shown_output_needs_no_room(tmp_path: Path, console: Console, pump: LogPump) -> None:
    """A passing stream's file gives back what was shown, all but a tail; one to be kept gives back nothing."""
    size = 8 * PUNCH_BYTES
    rooms = []
    for name, keep in (("passing", False), ("kept", True)):
        path = tmp_path / name
        pump.follow(StreamFile(str(path), console.fd, b"", keep))
        with path.open("ab", buffering=0) as file:
            file.write((b"x" * 1023 + b"\n") * (size // 1024))
            assert len(console.read(size)) == size
            # Punching follows showing: a later line's pumping may be the same one still, but not for ever.
            until = time.monotonic() + BOUND_S
            while not keep and path.stat().st_blocks * 512 > 3 * PUNCH_BYTES and time.monotonic() < until:
                file.write(b"end\n")
                assert console.read(4) == b"end\n"
            rooms.append(path.stat().st_blocks * 512)
    assert rooms[0] <= 3 * PUNCH_BYTES
    assert rooms[1] >= size


def test_a_console_that_is_gone_swallows_output(tmp_path: Path, pump: LogPump) -> None:
    """The end of the terminal is not the end of training."""
    reader, writer = os.pipe()
    os.close(reader)
    path = tmp_path / "stdout.log"
    path.write_bytes(b"unheard\n" * 100)
    stream = StreamFile(str(path), writer, b"", keep=False)
    pump.follow(stream)
    pump.finish(stream)
    pump.close(BOUND_S)
    os.close(writer)
    assert not path.exists()


def test_a_slow_console_does_not_hold_the_end_for_ever(tmp_path: Path, console: Console) -> None:
    """Closing gives up on a console that takes nothing, after the time given."""
    pump = LogPump()
    pump.open()
    path = tmp_path / "stdout.log"
    path.write_bytes(b"x" * 1_000_000 + b"\n")
    pump.follow(StreamFile(str(path), console.fd, b"", keep=True))
    thread = pump._thread
    assert thread is not None
    pump.close(0.05)
    console.close()  # let the thread go on to its end
    thread.join(BOUND_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_gives_nothing_back_loses_one_stream(
    tmp_path: Path, console: Console, pump: LogPump, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """What lies there is not shown; the pump goes on, shows other streams, and ends."""
    bad, good = (StreamFile(str(tmp_path / name), console.fd, b"", keep=True) for name in ("bad", "good"))
    read, close, asked = os.pread, os.close, threading.Event()

    def failing(fd: int, size: int, at: int) -> bytes:
        if Path(f"/proc/self/fd/{fd}").readlink().name == "bad":
            asked.set()
            raise OSError(number, os.strerror(number))
        return read(fd, size, at)

    def closing(fd: int) -> None:
        is_bad = Path(f"/proc/self/fd/{fd}").readlink().name == "bad"
        close(fd)
        if is_bad:
            raise OSError(number, os.strerror(number))

    (tmp_path / "bad").write_text("lost\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", failing)
        patch.setattr(os, "close", closing)
        pump.follow(bad)
        assert asked.wait(BOUND_S)
        pump.follow(good)
        (tmp_path / "good").write_text("shown\n")
        assert console.read(6) == b"shown\n"
        pump.finish(bad)
        pump.close(BOUND_S)
    assert console.close() == b""


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EDQUOT])
def test_output_that_has_no_place_is_lost_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Workers are started all the same."""
    config, launch = LaunchConfig(argv=("x",), nproc=2), WorkersLaunch("run", 1, 0, 2, 2, 0, 1, "h:1", 0, 3)
    assert unwritten(made_all(config, str(tmp_path), str(tmp_path), launch), str(tmp_path)) == ""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "makedirs", refuse)
        patch.setattr(os, "unlink", refuse)
        files = made_all(config, str(tmp_path), str(tmp_path), launch)
    assert {one.path for rank in files for one in (rank.stdout, rank.stderr)} == {os.devnull}
    assert "takes no files: workers run on" in unwritten(files, str(tmp_path))

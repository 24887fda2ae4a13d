"""Files of workers' output stay within their bounds, and full disks harm nobody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlrover_adapters.agent.config import LaunchConfig, Streams
from dlrover_adapters.agent.log_bounds import PASSING_BYTES_MAX, LogBounds, prune
from dlrover_adapters.agent.logs import LogPump, StreamFile, made, rank_files
from dlrover_adapters.agent.streams import ForgivingFile
from dlrover_core.runtime.launcher import WorkersLaunch

BOUND = 1024 * 1024
LINE = b"x" * 99 + b"\n"
BOUND_S = 10.0
LAUNCH = WorkersLaunch("run1", 3, 2, 2, 4, 1, 2, "h:1", 2, 3, node="worker-1-0")


def room(path: Path) -> int:
    """Bytes that a file takes on its disk."""
    return path.stat().st_blocks * 512


def written(path: Path, size: int, *, keep: bool = True) -> StreamFile:
    """A file with numbered lines."""
    with path.open("ab") as file:
        for number in range(size // 100):
            file.write(b"%08d" % number + LINE[8:])
    return StreamFile(str(path), 0, b"", keep)


def test_a_file_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    """The middle is given back while the worker writes on; what was left out is said; at the end the hole is closed."""
    path, bounds = tmp_path / "stdout.log", LogBounds(BOUND)
    file = written(path, 5 * BOUND)
    bounds.watch(file)
    bounds.look()
    assert room(path) <= BOUND
    with path.open("ab") as writer:
        for _ in range(3):
            writer.write(LINE * (BOUND // 100))
            writer.flush()
            bounds.look()
            assert room(path) <= BOUND
        writer.write(b"the end\n")
    bounds.finish(file)
    text = path.read_bytes()
    assert text.startswith(b"00000000xxx")
    assert text.endswith(b"xxx\nthe end\n")
    assert text.count(b"bytes left out here (--log-bytes-max)") == 1
    assert room(path) <= BOUND


def test_a_file_that_grew_faster_than_anybody_looked(tmp_path: Path) -> None:
    """Is within its bound at the latest when its worker is dead."""
    path, bounds = tmp_path / "stdout.log", LogBounds(BOUND)
    file = StreamFile(str(path), 0, b"", keep=True)
    path.touch()
    bounds.watch(file)
    written(path, 5 * BOUND)
    bounds.finish(file)
    assert room(path) <= BOUND
    assert b"left out here" in path.read_bytes()


def test_small_files_are_left_alone(tmp_path: Path) -> None:
    """Below the bound nothing is touched, and without one nothing at all."""
    path = tmp_path / "stdout.log"
    file = written(path, BOUND // 2)
    before = path.read_bytes()
    for bounds in LogBounds(BOUND), LogBounds(0):
        bounds.watch(file)
        bounds.look()
        bounds.finish(file)
    assert path.read_bytes() == before


def test_passing_files_are_bounded_whatever_the_bound(tmp_path: Path) -> None:
    """What a stuck console does not take, and what nobody is shown, must not fill the disk."""
    path, bounds = tmp_path / "stdout.log", LogBounds(0)
    with path.open("wb") as file:
        file.write(b"y" * (PASSING_BYTES_MAX + BOUND))
    bounds.watch(StreamFile(str(path), 1, b"", keep=False))
    bounds.look()
    assert room(path) <= PASSING_BYTES_MAX


def test_a_late_console_is_told_what_it_missed(tmp_path: Path) -> None:
    """The pump goes on after the hole: no zeros on the console, but the words that say how much is missing."""
    path, bounds = tmp_path / "stdout.log", LogBounds(BOUND)
    reader, writer = os.pipe()
    file = written(path, 4 * BOUND)._replace(console=writer)
    bounds.watch(file)
    bounds.look()
    pump = LogPump(bounds)
    pump.open()
    pump.follow(file)
    got = b""
    while not got.endswith(b"%08d" % (4 * BOUND // 100 - 1) + LINE[8:]):
        got += os.read(reader, 1 << 20)
    pump.close(BOUND_S)
    os.close(writer)
    os.close(reader)
    assert b"\0" not in got
    assert got.startswith(b"00000000xxx")
    assert got.count(b"left out here") == 1
    assert len(got) < BOUND


@pytest.mark.parametrize(
    ("kept", "expected"), [(0, "01234567"), (1, "7"), (2, "07"), (4, "0567"), (8, "01234567"), (20, "01234567")]
)
def test_old_attempts_go(tmp_path: Path, kept: int, expected: str) -> None:
    """The first and the newest stay; what is not an attempt is nobody's business here."""
    for number in range(8):
        (tmp_path / f"attempt_{number}/0").mkdir(parents=True)
    (tmp_path / "attempt_x").mkdir()
    prune(str(tmp_path), kept)
    assert "".join(sorted(one.name[-1] for one in tmp_path.iterdir())) == "".join(sorted(expected + "x"))


def test_files_lie_where_torchrun_puts_them(tmp_path: Path) -> None:
    """``<log dir>/<id>_<run and node>/attempt_<restarts>/<local rank>``, by the name that the launch gives the node."""
    config = LaunchConfig(("a.py",), nproc=2, job="j", log_dir="/logs", redirects=(Streams.ALL,) * 2, run_id="my/id")
    files = rank_files(config, "/run", "/logs", LAUNCH, 1)
    place = "/logs/my-id_run1_worker-1-0/attempt_2/1"
    assert (files.stdout.path, files.error) == (f"{place}/stdout.log", f"{place}/error.json")
    quiet = rank_files(config._replace(redirects=(), log_dir=None), "/run", "/run", LAUNCH, 1)
    assert quiet.stdout.path == "/run/output/attempt_3/1/stdout.log"


def test_filters_look_through_what_is_teed_and_shown() -> None:
    """Other ranks, other streams and hidden ranks are not looked through, as under torchrun."""
    tee = (Streams.OUT, Streams.OUT, Streams.NONE)
    config = LaunchConfig(("a.py",), nproc=3, tee=tee, show=(0, 2), duplicate_stdout=("a",), duplicate_stderr=("b",))
    files = [rank_files(config, "/run", "/logs", LAUNCH._replace(nproc=3), rank) for rank in range(3)]
    assert [one.stdout.filters for one in files] == [(b"a",), (), ()]
    assert [one.stderr.filters for one in files] == [(), (), ()]
    assert files[0].stdout.filtered.endswith("attempt_2/filtered_stdout.log")
    assert [one.stdout.console for one in files] == [1, 0, 1]
    assert [one.stderr.console for one in files] == [2, 0, 2]


def test_filtered_lines_are_whole_and_prefixed(tmp_path: Path) -> None:
    """However lines arrive in pieces; the last one also without an end."""
    path, filtered = tmp_path / "stdout.log", tmp_path / "filtered_stdout.log"
    reader, writer = os.pipe()
    file = StreamFile(str(path), writer, b"[t0]:", True, (b"apple", b"pear"), str(filtered))
    pump = LogPump()
    with path.open("ab", buffering=0) as worker:
        pump.open()
        pump.follow(file)
        for piece in (b"an app", b"le\nplum\n", b"pear"):
            worker.write(piece)
    pump.finish(file)
    pump.close(BOUND_S)
    os.close(writer)
    os.close(reader)
    assert filtered.read_bytes() == b"[t0]:an apple\n[t0]:pear"


def test_a_place_that_cannot_be_had_is_gone_without(tmp_path: Path) -> None:
    """Logs that cannot be kept are only shown; output that can go nowhere is thrown away. Training starts in any case."""
    (tmp_path / "logs").write_text("not a folder")
    config = LaunchConfig(("a.py",), nproc=2, job="j", log_dir=str(tmp_path / "logs"), tee=(Streams.ALL,) * 2)
    wanted = rank_files(config, str(tmp_path / "run"), str(tmp_path / "logs"), LAUNCH, 0)
    files = made(wanted, str(tmp_path / "run/output/0"))
    assert (files.stdout.keep, files.stdout.console) == (False, 1)
    assert Path(files.stdout.path).parent == tmp_path / "run/output/0"
    nowhere = made(wanted, str(tmp_path / "logs/more"))
    assert nowhere.stdout.path == os.devnull


def test_a_full_disk_is_forgiven() -> None:
    """What does not fit is lost, and whoever prints goes on; other errors are errors."""
    full = ForgivingFile("/dev/full", "wb")
    assert full.write(b"hello") == 5
    full.close()
    with pytest.raises(ValueError, match="closed"):
        full.write(b"x")

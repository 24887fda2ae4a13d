"""Reading what workers write, behind their backs."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlrover_adapters.agent.log_bounds import LogBounds
from dlrover_adapters.agent.log_watch import LINE_BYTES_MAX, OVERLAP_BYTES, Output, Tail, lines_of
from dlrover_adapters.agent.logs import StreamFile

MANY = 1024 * 1024


@pytest.fixture
def tail(tmp_path: Path) -> Iterator[Callable[[], Tail]]:
    """Makes a reader of ``log`` in the test's folder."""
    made: list[Tail] = []

    def make() -> Tail:
        made.append(Tail(Output(str(tmp_path / "log"), 1, 0, 0)))
        return made[-1]

    (tmp_path / "log").touch()
    yield make
    for one in made:
        one.close()


def write(tmp_path: Path, data: bytes) -> None:
    """A worker writes."""
    with (tmp_path / "log").open("ab") as file:
        file.write(data)


def test_lines_are_whole_however_they_are_written(tmp_path: Path, tail: Callable[[], Tail]) -> None:
    """A line that is written in pieces is read once, whole; one without an end is read when its writer is dead."""
    reader = tail()
    write(tmp_path, b"one\ntwo ")
    assert reader.read(MANY)[0] == "one\n"
    assert reader.read(MANY)[0] == ""
    write(tmp_path, b"and a half\nthe la")
    assert reader.read(MANY)[0] == "two and a half\n"
    write(tmp_path, b"st words")
    assert reader.read(MANY)[0] == ""
    assert reader.read(MANY, last=True)[0] == "the last words"


@pytest.mark.parametrize("seed", range(5))
def test_no_line_is_lost_at_any_boundary(tmp_path: Path, tail: Callable[[], Tail], seed: int) -> None:
    """Wherever writes and looks fall, every line arrives exactly once and in order."""
    draw, reader, got = random.Random(seed), tail(), ""
    whole = "".join(f"line {number} {'é' * draw.randrange(60)}\n" for number in range(300)).encode()
    while whole:
        size = draw.randrange(1, 900)
        write(tmp_path, whole[:size])
        whole = whole[size:]
        if draw.random() < 0.7:
            got += reader.read(MANY)[0]
    got += reader.read(MANY, last=True)[0]
    assert [one.split()[1] for one in got.splitlines()] == [str(number) for number in range(300)]
    assert "\ufffd" not in got


def test_a_flood_is_read_at_its_end(tmp_path: Path, tail: Callable[[], Tail]) -> None:
    """More than a look may read is left out and counted; the newest is what is read."""
    reader = tail()
    write(tmp_path, b"early\n" + b"x" * 99 + b"\n" + b"the newest\n")
    assert reader.read(20)[0].endswith("the newest\n")
    assert reader.skipped == 6 + 100 + 11 - 20


def test_a_line_of_megabytes_costs_a_bounded_memory(tmp_path: Path, tail: Callable[[], Tail]) -> None:
    """A line without an end is taken in pieces that overlap, and what is kept of it stays small."""
    reader, found = tail(), list[str]()
    write(tmp_path, b"short\n")
    for number in range(40):
        write(tmp_path, (b"near the beginning" if number == 0 else b"") + b"y" * 250_000)
        found += reader.read(MANY)[0].splitlines()
        assert len(reader._begun) <= LINE_BYTES_MAX
    write(tmp_path, b"y" * 100 + b"near the end" + b"y" * 100 + b"\n")
    found += reader.read(MANY)[0].splitlines()
    assert all(any(words in one for one in found) for words in ("near the beginning", "near the end"))
    assert max(map(len, found)) <= LINE_BYTES_MAX


def test_pieces_of_a_long_line_hide_nothing() -> None:
    """Wherever a phrase lies in a long line, one of its pieces has it whole."""
    phrase = b"needle " + b"n" * (OVERLAP_BYTES - 20)
    for at in range(0, 3 * LINE_BYTES_MAX, 97):
        line = b"x" * at + phrase + b"x" * (3 * LINE_BYTES_MAX - at)
        assert any(phrase.decode() in one for one in lines_of(line).splitlines()), at


@pytest.mark.parametrize("length", [10, 3_999, 4_096, 4_097, 7_680, 7_681, 1_000_000])
def test_lines_of_any_length_are_cut_in_no_time(length: int) -> None:
    """The agent's loop waits while lines are cut: a mebibyte takes milliseconds, and every piece is whole where it may be."""
    data = (b"x" * length + b"\n") * (1024 * 1024 // (length + 1))
    began = time.thread_time()
    lines = lines_of(data).splitlines()
    assert time.thread_time() - began < 0.25, "it took seconds when it looked at every byte for each byte of a line"
    assert max(map(len, lines)) <= LINE_BYTES_MAX
    each = 1 if length <= LINE_BYTES_MAX else -(-(length - OVERLAP_BYTES) // (LINE_BYTES_MAX - OVERLAP_BYTES))
    assert len(lines) == each * data.count(b"\n")
    assert sum(map(len, lines)) == (length + (each - 1) * OVERLAP_BYTES) * data.count(b"\n")


def test_bytes_that_are_no_text_and_lines_that_redraw_themselves(tmp_path: Path, tail: Callable[[], Tail]) -> None:
    """Garbage around a line does not hide it, nor does a progress bar that never ends its line."""
    reader = tail()
    write(tmp_path, os.urandom(5000).replace(b"\n", b"") + b"\xff\xfe\0\0\n 10%\r 20%\rERR\0OR at last\r 30%")
    lines = reader.read(MANY, last=True)[0].splitlines()
    assert lines[-2:] == ["ERROR at last", " 30%"]


def test_a_file_cut_short_is_read_on_from_its_new_end(tmp_path: Path, tail: Callable[[], Tail]) -> None:
    """Who truncates a log, or rotates it by copying, does not make us blind."""
    reader = tail()
    write(tmp_path, b"x" * 1000 + b"\n")
    reader.read(MANY)
    os.truncate(tmp_path / "log", 0)
    write(tmp_path, b"after the cut\n")
    assert reader.read(MANY)[0] == "after the cut\n"


def test_a_file_without_a_name_is_read_to_its_end(tmp_path: Path, tail: Callable[[], Tail]) -> None:
    """Files that only pass through are removed when their worker is dead, which may be before they are read."""
    reader = tail()
    write(tmp_path, b"the last words")
    (tmp_path / "log").unlink()
    assert reader.read(MANY, last=True)[0] == "the last words"


def test_what_was_taken_out_of_a_file_is_not_read(tmp_path: Path, tail: Callable[[], Tail]) -> None:
    """A file within bounds has a hole in its middle: it is stepped over, also when it is closed up under us."""
    bounds, file = LogBounds(64 * 1024), StreamFile(str(tmp_path / "log"), 0, b"", keep=True)
    bounds.watch(file)
    reader = tail()
    write(tmp_path, b"".join(b"line %06d\n" % number for number in range(40_000)))
    bounds.look()
    text, _ = reader.read(MANY)
    assert "\0" not in text
    assert text.endswith("line 039999\n")
    write(tmp_path, b"one more\n")
    bounds.finish(file)
    assert reader.read(MANY, last=True)[0].endswith("one more\n")


def test_the_age_of_a_line_is_that_of_its_writing(tmp_path: Path, tail: Callable[[], Tail]) -> None:
    """A look that comes late tells when the line was written, not when it was read."""
    reader = tail()
    write(tmp_path, b"long ago\n")
    now = (tmp_path / "log").stat().st_mtime
    os.utime(tmp_path / "log", (now, now - 100))
    _, age_us = reader.read(MANY)
    assert 100e6 <= age_us < 110e6

"""What a detached job prints: kept within its bound, and shown without what was left out."""

from __future__ import annotations

import os
from pathlib import Path

from dlrover_adapters.cli.detached import output, record

BOUND = 1 << 20
LINE = b"x" * 99 + b"\n"


def test_its_output_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    """The middle goes while its processes append, and what is gone is said."""
    path, bounds = tmp_path / record.OUTPUT, output.Bounds(tmp_path, BOUND)
    with path.open("ab") as file:
        file.write(b"the beginning\n")
        for _ in range(6):
            file.write(LINE * (BOUND // 100))
            file.flush()
            bounds.look()
            assert path.stat().st_blocks * 512 <= BOUND
        file.write(b"the end\n")
    bounds.close()
    text = path.read_bytes()
    assert text.startswith(b"the beginning\n")
    assert text.endswith(b"\nthe end\n")
    assert text.count(b"bytes left out here (--log-bytes-max)") == 1


def test_no_bound(tmp_path: Path) -> None:
    """--log-bytes-max 0."""
    path, bounds = tmp_path / record.OUTPUT, output.Bounds(tmp_path, 0)
    path.write_bytes(LINE * (BOUND // 10))
    bounds.look()
    bounds.close()
    assert path.read_bytes() == LINE * (BOUND // 10)


def test_who_reads_it_never_sees_what_was_left_out(tmp_path: Path) -> None:
    """A reader that is behind skips the hole; one that is beyond the end of a file that became shorter goes on at its end."""
    path, bounds = tmp_path / record.OUTPUT, output.Bounds(tmp_path, BOUND)
    path.write_bytes(b"begin\n")
    fd = os.open(path, os.O_RDONLY)
    try:
        assert output.read(fd) == b"begin\n"
        assert output.read(fd) == b""
        with path.open("ab") as file:
            file.write(LINE * (5 * BOUND // 100))
        bounds.look()
        read = b"".join(iter(lambda: output.read(fd), b""))
        assert b"\0" not in read
        assert len(read) <= BOUND
        bounds.close()
        assert output.read(fd) == b""
        with path.open("ab") as file:
            file.write(b"news\n")
        assert output.read(fd) == b"news\n"
    finally:
        os.close(fd)

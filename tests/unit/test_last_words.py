"""What is read of a dead worker's output and error file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dlrover_adapters.agent.last_words import read_error, read_tail, read_trace
from dlrover_core.runtime.launcher import TAIL_BYTES_MAX


def test_the_tail_is_bounded_and_whole(tmp_path: Path) -> None:
    """The tail has at most 4 KiB, begins with a whole character and ends where the output ends."""
    path = tmp_path / "stderr.log"
    path.write_bytes("é".encode() * 5000 + b"x")
    tail = read_tail(str(path))
    assert len(tail.encode()) <= TAIL_BYTES_MAX
    assert tail == "é" * (len(tail) - 1) + "x"


def test_bytes_that_are_no_text_do_not_harm(tmp_path: Path) -> None:
    """Undecodable output gives a tail within the bound all the same."""
    path = tmp_path / "stderr.log"
    path.write_bytes(b"\xff" * 10_000)
    assert 0 < len(read_tail(str(path)).encode()) <= TAIL_BYTES_MAX


def test_no_output_is_no_error(tmp_path: Path) -> None:
    """Missing files are empty words."""
    assert read_tail(str(tmp_path / "none")) == ""
    assert read_error(str(tmp_path / "none")) == ("", 0)


def error_file(path: Path, told: Any) -> str:
    """Write one."""
    path.write_text(told if isinstance(told, str) else json.dumps(told))
    return str(path)


def test_torchs_error_file_is_understood(tmp_path: Path) -> None:
    """What torch's own handler writes gives its message and the moment, finer than the whole seconds in it."""
    from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

    path = tmp_path / "error.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        before_us = time.monotonic_ns() // 1000
        ErrorHandler().record_exception(ValueError("bad batch"))
    message, at_us = read_error(str(path))
    assert message == "ValueError: bad batch"
    # The kernel's file times tick every few milliseconds.
    assert before_us - 20_000 <= at_us <= time.monotonic_ns() // 1000


def test_the_traceback_is_torchs(tmp_path: Path) -> None:
    """The traceback that torch writes beside the message is there, and nothing else is ever taken for one."""
    told: Any = {"message": {"message": "m", "extraInfo": {"py_callstack": "Traceback ..."}}}
    assert read_trace(error_file(tmp_path / "error.json", told)) == "Traceback ..."
    for strange in (
        {"message": "m"},
        [1],
        {"message": {"extraInfo": 3}},
        "no json",
        {"message": {"extraInfo": {"py_callstack": 1}}},
    ):
        assert read_trace(error_file(tmp_path / "error.json", strange)) == ""
    assert read_trace(str(tmp_path / "none")) == ""


def test_a_copied_error_file_keeps_its_time(tmp_path: Path) -> None:
    """Where the file's time and the time in it differ, the one in it is the error's."""
    told = {"message": {"message": "old", "extraInfo": {"timestamp": str(int(time.time()) - 100)}}}
    _, at_us = read_error(error_file(tmp_path / "error.json", told))
    assert 99_000_000 <= time.monotonic_ns() // 1000 - at_us <= 102_000_000


def test_the_short_form_is_understood(tmp_path: Path) -> None:
    """Torch also writes the message as a plain text."""
    message, at_us = read_error(error_file(tmp_path / "error.json", {"message": "just this"}))
    assert message == "just this"
    assert time.monotonic_ns() // 1000 - at_us < 10_000_000


@pytest.mark.parametrize("told", ["", "{", "[]", '{"message": 3}', '{"message": {}}', "\x00\x01"])
def test_garbage_is_no_error(tmp_path: Path, told: str) -> None:
    """A torn or foreign file is no evidence, and no failure of ours."""
    assert read_error(error_file(tmp_path / "error.json", told)) == ("", 0)


def test_long_messages_are_cut(tmp_path: Path) -> None:
    """An error message is bounded like a tail."""
    message, _ = read_error(error_file(tmp_path / "error.json", {"message": "m" * 100_000}))
    assert len(message) == TAIL_BYTES_MAX
    assert (tmp_path / "error.json").stat().st_size > TAIL_BYTES_MAX

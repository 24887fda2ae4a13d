from __future__ import annotations

import os
import socket
import threading

import pytest

from dlrover_adapters.agent import saver


def test_a_saver_without_threads_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the system has no thread left it ends with a status, and the agent starts another one later."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(saver, "set_name", lambda _: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert saver.serve(ours) == os.EX_TEMPFAIL
    told = capsys.readouterr().err
    assert told.startswith("the saver ends: can't start new thread; a limit of processes is reached")
    assert told.count("\n") == 1

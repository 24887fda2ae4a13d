"""Who uses torchrun's rendezvous by hand asks the master."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover_adapters.cli import torchrun_asking
from dlrover_core.errors import ConnectionLost


class Host:
    """A host whose masters end while they are asked for the first time."""

    def __init__(self) -> None:
        self.asked, self.ended = 0, False

    async def answer(self, *_: Any, **__: Any) -> dict[str, Any]:
        """The port is closed before the process is gone."""
        self.asked, self.ended = self.asked + 1, True
        raise ConnectionLost("Connection refused")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """A new one, whom everybody asks."""
    made = Host()
    monkeypatch.setattr(torchrun_asking, "fetch_status", made.answer)
    monkeypatch.setattr(torchrun_asking, "send_command", made.answer)
    return made


def test_masters_that_end_while_they_are_asked(host: Host) -> None:
    """Their job is over: HOST says so, and asks nobody for 20 s."""
    asking = torchrun_asking.Asking("127.0.0.1:1", "token", None, ended=lambda: host.ended)
    assert asking.over()
    asking.stop("as somebody wants it")
    assert host.asked == 1


def test_masters_that_were_not_there(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host cannot know why nobody answers."""
    monkeypatch.setattr(torchrun_asking, "ASK_S", 0.0)
    asking = torchrun_asking.Asking("127.0.0.1:1", "token", None, ended=lambda: False)
    for ask in (asking.over, lambda: asking.stop("as somebody wants it")):
        with pytest.raises(ConnectionLost):
            ask()

"""The agent of a joining host is kept, also where the host refuses to start a process for a while."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import pytest

from dlrover_adapters.cli import agent_restarter
from dlrover_adapters.cli.agent_restarter import AgentRestarter
from dlrover_backends.local.blanks import Ahead


def test_an_agent_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pauses, as after a death; then the host gives up with the kernel's words."""
    tried: list[int] = []

    def blank(_command: Any) -> Any:
        tried.append(1)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(agent_restarter, "blank", blank)
    monkeypatch.setattr(agent_restarter, "AGAIN_S", 0.0)

    async def run() -> agent_restarter.Ended:
        made = AgentRestarter(Ahead(lambda _control: None), lambda _words: None)  # type: ignore[arg-type, return-value]
        async with made:
            return await made.ended()

    ended = asyncio.run(run())
    assert ended.outcome == "broken"
    assert "it cannot be started: Resource temporarily unavailable" in ended.reason
    assert len(tried) == agent_restarter.SHORT_LIVES_MAX

"""What successors of dead masters are told."""

from __future__ import annotations

import asyncio
import itertools
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_adapters.cli import supervisor
from dlrover_adapters.cli.settings import EX_AGAIN, EX_OVER
from dlrover_adapters.cli.supervisor import NoNodes, Supervisor


def test_a_successor_is_told_of_every_dead_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever led last may have died before two that the log refused: its lease is waited for unless it, too, is named."""
    codes = iter([-9, EX_AGAIN, EX_AGAIN, EX_OVER])
    told: list[list[str]] = []

    async def started(*words: str, **_: Any) -> Any:
        told.append([after for word, after in itertools.pairwise(words) if word == "--dead"])
        code = next(codes)

        async def wait() -> int:
            return code

        return SimpleNamespace(pid=100 + len(told), wait=wait, returncode=code)

    async def supervised() -> None:
        with socket.socket() as port:
            settings = SimpleNamespace(
                directory="",
                shared=True,
                mark="",
                job=SimpleNamespace(job="j"),
                holder=lambda pid, number: f"host-{pid}-{number}",
            )
            await asyncio.wait_for(Supervisor(settings, "t", port, NoNodes()).run(), 10)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    monkeypatch.setattr(supervisor, "BACK_OFF_S", 0.0)
    asyncio.run(supervised())
    assert told == [[], ["host-101-1"], ["host-101-1", "host-102-2"], ["host-101-1", "host-102-2", "host-103-3"]]

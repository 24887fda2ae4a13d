"""A platform that has gone under a job that is to stop: whoever waits for its word of the nodes gives up."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlrover_adapters.cli import platform_away
from dlrover_adapters.cli.platform_away import Leader, silent, until_gone
from dlrover_backends.ray.client import NoDesk, RayBackend
from dlrover_core import BackendContext


class Platform:
    """Answers, or not, question by question; the last answer stays."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.asked = list(answers), 0

    async def away(self) -> str:
        """As `Reaching.away`."""
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def leader(state: str, agents: int = 0) -> Any:
    """A master of a job in a state, with so many agents connected."""
    return SimpleNamespace(state=SimpleNamespace(job=SimpleNamespace(state=state)), sessions=[None] * agents)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_away, "LOOK_S", 0.0)


def test_a_platform_that_answers_once_is_there() -> None:
    """One that is back within the time is waited for; one that stays silent is not."""
    assert asyncio.run(silent(Platform("refused", "refused", ""), 60.0)) == ""
    assert asyncio.run(silent(Platform("refused"), 0.0)) == "refused"


@pytest.mark.parametrize(
    ("state", "agents", "platform"),
    [
        ("running", 0, Platform("refused")),
        ("stopping", 1, Platform("refused")),
        ("succeeded", 0, Platform("refused")),
        ("stopping", 0, Platform("")),
        ("stopping", 0, object()),
    ],
    ids=["it is not to stop", "an agent is there", "it ended well", "the platform answers", "nobody can be asked"],
)
def test_who_is_waited_for(monkeypatch: pytest.MonkeyPatch, state: str, agents: int, platform: Any) -> None:
    """A job that trains needs no platform, and agents that are there stop by themselves."""
    monkeypatch.setattr(platform_away, "AWAY_S", 0.0)

    async def waits() -> bool:
        asking = asyncio.ensure_future(until_gone(platform, cast(Leader, leader(state, agents))))
        for _ in range(20):
            await asyncio.sleep(0)
        asking.cancel()
        return (await asyncio.gather(asking, return_exceptions=True))[0] != "refused"

    assert asyncio.run(waits())


def test_a_job_that_is_to_stop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its agents have gone, and the platform stays silent. An agent that comes back meanwhile is waited for."""
    monkeypatch.setattr(platform_away, "AWAY_S", 0.0)
    master = leader("stopping", 1)

    async def told() -> str:
        asking = asyncio.ensure_future(until_gone(Platform("refused"), cast(Leader, master)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not asking.done()
        master.sessions.clear()
        return await asking

    assert asyncio.run(told()) == "refused"


def test_whether_a_ray_cluster_answers(tmp_path: Path) -> None:
    """The desk says which cluster it is, also where the user did not; of none nothing is said."""
    backend = RayBackend(BackendContext("j", "r", ("m:1",), "t", command=("x",), directory=str(tmp_path)))
    assert asyncio.run(backend.away()) == ""
    with socket.create_server(("127.0.0.1", 0)) as service:
        address = f"127.0.0.1:{service.getsockname()[1]}"
        (tmp_path / "ray-desk.sock.lock").write_text(address)
        assert asyncio.run(backend.away()) == ""
    assert asyncio.run(backend.away()) == f"no Ray cluster answers at {address} (Connection refused)"


def test_no_desk_is_started_for_a_cluster_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's library takes ten seconds to say so, in which a master that is to end would wait for it."""
    monkeypatch.setattr(RayBackend, "_start", lambda _: pytest.fail("a desk is started"))
    with socket.create_server(("127.0.0.1", 0)) as service:
        address = f"127.0.0.1:{service.getsockname()[1]}"
    here = BackendContext("j", "r", ("m:1",), "t", command=("x",), directory=str(tmp_path), args=f"address={address}")
    with pytest.raises(NoDesk, match=f"no Ray cluster answers at {address}"):
        asyncio.run(RayBackend(here).delete("j-worker-0-0", 1, 0.0))

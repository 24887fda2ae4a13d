"""What launchers say of their masters, and what `dlrover status` says of the control plane."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dlrover_adapters.cli import lead, live, places, show_config
from dlrover_adapters.cli.options import parse, where
from dlrover_adapters.cli.settings import Settings
from dlrover_adapters.cli.standing import Standing, Unplaced, degraded
from dlrover_adapters.http import client
from dlrover_core import GroupSpec, JobSpec
from dlrover_core.errors import ConnectionLost, SpecError, TokenRefused

LEADS: Mapping[str, Any] = {"role": "leader", "leader": "a/1", "leader_address": "a:1", "degraded": ""}
STANDS_BY: Mapping[str, Any] = {"role": "standby", "leader": "b/1", "leader_address": "b:1", "degraded": ""}
NEW: Mapping[str, Any] = {"role": "standby", "leader": "", "leader_address": "", "degraded": ""}
SECOND_US = 1_000_000


@pytest.fixture
def news() -> Callable[..., list[str]]:
    """What is said of one status after the other."""
    standing = Standing("many", "a:1")
    return lambda status, now=0: list(standing.news(status, now))


def test_who_leads_is_said_when_it_changes(news: Callable[..., list[str]]) -> None:
    """Once each: leading, standing by, and another leader; a standby that knows of none yet says nothing."""
    assert news(NEW) == []
    assert news(LEADS) == ["leads job many at a:1"]
    assert news(LEADS) == []
    assert news(NEW) == []
    assert news(STANDS_BY) == ["stands by for job many; b:1 leads"]
    assert news({**STANDS_BY, "leader_address": "c:1"}) == ["stands by for job many; c:1 leads"]
    assert news({**STANDS_BY, "leader_address": "c:1"}) == []


def test_a_degraded_control_plane_is_said_twice(news: Callable[..., list[str]]) -> None:
    """As it begins, with the reason, and as it ends; a master that has only just been started has not seen its end."""
    news(LEADS)
    bad = {**LEADS, "degraded": "LogUnavailable: no \x1b[31mquorum", "degraded_since": 5 * SECOND_US}
    assert news(bad) == ["control plane degraded: LogUnavailable: no quorum; training goes on, decisions wait"]
    assert news({**bad, "degraded": "LogFull: no room"}) == []
    assert news(NEW, 6 * SECOND_US) == []
    assert news(LEADS, 68 * SECOND_US) == ["control plane is back, after 1 min 03 s"]
    assert news(LEADS, 69 * SECOND_US) == []


def test_nodes_without_a_place_are_said_after_a_while() -> None:
    """Once for each time that a job waits for a place; what has a world, or merely starts, says nothing."""
    unplaced = Unplaced(30.0)
    words = "0 of 1 nodes; missed: worker-0-0 (waits: Unschedulable: no host has CPU=64; the largest has CPU=2)"
    wait = {"group": "worker", "why": "nodes", "words": words, "nodes": ("worker-0-0", "worker-1")}
    waits = {"waits": (wait,), "nodes": {"worker-0-0": {"state": "pending"}}}
    assert list(unplaced.news(waits, 100.0)) == []
    assert list(unplaced.news(waits, 129.0)) == []
    [said] = unplaced.news(waits, 130.0)
    assert said == f"worker has no place for its nodes since 30 s, and waits on; Ctrl-C ends the job: {words}"
    assert list(unplaced.news(waits, 200.0)) == []
    slow = {**waits, "nodes": {"worker-0-0": {"state": "running"}}}
    assert list(unplaced.news(slow, 250.0)) == []
    assert list(unplaced.news(waits, 251.0)) == []
    assert len(list(unplaced.news(waits, 281.0))) == 1
    for other in (
        {"waits": ()},
        {"waits": ({**wait, "words": "0 of 1 nodes; missed: worker-0-0 (starting)"},)},
    ):
        assert list(unplaced.news(other, 300.0)) == []
        assert list(unplaced.news(waits, 301.0)) == []
        assert len(list(unplaced.news(waits, 331.0))) == 1


def test_since_when_and_why() -> None:
    """In one line; nothing where all is well."""
    assert degraded(LEADS, 0) == ""
    told = degraded({"degraded": "LogFull: quota", "degraded_since": 10 * SECOND_US}, 73 * SECOND_US)
    assert told.startswith("control plane degraded since 19")
    assert told.endswith(" (for 1 min 03 s): LogFull: quota")
    assert degraded({"degraded": "LogFull: quota", "degraded_since": 0}, 9) == "control plane degraded: LogFull: quota"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("etcd://ops:s3cret@h:2379/p?ttl=5", "etcd://ops@h:2379/p?ttl=5"),
        ("etcd://ops:s3:cr@et@h:2379,i:2379/p", "etcd://ops@h:2379,i:2379/p"),
        ("etcd://ops@h/p", "etcd://ops@h/p"),
        ("etcd://h:2379,i:2379/p", "etcd://h:2379,i:2379/p"),
        ("sqlite:///a:b@c/log.db", "sqlite:///a:b@c/log.db"),
    ],
)
def test_passwords_are_not_shown(url: str, told: str) -> None:
    """Neither in messages nor in the lines to run next."""
    assert places.shown(url) == told
    options = parse(["--log", url, "--no-python", "true"])
    assert where(options) in (f" --log {told}", f" --log '{told}'")
    assert next(row.value for row in show_config.rows(options) if row.name == "log") == told


def _asks(monkeypatch: pytest.MonkeyPatch, answers: Mapping[str, Mapping[str, Any]], *masters: str) -> live.Told:
    async def fetch(address: str, token: str, **_: object) -> Mapping[str, Any]:
        assert token == "of-the-job"
        if address not in answers:
            raise ConnectionLost(f"nobody at {address}")
        return answers[address]

    monkeypatch.setattr(client, "fetch_status", fetch)
    monkeypatch.setenv("DLROVER_TOKEN", "of-the-job")
    args = argparse.Namespace(job="many", master=",".join(masters), token_file=None, tls_ca=None, state_dir=None)
    return asyncio.run(live.masters_say(args))


def test_whom_status_believes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The leader, wherever a standby says it is; a standby where that is silent; nobody who leads another job."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    standby = {**STANDS_BY, "job": "many"}
    leader = {**LEADS, "job": "many", "leader_address": "b:1"}
    assert _asks(monkeypatch, {"s:1": standby, "b:1": leader}, "x:1", "s:1").address == "b:1"
    assert _asks(monkeypatch, {"s:1": standby}, "s:1", "x:1").address == "s:1"
    with pytest.raises(ConnectionLost, match="nobody at x:1"):
        _asks(monkeypatch, {}, "x:1")
    with pytest.raises(SpecError, match="leads job 'other'"):
        _asks(monkeypatch, {"s:1": {**leader, "job": "other"}}, "s:1")


def test_a_leader_without_an_address_is_no_news(news: Callable[..., list[str]]) -> None:
    """Between its election and its first words it has a name that helps nobody; its address is told a moment later."""
    assert news({**STANDS_BY, "leader_address": ""}) == []
    assert news(STANDS_BY) == ["stands by for job many; b:1 leads"]


def test_what_takes_long_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that waits says for what; one that is quick says nothing."""

    async def waits(ready: asyncio.Event) -> None:
        with places.said_when_slow("dlrover status", "no answer yet", quiet_s=0.0):
            asyncio.get_running_loop().call_later(0.01, ready.set)
            await ready.wait()
        with places.said_when_slow("dlrover status", "no answer yet", quiet_s=0.0):
            pass
        await asyncio.sleep(0)

    asyncio.run(waits(asyncio.Event()))
    assert capsys.readouterr().err == "dlrover status: waiting: no answer yet\n"


def test_no_standby_with_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it led, it would refuse all agents; so it is refused itself, by name, while the leader can still tell."""

    async def fetch(address: str, token: str, **_: object) -> Mapping[str, Any]:
        if token != "of-the-job":
            raise TokenRefused("the job token is not this job's")
        return LEADS

    monkeypatch.setattr(client, "fetch_status", fetch)
    spec = JobSpec("many", (GroupSpec(),)).to_json()
    settings = Settings(
        spec=spec, run="r", mark="m", log="etcd://h/p", directory="/nowhere", argv=(), nproc=1, mode="script"
    )
    asyncio.run(lead.check_token(settings, "another", None))  # nobody leads
    settings = dataclasses.replace(settings, masters=("a:1",))
    asyncio.run(lead.check_token(settings, "of-the-job", None))
    with pytest.raises(SpecError, match="not that of the master at a:1, which leads job 'many'"):
        asyncio.run(lead.check_token(settings, "another", None))

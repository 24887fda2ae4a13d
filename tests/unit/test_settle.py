"""Which run masters of several hosts serve: one, whoever comes first, and never a second one of their own."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from dlrover_adapters.cli import settle
from dlrover_adapters.cli.settings import Settings
from dlrover_core.errors import LogUnavailable, OtherRun, SpecError
from dlrover_core.job.job import JobCreated, StopJob
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.engine import Engine
from dlrover_core.logs.memory import Deposed, Faults, LostAck, MemoryLog
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime.beginning import begin
from dlrover_core.runtime.master import Master
from dlrover_core.runtime.restoring import restored
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing.network import Network

SPEC = JobSpec("many", (GroupSpec("worker", nodes_min=2, nodes_max=4),), joining=True)


def settings(run: str, spec: JobSpec = SPEC, *, joining: bool = True) -> Settings:
    """What a launcher that has drawn this run begins with."""
    return Settings(
        spec=spec.to_json(), run=run, mark=f"mark-{run}", log="etcd://h/p", directory="/nowhere", argv=(), nproc=1,
        mode="script", joining=joining, shared=True,
    )  # fmt: skip


async def turn() -> None:
    """Let the others run."""
    await asyncio.sleep(0.01)


async def runs(log: MemoryLog) -> list[str]:
    """The runs that were begun."""
    return [record.event.run async for record in log.read("many") if isinstance(record.event, JobCreated)]


def test_all_serve_the_run_of_the_first() -> None:
    """Launchers at the same instant: one begins its run, and the others take that one."""

    async def scenario() -> None:
        log = MemoryLog(CODEC)
        found = await asyncio.gather(*(settle.settled(settings(f"run{one}"), log) for one in range(5)))
        assert len({one.run for one in found}) == 1
        assert await runs(log) == [found[0].run]
        assert await log.leader("many") is None

    asyncio.run(scenario())


def test_standing_by_for_a_run_that_is_led() -> None:
    """The leader's run, and its address; with other settings it is refused, and each of them is named."""

    async def scenario() -> None:
        log = MemoryLog(CODEC)
        await settle.settled(settings("first"), log)
        lead = await log.lead("many", "a-master")
        await lead.announce("a:1")
        found = await settle.settled(settings("mine"), log)
        assert (found.run, found.masters) == ("first", ("a:1",))
        group = replace(SPEC.groups[0], nodes_max=5)
        with pytest.raises(SpecError) as error:
            await settle.settled(settings("mine", replace(SPEC, groups=(group,), max_restarts=9)), log)
        assert "other settings: worker.nodes_max is 4 there, 5 here, max_restarts is 3 there, 9 here" in str(
            error.value
        )
        assert "led by a-master at a:1" in str(error.value)
        assert await runs(log) == ["first"]

    asyncio.run(scenario())


def test_a_leader_without_a_run_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be about to begin one, or to be done with one that is over; after a while that is said, and it has an end."""
    monkeypatch.setattr(settle, "SAY_S", 0.0)

    async def scenario() -> None:
        log = MemoryLog(CODEC)
        lead = await log.lead("many", "a-master")
        waiting = asyncio.ensure_future(settle.settled(settings("mine"), log))
        while "is led by a-master, with no run yet: waiting" not in capsys.readouterr().err:
            await turn()
        await lead.resign()
        assert (await waiting).run == "mine"
        lead = await log.lead("many", "another")
        engine = Engine(MODEL, CODEC, await restored(log, "many"), lead.token)
        engine.handle(StopJob("enough"), 10**15)
        batch = engine.take()
        assert batch is not None
        await lead.append(batch)
        monkeypatch.setattr(settle, "LEAVE_S", -100.0)
        with pytest.raises(SpecError, match="is led by another, and has had no run to stand by for"):
            await settle.settled(settings("late"), log)

    asyncio.run(scenario())


def test_beginning_survives_what_logs_do() -> None:
    """A lost acknowledgement begins nothing twice; a rival in between is no error; a log that is away is one."""

    async def scenario() -> None:
        log = MemoryLog(CODEC, Faults({1: LostAck()}))
        assert (await settle.settled(settings("first"), log)).run == "first"
        assert await runs(log) == ["first"]
        log = MemoryLog(CODEC, Faults({1: Deposed()}))
        assert (await settle.settled(settings("second"), log)).run == "second"
        assert await runs(log) == ["second"]
        log = MemoryLog(CODEC)
        log.faults.unavailable = True
        with pytest.raises(LogUnavailable):
            await settle.settled(settings("third"), log)

    asyncio.run(scenario())


def test_a_launched_job_continues_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Its nodes have ended with the launcher that led them: a new run, whatever is alive in the log."""

    async def scenario() -> None:
        log = MemoryLog(CODEC)
        alone = replace(SPEC, joining=False)
        for run in ("first", "second"):
            lead = await log.lead("many", "launcher")
            found = await settle.taken_up(settings(run, alone, joining=False), log, lead)
            assert found is not None
            assert found.run == run
        assert await runs(log) == ["first", "second"]
        lead = await log.lead("many", "launcher")
        found = await settle.taken_up(settings("third", replace(alone, max_restarts=9), joining=False), log, lead)
        assert found is not None
        assert "with other settings: a new run takes its place: max_restarts is" in capsys.readouterr().err

    asyncio.run(scenario())


def test_holders_are_unlike(tmp_path: Path) -> None:
    """No two processes of one launcher, and no two launchers, lead under one name."""
    one, other = settings("a"), settings("b")
    assert len({one.holder(7), one.holder(7, 1), other.holder(7), other.holder(7, 1)}) == 4
    kept = Settings.read(str(replace(one, directory=str(tmp_path)).write()))
    assert kept.holder(7, 1) == one.holder(7, 1)
    assert kept.is_ours(one.holder(9, 2))
    assert not kept.is_ours(other.holder(7))
    assert kept.shared


def test_a_master_that_begins_none_leaves_another_run_alone() -> None:
    """Its own run is no more, or never was: it says so, writes nothing, and leads no longer."""

    async def scenario() -> None:
        log = MemoryLog(CODEC)
        lead = await log.lead("many", "launcher")
        await begin(lead, await restored(log, "many"), "theirs", SPEC.to_json(), 10**15)
        await lead.resign()
        head = await log.head("many")
        master = Master(
            SPEC,
            event_log=log,
            listener=Network().listener("here"),
            backend=None,
            wall=lambda: 10**15,
            holder="late",
            run_id="mine",
            begins=False,
            answers=True,
        )
        with pytest.raises(OtherRun, match="job 'many' is at run theirs, and run mine, which was led here, is no more"):
            await master.run()
        assert (await log.head("many"), await log.leader("many")) == (head, None)

    asyncio.run(scenario())


def test_a_spec_of_an_earlier_release_differs_in_nothing() -> None:
    """Settings that a release did not know have their defaults: a master of the next one goes on with the job."""
    ours = JobSpec("a").to_json()
    raw = json.loads(ours)
    del raw["groups"][0]["coupling"], raw["check_fresh_s"]
    assert settle.differences(json.dumps(raw), ours) == []

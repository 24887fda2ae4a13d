"""A run that its owner has named: who starts again under that name goes on with it, in other sizes, and changes nothing else."""

from __future__ import annotations

import asyncio
import signal
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_adapters.cli import lead, run_flags, settle
from dlrover_adapters.cli.settings import EX_AGAIN, EX_OVER, Settings
from dlrover_adapters.cli.supervisor import NoNodes, Supervisor
from dlrover_core.errors import SpecError
from dlrover_core.job.job import GroupScaled, JobCreated
from dlrover_core.job.operations import ScaleGroup
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.runtime.beginning import begin, resize
from dlrover_core.runtime.restoring import restored
from dlrover_core.spec import GroupSpec, JobSpec

SPEC = JobSpec("owned", (GroupSpec("worker", nodes_min=2, nodes_max=4),))


def sized(fewest: int, most: int) -> JobSpec:
    """The job in other sizes."""
    return replace(SPEC, groups=(replace(SPEC.groups[0], nodes_min=fewest, nodes_max=most),))


def settings(run: str, spec: JobSpec = SPEC, *, shared: bool = False, owned: bool = True) -> Settings:
    """What a launcher begins with."""
    return Settings(
        spec=spec.to_json(), run=run, mark="abc", log="sqlite:///x", directory="/nowhere", argv=("x",), nproc=1,
        mode="script", joining=spec.joining, shared=shared, owned=owned, apart=shared,
    )  # fmt: skip


async def turns() -> None:
    """Let the others run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


async def begun(run: str = "uid-1", spec: JobSpec = SPEC) -> MemoryLog:
    """A log in which the run is alive."""
    log = MemoryLog(CODEC)
    lead = await log.lead("owned", "first")
    await begin(lead, await restored(log, "owned"), run, spec.to_json(), 10**15)
    await lead.resign()
    return log


async def started_again(log: MemoryLog, ours: Settings) -> JobState:
    """The log after a launcher has looked into it."""
    found = await settle.taken_up(ours, log, await log.lead("owned", "again"))
    assert found is not None
    assert found.run == ours.run
    assert await log.leader("owned") is None
    return await restored(log, "owned")


async def sizes_asked(log: MemoryLog) -> list[tuple[int, int]]:
    """Every change of size in the log."""
    facts = [record.event async for record in log.read("owned")]
    return [(one.nodes_min, one.nodes_max) for one in facts if isinstance(one, GroupScaled)]


@pytest.mark.parametrize("shared", [False, True])
def test_the_same_owner_goes_on(shared: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A launched job too: no second run begins, and it is said."""

    async def scenario() -> None:
        log = await begun()
        state = await started_again(log, settings("uid-1", shared=shared))
        assert (state.job.run, state.job.live, state.seq) == ("uid-1", True, await log.head("owned"))
        assert sum([isinstance(record.event, JobCreated) async for record in log.read("owned")]) == 1

    asyncio.run(scenario())
    assert "job owned is alive in the log: its run goes on" in capsys.readouterr().err


def test_another_owner_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    """What is left of the first one's run is strange to it; on a shared log the run has begun when the launcher goes on."""

    async def scenario() -> None:
        log = await begun()
        assert (await started_again(log, settings("uid-2", shared=True))).job.run == "uid-2"
        joining = replace(SPEC, joining=True)
        log = await begun(spec=joining)
        assert (await started_again(log, settings("uid-2", joining, shared=True))).job.run == "uid-2"

    asyncio.run(scenario())
    assert "is alive in the log as run uid-1: run uid-2 takes its place" in capsys.readouterr().err


def test_changed_sizes_are_applied(capsys: pytest.CaptureFixture[str]) -> None:
    """As `dlrover scale` would, once; and back again. What a person has scaled since stays when nobody says another size."""

    async def scenario() -> None:
        log = await begun()
        await started_again(log, settings("uid-1", sized(2, 6)))
        await started_again(log, settings("uid-1", sized(2, 6)))
        assert await sizes_asked(log) == [(2, 6)]
        lead = await log.lead("owned", "a person")
        await resize(lead, await restored(log, "owned"), [ScaleGroup("worker", 1, 3, "by hand")], 10**15)
        await lead.resign()
        await started_again(log, settings("uid-1", sized(2, 6)))
        assert await sizes_asked(log) == [(2, 6), (1, 3)]
        state = await started_again(log, settings("uid-1", sized(2, 4)))
        assert await sizes_asked(log) == [(2, 6), (1, 3), (2, 4)]
        assert (state.job.spec.groups[0].nodes_min, state.job.spec.groups[0].nodes_max) == (2, 4)

    asyncio.run(scenario())
    assert "group worker is scaled to 2 to 6 nodes" in capsys.readouterr().err


def test_a_joining_job_without_an_owner_is_resized_too() -> None:
    """Its live run goes on as it always did, and other sizes are no reason for a new one."""

    async def scenario() -> None:
        joining = replace(SPEC, joining=True)
        log = await begun("drawn", joining)
        lead = await log.lead("owned", "again")
        found = await settle.taken_up(settings("mine", replace(sized(2, 5), joining=True), owned=False), log, lead)
        assert found is not None
        assert found.run == "drawn"
        assert await sizes_asked(log) == [(2, 5)]

    asyncio.run(scenario())


def test_other_changes_are_refused_by_name() -> None:
    """Not half of a new job under the old one's name: the field, both values, and what to do."""

    async def scenario() -> None:
        log = await begun()
        with pytest.raises(SpecError, match="max_restarts is 3 there, 9 here; only sizes") as error:
            await started_again(log, settings("uid-1", replace(sized(2, 6), max_restarts=9)))
        assert error.value.field == "run"
        assert await sizes_asked(log) == []
        assert await log.leader("owned") is None

    asyncio.run(scenario())


def test_a_launched_job_has_standbys(capsys: pytest.CaptureFixture[str]) -> None:
    """Where its nodes are no launcher's, a second master stands by for the owner's run; for another owner's it does not."""

    async def scenario() -> None:
        log = await begun()
        lead = await log.lead("owned", "a-master")
        await lead.announce("a:1")
        found = await settle.settled(settings("uid-1", shared=True), log)
        assert (found.run, found.masters) == ("uid-1", ("a:1",))
        with pytest.raises(SpecError, match="led by a-master at a:1, as run 'uid-1', not 'uid-2'"):
            await settle.settled(settings("uid-2", shared=True), log)

    asyncio.run(scenario())


@pytest.mark.parametrize("told", ["", " ", "a b", "-x", "x" * 129, "ä", "a/b"])
def test_names_of_runs(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand in folders and in addresses: others are refused, from the command line and from the environment."""
    monkeypatch.delenv(run_flags.VARIABLE, raising=False)
    assert run_flags.owner(None) == ""
    assert run_flags.owner("3f1c9c1e-7d") == "3f1c9c1e-7d"
    with pytest.raises(SpecError, match="run"):
        run_flags.owner(told)
    monkeypatch.setenv(run_flags.VARIABLE, told or "uid")
    if told:
        with pytest.raises(SpecError, match=run_flags.VARIABLE):
            run_flags.owner(None)
    else:
        assert run_flags.owner(None) == "uid"


def test_what_signals_mean() -> None:
    """SIGTERM never stops a job whose nodes are elsewhere; Ctrl-C does where no other host can lead; launchers' own nodes end."""
    alone, many = settings("uid-1"), settings("uid-1", shared=True)
    masters = lead.How(leaves=True)
    assert set(lead._leaves(alone, masters)) == {signal.SIGTERM}
    assert {signal.SIGTERM, signal.SIGINT} <= set(lead._leaves(many, masters))
    assert not lead._leaves(many, lead.How())


def test_leaving_waits_for_the_master_that_led(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reserve is gone at once, the leader has words for its agents: neither is killed, and no other one is started."""

    async def scenario() -> None:
        ends: list[asyncio.Future[int]] = []

        async def started(*_: str, **__: Any) -> Any:
            ends.append(asyncio.get_running_loop().create_future())
            end = ends[-1]

            async def wait() -> int:
                return await asyncio.shield(end)

            return SimpleNamespace(pid=100 + len(ends), wait=wait, returncode=0, terminate=list, kill=list)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
        with socket.socket() as port:
            made = Supervisor(settings("uid-1"), "t", port, NoNodes(), leaves=(signal.SIGTERM,))
            keepers = [asyncio.ensure_future(made._keep_one()) for _ in range(2)]
            await turns()
            made.stop(signal.SIGTERM)
            ends[1].set_result(EX_AGAIN)
            await turns()
            assert not made._over.is_set()
            ends[0].set_result(EX_AGAIN)
            await asyncio.gather(*keepers)
            assert (made.left, made.stopped_by, len(ends)) == (True, None, 2)
            made._masters.clear()
            again = asyncio.ensure_future(made._keep_one())
            made._over.clear()
            await turns()
            ends[2].set_result(EX_OVER)  # it ended while it was asked to go
            await again
            assert not made.left

    asyncio.run(scenario())

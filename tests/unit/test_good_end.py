"""A script has ended well and its last state is on its way to storage: how long it is waited for, and what is said. No torch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from orders import ordering
from storing import ORDER, until
from structlog.testing import capture_logs
from test_storage_duty import KEEPING, LOST, Here, looks, nothing, virtually
from test_storage_savers import Brood, brood, with_saver

from dlrover_adapters.agent.checkpoints import duty, storage
from dlrover_adapters.agent.checkpoints.arenas import Arenas, State
from dlrover_adapters.agent.checkpoints.duty import CheckpointDuty
from dlrover_adapters.agent.checkpoints.saving import Saving, Unsaved
from dlrover_adapters.agent.checkpoints.storage import Awaited, Storage
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.launcher import WorkerExit

__all__ = ["brood"]
GIB = 2**30
GRACE_S = ORDER.grace_us / 1e6
WELL = ORDER._replace(leave=True, outcome="succeeded")


class Goes:
    """A duty of such a node, with what it says to people."""

    def __init__(self, site: Here) -> None:
        self.said: list[str] = []
        site.savers.begun = True  # type: ignore[attr-defined]
        keeps: Any = SimpleNamespace(vault=None, saving=site.savers)
        self.duty = CheckpointDuty(keeps, token=b"", host="", bind="", say=self.said.append)
        self.duty._site, self.duty._storage = site, Storage(site, nothing)
        copying: Any = SimpleNamespace(settle=lambda: asyncio.sleep(0))
        self.duty._copying = copying

    @property
    def storage(self) -> Storage:
        """Its node's."""
        assert self.duty._storage is not None
        return self.duty._storage


async def given_up(one: Storage, bound_s: float) -> None:
    """As the duty looks, every second, until nothing is waited for any more."""

    async def waits() -> None:
        while one.unfinished(writes=True):
            one.look(writes=True)
            await asyncio.sleep(1)

    await asyncio.wait_for(waits(), bound_s)


# ---- how long


def test_what_is_written_slowly_is_waited_for() -> None:
    """The saver moves, and so it is not given up: hours later the state is still waited for, and one can see how far it is."""

    async def test() -> None:
        site, written = Here(State(1, 100)), asyncio.Event()
        site.savers.what = lambda _: written.wait()  # type: ignore[assignment,return-value]
        site.savers.progress = 12 * GIB, 112 * GIB  # type: ignore[attr-defined]
        one = Storage(site, nothing)
        await looks(one)
        await asyncio.sleep(7200)
        assert one.unfinished(writes=True)
        assert one.awaited == Awaited(100, "is being written", 12 * GIB, 112 * GIB)
        assert one.awaited.words == "is being written: 12 GiB of 112 GiB"
        written.set()
        await looks(one)
        assert one.awaited.words == "is written here, and waits for other nodes' parts"
        site.ordered(committed=100, committed_of=1)
        assert one.unfinished(writes=True)
        assert one.awaited.words == "is written, and waits for its seal"
        await looks(one)
        assert not one.unfinished(writes=True)
        assert one.missing() is None

    virtually(test)


def test_a_storage_that_fails_is_given_up_and_the_step_named() -> None:
    """Half a minute of failures: then nothing is waited for, and it is known which step is not there, and why."""

    async def test() -> None:
        site = Here(State(1, 100))
        site.savers.fails(Unsaved("No space left"))
        one = Storage(site, nothing)
        await looks(one)
        assert one.awaited.words == "is tried again: No space left"
        await given_up(one, 60)
        assert len(site.savers.done) == storage.TRIES_MAX
        assert one.missing() == Awaited(100, "No space left")

    virtually(test)


def test_the_last_state_is_tried_however_many_failed_before_it() -> None:
    """Storage was down for an hour, and a script that ends just then has its last state tried: it may be back."""

    async def test() -> None:
        site = Here(State(1, 90))
        site.savers.fails(Unsaved("EIO"))
        one = Storage(site, nothing)
        await given_up(one, 60)
        site.runs(1, State(1, 100))
        site.savers.fails(None)
        assert one.unfinished(writes=True)
        await given_up(one, storage.BACK_OFF_MAX_S + storage.COMMIT_S + 5)
        assert site.savers.done[-1] == ("persist", 1, 100)
        assert one.has(State(1, 100))

    virtually(test)


def test_a_write_that_goes_on_is_no_failure() -> None:
    """After many failures one try is under way as the script ends: it is not given up before its own end."""

    async def test() -> None:
        site, written = Here(State(1, 100)), asyncio.Event()
        one = Storage(site, nothing)
        site.savers.fails(*[Unsaved("EIO")] * storage.TRIES_MAX)
        await given_up(one, 60)
        site.savers.what = lambda _: written.wait()  # type: ignore[assignment,return-value]
        await asyncio.sleep(storage.BACK_OFF_MAX_S)
        await looks(one)
        await asyncio.sleep(1000)
        assert one.unfinished(writes=True)
        written.set()

    virtually(test)


def test_a_state_that_is_lost_in_memory_is_named() -> None:
    """Damaged before it was written: it cannot be waited for, and the job's good end must not hide it."""

    async def test() -> None:
        site = Here(State(1, 100))
        site.savers.fails(LOST)
        one = Storage(site, nothing)
        await given_up(one, 5)
        missing = one.missing()
        assert missing is not None
        assert missing.step == 100
        site.runs(2, State(2, 7))
        assert one.missing() is None, "the generation after it has gone on from somewhere, and has nothing due"

    virtually(test)


def test_seals_that_failed_are_given_up_for_themselves() -> None:
    """As often as a write; and one that succeeds lets the next be tried as often again."""

    async def test() -> None:
        site = Here(State(1, 100))
        one = Storage(site, nothing)
        await looks(one)
        site.ordered(committed=100, committed_of=1)
        site.savers.fails(Unsaved("EIO"))
        await given_up(one, 60)
        assert site.savers.done.count(("seal", 1, 100)) == storage.TRIES_MAX
        assert one.missing() == Awaited(100, "its parts are there, and no seal")
        site.savers.fails(None)
        await one.finish()
        assert one.missing() is None
        assert one._seal_failures == 0

    virtually(test)


def test_a_fault_of_the_duty_does_not_keep_a_job_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can look any more whether the last state is written: after `LOST_S` it is not waited for."""

    async def test() -> None:
        vault: Any = SimpleNamespace(arenas=Arenas(Path("/")), listener=None)
        keeps: Any = SimpleNamespace(vault=vault, saving=SimpleNamespace(begun=True, changed=None))
        one = CheckpointDuty(keeps, token=b"", host="", bind="")

        def look(*_: Any) -> None:
            raise KeyError("a fault")

        monkeypatch.setattr(one, "_look", look)
        desk = Desk("n", "run", ORDER, lambda _: None)
        running = asyncio.ensure_future(one.run(desk))
        desk.at_rest.clear()
        await asyncio.sleep(duty.LOST_S - 2)
        assert not desk.at_rest.is_set()
        await asyncio.wait_for(desk.until_at_rest(), 5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    virtually(test)


# ---- what is said


def test_what_is_waited_for_is_told() -> None:
    """In the log, with its numbers, and to whoever looks at the terminal."""

    async def test() -> None:
        site, written = Here(State(1, 100)), asyncio.Event()
        goes = Goes(site)
        site.savers.what = lambda _: written.wait()  # type: ignore[assignment,return-value]
        site.savers.progress = GIB, 4 * GIB  # type: ignore[attr-defined]
        await looks(goes.storage)
        with capture_logs() as logs:
            goes.duty._waits(70.0)
        assert goes.said == ["the script has ended; step 100 is being written: 1 GiB of 4 GiB"]
        assert [(one["step"], one["for_s"], one["written"], one["size"]) for one in logs] == [(100, 70, GIB, 4 * GIB)]
        written.set()

    virtually(test)


def test_a_fault_in_telling_does_not_keep_a_job_from_ending() -> None:
    """What the agent calls while it waits must not raise: it would never say that its workers have finished."""
    goes = Goes(Here())
    goes.duty._storage = SimpleNamespace()  # type: ignore[assignment]
    goes.duty._waits(10.0)
    assert len(goes.duty._stumbles) == 1


# ---- the last orders


def test_what_others_have_written_late_is_sealed_as_the_job_ends() -> None:
    """Another node took minutes longer, so this one had finished; its part is committed as the job succeeds, and the seal, slow
    as it is, is there before the agent of rank 0 goes.
    """

    async def test() -> None:
        site = Here(State(1, 100), nodes=2)
        goes = Goes(site)
        await looks(goes.storage)
        await given_up(goes.storage, storage.COMMIT_S + 5)
        site.savers.what = lambda _: asyncio.sleep(10)
        site.desk.order = ordering(WELL, committed=100, committed_of=1)
        await asyncio.wait_for(goes.duty.settle(site.desk.order), GRACE_S)
        assert site.savers.done[-1] == ("seal", 1, 100)
        assert goes.storage.missing() is None
        assert goes.said == []

    virtually(test)


@pytest.mark.parametrize("hangs", [True, False])
def test_a_seal_that_does_not_come_is_told(*, hangs: bool) -> None:
    """Storage fails or hangs as the job ends: the agent goes within its grace, and says which step is no checkpoint."""

    async def test() -> None:
        site = Here(State(1, 90), State(1, 100), nodes=2)
        goes = Goes(site)
        await looks(goes.storage)
        if hangs:
            site.savers.what = lambda _: asyncio.sleep(1e6)
        else:
            site.savers.fails(Unsaved("EIO"))
        site.desk.order = ordering(WELL, committed=100, committed_of=1)
        with capture_logs() as logs:
            await asyncio.wait_for(goes.duty.settle(site.desk.order), GRACE_S + 1)
        assert [one["step"] for one in logs if one["log_level"] == "error"] == [100]
        assert goes.said[0].startswith("step 100 is not a checkpoint on storage: its parts are there, and no seal")

    virtually(test)


def test_a_step_that_is_not_on_storage_is_told_as_the_job_ends() -> None:
    """The other node has never written its part: the job succeeds all the same, and an error says what there is instead."""

    async def test() -> None:
        site = Here(State(1, 100), nodes=2)
        goes = Goes(site)
        site.ordered(committed=90, committed_of=1)
        await looks(goes.storage)
        site.desk.order = ordering(WELL, committed=90, committed_of=1)
        with capture_logs() as logs:
            await goes.duty.settle(site.desk.order)
        assert [(one["step"], one["committed"]) for one in logs if one["log_level"] == "error"] == [(100, 90)]
        why = "not all nodes have written their parts; the newest there is step 90"
        assert goes.said == [f"step 100 is not a checkpoint on storage: {why}"]

    virtually(test)


def test_who_is_stopped_meanwhile_goes_within_its_grace() -> None:
    """Ctrl-C while the last state is written: the agent does not wait for all of it, and says that it is not there."""

    async def test() -> None:
        site = Here(State(1, 100))
        goes = Goes(site)
        site.savers.what = lambda _: asyncio.sleep(1e6)
        site.savers.progress = GIB, 4 * GIB  # type: ignore[attr-defined]
        await looks(goes.storage)
        await asyncio.wait_for(goes.duty.settle(ORDER._replace(leave=True, outcome="stopped")), GRACE_S + 1)
        why = "was still being written: 1 GiB of 4 GiB; no step is there"
        assert goes.said == [f"step 100 is not a checkpoint on storage: {why}"]
        await goes.storage.close()

    virtually(test)


# ---- how far the saver is


def test_the_saver_says_how_far_it_is(brood: Brood) -> None:
    """With each word that it moves; what it said of one order says nothing of the next."""

    async def test(one: Saving, _: Arenas) -> None:
        one.begin()
        await until(lambda: one.pid)
        order = asyncio.ensure_future(one.order({"op": "persist", "ids": []}))
        await asyncio.sleep(0)
        brood.says({"op": "moves", "written": 5, "size": 9})
        await until(lambda: one.progress == (5, 9))
        brood.says({"op": "done", "key": 1})
        await order
        order = asyncio.ensure_future(one.order({"op": "persist", "ids": []}))
        await asyncio.sleep(0)
        assert one.progress == (0, 0)
        order.cancel()

    with_saver(brood, test)


def test_workers_that_end_well_are_waited_for_at_once() -> None:
    """Before the agent asks: what is due as the last of them ends keeps it from saying that all have finished."""

    async def test() -> None:
        site = Here(State(1, 100))
        goes = Goes(site)
        goes.duty._ranks = SimpleNamespace(writes=True)  # type: ignore[assignment]
        assert site.keeping is KEEPING
        goes.duty.noticed(WorkerExit(1, 0, 0, 0, asked=False, died_us=0))
        assert not site.desk.at_rest.is_set()

    virtually(test)

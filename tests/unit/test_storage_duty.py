"""What a node writes to storage, and its saver: orders that fail, hang or kill, and an agent that goes. No process, no torch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from orders import ordering
from storing import ORDER, mapped

from dlrover_adapters.agent.checkpoints import storage
from dlrover_adapters.agent.checkpoints.arenas import Arena, Arenas, Owner, State
from dlrover_adapters.agent.checkpoints.duty import CheckpointDuty
from dlrover_adapters.agent.checkpoints.ranks import Ranks
from dlrover_adapters.agent.checkpoints.saving import Unsaved
from dlrover_adapters.agent.checkpoints.site import Keeping, Site
from dlrover_adapters.agent.checkpoints.storage import BACK_OFF_S, TORN_MAX, TRIES_MAX, Storage
from dlrover_adapters.agent.checkpoints.vault import Caller
from dlrover_core.job.checkpoints import ReportHeld, ReportStorage, storage_calm_s
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.keeping import Everywhere
from dlrover_core.runtime.launcher import WorkersLaunch
from dlrover_core.testing import virtual_loop

KEEPING = Keeping("file:///x", 2, 10, 3, "dcp", True, 1, True, "")
LOST = Unsaved("overwritten", lost=True)
Place = Callable[..., Any]


class Savers:
    """In place of a node's saver: what it is ordered, and what it makes of that."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int, int]] = []
        self.held: list[list[int]] = []
        self.what: Callable[[dict[str, Any]], Awaitable[None]] | None = None
        self.address = ""

    async def order(self, body: dict[str, Any]) -> Any:
        """As `Saving`."""
        self.done.append((body["op"], body["generation"], body["step"]))
        if self.what is not None:
            await self.what(body)
        return SimpleNamespace(body={"size": 1, "took_us": 1}, fd=-1)

    def hold(self, slots: list[list[int]]) -> None:
        """As `Saving`."""
        self.held = slots

    def hasten(self) -> None:
        """As `Saving`."""

    def fails(self, *errors: Unsaved | None) -> None:
        """With these, one order after the other; then with the last of them."""
        left = list(errors)

        async def fail(_: dict[str, Any]) -> None:
            error = left.pop(0) if len(left) > 1 else left[0]
            if error is not None:
                raise error

        self.what = fail


class Here(Site):
    """A node that holds what a test says."""

    def __init__(self, *whole: State, generation: int = 1, nodes: int = 1, node_rank: int = 0) -> None:
        self.sent: list[Any] = []
        self.savers, self.has = Savers(), list(whole)
        super().__init__(Desk("n", "run", ORDER, self.sent.append), Arenas(Path("/")), self.savers)  # type: ignore[arg-type]
        self.keeping, self.due = KEEPING, True
        self.runs(generation, nodes=nodes, node_rank=node_rank)
        self.look()

    def runs(self, generation: int, *whole: State, nodes: int = 1, node_rank: int = 0) -> None:
        """These workers do now."""
        self.begin(WorkersLaunch("run", generation, 0, 1, nodes, node_rank, nodes, "h:1", 0, 0))
        self.has = list(whole) or self.has
        self.look()

    def look(self) -> None:
        """As `Site`."""
        self.whole = sorted(self.has)

    def own(self, state: State) -> list[tuple[Arena, int]]:
        """As `Site`."""
        return [(SimpleNamespace(id=1, cut=lambda _slot: b""), 0)] if state in self.has else []  # type: ignore[list-item]

    def is_due(self, state: State) -> bool:
        """As `Site`."""
        return self.due and state.step % 10 == 0

    def ordered(self, **fields: Any) -> None:
        """The leader's newest word."""
        self.desk.order = ordering(self.desk.order, **fields)

    def of(self, kind: type) -> list[Any]:
        """What was said of this kind."""
        return [one for one in self.sent if isinstance(one, kind)]


async def looks(one: Storage, times: int = 3) -> None:
    """As the duty does it, until what that begins has ended."""
    for _ in range(times):
        one.look(writes=True)
        await asyncio.sleep(0.01)


def virtually(test: Callable[[], Any]) -> None:
    """In virtual time."""
    virtual_loop.run(test())


def nothing() -> None:
    """Nobody wants to know."""


# ---- which state


def test_a_step_of_another_generation_is_another_state() -> None:
    """Step 40 was sealed; after a failure it is reached again: written, waited for, and sealed once more."""

    async def test() -> None:
        site = Here(State(1, 40))
        site.ordered(committed=40, committed_of=1)
        one = Storage(site, nothing)
        await looks(one)
        assert site.savers.done == [("seal", 1, 40), ("persist", 1, 40)]
        assert not one.unfinished(writes=True)
        site.runs(2, State(2, 40))
        await looks(one)
        assert site.savers.done[2:] == [("persist", 2, 40)]
        assert one.unfinished(writes=True), "nothing says that this one is committed"
        site.ordered(committed_of=2)
        await looks(one)
        assert site.savers.done[3:] == [("seal", 2, 40)]
        assert not one.unfinished(writes=True)

    virtually(test)


def test_a_later_step_of_an_older_generation_is_older() -> None:
    """Step 100 of generation 1 is committed and damaged; generation 2 began at 30, and its 50 is still waited for."""

    async def test() -> None:
        site = Here(State(2, 50), generation=2)
        site.ordered(committed=100, committed_of=1)
        one = Storage(site, nothing)
        await looks(one)
        assert one.unfinished(writes=True)

    virtually(test)


def test_a_commit_that_never_comes_is_awaited_for_a_while() -> None:
    """Another node has lost its part of the last step: nobody waits longer than `COMMIT_S`."""

    async def test() -> None:
        site = Here(State(1, 100), nodes=2)
        one = Storage(site, nothing)
        await looks(one)
        assert one.unfinished(writes=True)
        await asyncio.sleep(storage.COMMIT_S + 1)
        assert not one.unfinished(writes=True)

    virtually(test)


# ---- a storage that fails


def test_a_storage_that_comes_and_goes_is_told_of_rarely() -> None:
    """Every second write fails: once it is back it is told so at once, then only after `storage_calm_s` of the failures told."""

    async def test() -> None:
        site = Here()
        site.savers.fails(*[Unsaved("EIO"), None] * 10)
        one = Storage(site, nothing)
        for step in range(10, 110, 10):
            site.runs(1, State(1, step))
            for _ in range(2):
                await looks(one, 1)
                await asyncio.sleep(5)
        assert [bool(each.reason) for each in site.of(ReportStorage)] == [True, False, True]
        await asyncio.sleep(storage_calm_s(2))
        await looks(one, 1)
        assert [bool(each.reason) for each in site.of(ReportStorage)] == [True, False, True, False]

    virtually(test)


def test_a_job_that_has_ended_waits_half_a_minute_for_a_storage_that_has_failed_for_long() -> None:
    """By then tries are a minute apart; six of those would hold up the job's end for minutes."""

    async def test() -> None:
        site = Here()
        site.savers.fails(Unsaved("EROFS"))
        one = Storage(site, nothing)
        for step in range(10, 60, 10):
            site.runs(1, State(1, step))
            await looks(one, 1)
            await asyncio.sleep(2**6)
        tries, now = len(site.savers.done), asyncio.get_running_loop().time
        began = now()
        one.try_anew()
        while one.unfinished(writes=True):
            await looks(one, 1)
        assert 30 < now() - began < 35
        assert len(site.savers.done) == tries + TRIES_MAX
        assert one.unstored()[0]
        await one.close()

    virtually(test)


@pytest.mark.parametrize("error", [Unsaved("EIO"), LOST], ids=["failing", "lost"])
def test_a_failing_storage_pins_nothing(error: Unsaved) -> None:
    """What was ordered may be overwritten as soon as a try has failed, and is tried again while it is there."""

    async def test() -> None:
        site = Here(State(1, 40))
        site.runs(2)
        site.due = False
        site.savers.fails(error)
        one = Storage(site, nothing)
        site.ordered(persist=40, persist_of=1, persist_places=(0,))
        one.look(writes=True)
        assert one.holds == [State(1, 40)]
        await looks(one)
        assert one.holds == []
        await asyncio.sleep(5)
        tries = len(site.savers.done)
        assert (tries > 1) is (not error.lost)
        site.has = []
        await asyncio.sleep(300)
        assert len(site.savers.done) == tries, "it is not in memory any more"
        await one.close()

    virtually(test)


@pytest.mark.parametrize(
    ("told", "free"),
    [
        ({}, False),
        ({"decided": 1}, False),
        ({"decided": 2}, True),
        ({"committed": 35, "committed_of": 2}, False),
        ({"committed": 40, "committed_of": 2}, True),
        ({"committed": 10, "committed_of": 3}, True),
        ({"persist": 40, "persist_of": 2, "persist_places": (0,), "decided": 2}, False),
        ({"persist": 35, "persist_of": 2, "persist_places": (0,), "decided": 2}, True),
    ],
)
def test_an_ended_generation_s_state_is_held_until_it_is_decided_upon(told: dict[str, Any], free: bool) -> None:
    """Not longer: who runs next has two slots, and needs both. What is ordered is held until it is written."""

    async def test() -> None:
        site = Here(State(2, 35), State(2, 40), generation=2)
        site.runs(3)
        site.due = False
        one = Storage(site, nothing)
        one.hold(State(2, 40), 30.0)
        site.ordered(**told)
        one.look(writes=True)
        assert (State(2, 40) not in one.holds) is free
        await looks(one)
        assert (one.holds == []) is bool(told and (free or "persist" in told))
        await asyncio.sleep(31)
        one.look(writes=True)
        assert one.holds == []
        await one.close()

    virtually(test)


# ---- the end of an agent


def settles(one: Storage, everywhere: int = -1) -> Awaitable[None]:
    """The agent goes."""
    return asyncio.wait_for(one.settle(lambda: everywhere), 30)


def test_what_all_nodes_hold_is_written_first() -> None:
    """One of two nodes was stopped a step later: both write the step that both hold, then what is newer."""

    async def test() -> None:
        for whole, steps in (([State(1, 40), State(1, 42)], [40, 42]), ([State(1, 38), State(1, 40)], [40])):
            site = Here(*whole, nodes=2, node_rank=1)
            site.due = False
            one = Storage(site, nothing)
            await looks(one)
            await settles(one, 40)
            assert [each.step for each in one.written] == steps

    virtually(test)


def test_what_is_ordered_is_written_before_the_agent_goes() -> None:
    """A leaving node keeps copies of one that died: their parts are on storage when it goes, though it has none of its own."""

    async def test() -> None:
        site = Here(nodes=2, node_rank=1)
        one = Storage(site, nothing)
        await looks(one)
        there: Any = {0: {0: SimpleNamespace(owner=Owner(0, 2, 7))}}
        site.copies = lambda generation: {State(generation, 40): there}  # type: ignore[method-assign]
        site.ordered(persist=40, persist_of=1, persist_places=(0,), leave=True)
        await settles(one)
        assert [(each.step, each.places) for each in one.written] == [(40, 1)]

    virtually(test)


def test_what_is_ordered_late_is_waited_for() -> None:
    """The leader orders once it has heard of everybody: a node that writes nothing of its own is still there then, its workers
    may end as late as they like, and when the order is taken back it goes.
    """

    async def test() -> None:
        site = Here(State(1, 40), nodes=2, node_rank=1)
        site.due, site.desk.generation = False, 1
        one = Storage(site, nothing)
        going = asyncio.ensure_future(one.settle(lambda: -1))
        await asyncio.sleep(20)
        site.desk.generation = 0
        await asyncio.sleep(storage.HELD_WAIT_S / 2)
        assert not going.done()
        assert not one.written
        site.ordered(persist=40, persist_of=1, persist_places=(1,), leave=True)
        site.places[1] = 1
        await asyncio.sleep(1)
        assert [(each.step, each.places) for each in one.written] == [(40, 1)]
        site.ordered(persist=-1)
        await asyncio.wait_for(going, 1)

    virtually(test)


def test_a_lost_state_does_not_keep_the_others_from_being_written() -> None:
    """The first is damaged in memory: the next is written."""

    async def test() -> None:
        site = Here(State(1, 40), State(1, 42), nodes=2, node_rank=1)
        site.due = False
        site.savers.fails(LOST, None)
        one = Storage(site, nothing)
        await looks(one)
        await settles(one, 40)
        assert [each.step for each in one.written] == [42]

    virtually(test)


def test_a_write_that_was_given_up_is_tried_again_as_long_as_the_state_is_whole_in_memory() -> None:
    """A saver that could not read a slot whole is no proof that the state is lost: memory says whether it is there."""

    async def test() -> None:
        site = Here(State(1, 38), State(1, 40))
        site.savers.fails(LOST, None)
        one = Storage(site, nothing)
        await looks(one)
        assert one.unfinished(writes=True), "a good end waits for it"
        await asyncio.sleep(BACK_OFF_S)
        await looks(one)
        assert site.savers.done == [("persist", 1, 40)] * 2
        assert one.has(State(1, 40))
        assert not site.of(ReportStorage), "nothing is wrong with the storage"
        site.ordered(committed=40, committed_of=1)
        await looks(one)
        assert one.unstored() == ("", -1)

    virtually(test)


@pytest.mark.parametrize("damaged", [True, False])
def test_where_the_last_state_is_lost_the_newest_that_is_left_is_written(*, damaged: bool) -> None:
    """Damaged in memory, or gone from there: what is older and whole takes its place, and what is lost is named."""

    async def test() -> None:
        site = Here(State(1, 36), State(1, 38), State(1, 40))

        async def persist(body: dict[str, Any]) -> None:
            if body["step"] == 40:
                if not damaged:
                    site.has = [State(1, 36), State(1, 38)]
                raise LOST

        site.savers.what = persist
        one = Storage(site, nothing)
        for _ in range(TORN_MAX + 1):
            await looks(one)
            await asyncio.sleep(BACK_OFF_S)
        assert site.savers.done == [("persist", 1, 40)] * (TORN_MAX if damaged else 1) + [("persist", 1, 38)]
        site.ordered(committed=38, committed_of=1)
        await looks(one)
        assert not one.unfinished(writes=True)
        told, step = one.unstored()
        assert step == -1
        assert told == (
            f"step 40 is not a checkpoint on storage ({KEEPING.url}): it was lost in memory before it was written; the newest "
            "there is step 38. See that the storage can be written, then start the job again: it goes on from step 38"
        )

    virtually(test)


def test_where_all_states_are_lost_the_job_fails_with_what_is_missing() -> None:
    """What could take its place is damaged, too: each is tried, none for ever, and the one that was due is named."""

    async def test() -> None:
        site = Here(State(1, 36), State(1, 38), State(1, 40))
        site.savers.fails(LOST)
        one = Storage(site, nothing)
        for _ in range(3 * TORN_MAX + 3):
            await looks(one)
            await asyncio.sleep(BACK_OFF_S)
        assert site.savers.done == [("persist", 1, step) for step in (40, 38, 36) for _ in range(TORN_MAX)]
        assert not one.unfinished(writes=True)
        assert one.unstored()[0].startswith(
            f"step 40 is not a checkpoint on storage ({KEEPING.url}): it was lost in memory before it was written; no step is "
            "there"
        )

    virtually(test)


def test_of_several_nodes_none_writes_another_state_than_was_due() -> None:
    """What one of several nodes has left, the others need not have: only a step that all of them write is ever whole."""

    async def test() -> None:
        site = Here(State(1, 38), State(1, 40), nodes=2)
        site.savers.fails(LOST)
        one = Storage(site, nothing)
        for _ in range(TORN_MAX + 1):
            await looks(one)
            await asyncio.sleep(BACK_OFF_S)
        assert site.savers.done == [("persist", 1, 40)] * TORN_MAX
        told, step = one.unstored()
        assert step == -1, "whatever is committed: this node has lost its own part"
        assert told.startswith("step 40 is not a checkpoint on storage")
        assert "no step is there" in told

    virtually(test)


def test_what_others_have_not_written_counts_unless_it_is_committed() -> None:
    """A node that has its parts on storage names the step; a seal that is its own to write is not others' to bring."""

    async def test() -> None:
        site = Here(State(1, 40), nodes=2)
        one = Storage(site, nothing)
        await looks(one)
        told, step = one.unstored()
        assert step == 40
        assert "not all nodes have written their parts" in told
        site.ordered(committed=40, committed_of=1)
        told, step = one.unstored()
        assert step == -1
        assert told.startswith(
            f"step 40 is not a checkpoint on storage ({KEEPING.url}): its parts are there, and no seal"
        )
        await looks(one)
        assert one.unstored() == ("", -1)

    virtually(test)


# ---- layouts of one generation


def test_of_a_ranks_arenas_the_newest_counts() -> None:
    """Three layouts in one generation: it waits at the boundary in the newest; the older ones go once newer steps are whole."""
    arenas = Arenas(Path("/"))
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(mapped(arenas, layout, 10 * layout, 10 * layout + 1)) for layout in (1, 2, 3)]
        newest, control = made[-1]
        assert arenas.own(1) == [newest]
        assert arenas.superseded(1, 21) == [made[0][0]]
        assert arenas.superseded(1, 30) == [made[0][0], made[1][0]]
        control.acked, control.boundary = 7, 32
        site = Here(State(1, 31))
        site.mine = lambda: arenas.own(1)  # type: ignore[method-assign]
        site.ordered(plan=7)
        ranks = Ranks()
        ranks.greeted(Caller(1, 0, 0, 1))
        ranks._report_plan(site)
        assert [each.steps for each in site.of(ReportHeld)] == [(31,)]


def test_only_what_could_be_ordered_is_held() -> None:
    """A state in every slot, and one of them is kept: the newest that all nodes hold, where the leader has said so."""
    site = Here(State(1, 40), State(1, 42), nodes=2)
    site.spread = 1
    assert CheckpointDuty._orderable(site, (40, 42)) == 42
    site.spread = 0
    site.desk.seen((Everywhere(40),))
    assert CheckpointDuty._orderable(site, (40, 42)) == 40
    site.desk.seen((Everywhere(30),))
    assert CheckpointDuty._orderable(site, (40, 42)) == 42
    assert CheckpointDuty._orderable(site, ()) == -1


# ---- a fault of ours


def test_a_fault_of_the_duty_does_not_end_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that raises is told once, and the next one is made."""

    async def test() -> None:
        arenas, seen = Arenas(Path("/")), []
        vault = SimpleNamespace(arenas=arenas, listener=None)
        keeps = SimpleNamespace(vault=vault, saving=SimpleNamespace(begun=True, changed=None))
        duty = CheckpointDuty(keeps, token=b"", host="", bind="")  # type: ignore[arg-type]

        def look(*_: Any) -> None:
            seen.append(1)
            raise KeyError("a fault")

        monkeypatch.setattr(duty, "_look", look)
        running = asyncio.ensure_future(duty.run(Desk("n", "run", ORDER, lambda _: None)))
        await asyncio.sleep(10)
        assert not running.done()
        assert len(seen) > 3
        assert len(duty._stumbles) == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    virtually(test)

"""Which states a node sends to its partner, and which of them the partner keeps. No process, no network."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_adapters.agent.checkpoints.arenas import State
from dlrover_adapters.agent.checkpoints.copying import Copying
from dlrover_adapters.agent.checkpoints.orders import Orders
from dlrover_adapters.agent.checkpoints.saving import Unsaved
from dlrover_core.checkpoint.arena import Stamp
from dlrover_core.job.checkpoints import Keep
from dlrover_core.runtime.keeping import Everywhere
from dlrover_core.testing import virtual_loop


class Here:
    """A node that holds what a test says, and what its saver is ordered to send: steps, and the step that the partner keeps."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.there: list[tuple[int, int]] = []
        self.room = 2
        self.fails: dict[int, Unsaved] = {}
        self.keep, self.everywhere = Keep(replica_to="partner:1"), Everywhere()
        self.launch, self.generation, self.spread = object(), 1, 1
        self.whole: list[State] = []
        self.published: dict[int, int] = {}
        self.desk = SimpleNamespace(beats_seen=0, hurry=lambda: None)
        self.saving = SimpleNamespace(order=self._order)

    async def _order(self, body: dict[str, Any]) -> Any:
        """As a partner with ``room``: what comes replaces the oldest copy that is not to be kept."""
        came, keep = (body["generation"], body["step"]), tuple(body["keep"])
        self.sent.append((body["step"], body["keep"][1]))
        if body["step"] in self.fails:
            raise self.fails[body["step"]]
        others = sorted(one for one in self.there if one != came)
        while len(others) >= self.room:
            others.remove(next(one for one in others if one != keep))
        self.there = [*others, came]
        return SimpleNamespace(body={"there": [list(one) for one in self.there]})

    def own(self, state: State) -> list[Any]:
        """As `Site`: one rank."""
        stamp = Stamp(state.generation, state.step, self.published.get(state.step, state.step), 0, 0)
        arena = SimpleNamespace(id=1, stamps=lambda: [(0, stamp)])
        return [(arena, 0)] if state in self.whole else []

    async def look(self, copying: Copying, *steps: int, everywhere: int = -1) -> list[tuple[int, int]]:
        """What is sent when these steps are whole here, and that one everywhere."""
        self.sent, self.whole, self.everywhere = [], [State(1, step) for step in steps], Everywhere(everywhere)
        for _ in range(4):
            copying.look()
            await asyncio.sleep(0.01)
        return self.sent


def made() -> tuple[Here, Copying]:
    """A node under DDP."""
    here = Here()
    return here, Copying(here, lambda: None)  # type: ignore[arg-type]


def test_the_partner_gets_what_is_whole_everywhere_though_a_newer_state_is_here() -> None:
    """Another node left the newest state out: if this node is lost, only the one before can be restored."""

    async def test() -> None:
        here, copying = made()
        assert await here.look(copying, 2) == [(2, -1)]
        assert await here.look(copying, 4, 6, everywhere=4) == [(6, -1), (4, -1)]
        assert copying.copied == 6
        assert await here.look(copying, 4, 6, everywhere=4) == []

    virtual_loop.run(test())


@pytest.mark.parametrize(("everywhere", "keep"), [(4, 4), (6, 6), (2, -1)])
def test_a_copy_of_what_is_whole_everywhere_is_not_overwritten_by_a_newer_one(everywhere: int, keep: int) -> None:
    """The partner has room for two, and is told which of them to keep; without a word it keeps the newest."""

    async def test() -> None:
        here, copying = made()
        await here.look(copying, 4)
        await here.look(copying, 4, 6)
        assert await here.look(copying, 4, 6, 8, everywhere=everywhere) == [(8, keep)]

    virtual_loop.run(test())


def test_a_step_that_was_saved_again_is_sent_again() -> None:
    """The partner's copy is of the first one: nobody is told that there is a copy until the second one is there."""

    async def test() -> None:
        here, copying = made()
        await here.look(copying, 2)
        assert await here.look(copying, 2, 4) == [(4, -1)]
        assert copying.copied == 4
        here.published[4] = 5
        assert copying.copied == 2
        assert await here.look(copying, 2, 4, everywhere=4) == [(4, -1)]
        assert copying.copied == 4
        assert await here.look(copying, 2, 4, everywhere=4) == []
        here.whole = []
        assert copying.copied == 4, "what is not here any more has not changed there"

    virtual_loop.run(test())


@pytest.mark.parametrize("refused", [True, False])
def test_a_refusal_keeps_no_newer_state_from_being_sent(*, refused: bool) -> None:
    """A partner that lives and does not want one state gets the next one at once; one that does not answer is left alone."""

    async def test() -> None:
        here, copying = made()
        await here.look(copying, 2)
        here.fails = {4: Unsaved("older than what is here", refused=refused)}
        assert await here.look(copying, 2, 4) == [(4, -1)]
        assert await here.look(copying, 2, 4) == [], "not again, for a while"
        assert await here.look(copying, 4, 6) == ([(6, -1)] if refused else [])
        assert copying.copied == (6 if refused else 2)

    virtual_loop.run(test())


def test_a_refused_state_is_offered_again_after_a_while_or_as_it_is_another_one() -> None:
    """Another copy was on its way then, for one."""

    async def test() -> None:
        here, copying = made()
        here.fails = {4: Unsaved("another copy is on its way", refused=True)}
        assert await here.look(copying, 4) == [(4, -1)]
        here.published[4] = 9
        assert await here.look(copying, 4) == [(4, -1)]
        here.fails = {}
        assert await here.look(copying, 4) == []
        await asyncio.sleep(5)
        assert await here.look(copying, 4) == [(4, -1)]
        assert copying.copied == 4

    virtual_loop.run(test())


def test_what_is_sent_speaks_for_the_generation_of_its_node() -> None:
    """Whatever level the saver has heard last."""
    here, copying = made()
    bodies: list[dict[str, Any]] = []

    async def order(body: dict[str, Any]) -> Any:
        bodies.append(body)
        return SimpleNamespace(body={"there": []})

    here.saving.order = order

    async def test() -> None:
        here.generation = 1
        await here.look(copying, 2)

    virtual_loop.run(test())
    assert {one["speaks"] for one in bodies} == {1}
    orders = Orders(None)  # type: ignore[arg-type]
    assert orders._speaks({"speaks": 5}) == 5
    orders.take({"op": "level", "generation": 6}, ())
    assert orders._speaks({"speaks": 5}) == 6

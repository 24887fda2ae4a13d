"""The agent's outbox: contiguous numbers, at most 16 on the wire, sent again in order to whoever leads."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.errors import ConnectionLost
from dlrover_core.job import evidence, incidents, world
from dlrover_core.kernel.engine import UNANSWERED_MAX as ENGINE_KEEPS
from dlrover_core.runtime.outbox import UNANSWERED_MAX, Outbox
from dlrover_core.testing import virtual_loop


def in_loop(test: Callable[..., None]) -> Callable[..., None]:
    """An outbox ages what waits in it by its loop's clock: the test runs inside a virtual one."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        async def story() -> None:
            test(*args, **kwargs)

        virtual_loop.run(story())

    return run


def _drain(outbox: Outbox) -> list[int]:
    sent = []
    while (item := outbox.next()) is not None:
        sent.append(item[0])
    return sent


def _filled(count: int) -> Outbox:
    outbox = Outbox()
    for number in range(1, count + 1):
        assert outbox.add((f"command {number}",)) == number
    return outbox


@in_loop
def test_numbers_are_contiguous_from_one() -> None:
    """Commands are numbered 1, 2, 3 in the order they were added, and go out in that order."""
    outbox = _filled(3)
    assert [outbox.next(), outbox.next(), outbox.next()] == [
        (1, ("command 1",)),
        (2, ("command 2",)),
        (3, ("command 3",)),
    ]
    assert outbox.next() is None


@in_loop
def test_at_most_sixteen_unanswered_are_on_the_wire() -> None:
    """The rest waits for answers; the engine remembers as many replies."""
    outbox = _filled(40)
    assert _drain(outbox) == list(range(1, 17))
    outbox.answered(2)
    assert _drain(outbox) == [17, 18]
    assert UNANSWERED_MAX == ENGINE_KEEPS == 16


@in_loop
def test_an_answer_acknowledges_all_before_it() -> None:
    """Answers come in order, so one stands for all up to it."""
    outbox = _filled(5)
    _drain(outbox)
    outbox.answered(4)
    outbox.rewind()
    assert _drain(outbox) == [5]
    outbox.answered(5)
    assert outbox.empty


@in_loop
def test_a_new_connection_sends_the_unanswered_again() -> None:
    """After a rewind everything unanswered goes out again, in order, under its old number."""
    outbox = _filled(5)
    _drain(outbox)
    outbox.answered(2)
    outbox.rewind()
    assert _drain(outbox) == [3, 4, 5]


@in_loop
def test_a_gap_is_filled_from_where_it_began() -> None:
    """The leader asks again from a number: that one and all after it go out again."""
    outbox = _filled(5)
    _drain(outbox)
    outbox.expected(3)
    assert _drain(outbox) == [3, 4, 5]


@in_loop
def test_a_leader_that_forgot_us_is_not_argued_with() -> None:
    """Asked for what was answered long ago, the agent drops the connection instead of sending the same again for ever."""
    outbox = _filled(3)
    _drain(outbox)
    outbox.answered(2)
    with pytest.raises(ConnectionLost, match="does not know this node"):
        outbox.expected(1)


@in_loop
def test_late_answers_are_harmless() -> None:
    """An answer that comes twice, or for a number not sent on this connection, loses nothing."""
    outbox = _filled(4)
    _drain(outbox)
    outbox.rewind()
    outbox.answered(1)
    outbox.answered(1)
    assert _drain(outbox) == [2, 3, 4]


@in_loop
def test_every_change_is_announced() -> None:
    """Whoever waits on `changed` learns of additions, answers and rewinds."""
    outbox = Outbox()
    for act in (lambda: outbox.add(("x",)), outbox.rewind, lambda: outbox.answered(1)):
        outbox.changed.clear()
        act()
        assert outbox.changed.is_set()


@given(st.lists(st.sampled_from(["add", "send", "lose", "cut"]), max_size=80))
@in_loop
def test_nothing_is_lost_and_order_holds(acts: list[str]) -> None:
    """Against a receiver that accepts only the next number, over a wire that drops and breaks: all arrive once, in order."""
    outbox, received, added = Outbox(), [], 0
    for act in [*acts, *["cut", "send"] * 6]:
        if act == "add":
            added = outbox.add(("x",))
        elif act == "cut":
            outbox.rewind()
        elif act == "lose":
            outbox.next()
        else:
            for number in _drain(outbox):
                if number == len(received) + 1:
                    received.append(number)
                    outbox.answered(number)
                elif number > len(received) + 1:
                    outbox.expected(len(received) + 1)
    assert received == list(range(1, added + 1))
    assert outbox.empty


def test_what_waits_grows_older() -> None:
    """A death, or evidence, that could not be told for ten seconds is told as ten seconds older; other commands stay."""

    async def story() -> None:
        outbox = Outbox()
        outbox.add(incidents.ReportExit("worker-0-0", 1, 0, -9, age_us=5))
        outbox.add(world.ReportStarted("worker-0-0", 1))
        seen = evidence.ReportEvidence("worker-0-0", "log", "cuda.ecc", "a line", age_us=5)
        outbox.add(seen)
        await asyncio.sleep(10)  # of the virtual clock
        assert outbox.next() == (1, incidents.ReportExit("worker-0-0", 1, 0, -9, age_us=10_000_005))
        assert outbox.next() == (2, world.ReportStarted("worker-0-0", 1))
        assert outbox.next() == (3, seen._replace(age_us=10_000_005))

    virtual_loop.run(story())

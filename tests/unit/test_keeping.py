"""What the beats say of states kept, and what the leader makes of it: whole steps, and commits said until the log has them."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from drive import Drive
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.job.checkpoints import CommitCheckpoint, ReportHeld, ReportKeeping
from dlrover_core.job.orders import Order
from dlrover_core.runtime.beats import LEAST_S, Beats
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.keeping import HELD_MAX, WRITTEN_MAX, Everywhere, Keeping, KeptBeat, Written
from dlrover_core.runtime.levels import Beat
from dlrover_core.runtime.messages import FIELDS_MAX, decode, encode
from dlrover_core.runtime.version_4 import kept, kept_of
from dlrover_core.testing import virtual_loop

A, B, C = "worker-0-0", "worker-1-0", "worker-2-0"
INTS = st.integers(-(2**40), 2**40)
ANY = 2**62
"""Whichever generation is told of has formed."""


def saving(nodes: int = 2, spread: int = 0) -> Drive:
    """A job whose first generation saves."""
    drive = Drive(nodes_max=nodes, nproc=1).up()
    drive.do(ReportKeeping(A, 1, "file:///c", 2, 10, 3, False, 4096, spread))
    return drive


def beat(*written: int, generation: int = 1, writes: bool = True, held: tuple[int, ...] = ()) -> tuple[int, ...]:
    """What a node's beat tells: these steps written."""
    return KeptBeat(generation, writes, -1, held, tuple(Written(step, 100, step) for step in written))


def commits(keeping: Keeping, drive: Drive) -> list[CommitCheckpoint]:
    """What is to be committed now, which is then done."""
    found = list(keeping.commits(drive.state.checkpoints))
    for one in found:
        drive.do(one)
    return found


# ---- a beat's field


@given(
    st.builds(
        KeptBeat,
        st.integers(1, 2**40),
        st.booleans(),
        INTS,
        st.lists(INTS, max_size=HELD_MAX).map(tuple),
        st.lists(st.builds(Written, INTS, INTS, INTS, INTS, INTS, st.binary(max_size=20)), max_size=WRITTEN_MAX).map(
            tuple
        ),
        INTS,
        INTS,
        INTS,
        st.booleans(),
    )
)
def test_beats_are_understood(told: KeptBeat) -> None:
    """What is told is what is heard, by agents of the version before, too, and it fits into a message."""
    beat = Beat(1, 1, 0, (told,))
    assert decode(encode(beat)) == beat
    older = told._replace(written=tuple(one._replace(cut=b"", trained=b"") for one in told.written))
    assert kept_of(kept(told)) == older
    assert len(kept(told)) <= FIELDS_MAX


HEADS = st.tuples(*[INTS] * 7)


@given(
    st.lists(INTS, max_size=FIELDS_MAX).map(tuple)
    | st.builds(
        lambda head, count, rest: (*head, count, *rest),
        HEADS,
        st.integers(-1, HELD_MAX + 1),
        st.lists(INTS, max_size=3 * len(Written._fields) + 2),
    )
)
def test_nonsense_says_nothing(field: tuple[int, ...]) -> None:
    """Whatever a peer sends for it: what has the right shape is understood number by number, all else says nothing."""
    count = field[7] if len(field) > 7 else -1
    rest = len(field) - 8 - count
    shaped = 0 <= count <= HELD_MAX and rest >= 0 and rest % len(Written._fields) == 0
    known = kept_of(field)
    if shaped:
        flat = [value for one in known.written for value in one]
        numbers = (known.generation, known.copied, known.keeps, known.safe, known.before, count, *known.held, *flat)
        assert numbers == (field[0], *field[2:6], *field[7:])
        assert (known.writes, known.wrote) == (bool(field[1]), bool(field[6]))
    else:
        assert known == KeptBeat()
    assert Keeping().take(A, known, 2**41) == (shaped and field[0] > 0)


def test_only_the_newest_is_told() -> None:
    """Of more than fits the newest is told; where nothing is kept, nothing is."""
    many = KeptBeat(1, True, -1, tuple(range(20)), tuple(Written(step, 1, 1) for step in range(9)))
    assert kept_of(kept(many)).held == tuple(range(20))[-HELD_MAX:]
    assert [one.step for one in kept_of(kept(many)).written] == [5, 6, 7, 8]
    assert kept(KeptBeat()) == ()


# ---- whole in memory


def test_whole_is_what_all_hold() -> None:
    """The newest step that every node of the world holds; it may go back where somebody holds less than it did."""
    drive, keeping = saving(), Keeping()
    whole = lambda: keeping.whole("worker", drive.world)  # noqa: E731
    keeping.take(A, beat(held=(8, 10)), ANY)
    assert whole() == -1
    keeping.take(B, beat(held=(6, 8)), ANY)
    assert whole() == 8
    keeping.take(B, beat(held=(8, 10)), ANY)
    assert whole() == 10
    keeping.take(A, beat(held=(12,)), ANY)
    assert whole() == -1
    keeping.take(A, beat(held=(10, 12)), ANY)
    keeping.forget(B)
    assert whole() == -1


def test_whole_is_of_the_newest_generation() -> None:
    """States of two generations never mix."""
    drive, keeping = saving(), Keeping()
    for node in (A, B):
        keeping.take(node, beat(held=(8, 10)), ANY)
    drive.exit(B, 1)
    assert keeping.whole("worker", drive.world) == -1
    keeping.take(A, beat(generation=2, held=(10,)), ANY)
    keeping.take(B, beat(held=(10, 12)), ANY)
    assert keeping.whole("worker", drive.world) == -1
    keeping.take(B, beat(generation=2, held=(10,)), ANY)
    assert keeping.whole("worker", drive.world) == 10


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.sets(st.integers(0, 4), max_size=3)), max_size=30))
def test_whole_is_counted_right(told: list[tuple[int, int, set[int]]]) -> None:
    """Counted beat by beat it is what a look at all newest beats would give."""
    drive, keeping = saving(nodes=3), Keeping()
    newest: dict[str, tuple[int, set[int]]] = {}
    for place, generation, steps in told:
        node = f"worker-{place}-0"
        if newest.get(node, (0, set()))[0] <= generation:
            newest[node] = generation, steps
            keeping.take(node, beat(generation=generation, held=tuple(sorted(steps))), ANY)
    shown = [steps for generation, steps in newest.values() if generation == 1]
    if newest and max(generation for generation, _ in newest.values()) == 1:
        common = set.intersection(*shown) if len(shown) == 3 else set()
        assert keeping.whole("worker", drive.world) == max(common, default=-1)


# ---- commits


def test_a_step_is_committed_once_all_have_written_it() -> None:
    """Not before the last one has; then with the sum of the sizes and the longest time; then no more."""
    drive, keeping = saving(), Keeping()
    assert keeping.take(A, beat(10), ANY)
    assert commits(keeping, drive) == []
    assert keeping.take(B, beat(10), ANY)
    assert commits(keeping, drive) == [CommitCheckpoint("worker", 1, 10, 2, 200, 10)]
    assert commits(keeping, drive) == []
    assert not keeping.take(B, beat(10), ANY)


def test_who_has_not_been_heard_of_may_write() -> None:
    """Where only one node writes, nothing is committed before all others have said that they do not."""
    drive, keeping = saving(spread=1), Keeping()
    keeping.take(A, beat(10), ANY)
    assert commits(keeping, drive) == []
    keeping.take(B, beat(writes=False), ANY)
    assert commits(keeping, drive) == [CommitCheckpoint("worker", 1, 10, 1, 100, 10)]


def test_the_newest_step_of_all() -> None:
    """Where some are further than others, the newest that all have written counts."""
    drive, keeping = saving(), Keeping()
    keeping.take(A, beat(10, 20, 30), ANY)
    keeping.take(B, beat(10, 20), ANY)
    assert [one.step for one in commits(keeping, drive)] == [20]
    keeping.take(B, beat(20, 30), ANY)
    assert [one.step for one in commits(keeping, drive)] == [30]


def test_what_was_not_heard_is_said_again() -> None:
    """A commit that the log has not got, whatever became of it, is said again; the log has it once."""
    drive, keeping = saving(), Keeping()
    for node in (A, B):
        keeping.take(node, beat(10), ANY)
    first = list(keeping.commits(drive.state.checkpoints))
    assert list(keeping.commits(drive.state.checkpoints)) == first != []
    drive.do(first[0])
    drive.do(first[0])
    assert drive.new == []
    assert list(keeping.commits(drive.state.checkpoints)) == []


def test_a_new_leader_hears_it_again() -> None:
    """Who leads next knows nothing, hears the same beats, and commits what had not been."""
    drive, keeping = saving(), Keeping()
    for node in (A, B):
        keeping.take(node, beat(10), ANY)
    assert [one.step for one in commits(keeping, drive)] == [10]
    drive.take_over()
    again = Keeping()
    for node in (A, B):
        again.take(node, beat(10, 20), ANY)
    assert [one.step for one in commits(again, drive)] == [20]


def test_parts_of_a_generation_that_has_ended() -> None:
    """What all had written as their world ended is a checkpoint, though it is told after the next world has formed."""
    drive, keeping = saving(), Keeping()
    keeping.take(A, beat(10), ANY)
    drive.exit(B, 1)
    keeping.take(B, beat(10), ANY)
    assert [(one.generation, one.step) for one in commits(keeping, drive)] == [(1, 10)]


def test_what_is_written_outlives_its_node() -> None:
    """Nodes that go once they have written, one after the other, as at a stop: the last part still makes it a checkpoint."""
    drive, keeping = saving(), Keeping()
    keeping.take(A, beat(10, held=(10, 12)), ANY)
    keeping.forget(A)
    assert keeping.holds(A) == (0, ())
    assert commits(keeping, drive) == []
    keeping.take(B, beat(10, 12), ANY)
    keeping.forget(B)
    assert [one.step for one in commits(keeping, drive)] == [10]


def test_who_is_gone_is_forgotten_in_the_end() -> None:
    """Two generations later nothing of it is of use to anybody, whoever took its place."""
    keeping = Keeping()
    for generation in range(1, 30):
        keeping.take(A, beat(10, generation=generation), ANY)
        keeping.take(f"worker-1-{generation}", beat(10, generation=generation), ANY)
        keeping.forget(f"worker-1-{generation}")
    assert sorted(keeping._gone) == ["worker-1-28", "worker-1-29"]


def test_a_new_leader_hears_of_the_generation_before() -> None:
    """What all wrote as their world ended is committed by whoever leads next, though the next generation saves already."""
    drive, keeping = saving(), Keeping()
    drive.exit(B, 1)
    drive.do(ReportKeeping(A, 2, "file:///c", 2, 10, 3, False, 4096, 0))
    drive.take_over()
    told = KeptBeat(2, True, -1, (102,), (Written(100, 5, 5, 1),), before=1, wrote=True)
    keeping.take(A, told, 2)
    assert commits(keeping, drive) == []
    keeping.take(B, told, 2)
    assert commits(keeping, drive) == [CommitCheckpoint("worker", 1, 100, 2, 10, 5)]


def test_who_did_not_write_in_the_generation_before() -> None:
    """Nobody waits for it, and what it writes now is another matter."""
    drive, keeping = saving(spread=1), Keeping()
    drive.exit(B, 1)
    keeping.take(A, KeptBeat(2, False, -1, (), (Written(100, 5, 5, 1),), before=1, wrote=True), 2)
    keeping.take(B, KeptBeat(2, True, -1, (), (), before=1, wrote=False), 2)
    assert commits(keeping, drive) == [CommitCheckpoint("worker", 1, 100, 1, 5, 5)]


@pytest.mark.parametrize("generation", [2, 2**40, -1])
def test_a_generation_that_never_was_blinds_nobody(generation: int) -> None:
    """What a beat says of a generation that has not formed is nonsense: the others are heard all the same."""
    drive, keeping = saving(), Keeping()
    assert not keeping.take(A, beat(generation=generation, held=(10,)), drive.world.generation)
    for node in (A, B):
        keeping.take(node, beat(held=(8, 10)), drive.world.generation)
    assert keeping.whole("worker", drive.world) == 10


def ordered(spread: int = 0, nodes: int = 2, copies: tuple[tuple[int, int], ...] = ()) -> Drive:
    """A job whose first generation has ended, and a save of step 12 was ordered."""
    drive = saving(nodes, spread)
    drive.exit(B, 1)
    for node in [A, B, C][:nodes]:
        drive.do(ReportHeld(node, 1, (12,), 0, copies if node == A else ()))
    assert drive.state.checkpoints.of("worker").order is not None
    return drive


def test_what_was_ordered_is_committed_once_its_writers_have_written() -> None:
    """They say of which generation and of how many places, beside what their next generation does."""
    drive, keeping = ordered(), Keeping()

    def told(*written: Written) -> tuple[int, ...]:
        return KeptBeat(2, True, -1, (), written)

    keeping.take(A, told(Written(12, 5, 5, 1, 1)), ANY)
    assert commits(keeping, drive) == []
    keeping.take(B, told(Written(12, 5, 5, 2, 1)), ANY)  # another generation's
    assert commits(keeping, drive) == []
    keeping.take(B, told(Written(12, 5, 7, 1, 1)), ANY)
    assert commits(keeping, drive) == [CommitCheckpoint("worker", 1, 12, 2, 10, 7)]


def test_what_was_due_is_not_what_was_ordered() -> None:
    """A node that has written its own part, since it was due, has not written the copies that it was then asked for."""
    drive = saving(nodes=3)
    drive.observe(C, "failed", -9)
    drive.do(ReportHeld(A, 1, (12,), 0, ((2, 12),)))
    drive.do(ReportHeld(B, 1, (12,)))
    keeping = Keeping()
    due, own, both = Written(12, 5, 5, 1), Written(12, 5, 5, 1, 1), Written(12, 9, 5, 1, 2)
    keeping.take(B, KeptBeat(1, True, -1, (12,), (own,)), ANY)
    for one in (due, own):
        keeping.take(A, KeptBeat(1, True, -1, (12,), (one,)), ANY)
        assert commits(keeping, drive) == []
    keeping.take(A, KeptBeat(1, True, -1, (12,), (both,)), ANY)
    assert commits(keeping, drive) == [CommitCheckpoint("worker", 1, 12, 2, 14, 5)]


def test_what_is_kept_is_bounded() -> None:
    """Of a node two generations are remembered, and nothing once it is gone."""
    keeping = Keeping()
    for generation in range(1, 50):
        keeping.take(A, beat(10, generation=generation, held=(10,)), ANY)
    assert len(keeping._beats[A]) == 2
    assert keeping.holds(A) == (49, (10,))
    keeping.forget(A)
    assert keeping.holds(A) == (0, ())
    assert not keeping._groups["worker"].holding


# ---- when beats go out


def desk() -> Desk:
    """A duty's desk that sends nothing."""
    return Desk(A, "run", Order(False, "", 0), lambda _: None)


def beats_within(seconds: float, every_s: float, hurries: list[float], of: Desk | None) -> list[float]:
    """When beats are due, if a duty hurries at these times."""

    async def story() -> list[float]:
        loop, beats, found = asyncio.get_running_loop(), Beats(), []
        began = loop.time()
        for at in hurries:
            if of is not None:
                loop.call_at(began + at, of.hurry)
        while loop.time() - began < seconds:
            await beats.due(every_s, of)
            assert beats.lag_us == 0
            found.append(round(loop.time() - began, 3))
        return found

    found: list[float] = virtual_loop.run(story())
    return found


@pytest.mark.parametrize("own", [True, False])
def test_beats_are_regular(own: bool) -> None:
    """Where nobody hurries a beat goes out every so often, duties or not."""
    assert beats_within(3.0, 1.0, [], desk() if own else None) == [1.0, 2.0, 3.0]


def test_a_hurried_beat_goes_out_at_once() -> None:
    """A duty need not wait for the next beat, and the ones after it come as often as ever."""
    assert beats_within(2.5, 1.0, [0.3], desk()) == [0.3, 1.3, 2.3, 3.3]


def test_hurrying_is_bounded() -> None:
    """However much is hurried, beats keep their distance."""
    found = beats_within(1.0, 1.0, [0.001 * one for one in range(1000)], desk())
    gaps: list[Any] = [b - a for a, b in pairwise(found)]
    assert min(gaps) >= LEAST_S - 0.001
    assert len(found) <= 1.0 / LEAST_S + 1


def test_what_all_copy_and_what_all_have_copied() -> None:
    """The leader says which step all nodes keep to be copied, and which all have; with one of them it is gone, and with a new

    world; a new leader hears it again.
    """
    drive = saving(2)
    worlds = drive.state.world.worlds

    def said(keeping: Keeping) -> Everywhere:
        return keeping.everywhere(worlds, A)

    keeping = Keeping()
    keeping.take(A, KeptBeat(1, True, 8, (8, 10), (), 8, 4), ANY)
    assert said(keeping) == (-1, -1, -1)
    keeping.take(B, KeptBeat(1, True, 4, (8,), (), 8, 4), ANY)
    for leader in (keeping, Keeping()):
        leader.take(A, KeptBeat(1, True, 8, (8, 10), (), 8, 4), ANY)
        leader.take(B, KeptBeat(1, True, 4, (8,), (), 8, 4), ANY)
        assert said(leader) == Everywhere(whole=8, aim=8, safe=4)
    keeping.take(B, KeptBeat(1, True, 8, (8, 12), (), 8, 4), ANY)
    assert said(keeping).safe == 8
    keeping.take(B, KeptBeat(1, True, 8, (8, 12), (), 12, 8), ANY)
    assert said(keeping) == Everywhere(whole=8, aim=-1, safe=8)
    keeping.forget(A)
    assert said(keeping) == Everywhere()
    keeping.take(A, KeptBeat(2, True, 8, (8,), (), 8, 4), ANY)
    assert said(keeping) == Everywhere()

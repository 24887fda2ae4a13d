"""Worlds: who trains together, with which ranks, and when."""

from __future__ import annotations

import itertools

import pytest
from drive import SECOND, Drive
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.job import job, names, nodes, ranges, world
from dlrover_core.kernel.engine import NotDone
from dlrover_core.rules import layout
from dlrover_core.rules.desired import desired
from dlrover_core.spec import GroupSpec


def _joined(count: int, **settings: object) -> Drive:
    """The first ``count`` nodes join, each with a store."""
    drive = Drive(**settings)
    for one in range(count):
        drive.join(f"worker-{one}-0")
    return drive


def _names(*indexes: int) -> list[str]:
    return [f"worker-{one}-0" for one in indexes]


# ---- when


def test_at_once_when_everybody_expected_is_there() -> None:
    """The world forms with the last of nodes_max, without waiting."""
    drive = _joined(2, nodes_max=3)
    assert drive.members == []
    drive.join("worker-2-0")
    assert drive.members == _names(0, 1, 2)
    assert drive.world.generation == 1


def test_never_below_the_minimum() -> None:
    """Fewer than nodes_min wait, however long."""
    drive = _joined(2, nodes_max=3, nodes_min=3, launch_s=10**6)
    drive.wait(10**5)
    assert drive.members == []


def test_the_last_call() -> None:
    """With nodes_min there and some missing, the world forms last_call_s after the last arrival."""
    drive = _joined(2, nodes_max=4, nodes_min=2, last_call_s=30.0)
    drive.wait(29)
    assert drive.members == []
    drive.join("worker-2-0")
    drive.wait(29)
    assert drive.members == []
    drive.wait(1)
    assert drive.members == _names(0, 1, 2)


def test_the_last_call_starts_afresh_with_a_new_leader() -> None:
    """Whoever could not reach a dead master gets the time again."""
    drive = _joined(2, nodes_max=3, nodes_min=2, last_call_s=30.0)
    drive.wait(29)
    drive.take_over()
    drive.wait(29)
    assert drive.members == []
    drive.wait(1)
    assert drive.members == _names(0, 1)


@pytest.mark.parametrize(
    ("joined", "least", "most", "unit", "size"),
    [
        (10, 8, 12, 4, 8),
        (11, 8, 12, 4, 8),
        (12, 8, 12, 4, 12),
        (7, 8, 12, 4, 0),
        (3, 1, 4, 2, 2),
        (1, 1, 4, 2, 0),
        (7, 5, 8, 4, 0),
        (5, 1, 6, 1, 5),
    ],
)
def test_unit(joined: int, least: int, most: int, unit: int, size: int) -> None:
    """A world's size is a multiple of unit, never empty and never below nodes_min; the surplus stands by."""
    drive = _joined(joined, nodes_min=least, nodes_max=most, unit=unit, nproc=1)
    drive.wait(30)
    assert len(drive.members) == size
    waiting = [node for node, order in desired(drive.state).orders.items() if order.generation == 0]
    assert len(waiting) == joined - size


def test_a_standby_takes_a_dead_members_place() -> None:
    """Surplus nodes are spares: the world re-forms at once with one of them, ranks of the others unmoved."""
    drive = _joined(5, nodes_min=4, nodes_max=8, unit=4, nproc=1)
    drive.wait(30)
    drive.run(1)
    drive.observe("worker-1-0", "failed", -9)
    drive.wait(30)
    assert drive.members == ["worker-0-0", "worker-4-0", "worker-2-0", "worker-3-0"]


def test_forming_waits_for_a_store_of_rank_0() -> None:
    """No world is named without a store on the node that will hold rank 0."""
    drive = Drive(nodes_max=2)
    for node in _names(0, 1):
        drive.do(nodes.ReportJoined(node, "h", "a", 2))
    drive.offer("worker-1-0")
    assert drive.members == []
    address = drive.offer("worker-0-0")
    assert drive.world.store == address


def test_a_withdrawn_store_is_not_named() -> None:
    """What a node took back is not used; withdrawing what is not on offer is refused."""
    drive = Drive(nodes_max=1)
    drive.do(nodes.ReportJoined("worker-0-0", "h", "a", 2))
    drive.do(world.OfferStore("worker-0-0", "h:1"))
    first = drive.world.store
    drive.offer("worker-0-0")
    drive.do(world.WithdrawStore("worker-0-0", "worker-0-0:1"))
    drive.exit("worker-0-0", 0)
    assert first == "h:1"
    assert drive.members == []
    assert isinstance(drive.do(world.WithdrawStore("worker-0-0", "worker-0-0:1")), NotDone)
    drive.offer("worker-0-0")
    assert drive.world.store == "worker-0-0:2"


def test_the_stores_of_a_node_that_is_gone_are_forgotten() -> None:
    """A node that has ended offers nothing any more: a big job does not collect the stores of all incarnations."""
    drive = Drive(max_restarts=9).up()
    drive.offer("worker-0-0")
    assert drive.state.world.offers["worker-0-0"]
    drive.do(nodes.ObserveNodes((nodes.Observed("worker-0-0", "failed", 1),)))
    assert "worker-0-0" not in drive.state.world.offers


def test_a_store_serves_one_generation() -> None:
    """Every generation has a store that no earlier one had."""
    drive = Drive(max_restarts=9).up()
    for step in range(5):
        # On both nodes alike: none of them stands out, and is left for another host.
        drive.exit(f"worker-{step % 2}-0", 2 * (step % 2))
        drive.run(step + 2)
    stores = [fact.store for fact in drive.facts(world.WorldFormed)]
    assert len(stores) == len(set(stores)) == 6


def test_offers_are_bounded() -> None:
    """A node has at most four stores on offer, each once."""
    drive = Drive(nodes_max=2)
    drive.do(nodes.ReportJoined("worker-0-0", "h", "a", 2))
    replies = [drive.do(world.OfferStore("worker-0-0", f"h:{one}")) for one in (1, 1, 2, 3, 4, 5)]
    assert [isinstance(reply, NotDone) for reply in replies] == [False, True, False, False, False, True]


# ---- forced changes


def test_unchanged_membership_needs_no_waiting() -> None:
    """A worker's death re-forms the same world in the same batch, with the next generation."""
    drive = Drive(nodes_max=2).up()
    before = drive.members
    drive.exit("worker-1-0", 3)
    assert drive.names()[-1] == "WorldFormed"
    assert drive.members == before
    assert drive.world.generation == 2


def test_unchanged_membership_waits_for_no_last_call() -> None:
    """A world below nodes_max whose worker dies re-forms at once too, though the last call for others has just begun."""
    drive = _small()
    drive.join("worker-2-0")
    drive.exit("worker-1-0", 1)
    assert drive.names()[-1] == "WorldFormed"
    assert drive.world.generation == 2


def test_a_dead_members_world_is_dissolved_until_its_place_is_filled() -> None:
    """Below the minimum nobody trains: the world is dissolved and forms again, as it was, when the successor is there."""
    drive = Drive(nodes_max=3).up()
    drive.observe("worker-1-0", "failed", -9)
    assert not drive.world.active
    assert {order.over for order in desired(drive.state).orders.values() if not order.leave} == {1}
    drive.join("worker-1-1")
    assert drive.members == ["worker-0-0", "worker-1-1", "worker-2-0"]
    assert drive.world.generation == 2


def test_going_on_smaller() -> None:
    """A place that is given up is not waited for: the world goes on without it, at once."""
    drive = Drive(nodes_max=3, nodes_min=2, relaunch_max=0).up()
    drive.observe("worker-0-0", "failed", -9)
    assert drive.members == ["worker-2-0", "worker-1-0"]
    assert drive.world.size == 4


def test_a_node_that_has_finished_may_go() -> None:
    """A member whose workers ended well is not missed when its node ends."""
    drive = Drive(nodes_max=2).up()
    drive.do(world.ReportFinished("worker-0-0", 1))
    drive.observe("worker-0-0", "succeeded")
    drive.observe("worker-0-0", "gone")
    assert drive.world.active
    assert drive.state.incidents.number == 0
    drive.do(world.ReportFinished("worker-1-0", 1))
    assert drive.state.job.state == "succeeded"


def test_whoever_finished_and_left_is_needed_again_when_the_world_reforms() -> None:
    """A world that restarts after one member had finished and gone plans that place again."""
    drive = Drive(nodes_max=2).up()
    drive.do(world.ReportFinished("worker-0-0", 1))
    drive.observe("worker-0-0", "succeeded")
    drive.observe("worker-0-0", "gone")
    drive.exit("worker-1-0", 3)
    assert drive.facts(nodes.NodePlanned)[-1].node == "worker-0-1"
    assert not drive.world.active
    drive.join("worker-0-1")
    assert drive.members == ["worker-0-1", "worker-1-0"]


# ---- growth


def _small(**settings: object) -> Drive:
    """Two of four nodes train after the last call."""
    drive = _joined(2, nodes_max=4, nodes_min=2, nproc=1, launch_s=10**6, **settings)
    drive.wait(30)
    assert drive.members == _names(0, 1)
    return drive.run(1)


def test_late_nodes_are_taken_together() -> None:
    """A running smaller world grows grow_window_s after the first late node, with all that came meanwhile."""
    drive = _joined(2, nodes_max=5, nodes_min=2, nproc=1, launch_s=10**6, grow_window_s=60.0)
    drive.wait(30)
    drive.run(1)
    drive.join("worker-2-0")
    drive.wait(40)
    drive.join("worker-3-0")
    assert drive.members == _names(0, 1)
    drive.wait(19)
    assert drive.members == _names(0, 1)
    drive.wait(1)
    assert drive.members == _names(0, 1, 2, 3)
    assert drive.state.incidents.number == 0


def test_a_complete_world_grows_at_once() -> None:
    """When nobody else is expected there is nothing to wait for."""
    drive = _small()
    drive.join("worker-2-0")
    drive.join("worker-3-0")
    assert drive.members == _names(0, 1, 2, 3)


def test_never_means_never() -> None:
    """With on_join=never a running world does not grow; it takes the late ones in when it must re-form anyway."""
    drive = _small(on_join="never")
    drive.join("worker-2-0")
    drive.join("worker-3-0")
    drive.wait(10_000)
    assert drive.members == _names(0, 1)
    drive.exit("worker-0-0", 0)
    assert drive.members == _names(0, 1, 2, 3)


def test_no_growth_once_somebody_has_finished() -> None:
    """A world whose members are finishing is not restarted for a late node."""
    drive = _small()
    drive.do(world.ReportFinished("worker-0-0", 1))
    drive.join("worker-2-0")
    drive.join("worker-3-0")
    drive.wait(1000)
    assert drive.world.generation == 1


def test_growth_by_units() -> None:
    """A world grows by whole units: less than a unit of late nodes restarts nobody."""
    drive = _joined(4, nodes_min=4, nodes_max=8, unit=4, nproc=1, launch_s=10**6)
    drive.wait(30)
    drive.run(1)
    for one in (4, 5, 6):
        drive.join(f"worker-{one}-0")
    drive.wait(1000)
    assert drive.world.generation == 1
    drive.join("worker-7-0")
    assert len(drive.members) == 8


# ---- generations


def test_reports_about_other_generations_are_refused() -> None:
    """Started, stopped and finished count for the newest generation, once per member, and from members only."""
    drive = Drive(nodes_max=2).up()
    drive.exit("worker-1-0", 3)
    for report in (world.ReportStarted, world.ReportStopped, world.ReportFinished):
        for generation in (0, 1, 3):
            assert isinstance(drive.do(report("worker-0-0", generation)), NotDone)
    for report in (world.ReportStarted, world.ReportFinished, world.ReportStopped):
        assert not isinstance(drive.do(report("worker-0-0", 2)), NotDone)
        assert isinstance(drive.do(report("worker-0-0", 2)), NotDone)
        assert isinstance(drive.do(report("worker-5-0", 2)), NotDone)


def test_two_worlds_of_one_generation_cannot_be() -> None:
    """Whatever a decision yields, evolving refuses a generation that is not the next, and a world without members."""
    drive = Drive(nodes_max=2).up()
    for fact in (
        world.WorldFormed("worker", 1, ((0, 1, 0, 2),), "s", ""),
        world.WorldFormed("worker", 3, ((0, 1, 0, 2),), "s", ""),
        world.WorldFormed("worker", 2, (), "s", ""),
    ):
        with pytest.raises(ValueError, match="goes from generation 1"):
            world._on_formed(drive.state.world, fact, drive.records[-1])


def test_orders() -> None:
    """Each member is told its ranks, the world's size, its place and the store; they are the same for all but ranks and place."""
    drive = Drive(nodes_max=3, nproc=4).up()
    orders = {node: order.work for node, order in desired(drive.state).orders.items()}
    told = [
        (one.first_rank, one.nproc, one.node_rank, one.world_size, one.nodes, one.generation) for one in orders.values()
    ]
    assert told == [(0, 4, 0, 12, 3, 1), (4, 4, 1, 12, 3, 1), (8, 4, 2, 12, 3, 1)]
    assert {one.store for one in orders.values()} == {drive.world.store}


def test_each_group_is_a_world_of_its_own() -> None:
    """A group's name may hold digits and its nodes' names are told apart."""
    assert names.group_of("worker-12-3") == "worker"
    assert names.group_of("ps2-0-0") == "ps2"


# ---- who goes where


def _node(index: int, incarnation: int = 0, nproc: int = 1) -> nodes.Node:
    return nodes.Node(
        f"worker-{index}-{incarnation}", "worker", index, incarnation, 0, "running", joined=True, nproc=nproc
    )


def _laid(before: list[str], ready: list[nodes.Node], count: int) -> list[str]:
    return [node.node for node in layout.layout(before, ready, count)]


@pytest.mark.parametrize(
    ("before", "ready", "count", "after"),
    [
        # The first world is in index order, whoever came first.
        ([], [2, 0, 1], 3, [0, 1, 2]),
        ([], [5, 1, 3], 2, [1, 3]),
        # Nobody moves for nothing.
        ([0, 1, 2], [2, 1, 0], 3, [0, 1, 2]),
        ([2, 0, 1], [0, 1, 2], 3, [2, 0, 1]),
        # A newcomer takes the vacated place.
        ([0, 1, 2], [0, 2, 3], 3, [0, 3, 2]),
        # Shrinking moves only who stands beyond the end, into the first hole.
        ([0, 1, 2, 3], [0, 2, 3], 3, [0, 3, 2]),
        ([0, 1, 2, 3], [1, 2, 3], 3, [3, 1, 2]),
        ([0, 1, 2, 3], [3], 1, [3]),
        # Growing adds at the end.
        ([1, 0], [0, 1, 2], 3, [1, 0, 2]),
        # More ready than places: survivors first.
        ([4, 5], [0, 4, 5], 2, [4, 5]),
    ],
)
def test_layout(before: list[int], ready: list[int], count: int, after: list[int]) -> None:
    """Survivors stay, newcomers fill holes, and the fewest move."""
    assert _laid(_names(*before), [_node(one) for one in ready], count) == _names(*after)


def test_a_successor_takes_its_predecessors_place() -> None:
    """A relaunched node finds its own place among several vacated ones."""
    before = _names(0, 1, 2, 3)
    ready = [_node(3, 1), _node(0), _node(1, 1), _node(2)]
    assert _laid(before, ready, 4) == ["worker-0-0", "worker-1-1", "worker-2-0", "worker-3-1"]


_indexes = st.lists(st.integers(0, 12), unique=True, min_size=1, max_size=12)


@given(_indexes, _indexes, st.sets(st.integers(0, 12)), st.data())
def test_layout_properties(before: list[int], ready: list[int], reborn: set[int], data: st.DataObject) -> None:
    """Nobody is named twice, only ready nodes are named, survivors keep their places unless the size cuts them off."""
    here = [_node(one, 1 if one in reborn else 0) for one in ready]
    count = data.draw(st.integers(1, len(here)))
    old = _names(*before)
    laid = _laid(old, here, count)
    assert len(laid) == len(set(laid)) == count
    assert set(laid) <= {node.node for node in here}
    survivors = [name for name in old if name in {node.node for node in here}]
    assert set(survivors[:count]) <= set(laid)
    for place, name in enumerate(old[:count]):
        if name in survivors[:count]:
            assert laid[place] == name
    if count >= len(old):
        assert all(laid[old.index(name)] == name for name in survivors)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(1, 3)),
        unique_by=lambda row: row[0],
        min_size=1,
        max_size=10,
    )
)
def test_ranges_round_trip(rows: list[tuple[int, int, int]]) -> None:
    """Members written as ranges come back in order, their ranks exactly 0 to size - 1."""
    ordered = [_node(*row) for row in rows]
    members = ranges.from_ranges("worker", ranges.to_ranges(ordered))
    assert [(member.node, member.nproc) for member in members] == [(node.node, node.nproc) for node in ordered]
    ranks = list(itertools.chain.from_iterable(range(one.first_rank, one.first_rank + one.nproc) for one in members))
    assert ranks == list(range(sum(node.nproc for node in ordered)))


def test_a_large_world_is_a_short_event() -> None:
    """16,384 nodes in order are one range; the event does not grow with the world."""
    ordered = [_node(one, nproc=8) for one in range(16_384)]
    assert ranges.to_ranges(ordered) == (("worker", 0, 16_384, 0, 8),)
    assert ranges.from_ranges("worker", ranges.to_ranges(ordered))[-1].first_rank == 16_383 * 8


def test_time_of_forming() -> None:
    """A world knows when it formed, by the leader's clock."""
    drive = Drive(nodes_max=1)
    drive.now += 5 * SECOND
    drive.join("worker-0-0")
    assert drive.world.formed_at == drive.now


@pytest.mark.parametrize("order", [("worker", "eval"), ("eval", "worker")])
def test_a_job_of_two_groups_ends_with_both(order: tuple[str, str]) -> None:
    """Each group forms a world of its own; the job goes on when one of them has finished, and succeeds with the other."""
    drive = Drive(groups=(GroupSpec("worker"), GroupSpec("eval")))
    for node in list(drive.state.nodes.nodes):
        drive.join(node)
    worlds = drive.state.world.worlds
    for group in order:
        (member,) = worlds[group].members
        drive.say(world.ReportStarted(member.node, worlds[group].generation))
        assert not drive.facts(job.JobSucceeded)
        drive.say(world.ReportFinished(member.node, worlds[group].generation))
        assert drive.state.job.live == (group == order[0])
    assert drive.facts(job.JobSucceeded)

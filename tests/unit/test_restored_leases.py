"""Leases of a model that is restored: each sample is in its lineage once, whatever dies, and planted bugs are found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from random import Random
from typing import Any
from unittest import mock

import pytest
from tests.chaos.lease_seeds import ModelPlay, audited
from tests.unit.drive import Drive

from dlrover_core.data.ranges import Ranges, Span
from dlrover_core.data.trained import RanksMissing, Trained, joined, pack, unpack
from dlrover_core.errors import SpecError
from dlrover_core.history.lease_audit import lines
from dlrover_core.job import leases
from dlrover_core.job.leases import Leased, LeaseGranted, Leases, LeasesRestored, RestoreLeases
from dlrover_core.job.shards import MODEL_LEASE, RegisterDataset
from dlrover_core.kernel.engine import Accepted
from dlrover_core.rules.desired import desired
from dlrover_core.runtime.node_leases import NodeLeases
from dlrover_core.spec import GroupSpec
from dlrover_core.testing import restored_leases
from dlrover_core.testing.restored_leases import NAME, SOURCE, Node, Rank, States


@pytest.mark.parametrize("seed", range(10))
def test_each_position_is_in_the_lineage_once(seed: int) -> None:
    """Six deaths, departures and fail-overs, with words that are lost, late or of an earlier generation."""
    ModelPlay(seed).play().check()


def test_few_ranges_are_published() -> None:
    """Ranks go on where they were, so that what they say of a state is short."""
    play = ModelPlay(1, strikes=0).play().check()
    assert max(len(rank.trained) for node in play.running for rank in node.ranks) <= 24
    assert play.leased.again == 0


def test_the_audit_names_what_is_wrong() -> None:
    """A log in which the leader, or ranks, have gone wrong is not proved, and says which positions."""
    every = ModelPlay(2).play().check().drive.records
    granted = next(record for record in every if isinstance(record.event, LeaseGranted))
    last = next(record for record in reversed(every) if isinstance(record.event, LeasesRestored))
    forgets = last._replace(event=last.event._replace(of=last.event.generation, spans=Ranges().pack()))
    for records, kind in (
        ([each for one in every for each in ((one, one) if one is granted else (one,))], "in the model twice"),
        ([one for one in every if not isinstance(one.event, LeaseGranted)], "not leased"),
        ([each for one in every for each in ((one, forgets) if one is last else (one,))], "missing"),
    ):
        (proof,) = audited(records)
        assert kind in {one.kind for one in proof.findings}
        assert any("NOT proved" in line for line in lines((proof,)))
        assert any(kind in line for line in lines((proof,)))


# ---- planted bugs


Bug = Callable[[], AbstractContextManager[Any]]
BUGS: dict[str, Bug] = {}


def bug(patch: Bug) -> Bug:
    """A bug, which its docstring describes."""
    BUGS[patch.__name__] = patch
    return patch


@bug
def a_rank_that_nobody_knows() -> Any:
    """A state is restored though what one rank was trained on is lost with its node; the others have averaged its model in."""
    lost: dict[tuple[int, Any], tuple[int, ...]] = {}
    lose, model = States.lose, States.model

    def losing(self: States, node: str, random: Random) -> None:
        before = {state: dict(parts) for state, parts in self.parts.items()}
        lose(self, node, random)
        for state, parts in before.items():
            gone = [at for rank, part in parts.items() if rank not in self.parts[state] for at in part.model]
            lost[id(self), state] = (*lost.get((id(self), state), ()), *gone)

    def joined_anyway(_world: int, said: Any) -> Any:
        found = Ranges(span for words in said.values() for one in words for span in one.spans)
        return (Trained(NAME, SOURCE, found),)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(restored_leases, "joined", joined_anyway))
    stack.enter_context(mock.patch.object(States, "lose", losing))
    stack.enter_context(
        mock.patch.object(States, "model", lambda self, at: (*model(self, at), *lost.get((id(self), at), ())))
    )
    stack.enter_context(
        mock.patch.object(
            States, "whole", lambda self: sorted(at for at, parts in self.parts.items() if len(parts) > 1)
        )
    )
    return stack


@bug
def rank_0_says_only_its_own() -> Any:
    """What a generation resumed from is not said again: the next restore forgets it."""
    published = property(lambda self: pack([Trained(NAME, SOURCE, self.trained)]))
    return mock.patch.object(Rank, "published", published)


@bug
def what_was_drawn_counts() -> Any:
    """What the loader has drawn ahead is published as trained."""

    def said(self: Rank) -> bytes:
        return pack([Trained(NAME, SOURCE, self.base | self.trained | Ranges(self.drawn))])

    return mock.patch.object(Rank, "published", property(said))


@bug
def one_step_behind() -> Any:
    """A batch is published with the step after its own."""
    true = Rank.learns

    def learns(self: Rank, span: Span) -> None:
        before = self.trained
        true(self, span)
        behind[id(self)] = before

    behind: dict[int, Ranges] = {}

    def said(self: Rank) -> bytes:
        return pack([Trained(NAME, SOURCE, self.base | behind.get(id(self), self.trained))])

    stack = ExitStack()
    stack.enter_context(mock.patch.object(Rank, "learns", learns))
    stack.enter_context(mock.patch.object(Rank, "published", property(said)))
    return stack


@bug
def taken_without_asking() -> Any:
    """A rank trains on what a loader process had drawn that is gone, and others have it, too."""

    def take(self: Node, rank: Rank, span: Span, now_s: float) -> bool:
        self.leases.claim(span, rank.session, now_s) or self.leases.ack(span, now_s)
        return True

    return mock.patch.object(Node, "take", take)


@bug
def acknowledgements_outlive_a_generation() -> Any:
    """The leader keeps what was acknowledged, though the model was rolled back behind it."""
    true = leases._begin_anew

    def begin_anew(leased: Leased, acked: Any, record: Any) -> None:
        true(leased, tuple(Ranges((*leased.acked, *acked))), record)

    return mock.patch.object(leases, "_begin_anew", begin_anew)


@bug
def old_words_are_heard() -> Any:
    """The leader hears heartbeats of the generation before."""

    def hears(self: Leased, generation: int) -> bool:
        return self.generation > 0

    return mock.patch.object(Leased, "hears", hears)


@bug
def what_is_taken_is_handed_out_again() -> Any:
    """An agent gives what a loader had drawn to others when the loader ends, though a rank has taken it."""

    def claim(self: NodeLeases, span: Span, session: Any, now_s: float) -> bool:
        hand = self._hands.get(span.start)
        return hand is not None and hand.session == session

    return mock.patch.object(NodeLeases, "claim", claim)


@bug
def workers_of_before_draw() -> Any:
    """An agent hands positions of the new generation to workers of the old one."""
    return mock.patch.object(NodeLeases, "serves", lambda self, _generation: self.generation > 0)


@bug
def a_rank_is_forgotten_at_the_restore() -> Any:
    """Rank 0 leaves the words of another rank out when it joins them."""

    def said(self: States, state: Any) -> Ranges:
        parts = self.parts[state]
        words = {rank: unpack(part.packed) if rank != max(parts) else () for rank, part in parts.items()}
        return next(iter(joined(self.worlds[state[0]], words))).spans

    return mock.patch.object(States, "said", said)


@bug
def what_is_given_back_is_handed_out() -> Any:
    """An agent answers a question of the leader's, and hands out what it has named."""
    true = NodeLeases._refill

    def refill(self: NodeLeases) -> None:
        yielded, self._yielded = self._yielded, Ranges()
        true(self)
        self._yielded = yielded

    return mock.patch.object(NodeLeases, "_refill", refill)


@bug
def an_end_before_all_is_used() -> Any:
    """Workers hear of the end when nothing is free, though others hold positions that may come back."""
    return mock.patch.object(Leased, "finished", property(lambda self: not self.free and self.generation > 0))


@bug
def a_world_forms_and_its_leases_stay() -> Any:
    """What nodes of a generation that is over held is theirs, and free, too."""

    def begin_anew(leased: Leased, acked: Any, record: Any) -> None:
        leased.acked, leased.free = acked, tuple(Ranges([(0, leased.total)]) - Ranges(acked))
        leased.recalled.clear()
        leased.changed = record.seq

    return mock.patch.object(leases, "_begin_anew", begin_anew)


FOUND = dict.fromkeys(BUGS, 0) | {"taken_without_asking": 4}
"""The first seed that finds it."""


@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_planted_bug_is_found(name: str) -> None:
    """A seed breaks a promise with the bug, and none without it: of seed 4, and of the others, that is asked above."""
    with BUGS[name](), pytest.raises((AssertionError, SpecError)):
        ModelPlay(FOUND[name]).play().check()


# ---- what ranks say


def test_what_ranks_say_is_joined_where_all_of_them_are_there() -> None:
    """Field, value and remedy where it cannot be."""
    first, second = (Trained("a", "f", Ranges([span])) for span in ((0, 4), (4, 6)))
    assert unpack(pack([first])) == (first,)
    assert joined(2, {0: [first], 1: [second]}) == (Trained("a", "f", Ranges([(0, 6)])),)
    assert joined(2, {0: [first], 1: []}) == (first,)
    with pytest.raises(RanksMissing, match="data: nobody has what rank 1, 2 was trained on"):
        joined(3, {0: [first]})
    with pytest.raises(SpecError, match="data: dataset 'a': rank 1 and others were both trained on positions 0 to 3"):
        joined(2, {0: [first], 1: [first]})
    with pytest.raises(
        SpecError, match="data: dataset 'a': rank 1 has 'g', others have 'f': all ranks give the same data="
    ):
        joined(2, {0: [first], 1: [second._replace(fingerprint="g")]})


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (b"", "trained: the bytes are damaged"),
        (b"\x92\x07\x90", "trained: format 7 is unknown here, 1 is known"),
        (b"\x91\x01", "trained: the bytes are damaged .no version"),
        (b"\x92\x01\x91\x93\xa1a\xa1f\x01", "trained: the bytes are damaged .a dataset that is not"),
        (b"\x92\x01\x91\x93\xa0\xa1f\xc4\x01\x01", "trained: the bytes are damaged .a name"),
    ],
)
def test_damaged_words(packed: bytes, words: str) -> None:
    """Whoever wrote them."""
    with pytest.raises(SpecError, match=words):
        unpack(packed)


def test_too_many_ranges_are_told_with_a_remedy() -> None:
    """64 KiB, and 10,000 ranges of a dataset, are the most."""
    many = Ranges((at, at + 1) for at in range(0, 30_000, 2))
    with pytest.raises(SpecError, match=r"shard: dataset 'a': .* is 15000 ranges, .* larger shard="):
        pack([Trained("a", "", many)])
    most = Ranges((at, at + 1) for at in range(0, 20_000, 2))
    assert len(pack([Trained("a", "", most)])) <= 64 * 1024


# ---- what the leader accepts


def test_the_ledger_begins_anew_once_in_a_generation() -> None:
    """By rank 0's node, with a state that there can be; all else is free again."""
    job = Drive(nodes_max=2, nproc=2).up()
    restore = RestoreLeases("worker-0-0", 1, NAME, 0, 0, Ranges().pack())
    assert "no leased dataset" in job.do(restore).reason
    job.do(RegisterDataset("worker-0-0", 1, NAME, 10, 7, "file", SOURCE, 1, 0, MODEL_LEASE))
    for wrong, words in (
        (restore._replace(node="worker-1-0"), "does not run rank 0"),
        (restore._replace(generation=2), "does not run rank 0"),
        (restore._replace(of=1), "no state is like this: step 0 of generation 1"),
        (restore._replace(spans=Ranges([(0, 11)]).pack()), "position 10; dataset 'train' has 10"),
        (restore._replace(spans=b"\x07"), "spans: "),
    ):
        assert words in job.do(wrong).reason
    told = desired(job.state).orders["worker-1-0"].part(Leases).known[0]
    assert (told.generation, told.finished, told.assignment) == (0, False, MODEL_LEASE)
    assert isinstance(job.do(restore._replace(spans=Ranges([(0, 4)]).pack())), Accepted)
    leased = job.state.leases.of("worker")[NAME]
    assert (leased.acked, leased.free, leased.generation) == (((0, 4),), ((4, 10),), 1)
    assert isinstance(
        job.do(restore._replace(spans=Ranges([(0, 4)]).pack())), Accepted
    )  # said again: the answer was lost
    assert job.new == []
    assert "has said already" in job.do(restore._replace(spans=Ranges([(0, 5)]).pack())).reason
    job.exit("worker-1-0", 2)
    assert (leased.generation, leased.free) == (0, ((4, 10),))


def test_nodes_that_restore_by_themselves_have_no_such_dataset() -> None:
    """Each of them has a model of its own, so no state says what all were trained on."""
    groups = (GroupSpec("worker", nodes_min=2, nodes_max=2, nproc=1, coupling="each"),)
    job = Drive(groups=groups)
    for node in list(job.state.nodes.nodes):
        job.observe(node, "running")
        job.join(node)
    reply = job.do(RegisterDataset("worker-0-0", 1, NAME, 10, 7, "file", SOURCE, 1, 0, MODEL_LEASE))
    assert 'lineage: "model" of dataset' in reply.reason
    assert 'give lineage="server"' in reply.reason

"""Leases by the rules: who is granted what, what a node's end does, what a slow node is asked, and which words count no more."""

from __future__ import annotations

from typing import Any

import pytest
from drive import Drive

from dlrover_core.data.ranges import Ranges, Span
from dlrover_core.history import render, report_of
from dlrover_core.history.leased import leased_of, lines
from dlrover_core.history.status import status_of
from dlrover_core.history.words import say
from dlrover_core.job import operations
from dlrover_core.job.leases import (
    HearLease,
    Leased,
    LeaseRecalled,
    LeaseReturned,
    Leases,
    LeaseTold,
    RecallLease,
    ReportRepeated,
    ReturnLease,
    spans_of,
)
from dlrover_core.job.nodes import ReportLeft
from dlrover_core.job.shards import LEASE, Datasets, RegisterDataset, Terms
from dlrover_core.kernel.engine import Accepted, NotDone
from dlrover_core.kernel.state import pack, unpack
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime.leasing import Ask, LeaseBeat, Leasing
from dlrover_core.runtime.levels import Beat
from dlrover_core.runtime.node_leases import NodeLeases
from dlrover_core.runtime.shown import used

A, B = "worker-0-0", "worker-1-0"
TERMS = Terms("eval", 100, 7, "shuffled", "f00d", 2, 0, LEASE)
NONE = Ranges().pack()


def register(drive: Drive, node: str = A, **terms: Any) -> Any:
    """A node registers the dataset."""
    return drive.do(RegisterDataset(node, 1, *TERMS._replace(**terms)))


def hear(drive: Drive, node: str, aim: int = 0, *, acked: Any = (), recall: int = 0, yielded: Any = ()) -> Any:
    """The leader takes in what a node says."""
    return drive.do(HearLease(node, "eval", aim, 1, 0, Ranges(acked).pack(), recall, Ranges(yielded).pack(), 4))


def told(drive: Drive, node: str) -> LeaseTold:
    """What a node's order says of the dataset."""
    (one,) = desired(drive.state).orders[node].part(Leases).known
    return one


def leased(drive: Drive) -> Leased:
    """The dataset, as the log has it."""
    return drive.state.leases.of("worker")["eval"]


@pytest.fixture
def drive() -> Drive:
    """Two nodes, and a dataset of two epochs of 100 samples."""
    drive = Drive(nodes_max=2, nproc=1, relaunch_max=5).up()
    assert isinstance(register(drive), Accepted)
    return drive


def test_every_node_may_register_and_all_are_told(drive: Drive) -> None:
    """Rank 0 has no part in it; a repetition leaves no record; the dataset is none of those that ranks share by cuts."""
    seq = drive.state.seq
    register(drive, B)
    assert drive.state.seq == seq
    assert [told(drive, node).terms for node in (A, B)] == [TERMS, TERMS]
    assert desired(drive.state).orders[A].part(Datasets) == Datasets()
    assert not drive.state.shards


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"size": 101}, r"registered with 100 samples.*this one has 101 samples.*another name"),
        ({"epochs": 3}, r"epochs 2; this one has .*epochs 3"),
        ({"name": "other", "size": 2**61, "epochs": 3}, r"epochs: 3 of .* give fewer"),
        ({"name": ""}, r"name: '' has not 1 to 128 characters"),
    ],
)
def test_another_dataset_of_the_name_is_refused(drive: Drive, terms: dict[str, Any], words: str) -> None:
    """Both are told; and so is a field that cannot be."""
    refused = register(drive, **terms)
    assert isinstance(refused, NotDone)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(refused.reason)


def test_a_node_that_is_not_there_registers_nothing() -> None:
    """As with every command of a stranger."""
    assert isinstance(register(Drive(nodes_max=2, nproc=1).up(), "worker-7-0"), NotDone)


def test_grants_are_a_part_of_half_of_what_is_free(drive: Drive) -> None:
    """Two nodes that want all of 200 get 50 and 37; each order has all leases of its own node and no other."""
    hear(drive, A, 200)
    hear(drive, B, 200)
    assert [spans_of(told(drive, node).spans) for node in (A, B)] == [((0, 50),), ((50, 88),)]
    hear(drive, A, 50)  # it has as much already
    assert spans_of(told(drive, A).spans) == ((0, 50),)


def test_a_new_leader_tells_the_same(drive: Drive) -> None:
    """The fold of the log has all leases."""
    hear(drive, A, 20)
    before = told(drive, A)
    drive.take_over()
    assert told(drive, A) == before
    assert unpack(type(drive.state), pack(drive.state)).leases == drive.state.leases


def test_the_end_is_told_once_all_is_acknowledged(drive: Drive) -> None:
    """Not while one position is with somebody."""
    while leased(drive).free:
        hear(drive, A, 200)
    hear(drive, A, acked=[(0, 199)])
    assert not told(drive, B).finished
    hear(drive, A, acked=[(0, 200)])
    assert [told(drive, node).finished for node in (A, B)] == [True, True]
    assert told(drive, A).spans == b""


def test_what_a_dead_node_had_goes_to_others_first(drive: Drive) -> None:
    """And is told: some of it may have been used. Its own late words change nothing."""
    hear(drive, A, 200)
    hear(drive, A, acked=[(0, 20)])
    drive.observe(A, "gone", 137, "killed")
    (returned,) = drive.facts(LeaseReturned)
    assert (returned.node, spans_of(returned.spans), spans_of(returned.repeated)) == (A, ((20, 50),), ((20, 50),))
    assert MODEL.alarm(returned) == "30 samples of 'eval' may be used again: worker-0-0: the node is gone"
    assert "worker-0-0 gives 30 samples of 'eval' back: the node is gone; 30 samples" in say(returned)
    hear(drive, A, 100, acked=[(20, 50)])
    assert leased(drive).acked == ((0, 20),)
    hear(drive, B, 10)
    assert spans_of(told(drive, B).spans) == ((20, 30),)


def test_a_node_that_leaves_by_plan_may_finish_its_words(drive: Drive) -> None:
    """What it acknowledges while it leaves counts; it gets nothing new; the rest is returned when its agent has left."""
    hear(drive, A, 20)
    drive.do(operations.DrainNode(A, "a bad one"))
    hear(drive, A, 40, acked=[(0, 15)])
    assert leased(drive).lease(A).spans == ((15, 20),)
    drive.do(ReportLeft(A))
    drive.observe(A, "gone")
    assert leased(drive).free == ((15, 200),)
    assert leased(drive).again == 5


def test_a_node_that_leaves_in_good_order_gives_exactly_back(drive: Drive) -> None:
    """What it has said to be used counts, the rest is free, and nothing is told to be repeated. It gets nothing any more."""
    hear(drive, A, 20)
    drive.do(operations.DrainNode(A, "a bad one"))
    hear(drive, A, 40, acked=[(0, 15)])
    assert isinstance(drive.do(ReturnLease(A, "eval")), Accepted)
    assert say(drive.facts(LeaseReturned)[0]) == "worker-0-0 gives 5 samples of 'eval' back: the node's agent leaves"
    hear(drive, A, 40)
    drive.do(ReportLeft(A))
    drive.observe(A, "gone")
    assert (leased(drive).free, leased(drive).again, leased(drive).returns) == (((15, 200),), 0, 1)
    assert isinstance(drive.do(ReturnLease(B, "none")), NotDone)


def test_a_slow_node_is_asked_and_says_what_it_gives(drive: Drive) -> None:
    """Two steps: nothing moves before the answer to this very question, and then what the node has not handed out."""
    while leased(drive).free:
        hear(drive, A, 200)
    drive.do(RecallLease(A, "eval", 60, B))
    (question,) = drive.facts(LeaseRecalled)
    assert (spans_of(question.spans), told(drive, A).recall) == (((140, 200),), drive.state.seq)
    assert say(question) == "worker-0-0 is to give up to 60 samples of 'eval' back, for worker-1-0"
    drive.do(RecallLease(A, "eval", 10, B))  # one question at a time
    hear(drive, A, recall=told(drive, A).recall - 1, yielded=[(140, 200)])
    assert not leased(drive).free
    hear(drive, A, recall=told(drive, A).recall, yielded=[(100, 120), (160, 200)])
    assert told(drive, A).recall == 0
    assert leased(drive).free == ((100, 120), (160, 200))
    hear(drive, B, 40)
    assert leased(drive).lease(B).spans == ((100, 115),)
    assert not list(drive.state.leases.check())


def beat(leasing: Leasing, drive: Drive, node: NodeLeases, name: str, *, waiting: bool = False) -> list[Any]:
    """A node's heartbeat, what the leader makes of it, and the order that follows."""
    leasing.heard(drive.state, name, Beat(1, 1, 0, (LeaseBeat((node.ask(drive.now / 1e6, waiting=waiting),)),)))
    found = list(leasing.findings(drive.state, drive.now))
    for command in found:
        drive.do(command)
    node.told(told(drive, name))
    return found


@pytest.mark.parametrize(("sessions", "given"), [({2}, ((50, 100),)), (set(), ((0, 100),))])
def test_one_question_splits_what_a_slow_node_has_not_handed_out(drive: Drive, sessions: set[Any], given: Any) -> None:
    """A worker has the end of the lease in hand, and the beginning has come back. A node without workers gives it all."""
    slow, idle, leasing = NodeLeases("eval"), NodeLeases("eval"), Leasing()
    slow.shard, slow.sessions, idle.sessions, idle.shard = 100, {1, 2}, {1}, 100
    while leased(drive).free:
        hear(drive, A, 200)
    slow.told(told(drive, A))
    assert [slow.draw(who, 100, 0.0) for who in (1, 2)] == [(0, 100), (100, 200)]
    slow.gone(1)
    slow.sessions = sessions
    for _ in range(9):
        if not drive.facts(LeaseReturned):
            beat(leasing, drive, idle, B, waiting=True)
            beat(leasing, drive, slow, A)
            drive.now += 2_000_000
    assert [len(drive.facts(kind)) for kind in (LeaseRecalled, LeaseReturned)] == [1, 1]
    assert spans_of(drive.facts(LeaseReturned)[0].spans) == given
    beat(leasing, drive, idle, B, waiting=True)
    assert spans_of(told(drive, B).spans)[0][0] == given[0][0]


def test_a_node_that_has_given_its_lease_back_is_granted_nothing(drive: Drive) -> None:
    """Its last heartbeat asked for more, and it leaves by no plan of ours: it was not told to. Others are granted."""
    leasing, drawing = Leasing(), (LeaseBeat((Ask("eval", aim=40, least=4),)),)
    hear(drive, A, 20)
    for node in (A, B):
        leasing.heard(drive.state, node, Beat(1, 1, 0, drawing))
    leasing.reported(ReturnLease(A, "eval"))
    drive.do(ReturnLease(A, "eval"))
    for command in leasing.findings(drive.state, drive.now):
        drive.do(command)
    assert list(leased(drive).held) == [B]


def test_what_a_dead_worker_had_is_told(drive: Drive) -> None:
    """The node keeps it. Nonsense is refused with its value."""
    hear(drive, A, 20)
    assert isinstance(drive.do(ReportRepeated(A, "eval", Ranges([(4, 8)]).pack(), "rank 0 ended")), Accepted)
    assert (leased(drive).repeated, leased(drive).again, leased(drive).lease(A).spans) == (((4, 8),), 4, ((0, 20),))
    assert "4 samples of 'eval' may be used again: 4 to 8; worker-0-0: rank 0 ended" in say(
        drive.facts(LeaseReturned)[0]
    )
    for spans, words in (
        (b"\x07", "spans: "),
        (Ranges((9 * at, 9 * at + 1) for at in range(2000)).pack(), "2000 ranges"),
    ):
        refused = drive.do(ReportRepeated(A, "eval", spans, ""))
        assert isinstance(refused, NotDone)
        assert words in refused.reason
    assert isinstance(drive.do(ReportRepeated(A, "none", NONE, "")), NotDone)


def test_nonsense_of_a_peer_is_not_heard(drive: Drive) -> None:
    """Bytes that are no ranges, numbers out of bounds: the leader goes on without them."""
    leasing = Leasing()
    for ask in (Ask("eval", acked=b"\x09\x01"), Ask("eval", aim=-1), Ask("eval", yielded=b"\x01" * 20_000)):
        assert not leasing.heard(drive.state, A, Beat(1, 1, 0, (LeaseBeat((ask,)),)))
    assert not list(leasing.findings(drive.state, drive.now))


def test_acknowledgements_alone_make_one_event_a_second(drive: Drive) -> None:
    """However often heartbeats come."""
    leasing, node = Leasing(), NodeLeases("eval")
    hear(drive, A, 30)
    node.told(told(drive, A))
    commands = 0
    for tenth in range(30):
        span = node.draw(1, 1, tenth / 10)
        assert span is not None
        node.ack(span, tenth / 10)
        leasing.heard(drive.state, A, Beat(1, 1, 0, (LeaseBeat((node.ask(tenth / 10, waiting=False),)),)))
        for command in leasing.findings(drive.state, drive.now + tenth * 100_000):
            commands += 1
            drive.do(command)
    assert commands == 3
    assert leased(drive).acked == ((0, 21),)


def test_people_see_who_holds_what_and_what_may_be_used_twice(drive: Drive) -> None:
    """While the job runs, and in one line."""
    hear(drive, A, 200)
    drive.now += 10_000_000
    hear(drive, A, acked=[(0, 20)])
    drive.do(ReportRepeated(A, "eval", Ranges([(20, 24)]).pack(), "rank 0 ended"))
    drive.do(HearLease(B, "eval", 30, 1, 2_500, NONE, 0, NONE, 4))
    assert list(lines(leased_of(drive.state))) == [
        "worker: eval: 20 of 200 samples used, 60 held by 2 nodes, 1 return (lease)",
        "  2.0 samples/s, 1 min 30 s left",
        "  worker-0-0 holds 30",
        "  worker-1-0 holds 30, 2.5 samples/s",
        "  4 samples may have been used twice: positions 20 to 24, ends exclusive",
    ]
    row = (
        "worker: eval: 20 of 200 samples used, 60 held by 2 nodes, 1 return (lease), 2.0 samples/s, 1 min 30 s left, "
        "4 samples may have been used twice"
    )
    assert f"  {row}\n" in render.status(status_of(drive.state), drive.now)
    assert render.report(report_of(drive.records)).endswith(f"\n{row}")
    assert used(drive.state.leases, ("worker",)) == [{"dataset": "eval", "size": 100, "epochs": 2, "about": 20}]


def test_spoilt_states_are_named(drive: Drive) -> None:
    """Each formula by its name, with the values."""
    hear(drive, A, 20)
    one = leased(drive)
    assert not list(drive.state.leases.check())
    one.acked = ((15, 30),)
    assert "disjoint: 215 positions are free, held or acknowledged, and 200" in next(drive.state.leases.check())
    one.acked, one.free = (), ((30, 200),)
    assert "whole: of 200 positions these are neither" in next(drive.state.leases.check())


# ---- a node's share


def node_of(*spans: tuple[int, int]) -> NodeLeases:
    """A node with one session that holds these."""
    node = NodeLeases("eval")
    node.sessions.add(1)
    node.told(LeaseTold(*TERMS[:6], spans=Ranges(spans).pack()))
    return node


def test_a_dead_session_gives_back_to_the_front() -> None:
    """What it had and did not acknowledge is the next that is handed out; what it has used is not."""
    node = node_of((0, 20))
    assert [node.draw(who, 5, 0.0) for who in (1, 2)] == [(0, 5), (5, 10)]
    node.ack(Span(0, 3), 0.1)
    assert tuple(node.gone(1)) == ((3, 5),)
    assert [node.draw(2, 5, 0.2) for _ in range(2)] == [(3, 5), (10, 15)]


def test_a_late_word_of_a_dead_session_saves_a_repetition() -> None:
    """A loader's parent may say what its dead child's samples were used for."""
    node = node_of((0, 10))
    span = node.draw(1, 4, 0.0)
    assert span is not None
    node.gone(1)
    node.ack(span, 0.1)
    assert node.draw(2, 4, 0.2) == (4, 8)


def test_what_is_given_back_is_never_handed_out() -> None:
    """From the question on, until the order shows that the leader has the answer."""
    node = node_of((0, 10))
    node.draw(1, 4, 0.0)
    asked = LeaseTold(*TERMS[:6], spans=Ranges([(0, 10)]).pack(), recall=7, recalled=Ranges([(2, 10)]).pack())
    node.told(asked)
    said = node.ask(0.1, waiting=True)
    assert (said.recall, spans_of(said.yielded)) == (7, ((4, 10),))
    assert node.draw(1, 4, 0.2) is None
    node.told(asked)
    assert node.draw(1, 4, 0.2) is None
    node.told(LeaseTold(*TERMS[:6], spans=Ranges([(0, 4), (6, 9)]).pack()))
    assert node.draw(1, 4, 0.3) == (6, 9)


def test_acknowledgements_are_said_until_the_order_shows_them() -> None:
    """So none is lost with a leader."""
    node = node_of((0, 10))
    span = node.draw(1, 4, 0.0)
    assert span is not None
    node.ack(span, 0.1)
    assert [spans_of(node.ask(at, waiting=False).acked) for at in (0.2, 5.0)] == [((0, 4),), ((0, 4),)]
    node.told(LeaseTold(*TERMS[:6], spans=Ranges([(4, 10)]).pack()))
    assert spans_of(node.ask(6.0, waiting=False).acked) == ()


def test_a_node_asks_for_some_seconds_of_its_pace() -> None:
    """20 s of 10 samples a second, with what its workers have in hand; nothing while half of that is left."""
    node = node_of((0, 150))
    for tenth in range(50):
        span = node.draw(1, 1, tenth / 10)
        assert span is not None
        node.ack(span, tenth / 10)
    assert node.ask(4.999, waiting=False).rate // 100 == 100
    node.told(LeaseTold(*TERMS[:6], spans=Ranges([(50, 153)]).pack()))
    assert node.ask(4.999, waiting=False).aim == 0
    node.draw(1, 10, 5.0)
    assert node.ask(4.999, waiting=False).aim == 210

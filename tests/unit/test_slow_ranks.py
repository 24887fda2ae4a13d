"""Stragglers and broken losses: from what beats tell to what the job knows and does."""

from __future__ import annotations

from typing import Any

import pytest
from drive import SECOND, Drive

from dlrover_core.diagnosis.changepoint import BLOCK_STEPS
from dlrover_core.diagnosis.slots import FINITE, INFINITE, NAN, NEVER
from dlrover_core.job import evidence, hosts, incidents, nodes, stragglers
from dlrover_core.job.ranges import Member
from dlrover_core.job.world import World
from dlrover_core.kernel.engine import Accepted, NotDone
from dlrover_core.kernel.state import digest
from dlrover_core.rules import stragglers as pace_rules
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime import version_4
from dlrover_core.runtime.levels import Beat
from dlrover_core.runtime.messages import FIELDS_MAX, decode, encode
from dlrover_core.runtime.paces import (
    LATE_S,
    LOSS_WAIT_S,
    LOSSES_MAX,
    PARTS,
    SLOW_MAX,
    LossBeat,
    NodePace,
    PaceBeat,
    Paces,
    RankLoss,
    SlowRank,
)

NODES = ("worker-0-0", "worker-1-0", "worker-2-0", "worker-3-0")
WORLDS = {"worker": World(3, True, members=tuple(Member(node, 1, at) for at, node in enumerate(NODES)), size=4)}
SLOW = SlowRank(2, 655, 60, 40_000, 52_000, 13_000)


def beat(step: int, common: int = PARTS, *slow: SlowRank, others: int = 0) -> PaceBeat:
    """A beat's part."""
    return PaceBeat(step, common, others, len(slow), slow)


def heard(paces: Paces, commons: dict[str, int], step: int = 660, slow: SlowRank | None = SLOW) -> None:
    """A beat of every node, worker-2 with a slow rank."""
    for node, common in commons.items():
        found = (slow,) if slow is not None and node == "worker-2-0" else ()
        paces.take(node, 3, beat(step, common, *found), LossBeat())


NORMAL = dict.fromkeys(NODES, PARTS) | {"worker-2-0": 13_000}


# ---- what beats tell


def test_a_node_tells_what_its_ranks_do() -> None:
    """A rank that becomes slower is told with both medians; of the others, that they go on as they did."""
    node = NodePace()
    for at in range(150):
        for rank in range(4):
            cost = 0.052 if rank == 2 and at >= 120 else 0.040
            node.read(rank, 1, [cost * (1 + 0.01 * ((at * 7 + rank) % 3 - 1))], at * BLOCK_STEPS, float(at))
    told = version_4.pace_of(version_4.pace(node.beat(8)))
    assert [one.rank for one in told.slow] == [10]
    assert told.slow[0].before_us == pytest.approx(40_000, rel=0.02)
    assert told.slow[0].now_us == pytest.approx(52_000, rel=0.02)
    assert 600 < told.slow[0].step <= 660
    assert told.others == pytest.approx(PARTS, rel=0.02)
    assert told.slow[0].jump == pytest.approx(13_000, rel=0.02)
    for at in range(150, 220):
        node.read(2, 1, [0.052], at * BLOCK_STEPS, float(at))
    assert node.beat(8).slow == (told.slow[0]._replace(jump=0),)
    node.restarted()
    assert [one.rank for one in version_4.pace_of(version_4.pace(node.beat(8))).slow] == [10]
    node.read(2, 2, [0.1], 5, 300.0)
    assert node.beat(8).slow == ()


def test_a_node_names_no_more_slow_ranks_than_a_beat_has_room_for() -> None:
    """Of twelve slow ranks of thirty ten are named, and all twelve are counted."""
    node = NodePace()
    for at in range(150):
        for rank in range(30):
            cost = 0.052 if rank < 12 and at >= 120 else 0.040
            node.read(rank, 1, [cost * (1 + 0.01 * ((at * 7 + rank) % 3 - 1))], at * BLOCK_STEPS, float(at))
    told = node.beat(0)
    assert [one.rank for one in told.slow] == list(range(SLOW_MAX))
    assert told.slower == 12


def test_beats_are_read_as_they_were_written_and_fit_a_frame() -> None:
    """Whatever is told comes back, as many as have room; what makes no sense says nothing."""
    many = PaceBeat(660, PARTS, 9_990, 12, tuple(SLOW._replace(rank=rank) for rank in range(12)))
    losses = LossBeat(16, tuple(RankLoss(rank, 7, NAN, NEVER, 0) for rank in range(16)))
    assert len(version_4.pace(many)) <= FIELDS_MAX
    assert len(version_4.losses(losses)) <= FIELDS_MAX
    cut = many._replace(slow=many.slow[:SLOW_MAX]), losses._replace(ranks=losses.ranks[:LOSSES_MAX])
    for version in (4, 5):
        assert decode(encode(Beat(3, 660, 0, cut), version), version) == Beat(3, 660, 0, cut)
    assert version_4.pace_of(version_4.pace(many)) == many._replace(slow=many.slow[:SLOW_MAX])
    assert version_4.losses_of(version_4.losses(losses)).reporting == 16
    assert version_4.pace_of((1, 2, 3, 4, 5)) == version_4.pace_of((1,)) == PaceBeat()
    assert version_4.losses_of((1, 2)) == version_4.losses_of(()) == LossBeat()


def test_what_all_suffered_hides_no_straggler() -> None:
    """Both ranks of the only node become 1.4 times as slow, which is nobody's; just then one becomes three times as slow as the
    other. It is named before sixty steps more, though the other one is called slow as well, and the other one is not.
    """
    node, paces, told = NodePace(), Paces(), []
    world = {"worker": World(3, True, members=(Member("worker-0-0", 2, 0),), size=2)}
    for at in range(200):
        for rank in range(2):
            times = (1.4 if at >= 120 else 1.0) * (3.0 if rank == 1 and at >= 134 else 1.0)
            node.read(rank, 1, [0.04 * times * (1 + 0.05 * ((at * 7 + rank) % 3 - 1))], at * BLOCK_STEPS, float(at))
        paces.take("worker-0-0", 3, node.beat(0), LossBeat())
        told += list(paces.compared(world, set(), float(at)))
    assert [one.rank for one in told] == [1]
    assert told[0].now_us == pytest.approx(168_000, rel=0.05)
    assert told[0].step <= 134 * BLOCK_STEPS + 60


# ---- one rank held against the others


def test_who_alone_became_slower_is_told_once() -> None:
    """One rank 1.3 times as long, its peers as before: told once, though every beat repeats it."""
    paces = Paces()
    heard(paces, NORMAL)
    told = list(paces.compared(WORLDS, set(), 1.0))
    assert told == [stragglers.NoteSlow("worker-2-0", 3, 2, 40_000, 52_000, 60, PARTS, 655)]
    heard(paces, NORMAL, 700)
    assert list(paces.compared(WORLDS, {("worker-2-0", 2)}, 2.0)) == []


def test_who_became_slower_with_everybody_is_no_straggler() -> None:
    """A larger batch, longer sequences, the time of day: what all ranks do is nobody's."""
    paces = Paces()
    heard(paces, dict.fromkeys(NODES, 13_000))
    assert list(paces.compared(WORLDS, set(), 1.0)) == []
    heard(paces, NORMAL, 700)
    assert list(paces.compared(WORLDS, set(), 2.0)) == []


def test_others_are_asked_about_the_same_step() -> None:
    """Beats that are a step behind tell nothing yet: half of the others must have come as far; but nobody waits for ever."""
    paces = Paces()
    heard(paces, NORMAL, 600, None)
    paces.take("worker-2-0", 3, beat(660, 13_000, SLOW), LossBeat())
    assert list(paces.compared(WORLDS, set(), 1.0)) == []
    heard(paces, dict.fromkeys(NODES, 13_000))
    assert list(paces.compared(WORLDS, set(), 2.0)) == []
    waiting = Paces()
    waiting.take("worker-0-0", 3, beat(600), LossBeat())
    waiting.take("worker-2-0", 3, beat(660, 13_000, SLOW, others=9_990), LossBeat())
    assert list(waiting.compared(WORLDS, set(), 1.0)) == []
    assert [one.peers for one in waiting.compared(WORLDS, set(), 1.0 + LATE_S)] == [9_990]


def test_a_rank_without_peers_is_not_judged() -> None:
    """One rank alone: nothing tells a slow machine from more work. Ranks of the same node are peers."""
    alone = Paces()
    alone.take("worker-2-0", 3, beat(660, 13_000, SLOW), LossBeat())
    assert list(alone.compared(WORLDS, set(), 100.0)) == []
    together = Paces()
    together.take("worker-2-0", 3, beat(660, PARTS, SLOW, others=PARTS), LossBeat())
    assert len(list(together.compared(WORLDS, set(), 1.0))) == 1


def test_a_new_leader_does_not_judge_old_changes() -> None:
    """What was found long ago cannot be compared any more: the others have got used to theirs."""
    paces = Paces()
    heard(paces, NORMAL, 9_000, SLOW._replace(jump=0))
    assert list(paces.compared(WORLDS, set(), 1.0)) == []


def test_a_recovery_is_told() -> None:
    """A rank that the log calls slow and its node does not any more has recovered; a node that says nothing tells nothing."""
    paces = Paces()
    heard(paces, NORMAL)
    list(paces.compared(WORLDS, set(), 1.0))
    standing = {("worker-2-0", 2)}
    paces.take("worker-2-0", 3, PaceBeat(), LossBeat())
    assert list(paces.compared(WORLDS, standing, 2.0)) == []
    heard(paces, dict.fromkeys(NODES, PARTS), 700, None)
    assert list(paces.compared(WORLDS, standing, 3.0)) == [stragglers.NoteRecovered("worker-2-0", 3, 2)]


def test_the_forgotten_and_the_stale_do_not_count() -> None:
    """Beats of another generation are of another world, and who is gone is no peer."""
    paces = Paces()
    heard(paces, NORMAL)
    assert list(paces.compared({"worker": World(4, True)}, set(), 1.0)) == []
    for node in NODES:
        paces.forget(node)
    assert list(paces.compared(WORLDS, set(), 100.0)) == []


# ---- losses


def losing(paces: Paces, broken: dict[str, int], how: int = NAN) -> None:
    """A beat of every node, one rank each; these had no finite loss first in that step."""
    for rank, node in enumerate(NODES):
        ranks = (RankLoss(rank, broken[node], how, NEVER, 0),) if node in broken else ()
        paces.take(node, 3, PaceBeat(), LossBeat(1, ranks))


def test_all_ranks_are_waited_for() -> None:
    """The first rank without a finite loss is named once all have spoken, or after a moment."""
    paces = Paces()
    losing(paces, {"worker-1-0": 61})
    assert list(paces.compared(WORLDS, set(), 1.0)) == []
    losing(paces, {"worker-1-0": 61, "worker-0-0": 62, "worker-2-0": 62, "worker-3-0": 62})
    assert list(paces.compared(WORLDS, set(), 2.0)) == [stragglers.NoteLoss("worker-1-0", 3, 1, 61, NAN, 1, 4)]
    assert list(paces.compared(WORLDS, set(), 3.0)) == []
    few = Paces()
    losing(few, {"worker-1-0": 61})
    list(few.compared(WORLDS, set(), 1.0))
    assert [one.ranks for one in few.compared(WORLDS, set(), 1.0 + LOSS_WAIT_S)] == [1]


def test_a_jump_is_told_once() -> None:
    """A loss that jumps is told with its factor, however many beats repeat it."""
    paces = Paces()
    for _ in range(2):
        paces.take("worker-1-0", 3, PaceBeat(), LossBeat(1, (RankLoss(1, NEVER, FINITE, 66, 7_500),)))
    assert list(paces.compared(WORLDS, set(), 1.0)) == [stragglers.NoteLossJump("worker-1-0", 3, 1, 66, 7_500)]
    assert list(paces.compared(WORLDS, set(), 2.0)) == []


# ---- what the job makes of it


def slow(job: Drive, node: str, rank: int, before_us: int = 40_000, now_us: int = 52_000, **more: Any) -> Any:
    """The leader's runtime has found a slow rank."""
    generation = more.pop("generation", job.world.generation)
    return job.do(stragglers.NoteSlow(node, generation, rank, before_us, now_us, 60, 10_050, 655))


def test_a_slow_rank_is_evidence_that_names_it() -> None:
    """An event and an observation that says who, by how much, from what to what; nothing is restarted."""
    job = Drive(nodes_min=3, nodes_max=3, nproc=2).up()
    slow(job, "worker-2-0", 5)
    assert job.names() == ["SlowRank", "EvidenceSeen"]
    seen = job.facts(evidence.EvidenceSeen)[-1]
    assert (seen.source, seen.signature, seen.rank, seen.host) == ("slow", "slow.rank", 5, "host-of-worker-2-0")
    assert seen.text == (
        "rank 5 on worker-2-0 computes 1.30x slower than it did (median 52 ms vs 40 ms over 60 steps, its peers 1.00x)"
    )


def test_when_all_its_ranks_are_slow_it_is_the_node() -> None:
    """The last of a node's ranks says so of the node."""
    job = Drive(nodes_min=3, nodes_max=3, nproc=2).up()
    slow(job, "worker-2-0", 4)
    slow(job, "worker-2-0", 5)
    assert job.names() == ["SlowRank", "EvidenceSeen", "EvidenceSeen"]
    assert job.facts(evidence.EvidenceSeen)[-1].rank == -1
    assert "all 2 ranks on worker-2-0" in job.facts(evidence.EvidenceSeen)[-1].text


def test_only_what_is_worse_by_a_tenth_is_told_again() -> None:
    """A rank that is known to be slow is told of again when it has become slower still, and counts from its beginning."""
    job = Drive().up()
    slow(job, "worker-1-0", 2)
    job.wait(50)
    assert isinstance(slow(job, "worker-1-0", 2, now_us=53_000), NotDone)
    assert isinstance(slow(job, "worker-1-0", 2, now_us=60_000), Accepted)
    job.wait(50)
    job.do(stragglers.NoteRecovered("worker-1-0", 1, 2))
    assert job.facts(stragglers.SlowEnded)[0].slow_us == 100 * SECOND


def test_it_ends_as_an_event() -> None:
    """A recovery is recorded with how long it lasted; once."""
    job = Drive().up()
    slow(job, "worker-1-0", 2)
    job.wait(90)
    ended = stragglers.NoteRecovered("worker-1-0", 1, 2)
    assert isinstance(job.do(ended), Accepted)
    assert job.facts(stragglers.SlowEnded) == [stragglers.SlowEnded("worker-1-0", 2, 90 * SECOND)]
    assert isinstance(job.do(ended), NotDone)


@pytest.mark.parametrize(
    ("node", "rank", "generation", "now_us"),
    [
        ("worker-9-0", 2, 1, 52_000),
        ("worker-1-0", 0, 1, 52_000),
        ("worker-1-0", 2, 7, 52_000),
        ("worker-1-0", 2, 1, 40_000),
    ],
    ids=["no node", "not its rank", "not this generation", "not slower"],
)
def test_what_cannot_be_is_refused(node: str, rank: int, generation: int, now_us: int) -> None:
    """Of strangers, of other generations and of what is no slowdown nothing is recorded."""
    job = Drive().up()
    assert isinstance(slow(job, node, rank, now_us=now_us, generation=generation), NotDone)
    assert job.state.stragglers.slow == {}


def test_a_node_is_replaced_once_it_has_cost_as_much() -> None:
    """Ski rental: 1.25 times as long loses a fifth; a replacement of 100 s is paid for after 500 s, and avoids the host."""
    job = Drive(nodes_min=3, nodes_max=3, nproc=1, slow_action="replace", slow_replace_s=100.0).up()
    slow(job, "worker-2-0", 2, 40_000, 50_000)
    job.wait(499)
    assert job.facts(stragglers.SlowReplaced) == []
    job.wait(2)
    assert job.facts(stragglers.SlowReplaced) == [
        stragglers.SlowReplaced("worker-2-0", 2, 100 * SECOND, 100 * SECOND, False)
    ]
    assert job.facts(nodes.NodeReleased)[-1] == nodes.NodeReleased("worker-2-0", "replaced")
    assert job.facts(nodes.NodePlanned)[-1].node == "worker-2-1"
    assert job.facts(hosts.HostQuarantined)[-1].host == "host-of-worker-2-0"
    assert job.state.stragglers.slow == {}
    job.take_over()
    assert job.state.stragglers.slow == {}


def test_nobody_is_replaced_for_what_half_the_world_suffers() -> None:
    """Two of four slow: no machine's fault. Nor where only a report is wanted, nor after a recovery."""
    many = Drive(nodes_min=4, nodes_max=4, nproc=1, slow_action="replace", slow_replace_s=1.0).up()
    slow(many, "worker-2-0", 2)
    slow(many, "worker-3-0", 3)
    many.wait(10_000)
    assert many.facts(stragglers.SlowReplaced) == []
    told = Drive(nodes_min=3, nodes_max=3, nproc=1, slow_replace_s=1.0).up()
    slow(told, "worker-2-0", 2)
    told.wait(10_000)
    assert told.facts(stragglers.SlowReplaced) == []
    well = Drive(nodes_min=3, nodes_max=3, nproc=1, slow_action="replace", slow_replace_s=100.0).up()
    slow(well, "worker-2-0", 2)
    well.wait(5)
    well.do(stragglers.NoteRecovered("worker-2-0", 1, 2))
    well.wait(10_000)
    assert well.facts(stragglers.SlowReplaced) == []


def test_what_replacing_costs_is_learnt() -> None:
    """The job's own replacements tell what one costs; the spec only until then."""
    job = Drive(nodes_min=3, nodes_max=3, nproc=1, slow_replace_s=1000.0).up()
    assert pace_rules.cost_us(job.state) == 1000 * SECOND
    job.observe("worker-1-0", "gone", reason="power")
    job.wait(40)
    job.observe("worker-1-1", "running")
    job.join("worker-1-1")
    job.run(10)
    closed = job.facts(incidents.IncidentClosed)[-1]
    assert pace_rules.cost_us(job.state) == closed.down_us >= 40 * SECOND


# ---- what it makes of losses


def lost(job: Drive, ranks: int, reporting: int, how: int = NAN) -> None:
    """The leader's runtime has collected who had no finite loss first."""
    job.do(stragglers.NoteLoss("worker-1-0", job.world.generation, 2, 61, how, ranks, reporting))


@pytest.mark.parametrize(
    ("ranks", "reporting", "how", "signature", "text"),
    [
        (1, 4, NAN, "loss.nan", "rank 2 on worker-1-0 of 4 ranks had a NaN loss first, in step 61"),
        (
            2,
            4,
            INFINITE,
            "loss.nan",
            "rank 2 on worker-1-0 and 1 more of 4 ranks had an infinite loss first, in step 61",
        ),
        (4, 4, NAN, "loss.nan_everywhere", "all ranks had a NaN loss in step 61"),
        (1, 1, NAN, "loss.nan_everywhere", "1 of 4 ranks, all that report theirs, had a NaN loss in step 61"),
    ],
)
def test_a_broken_loss_restarts_and_evicts_nobody(
    ranks: int, reporting: int, how: int, signature: str, text: str
) -> None:
    """Some ranks or all of them, or the only one that reports: the processes begin anew, no node goes, and it is told once."""
    job = Drive().up()
    lost(job, ranks, reporting, how)
    seen = job.facts(evidence.EvidenceSeen)[-1]
    assert (seen.signature, seen.text, seen.place) == (signature, text, "step 61")
    assert job.facts(incidents.ActionChosen)[-1].action == "RESTART_PROCESSES"
    assert job.world.generation == 2
    assert job.facts(nodes.NodeReleased) == []
    job.do(stragglers.NoteLoss("worker-1-0", 1, 2, 61, how, ranks, reporting))
    assert len(job.facts(stragglers.LossBroken)) == 1


def test_a_loss_broken_everywhere_never_costs_a_node() -> None:
    """Again and again in the same step, whatever the ladder comes to: no node is released and no host kept off."""
    job = Drive(max_restarts=5).up()
    for _ in range(6):
        if job.state.job.live and job.world.active:
            lost(job, 4, 4)
            job.wait(60)
        if job.state.job.live and job.world.active:
            job.run(60)
    actions = [fact.action for fact in job.facts(incidents.ActionChosen)]
    assert actions == ["RESTART_PROCESSES", "AWAIT_EVIDENCE"], "one replay, and then it is the program's"
    assert job.facts(nodes.NodeReleased) == job.facts(hosts.HostQuarantined) == job.facts(nodes.NodeFailed) == []


def test_a_jump_of_the_loss_is_only_told() -> None:
    """A spike is an observation: nothing is restarted for it."""
    job = Drive().up()
    job.do(stragglers.NoteLossJump("worker-1-0", 1, 2, 66, 7_500))
    assert job.names() == ["EvidenceSeen"]
    assert (
        job.facts(evidence.EvidenceSeen)[-1].text == "the loss of rank 2 on worker-1-0 is 7.5x what it was, in step 66"
    )


def test_an_old_jump_is_no_news_to_a_new_leader() -> None:
    """Beats repeat a jump for as long as it is the newest: it is evidence once, and only a later one is again."""
    job = Drive().up()
    first = stragglers.NoteLossJump("worker-1-0", 1, 2, 66, 7_500)
    job.do(first)
    job.take_over()
    assert isinstance(job.do(first), NotDone)
    job.do(first._replace(step=200))
    assert [fact.place for fact in job.facts(evidence.EvidenceSeen)] == ["step 66", "step 200"]
    assert digest(MODEL.fold(job.records)) == digest(job.state)
    # An agent may say such a thing as well, and anything may stand there.
    job.do(evidence.ReportEvidence("worker-1-0", "loss", stragglers.SPIKE, "a jump", 2, 1, place=f"step {'9' * 400}"))
    assert job.state.stragglers.jumps == {"worker": (1, 200)}

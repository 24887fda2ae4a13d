"""What is known and decided of checkpoints: who saves, what is committed, what is written when a world has ended."""

from __future__ import annotations

from typing import Any

import pytest
from drive import SECOND, Drive
from hypothesis import given
from hypothesis import strategies as st
from saved import URL, A, B, C, commit, held, order, refusal, saving

from dlrover_core.job import checkpoints, job, world
from dlrover_core.job.checkpoints import (
    CheckpointCommitted,
    KeepingStarted,
    OfferReplica,
    ReportKeeping,
    ReportRestored,
    ReportStorage,
    Restored,
    SaveOrdered,
    StorageBack,
    StorageFailed,
)
from dlrover_core.job.holdings import Holdings, SaveOrder
from dlrover_core.job.state import JobState
from dlrover_core.kernel.state import digest, pack, unpack
from dlrover_core.rules import save_on_failure
from dlrover_core.rules.model import MODEL

# ---- who saves


def test_the_node_of_rank_0_says_once_that_its_generation_saves() -> None:
    """Once per generation, and by the node of rank 0 alone."""
    drive = Drive(nodes_max=2, nproc=1).up()
    say = ReportKeeping(B, 1, URL, 2, 10, 3, True, 4096, 1)
    assert "does not run rank 0" in refusal(drive, say)
    drive.do(say._replace(node=A))
    assert drive.facts(KeepingStarted) == [KeepingStarted("worker", 1, URL, 2, 10, 3, True, 4096, 1)]
    assert "has said that it saves" in refusal(drive, say._replace(node=A))
    assert "no member of a running generation 2" in refusal(drive, say._replace(node=A, generation=2))
    drive.exit(B, 1)
    drive.do(say._replace(node=A, generation=2))
    assert drive.names() == ["KeepingStarted"]


@pytest.mark.parametrize(
    "wrong", [{"url": "x" * 1025}, {"every": -1}, {"keep": -1}, {"node_bytes": 2**60}, {"spread": -2}]
)
def test_what_is_said_is_bounded(wrong: dict[str, Any]) -> None:
    """Texts and numbers beyond all reason do not get into the log."""
    drive = Drive(nodes_max=2, nproc=1).up()
    refusal(drive, ReportKeeping(A, 1, URL, 2, 10, 3, True, 4096, 1)._replace(**wrong))


# ---- committed


def test_commits_only_go_forward() -> None:
    """A step is committed once, and none that is older than the newest; saying it again leaves no record."""
    drive = saving()
    assert commit(drive, 20) == ["CheckpointCommitted"]
    assert drive.facts(CheckpointCommitted)[0] == CheckpointCommitted("worker", 1, 20, URL, 2, 4096, 7, "due")
    assert commit(drive, 20) == commit(drive, 10) == []
    assert commit(drive, 30) == ["CheckpointCommitted"]
    assert drive.state.checkpoints.of("worker").newest == (1, 30)


def test_a_later_generation_is_newer_whatever_its_steps() -> None:
    """A generation that went on from an older step commits it again: its states are other ones."""
    drive = saving()
    commit(drive, 30)
    drive.exit(B, 1)
    assert commit(drive, 20, generation=2) == []  # which has not said that it saves
    drive.do(ReportKeeping(A, 2, URL, 2, 10, 3, True, 4096, 1))
    assert commit(drive, 20, generation=2) == ["CheckpointCommitted"]
    assert commit(drive, 40, generation=1) == []
    assert order(drive, B).committed == 20


def test_committed_history_is_bounded() -> None:
    """However long a job runs, the newest 64 are remembered."""
    drive = saving()
    for step in range(1, 101):
        commit(drive, 10 * step)
    known = drive.state.checkpoints.of("worker").committed
    assert known == [(1, 10 * step) for step in range(37, 101)]


def test_what_is_brought_to_safety_as_a_job_ends_is_committed() -> None:
    """Agents of a job that is being stopped write what they have before they go; the next run does not know it."""
    drive = saving()
    drive.do(job.StopJob("enough"))
    assert commit(drive, 10) == ["CheckpointCommitted"]
    assert (order(drive, A).leave, order(drive, A).committed) == (True, 10)
    drive.do(job.CreateJob("run-2", drive.spec.to_json()))
    assert drive.state.checkpoints.of("worker").newest == (0, -1)
    assert commit(drive, 20) == []


def test_everybody_is_told_what_is_committed() -> None:
    """The newest committed step is part of every order, at once; the others' orders stay the same objects meanwhile."""
    drive = saving()
    before = order(drive, A)
    assert before.committed == -1
    assert order(drive, A).order is before.order
    commit(drive, 20)
    assert MODEL.levels(drive.state, drive.new)
    assert [order(drive, node).committed for node in (A, B)] == [20, 20]
    assert order(drive, A).order is order(drive, A).order


# ---- where a world resumes


def test_a_world_resumes_from_what_is_committed() -> None:
    """The next world is told the newest committed step, and that it is on storage: a floor."""
    drive = saving()
    commit(drive, 20)
    drive.exit(B, 1)
    (formed,) = [one for one in drive.facts(world.WorldFormed) if one.generation == 2]
    assert (formed.resume_step, formed.resume_tier) == (20, checkpoints.STORAGE)


def test_a_world_resumes_from_what_is_whole_in_memory() -> None:
    """Where those who wait for the next world have told what they hold, and it is newer, that is what it is told."""
    drive = saving(nodes=2)
    commit(drive, 20)
    drive.observe(B, "failed", -9)
    held(drive, A, 22, 24, copies=((1, 22), (1, 24)))
    drive.observe(B, "gone")
    drive.observe("worker-1-1", "running")
    drive.join("worker-1-1")
    (formed,) = [one for one in drive.facts(world.WorldFormed) if one.generation == 2]
    assert (formed.resume_step, formed.resume_tier) == (24, checkpoints.MEMORY)


def test_without_checkpoints_nothing_is_said() -> None:
    """A job that does not save is told nothing of it."""
    drive = Drive(nodes_max=2, nproc=1).up()
    drive.exit(B, 1)
    assert drive.world.resume_step == -1
    told = order(drive, A)
    assert (told.committed, told.persist, told.replica_to, told.plan) == (-1, -1, "", 0)


# ---- storage, copies, restores


def test_storage_that_fails_is_told_once() -> None:
    """Edges: it fails once and is back once, by node; a node that ends is forgotten."""
    drive = saving()
    drive.do(ReportStorage(A, URL, "OSError: no space"))
    assert drive.facts(StorageFailed) == [StorageFailed(A, URL, "OSError: no space")]
    refusal(drive, ReportStorage(A, URL, "OSError: still"))
    refusal(drive, ReportStorage(B, URL))
    drive.do(ReportStorage(A, URL))
    assert drive.facts(StorageBack) == [StorageBack(A, URL)]
    drive.do(ReportStorage(B, URL, "x" * 1000))
    assert len(drive.facts(StorageFailed)[-1].reason) == checkpoints.TEXT_MAX
    drive.observe(B, "failed", -9)
    assert drive.state.checkpoints.failing == {}


def test_a_storage_that_comes_and_goes_is_one_that_fails() -> None:
    """The first end of a failure is told at once; one that fails again and again is told of at most 25 times a day."""
    drive = saving(silence_s=1e6, unreachable_s=1e7)
    told = 0
    began, failed_at = drive.now, 0
    while drive.now - began < 24 * 3600 * SECOND:
        drive.do(ReportStorage(A, URL, "OSError: no space"))
        told, failed_at = told + 1, drive.now
        calm_s = checkpoints.storage_calm_s(told)
        drive.wait(calm_s / 2 - 1 if calm_s else 1)
        if calm_s:
            assert "comes and goes" in refusal(drive, ReportStorage(A, URL))
        drive.wait(max(0, calm_s - (drive.now - failed_at) / SECOND) + 1)
        drive.do(ReportStorage(A, URL))
    edges = [type(record.event) for record in drive.records if isinstance(record.event, (StorageFailed, StorageBack))]
    assert edges[:4] == [StorageFailed, StorageBack, StorageFailed, StorageBack]
    assert len(edges) <= 50


def test_a_new_node_has_a_clean_slate() -> None:
    """How often its storage has failed is forgotten with the node."""
    drive = saving()
    drive.do(ReportStorage(B, URL, "OSError: no space"))
    assert drive.state.checkpoints.outages[B] == (1, drive.now)
    drive.observe(B, "failed", -9)
    assert drive.state.checkpoints.outages == {}


def test_copies_go_to_a_partner_on_another_host() -> None:
    """Every member is told its partner's address, once that takes copies; a node that ends takes none any more."""
    drive = saving(nodes=3)
    for node, address in ((A, "a:1"), (B, "b:1"), (C, "c:1")):
        drive.do(OfferReplica(node, address))
    told = {node: order(drive, node).replica_to for node in (A, B, C)}
    assert sorted(told.values()) == ["a:1", "b:1", "c:1"]
    assert all(not address.startswith(node[7:8]) for node, address in told.items())
    refusal(drive, OfferReplica(A, "a:1"))
    refusal(drive, OfferReplica(A, "x" * 300))
    drive.do(OfferReplica(A, "a:2"))
    assert "a:2" in {order(drive, node).replica_to for node in (B, C)}
    drive.observe(B, "failed", -9)
    assert B not in drive.state.checkpoints.replicas


def test_restores_are_told_where_they_say_something() -> None:
    """By rank 0's node, by one that needed more than its own memory, and by one that found something damaged; once each."""
    drive = saving(nodes=3)
    drive.do(ReportRestored(A, 1, 20, checkpoints.MEMORY, 1000))
    refusal(drive, ReportRestored(A, 1, 20, checkpoints.MEMORY, 1000))
    assert "like everybody" in refusal(drive, ReportRestored(B, 1, 20, checkpoints.MEMORY, 1000))
    drive.do(ReportRestored(B, 1, 20, checkpoints.PEER, 5000))
    drive.do(ReportRestored(C, 1, 20, checkpoints.MEMORY, 1000, ((checkpoints.MEMORY, "y" * 999),)))
    assert [(one.node, one.tier) for one in drive.facts(Restored)] == [(A, "memory"), (B, "peer"), (C, "memory")]
    assert len(drive.facts(Restored)[-1].fell[0][1]) == checkpoints.TEXT_MAX
    drive.exit(B, 1)
    assert drive.state.checkpoints.of("worker").restored == []


@pytest.mark.parametrize("wrong", [{"tier": "tape"}, {"step": -1}, {"took_us": -1}, {"generation": 2}])
def test_restores_that_cannot_be(wrong: dict[str, Any]) -> None:
    """An unknown tier, a step before the first, a generation that does not run."""
    refusal(saving(), ReportRestored(A, 1, 20, checkpoints.MEMORY, 1000)._replace(**wrong))


# ---- failures to be expected


def test_failures_to_be_expected_come_from_the_log() -> None:
    """Time since the run began over its failures, to two digits; the same for everybody, and 0 before the first."""
    drive = saving()
    assert order(drive, A).mtbf_s == 0
    drive.wait(1234)
    drive.exit(B, 1)
    assert order(drive, A).mtbf_s == 1200
    drive.run(2)
    drive.wait(1234)
    drive.exit(B, 1)
    assert order(drive, A).mtbf_s == 1200
    assert drive.state.checkpoints.failures == 2


def test_it_grows_while_nothing_fails() -> None:
    """Without a failure for long the next commit says so: nobody saves as often for ever as after a bad first hour."""
    drive = saving()
    drive.wait(100)
    drive.exit(B, 1)
    drive.do(ReportKeeping(A, 2, URL, 2, 10, 3, True, 4096, 1))
    drive.wait(9_900)
    commit(drive, 10, generation=2)
    assert drive.state.checkpoints.mtbf_s == pytest.approx(10_000, rel=0.1)


# ---- the log alone


def test_a_new_leader_orders_what_the_old_one_had_not() -> None:
    """Everything that an order depends on is in the log: the next leader waits for the same words, or for the same time."""
    drive = saving()
    drive.exit(B, 1)
    held(drive, A, 12)
    drive.take_over()
    assert held(drive, B, 12) == ["StepsHeld", "SaveOrdered"]
    drive.take_over()
    assert order(drive, A).persist == 12


def test_a_snapshot_in_between_changes_nothing() -> None:
    """Packed and unpacked in the middle of it, the state goes on as if nothing had been."""
    drive = saving(nodes=3, spread=0)
    drive.observe(C, "failed", -9)
    held(drive, A, 12, copies=((2, 12),))
    twin = drive.fork()
    assert digest(unpack(JobState, pack(drive.state))) == digest(drive.state)
    held(drive, B, 12)
    held(twin, B, 12)
    assert digest(twin.state) == digest(drive.state)
    assert drive.facts(SaveOrdered)[0] == twin.facts(SaveOrdered)[0]


# ---- coverage


@given(
    st.integers(1, 8),
    st.dictionaries(st.integers(0, 7), st.sets(st.integers(0, 4), max_size=3)),
    st.dictionaries(st.integers(0, 7), st.tuples(st.integers(0, 7), st.integers(0, 4))),
)
def test_a_step_is_whole_where_every_part_is(
    nodes: int, told: dict[int, set[int]], copied: dict[int, tuple[int, int]]
) -> None:
    """The newest step of which every part is held, its own or a copy; each part is written by exactly one that holds it."""
    held_by = Holdings("worker", 1, ((0, nodes, 0, 1),))
    for place, steps in told.items():
        if place < nodes:
            held_by.held[f"worker-{place}-0"] = tuple(sorted(steps))
            if place in copied and copied[place][0] < nodes:
                held_by.copies[f"worker-{place}-0"] = (copied[place],)

    def who(step: int, part: int) -> list[tuple[str, int]]:
        own = [(node, held_by.places[node]) for node, steps in held_by.held.items() if step in steps]
        other = [(node, place) for node, pairs in held_by.copies.items() for place, of in pairs if of == step]
        return [one for one in own + other if one[1] == part]

    whole = [step for step in range(5) if all(who(step, part) for part in range(nodes))]
    assert held_by.whole == max(whole, default=-1)
    for step in whole:
        writers = SaveOrder.of(held_by, step, "why").writers
        written = [(node, place) for node, places in writers.items() for place in places]
        assert sorted(place for _, place in written) == list(range(nodes))
        assert all(one in who(step, one[1]) for one in written)


@given(st.integers(2, 6).flatmap(lambda nodes: st.permutations(range(nodes))))
def test_writers_only_gain_when_others_die(deaths: list[int]) -> None:
    """A node that is left writes what it was to write, and maybe more, as long as the living have every part between them."""
    nodes, living = len(deaths), set(range(len(deaths)))
    held_by = Holdings("worker", 1, ((0, nodes, 0, 1),))
    for place in range(nodes):
        held_by.held[f"worker-{place}-0"] = (7,)
        held_by.copies[f"worker-{place}-0"] = (((place + 1) % nodes, 7),)
    save = SaveOrder.of(held_by, 7, "why")
    for death in deaths:
        before = dict(save.writers)
        living.remove(death)
        covered = {part for place in living for part in (place, (place + 1) % nodes)} == set(range(nodes))
        assert save.lose(f"worker-{death}-0") == covered
        if not covered:
            return
        assert sorted(part for parts in save.writers.values() for part in parts) == list(range(nodes))
        assert set(save.writers) <= {f"worker-{place}-0" for place in living}
        for node, places in before.items():
            assert node == f"worker-{death}-0" or set(places) <= set(save.writers[node])


def test_times_are_in_microseconds() -> None:
    """The wait for a word is counted by the leader's clock, from the end of the generation or the first word of it."""
    drive = saving(broken_grace_s=0.0)
    drive.exit(B, 1)
    drive.wait(30)
    held(drive, A, 12, copies=((1, 12),))
    began = drive.now
    drive.wait(60)
    (record,) = [one for one in drive.records if isinstance(one.event, SaveOrdered)]
    assert record.at == began + save_on_failure.HELD_WAIT_S * SECOND

"""Checkpoints on the read side: every event in words, summed up in the report, in the incident's story, in the status."""

from __future__ import annotations

import json
from typing import Any

import pytest
from drive import Drive
from samples import of
from test_histories import saved_and_restored
from tests.unit.life import Life

from dlrover_core.history import explanation_of, incident_of, render, render_story, report_of, status_of
from dlrover_core.history.phrases import key_values, size
from dlrover_core.history.plain import plain
from dlrover_core.history.report import report_values
from dlrover_core.history.saves import Restores, Saves, SavesBuilder
from dlrover_core.history.words import say
from dlrover_core.job import checkpoints, progress, world
from dlrover_core.job.checkpoints import CheckpointCommitted, Restored, StepsHeld, StorageBack, StorageFailed
from dlrover_core.kernel.events import Event, Record
from dlrover_core.spec import GroupSpec, JobSpec, us

TWO_NODES = JobSpec("digits", (GroupSpec(nodes_min=2, nodes_max=2, nproc=1),))


def told(*facts: tuple[float, Event], now: float | None = None) -> Saves:
    """The sums of a few events, at these seconds."""
    builder = SavesBuilder()
    for seq, (at, fact) in enumerate(facts, start=1):
        builder.feed(Record(seq, us(at), 1, 0, fact))
    return builder.saves(us(now) if now is not None else None)


@pytest.mark.parametrize("cls", checkpoints.EVENTS, ids=lambda cls: cls.__name__)
def test_every_event_is_told_in_words(cls: Any) -> None:
    """No event of checkpoints is told by the names of its fields."""
    assert say(of(cls)) != key_values(of(cls))


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (
            CheckpointCommitted("worker", 3, 120, "file:///c", 2, 3 << 30, 2_500_000, checkpoints.DUE),
            "step 120 of generation 3 is a checkpoint: 2 parts, 3 GiB in 2.500 s, at file:///c",
        ),
        (
            Restored("worker-1-0", 4, 120, checkpoints.PEER, 300_000, ((checkpoints.MEMORY, "block 3 is damaged"),)),
            (
                "worker-1-0 went on from step 120 out of the memory of peers, in 0.300 s; its own memory was not good: "
                "block 3 is damaged"
            ),
        ),
        (Restored("worker-0-0", 1, 0, checkpoints.NOTHING, 5), "worker-0-0 began generation 1 from nothing"),
        (
            Restored("worker-0-0", 2, 0, checkpoints.NOTHING, 5, ((checkpoints.MEMORY, "bad"),)),
            "worker-0-0 began generation 2 from nothing; what was saved before is of no use; its own memory was not good: bad",
        ),
        (StepsHeld("worker-0-0", 1, ()), "worker-0-0 holds no step of generation 1 in memory"),
        (
            StepsHeld("worker-0-0", 1, (8, 10), 0, ((1, 10),)),
            "worker-0-0 holds steps 8, 10 of generation 1 in memory and copies of 1 peer",
        ),
        (
            StepsHeld("worker-0-0", 1, (11,), 5),
            "worker-0-0 waits at the boundary of plan 5 with step 11 of generation 1 in memory",
        ),
        (
            StorageFailed("worker-0-0", "s3://b", "no route"),
            "worker-0-0 cannot write checkpoints to s3://b: no route; training goes on",
        ),
    ],
)
def test_words(fact: Event, words: str) -> None:
    """What happened, to whom, from where and how long, in the words of people."""
    assert say(fact) == words


def test_sizes() -> None:
    """Bytes are said with three digits at most."""
    assert [size(one) for one in (0, 999, 1000, 1536, 5 << 20, 3 << 30, 2 << 40)] == [
        "0 B", "999 B", "0.977 KiB", "1.5 KiB", "5 MiB", "3 GiB", "2 TiB",
    ]  # fmt: skip


def test_nothing_saved_is_nothing_told() -> None:
    """A job without checkpoints has no line about them."""
    assert not told().any
    assert "checkpoint" not in render.report(report_of(Life(TWO_NODES).records))


def test_outages_of_several_nodes_are_one() -> None:
    """Storage is down from the first node that sees it until the last; one that lasts is counted until now."""
    failed = [StorageFailed(f"worker-{one}-0", "c", "x") for one in range(2)]
    back = [StorageBack(f"worker-{one}-0", "c") for one in range(2)]
    one = told((1, failed[0]), (2, failed[1]), (5, back[0]), (7, back[1]), (20, failed[0]), now=23)
    assert (one.outages, one.outage_us, one.down) == (2, us(6 + 3), ("worker-0-0",))


def test_a_node_that_ends_ends_its_outage() -> None:
    """A dead node does not say that storage is back."""
    one = told((1, StorageFailed("worker-0-0", "c", "x")), (4, world.nodes.NodeGone("worker-0-0", "", False)), now=90)
    assert (one.outages, one.outage_us, one.down) == (1, us(3), ())


def test_a_generation_is_restored_from_its_slowest_tier() -> None:
    """All ranks wait for the last of them: a generation counts once, with the slowest of its nodes."""
    one = told(
        (1, Restored("worker-0-0", 2, 10, checkpoints.MEMORY, 80)),
        (1, Restored("worker-1-0", 2, 10, checkpoints.PEER, 900)),
        (2, Restored("worker-0-0", 3, 20, checkpoints.PEER, 400)),
        (3, Restored("worker-0-0", 1, 0, checkpoints.NOTHING, 5)),
    )
    assert one.restores == (Restores(checkpoints.PEER, 2, 1300, 900),)


# ---- the whole of it


def test_the_report_of_a_job_that_saves() -> None:
    """Checkpoints, restores by tier, tiers that failed, and outages; as text and as values."""
    report = report_of(saved_and_restored().records)
    assert (report.saves.committed, report.saves.ordered, report.saves.newest, report.saves.outages) == (2, 1, 26, 1)
    assert [(one.tier, one.count) for one in report.saves.restores] == [("memory", 1), ("peer", 1)]
    text = render.report(report)
    assert (
        "2 checkpoints on storage, the newest of step 26, 1 of them because a generation had ended (2 GiB written)"
        in text
    )
    assert "resumed 1 time from its own memory, in 0.080 s" in text
    assert "resumed 1 time from the memory of peers, in 0.300 s" in text
    assert "1 time a tier had a step that was not whole or was damaged" in text
    assert "storage was down 1 time" in text
    values = json.loads(json.dumps(report_values(report)))
    assert values["saves"]["restores"][1]["tier"] == "peer"
    assert values["incidents"][0]["restored"]["tier"] == "memory"


def test_incidents_name_the_tier() -> None:
    """The story of an incident says from where training went on, how long that took, and what was tried before."""
    records = saved_and_restored().records
    worker, node = incident_of(records, 1), incident_of(records, 2)
    assert worker is not None
    assert node is not None
    assert "resumed: worker-0-0 went on from step 26 out of its own memory, in 0.080 s" in render_story.story(worker)
    assert (
        "resumed: worker-0-0 went on from step 40 out of the memory of peers, in 0.300 s; its own memory was not good"
        in render_story.story(node)
    )


def test_the_status_of_a_job_that_saves() -> None:
    """Where it saves to, the newest step there, what is being written, and who cannot write."""
    drive = saved_and_restored()
    row = status_of(drive.state).kept[0]
    assert (row.group, row.committed, row.ordered, row.failing) == ("worker", 26, 40, ())
    text = render.status(status_of(drive.state))
    assert (
        "worker: saves to file:///ckpts: step 26 is the newest on storage; step 40 is whole in memory; "
        "step 40 is being written, since its generation has ended" in text
    )
    drive.say(checkpoints.ReportStorage("worker-0-0", "file:///ckpts", "no space"))
    assert "; 1 node cannot write now" in render.status(status_of(drive.state))
    assert json.dumps(plain(status_of(drive.state)))


def test_the_status_of_a_job_without_a_storage() -> None:
    """Nothing is said of storage."""
    drive = Drive(nodes_max=1, nproc=1).up()
    drive.do(checkpoints.ReportKeeping("worker-0-0", 1, "", 2, 0, 3, True, 4096, 1))
    lines = render.status(status_of(drive.state)).splitlines()
    assert "  worker: saves into memory alone" in lines


def test_explanations_link_what_was_saved() -> None:
    """A checkpoint follows from the order to write it, that from what nodes held, and that from the end of their world."""
    drive = saved_and_restored()
    committed = [one.seq for one in drive.records if isinstance(one.event, CheckpointCommitted)][-1]
    why = explanation_of(drive.records, committed)
    assert why is not None
    kinds = [type(one.record.event).__name__ for one in why.before]
    assert {"WorkerExited", "WorldFormed", "StepsHeld", "SaveOrdered"} <= set(kinds)
    back = next(one for one in drive.records if isinstance(one.event, StorageBack))
    assert [type(one.record.event) for one in explanation_of(drive.records, back.seq).before] == [  # type: ignore[union-attr]
        StorageFailed, StorageBack
    ]  # fmt: skip


# ---- goodput


def broken(first: int, *, numbered: bool = True, committed: bool = False, held: bool = False) -> Life:
    """Two nodes train a second a step; one dies without a word after 50 steps, and the next world begins at ``first``.

    Step 40 was ``committed``, step 48 is still ``held`` by the other node.
    """
    life = Life(TWO_NODES).join(2, "worker-0-0", "worker-1-0").start(2.5, "worker-0-0", "worker-1-0")
    life.do(2.9, checkpoints.ReportKeeping("worker-0-0", 1, "file:///c", 10, 20, 3, False, 1, 1))
    life.do(3, progress.ReportFirstStep("worker-0-0", 1, 1, told=numbered))
    if committed:
        life.do(45, checkpoints.CommitCheckpoint("worker", 1, 40, 1, 1, 1))
    life.die(53, "worker-1-0", 1)
    if held:
        life.do(53.1, checkpoints.ReportHeld("worker-0-0", 1, (48,)))
    life.start(53.2, "worker-0-0", "worker-1-0")
    return life.do(53.5, progress.ReportFirstStep("worker-0-0", 2, first, told=numbered))


@pytest.mark.parametrize(
    ("committed", "held", "first", "lost"),
    [
        (False, False, 21, 0),
        (True, False, 41, 0),
        (True, False, 21, 20),
        (True, True, 41, 8),
        (False, True, 49, 0),
    ],
)
def test_steps_lost_are_known_from_what_was_saved(committed: bool, held: bool, first: int, lost: int) -> None:
    """Whatever dies without a word: what was committed, or held, had been reached; to begin before it is to make it again."""
    life = broken(first, committed=committed, held=held)
    report = report_of(life.progress(153.5, first + 100).finish(160, "worker-0-0").records)
    assert report.timeline.told
    assert report.steps_lost == lost
    # The first one made again is part of the restart.
    assert report.goodput.by_class["rework"] == pytest.approx(us(max(0, lost - 1)), abs=us(0.01))


def test_untold_steps_are_not_counted() -> None:
    """Where a script does not tell its own numbers nobody knows what was made again, whatever was saved."""
    report = report_of(broken(1, numbered=False, committed=True).records)
    assert not report.timeline.told
    assert report.goodput.by_class["rework"] == 0

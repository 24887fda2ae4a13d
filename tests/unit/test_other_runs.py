"""One URL, several runs: what an earlier run, another job, or a person has left there neither stops us nor is touched by us."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.unit.stored import sharded, state, whole

from dlrover_adapters.agent.checkpoints import storing
from dlrover_adapters.checkpoint.listing import COMPLETE, DAMAGED, delete, look, retain, steps
from dlrover_adapters.checkpoint.manifests import CheckpointIncomplete, is_ours
from dlrover_adapters.checkpoint.parts import write_part
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.reader import StepReader
from dlrover_adapters.checkpoint.seal import seal
from dlrover_core.checkpoint.retention import YOUNG_S

FOLDER = "step-0000000120"
LONG_AGO = 10 * YOUNG_S


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty folder on a file system and in an object store."""
    return Place(f"file://{tmp_path}/run" if request.param == "local" else f"memory://{tmp_path.name}/run")


def parts(place: Place, world: int, generation: int, run: str, *, step: int = 120, job: str = "") -> None:
    """What all ranks of a world write of a step."""
    for arena in sharded(state(generation), world, generation=generation, step=step):
        write_part(arena.view(), place, run=run, job=job)


def complete(place: Place, run: str, *numbers: int, job: str = "") -> None:
    """Steps of one rank, sealed."""
    for step in numbers:
        write_part(whole(state(), step=step).view(), place, run=run, job=job)
        seal(place, step, [0], run=run)


def names(place: Place, folder: str) -> list[str]:
    """What lies there."""
    return [one.name for one in place.ls(folder, drafts=True)]


# ---- parts that an older run left


def test_parts_that_an_older_run_left_do_not_stop_the_seal(place: Place) -> None:
    """A greater generation of another run is not newer: its parts do not count, are not read, and go when the step is sealed."""
    parts(place, 4, 5, "old")
    parts(place, 2, 1, "new")
    read = StepReader(place, 120, run="new", generation=1)
    assert {rank: (part.run, part.generation) for rank, part in read.parts.items()} == {0: ("new", 1), 1: ("new", 1)}
    read.verify()
    # The run that wrote last, where nobody says which.
    assert StepReader(place, 120).run == "new"
    assert seal(place, 120, run="new", generation=1).generation == 1
    assert names(place, FOLDER) == [
        ".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "part-0.json", "part-1.json",
    ]  # fmt: skip
    StepReader(place, 120).verify()


def test_the_saver_seals_over_what_an_older_run_left(tmp_path: Path) -> None:
    """As above, by what the agent orders of its saver."""
    place = Place(str(tmp_path))
    parts(place, 4, 5, "old")
    parts(place, 2, 1, "new")
    for arena in sharded(state(), 2, generation=2):
        write_part(arena.view(), place, run="later")
    told = {"url": str(tmp_path), "run": "new", "format": "dcp", "keep": 1, "job": "train"}
    with pytest.raises(CheckpointIncomplete):
        storing.seal(storing.Order.of(told), 120)
    views = [arena.view() for arena in sharded(state(1), 2, generation=1)]
    progress = storing.Progress()
    storing.write(views, storing.Order.of(told), progress)
    assert 0 < progress.size <= progress.written, "and it can be seen how far it is"
    with pytest.raises(CheckpointIncomplete):
        storing.seal(storing.Order.of(told), 120, 2)
    assert storing.seal(storing.Order.of(told), 120, 1) > 0
    found = look(place, 120)
    assert (found.run, found.job, found.generation, found.parts) == ("new", "train", 1, 2)


def test_a_part_of_another_run_never_stands_for_one_of_ours(place: Place) -> None:
    """Where this run's part of a rank is missing the step is incomplete, whatever an older run has written under that name."""
    parts(place, 2, 1, "old")
    write_part(sharded(state(1), 2, generation=1)[0].view(), place, run="new")
    for ranks in (None, [0, 1]):
        with pytest.raises(CheckpointIncomplete, match="rank 1" if ranks else "are nowhere"):
            seal(place, 120, ranks, run="new")
    with pytest.raises(CheckpointIncomplete, match="rank 0"):
        seal(place, 120, [0, 1], run="new", generation=2)
    # An older state of our own, either.
    write_part(sharded(state(2), 2, generation=2)[0].view(), place, run="new")
    with pytest.raises(CheckpointIncomplete, match="rank 1"):
        seal(place, 120, [0, 1], run="new", generation=2)


def test_what_is_written_after_ours_is_not_swept(tmp_path: Path) -> None:
    """A part of another run that came later than all of ours may be of one that is at work now; a newer generation, too."""
    place = Place(str(tmp_path))
    parts(place, 2, 1, "new")
    for rank, run, generation in ((2, "later", 1), (3, "new", 2)):
        write_part(sharded(state(), 4, generation=generation)[rank].view(), place, run=run)
    ns = (tmp_path / FOLDER / "part-1.json").stat().st_mtime_ns
    os.utime(tmp_path / FOLDER / "part-3.json", ns=(ns - 10**9, ns - 10**9))
    seal(place, 120, [0, 1], run="new", generation=1)
    assert {"part-2.json", "part-3.json", "__2_0.distcp", "__3_0.distcp"} < set(names(place, FOLDER))


# ---- what retention removes


def test_what_is_not_ours_is_never_removed(tmp_path: Path) -> None:
    """A folder that is called like a step and has nothing of ours in it stays; in one of ours a user's files stay."""
    place = Place(str(tmp_path))
    theirs = tmp_path / "step-0000000005" / "mine" / "notes.txt"
    foreign = tmp_path / "step-0000000006" / "__0_0.distcp"  # somebody's torch.distributed.checkpoint
    theirs.parent.mkdir(parents=True)
    foreign.parent.mkdir()
    for file in (theirs, foreign):
        file.write_text("years of work")
        for one in (file, *list(file.parents)[:2]):
            os.utime(one, (1, 1))
    complete(place, "r", 1, 2)
    mine = tmp_path / "step-0000000001" / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("more")
    (mine.parent / "log.txt").write_text("more")
    assert retain(place, 1, run="r") == [1]
    assert retain(place, 1, everybody=True) == []
    assert (theirs.read_text(), foreign.read_text()) == ("years of work", "years of work")
    assert sorted(one.name for one in mine.parent.iterdir()) == ["log.txt", "mine"]
    assert (mine / "notes.txt").read_text() == "more"


def test_drafts_go_with_their_step(tmp_path: Path) -> None:
    """What a dead writer left half done is ours, by its name; then the folder is empty, and goes."""
    place = Place(str(tmp_path))
    complete(place, "r", 120)
    (tmp_path / FOLDER / f".__0_0.distcp.{'0' * 32}.draft").write_bytes(b"half")
    delete(place, 120)
    assert list(tmp_path.iterdir()) == []
    assert not is_ours(f".notes.{'0' * 32}.draft")


def test_keep_counts_earlier_runs_of_the_job_and_no_other_jobs(place: Place) -> None:
    """`keep=2` holds over restarts of a job on the same URL; what a job of another name has there is left alone."""
    complete(place, "a1", 1, 2, 3, job="a")
    complete(place, "b1", 10, 11, 12, job="b")
    complete(place, "", 20, 21)  # without an agent: nobody's name
    assert retain(place, 2, run="a1", job="a") == [1]
    complete(place, "a2", 4, job="a")
    assert retain(place, 2, run="a2", job="a") == [2]
    assert retain(place, 1) == [20]
    assert [(one.step, one.job, one.state) for one in steps(place)] == [
        (3, "a", COMPLETE), (4, "a", COMPLETE), (10, "b", COMPLETE), (11, "b", COMPLETE), (12, "b", COMPLETE), (21, "", COMPLETE),
    ]  # fmt: skip
    # Asked for by hand: all are one list.
    assert len(retain(place, 1, everybody=True)) == 5


def test_whose_a_step_is_can_be_told_when_its_seal_is_damaged(place: Place) -> None:
    """A damaged seal does not make a step nobody's: a part says whose it is, and it goes when it is old enough."""
    complete(place, "r", 1, 2, job="a")
    place.put("step-0000000001/manifest.json", b"rubbish")
    found = look(place, 1)
    assert (found.state, found.run, found.job) == (DAMAGED, "r", "a")
    now = max(one.changed for one in steps(place)) + LONG_AGO
    assert retain(place, 2, run="x", job="b", now=now) == []
    assert retain(place, 2, run="r", job="a", now=now) == [1]

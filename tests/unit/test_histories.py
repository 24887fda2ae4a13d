"""Recorded histories: bytes of yesterday, folded by today's code, give the recorded state.

A history is `histories/<name>.msgpack`: a msgpack array of batches as they lie in a log. Recordings are append-only:

- ``DLROVER_GOLDEN=write pytest tests/unit/test_histories.py`` records the stories below that have no file yet, and renews the
  hashes of all (a new field of the state changes every hash; what the states *say* is asserted by hand below);
- a new version of an event adds a story with the old version: record it *before* raising the version.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from drive import Drive

from dlrover_core.diagnosis import ladder
from dlrover_core.job import checkpoints, job, nodes, operations, silence, world
from dlrover_core.job.state import CODEC, JobState, fold
from dlrover_core.kernel.state import digest, pack, unpack
from dlrover_core.rules.model import MODEL

FOLDER = Path(__file__).parent / "histories"
HASHES = FOLDER / "hashes.json"
RENEW = os.environ.get("DLROVER_GOLDEN") == "write"


def worker_death() -> Drive:
    """One of four workers is killed, its peers fail in its wake, all restart, and the job ends well."""
    drive = Drive(numbered=True, nodes_max=2, nproc=2).up()
    drive.wait(60)
    drive.exit("worker-1-0", 3, -9, step=60, age_us=900)
    drive.cascade("worker-0-0", 0, generation=1)
    drive.cascade("worker-0-0", 1, generation=1)
    drive.run(61)
    for node in ("worker-0-0", "worker-1-0"):
        drive.say(world.ReportFinished(node, 2))
    for node in ("worker-0-0", "worker-1-0"):
        drive.say(nodes.ReportLeft(node))
        drive.observe(node, "succeeded")
        drive.observe(node, "gone")
    return drive


def node_death() -> Drive:
    """A node dies with its workers; its successor joins on another host after its bad host was put in quarantine."""
    drive = Drive(numbered=True, nodes_max=3, nproc=1, nodes_min=2).up()
    drive.wait(30)
    drive.cascade("worker-0-0", 0)
    drive.observe("worker-2-0", "failed", -9, "hardware: fell off the bus")
    drive.listed(*(nodes.Observed(node, "running") for node in ("worker-0-0", "worker-1-0")))
    drive.wait(5)
    drive.observe("worker-2-1", "pending")
    drive.observe("worker-2-1", "running", host="h9")
    drive.join("worker-2-1", "h9")
    drive.run(31)
    drive.do(silence.NoteSilence("worker-1-0", 15_000_000))
    drive.do(silence.NoteHeard("worker-1-0"))
    return drive


def failed_job_with_take_over() -> Drive:
    """A user error repeats until restarts are used up; the master dies in the middle and the next one finishes the story."""
    drive = Drive(numbered=True, nodes_max=2, nproc=1, max_restarts=1).up()
    drive.exit("worker-0-0", 0, 1, "Traceback (most recent call last):\nValueError: bad batch", step=7)
    drive.run(7)
    drive.take_over()
    drive.exit("worker-0-0", 0, 1, "Traceback (most recent call last):\nValueError: bad batch", step=7)
    drive.cascade("worker-1-0", 1)
    drive.take_over()
    for node in ("worker-0-0", "worker-1-0"):
        drive.say(world.ReportStopped(node, 2, 7))
    return drive


def asked_by_people() -> Drive:
    """A job is scaled up, a node of it drained, the job suspended, its master killed, resumed, scaled down and stopped."""
    drive = Drive(numbered=True, nodes_max=1, nproc=1).up()
    drive.do(operations.ScaleGroup("worker", 2, 2, "a new machine"))
    drive.observe("worker-1-0", "running", host="h1")
    drive.join("worker-1-0", "h1")
    drive.run(10)
    drive.do(operations.DrainNode("worker-1", "a bad one"))
    drive.say(nodes.ReportLeft("worker-1-0"))
    drive.observe("worker-1-0", "gone")
    drive.join("worker-1-1", "h2")
    drive.run(20)
    drive.do(job.SuspendJob("lunch"))
    drive.take_over()
    drive.do(job.ResumeJob("back"))
    drive.run(21)
    drive.do(operations.ScaleGroup("worker", 0, 1, "enough"))
    drive.do(job.StopJob("home"))
    return drive


def saved_and_restored() -> Drive:
    """A job saves; storage fails for a while; a worker dies and memory goes to storage; a node dies, its peer's copy serves."""
    drive = Drive(numbered=True, nodes_max=2, nproc=1).up()
    for node in ("worker-0-0", "worker-1-0"):
        drive.say(checkpoints.OfferReplica(node, f"{node}:9"))
    keeping = checkpoints.ReportKeeping("worker-0-0", 1, "file:///ckpts", 2, 10, 3, True, 1 << 30, 2)
    drive.say(keeping)
    drive.say(checkpoints.ReportRestored("worker-0-0", 1, 0, checkpoints.NOTHING, 900))
    drive.do(checkpoints.CommitCheckpoint("worker", 1, 10, 2, 1 << 30, 700_000))
    drive.wait(60)
    drive.say(checkpoints.ReportStorage("worker-1-0", "file:///ckpts", "OSError: [Errno 28] No space left on device"))
    drive.exit("worker-1-0", 1, -9, step=27)
    drive.say(checkpoints.ReportHeld("worker-0-0", 1, (24, 26)))
    drive.say(checkpoints.ReportHeld("worker-1-0", 1, (24, 26)))
    drive.take_over()
    drive.say(keeping._replace(generation=2))
    drive.say(checkpoints.ReportRestored("worker-0-0", 2, 26, checkpoints.MEMORY, 80_000))
    drive.run(27)
    drive.say(checkpoints.ReportStorage("worker-1-0", "file:///ckpts"))
    drive.do(checkpoints.CommitCheckpoint("worker", 1, 26, 2, 1 << 30, 800_000))
    drive.wait(60)
    drive.observe("worker-1-0", "failed", -9, "preempted")
    drive.say(checkpoints.ReportHeld("worker-0-0", 2, (38, 40), 0, ((1, 40),)))
    drive.observe("worker-1-0", "gone")
    drive.observe("worker-1-1", "running", host="h9")
    drive.join("worker-1-1", "h9")
    drive.say(keeping._replace(generation=3))
    fell = ((checkpoints.MEMORY, "a block of worker-0-0 is not what was saved"),)
    drive.say(checkpoints.ReportRestored("worker-0-0", 3, 40, checkpoints.PEER, 300_000, fell))
    return drive.run(41)


STORIES: dict[str, Callable[[], Drive]] = {
    one.__name__: one
    for one in (worker_death, node_death, failed_job_with_take_over, asked_by_people, saved_and_restored)
}


def _recorded(name: str) -> JobState:
    payloads = msgpack.unpackb((FOLDER / f"{name}.msgpack").read_bytes())
    return fold(record for payload in payloads for record in CODEC.decode(payload).records)


@pytest.fixture(scope="module")
def hashes() -> dict[str, Any]:
    """The golden hashes, after recording what is missing if that was asked for."""
    if RENEW:
        for name, story in STORIES.items():
            path = FOLDER / f"{name}.msgpack"
            if not path.exists():
                path.write_bytes(msgpack.packb([batch.payload for batch in story().batches]))
        renewed = {
            path.stem: {"seq": _recorded(path.stem).seq, "digest": digest(_recorded(path.stem))}
            for path in sorted(FOLDER.glob("*.msgpack"))
        }
        HASHES.write_text(json.dumps(renewed, indent=1) + "\n")
    return dict(json.loads(HASHES.read_text()))


@pytest.mark.parametrize("name", sorted({*STORIES, *(path.stem for path in FOLDER.glob("*.msgpack"))}))
def test_replay(name: str, hashes: dict[str, Any]) -> None:
    """Today's code folds the recorded bytes to the recorded state."""
    state = _recorded(name)
    assert {"seq": state.seq, "digest": digest(state)} == hashes[name], "see the top of this file"


@pytest.mark.parametrize("name", sorted(STORIES))
def test_replay_from_a_snapshot(name: str, hashes: dict[str, Any]) -> None:
    """A snapshot taken anywhere, and what came after it, give the same state as the whole history."""
    payloads = msgpack.unpackb((FOLDER / f"{name}.msgpack").read_bytes())
    records = [record for payload in payloads for record in CODEC.decode(payload).records]
    for cut in range(0, len(records), 7):
        half = unpack(JobState, pack(fold(records[:cut])))
        assert digest(MODEL.fold(records[cut:], half)) == hashes[name]["digest"]


@pytest.mark.parametrize("name", sorted(STORIES))
def test_recordings_are_readable_histories(name: str, hashes: dict[str, Any]) -> None:
    """Recorded batches are contiguous, and no decision in them failed."""
    payloads = msgpack.unpackb((FOLDER / f"{name}.msgpack").read_bytes())
    records = [record for payload in payloads for record in CODEC.decode(payload).records]
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    assert "CommandFailed" not in {type(record.event).__name__ for record in records}


def test_the_story_of_a_worker_death(hashes: dict[str, Any]) -> None:
    """One incident, one unit of the restart budget, and the job succeeded; nobody is left, nobody is remembered."""
    state = _recorded("worker_death")
    (incident,) = state.incidents.by_number.values()
    assert (incident.signature, incident.action, incident.state) == ("exit.sigkill", ladder.RESTART_PROCESSES, "closed")
    assert [one.state for one in incident.actions] == ["done"]
    assert (state.job.state, state.incidents.restarts, state.world.worlds["worker"].generation) == ("succeeded", 1, 2)
    assert state.nodes.nodes == {}
    assert state.senders == {}


def test_the_story_of_a_node_death(hashes: dict[str, Any]) -> None:
    """The restart of the first guess was given back, the relaunch charged, the bad host avoided."""
    state = _recorded("node_death")
    (incident,) = state.incidents.by_number.values()
    assert [(one.action, one.state) for one in incident.actions] == [
        (ladder.RESTART_PROCESSES, "superseded"),
        (ladder.RELAUNCH_NODE, "done"),
    ]
    assert (state.incidents.restarts, state.incidents.relaunches) == (0, {"worker-2": 1})
    assert [member.node for member in state.world.worlds["worker"].members] == [
        "worker-0-0",
        "worker-1-0",
        "worker-2-1",
    ]
    assert list(state.hosts.hosts) == ["host-of-worker-2-0"]


def test_the_story_of_a_failed_job(hashes: dict[str, Any]) -> None:
    """The job failed with the user's error as root, though a peer's cascade and two masters' deaths came between."""
    state = _recorded("failed_job_with_take_over")
    assert state.job.state == "failed"
    assert "ValueError: bad batch" in state.job.root
    assert (state.token, state.incidents.restarts) == (3, 1)
    assert [one.state for one in state.incidents.by_number.values()] == ["closed", "fatal"]
    assert isinstance(state.job, job.JobSlice)


def test_the_story_of_what_people_asked(hashes: dict[str, Any]) -> None:
    """The sizes are the last ones asked for, nobody failed, and who left did so by plan."""
    state = _recorded("asked_by_people")
    assert (state.job.state, state.job.reason, state.job.sizes) == ("stopping", "home", {"worker": (1, 1)})
    assert state.job.spec.group("worker").nodes_max == 1
    assert (state.incidents.number, state.world.worlds["worker"].generation) == (0, 5)
    assert {name: node.released for name, node in state.nodes.nodes.items()} == {
        "worker-0-0": "",
        "worker-1-1": "scaled down",
    }


def test_the_story_of_what_was_saved(hashes: dict[str, Any]) -> None:
    """Committed is what was due, then what memory held as a worker died; the copy of a dead node's part is being written."""
    state = _recorded("saved_and_restored")
    kept = state.checkpoints.of("worker")
    assert kept.committed == [(1, 10), (1, 26)]
    assert kept.order is not None
    assert (kept.order.generation, kept.order.step, kept.order.writers) == (2, 40, {"worker-0-0": (0, 1)})
    assert (state.checkpoints.failing, state.checkpoints.failures) == ({}, 2)
    assert list(state.checkpoints.replicas) == ["worker-0-0"]
    assert (state.world.worlds["worker"].generation, state.world.worlds["worker"].resume_step) == (3, 40)
    assert kept.restored == ["worker-0-0"]

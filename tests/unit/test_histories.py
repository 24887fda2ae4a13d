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

from dlrover_core.data.cut import Place
from dlrover_core.data.cut import pack as pack_cut
from dlrover_core.data.ranges import Ranges
from dlrover_core.diagnosis import ladder
from dlrover_core.job import (
    checkpoints,
    checks,
    clusters,
    incidents,
    job,
    leases,
    nodes,
    operations,
    progress,
    shards,
    silence,
    world,
)
from dlrover_core.job.state import CODEC, JobState, fold
from dlrover_core.kernel.state import digest, pack, unpack
from dlrover_core.rules.model import MODEL
from dlrover_core.spec import GroupSpec

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


def checked() -> Drive:
    """Four nodes are checked in pairs; one fails with whoever works with it, in two rounds; its successor is checked."""
    drive = Drive(numbered=True, nodes_max=4, nproc=1, precheck="full")

    def answer() -> None:
        while (check := drive.state.checks.running.get("worker")) is not None:
            number, round_ = check.number, check.round
            for group in check.groups:
                names = [check.members[place] for place in group]
                ill = len(names) > 1 and "worker-2-0" in names
                for name in names:
                    drive.say(checks.ReportCheck(name, number, round_, not ill, took_us=10**6, alone_us=10**6))

    for index in range(4):
        drive.join(f"worker-{index}-0")
    answer()
    drive.observe("worker-2-0", "gone")
    drive.join("worker-2-1", "h9")
    answer()
    return drive.run(1)


def peers_that_move() -> Drive:
    """Rollouts are called by trainers: one dies and has its ports again, the other comes back elsewhere; masters change."""
    groups = (
        GroupSpec("trainer", uses=("rollout",)),
        GroupSpec("rollout", nodes_min=2, nodes_max=2, uses=("trainer",)),
    )
    drive = Drive(numbered=True, groups=groups)
    for node in list(drive.state.nodes.nodes):
        drive.observe(node, "running")
        drive.say(nodes.ReportJoined(node, f"host-of-{node}", node, 1))
        drive.offer(node)
        drive.say(clusters.OfferPorts(node, f"host-of-{node}", 21_000, 1))
    for current in list(drive.state.world.worlds.values()):
        for member in current.members:
            drive.say(world.ReportStarted(member.node, current.generation))
    for node, successor, host in (("rollout-0-0", "rollout-0-1", "h0"), ("rollout-1-0", "rollout-1-1", "h9")):
        drive.observe(node, "failed", -9, "preempted")
        drive.observe(node, "gone")
        drive.take_over()
        drive.observe(successor, "running", host=host)
        drive.say(nodes.ReportJoined(successor, host, successor, 1))
        drive.say(clusters.OfferPorts(successor, host, 21_000, 1))
    return drive


def several_sets() -> Drive:
    """Chief and workers are one world, rollouts one each, an evaluator may fail: a rollout dies, a worker, the evaluator."""
    drive = Drive(
        numbered=True,
        groups=(
            GroupSpec("chief", set="train", uses=("rollout",)),
            GroupSpec("worker", 2, 2, set="train"),
            GroupSpec("rollout", 2, 2, coupling="each", ends=False, store=False),
            GroupSpec("evaluator", ends=False, critical=False, max_restarts=0),
        ),
    )

    def begin(name: str) -> None:
        current = drive.state.world.worlds[name]
        for member in current.members:
            drive.say(world.ReportStarted(member.node, current.generation))
            drive.offer(member.node)
        if name == "train":
            drive.say(progress.ReportFirstStep(current.members[0].node, current.generation, 7, told=True))

    def dies(node: str) -> None:
        current = drive.state.world.of(node)
        member = current.member(node)
        assert member is not None
        drive.say(incidents.ReportExit(node, current.generation, member.first_rank, 1, error="ValueError: bad batch"))

    for node in list(drive.state.nodes.nodes):
        drive.observe(node, "running")
        drive.join(node)
    for name in list(drive.state.world.worlds):
        begin(name)
    drive.wait(20)
    dies("rollout-1-0")
    begin("rollout-1")
    drive.do(incidents.NoteUsed("rollout-1", 2))
    drive.take_over()
    dies("worker-1-0")
    begin("train")
    dies("evaluator-0-0")
    drive.say(world.ReportStopped("evaluator-0-0", 1))
    drive.say(nodes.ReportLeft("evaluator-0-0"))
    drive.observe("evaluator-0-0", "gone")
    for node in ("chief-0-0", "worker-0-0", "worker-1-0"):
        drive.say(world.ReportFinished(node, 2))
    return drive


def suspended_without_nodes() -> Drive:
    """A job pauses at a boundary; masters die; its nodes go once all is written; it goes on, and is suspended again."""
    drive = Drive(numbered=True, nodes_max=2, nproc=1).up()
    drive.say(checkpoints.ReportKeeping("worker-0-0", 1, "file:///ckpts", 2, 10, 3, True, 1 << 30, 2))
    drive.do(job.SuspendJob("the night", keep_nodes=False))
    members = ("worker-0-0", "worker-1-0")
    for node in members:
        drive.say(checkpoints.ReportArmed(node, 1))
    drive.take_over()
    for node in members:
        drive.say(checkpoints.ReportHeld(node, 1, (12,), 1))
    for node in members:
        drive.say(world.ReportStopped(node, 1, 12))
        drive.say(checkpoints.ReportHeld(node, 1, (12,)))
    drive.take_over()
    drive.do(checkpoints.CommitCheckpoint("worker", 1, 12, 2, 1 << 30, 700_000))
    for node in members:
        drive.say(nodes.ReportLeft(node))
        drive.observe(node, "gone")
    drive.wait(30_000)
    drive.take_over()
    drive.do(job.ResumeJob("the day"))
    for node in ("worker-0-1", "worker-1-1"):
        drive.observe(node, "running")
        drive.join(node)
    drive.run(13)
    drive.do(job.SuspendJob("the night", keep_nodes=False, lose=True))
    return drive


def consumed() -> Drive:
    """A job with data: commits and restores carry cuts, a roll-back trains samples again, a boundary has a cut."""
    drive = Drive(numbered=True, nodes_max=2, nproc=1).up()
    members = ("worker-0-0", "worker-1-0")
    drive.say(shards.RegisterDataset("worker-0-0", 1, "train", 100, 7, "shuffle", "f00d", 3, 4, "cursor"))
    keeping = checkpoints.ReportKeeping("worker-0-0", 1, "file:///ckpts", 2, 10, 3, True, 1 << 30, 1)
    drive.say(keeping)
    drive.say(checkpoints.ReportRestored("worker-0-0", 1, 0, checkpoints.NOTHING, 900))

    def cut(step: int) -> bytes:
        return pack_cut((Place("train", step * 4 // 100, step * 4 % 100, "f00d"),))

    drive.do(checkpoints.CommitCheckpoint("worker", 1, 10, 2, 1 << 30, 700_000, (cut(10),)))
    drive.exit("worker-1-0", 1, -9, step=27)
    drive.say(checkpoints.ReportHeld("worker-0-0", 1, (24, 26), 0, (), cut(26)))
    drive.say(keeping._replace(generation=2))
    drive.say(checkpoints.ReportRestored("worker-0-0", 2, 10, checkpoints.STORAGE, 80_000, (), 1, cut(10)))
    drive.say(checkpoints.ReportRestored("worker-1-0", 2, 10, checkpoints.STORAGE, 90_000, (), 1, cut(10)))
    drive.run(11)
    drive.take_over()
    drive.do(job.SuspendJob("the night", keep_nodes=False))
    for node in members:
        drive.say(checkpoints.ReportArmed(node, 1))
    for node in members:
        drive.say(checkpoints.ReportHeld(node, 2, (30,), 1, (), cut(30)))
    return drive


def leased() -> Drive:
    """A job whose workers keep their own pace: a recall, a dead worker, a dead node, a take-over."""
    drive = Drive(numbered=True, nodes_max=2, nproc=1).up()
    drive.say(shards.RegisterDataset("worker-1-0", 1, "eval", 100, 7, "shuffled", "f00d", 2, 0, shards.LEASE))

    def hear(node: str, aim: int, acked: tuple[int, int], recall: int = 0, yielded: tuple[int, int] = (0, 0)) -> None:
        said = (Ranges([acked]).pack(), recall, Ranges([yielded]).pack())
        drive.do(leases.HearLease(node, "eval", aim, 4, 20_000, *said, 4))

    hear("worker-0-0", 150, (0, 0))
    for _ in range(8):
        hear("worker-1-0", 150, (0, 0))
    drive.do(leases.RecallLease("worker-1-0", "eval", 40, "worker-0-0"))
    hear("worker-1-0", 0, (50, 60), drive.state.seq, (170, 200))
    hear("worker-0-0", 150, (0, 20))
    drive.take_over()
    drive.say(leases.ReportRepeated("worker-0-0", "eval", Ranges([(20, 24)]).pack(), "rank 0 ended"))
    drive.exit("worker-1-0", 1, -9, step=27)
    drive.observe("worker-1-0", "gone", 137, "killed")
    return drive


def leased_to_a_model() -> Drive:
    """Leases that are restored with a model: a rank dies, its words are void, and the next generation says where it goes on."""
    drive = Drive(numbered=True, nodes_max=2, nproc=1).up()
    drive.say(shards.RegisterDataset("worker-0-0", 1, "train", 100, 7, "shuffled", "f00d", 2, 0, shards.MODEL_LEASE))

    def hear(node: str, generation: int, acked: tuple[int, int]) -> None:
        said = (Ranges([acked]).pack(), 0, Ranges().pack())
        drive.do(leases.HearLease(node, "train", 60, 4, 20_000, *said, 4, generation))

    drive.say(leases.RestoreLeases("worker-0-0", 1, "train", 0, 0, Ranges().pack()))
    hear("worker-0-0", 1, (0, 0))
    hear("worker-1-0", 1, (0, 0))
    hear("worker-0-0", 1, (0, 30))
    drive.exit("worker-1-0", 1, -9, step=27)
    hear("worker-0-0", 1, (30, 40))
    drive.take_over()
    drive.run(11)
    drive.say(leases.RestoreLeases("worker-0-0", 2, "train", 1, 10, Ranges([(0, 20), (50, 60)]).pack()))
    hear("worker-1-0", 2, (0, 0))
    return drive


def poisoned() -> Drive:
    """The same sample ends a worker twice and is quarantined; a range is suspected; a master dies in between."""
    drive = Drive(numbered=True, nodes_max=2, nproc=1, max_restarts=4).up()
    bad = "Traceback (most recent call last):\nValueError: bad sample"
    for work in ("fetch 0 512 513 17 8 train", "fetch 0 512 513 17 8 train", "step 1 64 80 -1 8 train"):
        drive.exit("worker-1-0", 1, 1, bad, work=work)
        drive.run(2)
        drive.take_over()
    return drive


STORIES: dict[str, Callable[[], Drive]] = {
    one.__name__: one
    for one in (
        worker_death,
        node_death,
        failed_job_with_take_over,
        asked_by_people,
        saved_and_restored,
        peers_that_move,
        checked,
        several_sets,
        suspended_without_nodes,
        consumed,
        leased,
        leased_to_a_model,
        poisoned,
    )
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


def test_the_story_of_a_job_that_gave_its_nodes_back(hashes: dict[str, Any]) -> None:
    """It went on from what was written, no budget was charged, and it is suspended for the second time."""
    state = _recorded("suspended_without_nodes")
    assert (state.job.state, state.job.freed, state.incidents.number) == ("suspended", True, 0)
    assert state.world.worlds["worker"].resume_step == 12
    assert state.incidents.relaunches == {}


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


def test_the_story_of_peers_that_move(hashes: dict[str, Any]) -> None:
    """Every place is named once, under its living node; the trainers' generation is the first still."""
    state = _recorded("peers_that_move")
    assert state.clusters.holders == {
        "trainer-0": "trainer-0-0",
        "rollout-0": "rollout-0-1",
        "rollout-1": "rollout-1-1",
    }
    version, text = state.clusters.told(("rollout",))
    assert (version, clusters.listed(text)["rollout"]) == (8, {"0": ["h0:21000"], "1": ["h9:21000"]})
    assert state.world.worlds["trainer"].generation == 1


def test_the_story_of_several_sets(hashes: dict[str, Any]) -> None:
    """Each set has its own generations and budgets; the evaluator was given up, and the job succeeded with the trainers."""
    state = _recorded("several_sets")
    generations = {name: one.generation for name, one in state.world.worlds.items()}
    assert generations == {"train": 2, "rollout-0": 1, "rollout-1": 2, "evaluator": 1}
    assert {name: one.restarts for name, one in state.incidents.by_set.items()} == {"rollout-1": 1, "train": 1}
    assert (state.job.state, list(state.job.given_up)) == ("succeeded", ["evaluator"])
    assert [one.node for one in state.world.worlds["train"].members] == ["chief-0-0", "worker-0-0", "worker-1-0"]
    assert state.world.worlds["rollout-0"].store == ""


def test_the_story_of_data(hashes: dict[str, Any]) -> None:
    """What was consumed, and what was trained again after the roll-back."""
    ledger = _recorded("consumed").shards.ledgers["worker"]
    assert ledger.place("train")[1:3] == (1, 20)
    assert ledger.datasets["train"].again == 4 * (26 - 10)
    assert [one.state for one in ledger.lineage.known] == [(1, 10), (2, 30)]
    assert ledger.broken == 0


def test_the_story_of_leases(hashes: dict[str, Any]) -> None:
    """What was acknowledged stays so, what was given back or was a dead node's is free, and repetitions are counted."""
    one = _recorded("leased").leases.of("worker")["eval"]
    assert one.acked == ((0, 20), (50, 60))
    assert (one.lease("worker-1-0").spans, one.again, one.returns) == ((), 114, 3)
    assert not list(one.check())


def test_the_story_of_a_model_that_leases(hashes: dict[str, Any]) -> None:
    """What the restored state was trained on is used, and all else was free again as the next generation began."""
    one = _recorded("leased_to_a_model").leases.of("worker")["train"]
    assert (one.acked, one.generation, one.again) == (((0, 20), (50, 60)), 2, 10)
    assert [node for node, lease in one.held.items() if lease.spans] == ["worker-1-0"]
    assert one.free[-1][1] == 200
    assert not list(one.check())

"""Leased samples in real jobs: workers on two nodes draw them at their own paces, and some die."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from commands import dlrover
from running import SCRIPTS, Job, eventually

from dlrover_core.data.permutation import Order
from dlrover_core.data.ranges import Ranges

LEASING = str(SCRIPTS / "leasing.py")
LIMIT_S = 110.0
RAISES, KILLS = 13, 29
"""As in the script."""
pytestmark = pytest.mark.timeout(int(LIMIT_S) + 60)


def lines(folder: Path, rank: int | None = None) -> list[str]:
    """What ranks wrote down; a line that a kill cut off is none."""
    found = sorted(folder.glob(f"used-{'*' if rank is None else rank}-*"))
    return [line for path in found for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def used(folder: Path, rank: int | None = None) -> Counter[int]:
    """How often each index was used."""
    return Counter(int(one) for line in lines(folder, rank) if line != "end\n" for one in line.split())


def shown(job: Job) -> dict[str, Any]:
    """What `dlrover data` says of the dataset."""
    (row,) = json.loads(job.dlrover("data", "--json"))
    return dict(row)


@pytest.mark.parametrize(
    "loaders", [pytest.param(0, marks=pytest.mark.nightly(reason="loader processes stand for it in make test")), 2]
)
def test_each_index_once_and_the_fast_one_more(tmp_path: Path, loaders: int) -> None:
    """Nobody dies: each index is used once, whatever the loader reads ahead; the slow worker leaves most of them to the other."""
    size = 240
    launch = ("--local-nodes", "2", "--nproc-per-node", "1", LEASING, str(size), str(loaders), "4", "0.02,0.2")
    with Job(tmp_path, *launch) as job:
        assert job.ended(LIMIT_S) == 0
        assert used(tmp_path) == Counter(range(size))
        assert lines(tmp_path).count("end\n") == 2
        assert sum(used(tmp_path, 0).values()) > sum(used(tmp_path, 1).values())
        row = shown(job)
    assert (row["used"], row["held"], row["free"], row["again"], row["finished"]) == (size, 0, 0, 0, True)


@pytest.mark.nightly
def test_poison_samples_are_found_and_all_others_are_used(tmp_path: Path) -> None:
    """One cannot be fetched, by a loader process; one kills its worker in the batch, which is halved. The short form is in
    tests/unit/test_leased_dataset.py.
    """
    launch = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "3", LEASING, "120", "1", "4", "0.01")
    with Job(tmp_path, *launch, env={"POISON": "1"}) as job:
        assert job.ended(LIMIT_S) == 0, job.said()[-2000:]
        found = {one["fields"]["sample"]: one["fields"]["signature"] for one in job.events("RangeQuarantined")}
        row = shown(job)
    assert found == {RAISES: "exception.ValueError", KILLS: "exit.sigkill"}
    assert set(used(tmp_path)) == set(range(120)) - found.keys()
    assert (row["finished"], row["quarantined"]) == (True, [RAISES, KILLS])


def test_a_killed_worker_and_a_killed_node(tmp_path: Path) -> None:
    """Nodes without torch, each a world of its own. Everything is used at least once; what is used twice was told.

    A death restarts nobody else, and nobody hears of an end while the dead one's samples are not used.
    """
    size, paces = 300, "0.05,0.05,0.1"
    (tmp_path / "job.toml").write_text(f"""
[groups.worker]
command = [{sys.executable!r}, {str(SCRIPTS / "leasing_plain.py")!r}, "{size}", "{paces}"]
framework = "none"
nodes = 3
processes = 1
coupling = "each"
relaunches = 3
""")
    with Job(tmp_path, "--job", "job.toml") as job:
        eventually(lambda: len(lines(tmp_path, 1)) >= 8 and len(lines(tmp_path, 1)) % 4 == 2, "half a shard", LIMIT_S)
        (victim,) = tmp_path.glob("used-1-*")
        os.kill(int(victim.name.rpartition("-")[2]), signal.SIGKILL)
        eventually(lambda: len(list(tmp_path.glob("used-1-*"))) >= 2 or None, "its next life", LIMIT_S)
        eventually(lambda: len(lines(tmp_path, 2)) >= 8 and len(lines(tmp_path, 2)) % 4 == 2, "half a shard", LIMIT_S)
        job.one("dlrover-agent", "--node worker-2-0").kill()
        assert job.ended(LIMIT_S) == 0
        found, row = used(tmp_path), shown(job)
        told = job.events("LeaseReturned")
    assert set(found) == set(range(2 * size))
    assert row["finished"]
    nodes = {one["fields"]["node"] for one in told if one["fields"]["repeated"]}
    assert nodes
    assert nodes <= {"worker-1-0", "worker-2-0"}
    again = Ranges(row["repeated"])
    orders = [Order(size, 7, epoch) for epoch in range(2)]
    untold = [
        at
        for at in range(2 * size)
        if at not in again and found[at // size * size + orders[at // size].index(at % size)] > 1
    ]
    assert not untold
    assert len(list(tmp_path.glob("used-0-*"))) == 1


def test_a_node_that_leaves_gives_back_exactly_what_it_has_not_used(tmp_path: Path) -> None:
    """It is drained: others use the rest of its lease, and at most the shard that its worker had in hand is used twice."""
    size = 200
    (tmp_path / "job.toml").write_text(f"""
[groups.worker]
command = [{sys.executable!r}, {str(SCRIPTS / "leasing_plain.py")!r}, "{size}", "0.05,0.05"]
framework = "none"
nodes = 2
processes = 1
coupling = "each"
relaunches = 1
""")
    with Job(tmp_path, "--job", "job.toml") as job:
        eventually(lambda: len(lines(tmp_path, 1)) >= 10, "some shards", LIMIT_S)
        job.dlrover("drain", "worker-1")
        assert job.ended(LIMIT_S) == 0
        found, row = used(tmp_path), shown(job)
        told = [one["fields"] for one in job.events("LeaseReturned")]
    assert row["finished"]
    given = [one for one in told if one["spans"] and one["node"] == "worker-1-0" and "leaves" in one["why"]]
    assert [bool(one["repeated"]) for one in given] == [False]
    assert set(found) == set(range(2 * size))
    assert row["again"] <= 4
    assert sum(found.values()) <= 2 * size + row["again"]


@pytest.mark.parametrize(
    ("nodes", "loaders"), [pytest.param(1, 0), pytest.param(2, 2, marks=pytest.mark.nightly)], ids=["one", "two"]
)
def test_a_model_is_trained_once_on_each_sample_though_a_rank_is_killed(
    tmp_path: Path, nodes: int, loaders: int
) -> None:
    """With FlashCheckpoint and ranks at different paces: what came after the restored round is trained again, and no more."""
    size, launch = 60, ("--local-nodes", str(nodes), "--nproc-per-node", str(2 // nodes), "--max-restarts", "2")
    script = str(SCRIPTS / "leasing_model.py")
    with Job(tmp_path, *launch, script, str(size), f"file://{tmp_path}/ckpt", str(loaders), "0.01,0.03", "1:4") as job:
        assert job.ended(LIMIT_S) == 0, job.said()[-3000:]
        told, row = [one["fields"] for one in job.events("LeasesRestored")], shown(job)
        saved = [one["fields"] for one in job.events("LeasesSaved")]
        proof = json.loads(dlrover(["data", "verify", job.name, "--json", "--state-dir", str(job.state)]).stdout)
    (leased,) = proof["leased"]
    assert (proof["proved"], leased["samples"], leased["resumed"], leased["findings"]) == (True, 2 * size, 1, [])
    assert [int(times) for times in (tmp_path / "trained").read_text().split()] == [2] * size
    assert [(one["generation"], bool(one["step"])) for one in told] == [(1, False), (2, True)]
    assert max(saved, key=lambda one: (one["generation"], one["step"]))["samples"] == 2 * size
    began = {path.read_text().split()[2] for path in tmp_path.glob("began-*")}
    assert began == {"0", str(Ranges.unpack(bytes.fromhex(told[1]["spans"])).count)}
    assert (row["used"], row["held"], row["finished"], row["assignment"]) == (2 * size, 0, True, "lease-model")


def test_a_restore_that_says_other_samples_than_were_saved_ends_its_job_with_both_numbers(tmp_path: Path) -> None:
    """The state lies on storage and its log has the witness: no rank goes on, and the job says why it ended."""
    launch = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(SCRIPTS / "leasing_forgets.py"))
    with Job(tmp_path, *launch, f"file://{tmp_path}/ckpt") as job:
        eventually(lambda: job.events("LeasesSaved") or None, "the state on storage", LIMIT_S)
        job.one("worker-1").kill()
        assert job.ended(LIMIT_S) not in (0, None)
        told = [one["fields"]["generation"] for one in job.events("LeasesRestored")]
        (saved,) = [one["fields"] for one in job.events("LeasesSaved")]
        report = job.dlrover("report")
    assert (told, saved["samples"]) == ([1], 8)
    assert {path.name for path in tmp_path.glob("began-*")} == {"began-0-0", "began-1-0"}, "ranks went on"
    words = "step 1 of generation 1 was trained on 8 samples by the words of all its ranks when it was saved, and now"
    assert words in job.said()
    assert "dataset 'train'" in report, report

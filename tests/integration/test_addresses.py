"""Addresses as news, with real processes: who dies restarts nobody of another group, and is found again where it is."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from running import WITHOUT_TORCH, Job, eventually

SCRIPTS = Path(__file__).parent / "scripts" / "roles"
JOB = """
preload = []

[groups.trainer]
program = "{scripts}/trainer.py"
framework = "none"
nodes = 2

[groups.rollout]
program = "{scripts}/rollout.py"
framework = "none"
nodes = 2
coupling = "each"
uses = ["trainer"]
ends = false

[groups.evaluator]
program = "{scripts}/evaluator.py"
framework = "none"
uses = ["trainer"]
critical = false
max_restarts = 0
relaunches = 0
"""


class Told:
    """What the workers of the job have written down."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def lines(self, who: str, what: str) -> list[dict[str, Any]]:
        """Every line with this field of one place's workers, the oldest first."""
        path = self._folder / who
        text = path.read_text() if path.exists() else ""
        return [line for line in map(json.loads, text[: text.rfind("\n") + 1].splitlines()) if what in line]

    def pids(self, who: str) -> list[int]:
        """Of its workers."""
        return [line["begins"] for line in self.lines(who, "begins")]

    def until_begun(self, who: str, times: int) -> int:
        """Its worker has been started so often; the pid of the newest."""
        return int(eventually(lambda: self.pids(who)[times - 1 : times] or None, f"start {times} of {who}")[0])

    def until_met(self, who: str, trainers: set[int]) -> None:
        """This rollout worker has been answered by each of these trainers."""
        eventually(
            lambda: trainers <= {line["met"] for line in self.lines(who, "met")} or None, f"{who} meets {trainers}"
        )

    def versions(self, who: str) -> list[tuple[int, dict[str, list[str]]]]:
        """What it was told, version after version: the addresses of trainers by place."""
        return [(line["version"], line["trainers"]) for line in self.lines(who, "version")]


def test_three_groups_find_each_other_whoever_dies(tmp_path: Path) -> None:
    """A rollout worker comes back alone, and no trainer makes a step twice. A dead trainer restarts the trainers; a dead agent of

    theirs has a successor at the same ports. Rollout workers go on and call whoever is there. The job does without its evaluator.
    """
    (tmp_path / "job.toml").write_text(JOB.format(scripts=SCRIPTS))
    told, trainers, rollouts = Told(tmp_path), ("trainer0", "trainer1"), ("rollout0", "rollout1")
    with Job(tmp_path, "--job", str(tmp_path / "job.toml"), env=WITHOUT_TORCH) as job:
        first = {who: told.until_begun(who, 1) for who in (*trainers, *rollouts)}
        for who in rollouts:
            told.until_met(who, {first[one] for one in trainers})
        addresses = told.versions("rollout0")[-1][1]
        assert sorted(addresses) == ["0", "1"]

        os.kill(first["rollout0"], signal.SIGKILL)
        told.until_begun("rollout0", 2)
        told.until_met("rollout0", {first[one] for one in trainers})
        assert {who: told.pids(who) for who in (*trainers, "rollout1")} == {
            who: [first[who]] for who in (*trainers, "rollout1")
        }

        versions = told.versions("rollout1")
        os.kill(first["trainer0"], signal.SIGKILL)
        second = {told.until_begun(who, 2) for who in trainers}
        for who in rollouts:
            told.until_met(who, second)
        assert told.versions("rollout1") == versions, "workers that start again on their node are no news"

        job.one("dlrover-agent", "--node trainer-1-0").kill()
        third = {told.until_begun(who, 3) for who in trainers}
        for who in rollouts:
            told.until_met(who, third)
        later = told.versions("rollout1")[len(versions) :]
        assert [one for one in later if "1" not in one[1]], "it is not named while nobody is there"
        assert later[-1][1] == addresses, "on its host it has the ports of its place again"

        job.finish()
        assert job.ended() == 0
        assert [len(told.pids(who)) for who in (*trainers, *rollouts)] == [3, 3, 2, 1]
        assert [one["fields"]["set"] for one in job.events("SetGivenUp")] == ["evaluator"]
        worlds = [one["fields"]["group"] for one in job.events("WorldFormed")]
        assert sorted(worlds) == ["evaluator", "rollout-0", "rollout-0", "rollout-1", *["trainer"] * 3]
        assert job.left() == []


TASKS = """
preload = []

[groups.ps]
program = "{scripts}/task.py"
framework = "dlrover_adapters.plain.tf_config"
store = false
nodes = 2
coupling = "each"
uses = ["ps", "worker"]
ends = false
env = {{ DLROVER_TF_CLUSTER = "ps=2,worker=1" }}

[groups.worker]
program = "{scripts}/task.py"
framework = "dlrover_adapters.plain.tf_config"
store = false
nodes = 1
coupling = "each"
uses = ["ps", "worker"]
env = {{ DLROVER_TF_CLUSTER = "ps=2,worker=1" }}
"""


@pytest.mark.nightly(reason="what a task is told, and when, is tried by day in tests/unit/test_tf_config.py")
def test_tasks_of_tensorflow_find_each_other(tmp_path: Path) -> None:
    """Each has one TF_CONFIG, and listens where it says though its agent keeps a port; one that comes back has the same again."""
    (tmp_path / "job.toml").write_text(TASKS.format(scripts=SCRIPTS))
    told, everybody = Told(tmp_path), ("ps0", "ps1", "worker0")
    with Job(tmp_path, "--job", str(tmp_path / "job.toml"), env=WITHOUT_TORCH) as job:
        first = {who: told.until_begun(who, 1) for who in everybody}
        told.until_met("worker0", {first["ps0"], first["ps1"]})
        configs = {who: told.lines(who, "told")[0]["told"] for who in everybody}
        assert len({json.dumps(one["cluster"]) for one in configs.values()}) == 1
        assert {kind: len(those) for kind, those in configs["ps0"]["cluster"].items()} == {"ps": 2, "worker": 1}
        assert configs["ps1"]["task"] == {"type": "ps", "index": 1}

        os.kill(first["ps1"], signal.SIGKILL)
        told.until_begun("ps1", 2)
        os.kill(first["worker0"], signal.SIGKILL)
        told.until_begun("worker0", 2)
        told.until_met("worker0", {first["ps0"], told.pids("ps1")[1]})
        assert told.lines("ps1", "told")[1]["told"] == configs["ps1"]
        assert told.pids("ps0") == [first["ps0"]]
        job.finish()
        assert job.ended() == 0
        assert job.left() == []

"""The examples of examples/kubernetes: `dlrover-run` in other people's pods, with the environment that these get."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from hosts_net import Host, Net, best
from running import BIN, WITHOUT_TORCH, Process, begin, eventually

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
TOKEN = "of-the-secret"
BOUND_S = 90.0
TRAIN = """\
import os, pathlib, threading
folder = pathlib.Path(os.environ["FOLDER"])
(folder / f"rank-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}-{os.getpid()}").touch()
while not (folder / "end").exists():
    threading.Event().wait(0.05)
"""

pytestmark = pytest.mark.timeout(200)


class Example(NamedTuple):
    """What a file makes in a cluster, as the controllers of its kind do it.

    pods:    how many
    spec:    of the container
    env:     variables that the controller adds
    address: the name of the pod of index 0
    """

    pods: int
    spec: dict[str, Any]
    env: list[dict[str, Any]]
    address: str


def read(kind: str) -> Example:
    """Read an example."""
    made = {one["kind"]: one for one in yaml.safe_load_all((EXAMPLES / f"{FILES[kind]}.yaml").read_text())}
    one = made[kind]
    name, spec = one["metadata"]["name"], one["spec"]
    if kind == "TrainJob":  # as pkg/runtime/framework/plugins/torch of Kubeflow's trainer does
        trainer, address = spec["trainer"], f"{name}-node-0-0.{name}"
        env = [
            {"name": "PET_NNODES", "value": str(trainer["numNodes"])},
            {"name": "PET_NPROC_PER_NODE", "value": str(trainer["numProcPerNode"])},
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
            {"name": "PET_MASTER_ADDR", "value": address},
            {"name": "PET_MASTER_PORT", "value": "29500"},
        ]
        assert not {each["name"] for each in env} & {each["name"] for each in trainer["env"]}, "the Trainer's own"
        return Example(trainer["numNodes"], trainer, env, address)
    if kind == "JobSet":
        (replicated,) = spec["replicatedJobs"]
        address = f"{name}-{replicated['name']}-0-0.{name}"
        spec = replicated["template"]["spec"]
    else:
        address = f"{name}-0.{spec['template']['spec']['subdomain']}"
        service = made["Service"]
        assert service["metadata"]["name"] == spec["template"]["spec"]["subdomain"]
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", spec["parallelism"])
    (container,) = spec["template"]["spec"]["containers"]
    by_job = {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
    return Example(spec["completions"], container, [by_job], address)


FILES = {"TrainJob": "trainjob", "JobSet": "jobset", "Job": "indexed-job"}


def environment(example: Example, index: int, host: str) -> dict[str, str]:
    """The variables of a pod."""
    fields = {INDEX: str(index), "spec.nodeName": host}
    found: dict[str, str] = {}
    for one in [*example.spec["env"], *example.env]:
        source = one.get("valueFrom") or {}
        if "fieldRef" in source:
            found[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            assert source["secretKeyRef"] == {"name": "digits-token", "key": "token"}
            found[one["name"]] = TOKEN
        else:
            found[one["name"]] = one["value"]
    return found


class Pod(Host):
    """A host that runs the command of an example, with its variables alone."""

    def begin(self, command: list[str], variables: Mapping[str, str]) -> None:
        """Run it."""
        (self.folder / "train.py").write_text(TRAIN)
        told = ["--local-addr", self.address] if not self.net.prefixes[self.name] else []
        line = [*self.net.prefixes[self.name], str(BIN / command[0]), *told, *command[1:]]
        born = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "FOLDER": str(self.folder), **WITHOUT_TORCH}
        born = {**born, "XDG_STATE_HOME": str(self.folder), **variables}
        self.process = begin(line, born, self.folder, self.folder / "out-0", self.folder / "err-0")

    def ranks(self) -> dict[int, str]:
        """What ranks have begun here: by process id, which and of how many."""
        found = [one.name.removeprefix("rank-").rpartition("-") for one in self.folder.glob("rank-*")]
        return {int(pid): name for name, _, pid in found}


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    """Hosts with addresses of their own."""
    with best() as made:
        yield made


@pytest.mark.parametrize("kind", FILES)
def test_workers_restart_in_the_same_pods(kind: str, net: Net, tmp_path: Path) -> None:
    """The pods meet by the variables alone; a killed worker is followed by a new world in the same pods; all exit with 0."""
    example = read(kind)
    assert example.spec["command"] == ["dlrover-run", "train.py"]
    with Pod(net, "a", tmp_path) as a, Pod(net, "b", tmp_path) as b:
        for index, pod in enumerate((a, b)):
            variables = environment(example, index, f"host-{index}")
            assert variables["PET_MASTER_ADDR"] == example.address
            # Nothing here resolves the pod's name; on loopback the port must be free.
            variables |= {"PET_MASTER_ADDR": a.address, "PET_MASTER_PORT": str(net.port)}
            pod.begin(example.spec["command"], variables)
        eventually(lambda: bool(a.ranks() and b.ranks()), "both ranks", BOUND_S)
        first = {**a.ranks(), **b.ranks()}
        assert sorted(first.values()) == ["0-of-2", "1-of-2"]
        (victim,) = b.ranks()
        Process(victim, "", "").kill()
        eventually(lambda: len({**a.ranks(), **b.ranks()}) == 4, "the next world", BOUND_S)
        assert sorted({**a.ranks(), **b.ranks()}.values()) == sorted([*first.values()] * 2)
        assert [one.process.poll() for one in (a, b) if one.process] == [None, None]
        for pod in (a, b):
            (pod.folder / "end").touch()
        assert (a.ended(), b.ended()) == (0, 0)
        assert (a.left(), b.left()) == ([], [])

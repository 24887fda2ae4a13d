"""DLRover's YAML, applied: the operator makes masters, these make pods, which train as processes; deleting leaves nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import BIN, SCRIPTS, WITHOUT_TORCH
from tools.etcd_cluster import Cluster

from dlrover_backends.fake_k8s import Ground
from dlrover_backends.fake_k8s.kubelet.client import MERGE, Denied
from dlrover_backends.k8s.elasticjob import crd, translate

BOUND_S = 90.0
NAME = "digits"
BASE = f"/apis/{translate.GROUP}/{translate.VERSION}/namespaces/train/{translate.PLURAL}"
JOBS = (translate.PLURAL, translate.GROUP)
PLURALS = ("pods", "secrets", "configmaps", "services", "serviceaccounts", "persistentvolumeclaims")
OTHERS = (("jobs", "batch"), ("roles", "rbac.authorization.k8s.io"), ("rolebindings", "rbac.authorization.k8s.io"))
POLICIES = (("networkpolicies", "networking.k8s.io"), ("poddisruptionbudgets", "policy"))


class Applied:
    """An ElasticJob of two nodes, and an operator that is a process of its own."""

    def __init__(self, ground: Ground, folder: Path) -> None:
        self.ground, self.folder = ground, folder
        self.config = ground.kubeconfig(folder / "config")
        self.operator: subprocess.Popen[bytes] | None = None

    def begin(self, *more: str) -> None:
        """Start an operator, with these words more."""
        words = (
            "k8s",
            "operator",
            "--kubeconfig",
            str(self.config),
            "--image",
            "dlrover-core:1",
            "--look",
            "0.3",
            "--lease",
            "3",
            *more,
        )
        with (self.folder / "operator.log").open("ab") as log:
            self.operator = subprocess.Popen([str(BIN / "dlrover"), *words], stdout=log, stderr=log)

    def kill(self) -> None:
        """Kill it where it stands."""
        if self.operator is not None:
            self.operator.kill()
            self.operator.wait(BOUND_S)
        self.operator = None

    def ask(self, method: str, path: str, body: Any = None) -> None:
        """One request to the API server, as an administrator."""
        self.ground.run(self.ground.client.ask(method, path, body, *((MERGE,) if method == "PATCH" else ())))

    def is_served(self) -> bool:
        """Does the API server know ElasticJobs yet?"""
        try:
            self.ask("GET", BASE)
        except Denied:
            return False
        return True

    def apply(self) -> None:
        """Apply the object: a line for bash, as DLRover's users write it."""
        line = (
            "mkdir -p $MADE && dlrover-run --network-check --auto_tunning --precheck 0 --nnodes=1:$NODE_NUM --nproc_per_node=1 "
            f"--preload none --set stop_grace_s=5 {SCRIPTS / 'until_told.py'} $MADE"
        )
        container = {"name": "main", "image": "trainer:1", "command": ["/bin/bash", "-c", line]}
        container["env"] = [{"name": "MADE", "value": str(self.folder / "made")}]  # type: ignore[assignment]
        worker = {"replicas": 2, "template": {"spec": {"restartPolicy": "Always", "containers": [container]}}}
        body = {
            "apiVersion": f"{translate.GROUP}/{translate.VERSION}",
            "kind": translate.KIND,
            "metadata": {"name": NAME},
            "spec": {
                "distributionStrategy": "AllreduceStrategy",
                "optimizeMode": "single-job",
                "replicaSpecs": {"worker": worker},
            },
        }
        self.ask("POST", BASE, body)

    def status(self) -> dict[str, Any]:
        """The object's status; empty: it has none, or is gone."""
        found = [one for one in self.ground.objects(*JOBS) if one["metadata"]["name"] == NAME]
        return dict(found[0].get("status") or {}) if found else {}

    def nodes(self) -> dict[str, Any]:
        """Pods of nodes, by the node's name."""
        found = self.ground.objects("pods", namespace="train")
        notes = [(one["metadata"].get("annotations") or {}).get("dlrover-core/node-name") for one in found]
        return {name: one for name, one in zip(notes, found, strict=True) if name}

    def ranks(self) -> set[str]:
        """Ranks that have begun, with the ids of their processes."""
        return {one.name for one in (self.folder / "made").glob("rank-*")}

    def left(self) -> dict[str, list[str]]:
        """What there is of the job, by kind; empty: nothing."""
        kinds = (*((one, "") for one in PLURALS), *OTHERS, *POLICIES, JOBS)
        found = {
            plural: [
                one["metadata"]["name"]
                for one in self.ground.objects(plural, group, "train")
                if one["metadata"]["name"].startswith(NAME)
            ]
            for plural, group in kinds
        }
        return {kind: names for kind, names in found.items() if names}

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds, and tell what all have said if it does not."""
        try:
            self.ground.until(holds, BOUND_S)
        except TimeoutError as error:
            log = self.folder / "operator.log"
            said = log.read_text(encoding="utf-8")[-3000:] if log.exists() else ""
            raise AssertionError(
                f"{what}: {error}\nstatus {self.status()}\nleft {self.left()}\noperator: {said}\n{self.printed()}"
            ) from error

    def printed(self) -> str:
        """What all pods have printed."""
        names = [one["metadata"]["name"] for one in self.ground.objects("pods", namespace="train")]
        logs = [self.ground.strike(lambda kubelet, name=name: kubelet.log("train", name)) or b"" for name in names]
        return "\n".join(f"--- {name}\n{log.decode()[-2000:]}" for name, log in zip(names, logs, strict=True))

    def runs(self) -> None:
        """Apply it, and wait until two ranks have begun and the status says so."""
        self.apply()
        self.until(lambda: len(self.ranks()) == 2, "two ranks")
        self.until(lambda: self.status().get("phase") == "Running" and self.status()["ready"] == "2/2", "it is told")


@pytest.fixture(name="job")
def made_job(tmp_path: Path) -> Iterator[Applied]:
    """A cluster of two nodes that knows ElasticJobs, and an operator."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    with Ground(2, extra={**WITHOUT_TORCH, "PATH": path}) as ground:
        job = Applied(ground, tmp_path)
        job.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd.definition())
        job.until(job.is_served, "the definition is served")
        job.begin()
        try:
            yield job
        finally:
            job.kill()


@pytest.mark.timeout(400)
def test_from_its_yaml_to_its_end(job: Applied) -> None:
    """It trains; without an operator a killed node comes back; the next operator touches nothing that runs, and tells it all."""
    job.runs()
    made = {one["metadata"]["uid"] for one in job.ground.objects("jobs", "batch")}
    job.kill()
    pod = job.nodes()["worker-1-0"]["metadata"]["name"]
    assert job.ground.strike(lambda kubelet: kubelet.oom("train", pod))
    job.until(lambda: "worker-1-1" in job.nodes(), "its successor, without an operator")
    job.until(lambda: len(job.ranks()) >= 3, "a rank on it")
    before = set(job.nodes())
    job.begin()
    job.until(lambda: "k8s.oom" in job.status().get("lastIncident", ""), "the incident is told")
    job.until(lambda: job.status()["ready"] == "2/2", "both nodes run")
    assert set(job.nodes()) == before
    assert {one["metadata"]["uid"] for one in job.ground.objects("jobs", "batch")} == made
    (job.folder / "made" / "end").touch()
    job.until(lambda: job.status().get("phase") == "Succeeded", "it ends well")
    conditions = {one["type"]: one["status"] for one in job.status()["conditions"]}
    assert conditions == {
        "Accepted": "True",
        "Running": "False",
        "Succeeded": "True",
        "Failed": "False",
        "Suspended": "False",
    }
    job.ask("DELETE", f"{BASE}/{NAME}")
    job.until(lambda: not job.left(), "nothing is left")


@pytest.mark.nightly(
    reason="deleting, scaling and pausing are tried by day in test_elasticjob_operator, with scripted masters"
)
@pytest.mark.timeout(400)
def test_sized_paused_and_deleted_while_it_runs(job: Applied) -> None:
    """`kubectl scale` adds a node, a pause that would lose what was made is refused, and deleting ends ranks and removes all."""
    job.runs()
    job.ask("PATCH", f"{BASE}/{NAME}/scale", {"spec": {"replicas": 3}})
    job.until(lambda: job.status()["ready"] == "3/3", "three nodes")
    job.ask("PATCH", f"{BASE}/{NAME}", {"spec": {"suspend": True}})
    job.until(lambda: "is lost unless" in str(job.status()["conditions"]), "what would be lost is told")
    assert job.status()["ready"] == "3/3"
    job.ask("DELETE", f"{BASE}/{NAME}")
    job.until(lambda: not job.left(), "nothing is left")
    for rank in job.ranks():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(rank.rpartition("-")[2]), 0)
            pytest.fail(f"{rank} lives")


@pytest.mark.nightly(reason="what the operator makes of the URL is tried by day in test_elasticjob_reconcile")
@pytest.mark.timeout(400)
def test_its_log_is_in_an_etcd_that_wants_certificates(job: Applied) -> None:
    """The files that the operator's URL names reach the two masters, and they are all that etcd lets in."""
    job.kill()
    with Cluster(mutual=True) as etcd:
        job.begin("--log", etcd.url(ttl="2"))
        job.runs()
        assert len([one for one in job.left()["pods"] if "-masters-" in one]) == 2
        (job.folder / "made" / "end").touch()
        job.until(lambda: job.status().get("phase") == "Succeeded", "it ends well")
        job.ask("DELETE", f"{BASE}/{NAME}")
        job.until(lambda: not job.left(), "nothing is left")

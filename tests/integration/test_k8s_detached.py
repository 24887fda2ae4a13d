"""A job of `dlrover-run --backend k8s --detach`: its masters are pods, a kubeconfig reaches them, and removing leaves nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import said
from running import BIN, SCRIPTS, WITHOUT_TORCH, eventually
from tools.etcd_cluster import Cluster

from dlrover_backends.fake_k8s import Ground, account

BOUND_S = 90.0
MADE = (
    ("pods", ""),
    ("secrets", ""),
    ("services", ""),
    ("serviceaccounts", ""),
    ("jobs", "batch"),
    ("roles", "rbac.authorization.k8s.io"),
    ("rolebindings", "rbac.authorization.k8s.io"),
    ("networkpolicies", "networking.k8s.io"),
    ("poddisruptionbudgets", "policy"),
)
"""Kinds of which a job makes objects."""


class Detached:
    """A job of two nodes of one rank each, in a cluster of processes."""

    def __init__(self, ground: Ground, folder: Path) -> None:
        self.ground, self.folder = ground, folder
        self.config = ground.kubeconfig(folder / "config")

    def says(self, command: str, *words: str, status: int | None = 0) -> str:
        """What a command prints; it must end with this status, if one is given."""
        env = {**os.environ, "KUBECONFIG": str(self.config), "DLROVER_TOKEN": ""}
        return said(command, words, env, self.folder, status)

    def start(self, *log: str) -> str:
        """Start it, with a log elsewhere than on the claim if one is named; what `dlrover-run` says."""
        where = ("--backend", "k8s", *log) if log else ("--backend", "k8s:claim=logs")
        line = ("--detach", *where, "--image", "trainer:1", "--job-id", "digits", "--nnodes", "2")
        lean = ("--preload", "none", "--set", "stop_grace_s=5", str(SCRIPTS / "until_told.py"), str(self.folder))
        return self.says("dlrover-run", *line, *lean)

    @contextlib.contextmanager
    def attached(self) -> Iterator[subprocess.Popen[str]]:
        """`dlrover attach`, once it has begun to show the job."""
        env = {**os.environ, "KUBECONFIG": str(self.config)}
        words = [str(Path(BIN) / "dlrover"), "attach", "k8s:train/digits"]
        with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                assert process.stdout is not None
                assert "attached to job digits" in process.stdout.readline()
                yield process
            finally:
                process.kill()

    def runs(self, *command: str) -> None:
        """Wait until a command says that all workers run: their files are there before the master knows."""
        eventually(lambda: "2 of 2 nodes started" in self.says(*command), "both nodes started")

    def ranks(self) -> set[str]:
        """Ranks that have begun, with the ids of their processes."""
        return {one.name for one in self.folder.glob("rank-*")}

    def masters(self) -> dict[str, Any]:
        """The masters' pods by name, the living ones."""
        found = self.ground.objects("pods", namespace="train")
        found = [one for one in found if one["metadata"]["labels"].get("dlrover-core/role") == "masters"]
        return {one["metadata"]["name"]: one for one in found if one["status"].get("phase") in {"Pending", "Running"}}

    def left(self) -> dict[str, list[str]]:
        """What there is of a job, by kind; empty: nothing."""
        found = {
            kind: [
                one["metadata"]["name"]
                for one in self.ground.objects(kind, group, "train")
                if (one["metadata"].get("labels") or {}).get("app.kubernetes.io/managed-by") == "dlrover-core"
            ]
            for kind, group in MADE
        }
        return {kind: names for kind, names in found.items() if names}

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds, and tell what pods have printed if it does not."""
        try:
            self.ground.until(holds, BOUND_S)
        except TimeoutError as error:
            raise AssertionError(f"{what}: {error}\n{self.printed()}") from error

    def printed(self) -> str:
        """What all pods have printed, for a failure's message."""
        names = [one["metadata"]["name"] for one in self.ground.objects("pods", namespace="train")]
        logs = [self.ground.strike(lambda kubelet, name=name: kubelet.log("train", name)) or b"" for name in names]
        return "\n".join(f"--- {name}\n{log.decode()[-2000:]}" for name, log in zip(names, logs, strict=True))


@pytest.fixture(name="job")
def made_job(tmp_path: Path) -> Iterator[Detached]:
    """A cluster of two nodes, with a claim."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    with Ground(2, extra={**WITHOUT_TORCH, "PATH": path}) as ground:
        claim = {"metadata": {"name": "logs"}, "spec": {"accessModes": ["ReadWriteOncePod"]}}
        kind = ground.call(lambda: ground.server.api.kind("", "v1", "persistentvolumeclaims"))
        ground.call(lambda: ground.server.api.create(kind, "train", claim))
        yield Detached(ground, tmp_path)


@pytest.mark.timeout(400)
def test_masters_may_die_and_nothing_is_left(job: Detached) -> None:
    """The leading master's pod is killed: another one goes on, no rank is restarted, and the job ends well and is removed."""
    said = job.start()
    assert "dlrover stop k8s:train/digits ends and removes it" in said
    job.until(lambda: len(job.ranks()) == 2, "two ranks")
    job.says(
        "dlrover-run", "--detach", "--backend", "k8s:claim=logs", "--image", "i", "--job-id", "digits", "x.py", status=2
    )
    job.runs("kubectl-dlrover", "status", "digits", "-n", "train")
    (first,) = job.masters()
    assert job.ground.strike(lambda kubelet: kubelet.kill("train", first))
    job.until(lambda: bool(job.masters()) and first not in job.masters(), "another master")
    (second,) = job.masters()
    job.until(lambda: job.masters().get(second, {}).get("status", {}).get("phase") == "Running", "it runs")
    with job.attached() as attached:
        (job.folder / "end").touch()
        job.until(lambda: not job.masters(), "the end")
        told = job.says("dlrover", "status", "k8s:train/digits", status=None)
        assert "has ended well" in told, told + job.printed()
        out, _ = attached.communicate(timeout=BOUND_S)
    assert attached.returncode == 0, out
    assert "of job digits goes: succeeded" in out, out  # as the nodes print it
    assert "job digits has ended well" in out, out
    assert len(job.ranks()) == 2, job.ranks()
    assert "removed" in job.says("dlrover", "stop", "k8s:digits")
    assert not job.left()


@pytest.mark.timeout(400)
def test_a_job_that_trains_is_stopped(job: Detached) -> None:
    """`dlrover stop` ends workers and removes everything; without a right it removes nothing, and tells which."""
    job.start()
    job.until(lambda: len(job.ranks()) == 2, "two ranks")
    told = job.says("dlrover", "explain", "k8s:digits")
    assert "why #" in told, told
    job.ground.user("stranger", account("train", "stranger"))
    config, job.config = job.config, job.ground.kubeconfig(job.folder / "other", "stranger")
    for command in ("status", "stop"):
        assert "verb list, resource jobs" in job.says("dlrover", command, "k8s:train/digits", status=2)
    job.config = config
    assert "job digits: stopped, and all" in job.says("dlrover", "stop", "k8s:train/digits")
    assert not job.left()
    assert "no job 'digits' has masters in namespace train" in job.says("dlrover", "status", "k8s:digits", status=3)


@pytest.mark.nightly(
    reason="two masters of one log are tried by day in test_apart_etcd, and their pods in test_k8s_masters"
)
@pytest.mark.timeout(400)
def test_masters_of_two_hosts(job: Detached) -> None:
    """With the log in etcd there are two, on different hosts: the leader dies, the other leads, and no rank restarts.

    Etcd wants a certificate of every client, and the files that the command names reach the masters.
    """
    with Cluster(mutual=True) as etcd:
        _two_masters(job, etcd)


def _two_masters(job: Detached, etcd: Cluster) -> None:
    job.start("--log", etcd.url(ttl="2"))
    job.until(lambda: len(job.ranks()) == 2, "two ranks")
    job.until(lambda: [one["status"]["phase"] for one in job.masters().values()] == ["Running"] * 2, "two masters")
    assert len({one["spec"]["nodeName"] for one in job.masters().values()}) == 2
    for _ in range(2):  # the leader is among the two
        name = min(job.masters())
        assert job.ground.strike(lambda kubelet, name=name: kubelet.kill("train", name))
        job.until(lambda name=name: name not in job.masters() and len(job.masters()) == 2, "another one")
        job.until(lambda: all(one["status"]["phase"] == "Running" for one in job.masters().values()), "it runs")
        job.runs("dlrover", "status", "k8s:digits")
    (job.folder / "end").touch()
    job.until(lambda: not job.masters(), "the end")
    assert "has ended well" in job.says("dlrover", "status", "k8s:train/digits", status=None)
    assert len(job.ranks()) == 2, job.ranks()
    job.says("dlrover", "stop", "k8s:digits")
    assert not job.left()

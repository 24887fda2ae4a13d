"""A job of `dlrover-run --backend k8s`: pods train, a container is killed, and nothing stays in the cluster."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import BIN, SCRIPTS, WITHOUT_TORCH, Job

from dlrover_backends.fake_k8s import Ground

BOUND_S = 60.0
PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"
QUICK = ("--bind", "127.0.0.1", "--set", "stop_grace_s=5", "--nnodes", "2")


@pytest.fixture(name="ground")
def made_ground() -> Iterator[Ground]:
    """Two nodes, whose pods find our commands."""
    with Ground(2, extra={"PATH": PATH}) as ground:
        yield ground


@pytest.fixture(name="light")
def made_light_ground(tmp_path: Path) -> Iterator[Ground]:
    """The same, for ranks that need no torch."""
    with Ground(2, extra={**WITHOUT_TORCH, "PATH": PATH, "FOLDER": str(tmp_path)}) as ground:
        yield ground


def pods(ground: Ground) -> dict[str, Any]:
    """Pods by their node's name in the job."""
    found = ground.objects("pods", namespace="train")
    return {one["metadata"]["annotations"].get("dlrover-core/node-name", "standby"): one for one in found}


def job_of(ground: Ground, folder: Path, *more: str, script: str = "light_steps.py") -> Job:
    """A job of two pods."""
    config = ground.kubeconfig(folder / "config")
    line = ("--backend", f"k8s:kubeconfig={config}", "--image", "trainer:1", *QUICK, *more)
    return Job(folder, *line, str(SCRIPTS / script), str(folder))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "script"),
    [
        ("light", "light_steps.py"),
        pytest.param(
            *("ground", "allreducing.py"),
            marks=pytest.mark.nightly(
                reason="ranks without torch stand for it in make test, and on hosts test_hosts.py"
            ),
        ),
    ],
)
def test_a_container_is_killed_for_memory(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, script: str
) -> None:
    """The node is another pod, training goes on, the incident has the platform's word, and at the end nothing is left."""
    ground: Ground = request.getfixturevalue(kind)
    with job_of(ground, tmp_path, script=script) as job:
        job.trains(1, beyond=3)
        pod = pods(ground)["worker-1-0"]["metadata"]["name"]
        assert ground.strike(lambda kubelet: kubelet.oom("train", pod))
        ground.until(lambda: "worker-1-1" in pods(ground), BOUND_S)
        job.trains_after(1)
        job.finish()
        assert job.ended() == 0, job.said
        told = job.dlrover("explain")
        assert "OOMKilled" in told, told
        assert any(f"host {node}" in told for node in ground.nodes), told
        assert {f"rank {rank} ends" for rank in range(2)} <= set(job.out.read_text().splitlines()), (
            "what nodes print is shown"
        )
    assert ground.objects("secrets", namespace="train") == []
    ground.until(lambda: not pods(ground), BOUND_S)


@pytest.mark.timeout(240)
def test_a_warm_pod_takes_the_place_of_a_killed_one(light: Ground, tmp_path: Path) -> None:
    """Its processes are the next incarnation's, which `dlrover explain` says; another one is kept warm, and none stays behind."""
    with job_of(light, tmp_path, "--standby", "1", script="steps.py") as job:
        job.trains(1, beyond=3)
        job.until(lambda status: status["standbys"] == 1, "a standby that waits for a name")
        assert "standbys: 1 of 1 wait" in job.dlrover("status")
        found = pods(light)
        assert set(found) == {"standby", "worker-0-0", "worker-1-0"}
        assert light.strike(lambda kubelet: kubelet.oom("train", found["worker-1-0"]["metadata"]["name"]))
        job.trains_after(1)
        assert pods(light)["worker-1-1"]["metadata"]["uid"] == found["standby"]["metadata"]["uid"]
        job.until(lambda status: status["standbys"] == 1, "another standby")
        job.finish()
        assert job.ended() == 0, job.said
        assert "a warm standby on" in job.dlrover("explain")
    assert light.objects("secrets", namespace="train") == []
    light.until(lambda: not pods(light) and not light.objects("configmaps", namespace="train"), BOUND_S)


@pytest.mark.timeout(240)
def test_a_wrong_configuration_ends_the_job_at_once(light: Ground, tmp_path: Path) -> None:
    """No relaunch is spent on what no relaunch cures: the job fails with the platform's words, and nothing is left."""
    lacking = {"name": "X", "valueFrom": {"configMapKeyRef": {"name": "none", "key": "k"}}}
    template = {"kind": "Pod", "spec": {"containers": [{"name": "node", "env": [lacking]}]}}
    (tmp_path / "pod.json").write_text(json.dumps(template))
    config = light.kubeconfig(tmp_path / "config")
    line = ("--backend", f"k8s:kubeconfig={config},template=pod.json", "--image", "trainer:1", *QUICK)
    with Job(tmp_path, *line, str(SCRIPTS / "light_steps.py"), str(tmp_path)) as job:
        assert job.ended() == 1, job.said
        assert "CreateContainerConfigError" in job.said(), job.said()
        assert "node.at_once" in job.dlrover("explain")
        assert "worker-0-1" not in job.dlrover("events")
    assert light.objects("secrets", namespace="train") == []
    light.until(lambda: not pods(light), BOUND_S)


@pytest.mark.nightly(reason="clearing is tried by day in test_k8s_backend, and after a good end in the test above")
@pytest.mark.timeout(240)
def test_ctrl_c_leaves_nothing(ground: Ground, tmp_path: Path) -> None:
    """A job that is interrupted removes its pods and its secret."""
    with job_of(ground, tmp_path, script="allreducing.py") as job:
        job.trains(1, beyond=1)
        job.process.send_signal(signal.SIGINT)
        assert job.ended() != 0
    assert ground.objects("secrets", namespace="train") == []
    ground.until(lambda: not pods(ground), BOUND_S)

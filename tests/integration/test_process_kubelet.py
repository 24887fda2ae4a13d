"""Pods of the fake cluster are processes: they start, end, and are killed as on a node, and nothing of them stays behind."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_backends.fake_k8s import Ground
from dlrover_backends.fake_k8s.kubelet.processes import of_pod
from dlrover_backends.fake_k8s.kubelet.sandbox import Sandbox, Unbound

Object = dict[str, Any]

PODS = "/api/v1/namespaces/train/pods"
BOUND_S = 20.0
FOREVER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_DFL); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


class Cluster:
    """The ground, and requests of a user."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer; None for a refusal."""
        headers = {"Authorization": "Bearer admin-token", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.ground.url + path, data, headers, method=method)  # noqa: S310  our own
        try:
            with urllib.request.urlopen(request) as answer:  # noqa: S310  our own
                return json.loads(answer.read())
        except urllib.error.HTTPError:
            return None

    def make(self, name: str, script: str, *, spec: Object | None = None, **container: Any) -> str:
        """Create a pod that runs a Python script; returns its uid."""
        one = {"name": "main", "image": "trainer:dev", "command": [sys.executable, "-S", "-c", script], **container}
        whole = {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [one], **(spec or {})}
        made = self.ask("POST", PODS, {"metadata": {"name": name, "labels": {"app": "t"}}, "spec": whole})
        return str(made["metadata"]["uid"])

    def pod(self, name: str) -> Object | None:
        """A pod as it is now; None if it is gone."""
        found = [one for one in self.ground.objects("pods") if one["metadata"]["name"] == name]
        return found[0] if found else None

    def until(self, name: str, holds: Callable[[Object], Any]) -> Object:
        """Wait until a pod is as it should be."""
        found: list[Object] = []

        def look() -> bool:
            pod = self.pod(name)
            found[:] = [pod] if pod is not None else []
            return pod is not None and bool(holds(pod))

        self.within(look)
        return found[0]

    def within(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds."""
        self.ground.until(holds, BOUND_S)

    def ended(self, name: str) -> tuple[str, str | None, Object]:
        """Wait for a pod's end: phase, reason and the container's end."""
        pod = self.until(name, lambda one: one["status"]["phase"] in {"Succeeded", "Failed"})
        status = pod["status"]
        return status["phase"], status.get("reason"), status["containerStatuses"][0]["state"]["terminated"]

    def running(self, name: str) -> None:
        """Wait until a pod runs."""
        self.until(name, lambda one: one["status"]["phase"] == "Running")

    def disruption(self, name: str) -> str | None:
        """The reason of a pod's condition DisruptionTarget."""
        pod = self.pod(name)
        conditions = pod["status"].get("conditions", []) if pod else []
        return next((one["reason"] for one in conditions if one["type"] == "DisruptionTarget"), None)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three nodes; at the end nothing of their pods lives."""
    with Ground(3, heartbeat_s=0.2, grace_s=1.0, collect_s=0.5, backoff_s=0.05) as ground:
        yield Cluster(ground)
        uids = [one["metadata"]["uid"] for one in ground.objects("pods")]
    assert not [uid for uid in uids if of_pod(uid)]


def test_exit_codes_and_messages(cluster: Cluster) -> None:
    """A container's exit code, its reason and its last words are in the pod's status."""
    cluster.make("ok", "print('hello')")
    cluster.make("bad", "import sys; sys.exit('NCCL error')", terminationMessagePolicy="FallbackToLogsOnError")
    cluster.make("none", "", command=["/no/such/file"])
    assert cluster.ended("ok")[0::2][0] == "Succeeded"
    phase, reason, end = cluster.ended("bad")
    assert (phase, reason, end["exitCode"], end["reason"], end["message"]) == (
        "Failed",
        None,
        1,
        "Error",
        "NCCL error\n",
    )
    assert cluster.ended("none")[2]["reason"] == "StartError"
    assert cluster.ground.strike(lambda kubelet: kubelet.log("train", "ok")) == b"hello\n"


def test_environment_of_a_container(cluster: Cluster) -> None:
    """Variables come from values, downward fields, secrets and config maps; volumes are folders; `$(NAME)` is expanded."""
    secret = {"metadata": {"name": "s"}, "stringData": {"token": "geheim"}}
    cluster.ask("POST", "/api/v1/namespaces/train/secrets", secret)
    cluster.ask("POST", "/api/v1/namespaces/train/configmaps", {"metadata": {"name": "c"}, "data": {"key": "value"}})
    script = "import os; e = os.environ; print(e['NAME'], e['IP'][:4], e['TOKEN'], e['KEY'], e['BOTH'], open(e['FILE']).read())"
    env = [
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
        {"name": "KEY", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "key"}}},
        {"name": "BOTH", "value": "$(NAME)-$(KEY)"},
        {"name": "FILE", "value": "/etc/token/token"},
    ]
    volumes = {"volumes": [{"name": "v", "secret": {"secretName": "s"}}]}
    cluster.make("env", script, spec=volumes, env=env, volumeMounts=[{"name": "v", "mountPath": "/etc/token"}])
    assert cluster.ended("env")[0] == "Succeeded"
    assert (
        cluster.ground.strike(lambda kubelet: kubelet.log("train", "env"))
        == b"env 127. geheim value env-value geheim\n"
    )


def test_a_claim_of_the_same_name_begins_empty(tmp_path: Path) -> None:
    """Pods share what a claim holds, and it goes with the claim: the next one of that name has none of it. None: it waits."""
    claims: dict[str, Object] = {}
    spec = {"containers": [], "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "logs"}}]}

    def folder(uid: str) -> Path:
        pod = {"metadata": {"uid": uid, "namespace": "train", "name": uid}, "spec": spec}
        made = Sandbox(tmp_path, pod, "127.0.0.1", lambda _kind, _where, name: claims.get(name), {}, uid)
        made.prepare()
        return made.folder / "volumes" / "v"

    with pytest.raises(Unbound, match='persistentvolumeclaim "logs" not found'):
        folder("early")
    claims["logs"] = {"metadata": {"uid": "first"}}
    (folder("a") / "log").write_text("old")
    assert (folder("b") / "log").read_text() == "old"
    claims["logs"] = {"metadata": {"uid": "second"}}
    assert not list(folder("c").iterdir())


def test_a_deletion_gives_grace_and_then_kills(cluster: Cluster) -> None:
    """SIGTERM ends a pod that listens with 143; one that does not listen is killed after its grace; both are forgotten."""
    uid = cluster.make("kind", FOREVER)
    deaf = cluster.make("deaf", DEAF)
    cluster.running("kind")
    cluster.within(lambda: cluster.ground.strike(lambda kubelet: kubelet.log("train", "deaf")) == b"deaf\n")
    cluster.ask("DELETE", f"{PODS}/kind")
    cluster.ask("DELETE", f"{PODS}/deaf?gracePeriodSeconds=1")
    cluster.within(lambda: cluster.pod("kind") is None and cluster.pod("deaf") is None)
    assert not of_pod(uid)
    assert not of_pod(deaf)
    shelf = cluster.ground.server.api.store.shelf(("", "pods"))
    ends = {change.key[1]: change.now.obj for change in shelf.history if change.deleted}
    codes = {
        name: ends[name]["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
        for name in ("kind", "deaf")
    }
    assert codes == {"kind": 143, "deaf": 137}


def test_what_a_container_starts_ends_with_it(cluster: Cluster) -> None:
    """A child in a session of its own does not outlive its pod."""
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {FOREVER!r}], start_new_session=True)"
    uid = cluster.make("fork", script)
    assert cluster.ended("fork")[0] == "Succeeded"
    cluster.within(lambda: not of_pod(uid))


def test_oom_kill_and_eviction(cluster: Cluster) -> None:
    """The platform's word tells an OOM from a kill, and an eviction from both."""
    for name in ("oom", "kill", "evict", "shut"):
        cluster.make(name, FOREVER)
    for name in ("oom", "kill", "evict", "shut"):
        cluster.running(name)
    cluster.ground.strike(lambda kubelet: kubelet.oom("train", "oom"))
    cluster.ground.strike(lambda kubelet: kubelet.kill("train", "kill"))
    cluster.ground.strike(lambda kubelet: kubelet.evict("train", "evict"))
    assert [cluster.ended("oom")[2][key] for key in ("exitCode", "reason")] == [137, "OOMKilled"]
    assert [cluster.ended("kill")[2][key] for key in ("exitCode", "reason")] == [137, "Error"]
    assert cluster.ended("evict")[:2] == ("Failed", "Evicted")
    assert cluster.disruption("evict") == "TerminationByKubelet"
    pod = cluster.pod("shut")
    assert pod is not None
    cluster.ground.strike(lambda kubelet: kubelet.shut_down(pod["spec"]["nodeName"], grace_s=5))
    assert cluster.ended("shut")[:2] == ("Failed", "Terminated")


def test_images_and_configurations_that_are_not_there(cluster: Cluster) -> None:
    """A pod waits for an image or a secret with the platform's reason, and starts when it is there."""
    cluster.ground.strike(lambda kubelet: kubelet.refuse_image("bad:1"))
    cluster.make("img", "", image="bad:1")
    env = [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "late", "key": "k"}}}]
    cluster.make("cfg", "", env=env)

    def reason(pod: Object) -> Any:
        statuses = pod["status"].get("containerStatuses") or [{"state": {}}]
        return (statuses[0]["state"].get("waiting") or {}).get("reason")

    cluster.until("img", lambda pod: reason(pod) == "ImagePullBackOff")
    cluster.until("cfg", lambda pod: reason(pod) == "CreateContainerConfigError")
    cluster.ground.strike(lambda kubelet: kubelet.refuse_image("bad:1", refused=False))
    cluster.ask("POST", "/api/v1/namespaces/train/secrets", {"metadata": {"name": "late"}, "stringData": {"k": "v"}})
    assert cluster.ended("img")[0] == "Succeeded"
    assert cluster.ended("cfg")[0] == "Succeeded"


def test_capacity_priority_and_pre_emption(cluster: Cluster) -> None:
    """What does not fit waits with the scheduler's words; a higher priority ends a lower one and takes its place."""
    cluster.ask("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "high"}, "value": 1000})
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
    for index in range(3):
        cluster.make(f"low-{index}", FOREVER, **gpus)
    for index in range(3):
        cluster.running(f"low-{index}")
    cluster.make("wait", FOREVER, **gpus)
    pod = cluster.until("wait", lambda one: one["status"].get("conditions"))
    condition = pod["status"]["conditions"][0]
    assert condition["reason"] == "Unschedulable"
    assert condition["message"].startswith("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    cluster.ask("DELETE", f"{PODS}/wait")
    cluster.make("high", "print(1)", spec={"priorityClassName": "high"}, **gpus)
    assert cluster.ended("high")[0] == "Succeeded"
    shelf = cluster.ground.server.api.store.shelf(("", "pods"))
    gone = [change.now.obj for change in shelf.history if change.deleted and change.key[1].startswith("low-")]
    reasons = [one["reason"] for one in gone[0]["status"]["conditions"] if one["type"] == "DisruptionTarget"]
    assert reasons == ["PreemptionByScheduler"]


def test_a_drain_evicts_what_the_budget_allows(cluster: Cluster) -> None:
    """A drain cordons the node and evicts through the eviction API, one pod at a time if a budget says so."""
    node = {"spec": {"nodeSelector": {"kubernetes.io/hostname": "node-0"}}}["spec"]
    for name in ("d-0", "d-1"):
        cluster.make(name, FOREVER, spec=node)
    for name in ("d-0", "d-1"):
        cluster.running(name)
    budget = {"metadata": {"name": "b"}, "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "t"}}}}
    cluster.ask("POST", "/apis/policy/v1/namespaces/train/poddisruptionbudgets", budget)
    assert cluster.ground.drain("node-0") == ["d-1"]
    cluster.within(lambda: cluster.pod("d-0") is None)
    cluster.ask("DELETE", "/apis/policy/v1/namespaces/train/poddisruptionbudgets/b")
    assert cluster.ground.drain("node-0") == []
    cluster.within(lambda: cluster.pod("d-1") is None)
    node_0 = next(one for one in cluster.ground.objects("nodes") if one["metadata"]["name"] == "node-0")
    assert node_0["spec"]["unschedulable"]
    cluster.ground.uncordon("node-0")


def test_a_lost_node_keeps_its_pods_until_it_is_back(cluster: Cluster) -> None:
    """A silent node is unreachable, its pods stay Running with a deletion that nobody carries out; they go when it returns."""
    tolerations = [
        {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}
        for why in ("unreachable", "not-ready")
    ]
    spec = {"nodeSelector": {"kubernetes.io/hostname": "node-1"}, "tolerations": tolerations}
    uid = cluster.make("lost", FOREVER, spec=spec)
    cluster.running("lost")
    cluster.ground.strike(lambda kubelet: kubelet.lose("node-1", dead=False))
    pod = cluster.until("lost", lambda one: "deletionTimestamp" in one["metadata"])
    assert pod["status"]["phase"] == "Running"
    assert cluster.disruption("lost") == "DeletionByTaintManager"
    assert of_pod(uid)
    cluster.ground.strike(lambda kubelet: kubelet.find("node-1"))
    cluster.within(lambda: cluster.pod("lost") is None)
    cluster.within(lambda: not of_pod(uid))


def test_a_node_that_is_back_tells_that_its_pods_are_ready(cluster: Cluster) -> None:
    """The node controller takes Ready from the pods of a silent node; who waits for them is told when the node is back."""

    def ready(pod: Object) -> str:
        return next(one["status"] for one in pod["status"]["conditions"] if one["type"] == "Ready")

    spec = {"nodeSelector": {"kubernetes.io/hostname": "node-1"}, "tolerations": [{"operator": "Exists"}]}
    cluster.make("patient", FOREVER, spec=spec)
    cluster.until("patient", lambda one: one["status"]["phase"] == "Running" and ready(one) == "True")
    cluster.ground.strike(lambda kubelet: kubelet.lose("node-1", dead=False))
    cluster.until("patient", lambda one: ready(one) == "False")
    cluster.ground.strike(lambda kubelet: kubelet.find("node-1"))
    cluster.until("patient", lambda one: ready(one) == "True")


def test_jobs_complete_and_fail(cluster: Cluster) -> None:
    """A Job ends Complete with exit 0, Failed by a code of its policy, and starts another pod for a code to ignore."""

    def job(name: str, script: str) -> None:
        one = {"name": "main", "image": "i", "command": [sys.executable, "-S", "-c", script]}
        template = {"spec": {"restartPolicy": "Never", "containers": [one]}}
        rules = [
            {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1]}},
            {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}},
        ]
        spec = {"template": template, "backoffLimit": 0, "podFailurePolicy": {"rules": rules}}
        cluster.ask("POST", "/apis/batch/v1/namespaces/train/jobs", {"metadata": {"name": name}, "spec": spec})

    again = "import os, sys; p = '/tmp/kubelet-' + os.environ['HOSTNAME'][:5] + str(os.getppid())\n"
    again += "sys.exit(os.remove(p)) if os.path.exists(p) else (open(p, 'w'), sys.exit(75))"
    job("good", "")
    job("badly", "import sys; sys.exit(1)")
    job("again", again)

    def conditions() -> dict[str, str]:
        return {
            one["metadata"]["name"]: one["status"].get("conditions", [{}])[-1].get("type", "")
            for one in cluster.ground.objects("jobs", "batch")
        }

    cluster.within(lambda: conditions() == {"good": "Complete", "badly": "Failed", "again": "Complete"})


def test_the_command_line_starts_a_cluster(tmp_path: Path) -> None:
    """`python -m dlrover_backends.fake_k8s` writes a kubeconfig that works, and SIGTERM ends it and its pods."""
    config = tmp_path / "config"
    command = [sys.executable, "-m", "dlrover_backends.fake_k8s", "--nodes", "1", "--kubeconfig", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "1 nodes" in process.stdout.readline()
        server = json.loads(config.read_text())["clusters"][0]["cluster"]["server"]
        one = {"name": "main", "image": "i", "command": ["sleep", "600"]}
        body = {"metadata": {"name": "w"}, "spec": {"containers": [one]}}
        headers = {"Authorization": "Bearer admin-token", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{server}{PODS}", json.dumps(body).encode(), headers)  # noqa: S310  our own
        with urllib.request.urlopen(request) as answer:  # noqa: S310  our own
            uid = json.loads(answer.read())["metadata"]["uid"]
        process.terminate()
        assert process.wait(BOUND_S) == 0
    assert not of_pod(uid)

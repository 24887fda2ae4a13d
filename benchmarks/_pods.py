"""A cluster in a process of its own, whose pods are processes of this machine, and a job in it. Run alone it is the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _jobs import LIMIT_S, MARK, OURS, SCRIPT, Broken, Job, kept

NODE = "dlrover-core/node-name"
ROLE, MASTERS = "dlrover-core/role", "masters"
NAMESPACE = "train"
LOOK_S = 0.002
MERGE = "application/merge-patch+json"
CORDON = {"spec": {"unschedulable": True}}
DRAIN_AGAIN_S = 5.0
"""So long `kubectl drain` waits before it asks again for what a disruption budget has kept."""


# ---- in a process of its own


def serve(folder: str, shape: dict[str, Any]) -> int:
    """The cluster, until stdin ends. A line there is a command; a line back is a time by CLOCK_MONOTONIC, or a number."""
    from dlrover_backends.fake_k8s import Ground

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    quota, claim = shape.pop("quota", None), shape.pop("claim", "")
    with Ground(shape.pop("nodes", 2), extra={"PATH": path}, **shape) as ground:
        played = Played(ground, quota)
        if claim:
            played.create("persistentvolumeclaims", claim, {"accessModes": ["ReadWriteOncePod"]})
        ground.kubeconfig(Path(folder) / "kubeconfig")
        print("serves", ground.kubelet.settings.root, flush=True)
        for line in sys.stdin:
            what, *words = line.split()
            print(COMMANDS[what](played, *words), flush=True)
    return 0


class Played:
    """What can be done to the cluster, and what was seen there; all times by CLOCK_MONOTONIC.

    ground: the cluster
    seen:   when something was first so: ``made NODE``, ``unready NODE``, ``runs POD``, ``gone NODE``
    kueue:  the scripted Kueue; None without a quota
    """

    def __init__(self, ground: Any, quota: int | None) -> None:
        self.ground, self.seen, self.kueue = ground, dict[str, float](), None
        ground.call(lambda: ground.server.api.listen(self._heard))
        if quota is not None:
            from dlrover_backends.fake_k8s.scripted_kueue import ScriptedKueue

            def made() -> Any:
                soon = asyncio.get_running_loop().call_soon
                return ScriptedKueue(ground.server.api, NAMESPACE, quota, later=soon)

            self.kueue = ground.call(made)

    def create(self, plural: str, name: str, spec: dict[str, Any]) -> None:
        """Make an object of the core group."""
        api = self.ground.server.api
        body = {"metadata": {"name": name}, "spec": spec}
        self.ground.call(lambda: api.create(api.kind("", "v1", plural), NAMESPACE, body))

    def _heard(self, kind: tuple[str, str], change: Any) -> None:
        if kind[1] != "pods":
            return
        at, pod = time.monotonic(), change.now.obj
        node = (pod["metadata"].get("annotations") or {}).get(NODE)
        names = ["runs " + pod["metadata"]["name"]] if pod["status"].get("phase") == "Running" else []
        if node:
            ready = [one for one in pod["status"].get("conditions") or () if one["type"] == "Ready"]
            names.append(f"made {node}")
            if ready and ready[0]["status"] == "False" and pod["status"].get("phase") == "Running":
                names.append(f"unready {node}")
            if change.deleted:
                names.append(f"gone {node}")
        for name in names:
            self.seen.setdefault(name, at)

    # -- commands: each answers a number, -1 where it cannot

    def when(self, *words: str) -> float:
        """When something was first seen, which may be yet to come."""
        name, deadline = " ".join(words), time.monotonic() + LIMIT_S
        while name not in self.seen:
            if time.monotonic() > deadline:
                return -1.0
            time.sleep(LOOK_S)
        return self.seen[name]

    def made(self, node: str) -> float:
        """When the pod of this node was made."""
        return self.when("made", node)

    def kill(self, node: str) -> float:
        """SIGKILL the container of a node, or of a pod of that name; when that was."""
        name = self.pods().get(node, {}).get("metadata", {}).get("name", node)
        at = time.monotonic()
        return at if self.ground.strike(lambda kubelet: kubelet.kill(NAMESPACE, name)) else -1.0

    def pid(self, node: str) -> float:
        """The first process of the container of a node, or of a pod of that name."""
        name = self.pods().get(node, {}).get("metadata", {}).get("name", node)
        pod = self.ground.strike(lambda kubelet: kubelet.named(NAMESPACE, name))
        return float(pod.pids[0]) if pod is not None and pod.pids else -1.0

    def host(self, node: str) -> float:
        """The number of the host that a node's pod is bound to."""
        bound = self.pods().get(node, {}).get("spec", {}).get("nodeName")
        return float(self.ground.nodes.index(bound)) if bound else -1.0

    def masters(self) -> str:
        """The living pods of masters, each ``NAME=PID`` of its container's first process."""
        found = self.ground.objects("pods", namespace=NAMESPACE)
        names = [one["metadata"]["name"] for one in found if (one["metadata"].get("labels") or {}).get(ROLE) == MASTERS]
        return " ".join(f"{name}={pid:.0f}" for name in names if (pid := self.pid(name)) > 0)

    def incarnations(self) -> float:
        """How many pods were made beyond the first of each place."""
        return float(sum(int(name.rpartition("-")[2]) for name in self.pods()))

    def away(self) -> float:
        """Kill the API server."""
        self.ground.away()
        return time.monotonic()

    def back(self) -> float:
        """Start it again."""
        self.ground.back()
        return time.monotonic()

    def freeze(self) -> float:
        """Let the API server answer nothing more; connections stay open."""
        self.ground.call(self.ground.server.freeze)
        return time.monotonic()

    def thaw(self) -> float:
        """Let it go on."""
        self.ground.call(self.ground.server.thaw)
        return time.monotonic()

    def lose(self, host: str) -> float:
        """The kubelet of a host speaks no more; its pods run on."""
        at = time.monotonic()
        self.ground.strike(lambda kubelet: kubelet.lose(self.ground.nodes[int(float(host))], dead=False))
        return at

    def find(self, host: str) -> float:
        """The kubelet of a lost host speaks again."""
        self.ground.strike(lambda kubelet: kubelet.find(self.ground.nodes[int(float(host))]))
        return time.monotonic()

    def evict(self, node: str) -> float:
        """Evict a node's pod through the API."""
        at, pod = time.monotonic(), self.pods()[node]
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod["metadata"]["name"]}}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}/eviction"
        self.ground.run(self.ground.client.ask("POST", path, body))
        return at

    def shut(self, host: str, grace_s: str) -> float:
        """Shut a host down with a warning, as a spot host goes."""
        at, name = time.monotonic(), self.ground.nodes[int(float(host))]
        self.ground.run(self.ground.client.surely("PATCH", f"/api/v1/nodes/{name}", CORDON, MERGE))
        self.ground.strike(lambda kubelet: kubelet.shut_down(name, grace_s=float(grace_s)))
        return at

    def drain(self, *hosts: str) -> float:
        """Drain hosts at once as `kubectl drain` does: cordon, then evict again and again what a budget keeps; when it began."""
        at, names = time.monotonic(), {self.ground.nodes[int(float(one))] for one in hosts}
        for name in names:
            self.ground.run(self.ground.client.surely("PATCH", f"/api/v1/nodes/{name}", CORDON, MERGE))
        deadline = at + LIMIT_S
        while sum(len(self.ground.drain(name)) for name in names):
            if time.monotonic() > deadline:
                return -1.0
            time.sleep(DRAIN_AGAIN_S)
        return at

    def quota(self, nodes: str) -> float:
        """Kueue's quota of nodes."""
        self.ground.call(lambda: setattr(self.kueue, "quota", int(nodes)))
        return time.monotonic()

    def take(self, nodes: str) -> float:
        """Kueue takes its quota back from a Workload of so many nodes."""
        at = time.monotonic()
        assert self.kueue is not None
        self.ground.call(lambda: self.kueue.evict(int(nodes)))
        return at

    def empty(self) -> float:
        """When no pod of a node is left."""
        self.ground.until(lambda: not self.pods(), LIMIT_S)
        return time.monotonic()

    def pods(self) -> dict[str, Any]:
        """Pods by their node's name in the job."""
        found = self.ground.objects("pods", namespace=NAMESPACE)
        return {notes[NODE]: one for one in found if NODE in (notes := one["metadata"].get("annotations") or {})}


COMMANDS = {
    name: one for name, one in vars(Played).items() if not name.startswith("_") and name not in {"create", "pods"}
}


# ---- here


class Cluster:
    """The process with the cluster. ``claims``: where the volumes of its claims lie."""

    def __init__(self, folder: Path, root: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.claims, self._process = folder, root / "claims" / NAMESPACE, process

    def tell(self, *words: str) -> float:
        """Have something done there; what it answers. Raises `Broken`."""
        answer = self.ask(*words)
        if not answer or float(answer) < 0:
            raise Broken(f"the cluster cannot do {' '.join(words)!r}: {answer or 'it ended'}")
        return float(answer)

    def end(self) -> None:
        """End the cluster, and with it all pods."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LIMIT_S)
        self._process.kill()

    def ask(self, *words: str) -> str:
        """What the cluster says."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def cluster(**shape: Any) -> Iterator[Cluster]:
    """Two nodes, or what ``shape`` says (`Ground`'s options, ``quota``, ``claim``); all is gone at the end. Raises `Broken`."""
    with tempfile.TemporaryDirectory(prefix="dlb-") as folder:
        words = [sys.executable, __file__, folder, json.dumps(shape)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                word, _, root = process.stdout.readline().strip().partition(" ")
                if word != "serves":
                    raise Broken("the cluster did not come up")
                yield Cluster(Path(folder), Path(root), process)
            finally:
                Cluster(Path(folder), Path(), process).end()


@contextlib.contextmanager
def in_pods(of: Cluster, script: Sequence[str], *options: str, program: Path = SCRIPT, more: str = "") -> Iterator[Job]:
    """A job of two pods with a worker each, stopped at the end. ``more``: of the backend's arguments, ``,KEY=VALUE``."""

    def made(folder: Path) -> Job:
        template = folder / "pod.json"
        backend = f"k8s:kubeconfig={of.folder}/kubeconfig,template={template}{more}"
        launch = ["--backend", backend, "--image", "bench:1", "--bind", "127.0.0.1", "--nnodes", "2"]
        job = Job(OURS, folder, script, [*launch, "--nproc-per-node", "1", *options], program)
        container = {"name": "node", "env": [{"name": MARK, "value": job.mark}]}
        template.write_text(json.dumps({"kind": "Pod", "spec": {"containers": [container]}}))
        return job

    with kept(made) as job:
        yield job
        assert job.process is not None
        job.process.send_signal(signal.SIGINT)  # the pods go with the job
        job.wait()


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], json.loads(sys.argv[2])))

"""A cluster in a process of its own, whose pods are processes of this machine, and a job in it. Run alone it is the cluster."""

from __future__ import annotations

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

from _jobs import LIMIT_S, MARK, OURS, Broken, Job, kept

NODE = "dlrover-core/node-name"
NAMESPACE = "train"
LOOK_S = 0.002


# ---- in a process of its own


def serve(folder: str) -> int:
    """The cluster, until stdin ends. A line there is a command; a line back is a time by CLOCK_MONOTONIC, or a number."""
    from dlrover_backends.fake_k8s import Ground

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with Ground(2, extra={"PATH": path}) as ground:
        ground.kubeconfig(Path(folder) / "kubeconfig")
        print("serves", flush=True)
        for line in sys.stdin:
            what, *words = line.split()
            print(done(ground, what, *words), flush=True)
    return 0


def done(ground: Any, what: str, *words: str) -> float:
    """Do what the command says."""
    if what == "kill":
        name = pods(ground)[words[0]]["metadata"]["name"]
        at = time.monotonic()
        return at if ground.strike(lambda kubelet: kubelet.kill(NAMESPACE, name)) else -1.0
    if what == "made":
        deadline = time.monotonic() + LIMIT_S
        while words[0] not in pods(ground):
            if time.monotonic() > deadline:
                return -1.0
            time.sleep(LOOK_S)
    elif what == "incarnations":  # more than one of each place
        return float(sum(int(name.rpartition("-")[2]) for name in pods(ground)))
    elif what == "away":
        ground.away()
    elif what == "back":
        ground.back()
    return time.monotonic()


def pods(ground: Any) -> dict[str, Any]:
    """Pods by their node's name in the job."""
    found = ground.objects("pods", namespace=NAMESPACE)
    return {notes[NODE]: one for one in found if NODE in (notes := one["metadata"].get("annotations") or {})}


# ---- here


class Cluster:
    """The process with the cluster."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self._process = folder, process

    def tell(self, *words: str) -> float:
        """Have something done there; what it answers. Raises `Broken`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer or float(answer) < 0:
            raise Broken(f"the cluster cannot do {' '.join(words)!r}: {answer or 'it ended'}")
        return float(answer)


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Two nodes; all of it is gone at the end. Raises `Broken`."""
    with tempfile.TemporaryDirectory(prefix="dlb-") as folder:
        words = [sys.executable, __file__, folder]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline().strip() != "serves":
                    raise Broken("the cluster did not come up")
                yield Cluster(Path(folder), process)
            finally:
                if process.stdin is not None:
                    process.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LIMIT_S)
                process.kill()


@contextlib.contextmanager
def in_pods(of: Cluster, script: Sequence[str], *options: str) -> Iterator[Job]:
    """A job of two pods with a worker each, stopped at the end."""

    def made(folder: Path) -> Job:
        template = folder / "pod.json"
        backend = f"k8s:kubeconfig={of.folder}/kubeconfig,template={template}"
        launch = ["--backend", backend, "--image", "bench:1", "--bind", "127.0.0.1", "--nnodes", "2"]
        job = Job(OURS, folder, script, [*launch, "--nproc-per-node", "1", *options])
        container = {"name": "node", "env": [{"name": MARK, "value": job.mark}]}
        template.write_text(json.dumps({"kind": "Pod", "spec": {"containers": [container]}}))
        return job

    with kept(made) as job:
        yield job
        assert job.process is not None
        job.process.send_signal(signal.SIGINT)  # the pods go with the job
        job.wait()


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))

"""A pod's container is killed: how long until the next common step?

Two pods with one worker each train `scripts/ddp_step.py` (DDP over gloo, from a checkpoint file): `dlrover-run --backend k8s`.
The fake API server, its scheduler and its kubelet are a process of their own on the same cores; pods are processes of this
machine. At a step the container of rank 1 gets SIGKILL, with all that it has started. Measured is the time from the signal to the
moment when both ranks of a new world have completed a step, by CLOCK_MONOTONIC. In turn:

* a new pod: the next incarnation's pod is made, scheduled and started, and its agent must import torch;
* a warm pod: the same with ``--standby 1``. A kill waits until the standby's agent is warm.
* the local backend: `dlrover-run --local-nodes 2`, whose killed node is started again.

On a cluster a new pod also waits for its image, and for its containers' runtime: neither is there here.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import bench_killed_node as killed_node
from _bench import BROKEN, Result, Row, median, options, say
from _hosts import ancestor, stepping
from _jobs import MARK, OURS, Broken, Job, kept

MEASURES = (*killed_node.MEASURES,)

ABOVE_LOCAL_S, WARM_S = 0.3, 0.5
END_S = 20.0
POD, WARM, LOCAL = "a new pod", "a warm pod", "local"


def serve(folder: str, mark: str) -> int:
    """The cluster, until stdin ends."""
    from dlrover_backends.fake_k8s import Ground

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with Ground(2, extra={"PATH": path, MARK: mark}) as ground:
        ground.kubeconfig(Path(folder) / "kubeconfig")
        print("serves", flush=True)
        sys.stdin.read()
    return 0


@contextmanager
def cluster(folder: str, mark: str) -> Iterator[Callable[[], None]]:
    """The cluster in a process of its own; the function ends it, and all pods. Raises `Broken`."""
    words = [sys.executable, __file__, "--child", "serve", "--folder", folder, "--mark", mark]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        stdin = server.stdin

        def end() -> None:
            stdin.close()
            try:
                server.wait(END_S)
            except subprocess.TimeoutExpired:
                server.kill()

        try:
            if server.stdout.readline().strip() != "serves":
                raise Broken("the API server did not come up")
            yield end
        finally:
            end()


def in_pods(standbys: int) -> float:
    """One kill of the container of rank 1."""
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="dlb-") as folder, cluster(folder, mark) as end:
        launch = ["--backend", f"k8s:kubeconfig={folder}/kubeconfig", "--image", "bench:1", "--bind", "127.0.0.1"]
        launch += ["--nnodes", "2", "--nproc-per-node", "1", "--standby", str(standbys)]
        with kept(lambda place: _job(place, launch, mark)) as job:
            job.until(lambda lines: stepping(lines, 2, killed_node.KILL_AT))
            killed_node.wait_warm(job, 2 + standbys)
            victim = next(line.pid for line in reversed(job.lines()) if line.rank == 1)
            took = killed_node.recovery(job, ancestor(victim, "dlrover-agent"), lambda: None)
            end()  # before the launcher is killed, whose processes must be gone then
            return took


def _job(folder: Path, launch: Sequence[str], mark: str) -> Job:
    job = Job(OURS, folder, killed_node.SCRIPT, launch)
    job.mark = mark
    return job


def main() -> int:
    """Trials in turn."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", choices=(POD, WARM, LOCAL), help="measure this alone")
        parser.add_argument("--child", choices=("serve",), help=argparse.SUPPRESS)
        parser.add_argument("--folder", help=argparse.SUPPRESS)
        parser.add_argument("--mark", help=argparse.SUPPRESS)

    chosen = options(__doc__, trials=3, more=more)
    if chosen.child == "serve":
        return serve(chosen.folder, chosen.mark)
    os.environ.pop("KUBECONFIG", None)
    kinds: dict[str, Callable[[], float]] = {
        POD: lambda: in_pods(0),
        WARM: lambda: in_pods(1),
        LOCAL: lambda: killed_node.ours(0),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    result = Result("k8s_killed", "no peer")
    try:
        for number in range(chosen.trials):
            for name, trial in kinds.items():
                if chosen.only in {None, name}:
                    found[name].append(trial())
                    say(f"{number + 1}/{chosen.trials} {name}: next common step after {found[name][-1]:.3f} s")
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    local = median(found[LOCAL]) if found[LOCAL] else None
    what = "container killed to next common step, 2 nodes, process kubelet"
    targets = {POD: None if local is None else round(local + ABOVE_LOCAL_S, 3), WARM: WARM_S, LOCAL: None}
    rows = {
        POD: what,
        WARM: f"{what}; with one warm pod",
        LOCAL: "beside it: killed node of the local backend, relaunched",
    }
    result.rows += [Row(words, "s", found[name], target=targets[name]) for name, words in rows.items() if found[name]]
    result.notes.append(f"the target of a new pod is the local backend's figure of the same run, and {ABOVE_LOCAL_S} s")
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())

"""A container of a pod is killed: how long until the next common step?

Two nodes with one worker each train `scripts/ddp_step.py` (DDP over gloo, from a checkpoint file). Nodes are pods of a fake
cluster, whose kubelet runs them as processes; at a step the container of one gets SIGKILL, with all that it has started.
Measured is the time from the signal to the moment when both ranks of a new world have completed a step, by CLOCK_MONOTONIC: the
master makes another pod, the scheduler binds it, the kubelet starts an agent. In turn with it the same with ``--standby 1``,
where a warm pod becomes the node, and the kill waits until it is warm; and the local backend relaunches a killed node, as in
`bench_killed_node.py`.

No image is pulled, no container is made: what a real kubelet adds is not in it.
"""

from __future__ import annotations

import sys

from _bench import BROKEN, Result, Row, options, say
from _hosts import stepping, wait_all_step
from _jobs import Broken
from _pods import cluster, in_pods
from bench_killed_node import BACK_LIMIT_S, KILL_AT, SCRIPT, ours, wait_warm

MEASURES = ("src/backends", "src/adapters/dlrover_adapters/agent", "src/dlrover_core/rules", "src/dlrover_core/runtime")

ABOVE_S, WARM_S = 0.3, 0.5


def killed(standbys: int = 0) -> float:
    """One kill of the container of the node of rank 1; seconds to the next common step. Raises `Broken`."""
    with cluster() as of, in_pods(of, SCRIPT, "--standby", str(standbys)) as job:
        job.until(lambda lines: stepping(lines, 2, KILL_AT))
        wait_warm(job, 2 + standbys)
        before = {line.pid for line in job.lines()}
        at = of.tell("kill", "worker-1-0")
        return wait_all_step(job, before, 2, BACK_LIMIT_S) - at


def main() -> int:
    """Trials in turn."""
    chosen = options(__doc__)
    result = Result("k8s_kills", "the local backend, whose killed node is relaunched")
    pods, warm, local = list[float](), list[float](), list[float]()
    try:
        for number in range(chosen.trials):
            pods.append(killed())
            warm.append(killed(1))
            local.append(ours(0))
            say(f"{number + 1}/{chosen.trials} pods {pods[-1]:.3f} s, warm {warm[-1]:.3f} s, local {local[-1]:.3f} s")
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    what = "container killed to next common step, process kubelet"
    above = [pod - node for pod, node in zip(pods, local, strict=True)]
    result.rows += [
        Row(what, "s", pods, local),
        Row(f"{what}: above the local backend's relaunch", "s", above, target=ABOVE_S),
        Row(f"{what}, one warm pod", "s", warm, target=WARM_S),
    ]
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())

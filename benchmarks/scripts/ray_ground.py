"""A Ray cluster of raylets on this machine, as `ray start` starts them: orders as JSON lines on stdin, answers on stdout.

``python ray_ground.py FOLDER HOSTS``: so many raylets of one CPU, the first with the state service. Ray's settings are its own,
health checks too; only dashboards are off. ``FOLDER`` is short: sockets lie in it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

OBJECTS_BYTES = 80 << 20


def main() -> None:
    """Serve until stdin ends."""
    folder, hosts = sys.argv[1], int(sys.argv[2])
    os.environ.update(RAY_TMPDIR=folder, RAY_USAGE_STATS_ENABLED="0", RAY_gcs_storage_path=f"{folder}/gcs")
    Path(folder, "ray").mkdir(exist_ok=True)
    out, sys.stdout = sys.stdout, sys.stderr
    from ray.cluster_utils import Cluster

    cluster, raylets = Cluster(), {}

    def add(cpus: float = 1) -> str:
        name = f"host-{len(raylets)}"
        node = cluster.add_node(
            wait=False,
            include_dashboard=False,
            num_cpus=cpus,
            node_name=name,
            object_store_memory=OBJECTS_BYTES,
            dashboard_agent_listen_port=0,
        )
        raylets[name] = node
        return name

    def raylet(host: str) -> int:
        return int(raylets[host].all_processes["raylet"][0].process.pid)

    def drain(host: str, notice_s: float) -> None:
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline = int((time.time() + notice_s) * 1000)
        GcsClient(address=cluster.address).drain_node(raylets[host].node_id, reason, "a benchmark", deadline)

    def answer(order: str, **told: Any) -> object:
        if order == "add":
            return add(**told)
        if order == "raylets":
            return {name: raylet(name) for name in raylets}
        if order == "kill":
            at = time.monotonic()
            os.kill(raylet(str(told["host"])), signal.SIGKILL)
            return at
        if order == "state":  # the process that holds the cluster's state is killed, or started again
            at, head = time.monotonic(), cluster.head_node
            if told["is"] == "gone":
                head.kill_gcs_server()
            else:
                head.start_gcs_server()
            return at
        if order == "drain":
            at = time.monotonic()
            drain(str(told["host"]), told["notice_s"])
            return at
        raise ValueError(order)

    for _ in range(hosts):
        add()
    cluster.wait_for_nodes()
    print(json.dumps({"pid": os.getpid(), "address": cluster.address}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line)), default=str), file=out, flush=True)


main()

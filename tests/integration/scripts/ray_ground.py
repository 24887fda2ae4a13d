"""A Ray cluster of several raylets on this machine, for tests: orders as JSON lines on stdin, answers on stdout.

``python ray_ground.py FOLDER {"num_cpus": 2} ...``: one raylet for each argument, the first with the state service. It says its
address, then answers each order; at the end of stdin all of it ends. ``FOLDER`` is short: sockets lie in it.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve until stdin ends."""
    folder, *hosts = sys.argv[1:]
    os.environ.update(
        RAY_TMPDIR=folder,
        XDG_STATE_HOME=folder,
        RAY_gcs_storage_path=f"{folder}/gcs",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_enable_worker_prestart="0",
        RAY_worker_niceness="0",  # on a busy machine what an actor starts, masters among it, would get nothing
        RAY_prestart_worker_first_driver="0",
        RAY_health_check_period_ms="500",
        RAY_health_check_failure_threshold=os.environ.get("RAY_health_check_failure_threshold", "4"),  # noqa: SIM112  # as Ray has it
        RAY_health_check_initial_delay_ms="500",
        RAY_health_check_timeout_ms="2000",
    )
    Path(folder, "ray").mkdir(exist_ok=True)
    out, sys.stdout = sys.stdout, sys.stderr
    from ray.cluster_utils import Cluster

    raylets = {}
    cluster = Cluster()

    def add(**told: object) -> str:
        node = cluster.add_node(
            wait=False, include_dashboard=False, object_store_memory=80 << 20, dashboard_agent_listen_port=0, **told
        )
        raylets[node.node_id] = node
        return str(node.node_id)

    ids = [add(**json.loads(one)) for one in hosts]

    def pid(host: str) -> int:
        return int(raylets[host].all_processes["raylet"][0].process.pid)

    held: list[object] = []

    def fill() -> None:
        """Take every processor that is free."""
        import ray
        from ray.util import placement_group

        if not ray.is_initialized():
            ray.init(address=cluster.address, namespace="others", log_to_driver=False)
        for node in raylets.values():
            cpus = float(node.get_resource_and_label_spec().num_cpus)
            held.append(placement_group([{"CPU": cpus}]))
        for one in held:
            assert one.wait(30), "no room to take"

    def free() -> None:
        from ray.util import remove_placement_group

        while held:
            remove_placement_group(held.pop())

    def tables() -> Any:
        """The cluster's tables, for which no driver is needed."""
        from ray._private.state import GlobalState
        from ray._raylet import GcsClientOptions

        state = GlobalState()
        where = GcsClientOptions.create(cluster.address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
        state._initialize_global_state(where)
        return state

    def actors(state: Any) -> list[Any]:
        from ray.core.generated import gcs_pb2

        rows = state._connect_and_get_accessor().get_actor_table(None, None)
        return [gcs_pb2.ActorTableData.FromString(row) for row in rows]

    def named(namespace: str) -> list[str]:
        """The names of the living actors of a namespace."""
        from ray.core.generated import gcs_pb2

        found = [one for one in actors(tables()) if one.ray_namespace == namespace]
        return [one.name for one in found if one.state == gcs_pb2.ActorTableData.ALIVE]

    def left(prefix: str) -> dict[str, list[str]]:
        """Actors and placement groups that there are, of namespaces and names that begin so, and the keys of our store."""
        from ray._raylet import GcsClient
        from ray.core.generated import gcs_pb2

        state = tables()
        living = [one for one in actors(state) if one.state != gcs_pb2.ActorTableData.DEAD]
        groups = [one for one in state.placement_group_table().values() if one["state"] != "REMOVED"]
        keys = GcsClient(address=cluster.address).internal_kv_keys(b"", b"dlrover")
        return {
            "actors": [
                f"{one.ray_namespace}/{one.name} {gcs_pb2.ActorTableData.ActorState.Name(one.state)} {one.node_id.hex()[:8]}"
                for one in living
                if one.ray_namespace.startswith(prefix)
            ],
            "groups": [
                f"{one['name']} {one['state']} {one.get('bundles_to_node_id')} {one.get('stats')}"
                for one in groups
                if one["name"].startswith(prefix)
            ],
            "keys": [one.decode() for one in keys],
        }

    def version(kind: str, number: str) -> str:
        """What the cluster says of its Ray or its Python from now on; what it said before."""
        from ray._private.ray_constants import KV_NAMESPACE_CLUSTER
        from ray._raylet import GcsClient

        client, key = GcsClient(address=cluster.address), b"CLUSTER_METADATA"
        said = json.loads(client.internal_kv_get(key, KV_NAMESPACE_CLUSTER))
        before, said[kind] = str(said[kind]), number
        client.internal_kv_put(key, json.dumps(said).encode(), True, KV_NAMESPACE_CLUSTER)
        return before

    def answer(order: str, **told: object) -> object:
        if order in {"fill", "free"}:
            return fill() if order == "fill" else free()
        if order == "state":  # the process that holds the cluster's state is killed, or started again
            head = cluster.head_node
            return head.kill_gcs_server() if told["is"] == "gone" else head.start_gcs_server()
        if order == "version":
            return version(str(told["kind"]), str(told["number"]))
        if order == "named":
            return named(str(told["namespace"]))
        if order == "left":
            return left(str(told["prefix"]))
        if order == "add":
            return add(**told)
        if order == "remove":
            cluster.remove_node(raylets.pop(told["host"]), allow_graceful=bool(told.get("graceful")))
            return None
        if order == "signal":
            os.kill(pid(str(told["host"])), signal.Signals[str(told["name"])])
            return None
        if order == "drain":
            from ray._raylet import GcsClient
            from ray.core.generated import autoscaler_pb2

            client = GcsClient(address=cluster.address)
            reason = autoscaler_pb2.DrainNodeReason.Value(f"DRAIN_NODE_REASON_{told['reason']}")
            return client.drain_node(str(told["host"]), reason, "a test", int(str(told["deadline_ms"])))
        raise ValueError(order)

    print(json.dumps({"pid": os.getpid(), "address": cluster.address, "hosts": ids}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line)), default=str), file=out, flush=True)
    cluster.shutdown()


main()

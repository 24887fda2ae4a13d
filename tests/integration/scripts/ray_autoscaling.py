"""A job of one to two nodes, on a cluster whose second host is brought by Ray's autoscaler: ``python ray_autoscaling.py FOLDER``.

`AutoscalingCluster` runs ``ray stop --force``, which ends every Ray that it can see. So this is for the first process of a PID
namespace, which sees no other, and it refuses to be anything else: ``unshare --pid --fork --mount-proc ...``. All of it ends with
that process. What was seen is written to ``FOLDER/seen.json``. ``FOLDER`` is short: sockets lie in it.
"""

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from running import BIN, SCRIPTS, WITHOUT_TORCH, Job, eventually

SIOCSIFFLAGS, UP = 0x8914, 0x41
OBJECTS_BYTES = 80 << 20
AUTOSCALER_S = 200.0
NO_COMMANDS: dict[str, Any] = {
    f"{who}{what}_commands": []
    for who, what in (
        *(("", "setup"), ("head_", "setup"), ("worker_", "setup"), ("", "initialization")),
        *(("head_", "start_ray"), ("worker_", "start_ray")),
    )
}
NO_COMMANDS |= {"file_mounts": {}, "cluster_synced_files": [], "docker": {}, "upscaling_speed": 1.0}


def apart() -> None:
    """Be alone with a loopback device and a shared memory of one's own; the folder is the process's own already."""
    if os.getpid() != 1:
        sys.exit("this ends every Ray that it sees: start it by unshare --pid --fork --mount-proc --net")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", UP))
    subprocess.run(["/usr/bin/env", "mount", "-t", "tmpfs", "none", "/dev/shm"], check=True)


def cluster() -> str:
    """A head with one processor, and an autoscaler that may bring one host more; the address."""
    from ray.autoscaler._private.fake_multi_node.node_provider import (
        FAKE_HEAD_NODE_ID,
        FAKE_HEAD_NODE_TYPE,
        FakeMultiNodeProvider,
    )
    from ray.cluster_utils import AutoscalingCluster

    host = {"CPU": 1, "object_store_memory": OBJECTS_BYTES}

    class Cloud(AutoscalingCluster):  # type: ignore[misc]  # Ray's wheel has not the file from which it makes a configuration
        def _generate_config(self, *_: object, **__: object) -> dict[str, Any]:
            provider = {"type": "external", "module": f"{FakeMultiNodeProvider.__module__}.FakeMultiNodeProvider"}
            provider |= {"use_node_id_as_ip": True, "disable_node_updaters": True}
            provider |= {
                "disable_launch_config_check": True,
                "launch_multiple": True,
                "head_node_id": FAKE_HEAD_NODE_ID,
            }
            kinds = {
                FAKE_HEAD_NODE_TYPE: {"resources": host, "node_config": {}, "max_workers": 0},
                "more": {"resources": host, "node_config": {}, "min_workers": 0, "max_workers": 1},
            }
            told = {"cluster_name": "fake", "max_workers": 1, "provider": provider, "available_node_types": kinds}
            return {**told, "head_node_type": FAKE_HEAD_NODE_TYPE, "auth": {}, "idle_timeout_minutes": 5, **NO_COMMANDS}

    Cloud(dict(host), {}, autoscaler_v2=True).start()
    return "127.0.0.1:6379"


def main() -> None:
    """See the job grow, and end."""
    folder = Path(sys.argv[1])
    apart()
    os.environ.update(
        RAY_TMPDIR=str(folder),
        RAY_USAGE_STATS_ENABLED="0",
        PATH=f"{BIN}:{os.environ['PATH']}",
        RAY_enable_worker_prestart="0",
    )
    Path(folder, "ray").mkdir(exist_ok=True)
    address = cluster()
    line = (
        "--backend",
        "ray",
        "--ray-address",
        address,
        "--bind",
        "127.0.0.1",
        "--nnodes",
        "1:2",
        "--resources",
        "CPU=1",
    )
    script = (str(SCRIPTS / "until_told.py"), str(folder))
    seen: dict[str, Any] = {}
    os.chdir(folder)
    with Job(folder, *line, "--preload", "none", *script, env=WITHOUT_TORCH) as job:
        status = job.until(
            lambda told: told["world_size"] == 2, "a world with a host of the autoscaler's", AUTOSCALER_S
        )
        eventually(lambda: list(folder.glob("rank-1-*")), "a second rank", AUTOSCALER_S)
        seen["waits"] = job.said()
        seen["nodes"] = sorted(status["nodes"])
        (folder / "end").touch()
        seen["incidents"] = status["incidents"]
        seen["status"] = job.ended(AUTOSCALER_S)
    (folder / "seen.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":  # children of this process import it
    main()

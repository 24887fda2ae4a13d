"""`python -m dlrover_backends.fake_k8s`: a cluster of processes to try things on, or nodes for a cluster that is there."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import threading
from pathlib import Path

from dlrover_backends.fake_k8s.ground import Ground
from dlrover_backends.fake_k8s.kubelet import Kubelet, from_kubeconfig


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGINT or SIGTERM; all pods end with it."""
    options = _parser().parse_args(arguments)
    names = [f"{options.prefix}-{index}" for index in range(options.nodes)]
    capacity = dict(one.partition("=")[::2] for one in options.capacity) or None
    if options.join:
        return asyncio.run(_join(options.join, names, capacity))
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with Ground(names, namespace=options.namespace, capacity=capacity, port=options.port) as ground:
        ground.kubeconfig(Path(options.kubeconfig))
        sys.stdout.write(f"{ground.url}: {options.nodes} nodes; export KUBECONFIG={options.kubeconfig}\n")
        sys.stdout.flush()
        ended.wait()
    return 0


async def _join(kubeconfig: str, names: list[str], capacity: dict[str, str] | None) -> int:
    """Be the nodes of a cluster that has an API server, a scheduler and controllers of its own."""
    client = await from_kubeconfig(kubeconfig)
    with tempfile.TemporaryDirectory(prefix="process-kubelet-") as folder:
        kubelet = Kubelet(client, Path(folder) / "pods", {name: {} for name in names}, capacity=capacity)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        await kubelet.start()
        sys.stdout.write(f"joined with {', '.join(names)}\n")
        sys.stdout.flush()
        try:
            await ended.wait()
        finally:
            await kubelet.stop()
            with contextlib.suppress(OSError):
                await client.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m dlrover_backends.fake_k8s", description=__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes (default: 2)")
    parser.add_argument("--prefix", default="node", help="nodes are named PREFIX-0, PREFIX-1 (default: node)")
    parser.add_argument("--namespace", default="train", help="namespace that is made (default: train)")
    parser.add_argument("--port", type=int, default=0, help="port of the API server (default: any free one)")
    parser.add_argument("--kubeconfig", default="fake.kubeconfig", help="file to write (default: fake.kubeconfig)")
    parser.add_argument(
        "--capacity", action="append", default=[], metavar="WHAT=HOW", help="of each node, as nvidia.com/gpu=8"
    )
    parser.add_argument("--join", metavar="KUBECONFIG", help="start no server: be nodes of the cluster of this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())

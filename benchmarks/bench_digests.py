"""What the comparison of replicas costs at the first save: 1 GiB on each of 4 ranks, over a real TCPStore.

Four forked ranks hold the same tensors of fp32 and compare them as `FlashCheckpoint` does before its first save (sampled digests)
and before each save with ``verify="full"`` (all bytes). Measured is the slowest rank, from the moment when all have met. The
ranks share this machine's cores; ``--mib`` is for machines with too little memory.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time

import msgpack
import torch
from _bench import BROKEN, Result, Row, options, say
from torch.distributed import TCPStore

from dlrover_adapters.torch.checkpoint import replicas
from dlrover_adapters.torch.checkpoint.capture import Capture
from dlrover_adapters.torch.checkpoint.meeting import Meeting

MEASURES = ("src/adapters/dlrover_adapters/torch/checkpoint",)

TARGET_MS = 50.0
WORLD = 4
KINDS = {
    "300 tensors, samples": (300, False),
    "3,000 tensors, samples": (3000, False),
    "300 tensors, all bytes": (300, True),
}


def rank(number: int, port: int, mib: int, trials: int) -> dict[str, list[float]]:
    """The slowest rank's milliseconds by kind, as each rank measures them."""
    torch.set_num_threads(1)
    meeting = Meeting(TCPStore("127.0.0.1", port, is_master=False), number, WORLD)
    found: dict[str, list[float]] = {}
    for name, (count, full) in KINDS.items():
        capture = Capture(state={f"t{one}": torch.ones(mib * 2**20 // 4 // count) for one in range(count)}, rank=number)
        chunks = capture.chunks()
        for _ in range(trials):
            meeting.all_gather("ready", b"")
            began = time.perf_counter()
            replicas.compare(replicas.digests(capture, chunks, full=full), meeting)
            took = time.perf_counter() - began
            each = [msgpack.unpackb(one) for one in meeting.all_gather("took", msgpack.packb(took * 1e3))]
            found.setdefault(name, []).append(max(each))
        del capture, chunks
    return found


def measured(mib: int, trials: int) -> dict[str, list[float]]:
    """Fork all other ranks, serve the store, and measure as rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    others = []
    for number in range(1, WORLD):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                rank(number, port, mib, trials)
                code = 0
            finally:
                os._exit(code)
        others.append(pid)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    found = rank(0, port, mib, trials)
    if any(os.waitpid(pid, 0)[1] for pid in others):
        raise RuntimeError("a rank failed")
    del store
    return found


def main() -> int:
    """All kinds, one after the other."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--mib", type=int, default=1024, help="state of each rank, MiB (1024)")

    chosen = options(__doc__, more=more)
    result = Result("digests", "none")
    try:
        found = measured(chosen.mib, chosen.trials)
    except RuntimeError as error:
        say(f"nothing measured: {error}")
        return BROKEN
    for name, took in found.items():
        target = TARGET_MS if name.startswith("300 tensors, samples") else None
        result.rows.append(
            Row(f"replicas compared, {chosen.mib} MiB on each of {WORLD} ranks: {name}", "ms", took, (), target)
        )
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())

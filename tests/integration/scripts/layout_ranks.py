"""Ranks that agree on the layout of a 70B-like model over one store: HSDP, as many chunks as a Llama and Adam have; no tensors.

Forked from this process; each writes what it keeps and writes to FOLDER/RANK. ``layout_ranks.py FOLDER RANKS SHARDS``
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import msgpack
import torch
from torch._C._distributed_c10d import TCPStore

from dlrover_adapters.torch.checkpoint.capture import Signature
from dlrover_adapters.torch.checkpoint.chunks import Chunk
from dlrover_adapters.torch.checkpoint.layout import agreed
from dlrover_adapters.torch.checkpoint.meeting import Meeting

PER_NODE = 8
WAIT = timedelta(seconds=60)


def chunks_of(shard: int, shards: int) -> list[Chunk]:
    """723 parameters; of each two moments, and the step, which all ranks have."""
    found = []
    for number in range(723):
        full = ((8192, 8192), (1024, 8192), (28672, 8192), (8192,))[number % 4]
        shape, at = (full[0] // shards, *full[1:]), (shard * full[0] // shards, *(0 for _ in full[1:]))
        for key in ("", ".exp_avg", ".exp_avg_sq"):
            name = f"layers.{number}.weight{key}"
            tensor = torch.empty(shape, device="meta")
            found.append(Chunk(name, (name,), tensor, "float32", full, at, live=False))
        name = f"layers.{number}.weight.step"
        found.append(Chunk(name, (name,), torch.empty((), device="meta"), "float32", (), (), live=False))
    return found


def rank_(folder: Path, rank: int, ranks: int, shards: int, port: int) -> None:
    """One rank: it agrees, and agrees again with the table that it has then."""
    store = TCPStore("localhost", port, is_master=False, wait_for_workers=False, timeout=WAIT)
    meeting = Meeting(store, rank, ranks, limit_s=60)
    chunks = chunks_of(rank % shards, shards)
    forms = [
        (one.name, one.dtype, one.full_shape, one.offsets, tuple(one.tensor.shape), one.live, "") for one in chunks
    ]
    signature = Signature(tuple(sorted(forms)), ())
    table = agreed(chunks, signature, {}, frozenset(), meeting, rank // PER_NODE)
    again = agreed(chunks, signature, {}, frozenset(), meeting, rank // PER_NODE, before=[table])
    kept = {one.name: one.write for one in table.items}
    told = (table.layout, table.holders, table.writers, kept, again == table)
    (folder / str(rank)).write_bytes(msgpack.packb(told))


def main(folder: Path, ranks: int, shards: int) -> int:
    """All of them, and whether all have ended well."""
    reading, writing = os.pipe()
    pids = []
    gc.disable()
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            try:
                rank_(folder, rank, ranks, shards, int(os.read(reading, 8)))
            except BaseException:  # noqa: BLE001  # a forked child must not go on as its parent
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    # After the forks: a store's server has a thread.
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, b"%8d" % server.port * ranks)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))

"""The layout of a 70B-like model, agreed on by forked ranks over one real TCPStore; no tensors, their forms only.

A list has 2,892 chunks: 723 parameters of a Llama of 80 layers, and of each the two moments and the step that Adam keeps. Under
FSDP every rank has the same names and other offsets, and the steps are on all ranks. All ranks run on this machine's cores.

* First time: from the moment when all ranks have their chunks until the last rank has its table. Everything between counts:
  digests, lists, the assignment, and the making of each rank's table.
* Again: all ranks have the table of the generation before. What one rank does by itself, reading that table from memory and
  digesting its own form, is a row of its own, because real ranks have a core each and 256 of them here share two: the exchange is
  timed from the moment when all ranks have done that.
* Bytes through the store: keys and values, into it and out of it, over the sum of all ranks' lists as they were sent before.
* HSDP: 8 replicas of 8 ranks, a node each: what the busiest node writes, over the mean.

The peer is the exchange as it was (`_before_layout.py`). It needs 0.5 GB in every rank at 256 ranks, so it runs beside ours with
fewer (``--peer``).
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import msgpack
import torch
from _bench import Result, Row, median, options, say
from torch._C._distributed_c10d import TCPStore

import _before_layout as before  # isort: skip
from dlrover_adapters.checkpoint.table import Table
from dlrover_adapters.torch.checkpoint import layout
from dlrover_adapters.torch.checkpoint.capture import Signature
from dlrover_adapters.torch.checkpoint.chunks import Chunk
from dlrover_adapters.torch.checkpoint.division import WRITES, ChunkList, divided
from dlrover_adapters.torch.checkpoint.meeting import Meeting

MEASURES = ("src/adapters/dlrover_adapters/checkpoint", "src/adapters/dlrover_adapters/torch/checkpoint")

RANKS, PEER_RANKS, PER_NODE = 256, 32, 8
HIDDEN, KV, FFN, VOCABULARY, LAYERS = 8192, 1024, 28672, 128256, 80
LIMIT_S = 60.0
Trials = list[list[dict[str, Any]]]
_FORK = get_context("fork")


def parameters() -> list[tuple[str, tuple[int, ...]]]:
    """The model's parameters: names and shapes."""
    found: list[tuple[str, tuple[int, ...]]] = [("embed_tokens.weight", (VOCABULARY, HIDDEN))]
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        found += [
            (f"{at}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)),
            (f"{at}.self_attn.k_proj.weight", (KV, HIDDEN)),
            (f"{at}.self_attn.v_proj.weight", (KV, HIDDEN)),
            (f"{at}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)),
            (f"{at}.mlp.gate_proj.weight", (FFN, HIDDEN)),
            (f"{at}.mlp.up_proj.weight", (FFN, HIDDEN)),
            (f"{at}.mlp.down_proj.weight", (HIDDEN, FFN)),
            (f"{at}.input_layernorm.weight", (HIDDEN,)),
            (f"{at}.post_attention_layernorm.weight", (HIDDEN,)),
        ]
    return [*found, ("norm.weight", (HIDDEN,)), ("lm_head.weight", (VOCABULARY, HIDDEN))]


def chunks_of(shard: int, shards: int) -> list[Chunk]:
    """The chunks of the ``shard``-th of ``shards`` ranks."""
    found = []

    def add(tensor: torch.Tensor, full: tuple[int, ...], offsets: tuple[int, ...], *path: str) -> None:
        found.append(Chunk(".".join(path), path, tensor, "float32", full, offsets, live=False))

    for name, full in parameters():
        length = full[0] // shards
        shape, offsets = (length, *full[1:]), (shard * length, *(0 for _ in full[1:]))
        tensor = torch.empty(shape, device="meta")
        add(tensor, full, offsets, "model", name)
        add(tensor, full, offsets, "optimizer", "state", name, "exp_avg")
        add(tensor, full, offsets, "optimizer", "state", name, "exp_avg_sq")
        add(_SCALAR, (), (), "optimizer", "state", name, "step")
    return found


_SCALAR = torch.empty((), device="meta")


def signature_of(chunks: list[Chunk]) -> Signature:
    """As `Capture.signature` makes it."""
    forms = [
        (one.name, one.dtype, one.full_shape, one.offsets, tuple(one.tensor.shape), one.live, one.same_as)
        for one in chunks
    ]
    return Signature(tuple(sorted(forms)), ("optimizer.param_groups",))


class Counting:
    """A store that counts what goes through it."""

    def __init__(self, store: Any) -> None:
        self._store, self.bytes = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: bytes) -> None:
        """Set a value."""
        self.bytes += len(key) + len(value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Get a value."""
        value = bytes(self._store.get(key))
        self.bytes += len(key) + len(value)
        return value

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        """Set several values."""
        self.bytes += sum(map(len, keys)) + sum(map(len, values))
        self._store.multi_set(keys, values)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Get several values."""
        values = [bytes(one) for one in self._store.multi_get(keys)]
        self.bytes += sum(map(len, keys)) + sum(map(len, values))
        return values


def meeting_of(kind: type[Meeting], port: int, rank: int, world: int) -> tuple[Meeting, Counting]:
    """The meeting of one rank, and the store under it that counts."""
    wait = timedelta(seconds=LIMIT_S)
    store = TCPStore("localhost", port, is_master=False, wait_for_workers=False, timeout=wait)
    meeting = kind(store, rank, world, limit_s=LIMIT_S)
    counting = Counting(meeting._store)
    meeting._store = counting  # type: ignore[assignment]
    return meeting, counting


def ours(port: int, rank: int, world: int, shards: int, together: Callable[[], Any]) -> dict[str, Any]:
    """Run one rank of ours: agree for the first time, and again."""
    meeting, counting = meeting_of(Meeting, port, rank, world)
    chunks = chunks_of(rank % shards, shards)
    signature = signature_of(chunks)
    found: dict[str, Any] = {}

    def one(name: str, meeting: Any, old: tuple[Table, ...]) -> Table:
        together()
        at = counting.bytes
        found[f"{name} cpu"] = -time.process_time()
        found[f"{name} began"] = time.monotonic()
        table = layout.agreed(chunks, signature, {}, frozenset(), meeting, rank // PER_NODE, before=old)
        found[f"{name} ended"] = time.monotonic()
        found[f"{name} cpu"] += time.process_time()
        found[f"{name} bytes"] = counting.bytes - at
        return table

    table = one("first", meeting, ())
    raw = table.packed()
    began = time.process_time()
    again = Table.unpacked(raw)
    found["read"] = time.process_time() - began
    timed = Timed(meeting, together)
    assert one("again", timed, (again,)) == table
    found["again began"], found["again ended"] = timed.began, timed.ended
    found["list"] = len(before.packed(chunks))
    return found


class Timed:
    """A meeting that all ranks begin together, however long each has prepared for it, and that says when it ended."""

    def __init__(self, meeting: Meeting, together: Callable[[], Any]) -> None:
        self._meeting, self._together = meeting, together
        self.began = self.ended = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._meeting, name)

    def decide(self, name: str, mine: bytes, how: Callable[[list[bytes]], bytes]) -> bytes:
        """Decide as the meeting does, from a common start."""
        self._together()
        self.began = time.monotonic()
        found = self._meeting.decide(name, mine, how)
        self.ended = time.monotonic()
        # What each rank does next by itself would take the cores from those that have not heard yet.
        self._together()
        return found


def theirs(port: int, rank: int, world: int, shards: int, together: Callable[[], Any]) -> dict[str, Any]:
    """Run one rank of the exchange before ours, in which the second time costs what the first does."""
    meeting, counting = meeting_of(before.MeetingBefore, port, rank, world)
    chunks = chunks_of(rank % shards, shards)
    signature = signature_of(chunks)
    together()
    at, cpu, began = counting.bytes, time.process_time(), time.monotonic()
    before.agreed(chunks, signature, meeting, rank // PER_NODE)
    ended, cpu = time.monotonic(), time.process_time() - cpu
    found = {"list": len(before.packed(chunks))}
    for name in ("first", "again"):
        found |= {
            f"{name} began": began,
            f"{name} ended": ended,
            f"{name} cpu": cpu,
            f"{name} bytes": counting.bytes - at,
        }
    return found


class Start:
    """Lets all ranks go at once, several times: each says that it is ready, and the parent says go when all are."""

    def __init__(self, world: int, times: int) -> None:
        self._world, self._come = world, 0
        self._ready = os.pipe()
        # One each time: the first to come back must not take what lets the last one go.
        self._go = [os.pipe() for _ in range(times)]

    def together(self) -> None:
        """Wait for all ranks; called by a rank."""
        os.write(self._ready[1], b"r")
        if os.read(self._go[self._come][0], 1) != b"g":
            raise RuntimeError("another rank has failed")
        self._come += 1

    def release(self) -> None:
        """Let the ranks go, each time that all are ready; called by the parent."""
        failed = False
        for _, go in self._go:
            ready = b""
            while len(ready) < self._world and not failed:
                ready += os.read(self._ready[0], self._world - len(ready))
                failed = b"x" in ready
            os.write(go, (b"x" if failed else b"g") * self._world)

    def fail(self) -> None:
        """Tell the parent that this rank has failed."""
        os.write(self._ready[1], b"x")


def run(does: Callable[..., dict[str, Any]], world: int, shards: int, starts: int) -> list[dict[str, Any]]:
    """Fork all ranks, let them begin ``starts`` times together, and return what each measured."""
    start = Start(world, starts)
    results = [_FORK.SimpleQueue() for _ in range(world)]
    port_of = _FORK.Value("i", 0)
    ready = _FORK.Event()
    gc.collect()
    gc.freeze()

    def rank_(rank: int) -> None:
        gc.disable()
        torch.set_num_threads(1)
        ready.wait()
        try:
            found = does(port_of.value, rank, world, shards, start.together)
        except BaseException as error:  # noqa: BLE001  # a forked child must not go on as its parent
            found = {"error": f"rank {rank}: {type(error).__name__}: {error}"}
            start.fail()
        results[rank].put(msgpack.packb(found))

    ranks = [_FORK.Process(target=rank_, args=(rank,), daemon=True) for rank in range(world)]
    for one in ranks:
        one.start()
    # After the forks: a store's server has a thread.
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port_of.value = server.port
    ready.set()
    start.release()
    found = [msgpack.unpackb(one.get()) for one in results]
    for one in ranks:
        one.join()
    wrong = [one["error"] for one in found if "error" in one]
    if wrong:
        raise SystemExit(wrong[0])
    return found


def wall(found: list[dict[str, Any]], name: str) -> float:
    """From the first rank's beginning to the last one's end."""
    return max(one[f"{name} ended"] for one in found) - min(one[f"{name} began"] for one in found)


def through(found: list[dict[str, Any]], name: str) -> float:
    """Bytes through the store over the sum of the lists."""
    return float(sum(one[f"{name} bytes"] for one in found) / sum(one["list"] for one in found))


def busiest(replicas: int, shards: int) -> tuple[float, float]:
    """HSDP, a replica on each node: bytes that the busiest node writes over the mean, ours and before."""
    nodes = [rank // shards for rank in range(replicas * shards)]
    lists, pieces, names = [], [], None
    for shard in range(shards):
        chunks = chunks_of(shard, shards)
        mine = layout._List.of(chunks, signature_of(chunks), frozenset())
        names = names or layout._named(mine.names)
        lists.append(ChunkList(names, mine.places, mine.size))
        pieces.append(before.unpacked(before.packed(chunks)))
    which = [rank % shards for rank in range(len(nodes))]
    size = [{piece.key[0]: piece.size for piece in mine} for mine in pieces]
    written = dict.fromkeys(nodes, 0)
    division = divided(lists, which, nodes)
    for rank, share in enumerate(division.shares):
        assert names is not None
        for piece, flag in zip(names.pieces, share, strict=True):
            written[nodes[rank]] += size[which[rank]][piece.name] * bool(flag & WRITES)
    old: dict[int, int] = defaultdict(int, dict.fromkeys(nodes, 0))
    sizes = {piece.key: piece.size for mine in pieces for piece in mine}
    for key, keepers in before.divided([pieces[number] for number in which], nodes).items():
        old[nodes[keepers[0]]] += sizes[key]
    return tuple(max(one.values()) * len(one) / sum(one.values()) for one in (written, old))  # type: ignore[return-value]


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=RANKS, metavar="N", help=f"ranks of ours (default {RANKS})")
    peer = f"ranks beside the peer (default {PEER_RANKS})"
    parser.add_argument("--peer", type=int, default=PEER_RANKS, metavar="N", help=peer)


def rows_of(large: Trials, small: Trials, peer: Trials) -> Iterator[Row]:
    """The figures of all trials."""

    def each(trials: Trials, of: Callable[[list[dict[str, Any]]], float]) -> list[float]:
        return [of(one) for one in trials]

    ranks, few = len(large[0]), len(small[0])
    first, again = functools.partial(wall, name="first"), functools.partial(wall, name="again")
    sent, sent_again = functools.partial(through, name="first"), functools.partial(through, name="again")
    yield Row(f"first time, {ranks} ranks, FSDP", "s", each(large, first), target=3)
    yield Row(f"again after a failure, {ranks} ranks", "s", each(large, again), target=0.1)
    yield Row(f"bytes through the store over the sum of the lists, {ranks} ranks", "x", each(large, sent), target=2)
    yield Row("the same, again after a failure", "x", each(large, sent_again))
    yield Row(f"first time, {few} ranks", "s", each(small, first), each(peer, first))
    yield Row(f"again, {few} ranks", "s", each(small, again), each(peer, again))
    yield Row(
        f"bytes through the store over the sum of the lists, {few} ranks", "x", each(small, sent), each(peer, sent)
    )
    yield Row(f"processor time of a rank, {few} ranks", "s", each(small, cpu), each(peer, cpu))
    yield Row(f"processor time of a rank, {ranks} ranks", "s", each(large, cpu))
    yield Row(f"processor time of rank 0, {ranks} ranks", "s", each(large, lambda one: one[0]["first cpu"]))
    total = functools.partial(total_cpu, name="first")
    yield Row(f"processor time of all {ranks} ranks over this machine's cores", "s", each(large, total))
    alone = functools.partial(median_of, name="read")
    yield Row("again, not in the row above: a rank reads its table", "s", each(large, alone))
    yield Row("and makes its form and its new table", "s", each(large, functools.partial(median_of, name="again cpu")))


def main() -> int:
    """Run all trials."""
    given = options(__doc__, trials=3, more=_more)
    result = Result("layout", "the exchange as it was before")
    large, small, peer = [], [], []
    for trial in range(given.trials):
        large.append(run(ours, given.ranks, given.ranks, 4))
        times = f"{wall(large[-1], 'first'):.2f} s, again {wall(large[-1], 'again'):.3f} s"
        say(f"trial {trial + 1}: {given.ranks} ranks: {times}")
        small.append(run(ours, given.peer, given.peer, 4))
        peer.append(run(theirs, given.peer, given.peer, 1))
        say(f"  {given.peer} ranks: {wall(small[-1], 'first'):.2f} s; before {wall(peer[-1], 'first'):.2f} s")
    hsdp = busiest(8, 8)
    result.rows += rows_of(large, small, peer)
    what = "HSDP, 8 replicas of 8 ranks: bytes written by the busiest node over the mean"
    result.rows.append(Row(what, "x", [hsdp[0]], [hsdp[1]], target=1.1))
    result.details = {"list_bytes": large[0][0]["list"], "sum_of_lists_bytes": sum(one["list"] for one in large[0])}
    return result.finish(given.json)


def median_of(found: list[dict[str, Any]], name: str) -> float:
    """The median over all ranks."""
    return float(median([one[name] for one in found]))


def total_cpu(found: list[dict[str, Any]], name: str) -> float:
    """Seconds that all ranks' processor time takes on this machine's cores."""
    return float(sum(one[f"{name} cpu"] for one in found) / len(os.sched_getaffinity(0)))


def cpu(found: list[dict[str, Any]]) -> float:
    """Processor time of a rank other than rank 0, the first time: the median."""
    return float(median([one["first cpu"] for one in found[1:]]))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

"""The pure part of elastic data: indices of a shuffled order, the size of a cut, and the first batch after a restore.

Orders: 4,000,000 indices of 10^10 samples by batches of 512, one core; all samples permuted as one, and in chunks of 1,000; with
numpy, and the core's own without it. The cut: bytes of one dataset of 10^10 samples, and of what a rank with leases
says of the worst 10,000 ranges.

The restore: from the packed cut at 90 % of a shuffled epoch to the first batch of 512 of another world size, samples being their
indices, so that nothing is measured but finding them; beside torchdata, mosaicml-streaming and LitData at the size of
``--peer-samples``. torchdata restores at the same world size alone; its epoch up to 90 % is iterated once, outside of what is
measured. The other two are given the state that they would have saved there, and read their samples from files.

The cost: a training loop over an ElasticDataset beside one over a plain DistributedSampler loader, where nothing fails, in steps
of 20 ms.

The large one: what a rank does to have a dataset of 10^10 samples, its terms as they are registered, and its first batch. Leased,
the dataset is registered with a real master, whose memory is looked at when 10,000 fragments of it are used and 10,000 are free.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import _fragments
import _restoring
import _streams
from _agents import Broken
from _bench import BROKEN, HERE, Result, Row, options, say

from dlrover_adapters.data import Items, Reader, fingerprint_of
from dlrover_adapters.data.orders import VectorOrder
from dlrover_core.data import trained
from dlrover_core.data.cut import Place, pack, unpack
from dlrover_core.data.permutation import Order
from dlrover_core.data.quota import quotas, slots
from dlrover_core.data.ranges import FRAGMENTS_MAX, Ranges

MEASURES = (
    "src/dlrover_core/data",
    "src/adapters/dlrover_adapters/data",
    "src/adapters/dlrover_adapters/torch/data",
    "src/dlrover_core/job/leases.py",
    "src/dlrover_core/rules/leases.py",
    "src/dlrover_core/runtime/leasing.py",
)

LARGE = 10**10
RESTORED = 10**9
BATCH = 512
WORLD = 3
INDICES_TARGET = 2_000_000.0
CUT_BYTES, RANGES_BYTES = 1024.0, 65_536.0
RESTORE_MS = 50.0
COST = 1.01
COST_PAIRS, COST_STEPS = 12, 20
LARGE_MS, LEADER_MIB = 50.0, 50.0
PEER_TRIALS = 3
SCALAR = 50_000
"""So many indices of the core's own order: it takes microseconds for each."""
LIMIT_S = 600.0


def indices_a_second(order: Order, count: int) -> float:
    """By batches, from the beginning of the epoch."""
    began = time.perf_counter()
    for start in range(0, count, BATCH):
        if isinstance(order, VectorOrder):
            order.array(start, start + BATCH)
        else:
            list(order.indices(start, start + BATCH))
    return count / (time.perf_counter() - began)


def worst_ranges() -> Ranges:
    """The 10,000 ranges in 10^10 positions that need the most bytes."""
    found, at, dear = [], 0, (LARGE - FRAGMENTS_MAX * 2**15) // 2**21
    for number in range(FRAGMENTS_MAX):
        start = at + (2**21 if number < dear else 2**14)
        at = start + 2**14
        found.append((start, at))
    return Ranges(found)


def restore_ms(size: int) -> float:
    """From the packed cut to the first batch of rank 1."""
    samples = range(size)
    position = size * 9 // 10 // BATCH * BATCH
    saved = pack((Place("train", 2, position, fingerprint_of(Items(samples))),))
    began = time.perf_counter()
    place = unpack(saved)[0]
    source = Items(samples)
    reader = Reader(source, "train", seed=7)
    reader.resume(place)
    batch = reader.batches(BATCH, epochs=3).next(place.epoch, place.position)
    assert batch is not None
    start, end = slots(batch.samples, quotas(BATCH, WORLD), 1)
    found = list(reader.samples(batch.epoch, batch.start + start, batch.start + end))
    took = (time.perf_counter() - began) * 1e3
    assert len(set(found)) == end - start
    return took


def cost_ms(pairs: int, steps: int, loaders: int) -> tuple[list[float], list[float]]:
    """Milliseconds a step, ours and the peer's."""
    line = [sys.executable, str(HERE / "scripts" / "loader_cost.py"), str(pairs), str(steps), str(loaders)]
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the loops ended with {done.returncode}: {done.stderr[-400:]}")
    found = json.loads(done.stdout)
    return found["ours"], found["peer"]


def large_ms(seed: int) -> float:
    """A rank's dataset of 10^10 samples: made, named as it is registered, and its first batch drawn."""
    from dlrover_adapters.torch import ElasticDataset

    began = time.perf_counter()
    data = ElasticDataset("train", size=LARGE, fetch=int, seed=seed, collate=list, global_batch=BATCH, last="drop")
    terms, found = data.terms, next(iter(data))
    took = (time.perf_counter() - began) * 1e3
    assert (terms[1], len(set(found))) == (LARGE, BATCH)
    return took


def orders(result: Result, trials: int, indices: int) -> None:
    """Indices a second."""
    for what, chunk, kind, count in (
        ("permuted as one", 1, VectorOrder, indices),
        ("in chunks of 1,000", 1000, VectorOrder, indices),
        ("permuted as one, without numpy", 1, Order, min(indices, SCALAR)),
        ("in chunks of 1,000, without numpy", 1000, Order, min(indices, SCALAR)),
    ):
        say(f"orders, {what}")
        found = [indices_a_second(kind(LARGE, one, chunk=chunk), count) for one in range(trials)]
        target = INDICES_TARGET if kind is VectorOrder else None
        what = f"indices of 10^10 samples, one core: {what}"
        result.rows.append(Row(what, "indices/s", found, target=target, most=False))


def large(result: Result, trials: int) -> None:
    """10^10 samples: their cuts, a rank's dataset, and a leader that leases them. Raises `Broken`."""
    cut = len(pack((Place("train", 1000, LARGE - 1, f"lines:{LARGE}:{'0f' * 8}"),)))
    leased = len(trained.pack([trained.Trained("train", f"size={LARGE} seed=7 order=shuffled", worst_ranges())]))
    result.rows += [
        Row("the cut of a dataset of 10^10 samples", "bytes", [cut], target=CUT_BYTES, exact=True),
        Row("a rank's part of a cut, leased: the worst 10,000 ranges of 10^10 samples", "bytes", [leased],
            target=RANGES_BYTES, exact=True),
    ]  # fmt: skip
    say("a large dataset")
    large_ms(0)
    found = [large_ms(seed) for seed in range(1, trials + 1)]
    what = "a dataset of 10^10 samples: made, its terms and its first batch"
    result.rows.append(Row(what, "ms", found, target=LARGE_MS))
    say("a leader with a large leased dataset")
    leaders = [_fragments.fragmented() for _ in range(trials)]
    registered = [one.registered_ms for one in leaders]
    result.rows += [
        Row("a leased dataset of 10^10 samples: from the command to the order that names it", "ms", registered,
            target=LARGE_MS),
        Row("its leader's peak memory, 10,000 fragments used and 10,000 free, beyond a leader without data", "MiB",
            [one.peak_mib - one.before_mib for one in leaders], target=LEADER_MIB),
        Row("the whole of that leader's process", "MiB", [one.peak_mib for one in leaders]),
        Row("these 10,000 fragments, packed", "bytes", [leaders[0].cut_bytes], target=RANGES_BYTES, exact=True),
    ]  # fmt: skip


def costs(result: Result, pairs: int) -> None:
    """Beside a plain loader, nothing failing."""
    for loaders in (0, 4):
        say(f"cost with {loaders} loader processes")
        ours, theirs = cost_ms(pairs, COST_STEPS, loaders)
        settings = "DataLoader with DistributedSampler, torch 2.13"
        what = f"a step of 20 ms, 32 samples, {loaders} loader processes"
        result.rows.append(Row(what, "ms", ours, theirs, target=COST, of="ratio", settings=settings))


def restores(result: Result, trials: int, peer_samples: int) -> None:
    """First batches after a restore. A peer that cannot be had is told in the notes."""
    say("restores")
    found = [restore_ms(RESTORED) for _ in range(trials)]
    what = "first batch after a restore at 90 % of 10^9 samples, another world size"
    result.rows.append(Row(what, "ms", found, target=RESTORE_MS))
    for peer in _restoring.PEERS if peer_samples else ():
        say(f"{peer.name}, {peer_samples:,} samples")
        try:
            theirs = _restoring.restores_ms(peer, peer_samples, BATCH, min(trials, PEER_TRIALS))
        except RuntimeError as error:
            say(str(error))
            result.notes.append(str(error))
            continue
        found = [restore_ms(peer_samples) for _ in range(trials)]
        what = f"the same of {peer_samples:,} samples; {peer.name} at the same size"
        result.rows.append(Row(what, "ms", found, theirs, settings=peer.settings))


def topic(result: Result, trials: int) -> None:
    """Messages a second."""
    say("messages of a topic")
    with _streams.broker() as address:
        pairs = [(_streams.elastic(address), _streams.bare(address)) for _ in range(trials)]
    ours, theirs = (list(one) for one in zip(*pairs, strict=True))
    what = "messages of a Kafka topic; beside a bare loop of the client"
    result.rows.append(Row(what, "messages/s", ours, theirs, most=False))


def main() -> int:
    """Orders, cuts, restores, costs."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--indices", type=int, default=4_000_000, help="indices of a trial (4,000,000)")
        parser.add_argument(
            "--peer-samples",
            type=int,
            default=10**7,
            help="size of the epoch that peers restore in; 0: without them",
        )
        parser.add_argument(
            "--cost-pairs", type=int, default=COST_PAIRS, help=f"pairs of loops of a kind ({COST_PAIRS})"
        )

    chosen = options(__doc__, trials=7, more=more)
    result = Result("data", "torchdata, mosaicml-streaming and LitData, where a line names one")
    try:
        orders(result, chosen.trials, chosen.indices)
        large(result, chosen.trials)
        costs(result, chosen.cost_pairs)
        restores(result, chosen.trials, chosen.peer_samples)
        topic(result, chosen.trials)
    except (Broken, OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        say(f"nothing measured: {error}")
        return BROKEN
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())

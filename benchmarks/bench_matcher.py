"""Finding signatures in a training log: how many lines a second, on one core?

The log is what a node's ranks write: step lines, loader and NCCL chatter at start, warnings, checkpoints; one line in 10,000 is
a failure's. It is searched in pieces, as the agent does. Ours with RE2, ours with the standard library alone, and a naive loop
of `re.search`, one pattern after the other over each line, as the log check of DLRover's agent does it, given our patterns.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Callable

from _bench import MISSED, Result, Row, median, options, say

from dlrover_adapters.matching import Re2Set
from dlrover_core.diagnosis.matching import Matcher, ReSet
from dlrover_core.diagnosis.signatures import Table, table

MEASURES = ("src/adapters/dlrover_adapters/matching.py", "src/dlrover_core/diagnosis")

LINES = 200_000
PEER_LINES = 1_000
PIECE_LINES = 2_000
TARGET_LINES_S = 300_000
FAILURE_EVERY = 10_000
SEED = 6

PLAIN = (
    (70, "{time} INFO [rank{rank}] step {step}/500000 | loss: 2.{a:04d} | lr: 3.0e-04 | grad_norm: 0.{b:03d} | tokens/s: {c}"),
    (10, "[default{rank}]: iteration {step}/ 500000 | time (ms): {b}.1 | lm loss: 2.{a:04d}E+00 | nan iterations: 0 |"),
    (6, "Epoch 3:  24%|##4       | {step}/500000 [10:11<41:02, {d}.97it/s, loss=2.{a:04d}]"),
    (4, "gpu-07:{c}:{b} [{rank}] NCCL INFO Channel {d:02d}/16 :    0   1   2   3   4   5   6   7"),
    (3, "{time} INFO data loader: shard {c} opened in 0.{b} s, {a} samples"),
    (2, "{time} WARNING /opt/conda/lib/python3.11/site-packages/torch/utils/data/dataloader.py:557: UserWarning: slow"),
    (2, "{time} INFO saving checkpoint at step {step} to /ckpt/step_{step}; no errors"),
    (2, "{time} DEBUG retrying connection to the metrics server, attempt 1 of 5"),
    (1, "gpu-07:{c}:{b} [{rank}] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.4.0.{d}<0>"),
)  # fmt: skip
FAILURES = (
    "[rank{rank}]: RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "[rank{rank}]:[E1104 10:02:11.004 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: x",
    "[rank{rank}]: KeyError: 'input_ids'",
)


def log(count: int, chance: random.Random) -> list[str]:
    """A log of so many lines."""
    weights, forms = zip(*PLAIN, strict=True)
    lines = []
    for number in range(count):
        failure = number % FAILURE_EVERY == FAILURE_EVERY // 2
        form = chance.choice(FAILURES) if failure else chance.choices(forms, weights)[0]
        lines.append(
            form.format(
                time=f"2026-01-04 10:{number // 6000 % 60:02d}:{number // 100 % 60:02d},{chance.randrange(1000):03d}",
                rank=chance.randrange(8),
                step=number // 8,
                a=chance.randrange(10_000),
                b=chance.randrange(100, 1_000),
                c=chance.randrange(10_000, 99_999),
                d=chance.randrange(10, 99),
            )
        )
    return lines


def searched(known: Matcher, pieces: list[str]) -> int:
    """The number of hits in all pieces."""
    return sum(len(known.scan(piece, "log")) for piece in pieces)


def naive(known: Table) -> Callable[[list[str]], int]:
    """A search that tries one pattern after the other on each line."""
    compiled = [re.compile(pattern, re.IGNORECASE) for one in known.by_id.values() for pattern in one.patterns]
    compiled += [re.compile(one.pattern, re.IGNORECASE) for one in known.code_patterns]

    def search(lines: list[str]) -> int:
        return sum(any(pattern.search(line) for pattern in compiled) for line in lines)

    return search


def rate(count: int, work: Callable[[], int]) -> float:
    """Lines a second of processor time: the machine is shared, and the claim is about one core."""
    began = time.process_time()
    work()
    return count / (time.process_time() - began)


def main() -> int:
    """Measure all in turn."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--lines", type=int, default=LINES, metavar="N", help=f"of the log (default {LINES})")

    chosen = options(__doc__, more=more)
    result = Result("matcher", "a loop of re.search over our patterns, one by one", seed=SEED)
    count = chosen.lines
    lines = log(count, random.Random(SEED))
    pieces = ["\n".join(lines[at : at + PIECE_LINES]) for at in range(0, count, PIECE_LINES)]
    known = table()
    began = time.perf_counter()
    fast = Matcher(known, Re2Set)
    compiled_s = time.perf_counter() - began
    plain, peer = Matcher(known, ReSet), naive(known)
    hits = searched(fast, pieces)
    if hits != searched(plain, pieces) or hits < count // FAILURE_EVERY:
        say(f"the engines differ, or failures were missed: {hits}")
        return MISSED
    rates: dict[str, list[float]] = {"re2": [], "re": [], "peer": [], "alone": []}
    some = lines[:PEER_LINES]
    for number in range(chosen.trials):
        rates["re2"].append(rate(count, lambda: searched(fast, pieces)))
        rates["re"].append(rate(count // 4, lambda: searched(plain, pieces[: len(pieces) // 4])))
        rates["peer"].append(rate(PEER_LINES, lambda: peer(some)))
        rates["alone"].append(rate(count // 10, lambda: searched(fast, lines[: count // 10])))
        say(
            f"{number + 1}/{chosen.trials} "
            + ", ".join(f"{name} {values[-1]:,.0f}/s" for name, values in rates.items())
        )
    result.rows = [
        Row("with RE2", "lines/s", rates["re2"], rates["peer"], TARGET_LINES_S, most=False),
        Row("with the standard library alone", "lines/s", rates["re"], rates["peer"]),
        Row("with RE2, one line at a time", "lines/s", rates["alone"]),
    ]
    size = sum(map(len, lines)) / count
    result.notes.append(
        f"{len(known.by_id)} signatures, {fast.size} patterns; {count:,} lines of {size:.0f} characters, "
        f"{hits} of them a failure's; processor time of one thread; compiling takes {1000 * compiled_s:.0f} ms once"
    )
    result.details = {"hits": hits, "compiled_s": compiled_s, "mib_per_s": median(rates["re2"]) * size / 2**20}
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())

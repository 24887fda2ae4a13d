"""The worker program of `bench_leases.py`, without torch. It draws shards of a leased dataset and writes down what it measured.

    lease_clients.py SIZE SECONDS LINES PACES FOLDER

SECONDS > 0: LINES threads draw shards of one sample for so long, each over a line of its own, each draw saying that the shard
before was used; prints ``{"draws": N, "s": T, "ms": [...]}`` to FOLDER/RANK. Else one shard after the other is used,
each taking PACES[place] seconds, until all of SIZE are; prints when the first was drawn and the end was heard.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from dlrover_adapters.data import LeasedIndices
from dlrover_adapters.data.leases import LeaseLine, Wait
from dlrover_core.data.ranges import Span


def served(line: LeaseLine, work: LeasedIndices, until: float, began: float, took: list[float]) -> None:
    """One worker that needs no time for its samples. What it draws before ``began`` is not counted."""
    used: tuple[Span, ...] = ()
    while (now := time.monotonic()) < until:
        found = line.draw(work.terms.name, 1, used)
        if isinstance(found, Span):
            used = (found,)
            if now >= began:
                took.append((time.monotonic() - now) * 1e3)
        elif not isinstance(found, Wait):
            raise SystemExit("the dataset is too small for the benchmark")
    line.acked(work.terms.name, used)


def main() -> None:
    """Draw."""
    size, seconds, lines = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    rank, told = int(os.environ["RANK"]), Path(sys.argv[5])
    work = LeasedIndices("bench", size=size, shard=1 if seconds else 4)
    if seconds:
        opened = [LeaseLine() for _ in range(lines)]
        for one in opened:
            one.open(work.terms, 1)
        took = [list[float]() for _ in opened]
        began = time.monotonic() + 5.0  # until then grants grow to the pace
        threads = [
            threading.Thread(target=served, args=(one, work, began + seconds, began, its))
            for one, its in zip(opened, took, strict=True)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        ms = [one for its in took for one in its]
        (told / str(rank)).write_text(json.dumps({"draws": len(ms), "s": seconds, "ms": ms}))
        return
    pace_s = float(sys.argv[4].split(",")[int(os.environ["DLROVER_PLACE"])])
    first = 0.0
    for shard in work:
        first = first or time.monotonic()
        time.sleep(pace_s * len(shard.indices))
    (told / str(rank)).write_text(json.dumps({"first": first, "end": time.monotonic()}))


if __name__ == "__main__":
    main()

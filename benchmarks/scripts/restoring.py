"""What the peers of `bench_data.py` have in common: a loader is made again from a state, and read until its first batch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any


def print_ms(restored: Callable[[], Any], batch: int, trials: int) -> int:
    """Print the milliseconds from a state to the first batch, of each trial, as JSON. Returns 1 where a batch is not whole.

    ``restored`` makes a loader that has its state; the loader yields lists.
    """
    took = []
    for _ in range(trials):
        began = time.perf_counter()
        found = next(iter(restored()))
        took.append((time.perf_counter() - began) * 1e3)
        if len(found) != batch:
            return 1
    print(json.dumps(took), flush=True)
    return 0

"""The page of memory that a worker shares with its agent: how far it is, what its steps cost, what its loss does.

Levels, written by one and read by the other, without a message and without a lock. Eight-byte values, written whole; what a
counter counts is written before the counter. The worker writes blocks of `BLOCK_STEPS` steps into a ring and never waits: who
reads later than a round of it loses the oldest. Bytes 128 to 1023 and 1040 to 1535 are `dlrover_core.data.in_work`'s.
"""

from __future__ import annotations

import struct

SLOT_BYTES = 4096
# What workers are told by their environment: "off" means measure nothing; "1", look at gradients.
DETECT_VARIABLE, GRADS_VARIABLE = "DLROVER_DETECT", "DLROVER_WATCH_GRADS"

# What steps cost. ``PACE``: blocks written so far, and the number of the measure: another number, other costs.
PACE_AT = 1024
PACE = struct.Struct("=qq")
RING_AT = 2048
BLOCKS_MAX = 256
COST = struct.Struct("=d")

# What the loss does. Losses reported so far; the first step without a finite one, and how; the newest jump, and how many times.
LOSS_AT = 1536
LOSS = struct.Struct("=qqqqq")
NEVER = -1
FINITE, NAN, INFINITE, GRADIENT = 0, 1, 2, 3

assert RING_AT + BLOCKS_MAX * COST.size <= SLOT_BYTES

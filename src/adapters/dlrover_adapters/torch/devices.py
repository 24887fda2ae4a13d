"""How many accelerators torch sees: what ``--nproc-per-node gpu`` and ``auto`` ask."""

from __future__ import annotations

import torch


def count() -> int:
    """Visible CUDA devices. Importing this module imports torch, which takes seconds."""
    return int(torch.cuda.device_count())

"""How many accelerators torch sees: what ``--nproc-per-node gpu``, ``xpu`` and ``auto`` ask."""

from __future__ import annotations

import torch


def count(kind: str) -> int:
    """Visible devices: CUDA's for ``gpu``, XPU's for ``xpu``, of whatever there is for ``auto``.

    Importing this module imports torch, which takes seconds.
    """
    if kind == "auto":
        return int(torch.accelerator.device_count()) if torch.accelerator.is_available() else 0
    return int(torch.xpu.device_count() if kind == "xpu" else torch.cuda.device_count())

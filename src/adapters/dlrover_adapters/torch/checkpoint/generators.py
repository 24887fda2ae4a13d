"""The random generators of this process: what they are about to draw, as plain Python and small tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def drawn() -> dict[str, Any]:
    """Their states: torch's, that of this rank's CUDA device, numpy's global one and Python's, where they are in use."""
    version, numbers, gauss = random.getstate()
    # Numbers as tensors: a pickler asks torch about each element of a list.
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(numbers, dtype=torch.int64), gauss),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        kind, key, *rest = numpy_random.get_state()
        found["numpy"] = (kind, torch.from_numpy(key.astype("int64")), *rest)
    return found


def draw_again(found: Mapping[str, Any]) -> None:
    """Set them to what they were."""
    torch.set_rng_state(found["torch"])
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])
    if "numpy" in found:
        import numpy as np

        kind, key, *rest = found["numpy"]
        np.random.set_state((kind, key.numpy().astype(np.uint32), *rest))  # noqa: NPY002  # the one that scripts use

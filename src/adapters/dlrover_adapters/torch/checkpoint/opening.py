"""Objects of a checkpoint, unpickled. Whoever can write to a storage must not thereby run code in the jobs that read it.

So what comes from disk or storage is of the kinds that ``torch.load(weights_only=True)`` makes: plain Python, tensors, and
numpy's arrays and numbers. What comes from memory is as trustworthy as the script that saved it: it is this node's own, or a
saver that knows the job's token sent it and nobody changed it on the way.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dlrover_core.words import first_few

from .ladder import RestoreFailed


def opened(
    objects: Mapping[str, bytes], *, trusted: bool, where: str = "FlashCheckpoint", to: str | None = "cpu"
) -> dict[str, Any]:
    """Objects by name. Raises `RestoreFailed` for one of another kind, unless they are ``trusted``.

    ``where``: who takes ``trusted=True``, for people. Tensors among them go ``to`` this device, None: to their own.
    """
    found: dict[str, Any] = {}
    with _numbers():
        for name, raw in objects.items():
            try:
                found[name] = torch.load(io.BytesIO(raw), map_location=to, weights_only=True)
            except (pickle.UnpicklingError, RuntimeError) as error:
                if not trusted:
                    raise RestoreFailed(
                        f"{name} is not of a kind that can be loaded without running code from the checkpoint "
                        f"({_kind(error)}); if you trust whoever can write there: {where}(..., trusted=True)"
                    ) from error
                found[name] = torch.load(io.BytesIO(raw), map_location=to, weights_only=False)
    return found


def newcomers(names: frozenset[str], world: int) -> tuple[str, ...]:
    """What ranks begin with for which nothing was saved, in words; nothing where each has its own."""
    new = [rank for rank in range(world) if f"rank.{rank}.rng" not in names]
    if not new or not any(one.startswith("rank.") for one in names):
        return ()
    told = first_few(new)
    extra = any(one == "extra" or one.startswith("extra.") for one in names)
    also = ", and with rank 0's extra" if extra else ""
    return (
        f"nothing was saved for rank {told} in a world of another shape: it begins with fresh random numbers{also}",
    )


def rewritten(name: str, raw: bytes, *, where: str) -> bytes:
    """Serialise a safe object anew, so that unpickling it runs no code from its source. Raises `RestoreFailed` for others."""
    stream = io.BytesIO()
    torch.save(opened({name: raw}, trusted=False, where=where, to=None)[name], stream)
    return stream.getvalue()


@contextlib.contextmanager
def _numbers() -> Iterator[None]:
    """Numpy's arrays and numbers are data: an array of objects would need what those are of, which stays refused."""
    try:
        import numpy as np
    except ImportError:
        yield
        return
    core: Any = getattr(np, "_core", None) or np.core
    kinds = {type(np.dtype(one)) for one in np.sctypeDict.values()}
    makers = [core.multiarray._reconstruct, core.multiarray.scalar, np.ndarray, np.dtype]
    with torch.serialization.safe_globals([*makers, *kinds]):
        yield


def _kind(error: Exception) -> str:
    """Of torch's long explanation the line that names what it refused."""
    lines = [one.strip() for one in str(error).splitlines()]
    return next((one for one in lines if "GLOBAL" in one or "Unsupported" in one), lines[0] if lines else "")[:160]

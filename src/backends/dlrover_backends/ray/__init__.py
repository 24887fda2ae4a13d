"""The Ray backend: a node is an actor that Ray places (docs/ray.md). The extra ``ray`` brings what it needs.

`client`: the backend in the master, which imports no Ray, and starts the desk. `desk`: a process of its own with Ray's client
library. `keeper`: the actor that is a node. `endings`: what Ray's records say of a node. `private`: every part of Ray that is no
public API.

Names resolve lazily: the launcher looks at the arguments alone, and importing Ray takes two seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_backends.ray.client import RayBackend
    from dlrover_core.runtime.backends import BackendContext

_PLACES = {"RayBackend": "client"}

__all__ = ["RayBackend", "backend"]


def backend(context: BackendContext) -> RayBackend:
    """The Ray backend of a job. Raises `SpecError` for wrong arguments, or where the extra is not installed."""
    from dlrover_core.errors import SpecError

    if importlib.util.find_spec("ray") is None:
        raise SpecError("backend", "ray needs Ray's client library: pip install 'dlrover-core[ray]'")
    from dlrover_backends.ray.client import RayBackend

    return RayBackend(context)


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"dlrover_backends.ray.{place}"), name)

"""The event log on etcd: several hosts' masters share one log, of which one leads (`docs/etcd.md`).

Names resolve lazily: whoever only reads an address, or lists the logs there are, needs neither grpc nor protobuf.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_adapters.etcd.log import EtcdLog

_PLACES = {"EtcdLog": "log"}

__all__ = ["EtcdLog"]


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{place}"), name)

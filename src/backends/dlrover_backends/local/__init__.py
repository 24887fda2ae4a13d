"""The local backend: N nodes are N agent processes on this host.

The master holds the client half, `LocalBackend`; the processes belong to a `LocalNodeHost` in the launcher, which outlives
masters. Composing them takes one line on either side:

```python
async with LocalNodeHost(state_dir / "nodes.sock", command):     # in the launcher, in its main thread
    ...
backend = LocalBackend(state_dir / "nodes.sock")                 # in every master
```

Names resolve lazily: the launcher starts its first processes (`blanks`) before it imports anything slow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_backends.local.blanks import Ahead
    from dlrover_backends.local.client import LocalBackend
    from dlrover_backends.local.host import Command, LocalNodeHost, StaleToken
    from dlrover_backends.local.process import LocalCommand, Started

_PLACES = {
    "Ahead": "blanks",
    "Command": "host",
    "LocalBackend": "client",
    "LocalCommand": "process",
    "LocalNodeHost": "host",
    "StaleToken": "host",
    "Started": "process",
}

__all__ = ["Ahead", "Command", "LocalBackend", "LocalCommand", "LocalNodeHost", "StaleToken", "Started"]


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{place}"), name)

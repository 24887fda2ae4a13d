"""The local backend: N nodes are N agent processes on this host.

The master holds the client half, `LocalBackend`; the processes belong to a `LocalNodeHost` in the launcher, which outlives
masters. Composing them takes one line on either side:

```python
async with LocalNodeHost(state_dir / "nodes.sock", command):     # in the launcher, in its main thread
    ...
backend = LocalBackend(state_dir / "nodes.sock")                 # in every master
```

`backend` makes it for `--backend local`, whose argument, the socket, is the launcher's to give.

Names resolve lazily: the launcher starts its first processes (`blanks`) before it imports anything slow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_backends.local.blanks import Ahead
    from dlrover_backends.local.client import LocalBackend
    from dlrover_backends.local.client import backend as backend
    from dlrover_backends.local.host import Command, LocalNodeHost
    from dlrover_backends.shared.asking import StaleToken
    from dlrover_backends.shared.process import LocalCommand, Started

_PLACES = {
    "Ahead": "local.blanks",
    "Command": "local.host",
    "LocalBackend": "local.client",
    "LocalCommand": "shared.process",
    "LocalNodeHost": "local.host",
    "StaleToken": "shared.asking",
    "backend": "local.client",
    "Started": "shared.process",
}

__all__ = ["Ahead", "Command", "LocalBackend", "LocalCommand", "LocalNodeHost", "StaleToken", "Started", "backend"]


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"dlrover_backends.{place}"), name)

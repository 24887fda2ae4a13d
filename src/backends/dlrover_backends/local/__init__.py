"""The local backend: N nodes are N agent processes on this host.

The master holds the client half, `LocalBackend`; the processes belong to a `LocalNodeHost` in the launcher, which outlives
masters. Composing them takes one line on either side:

```python
async with LocalNodeHost(state_dir / "nodes.sock", command):     # in the launcher, in its main thread
    ...
backend = LocalBackend(state_dir / "nodes.sock")                 # in every master
```
"""

from dlrover_backends.local.client import LocalBackend
from dlrover_backends.local.host import Command, LocalCommand, LocalNodeHost, StaleToken

__all__ = ["Command", "LocalBackend", "LocalCommand", "LocalNodeHost", "StaleToken"]

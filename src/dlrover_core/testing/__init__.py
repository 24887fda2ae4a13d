"""What proves us, and whatever is built on us: virtual time, in-memory ports, a cluster of real masters and agents in one
loop, a TCP proxy that breaks networks, and conformance kits for logs and backends. None of it needs pytest; the classes are
written for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_core.testing.backend_conformance import BackendConformance as BackendConformance
    from dlrover_core.testing.backend_conformance import Stand as Stand
    from dlrover_core.testing.cluster import Cluster as Cluster
    from dlrover_core.testing.log_conformance import LogConformance as LogConformance
    from dlrover_core.testing.network import Network as Network
    from dlrover_core.testing.proxy import Proxy as Proxy
    from dlrover_core.testing.training import MemoryLauncher as MemoryLauncher
    from dlrover_core.testing.training import Training as Training

_HOME = {
    "BackendConformance": "backend_conformance",
    "Cluster": "cluster",
    "LogConformance": "log_conformance",
    "MemoryLauncher": "training",
    "Network": "network",
    "Proxy": "proxy",
    "Stand": "backend_conformance",
    "Training": "training",
}

__all__ = sorted(_HOME)  # noqa: PLE0605  # a list of strings, made from the table above


def __getattr__(name: str) -> Any:
    """Load a name when it is first used."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value

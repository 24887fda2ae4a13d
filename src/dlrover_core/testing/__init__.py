"""What proves us, and whatever is built on us: virtual time, in-memory ports, a cluster of real masters and agents in one
loop, a TCP proxy that breaks networks, and conformance kits for logs and backends. None of it needs pytest; the classes are
written for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_core.sim.faults import KINDS as KINDS
    from dlrover_core.sim.faults import Fault as Fault
    from dlrover_core.sim.run import Broken as Broken
    from dlrover_core.sim.run import Run as Run
    from dlrover_core.sim.scenario import Plan as Plan
    from dlrover_core.sim.scenario import Scenario as Scenario
    from dlrover_core.testing.backend_conformance import BackendConformance as BackendConformance
    from dlrover_core.testing.backend_stand import Abilities as Abilities
    from dlrover_core.testing.backend_stand import Stand as Stand
    from dlrover_core.testing.chaos import Chaos as Chaos
    from dlrover_core.testing.cluster import Cluster as Cluster
    from dlrover_core.testing.crashes import Crashes as Crashes
    from dlrover_core.testing.crashes import crash_at_every_index as crash_at_every_index
    from dlrover_core.testing.local import LocalJob as LocalJob
    from dlrover_core.testing.log_conformance import LogConformance as LogConformance
    from dlrover_core.testing.network import Network as Network
    from dlrover_core.testing.platform import Machine as Machine
    from dlrover_core.testing.platform import NameTaken as NameTaken
    from dlrover_core.testing.platform import NoQuota as NoQuota
    from dlrover_core.testing.platform import Platform as Platform
    from dlrover_core.testing.platform import RoomError as RoomError
    from dlrover_core.testing.promises import Promise as Promise
    from dlrover_core.testing.promises import Together as Together
    from dlrover_core.testing.proxy import Proxy as Proxy
    from dlrover_core.testing.stage import play as play
    from dlrover_core.testing.story import Story as Story
    from dlrover_core.testing.training import MemoryLauncher as MemoryLauncher
    from dlrover_core.testing.training import Training as Training

_HOME = {
    "Abilities": "backend_stand",
    "BackendConformance": "backend_conformance",
    "Broken": ".sim.run",
    "Chaos": "chaos",
    "Cluster": "cluster",
    "Crashes": "crashes",
    "Fault": ".sim.faults",
    "KINDS": ".sim.faults",
    "LocalJob": "local",
    "LogConformance": "log_conformance",
    "Machine": "platform",
    "MemoryLauncher": "training",
    "NameTaken": "platform",
    "Network": "network",
    "NoQuota": "platform",
    "Plan": ".sim.scenario",
    "Platform": "platform",
    "Promise": "promises",
    "Proxy": "proxy",
    "RoomError": "platform",
    "Run": ".sim.run",
    "Scenario": ".sim.scenario",
    "Stand": "backend_stand",
    "Story": "story",
    "Together": "promises",
    "Training": "training",
    "crash_at_every_index": "crashes",
    "play": "stage",
}

__all__ = sorted(_HOME)  # noqa: PLE0605  # a list of strings, made from the table above


def __getattr__(name: str) -> Any:
    """Load a name when it is first used."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value

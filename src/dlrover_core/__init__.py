"""dlrover-core: an event-sourced library that keeps distributed training running.

Everything a program needs is here, flat, and loaded only when it is named: importing this package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_core.errors import (
        ConnectionLost as ConnectionLost,
    )
    from dlrover_core.errors import (
        CoreError as CoreError,
    )
    from dlrover_core.errors import (
        HandedOver as HandedOver,
    )
    from dlrover_core.errors import (
        IllegalTransition as IllegalTransition,
    )
    from dlrover_core.errors import (
        LaunchFailed as LaunchFailed,
    )
    from dlrover_core.errors import (
        LaunchRefused as LaunchRefused,
    )
    from dlrover_core.errors import (
        LogCorrupt as LogCorrupt,
    )
    from dlrover_core.errors import (
        LogError as LogError,
    )
    from dlrover_core.errors import (
        LogFull as LogFull,
    )
    from dlrover_core.errors import (
        LogUnavailable as LogUnavailable,
    )
    from dlrover_core.errors import (
        MalformedMessage as MalformedMessage,
    )
    from dlrover_core.errors import (
        NotLeading as NotLeading,
    )
    from dlrover_core.errors import (
        Refused as Refused,
    )
    from dlrover_core.errors import (
        SchemaTooNew as SchemaTooNew,
    )
    from dlrover_core.errors import (
        SpecError as SpecError,
    )
    from dlrover_core.errors import (
        TokenRefused as TokenRefused,
    )
    from dlrover_core.job.hosts import QuarantineHost as QuarantineHost
    from dlrover_core.job.hosts import ReleaseHost as ReleaseHost
    from dlrover_core.job.job import ResumeJob as ResumeJob
    from dlrover_core.job.job import StopJob as StopJob
    from dlrover_core.job.job import SuspendJob as SuspendJob
    from dlrover_core.job.operations import DrainNode as DrainNode
    from dlrover_core.job.operations import ScaleGroup as ScaleGroup
    from dlrover_core.job.orders import NodeLaunch as NodeLaunch
    from dlrover_core.job.state import JobState as JobState
    from dlrover_core.job.state import fold as fold
    from dlrover_core.kernel.codec import Codec as Codec
    from dlrover_core.kernel.engine import (
        Engine as Engine,
    )
    from dlrover_core.kernel.engine import (
        Facts as Facts,
    )
    from dlrover_core.kernel.engine import (
        Fold as Fold,
    )
    from dlrover_core.kernel.engine import (
        Model as Model,
    )
    from dlrover_core.kernel.engine import (
        Rules as Rules,
    )
    from dlrover_core.kernel.events import (
        Batch as Batch,
    )
    from dlrover_core.kernel.events import (
        Record as Record,
    )
    from dlrover_core.kernel.events import (
        Registry as Registry,
    )
    from dlrover_core.kernel.events import (
        event as event,
    )
    from dlrover_core.kernel.lifecycle import Lifecycle as Lifecycle
    from dlrover_core.kernel.log import (
        EventLog as EventLog,
    )
    from dlrover_core.kernel.log import (
        LeaderInfo as LeaderInfo,
    )
    from dlrover_core.kernel.log import (
        Leadership as Leadership,
    )
    from dlrover_core.kernel.log import (
        Snapshot as Snapshot,
    )
    from dlrover_core.logs import open_log as open_log
    from dlrover_core.logs.memory import MemoryLog as MemoryLog
    from dlrover_core.runtime.agent import Agent as Agent
    from dlrover_core.runtime.backend import (
        AVOIDED as AVOIDED,
    )
    from dlrover_core.runtime.backend import (
        DELETED as DELETED,
    )
    from dlrover_core.runtime.backend import (
        Backend as Backend,
    )
    from dlrover_core.runtime.backend import (
        Changed as Changed,
    )
    from dlrover_core.runtime.backend import (
        Listed as Listed,
    )
    from dlrover_core.runtime.backend import (
        Observation as Observation,
    )
    from dlrover_core.runtime.backends import BackendContext as BackendContext
    from dlrover_core.runtime.launcher import Launcher as Launcher
    from dlrover_core.runtime.master import (
        Master as Master,
    )
    from dlrover_core.runtime.master import (
        Outcome as Outcome,
    )
    from dlrover_core.runtime.pipeline import Deposed as Deposed
    from dlrover_core.spec import (
        GroupSpec as GroupSpec,
    )
    from dlrover_core.spec import (
        JobSpec as JobSpec,
    )
    from dlrover_core.testing.network import Network as Network
    from dlrover_core.testing.training import (
        MemoryLauncher as MemoryLauncher,
    )
    from dlrover_core.testing.training import (
        Training as Training,
    )

_HOME = {
    "Agent": "runtime.agent",
    "AVOIDED": "runtime.backend",
    "DELETED": "runtime.backend",
    "Backend": "runtime.backend",
    "BackendContext": "runtime.backends",
    "Batch": "kernel.events",
    "Changed": "runtime.backend",
    "Codec": "kernel.codec",
    "ConnectionLost": "errors",
    "CoreError": "errors",
    "Deposed": "runtime.pipeline",
    "DrainNode": "job.operations",
    "Engine": "kernel.engine",
    "EventLog": "kernel.log",
    "Facts": "kernel.engine",
    "Fold": "kernel.engine",
    "GroupSpec": "spec",
    "HandedOver": "errors",
    "IllegalTransition": "errors",
    "JobSpec": "spec",
    "JobState": "job.state",
    "LaunchFailed": "errors",
    "LaunchRefused": "errors",
    "Launcher": "runtime.launcher",
    "LeaderInfo": "kernel.log",
    "Leadership": "kernel.log",
    "Lifecycle": "kernel.lifecycle",
    "Listed": "runtime.backend",
    "LogCorrupt": "errors",
    "LogError": "errors",
    "LogFull": "errors",
    "LogUnavailable": "errors",
    "MalformedMessage": "errors",
    "Master": "runtime.master",
    "MemoryLauncher": "testing.training",
    "MemoryLog": "logs.memory",
    "Model": "kernel.engine",
    "Network": "testing.network",
    "NodeLaunch": "job.orders",
    "NotLeading": "errors",
    "Observation": "runtime.backend",
    "Outcome": "runtime.master",
    "QuarantineHost": "job.hosts",
    "Record": "kernel.events",
    "Refused": "errors",
    "Registry": "kernel.events",
    "ReleaseHost": "job.hosts",
    "ResumeJob": "job.job",
    "Rules": "kernel.engine",
    "ScaleGroup": "job.operations",
    "SchemaTooNew": "errors",
    "Snapshot": "kernel.log",
    "SpecError": "errors",
    "StopJob": "job.job",
    "SuspendJob": "job.job",
    "TokenRefused": "errors",
    "Training": "testing.training",
    "event": "kernel.events",
    "fold": "job.state",
    "open_log": "logs",
}

__all__ = sorted(_HOME)  # noqa: PLE0605  # a list of strings, made from the table above


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return __all__

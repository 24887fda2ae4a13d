"""Our own backend and logs under their contracts, for `dlrover conformance`: proof that a kit can be passed, and how."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, cast

from dlrover_core.job.orders import NodeLaunch
from dlrover_core.kernel.log import EventLog, Snapshot
from dlrover_core.testing.backend_conformance import BackendConformance
from dlrover_core.testing.backend_stand import Abilities, Stand, make_launch
from dlrover_core.testing.log_conformance import LogConformance

if TYPE_CHECKING:
    from dlrover_backends.local import LocalCommand
    from dlrover_core.logs.memory import MemoryLog
    from dlrover_core.logs.sqlite import SqliteLog
    from dlrover_core.testing.conformance import Kit

# A stand-in for an agent: it lives until a signal ends it.
_AGENT = (sys.executable, "-I", "-S", "-c", "import signal; signal.pause()")
_NONSENSE = "nonsense"
ONE_HOST = {
    "waits": "this host starts a node at once, or has a limit of nodes",
    "lost": "a host that does not answer itself answers nobody",
    "notices": "nobody announces that a process will be taken away",
    "avoid": "there is one host",
}
"""What the local backend has no notion of."""


def kits() -> dict[type, tuple[str, Kit]]:
    """The kit of each of our classes that needs more than its constructor tells."""
    from dlrover_backends.local import LocalBackend
    from dlrover_core.logs.memory import MemoryLog
    from dlrover_core.logs.sqlite import SqliteLog
    from dlrover_core.testing.cluster import MemoryBackend

    return {
        LocalBackend: ("backend", Local),
        MemoryBackend: ("backend", InMemory),
        MemoryLog: ("log", Memory),
        SqliteLog: ("log", Sqlite),
    }


class Local(BackendConformance):
    """The local backend, over real processes."""

    @contextlib.asynccontextmanager
    async def make_backend(self) -> AsyncIterator[Stand]:
        """A host in this process, its nodes killed by their pid."""
        from dlrover_backends.local import LocalBackend, LocalNodeHost

        with tempfile.TemporaryDirectory(prefix="dlrover-conformance-") as here:
            async with LocalNodeHost(f"{here}/nodes.sock", _command) as host:

                async def kill(name: str) -> None:
                    pid = host.pid(name)
                    assert pid is not None, f"{name} has no process"
                    os.kill(pid, signal.SIGKILL)

                yield Stand(LocalBackend(f"{here}/nodes.sock"), kill, cannot=ONE_HOST)

    def nonsense(self) -> NodeLaunch:
        """A program that is not there."""
        return make_launch()._replace(group=_NONSENSE)


class InMemory(BackendConformance):
    """The backend in memory, over a simulated machine room whose nodes do nothing."""

    hosts = tuple(f"host-{number}" for number in range(32))

    @contextlib.asynccontextmanager
    async def make_backend(self) -> AsyncIterator[Stand]:
        """An empty room."""
        from dlrover_core.testing.cluster import MemoryBackend
        from dlrover_core.testing.platform import Platform

        async def live(_node: NodeLaunch, _host: str) -> str:
            await asyncio.get_running_loop().create_future()
            return ""

        room = Platform(live, hosts=self.hosts, boot_s=0.0)

        async def kill(name: str) -> None:
            room.kill(name)

        async def fill() -> None:
            room.pool.hold("every host is taken")

        async def free() -> None:
            room.pool.hold("")

        async def lose(name: str) -> None:
            room.reach(name, lost=True)

        async def reach(name: str) -> None:
            room.reach(name, lost=False)

        async def warn(name: str, after_s: float) -> None:
            room.give_notice(name, after_s)

        async def withdraw(name: str) -> None:
            room.withdraw_notice(name)

        try:
            yield Stand(MemoryBackend(room), kill, Abilities(fill, free, lose, reach, warn, withdraw))
        finally:
            await room.close()


def _command(node: NodeLaunch, _token: int) -> LocalCommand:
    from dlrover_backends.local import LocalCommand

    return LocalCommand(("/no/such/program",) if node.group == _NONSENSE else _AGENT)


class Memory(LogConformance):
    """The log in memory."""

    @contextlib.asynccontextmanager
    async def make_log(self) -> AsyncIterator[EventLog]:
        """A log of its own."""
        from dlrover_core.logs import open_log

        async with open_log("memory:", self.codec) as log:
            yield log

    async def depose(self, log: EventLog, job: str) -> None:
        """As if the leader's process had died."""
        cast("MemoryLog", log).expire(job)

    async def halve_snapshot(self, log: EventLog, job: str, snapshot: Snapshot) -> None:
        """As if its writer had died."""
        cast("MemoryLog", log).halve_snapshot(job, snapshot)


class Sqlite(LogConformance):
    """The SQLite log, also between two clients of one file."""

    @contextlib.asynccontextmanager
    async def make_log(self) -> AsyncIterator[EventLog]:
        """A log in a directory of its own."""
        from dlrover_core.logs import open_log

        with tempfile.TemporaryDirectory(prefix="dlrover-conformance-") as here:
            async with open_log(f"sqlite://{here}/log.db", self.codec) as log:
                yield log

    def second(self, log: EventLog) -> AbstractAsyncContextManager[EventLog]:
        """Another client of the same file."""
        from dlrover_core.logs import open_log

        return open_log(f"sqlite://{cast('SqliteLog', log).path}", self.codec)

    async def depose(self, log: EventLog, job: str) -> None:
        """Delete the lock file under the leader."""
        from dlrover_core.logs.reader import lock_path

        lock_path(cast("SqliteLog", log).path, job).unlink()

    async def halve_snapshot(self, log: EventLog, job: str, snapshot: Snapshot) -> None:
        """Half the bytes, without their checksum."""
        from dlrover_core.logs import tables

        db = tables.connect(cast("SqliteLog", log).path, create=False)
        row = tables.find_job(db, job)
        assert row is not None
        half = (row.id, snapshot.seq, snapshot.schema, 0, snapshot.state[: len(snapshot.state) // 2])
        db.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?, ?)", half)
        db.close()

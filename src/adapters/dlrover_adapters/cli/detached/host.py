"""The node host of a detached job: ``python -m dlrover_adapters.cli.detached.host``. All agents are its children."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from dlrover_adapters.agent.process import set_name
from dlrover_adapters.cli import ahead, local_nodes
from dlrover_adapters.cli.detached import output, record
from dlrover_adapters.cli.detached.estate import SUPERVISOR, Estate, Partner
from dlrover_adapters.cli.detached.remote import SOCKET
from dlrover_adapters.cli.settings import Settings
from dlrover_adapters.telemetry.logs import set_up
from dlrover_backends.local import LocalNodeHost
from dlrover_backends.shared import orphans, wire
from dlrover_core.errors import CoreError
from dlrover_core.host import threads

LOOK_S = 1.0


def main() -> int:
    """Keep the nodes, and a supervisor, until told to end. SIGTERM ends the nodes with their grace, not the job."""
    estate, partner = Estate.read()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    set_name("dlrover-host")
    settings = Settings.read(f"/proc/self/fd/{estate.papers}")
    known = record.read(Path(settings.directory))
    if known is None:
        print("dlrover-run: the job's directory is gone", file=sys.stderr)
        return 1
    os.ftruncate(estate.claim, 0)
    os.pwrite(estate.claim, f"{os.getpid()}\n".encode(), 0)
    set_up(Path(settings.control_log), settings.log_level, role="host")
    token = os.environ["DLROVER_TOKEN"]
    with ahead.started(settings, token, known.counts) as first:
        agents = local_nodes.Agents(first, known.standby)
        host = local_nodes.node_host(settings, settings.write(), token, agents)
        asyncio.run(_Host(settings, host, estate, token, partner).run())
    return 0


class _Host:
    """Serves the supervisor, and keeps one."""

    def __init__(self, settings: Settings, host: LocalNodeHost, estate: Estate, token: str, partner: int) -> None:
        self._settings, self._host = settings, host
        self._path = Path(settings.run_dir or "") / SOCKET
        self._partner = Partner(estate, SUPERVISOR, settings.job.job, token, settings.mark, partner)
        self._bounds = output.Bounds(Path(settings.directory), settings.log_bytes_max)
        self._over = asyncio.Event()

    async def run(self) -> None:
        threads.install()
        loop, grace_s = asyncio.get_running_loop(), 0.0

        def leave() -> None:
            nonlocal grace_s
            grace_s = self._settings.job.stop_grace_s
            self._over.set()

        loop.add_signal_handler(signal.SIGTERM, leave)
        async with self._host:
            server = await asyncio.start_unix_server(self._take, sock=wire.listen(self._path))
            tasks = [asyncio.ensure_future(one) for one in (self._partner.keep(), self._tend())]
            try:
                await self._over.wait()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                server.close()
                await self._host.close(grace_s)
                self._bounds.close()

    async def _tend(self) -> None:
        while True:
            with contextlib.suppress(CoreError, OSError):
                await self._host.restore()
            with contextlib.suppress(RuntimeError):
                await asyncio.to_thread(orphans.reap)
                await asyncio.to_thread(self._bounds.look)
            await asyncio.sleep(LOOK_S)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(CoreError):
            try:
                await wire.write(writer, await self._answer(await wire.read(reader)))
            finally:
                writer.close()

    async def _answer(self, request: tuple[Any, ...]) -> Any:
        match request:
            case ("said",):
                return json.loads(json.dumps(self._host.said()))
            case ("warm",):
                await self._host.warm()
            case ("kill",):
                self._host.kill()
            case ("close", float(grace_s)):
                await self._host.close(grace_s)
                self._over.set()
        return True


if __name__ == "__main__":
    sys.exit(main())

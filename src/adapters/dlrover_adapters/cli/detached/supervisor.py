"""The supervisor of a detached job: ``python -m dlrover_adapters.cli.detached.supervisor``. All masters are its children."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from dlrover_adapters.agent.process import set_name
from dlrover_adapters.cli import lead
from dlrover_adapters.cli.detached import record
from dlrover_adapters.cli.detached.estate import HOST, Estate, Partner
from dlrover_adapters.cli.detached.remote import RemoteNodes
from dlrover_adapters.cli.settings import EX_AGAIN, Settings
from dlrover_adapters.telemetry.logs import set_up
from dlrover_core.host import threads


def main() -> int:
    """Keep masters until the job is over, and write down how it ended. SIGTERM: another supervisor goes on."""
    estate, partner = Estate.read()
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    set_name("dlrover-super")
    settings = Settings.read(f"/proc/self/fd/{estate.papers}")
    set_up(Path(settings.control_log), settings.log_level, role="launcher")
    return asyncio.run(_run(settings, estate, partner))


async def _run(settings: Settings, estate: Estate, partner: int) -> int:
    threads.install()
    token, directory = os.environ["DLROVER_TOKEN"], Path(settings.directory)
    known = record.read(directory)
    nodes = RemoteNodes(Path(settings.run_dir or ""))
    keeping = asyncio.ensure_future(Partner(estate, HOST, settings.job.job, token, settings.mark, partner).keep())
    try:
        how = lead.How(where=known.where if known is not None else "", leaves=True)
        status = await lead.supervise(settings, token, socket.socket(fileno=os.dup(estate.port)), nodes, how)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    if status != EX_AGAIN:
        record.put(directory / record.ENDED, {"mark": settings.mark, "status": status})
        await nodes.close()
    return status


if __name__ == "__main__":
    sys.exit(main())

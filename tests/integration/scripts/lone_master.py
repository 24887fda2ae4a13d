"""A master with a real listener and a real log, and nothing else: ``lone_master.py FOLDER [STRANGERS]``.

Its token is in DLROVER_TOKEN; it lets so many connections wait that have not said yet who they are. The job has two nodes that
train, ``worker-0-0`` and ``worker-1-0``, and one that may be anything, ``guest-0-0``. Agents come by themselves. It
prints its address once it leads, logs to FOLDER/control.log, and ends with SIGTERM.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from dlrover_adapters.cli.collector import settle
from dlrover_adapters.http import HttpLimits, HttpListener, bind
from dlrover_adapters.telemetry.logs import set_up
from dlrover_core import GroupSpec, JobSpec, Master, open_log

FOLDER = Path(sys.argv[1])
STRANGERS_MAX = int(sys.argv[2]) if len(sys.argv) > 2 else 1500
LIMITS = HttpLimits(handshake_s=3.0, ping_s=2.0, send_s=2.0, close_s=0.5, strangers_max=STRANGERS_MAX)
SPEC = JobSpec(
    "hostile",
    (GroupSpec(nodes_min=2, nodes_max=2), GroupSpec("guest", nodes_min=1, nodes_max=1)),
    heartbeat_s=0.1,
    silence_s=5.0,
)


async def main() -> None:
    """Lead until told to end."""
    async with open_log(f"sqlite://{FOLDER}/log.db") as log:
        listener = HttpListener(bind(), os.environ["DLROVER_TOKEN"], limits=LIMITS)
        master = Master(
            SPEC,
            event_log=log,
            listener=listener,
            backend=None,
            wall=lambda: time.time_ns() // 1000,
            holder="lone",
            run_id="run-1",
        )
        running = asyncio.ensure_future(master.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        leads = asyncio.ensure_future(master.led.wait())
        await asyncio.wait({running, leads}, return_when=asyncio.FIRST_COMPLETED)
        sys.stdout.write(f"{listener.address}\n")
        sys.stdout.flush()
        with contextlib.suppress(asyncio.CancelledError):
            await running


settle()
set_up(FOLDER / "control.log", "info", role="master")
asyncio.run(main())

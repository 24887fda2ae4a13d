"""A master in a process of its own: ``python benchmarks/_master.py --nodes N --log URL``; its token is in DLROVER_TOKEN.

The real `Master`, the real HTTP listener on a port of its own, the log it is told of, and no scheduler: agents come by
themselves. It prints its address once it leads, and ends with SIGTERM. `started` runs one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import logging
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
START_S = 30.0


@dataclass(slots=True)
class Running:
    """A master that leads: its process, where it listens, and what opens the door."""

    process: subprocess.Popen[str]
    address: str
    token: str

    def cpu_s(self) -> float:
        """CPU seconds that the process has used so far."""
        return cpu_s(self.process.pid)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextlib.contextmanager
def started(folder: Path, nodes: int, *options: str) -> Iterator[Running]:
    """A master over a SQLite log in ``folder``, for one group of ``nodes``."""
    token = secrets.token_hex(16)
    log = f"sqlite://{folder}/log.db"
    command = [sys.executable, __file__, "--nodes", str(nodes), "--log", log, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "DLROVER_TOKEN": token})
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError("the master did not come up")
        yield Running(process, address, token)
    finally:
        process.terminate()
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--heartbeat-s", type=float, default=1.0)
    parser.add_argument("--profile", type=Path)
    chosen = parser.parse_args()
    if chosen.profile is None:
        asyncio.run(serve(chosen))
    else:
        profile = cProfile.Profile()
        profile.runcall(asyncio.run, serve(chosen))
        profile.dump_stats(chosen.profile)
    return 0


async def serve(chosen: argparse.Namespace) -> None:
    """Lead until told to end."""
    import structlog
    from _leading import leading

    from dlrover_adapters.cli.collector import settle
    from dlrover_adapters.http import HttpListener, bind
    from dlrover_core import GroupSpec, JobSpec, open_log

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    settle()  # as a master's process does
    spec = JobSpec(
        "bench",
        (GroupSpec(nodes_min=chosen.nodes, nodes_max=chosen.nodes),),
        heartbeat_s=chosen.heartbeat_s,
    )
    async with open_log(chosen.log) as log:
        listener = HttpListener(bind(), os.environ["DLROVER_TOKEN"])
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        async with leading(spec, log, listener):
            print(listener.address, flush=True)
            await stopped.wait()


if __name__ == "__main__":
    sys.exit(main())

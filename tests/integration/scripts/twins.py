"""Two masters of one new job, started on two hosts at the same instant: one run, one leader."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from hosts_net import TOKEN, Host, loopback
from running import eventually
from tools.etcd_cluster import Cluster

from dlrover_adapters.cli import scratch
from dlrover_adapters.http.client import fetch_status
from dlrover_core.errors import CoreError
from dlrover_core.job import job
from dlrover_core.kernel.events import Record
from dlrover_core.logs import open_log
from dlrover_core.testing import invariants


def twins(etcd: Cluster, folder: Path, number: int) -> float:
    """One trial; how long it took in seconds until one leads and the other stands by for it. Raises AssertionError."""
    url, name = etcd.url("twins", ttl="2"), f"twins-{number}"
    folder.mkdir(parents=True)
    try:
        with loopback() as net, Host(net, "a", folder) as first, Host(net, "b", folder) as second:
            began = time.monotonic()
            for host in (first, second):
                at = f"{host.address}:{net.port}"
                size = ("--nnodes", "1", "--job-id", name, "--bind", at)
                host.start("master", *size, "--log", url, program="dlrover")
            told = eventually(lambda: _ready([first, second]), "one that leads, one that stands by")
            took = time.monotonic() - began
            records = asyncio.run(_records(url, name))
            created = [one.event.run for one in records if isinstance(one.event, job.JobCreated)]
            assert len(created) == 1, f"{len(created)} runs began: {created}"
            assert [one["run"] for one in told] == created * 2, f"they serve {told}, the log has {created}"
            # Whoever settled which run it is led for a moment too, and may have been another.
            led = [one.token for one in records if isinstance(one.event, job.LeaderStarted)]
            assert len(led) == 1, f"{len(led)} masters led: {led}"
            invariants.check_history(records)
            return took
    finally:
        scratch.sweep()


def _ready(hosts: list[Host]) -> list[dict[str, Any]] | None:
    for host in hosts:
        assert host.process is not None
        assert host.process.poll() is None, f"host {host.name} gave up: {host.said()}"
    told = [asyncio.run(_status(f"{host.address}:{host.net.port}")) for host in hosts]
    ready = sorted(str(one.get("role")) for one in told) == ["leader", "standby"]
    return told if ready and len({one["seq"] for one in told}) == 1 else None


async def _status(address: str) -> dict[str, Any]:
    with contextlib.suppress(CoreError):
        return dict(await fetch_status(address, TOKEN, timeout_s=2.0))
    return {}


async def _records(url: str, name: str) -> list[Record]:
    async with open_log(url) as event_log:
        return [record async for record in event_log.read(name)]

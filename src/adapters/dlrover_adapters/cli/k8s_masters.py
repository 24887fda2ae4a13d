"""Asks jobs' masters for the operator: over HTTP, with each job's own token. The log is folded as it grows, never twice."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from typing import Any

from dlrover_adapters.http.client import fetch_status, send_command
from dlrover_adapters.http.log import HttpLog
from dlrover_adapters.http.log_address import Address
from dlrover_backends.k8s.elasticjob.telling import At, Size, Told
from dlrover_core.errors import ConnectionLost
from dlrover_core.history.goodput import goodput_of
from dlrover_core.history.headline import Headlines
from dlrover_core.history.timeline import TimelineBuilder
from dlrover_core.job.state import CODEC, FOLD

TIMEOUT_S = 5.0
WORKING = ("running", "suspect")


class HttpMasters:
    """The `Masters` port over HTTP. ``tls``: how masters that encrypt are checked."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._jobs: dict[str, _Job] = {}

    async def look(self, at: At) -> Told:
        """What the masters say now. Raises `CoreError`."""
        job = self._jobs.get(at.run)
        if job is None:
            job = self._jobs[at.run] = _Job()
        status = await fetch_status(at.address, at.token, timeout_s=TIMEOUT_S, tls=self._tls)
        if status.get("run") not in {"", at.run}:
            raise ConnectionLost(f"the masters at {at.address} lead run {status['run']}, and not {at.run}")
        job.leader = str(status.get("leader_address") or "")
        await job.read(at, "https" if self._tls is not None else "http")
        return job.told(status)

    async def tell(self, at: At, asked: Mapping[str, Any]) -> None:
        """Have the leader do something. Raises `Refused`, `CoreError`."""
        job = self._jobs.get(at.run)
        address = (job.leader if job is not None else "") or at.address
        await send_command(address, at.token, asked, timeout_s=TIMEOUT_S, tls=self._tls)

    def forget(self, run: str) -> None:
        """Drop what is known of a run."""
        self._jobs.pop(run, None)


class _Job:
    """One run, as far as its log was read."""

    def __init__(self) -> None:
        self._state, self._headlines, self._line = FOLD.new(), Headlines(), TimelineBuilder()
        self._seq = 0
        self.leader = ""

    async def read(self, at: At, scheme: str) -> None:
        """Go on reading where it was left off. Raises `CoreError`."""
        log = HttpLog(Address(scheme, (at.address,), at.job, token=at.token), CODEC)
        try:
            async for record in log.read(at.job, after=self._seq):
                FOLD.apply(self._state, record)
                self._headlines.feed(self._state, record)
                self._line.feed(record)
                self._seq = record.seq
        finally:
            await log.close()

    def told(self, status: Mapping[str, Any]) -> Told:
        """What the log and the leader's levels say together."""
        state = self._state
        lines = list(self._headlines.lines.values())
        working: dict[str, int] = {}
        for node in state.nodes.nodes.values():
            group = node.node.rsplit("-", 2)[0]
            working[group] = working.get(group, 0) + (node.state in WORKING)
        waits = [str(one.get("words") or "") for one in status.get("waits") or () if isinstance(one, dict)]
        return Told(
            state=state.job.state,
            reason=state.job.reason,
            pausing=state.job.pausing,
            step=int(status.get("step", -1)),
            goodput=goodput_of(self._line.timeline(time.time_ns() // 1000)).ratio,
            incidents=state.incidents.number,
            incident=lines[-1].text if lines else "",
            groups={
                one.name: Size(one.nodes_min, one.nodes_max, working.get(one.name, 0)) for one in state.job.spec.groups
            }
            if state.job.run
            else {},
            waits=tuple(filter(None, waits)),
        )

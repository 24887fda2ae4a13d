"""Watching a real job: its log as it grows, its steps as they are made, and the faults of its plan as their moments come."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import subprocess
from collections import Counter
from typing import NamedTuple

from dlrover_core.errors import LogCorrupt, LogUnavailable, PlanError
from dlrover_core.history.report import Report, ReportBuilder
from dlrover_core.job import incidents, progress, world
from dlrover_core.job.state import FOLD
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.log import EventLog
from dlrover_core.logs import open_log
from dlrover_core.sim import run as runs
from dlrover_core.sim import triggers
from dlrover_core.sim.faults import Fault
from dlrover_core.sim.scenario import Plan
from dlrover_core.testing import accounts, processes
from dlrover_core.testing.processes import Process, Steps
from dlrover_core.testing.strikes import FATAL, Site, Strikes

LOOK_S, TABLE_S, AGAIN_S = 0.01, 0.1, 0.2
"""How often steps and triggers are looked at, how often /proc is, and how soon a log that could not be read is asked again.

Other processes ring no bell here; a fault strikes this much late at most.
"""

ALL_RUNNING = triggers.parse("all running")


class Launched(NamedTuple):
    """A running `dlrover-run`, and the URL of its log."""

    process: subprocess.Popen[bytes]
    url: str
    site: Site


class Watch:
    """One job under a plan. `run` it, ask what `told` says, and `close` in any case."""

    def __init__(self, plan: Plan, launched: Launched) -> None:
        self.plan, self.process, self.site = plan, launched.process, launched.site
        self.strikes = Strikes(launched.site, self)
        self.steps = Steps()
        self.state = FOLD.new()
        self.records: list[Record] = []
        self.struck: list[tuple[Fault, int]] = []
        self.hits: Counter[tuple[str, str]] = Counter()
        self.corrupt: LogCorrupt | None = None
        self._url = launched.url
        self._log: EventLog | None = None
        self._reading: asyncio.Task[None] | None = None
        self._due = [(fault, triggers.parse(fault.at)) for fault in plan.faults]
        self._hit = self._incident_due = False
        self._began = self._table_at = 0.0
        self._table: list[Process] = []
        self._hash = hashlib.blake2b(digest_size=16)

    async def run(self, timeout_s: float) -> None:
        """Until the job has ended. Raises `Stalled`, `Broken`, `PlanError`."""
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        while self.process.poll() is None:
            if self._reading is None:
                self._reading = asyncio.ensure_future(self._read())
            self._aim()
            self._look(loop.time())
            await self._strike(loop.time() - self._began)
            self._end_well()
            if loop.time() > self._began + timeout_s:
                last = f"{self.records[-1]}" if self.records else "nothing"
                raise runs.Stalled(f"the job has not ended within {timeout_s:g} s; its log ends with {last}")
            await asyncio.sleep(LOOK_S)
        await self._read_out()
        if not self.records:
            raise PlanError(f"dlrover-run ended with {self.process.returncode} before a job began")

    async def close(self) -> None:
        """Have the log no longer open; for `Strikes`, and in the end."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def leader_pid(self) -> int:
        """The process that leads, by the log's word."""
        if self._log is None:
            return 0
        leader = await self._log.leader(self.site.job)
        words = leader.holder.split("/") if leader is not None else []
        return int(words[1]) if len(words) > 1 and words[1].isdecimal() else 0

    # ---- the log

    async def _read(self) -> None:
        """Follow the log; one that is just being made, or changes hands, is asked again."""
        while True:
            try:
                async with open_log(self._url) as self._log:
                    async for record in self._log.follow(self.site.job, self.state.seq):
                        self._take(record)
            except LogUnavailable:
                await asyncio.sleep(AGAIN_S)
            except LogCorrupt as error:
                self.corrupt = error
                return
            finally:
                self._log = None

    def _take(self, record: Record) -> None:
        FOLD.apply(self.state, record)
        self.records.append(record)
        if isinstance(record.event, incidents.IncidentOpened):
            self._incident_due = False
        if self._due:
            trigger = self._due[0][1]
            self._hit |= trigger.hit(record) or (not self._incident_due and trigger.holds(self.state))

    async def _read_out(self) -> None:
        """The whole log once more: what was told is what stands there. Raises `Broken`."""
        await self.close()
        told, self.records = self.records, []
        try:
            async with open_log(self._url) as log:
                async for batch in log.batches(self.site.job):
                    self._hash.update(batch.payload)
                    self.records += batch.records
        except LogCorrupt as error:
            self.corrupt = error
            self.records += told[len(self.records) :]
        for before, after in zip(told, self.records, strict=False):
            if before != after:
                raise runs.Broken(f"the log had told {before} and now has {after}", before.seq, repr(before.event))
        if len(self.records) < len(told):
            lost = told[len(self.records)]
            raise runs.Broken("the log has lost its end, and nobody says so", lost.seq, repr(lost.event))

    # ---- the moments

    def _aim(self) -> None:
        """Proxies lead to the masters, whose address the launcher writes down before it starts any."""
        for proxy in self.site.proxies.values():
            if not proxy.target[1]:
                with contextlib.suppress(OSError, ValueError, LookupError):
                    path = self.site.state / "jobs" / self.site.job / "settings.json"
                    host, _, port = json.loads(path.read_text())["masters"][0].rpartition(":")
                    proxy.target = (host, int(port))

    def _look(self, now: float) -> None:
        if now >= self._table_at:
            self._table = processes.living(self.site.mark)
            self._table_at = now + TABLE_S
            self.steps.look(self._table)

    async def _strike(self, ran_s: float) -> None:
        while self._due:
            fault, trigger = self._due[0]
            if not self._is_due(trigger, ran_s):
                return
            in_state = self.state.job.state
            if not await self.strikes.strike(fault, processes.living(self.site.mark)):
                return  # nobody is there to be struck: the next look may find somebody
            del self._due[0]
            self.struck.append((fault, self.state.seq))
            self.hits[fault.kind, in_state] += 1
            self._hit, self._incident_due = False, fault.kind in FATAL

    def _end_well(self) -> None:
        """Tell a script that waits for it that nothing more is to come."""
        over = not (self._due or self._incident_due or self.strikes.healing or self.site.struck.exists())
        if (
            over
            and ALL_RUNNING.holds(self.state)
            and "suspect" not in {one.state for one in self.state.nodes.nodes.values()}
        ):
            self.site.struck.touch()

    def _is_due(self, trigger: triggers.Trigger, ran_s: float) -> bool:
        if trigger.kind == "time":
            return ran_s * 1e6 >= trigger.number
        if trigger.kind == "step":
            return max(self.steps.reached, self.state.progress.newest.step) >= trigger.number
        return self._hit or (trigger.kind == "seq" and self.state.seq >= trigger.number)

    # ---- what came of it

    def told(self) -> runs.Run:
        """The run, as all levels tell it; times are real."""
        self.state, builder = FOLD.fold(self.records), ReportBuilder()
        for record in self.records:
            builder.feed(record)
        report = builder.report() if self.records else None
        reached = self._reached()
        run = runs.Run(
            self.plan, self._outcome(), self._root(report), self.state, self.records, self._hash.hexdigest(),
            events=len(self.records), steps=max(reached.values(), default=0), lost_steps=self._lost(reached),
            struck=self.struck, missed=[fault for fault, _ in self._due], hits=dict(self.hits),
        )  # fmt: skip
        if report is not None:
            run.virtual_s, run.goodput = report.goodput.wall_us / 1e6, report.goodput.ratio
            run.by_class = accounts.by_class(report.goodput)
        return run

    def _outcome(self) -> str:
        if self.corrupt is not None:
            return "corrupt"
        return self.state.job.state if self.state.job.over else f"exit {self.process.returncode}"

    def _root(self, report: Report | None) -> str:
        if self.corrupt is not None:
            return str(self.corrupt)
        return (report.root or report.reason) if report is not None else ""

    def _reached(self) -> dict[int, int]:
        """The last step of each generation, by the workers' own memory, or by what the log knows if that is more."""
        found = {life.generation: self.steps.last_of(life.generation) for life in self.steps.lives}
        for record in self.records:
            fact = record.event
            if isinstance(
                fact,
                (
                    progress.FirstStep,
                    progress.Progressed,
                    incidents.WorkerExited,
                    world.WorkersStopped,
                    world.WorkersFinished,
                ),
            ):
                found[fact.generation] = max(found.get(fact.generation, -1), fact.step)
        return found

    def _lost(self, reached: dict[int, int]) -> int:
        """Steps made more than once. A script that does not tell their numbers is taken to have begun anew."""
        lost, before = 0, 0
        for record in self.records:
            fact = record.event
            if isinstance(fact, progress.FirstStep):
                lost += max(0, before - (fact.step - 1 if fact.told else 0))
                before = reached[fact.generation]
        return lost

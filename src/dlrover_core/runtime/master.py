"""The master of one job: leads the log, decides, levels backends and agents to what is desired.

A master holds nothing that the log does not: kill it at any record and the next one takes over from there, with no worker
restarted and no decision lost or doubled. It stands by (`standby`), leads with the state that it has folded meanwhile, appends
`LeaderStarted`, and serves; until the job is over, another master leads, or it is asked to hand over.

Orders leave only while this master surely leads (`Master.may_order`). What was held back is levelled again when it surely does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from dlrover_core.errors import CoreError, HandedOver, LogError, NotLeading, OtherRun, Refused, StandsBy
from dlrover_core.job import job, nodes, silence
from dlrover_core.job.orders import Desired, Order
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.engine import Accepted, Command, Engine, Model, NotDone, Reply, Resend, Tick
from dlrover_core.kernel.events import Batch, Origin, Record
from dlrover_core.kernel.log import Archiving, EventLog, LeaderInfo, Leadership, Snapshot
from dlrover_core.rules.desired import deletion_grace_s, desired
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime import operations
from dlrover_core.runtime.backend import Backend
from dlrover_core.runtime.levelling import Leveller
from dlrover_core.runtime.messages import Goodbye, Hello
from dlrover_core.runtime.pipeline import Deposed, Pipeline
from dlrover_core.runtime.records import Records
from dlrover_core.runtime.rendezvous import Rendezvous
from dlrover_core.runtime.seats import Seats
from dlrover_core.runtime.sessions import Sessions
from dlrover_core.runtime.shown import shown
from dlrover_core.runtime.standby import Standby, patiently
from dlrover_core.runtime.transport import Listener
from dlrover_core.runtime.within import within
from dlrover_core.spec import JobSpec

VERSION = "0.1.0"
SNAPSHOT_EVENTS = 10_000
SNAPSHOT_BYTES = 1024 * 1024
LATE_S = 2.0
TICK_S = 1.0
SOON_S = 0.02
LEAVE_S = 10.0
FLUSH_S = 5.0
# Seconds of a hand-over: for the log, and for the agents to hang up by themselves.
RESIGN_S = 2.0
FAREWELL_S = 1.0
KEEP_S = 300.0  # an archive may be far away, and one that hangs must not delay the next snapshot
SECOND_US = 1_000_000

log = structlog.get_logger("dlrover.master")


@dataclass(slots=True)
class Outcome:
    """How a job ended. ``state``: succeeded, failed or stopped."""

    state: str
    reason: str
    root: str


class Master:
    """A candidate for leading one job.

    spec:      of the job; in a `JobSpec.joining` job without a ``backend``, the master's own `Rendezvous` names the nodes
    wall:      the clock, in microseconds since the epoch
    holder:    names this master in its lease
    run_id:    the run that it serves, the same for all its masters; empty: whatever run is live
    begins:    it begins that run, if the log does not have it yet
    answers:   it serves its listener while another master leads, and tells agents where; not for a shared socket
    dead:      holders of masters that are known to be dead
    watch:     gets every committed batch, with the state at its end; must neither wait nor raise
    model:     decides; `rules.model.model` makes one with a user's hook. (The first failure would load the table of
               signatures, 30 to 70 ms; `diagnosis.matching.prepare` does that beforehand.)
    """

    version = VERSION

    def __init__(
        self,
        spec: JobSpec,
        *,
        event_log: EventLog,
        listener: Listener,
        backend: Backend | None,
        wall: Callable[[], int],
        holder: str,
        run_id: str,
        ttl_s: float = 5.0,
        snapshot_events: int = SNAPSHOT_EVENTS,
        begins: bool = True,
        answers: bool = False,
        dead: Collection[str] = (),
        watch: Callable[[JobState, Sequence[Record]], None] | None = None,
        model: Model[JobState] = MODEL,
    ) -> None:
        self._watch, self._model = watch, model
        self._spec, self._log, self._listener, self._wall = spec, event_log, listener, wall
        self._holder, self._run_id, self._ttl_s, self._dead = holder, run_id, ttl_s, dead
        self._begins, self._answers = begins, answers
        self._records = Records(event_log, spec.job, self._who_leads)
        self._standby = Standby(event_log, spec.job, holder=holder, address=listener.address, wall=wall, looks=answers)
        self._standby.folded = self._records.ring
        self.sessions = Sessions(self)
        seats = Seats(self, self.sessions) if backend is not None else None
        backend = Rendezvous(self, self.sessions) if backend is None and spec.joining else backend
        self._leveller = Leveller(self, backend, seats) if backend is not None else None
        self._engine: Engine[JobState] | None = None
        self._pipeline: Pipeline | None = None
        self._lead: Leadership | None = None
        self.desired: Desired = Desired(frozenset(), (), {})
        self.alarms = 0
        self.present: frozenset[str] = frozenset()
        self._offset = 0
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.TimerHandle | None = None
        self._snapshot_events = snapshot_events
        self._since_snapshot = self._bytes_since_snapshot = 0
        self._snapshot_task: asyncio.Task[None] | None = None
        self._calmed_at = 0.0
        self._over = asyncio.Event()
        self._serving = False
        self._asked_to_go = asyncio.Event()
        self._why_go = ""
        # Since when it is unknown whether this master still leads, and whether an order was held back meanwhile.
        self._unsure_since: float | None = None
        self._held_back = self._dismissed = False
        self.led = asyncio.Event()
        self.left = asyncio.Event()

    # ---- what others of the runtime see

    @property
    def state(self) -> JobState:
        """The committed state, while no decision is under way."""
        return self._engine.state if self._engine is not None else self._model.new()

    @property
    def token(self) -> int:
        """This leadership's fencing token; 0 while standing by."""
        return self._lead.token if self._lead is not None else 0

    @property
    def address(self) -> str:
        """Where agents and people reach this master."""
        return self._listener.address

    @property
    def leading(self) -> bool:
        """May orders be given, by the local clock alone?"""
        return self._lead is not None and self._engine is not None and self._lead.valid()

    def stuck(self) -> tuple[str, bool, str, str]:
        """Why decisions wait (empty: they do not), and `Pipeline.unrecorded_end`."""
        pipeline = self._pipeline
        return (pipeline.degraded, *pipeline.unrecorded_end()) if pipeline and self._serving else ("", False, "", "")

    def may_order(self) -> bool:
        """May new orders go to agents or backends now? If not, levelling follows as soon as they may."""
        if self.leading:
            return True
        self._held_back = True
        return False

    async def sent_on(self, hello: Hello) -> Goodbye | None:
        """The goodbye that tells an agent where the leader is; None: this master serves it."""
        return None if self._serving else await self._standby.sent_on(hello.boot)

    @property
    def orders(self) -> Mapping[str, Order]:
        """The orders of all agents."""
        return self.desired.orders

    def delete_grace_s(self, name: str) -> float:
        """How long a deleted node, by its backend's name, has to end by itself."""
        return deletion_grace_s(self.state, name)

    def now(self) -> int:
        """Microseconds by this leader's clock.

        Never before the last record, and moving even where the wall clock was set back.
        """
        return self._offset + int(asyncio.get_running_loop().time() * SECOND_US)

    def submit(self, command: Command, origin: Origin | None = None) -> asyncio.Future[Reply]:
        """Submit a command; the future is done when its outcome is durable. Cancelled when this master stops first."""
        if self._pipeline is None:
            future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            future.cancel()
            return future
        return self._pipeline.submit(command, origin)

    def tell(self, command: Command) -> None:
        """Submit an observation whose reply is not needed."""
        self.submit(command).add_done_callback(_swallow)

    # ---- life

    async def run(self) -> Outcome:
        """Lead until the job is over and nothing of it is left.

        Raises `Deposed` when another master has taken over, `HandedOver` when it was asked to go, and `OtherRun`.
        """
        asked = asyncio.ensure_future(self._until_asked_to_go())
        try:
            if self._answers:
                await self._listen()
            lead = await self._stand_by(asked)
            await _while(self._take_over(lead), [asked])
            return await self._serve(lead, asked)
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            for timer in (self._timer, self._soon):
                if timer is not None:
                    timer.cancel()
            self._records.close()
            await self._listener.close()
            self.sessions.close()
            if self._lead is not None:
                await self._lead.resign()

    async def _listen(self) -> None:
        await self._listener.serve(self.sessions.accept, self.status, self.obey, self._records.hand_out)

    def hand_over(self, reason: str) -> None:
        """Finish what is queued, leave the job to the next master, send the agents there, and end `run`. Idempotent."""
        self._why_go = self._why_go or reason
        self._asked_to_go.set()

    async def _until_asked_to_go(self) -> None:
        await self._asked_to_go.wait()
        raise HandedOver(self._why_go)

    async def _stand_by(self, asked: asyncio.Future[None]) -> Leadership:
        standing = asyncio.ensure_future(self._standby.run())
        try:
            await _while(self._become_leader(), [standing, asked])
        finally:
            standing.cancel()
            await asyncio.gather(standing, return_exceptions=True)
        assert self._lead is not None
        return self._lead

    async def _become_leader(self) -> None:
        name, holder, ttl_s, dead = self._spec.job, self._holder, self._ttl_s, self._dead
        self._lead = await patiently(lambda: self._log.lead(name, holder, ttl_s, dead=dead))

    async def _take_over(self, lead: Leadership) -> None:
        state = await patiently(self._standby.restored)
        self._offset = max(self._wall(), state.at + 1) - int(asyncio.get_running_loop().time() * SECOND_US)
        self._engine = Engine(self._model, CODEC, state, lead.token)
        self._pipeline = Pipeline(self._engine, lead, self.now, self._committed, self.sessions.calm)
        self._derive(state)
        self.sessions.calm()

    async def _serve(self, lead: Leadership, asked: asyncio.Future[None]) -> Outcome:
        assert self._pipeline is not None
        deciding = asyncio.ensure_future(self._pipeline.run())
        watched: list[asyncio.Future[Any]] = [deciding, asyncio.ensure_future(_until_lost(lead)), asked]
        try:
            await _while(self._opened(), watched)
            self._serving = True
            self._standby.over()
            if not self._answers:
                await self._listen()
            address = self._listener.address
            await _while(patiently(lambda: lead.announce(address)), watched)
            watched.append(asyncio.ensure_future(self._listen_to_silence(lead)))
            if self._leveller is not None:
                watched.append(asyncio.ensure_future(self._leveller.run()))
            self.led.set()
            log.info("leading", job=self._spec.job, token=self.token, seq=self.state.seq, address=address)
            await _while(self._until_over(), watched)
            # The agents' last reports belong into the log too; a log that is down delays nothing.
            self._pipeline.stop()
            last = {deciding} if self._snapshot_task is None else {deciding, self._snapshot_task}
            await asyncio.wait(last, timeout=FLUSH_S)
            return Outcome(self.state.job.state, self.state.job.reason, self.state.job.root)
        except HandedOver as going:
            await self._go(lead, deciding, going.reason)
            raise
        finally:
            if self._snapshot_task is not None:
                watched.append(self._snapshot_task)
            for task in watched:
                task.cancel()
            await asyncio.gather(*watched, return_exceptions=True)

    async def _go(self, lead: Leadership, deciding: asyncio.Future[None], reason: str) -> None:
        """Hand over: accept nothing new, finish the queue, let the next master lead, and send the agents away to find it.

        Commands that could not be committed are cancelled; agents repeat them to the next leader.
        """
        assert self._pipeline is not None
        log.info("handing over", job=self._spec.job, token=self.token, seq=self.state.seq, reason=reason)
        self._pipeline.stop(taking=False)
        await asyncio.wait({deciding}, timeout=FLUSH_S)
        with contextlib.suppress(asyncio.TimeoutError):
            await within(RESIGN_S, lead.resign())
        self.sessions.dismiss(f"{self._holder} hands over: {reason}")
        with contextlib.suppress(asyncio.TimeoutError):
            await within(FAREWELL_S, self._until_alone())

    async def _until_alone(self) -> None:
        while len(self.sessions):
            self.left.clear()
            await self.left.wait()

    async def _opened(self) -> None:
        """The first records of this leadership; in a new log, the first of the job."""
        if self.state.job.over and self.state.job.run == self._run_id:
            # The run ended under the last leader: nothing is left to lead, and only agents are waited for.
            self._over.set()
            return
        if self._run_id not in ("", self.state.job.run) and not self._begins:
            raise OtherRun(self._spec.job, self._run_id, self.state.job.run)
        if self.state.seq:
            await self.submit(job.TakeOver(self._holder, VERSION))
        if self.state.job.run != self._run_id and (self._run_id or self.state.job.state == "new"):
            await self.submit(job.CreateJob(self._run_id, self._spec.to_json()))

    async def _until_over(self) -> None:
        """Until the job has ended, every agent has left and the backend has nothing left. Nodes that do not leave are deleted.

        A backend whose platform is away is not waited for: whoever clears behind the masters tries again.
        """
        await self._over.wait()
        spec = self.state.job.spec
        with contextlib.suppress(asyncio.TimeoutError):
            await within(spec.stop_grace_s + spec.kill_wait_s + LEAVE_S, self._until_empty())
        if self._leveller is not None and not self._leveller.empty:
            log.warning("deleting nodes that did not leave by themselves", job=spec.job)
            self._leveller.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await within(LEAVE_S, self._until_empty())

    async def _until_empty(self) -> None:
        while len(self.sessions) or not (self._leveller is None or self._leveller.empty or self._leveller.helpless):
            self.left.clear()
            await self.left.wait()

    # ---- after every commit

    def _committed(self, batch: Batch) -> None:
        state = self.state
        self._records.committed(batch)
        if self._watch is not None:
            self._watch(state, batch.records)
        for record in batch.records:
            fact: Any = record.event
            alarm = self._model.alarm(fact)
            if alarm:
                self.alarms += 1
                log.error(alarm, seq=record.seq, **fact._asdict())
        if self._model.levels(state, batch.records):
            self._derive(state)
            self._level()
            self.sessions.forget_absent()
        if state.job.over and self._run_id in ("", state.job.run):
            # This end is an earlier run's; this master is about to begin the next run.
            self._over.set()
        self._schedule()
        self._since_snapshot += len(batch.records)
        self._bytes_since_snapshot += len(batch.payload)
        if self._since_snapshot >= self._snapshot_events or self._bytes_since_snapshot >= SNAPSHOT_BYTES:
            self._snapshot()

    def _level(self) -> None:
        self.sessions.level(self.token, self.desired.orders)
        if self._leveller is not None:
            self._leveller.wake()

    def _derive(self, state: JobState) -> None:
        """What others may see. While an append is in flight, the engine's state is ahead of the log, and this is not."""
        self.desired = desired(state, self._model)
        self.present = frozenset(state.nodes.nodes)

    def _schedule(self, at_least_s: float = 0.0) -> None:
        """Wake up at the earliest deadline of all rules."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._model.due(self.state)
        if due is not None:
            delay = max(at_least_s, (due - self.now()) / SECOND_US)
            # A microsecond more, or rounding would tick just before the deadline.
            loop = asyncio.get_running_loop()
            at = loop.time() + delay + 1e-6
            self._timer = loop.call_at(at, self._tick, at)

    def _tick(self, due: float) -> None:
        """Time has passed. If this process was stopped meanwhile, that is recorded first: its own silence is not the agents'."""
        self._timer = None
        self._note_lateness(asyncio.get_running_loop().time() - due)
        self.submit(Tick()).add_done_callback(self._ticked)

    def _ticked(self, done: asyncio.Future[Reply]) -> None:
        """Set the next deadline, even if the tick has decided nothing and so commits nothing."""
        _swallow(done)
        if not done.cancelled() and self._timer is None:
            self._schedule(at_least_s=TICK_S)

    def _note_lateness(self, late: float) -> None:
        now = asyncio.get_running_loop().time()
        if late > LATE_S and now - late > self._calmed_at - LATE_S:
            self._calmed_at = now
            self.sessions.calm()
            log.warning("master was paused", late_s=round(late, 3))
            self.tell(job.NotePause(int(late * SECOND_US)))

    def _snapshot(self) -> None:
        if self._snapshot_task is not None and not self._snapshot_task.done():
            return
        assert self._engine is not None
        assert self._lead is not None
        self._since_snapshot = self._bytes_since_snapshot = 0
        taken = Snapshot(self.state.seq, self._model.schema, self._engine.rebase())
        self._snapshot_task = asyncio.ensure_future(self._keep(self._lead, taken))

    async def _keep(self, lead: Leadership, snapshot: Snapshot) -> None:
        """Snapshot and archive. Both are copies: without them the next take-over folds more, and nothing is lost."""
        try:
            await within(KEEP_S, self._keep_all(lead, snapshot))
        except (CoreError, asyncio.TimeoutError) as error:
            log.warning("snapshot or archive failed, the next one tries again", seq=snapshot.seq, error=str(error))

    async def _keep_all(self, lead: Leadership, snapshot: Snapshot) -> None:
        """Take a snapshot, archive the records before it, record that, and only then delete what the log no longer needs."""
        await lead.snapshot(snapshot)
        if not isinstance(self._log, Archiving):
            return
        name, noted = self._spec.job, self.state.job.archived
        for segment in await self._log.archive(name, snapshot.seq, noted):
            reply = self.submit(job.NoteArchived(segment.first, segment.last, segment.digest))
            await asyncio.wait({reply})
            if reply.cancelled():
                return  # the next leader finds the file
            match reply.result():
                case Accepted():
                    noted = segment.last
                case refused:
                    raise LogError(
                        f"events {segment.first}-{segment.last} are archived, and that is refused: {refused}"
                    )
        if noted:
            await self._log.trim(name, noted)

    # ---- silence and progress: levels become edges here

    async def _listen_to_silence(self, lead: Leadership) -> None:
        assert self._pipeline is not None
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            spec = self.state.job.spec
            due += spec.heartbeat_s
            await asyncio.sleep(due - loop.time())
            late = loop.time() - due
            if late > LATE_S:
                due = loop.time()
                self._note_lateness(late)
            self._pipeline.look()
            self._mind_lease(sure=lead.valid())
            if not self._pipeline.degraded:
                for node in list(self.state.nodes.nodes.values()):
                    self._weigh(node, spec.silence_s)
                self._look(pressing=False)

    def _weigh(self, node: nodes.Node, silence_s: float) -> None:
        if not node.joined:
            return
        silent = self.sessions.silence(node.node)
        if node.state == "running" and silent > silence_s:
            self.tell(silence.NoteSilence(node.node, int(silent * SECOND_US)))
        elif (
            node.state == "suspect"
            and silent <= silence_s
            and self.sessions.heard_since(node.node, self._suspected_at(node))
        ):
            self.tell(silence.NoteHeard(node.node))

    def _mind_lease(self, *, sure: bool) -> None:
        """Give no new orders while it is unknown whether this master still leads; before long, send the agents away to look."""
        now = asyncio.get_running_loop().time()
        if sure:
            if self._held_back:
                self._held_back = False
                self.sessions.reception.resumed()
                self._level()
            self._unsure_since, self._dismissed = None, False
            return
        if self._unsure_since is None:
            self._unsure_since = now
        if now - self._unsure_since >= self._ttl_s and not self._dismissed:
            # A master cut off from the log alone would keep the agents from the new leader.
            self._dismissed = True
            self.sessions.dismiss(f"{self._holder} does not know whether it still leads")

    def _suspected_at(self, node: nodes.Node) -> float:
        return (node.suspect_at - self._offset) / SECOND_US

    def look_soon(self) -> None:
        """An agent's report must not wait: look once for all that come at about the same time."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(SOON_S, self._look)

    def _look(self, *, pressing: bool = True) -> None:
        """Submit the commands that follow from heartbeats."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._pipeline is not None and not self._pipeline.degraded:
            for found in self.sessions.findings(self.now(), pressing=pressing):
                self.tell(found)

    # ---- for people

    async def obey(self, asked: object) -> int:
        """Do what a person asks, in plain values (`operations`); returns the record of it, once that is durable.

        Raises `MalformedMessage`, `Refused`, `StandsBy` if another master must be asked, and `NotLeading` if it is not
        known, and will not be, whether it was done.
        """
        command, name = operations.command_of(asked), operations.job_of(asked)
        if name not in ("", self._spec.job):
            raise Refused(f"this master leads job {self._spec.job!r}, not {name!r}")
        if not self._serving:
            self._standby.refuse()
        if self._asked_to_go.is_set():
            raise StandsBy(self._spec.job, "the next master: this one hands over", remedy="ask again")
        reply = self.submit(command)
        await asyncio.wait({reply})
        if reply.cancelled():
            raise NotLeading(self._spec.job, remedy="ask the present leader whether it was done")
        match reply.result():
            case Accepted(seq):
                return seq
            case NotDone(_, reason):
                raise Refused(reason)
            case Resend():
                raise AssertionError("only numbered commands are asked for again")

    def _who_leads(self) -> LeaderInfo | None:
        """The leader, as far as this master knows."""
        if self._serving:
            return LeaderInfo(self.token, self._holder, self._listener.address)
        return self._standby.leader

    def status(self) -> Mapping[str, Any]:
        """The present status, levels included, as plain values; of a standby, as far as it has followed the log."""
        if not self._serving:
            return shown(self._standby.state or self._model.new(), self.sessions) | self._standby.status()
        if self._pipeline is not None:
            # A master that was stopped for longer than its lease says so at once.
            self._pipeline.look()
        degraded, since = (self._pipeline.degraded, self._pipeline.degraded_since) if self._pipeline else ("", 0)
        return shown(self.state, self.sessions, self.now()) | {
            "token": self.token,
            "role": "leader",
            "leader": self._holder,
            "leader_address": self._listener.address,
            "alarms": self.alarms,
            "degraded": degraded,
            "degraded_since": since,
        }


async def _while(main: Coroutine[Any, Any, None], watched: list[asyncio.Future[Any]]) -> None:
    """Run ``main`` to its end, unless one of ``watched`` fails first: then its error rises."""
    task = asyncio.ensure_future(main)
    try:
        while not task.done():
            done, _ = await asyncio.wait([task, *watched], return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _until_lost(lead: Leadership) -> None:
    await lead.lost
    raise Deposed(f"the leadership of token {lead.token} is lost")


def _swallow(done: asyncio.Future[Reply]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        error = done.exception()
        if error is not None:
            log.warning("observation not recorded", error=str(error))

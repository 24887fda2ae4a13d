"""Promises about failures: what is done about each, what it may cost, and that it ends. See `promises`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.evidence import OPENING, PLAT
from dlrover_core.job import budgets, evidence, hosts, incidents, job, names, nodes, plans, progress, world
from dlrover_core.job.crash_loops import AT_ONCE, EARLY_S, FIRST_PAUSE_S
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.engine import STRANGERS_MAX, UNANSWERED_MAX
from dlrover_core.kernel.events import Record
from dlrover_core.rules import slots
from dlrover_core.spec import JobSpec, us
from dlrover_core.testing.promises import Look, Promise

# How long a fault lasts that says how much, or how often, and not how long.
LASTS_S = 60.0


class Incidents(Promise):
    """Incidents count on, close once, and have at most one action in force: another needs a new verdict or a final one.

    A worker's death, or what is a failure without one (a hang), opens one for its own generation alone. The first step of a later
    generation closes it, at once.
    """

    name = "incidents"

    def __init__(self) -> None:
        self._opened = 0
        self._verdicts: dict[int, int] = {}
        self._actions: dict[int, list[str]] = {}
        self._open: dict[int, tuple[str, int]] = {}
        self._exit: tuple[int, incidents.WorkerExited | None] = (0, None)
        self._seen: tuple[int, evidence.EvidenceSeen | None] = (0, None)
        self._mended: set[int] = set()

    def __call__(self, state: JobState, record: Record) -> None:
        """See the class."""
        if self._mended and record.cause == 0:
            self._unclosed(record.seq)
        super().__call__(state, record)

    def _unclosed(self, seq: int) -> None:
        assert not self._mended, f"{seq}: steps are made again, and incidents {sorted(self._mended)} are open"

    def _created(self, _state: JobState, _fact: job.JobCreated, _record: Record) -> None:
        self._open.clear()

    def _exited(self, _state: JobState, fact: incidents.WorkerExited, record: Record) -> None:
        self._exit = (record.seq, fact)

    def _told(self, _state: JobState, fact: evidence.EvidenceSeen, record: Record) -> None:
        self._seen = (record.seq, fact)

    def _open_one(self, state: JobState, fact: incidents.IncidentOpened, record: Record) -> None:
        assert fact.incident == self._opened + 1, f"{record.seq}: incident {fact.incident} after {self._opened}"
        self._opened = fact.incident
        self._open[fact.incident] = state.set_of(fact.node), fact.generation
        seq, died = self._exit
        told, seen = self._seen
        if told == record.cause and seen is not None:
            assert seen.source in OPENING, f"{record.seq}: {seen} opens {fact}"
            assert seen.generation in (0, fact.generation), f"{record.seq}: {seen} opens {fact}"
        elif fact.ranks:
            assert died is not None and seq == record.cause, (
                f"{record.seq}: nobody's death opens incident {fact.incident}"
            )
            assert died.generation == fact.generation and not died.asked, f"{record.seq}: {died} opens {fact}"

    def _stepped(self, state: JobState, fact: progress.FirstStep, _record: Record) -> None:
        group = state.set_of(fact.node)
        self._mended = {
            one for one, (its, generation) in self._open.items() if its == group and generation < fact.generation
        }

    def _judged(self, _state: JobState, fact: incidents.Diagnosed, record: Record) -> None:
        assert fact.incident in self._open or fact.revises, f"{record.seq}: a closed incident is judged"
        self._verdicts[fact.incident] = self._verdicts.get(fact.incident, 0) + 1

    def _chosen(self, _state: JobState, fact: incidents.ActionChosen, record: Record) -> None:
        if fact.action == ladder.SUSPECTS:
            return
        taken = self._actions.setdefault(fact.incident, [])
        final = taken[-1:] == [ladder.AWAIT_EVIDENCE]
        assert fact.incident in self._open, f"{record.seq}: {fact.action} for incident {fact.incident}, which is over"
        assert len(taken) < self._verdicts.get(fact.incident, 0) or final, (
            f"{record.seq}: {fact.action} on top of {taken}"
        )
        taken.append(fact.action)

    def _closed(self, state: JobState, fact: incidents.IncidentClosed, record: Record) -> None:
        assert fact.incident in self._open, f"{record.seq}: incident {fact.incident} closes twice"
        given_up = self._open[fact.incident][0] in state.job.given_up
        assert fact.down_us >= 0 or (given_up and fact.down_us == incidents.UNKNOWN), f"{record.seq}: {fact}"
        assert fact.steps_lost >= incidents.UNKNOWN, f"{record.seq}: {fact}"
        self._open.pop(fact.incident, None)
        self._mended.discard(fact.incident)
        for kept in (self._verdicts, self._actions):
            kept.pop(fact.incident, None)

    def end(self, run: Any) -> None:
        """See the class."""
        self._unclosed(run.state.seq)
        if run.outcome == "succeeded":
            assert not self._open, f"the job succeeded and incidents {sorted(self._open)} are open"

    looks: ClassVar[Mapping[type, Look]] = {
        job.JobCreated: _created,
        incidents.WorkerExited: _exited,
        evidence.EvidenceSeen: _told,
        progress.FirstStep: _stepped,
        incidents.IncidentOpened: _open_one,
        incidents.Diagnosed: _judged,
        incidents.ActionChosen: _chosen,
        incidents.IncidentClosed: _closed,
    }


class Effects(Promise):
    """Every action that is chosen is done: what it stands for is decided in the same batch, because of it."""

    name = "effects"

    def __init__(self) -> None:
        self._due: dict[int, incidents.ActionChosen] = {}

    def __call__(self, state: JobState, record: Record) -> None:
        """See the class."""
        fact = record.event
        if self._due:
            if record.cause == 0:
                self._missing()
            action = self._due.get(record.cause)
            if action is not None and _does(action, fact):
                del self._due[record.cause]
        if type(fact) is incidents.ActionChosen and fact.action != ladder.SUSPECTS:
            restarts = fact.action in (*ladder.IN_PLACE, ladder.AWAIT_EVIDENCE)
            if state.job.suspension is not None and fact.action not in ladder.ENDINGS:
                return  # nobody is started for a job that is about to pause: it is done when it goes on
            if fact.action in (*ladder.RELAUNCHES, ladder.GO_ON_SMALLER) and slots.followed(state, fact.node):
                return  # it was to leave: its successor is on the way, or nobody is to come
            if not restarts or state.world.of(fact.node).active:
                self._due[record.seq] = fact

    def _missing(self) -> None:
        assert not self._due, "; ".join(
            f"{seq}: {fact.action} on {fact.node} is not done" for seq, fact in self._due.items()
        )

    def end(self, run: Any) -> None:  # noqa: ARG002  # the promise's
        """See the class."""
        self._missing()


def _does(action: incidents.ActionChosen, fact: Any) -> bool:
    """Is this what the action stands for?"""
    what, kind = action.action, type(fact)
    if kind is world.WorldDissolved:
        return what in (*ladder.IN_PLACE, ladder.AWAIT_EVIDENCE)
    if kind is nodes.NodePlanned:
        return what in ladder.RELAUNCHES and action.node.rsplit("-", 1)[0] == f"{fact.group}-{fact.index}"
    if kind is nodes.NodeReleased:
        return what == ladder.GO_ON_SMALLER and (fact.node, fact.reason) == (action.node, "given up")
    if kind is job.SetGivenUp:  # older logs have `FAIL_JOB` for that, too
        return what in ladder.ENDINGS
    return kind is _EFFECT.get(what)


_EFFECT = {
    ladder.RETRY: world.WorldFormed,
    ladder.RESTART_PROCESSES: world.WorldFormed,
    ladder.FAIL_JOB: job.JobFailed,
}


class Budgets(Promise):
    """Each failure costs one unit of one budget at most, no budget is overdrawn, and the job is given up when one is spent only.

    A node's death that explains the restarts of its group since gives them back; a verdict that is revised charges what was
    done to the budget of the new one. Counted here once more, from the log alone.
    """

    name = "budgets"

    def __init__(self) -> None:
        self._spec = JobSpec("none")
        self._restarted: dict[int, tuple[str, str]] = {}
        self._charged: set[int] = set()
        self._relaunched: set[str] = set()
        self._restarts: dict[str, int] = {}
        self._spent: set[str] = set()

    def _created(self, _state: JobState, fact: job.JobCreated, _record: Record) -> None:
        self._spec = JobSpec.from_json(fact.spec)
        self._restarts.clear()
        for kept in (self._restarted, self._charged, self._relaunched, self._spent):
            kept.clear()

    def _say_spent(self, _state: JobState, fact: budgets.RestartsSpent, _record: Record) -> None:
        self._spent.add(fact.node)

    def _chosen(self, state: JobState, fact: incidents.ActionChosen, record: Record) -> None:
        seq, node = record.seq, fact.node
        group, name = names.group_of(node), state.set_of(node)
        assert fact.budget_left >= 0, f"{seq}: the budget is overdrawn"
        if fact.action in ladder.FOR_NODES:
            for incident in [one for one, (its, _) in self._restarted.items() if its == name]:
                self._count(name, -(self._restarted.pop(incident)[1] == ladder.RESTARTS))
        if fact.action in ladder.IN_PLACE:
            assert fact.incident not in self._charged, f"{seq}: incident {fact.incident} restarts twice"
            self._charged.add(fact.incident)
            self._restarted[fact.incident] = name, fact.budget
            self._count(name, fact.budget == ladder.RESTARTS)
            if fact.budget == ladder.RESTARTS:
                left = self._spec.in_force(group).max_restarts - self._restarts[name]
                assert left >= 0 and left == fact.budget_left, (
                    f"{seq}: {fact.budget_left} restarts are left, not {left}"
                )
        elif fact.action in ladder.RELAUNCHES:
            assert node not in self._relaunched, f"{seq}: {node} is relaunched twice"
            self._relaunched.add(node)
            most, used = self._spec.group(group).relaunch_max, state.incidents.relaunches.get(node.rsplit("-", 1)[0], 0)
            counted = fact.budget == ladder.PLATFORM or (0 < used <= most and used == most - fact.budget_left)
            assert counted, f"{seq}: {used} of {most} relaunches, {fact}"
        elif fact.action == ladder.AWAIT_EVIDENCE:
            self._given_up(state, fact, record)
            self._count(name, -(self._restarted.pop(fact.incident, ("", ""))[1] == ladder.RESTARTS))
        self._agreed(state, seq)

    def _judged(self, state: JobState, fact: incidents.Diagnosed, record: Record) -> None:
        name, budget_ = self._restarted.get(fact.incident, ("", ""))
        if name and fact.budget and fact.budget != budget_:
            self._count(name, (fact.budget == ladder.RESTARTS) - (budget_ == ladder.RESTARTS))
            self._restarted[fact.incident] = name, fact.budget
        self._agreed(state, record.seq)

    def _count(self, name: str, more: int) -> None:
        self._restarts[name] = self._restarts.get(name, 0) + more

    def _agreed(self, state: JobState, seq: int) -> None:
        for name, restarts in self._restarts.items():
            charged, of = state.incidents.charged(name).restarts, f" of {name}" if state.sets.several else ""
            assert charged == restarts, f"{seq}: {charged} restarts{of} are charged, of which {restarts} for a reason"

    def _given_up(self, state: JobState, fact: incidents.ActionChosen, record: Record) -> None:
        place, group = fact.node.rsplit("-", 1)[0], self._spec.group(names.group_of(fact.node))
        spent = {
            "workers.exhausted": self._restarts.get(state.set_of(fact.node), 0)
            >= self._spec.in_force(group.name).max_restarts,
            "node.exhausted": state.incidents.relaunches.get(place, 0) >= group.relaunch_max,
        }.get(fact.rule.split(":")[0], True)
        assert spent or fact.node in self._spent, f"{record.seq}: {fact.rule}, and budgets are left"

    def _closed(self, _state: JobState, fact: incidents.IncidentClosed, _record: Record) -> None:
        self._restarted.pop(fact.incident, None)
        self._charged.discard(fact.incident)

    looks: ClassVar[Mapping[type, Look]] = {
        job.JobCreated: _created,
        budgets.RestartsSpent: _say_spent,
        incidents.Diagnosed: _judged,
        incidents.ActionChosen: _chosen,
        incidents.IncidentClosed: _closed,
    }


class Pauses(Promise):
    """A program that fails at once, again and again, is not restarted at once: the pause doubles, restarts are few."""

    name = "pauses"

    def __init__(self) -> None:
        self._formed: dict[str, tuple[int, bool]] = {}
        self._early: dict[str, int] = {}
        self._failed_at: dict[str, int] = {}
        self._verdict = ""
        self._pause_max_s = 0.0

    def _created(self, _state: JobState, fact: job.JobCreated, _record: Record) -> None:
        self._pause_max_s = JobSpec.from_json(fact.spec).restart_pause_s
        for kept in (self._formed, self._early, self._failed_at):
            kept.clear()

    def _judged(self, _state: JobState, fact: incidents.Diagnosed, _record: Record) -> None:
        self._verdict = fact.verdict

    def _chosen(self, state: JobState, fact: incidents.ActionChosen, record: Record) -> None:
        if fact.action not in ladder.IN_PLACE:
            return
        group = state.set_of(fact.node)
        formed_at, stepped = self._formed.get(group, (0, False))
        early = not stepped and self._verdict != PLAT and record.at - formed_at < us(EARLY_S)
        self._early[group] = self._early.get(group, 0) + 1 if early else 0
        self._failed_at[group] = record.at

    def _stepped(self, state: JobState, fact: progress.FirstStep, _record: Record) -> None:
        group = state.set_of(fact.node)
        self._early[group] = 0
        self._formed[group] = (self._formed.get(group, (0, True))[0], True)

    def _form(self, _state: JobState, fact: world.WorldFormed, record: Record) -> None:
        beyond = self._early.get(fact.group, 0) - AT_ONCE
        if beyond > 0:
            pause_s = min(FIRST_PAUSE_S * 2.0 ** min(beyond - 1, 30), self._pause_max_s)
            waited_s = (record.at - self._failed_at[fact.group]) / 1_000_000
            assert waited_s >= pause_s, f"{record.seq}: early failure {beyond + AT_ONCE} is answered after {waited_s} s"
        self._formed[fact.group] = (record.at, False)

    looks: ClassVar[Mapping[type, Look]] = {
        job.JobCreated: _created,
        incidents.Diagnosed: _judged,
        incidents.ActionChosen: _chosen,
        progress.FirstStep: _stepped,
        world.WorldFormed: _form,
    }


# ---- ends and bounds


class Absorbing(Promise):
    """What is over stays over: once a job stops or has ended, nothing new is planned, formed or judged.

    Only a new run leaves that state. What was under way may still be reported, and refused.
    """

    name = "absorbing"

    BEGINS = (
        job.JobStarted, job.JobStopping, job.JobSuspended, job.JobResumed, job.GroupScaled, nodes.NodePlanned,
        nodes.PlaceReopened, world.WorldFormed, world.WorldDissolved, plans.WorldPlanned, incidents.IncidentOpened,
        incidents.Diagnosed, incidents.ActionChosen, plans.NodeDrained,
    )  # fmt: skip
    ENDS = (job.JobSucceeded, job.JobFailed, job.JobStopped, job.JobAbandoned)

    def __init__(self) -> None:
        self._over = ""

    def _created(self, _state: JobState, _fact: job.JobCreated, record: Record) -> None:
        assert not self._over or self._over in _OVER, f"{record.seq}: a run begins while another is {self._over}"
        self._over = ""

    def _begins(self, _state: JobState, fact: object, record: Record) -> None:
        assert not self._over, f"{record.seq}: {type(fact).__name__} after {self._over}"

    def _stopping(self, state: JobState, fact: object, record: Record) -> None:
        self._begins(state, fact, record)
        self._over = "JobStopping"

    def _ends(self, state: JobState, fact: object, record: Record) -> None:
        assert self._over not in _OVER, f"{record.seq}: {type(fact).__name__} after {self._over}"
        late = self._over == "JobStopping" and not isinstance(fact, (job.JobStopped, job.JobAbandoned))
        assert not late, f"{record.seq}: {type(fact).__name__} of a job that was stopped"
        assert state.job.over, f"{record.seq}: the job is {state.job.state} after {type(fact).__name__}"
        self._over = type(fact).__name__

    looks: ClassVar[Mapping[type, Look]] = {
        **dict.fromkeys(BEGINS, _begins),
        **dict.fromkeys(ENDS, _ends),
        job.JobStopping: _stopping,
        job.JobCreated: _created,
    }


_OVER = tuple(cls.__name__ for cls in Absorbing.ENDS)


class Bounded(Promise):
    """Nothing grows without end: what is remembered of senders, stores, quarantines and incidents, and what an hour writes.

    The log's bytes are those of every 16th record, times 16.
    """

    name = "bounded"
    GENERATIONS_PER_HOUR = 3600
    BYTES_PER_HOUR = 4 << 20
    BYTES_PER_NODE_HOUR = 64 << 10
    SAMPLE = 16
    INCARNATIONS = 64

    def __init__(self) -> None:
        self._hour = 0
        self._bytes = self._generations = 0

    def __call__(self, state: JobState, record: Record) -> None:
        """See the class."""
        if record.origin is not None:
            self._sender(state, record.origin.sender, record)
        look = _BOUNDS.get(type(record.event))
        if look is not None:
            look(self, state, record.event, record)
        if record.seq % self.SAMPLE == 0:
            self._hourly(state, record)

    @staticmethod
    def _sender(state: JobState, sender: str, record: Record) -> None:
        known = state.senders.get(sender)
        assert known is None or len(known.replies) <= UNANSWERED_MAX, (
            f"{record.seq}: {len(known.replies)} replies are kept"
        )

    def _hourly(self, state: JobState, record: Record) -> None:
        hour = record.at // us(3600.0)
        if hour != self._hour:
            self._hour, self._bytes, self._generations = hour, 0, 0
        self._bytes += len(CODEC.entry(record, record.at)) * self.SAMPLE
        most = len(state.nodes.slots) + len(state.nodes.nodes) + STRANGERS_MAX
        assert len(state.senders) <= most, f"{record.seq}: {len(state.senders)} senders are remembered"
        most = self.BYTES_PER_HOUR + self.BYTES_PER_NODE_HOUR * len(state.nodes.slots)
        assert self._bytes <= most, f"{record.seq}: {self._bytes} bytes of log in this hour, {most} are enough"

    def _offered(self, state: JobState, fact: world.StoreOffered, record: Record) -> None:
        offers = state.world.offers.get(fact.node, ())
        assert len(offers) <= world.STORES_MAX, f"{record.seq}: {fact.node} offers {offers}"
        most = len(state.nodes.nodes)
        assert len(state.world.offers) <= most, f"{record.seq}: {len(state.world.offers)} nodes offer, {most} are there"

    def _quarantined(self, state: JobState, _fact: object, record: Record) -> None:
        kept = len(state.hosts.hosts)
        assert kept <= hosts.HOSTS_MAX, f"{record.seq}: {kept} hosts are remembered"

    def _planned(self, state: JobState, _fact: object, record: Record) -> None:
        # Every place has the node that is wanted, and those before it whose end is not seen yet.
        most = len(state.nodes.slots) * self.INCARNATIONS + 1
        assert len(state.nodes.nodes) <= most, f"{record.seq}: {len(state.nodes.nodes)} nodes in {most} places"

    def _exited(self, _state: JobState, fact: incidents.WorkerExited, record: Record) -> None:
        size = len(fact.tail.encode(errors="replace"))
        assert size <= incidents.TAIL_BYTES_MAX and len(fact.error) <= incidents.ERROR_MAX, (
            f"{record.seq}: {size} bytes of tail"
        )

    def _closed(self, state: JobState, _fact: object, record: Record) -> None:
        closed = sum(one.closed for one in state.incidents.by_number.values())
        assert closed <= incidents.CLOSED_KEPT, f"{record.seq}: {closed} closed incidents are remembered"

    def _judged(self, _state: JobState, fact: incidents.Diagnosed, record: Record) -> None:
        assert len(fact.evidence) <= incidents.EVIDENCE_MAX, f"{record.seq}: {len(fact.evidence)} pieces of evidence"

    def _formed(self, _state: JobState, _fact: object, record: Record) -> None:
        self._generations += 1
        assert self._generations <= self.GENERATIONS_PER_HOUR, (
            f"{record.seq}: {self._generations} generations this hour"
        )


_BOUNDS: Mapping[type, Look] = {
    world.StoreOffered: Bounded._offered,
    hosts.HostQuarantined: Bounded._quarantined,
    nodes.NodePlanned: Bounded._planned,
    incidents.WorkerExited: Bounded._exited,
    incidents.IncidentClosed: Bounded._closed,
    incidents.Diagnosed: Bounded._judged,
    world.WorldFormed: Bounded._formed,
}

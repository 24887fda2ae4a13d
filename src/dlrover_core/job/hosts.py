"""Hosts: what is remembered of the machines that nodes ran on, and which of them are kept off.

A verdict that speaks against a machine is a *strike* at its host: hardware, failed checks, hangs, and deaths that nobody can
explain. What the program did and what the platform took is none. Strikes count for `WINDOW_S`; a revised verdict takes its
strike along. A host is put in *quarantine* when the ladder isolates it, when its node failed a check, or when it is a *lemon*:
struck `LEMON` times, not by kills of workers alone, and no other host more than a third as often. (RSC found 40 lemons among
thousands of nodes; without them its large jobs failed in 4 % of cases, not in 14 %.) Whoever was in quarantine is on *probation*
afterwards: the first strike puts it back, for twice as long, until a node has served on it for `SERVED_S` and the job made steps
at the end of that.

Quarantine is passed to backends as a wish (`NodeLaunch.avoid`): one without another host starts the node there all the same.
So that a sick judgement cannot empty a cluster, we keep at most a quarter of the hosts seen in quarantine, of which the one that
ends first makes room for the newest; what people ask for does not count. All of it survives relaunches, masters and runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.evidence import HW
from dlrover_core.job import incidents, job, nodes, progress, world
from dlrover_core.job.memo import unanswered
from dlrover_core.job.names import group_of
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.spec import us

WINDOW_S = 86_400.0
SERVED_S = incidents.SERVED_S
FORGIVEN_S = 7 * 86_400.0
HOSTS_MAX = 1024
STRIKES_MAX, TAKEN_MAX = 16, 64

# Deaths without an explanation, and what one machine may do to any program; of these only repetition on one host tells.
UNEXPLAINED = frozenset(
    {
        "exit.sigkill", "exit.sigsegv", "exit.sigbus", "exit.sigabrt", "exit.silent", "exit.signal",
        "node.silent", "node.gone", "node.failed", "node.sigkill", "k8s.node_lost", "ray.system_error",
        "cuda.illegal_access", "cuda.launch_failure", "cuda.not_ready", "cuda.contained", "xid.app", "xid.contained",
        "peermem.context", "nccl.system", "nccl.segfault", "ib.retry_exceeded", "net.link_down",
    }
)  # fmt: skip
# How people end workers; nothing else is known of such a death.
KILLED = ("exit.sigkill", "exit.sigterm")
# A platform says with one of these that it took a node, for reasons of its own.
TAKEN = ("preempt", "pre-empt", "evict", "reclaim", "drain", "maintenance", "shutdown", "scaled down", "spot ")
# One failed check, and one rank that hangs, speak against its host whatever class they are given.
AGAINST_HOST = ("check.", "hang.rank", "hang.stopped")

# How a quarantine ends before its time.
ASKED, REVISED, GIVES_WAY = "asked", "revised", "gives way"


@event(34, version=2, upcast={1: lambda fields: (*fields, False)})
class HostQuarantined(NamedTuple):
    """Nothing of ours is launched on ``host`` until ``until`` (microseconds, leader's clock). ``asked``: by a person."""

    host: str
    until: int
    reason: str
    asked: bool = False


@event(100)
class HostReleased(NamedTuple):
    """A quarantine ends before its time.

    ``how``: ``asked`` by a person, who thereby forgives all that was known; ``revised``, the verdict that it came from is another
    now; ``gives way`` to another host.
    """

    host: str
    how: str
    reason: str


class QuarantineHost(NamedTuple):
    """A person wants nothing launched on this host for so many seconds. Nodes that run there are left alone: drain them."""

    host: str
    for_s: int
    reason: str


class ReleaseHost(NamedTuple):
    """A person says that this host is well: its quarantine and its strikes are forgotten."""

    host: str
    reason: str


class Strike(NamedTuple):
    """One failure that speaks against a host. ``place``: of the node that ran there; ``incident`` numbers are a log's own.

    ``bare``: a worker was killed and its node lives, as when a person does it. ``asked_by``: the record of the verdict that
    struck the host, or of the action that isolates it; a quarantine whose cause is that record comes from this incident.
    """

    at: int
    place: str
    verdict: str
    signature: str
    incident: int
    bare: bool = False
    asked_by: int = 0


@dataclass(slots=True)
class HostMemory:
    """What is known against one host. ``times``: quarantines in a row; ``incident``: the one that the last came from, or 0.

    ``trial``: the node that serves there during probation, since ``trial_at``.
    """

    rack: str = ""
    strikes: list[Strike] = field(default_factory=list)
    until: int = 0
    times: int = 0
    why: str = ""
    asked: bool = False
    probation: bool = False
    incident: int = 0
    trial: str = ""
    trial_at: int = 0

    def recent(self, now: int) -> list[Strike]:
        """The strikes that count."""
        return [strike for strike in self.strikes if strike.at > now - us(WINDOW_S)]

    @property
    def news(self) -> int:
        """When it was last heard of."""
        return max(self.until, self.strikes[-1].at if self.strikes else 0)


@dataclass(slots=True)
class Seat:
    """Where the newest node of a place runs, or ran."""

    node: str
    host: str
    rack: str = ""


@dataclass(slots=True)
class HostSlice:
    """Hosts with anything against them, by name; where each place's node is.

    ``opened``: the nodes of the incidents of the newest moment, by the record that opened them: a verdict's cause.
    ``taken``: the newest nodes that the platform says it took.
    """

    hosts: dict[str, HostMemory] = field(default_factory=dict)
    seats: dict[str, Seat] = field(default_factory=dict)
    opened: dict[int, str] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)

    def quarantined(self, now: int) -> list[str]:
        """Hosts that nothing is launched on."""
        return [host for host, one in self.hosts.items() if one.until > now]

    def host_of(self, node: str) -> str:
        """Where a node runs or last ran; empty: not known, or long ago."""
        seat = self.seats.get(node.rpartition("-")[0])
        return seat.host if seat is not None and seat.node == node else ""

    def rack_of(self, host: str) -> str:
        """The failure domain of a host; empty: not known."""
        known = self.hosts.get(host)
        if known is not None and known.rack:
            return known.rack
        return next((seat.rack for seat in self.seats.values() if seat.host == host and seat.rack), "")

    def struck_by(self, verdict: int) -> str:
        """The host that a verdict speaks against, by its record, and no earlier one of its incident did; empty: none."""
        return next((host for host, one in self.hosts.items() if any(verdict == s.asked_by for s in one.strikes)), "")

    def seen(self) -> set[str]:
        """Every host that is known; for counting, not for iterating."""
        return {*self.hosts, *(seat.host for seat in self.seats.values() if seat.host)}


class HostRecord(NamedTuple):
    """What is known against a host now. ``quarantined_until`` 0: it is not in quarantine."""

    failures_24h: int = 0
    by_class: tuple[tuple[str, int], ...] = ()
    quarantined_until: int = 0
    on_probation: bool = False


def counts(verdict: str, signature: str) -> bool:
    """Does such a verdict speak against the host that it happened on?"""
    return verdict == HW or signature in UNEXPLAINED or signature.startswith(AGAINST_HOST)


def again(known: HostMemory, now: int) -> bool:
    """Would a quarantine now be one more in a row?"""
    return known.probation and now - known.until < us(FORGIVEN_S)


# ---- evolve


def _on_created(slice_: HostSlice, fact: job.JobCreated, record: Record) -> None:
    """A new run: its nodes are others, bad hosts stay bad."""
    slice_.seats.clear()
    slice_.taken.clear()
    slice_.opened.clear()


def _on_running(slice_: HostSlice, fact: nodes.NodeRunning, record: Record) -> None:
    _seat(slice_, fact.node, fact.host, fact.rack)


def _on_joined(slice_: HostSlice, fact: nodes.NodeJoined, record: Record) -> None:
    """The backend's name of a host is the one that it can keep off; an agent in a pod knows the pod's."""
    if not slice_.host_of(fact.node):
        _seat(slice_, fact.node, fact.host, "")


def _seat(slice_: HostSlice, node: str, host: str, rack: str) -> None:
    slice_.seats[node.rpartition("-")[0]] = Seat(node, host, rack)


def _on_opened(slice_: HostSlice, fact: incidents.IncidentOpened, record: Record) -> None:
    slice_.opened = {**unanswered(slice_.opened, record.cause), record.seq: fact.node}


def _on_diagnosed(slice_: HostSlice, fact: incidents.Diagnosed, record: Record) -> None:
    before, since, place = _withdrawn(slice_, fact.incident) if fact.revises else ("", record.at, "")
    node = fact.blamed or fact.node or slice_.opened.get(record.cause, "")
    host = fact.host or slice_.host_of(node) or before
    taken = node in slice_.taken and fact.signature.startswith("node.")
    if not host or taken or not counts(fact.verdict, fact.signature):
        return
    known = _memory(slice_, host, record.at)
    place = (fact.node or node).rpartition("-")[0] or place
    # One failure is one strike, however often it is judged.
    at = since if before == host else record.at
    known.strikes = known.recent(record.at)[-STRIKES_MAX + 1 :]
    # The node that a bare exit code blames is one that is dead.
    bare = fact.signature in KILLED and not fact.blamed
    new = before != host
    known.strikes.append(Strike(at, place, fact.verdict, fact.signature, fact.incident, bare, record.seq if new else 0))
    if new:
        known.trial = ""


def _on_chosen(slice_: HostSlice, fact: incidents.ActionChosen, record: Record) -> None:
    if fact.action == ladder.ISOLATE_HOST:
        for known in slice_.hosts.values():
            known.strikes = [
                one._replace(asked_by=record.seq) if one.incident == fact.incident else one for one in known.strikes
            ]


def _withdrawn(slice_: HostSlice, incident: int) -> tuple[str, int, str]:
    """Take the strike of an incident back; at which host was it, when, and of which place's node?"""
    for host, known in slice_.hosts.items():
        for strike in known.strikes:
            if strike.incident == incident:
                known.strikes.remove(strike)
                if not known.strikes and not known.probation:
                    del slice_.hosts[host]
                return host, strike.at, strike.place
    return "", 0, ""


def _memory(slice_: HostSlice, host: str, now: int) -> HostMemory:
    known = slice_.hosts.get(host)
    if known is None:
        if len(slice_.hosts) >= HOSTS_MAX:
            # Whoever is in quarantine last: of the others the one that was not heard of for longest.
            del slice_.hosts[min(slice_.hosts, key=lambda one: (slice_.hosts[one].until > now, slice_.hosts[one].news))]
        known = slice_.hosts[host] = HostMemory(slice_.rack_of(host))
    return known


def _on_quarantined(slice_: HostSlice, fact: HostQuarantined, record: Record) -> None:
    known = _memory(slice_, fact.host, record.at)
    known.times = known.times + 1 if again(known, record.at) else 1
    known.until, known.why, known.asked = fact.until, fact.reason, fact.asked
    known.probation, known.trial = True, ""
    known.incident = next((one.incident for one in known.strikes if 0 < record.cause == one.asked_by), 0)


def _on_released(slice_: HostSlice, fact: HostReleased, record: Record) -> None:
    known = slice_.hosts.get(fact.host)
    if known is None:
        return
    if fact.how == ASKED:
        del slice_.hosts[fact.host]
        return
    known.until = min(known.until, record.at)
    if fact.how == REVISED:
        known.times = max(0, known.times - 1)
        known.probation = known.times > 0


def _on_started(slice_: HostSlice, fact: world.WorkersStarted, record: Record) -> None:
    known = slice_.hosts.get(slice_.host_of(fact.node))
    if known is not None and known.probation and known.until <= record.at and known.trial != fact.node:
        known.trial, known.trial_at = fact.node, record.at


def _on_ended(
    slice_: HostSlice, fact: nodes.NodeFailed | nodes.NodeGone | nodes.NodeLost | nodes.NodeReleased, record: Record
) -> None:
    if any(word in fact.reason.lower() for word in TAKEN):
        slice_.taken = [*slice_.taken[-TAKEN_MAX + 1 :], fact.node]
    known = slice_.hosts.get(slice_.host_of(fact.node))
    if known is not None and known.trial == fact.node:
        known.trial = ""


def _on_progress(slice_: HostSlice, fact: progress.Progressed, record: Record) -> None:
    """Whoever has served is on probation no longer."""
    for known in slice_.hosts.values():
        if known.trial and group_of(known.trial) == fact.group and record.at - known.trial_at >= us(SERVED_S):
            known.probation, known.times, known.trial = False, 0, ""


FACTS = Facts(
    kinds=(HostQuarantined, HostReleased),
    evolve={
        job.JobCreated: _on_created,
        nodes.NodeRunning: _on_running,
        nodes.NodeJoined: _on_joined,
        nodes.NodeFailed: _on_ended,
        nodes.NodeGone: _on_ended,
        nodes.NodeLost: _on_ended,
        nodes.NodeReleased: _on_ended,
        incidents.IncidentOpened: _on_opened,
        incidents.Diagnosed: _on_diagnosed,
        incidents.ActionChosen: _on_chosen,
        HostQuarantined: _on_quarantined,
        HostReleased: _on_released,
        world.WorkersStarted: _on_started,
        progress.Progressed: _on_progress,
    },
)

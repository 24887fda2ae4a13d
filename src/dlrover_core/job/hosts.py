"""Hosts: what is known against the machines that nodes ran on, and which machines are quarantined.

A verdict that speaks against a machine is a *strike* at its host: hardware faults, failed checks, hangs, and deaths without
an explanation. Faults of the program and pre-emptions by the platform are no strikes. A strike counts for `WINDOW_S`. A
revised verdict takes its strike back.

A host is put in *quarantine* in three cases: the ladder isolates it; its node failed a check; or it is a *lemon*. A lemon
has `LEMON` strikes, not all from killed workers, and no other host has more than a third as many. (RSC found 40 lemons
among thousands of nodes. Without them, 4 % of its large jobs failed instead of 14 %.) After quarantine a host is on
*probation*: the first strike puts it back for twice as long. Probation ends when a node has served there for `SERVED_S` and
the job made steps at the end of that time.

Backends learn of quarantines as `NodeLaunch.avoid`. A backend that has no other host starts the node there all the same. So
that wrong verdicts cannot empty a cluster, at most a quarter of the known hosts is in quarantine: the quarantine that ends
first gives way to the newest. Quarantines that a person asked for do not count. All of this survives relaunches, masters
and runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.evidence import HW
from dlrover_core.job import incidents, nodes, notices, observing, progress, world
from dlrover_core.job.memo import unanswered
from dlrover_core.job.names import group_of
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.state import lasting
from dlrover_core.spec import us

WINDOW_S = 86_400.0
SERVED_S = incidents.SERVED_S
FORGIVEN_S = 7 * 86_400.0
HOSTS_MAX = 1024
STRIKES_MAX, TAKEN_MAX = 16, 64

# Deaths without an explanation, and faults that one machine may cause in any program: they count only if one host repeats them.
UNEXPLAINED = frozenset(
    {
        "exit.sigkill", "exit.sigsegv", "exit.sigbus", "exit.sigabrt", "exit.silent", "exit.signal",
        "node.silent", "node.gone", "node.failed", "node.sigkill", "k8s.node_lost", "ray.system_error",
        "cuda.illegal_access", "cuda.launch_failure", "cuda.not_ready", "cuda.contained", "xid.app", "xid.contained",
        "peermem.context", "nccl.system", "nccl.segfault", "ib.retry_exceeded", "net.link_down",
    }
)  # fmt: skip
# Signals by which people end workers; nothing else is known of such a death.
KILLED = ("exit.sigkill", "exit.sigterm")
# Words in a platform's reason that say that it took the node for reasons of its own.
TAKEN = ("preempt", "pre-empt", "evict", "reclaim", "drain", "maintenance", "shutdown", "scaled down", "spot ")
# A failed check and a hanging rank speak against the host whatever their class is.
AGAINST_HOST = ("check.", "hang.rank", "hang.stopped")

# Values of `HostReleased.how`.
ASKED, REVISED, GIVES_WAY = "asked", "revised", "gives way"


@event(34, version=2, upcast={1: lambda fields: (*fields, False)})
class HostQuarantined(NamedTuple):
    """No node is launched on ``host`` before ``until``.

    ``until``: microseconds by the leader's clock; ``asked``: a person asked for it.
    """

    host: str
    until: int
    reason: str
    asked: bool = False


@event(100)
class HostReleased(NamedTuple):
    """A quarantine ends before its time.

    how: `ASKED`: by a person, which also forgives all strikes; `REVISED`: the verdict behind it was revised; `GIVES_WAY`:
         to the quarantine of another host
    """

    host: str
    how: str
    reason: str


class QuarantineHost(NamedTuple):
    """A person: launch no node on this host for ``for_s`` seconds. Nodes that run there stay; drain them."""

    host: str
    for_s: int
    reason: str


class ReleaseHost(NamedTuple):
    """A person: this host is well. Its quarantine and its strikes are forgotten."""

    host: str
    reason: str


class Strike(NamedTuple):
    """One failure that speaks against a host.

    at:       when it happened, microseconds
    place:    the place of the node that ran there
    incident: number of the incident
    bare:     a worker was killed and its node lives on, as when a person kills it
    asked_by: record of the verdict that struck the host, or of the action that isolates it; a quarantine caused by that
              record belongs to this incident
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
    """What is known against one host.

    rack:      its failure domain
    until:     when its quarantine ends or ended, microseconds
    times:     quarantines in a row
    why:       reason of the newest quarantine
    asked:     a person asked for it
    probation: the host is on probation
    incident:  the incident behind the newest quarantine; 0: none
    trial:     the node that serves there during probation, since ``trial_at``
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
        """When the host was last in quarantine or struck."""
        return max(self.until, self.strikes[-1].at if self.strikes else 0)


@dataclass(slots=True)
class Seat:
    """Where the newest node of a place runs, or ran."""

    node: str
    host: str
    rack: str = ""


@dataclass(slots=True)
class HostSlice:
    """Hosts with something against them, by name, and the host of each place's newest node.

    ``opened``: the node of each incident that the newest batch opened, by record. ``taken``: the newest nodes that the
    platform says it took away, or that a person deleted.
    """

    # A bad host stays bad, whatever runs there.
    hosts: dict[str, HostMemory] = lasting(dict)
    seats: dict[str, Seat] = field(default_factory=dict)
    opened: dict[int, str] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)

    def quarantined(self, now: int) -> list[str]:
        """Hosts in quarantine."""
        return [host for host, one in self.hosts.items() if one.until > now]

    def host_of(self, node: str) -> str:
        """Where a node runs or last ran; empty: unknown, or long ago."""
        seat = self.seats.get(node.rpartition("-")[0])
        return seat.host if seat is not None and seat.node == node else ""

    def rack_of(self, host: str) -> str:
        """The failure domain of a host; empty: unknown."""
        known = self.hosts.get(host)
        if known is not None and known.rack:
            return known.rack
        return next((seat.rack for seat in self.seats.values() if seat.host == host and seat.rack), "")

    def struck_by(self, verdict: int) -> str:
        """The host whose strike this verdict (by its record) added; empty: it added none, or only moved one."""
        return next((host for host, one in self.hosts.items() if any(verdict == s.asked_by for s in one.strikes)), "")

    def seen(self) -> set[str]:
        """Every known host; for counting, not for iterating."""
        return {*self.hosts, *(seat.host for seat in self.seats.values() if seat.host)}


class HostRecord(NamedTuple):
    """What is known against a host now. ``quarantined_until`` 0: it is not in quarantine."""

    failures_24h: int = 0
    by_class: tuple[tuple[str, int], ...] = ()
    quarantined_until: int = 0
    on_probation: bool = False


def counts(verdict: str, signature: str) -> bool:
    """Does such a verdict speak against the host on which it happened?"""
    return verdict == HW or signature in UNEXPLAINED or signature.startswith(AGAINST_HOST)


def again(known: HostMemory, now: int) -> bool:
    """Would a quarantine now be one more in a row?"""
    return known.probation and now - known.until < us(FORGIVEN_S)


# ---- evolve


def _on_running(slice_: HostSlice, fact: nodes.NodeRunning | observing.NodePlaced, record: Record) -> None:
    _seat(slice_, fact.node, fact.host, fact.rack)


def _on_joined(slice_: HostSlice, fact: nodes.NodeJoined, record: Record) -> None:
    """The backend's name of a host wins, because the backend can avoid that name; an agent in a pod knows only the pod's."""
    if not slice_.host_of(fact.node):
        _seat(slice_, fact.node, fact.host, "")


def _on_withdrawn(slice_: HostSlice, fact: notices.NoticeWithdrawn, record: Record) -> None:
    """The successor was the newest of the place; the node that stays is it again."""
    if fact.host and not slice_.host_of(fact.node):
        _seat(slice_, fact.node, fact.host, slice_.rack_of(fact.host))


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
    # With nothing but an exit code, the blamed node is a dead one.
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
    """Take the strike of an incident back; returns its host, its time and the place of its node."""
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
            # Forget hosts out of quarantine first, and of those the host with the oldest news.
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
    if fact.reason == nodes.DELETED or any(word in fact.reason.lower() for word in TAKEN):
        slice_.taken = [*slice_.taken[-TAKEN_MAX + 1 :], fact.node]
    known = slice_.hosts.get(slice_.host_of(fact.node))
    if known is not None and known.trial == fact.node:
        known.trial = ""


def _on_progress(slice_: HostSlice, fact: progress.Progressed, record: Record) -> None:
    """Probation of hosts whose node has served long enough ends."""
    for known in slice_.hosts.values():
        if known.trial and group_of(known.trial) == fact.group and record.at - known.trial_at >= us(SERVED_S):
            known.probation, known.times, known.trial = False, 0, ""


FACTS = Facts(
    kinds=(HostQuarantined, HostReleased),
    evolve={
        observing.NodePlaced: _on_running,
        nodes.NodeRunning: _on_running,
        nodes.NodeJoined: _on_joined,
        nodes.NodeFailed: _on_ended,
        nodes.NodeGone: _on_ended,
        nodes.NodeLost: _on_ended,
        nodes.NodeReleased: _on_ended,
        incidents.IncidentOpened: _on_opened,
        incidents.Diagnosed: _on_diagnosed,
        incidents.ActionChosen: _on_chosen,
        notices.NoticeWithdrawn: _on_withdrawn,
        HostQuarantined: _on_quarantined,
        HostReleased: _on_released,
        world.WorkersStarted: _on_started,
        progress.Progressed: _on_progress,
    },
)

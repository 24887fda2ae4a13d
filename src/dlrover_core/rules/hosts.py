"""Hosts: strikes are weighed, lemons and faulty hosts are quarantined, and a person's quarantines are carried out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dlrover_core.diagnosis import ladder
from dlrover_core.errors import Refused
from dlrover_core.job import incidents, nodes
from dlrover_core.job.hosts import (
    ASKED,
    GIVES_WAY,
    REVISED,
    HostQuarantined,
    HostRecord,
    HostReleased,
    HostSlice,
    QuarantineHost,
    ReleaseHost,
    again,
)
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, always
from dlrover_core.kernel.events import Event, Record
from dlrover_core.spec import us
from dlrover_core.words import first_few

LEMON = 3
SHARE = 4
NAME_MAX, HOSTS_NAMED_MAX = 255, 20


def record(state: JobState, host: str) -> HostRecord:
    """What is known against a host; an empty record for an unknown one."""
    known = state.hosts.hosts.get(host)
    if known is None:
        return HostRecord()
    strikes = known.recent(state.at)
    counts = Counter(strike.verdict for strike in strikes)
    held = known.until > state.at
    return HostRecord(
        len(strikes), tuple(sorted(counts.items())), known.until if held else 0, known.probation and not held
    )


def leave(state: JobState, node: str, incident: int) -> str:
    """Why this incident's node should move to another host rather than be restarted in place; empty: it need not.

    It should move if this incident struck its host and the host is in quarantine. It stays if it was told to avoid that
    very host: then its backend has no other.
    """
    host = state.hosts.host_of(node)
    known, present = state.hosts.hosts.get(host), state.nodes.nodes.get(node)
    if known is None or known.until <= state.at or (present is not None and host in present.avoid):
        return ""
    ours = any(strike.incident == incident for strike in known.strikes)
    return f"host.quarantine: {host} is in quarantine ({known.why})" if ours else ""


# ---- decide


def _quarantine(state: JobState, command: QuarantineHost, now: int) -> Iterator[Event]:
    _refuse(state, command.host)
    if not 0 < command.for_s <= 366 * 86_400:
        raise Refused(f"a host is kept off for more than 0 s and at most a year, not for {command.for_s} s")
    others = state.hosts.seen() - {command.host, *state.hosts.quarantined(now)}
    if state.job.spec.joining and not others:
        raise Refused(f"{command.host} is the only host left to this job; 'dlrover drain' frees the host of a node")
    yield HostQuarantined(command.host, now + us(command.for_s), command.reason[: nodes.TEXT_MAX], asked=True)


def _release(state: JobState, command: ReleaseHost, now: int) -> Iterator[Event]:
    _refuse(state, command.host)
    if command.host not in state.hosts.hosts:
        there = sorted(state.hosts.hosts)
        named = f"; there are: {first_few(there, HOSTS_NAMED_MAX)}" if there else ""
        raise Refused(f"nothing is known against a host {command.host!r}{named}")
    yield HostReleased(command.host, ASKED, command.reason[: nodes.TEXT_MAX])


def _refuse(state: JobState, host: str) -> None:
    if not state.job.live:
        raise Refused(f"the job is {state.job.state}")
    if not host or len(host) > NAME_MAX:
        raise Refused(f"a host has a name of at most {NAME_MAX} characters")


# ---- react


def _blame(state: JobState, fact: nodes.NodeFailed, record: Record) -> Iterator[Event]:
    """Quarantine a host that its backend or agent calls faulty, without further judging."""
    host = state.hosts.host_of(fact.node)
    if fact.reason.split(":")[0] in nodes.HOST_REASONS and host:
        yield from keep_off(state, host, fact.reason, record.at)


def _weigh(state: JobState, fact: incidents.Diagnosed, record: Record) -> Iterator[Event]:
    if fact.revises:
        yield from _take_back(state, fact.incident)
    host = state.hosts.struck_by(record.seq)
    if not host or not state.job.live:
        return
    known = state.hosts.hosts[host]
    # A verdict that is merely revised during probation is about an earlier failure.
    incident = state.incidents.by_number.get(fact.incident)
    if known.probation and known.until <= (incident.cause.at if incident is not None else record.at):
        yield from keep_off(state, host, f"on probation, and again {fact.signature}", record.at)
    elif _lemon(state.hosts, host, record.at):
        many = len(known.recent(record.at))
        yield from keep_off(
            state, host, f"{many} failures in 24 h, and no other host more than a third as many", record.at
        )


def _take_back(state: JobState, incident: int) -> Iterator[Event]:
    """End the quarantine of a host once a revised verdict blames another host or the program."""
    for host, known in state.hosts.hosts.items():
        blamed = any(strike.incident == incident for strike in known.strikes)
        if known.incident == incident and known.until > state.at and not known.asked and not blamed:
            yield HostReleased(host, REVISED, f"incident {incident} was not its doing")
            return


def _isolate(state: JobState, fact: incidents.ActionChosen, record: Record) -> Iterator[Event]:
    host = fact.host or state.hosts.host_of(fact.node)
    if fact.action == ladder.ISOLATE_HOST and host:
        yield from keep_off(state, host, f"incident {fact.incident}: {fact.rule}", record.at)


def keep_off(state: JobState, host: str, reason: str, now: int) -> Iterator[Event]:
    """Quarantine a host. Where that makes too many, the quarantine that ends first gives way."""
    slice_ = state.hosts
    if host in slice_.quarantined(now):
        return
    hosts = slice_.seen() | {host}
    if state.job.spec.joining and len(hosts) == 1:
        return
    ours = [(one.until, name) for name, one in slice_.hosts.items() if one.until > now and not one.asked]
    if len(ours) >= max(1, len(hosts) // SHARE):
        yield HostReleased(
            min(ours)[1], GIVES_WAY, f"{len(ours)} of {len(hosts)} hosts are kept off, and {host} is next"
        )
    yield HostQuarantined(host, now + _length(state, host, now), reason[: nodes.TEXT_MAX])


def _length(state: JobState, host: str, now: int) -> int:
    """How long: after probation twice the last quarantine, up to ``quarantine_max_s``."""
    spec, known = state.job.spec, state.hosts.hosts.get(host)
    times = known.times if known is not None and again(known, now) else 0
    return us(max(spec.quarantine_s, min(spec.quarantine_s * 2 ** min(times, 16), spec.quarantine_max_s)))


def _lemon(slice_: HostSlice, host: str, now: int) -> bool:
    """Does the host fail more often than chance and the program explain? A single host has nothing to be compared with.

    People kill workers on the host where they are logged in, so killed workers alone make no lemon.
    """
    strikes = slice_.hosts[host].recent(now)
    mine = len(strikes)
    if mine < LEMON or len(slice_.seen()) < 2 or all(strike.bare for strike in strikes):
        return False
    return all(len(one.recent(now)) * LEMON <= mine for name, one in slice_.hosts.items() if name != host)


RULES = Rules(
    decide={QuarantineHost: _quarantine, ReleaseHost: _release},
    react={
        nodes.NodeFailed: _blame,
        incidents.Diagnosed: _weigh,
        incidents.ActionChosen: _isolate,
    },
    levels=dict.fromkeys((HostQuarantined, HostReleased), always),
)

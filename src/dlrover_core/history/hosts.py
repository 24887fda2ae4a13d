"""What is known of the hosts: the nodes there, the failures there, and which hosts are quarantined, why and until when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from dlrover_core.job import hosts
from dlrover_core.job.state import JobState


class HostRow(NamedTuple):
    """One host. Times are microseconds by the leader's clock; 0: never.

    rack:                    its failure domain
    nodes:                   nodes that run there
    failures_24h:            failures that speak against it, in 24 hours
    by_class:                the same by class
    last_signature, last_at: the newest of them
    quarantined_until:       end of its quarantine; 0: it is not in quarantine now
    asked:                   a person asked for the quarantine
    times:                   quarantines in a row
    why:                     reason of the newest quarantine
    """

    host: str
    rack: str
    nodes: tuple[str, ...]
    failures_24h: int
    by_class: Mapping[str, int]
    last_signature: str
    last_at: int
    quarantined_until: int
    asked: bool
    on_probation: bool
    times: int
    why: str


class HostsTold(NamedTuple):
    """All known hosts, those with most against them first.

    racks:  failures by rack
    places: places that failed on several hosts, each with the number of failures and of hosts
    """

    job: str
    at: int
    hosts: tuple[HostRow, ...]
    racks: Mapping[str, int]
    places: Mapping[str, tuple[int, int]]


def hosts_of(state: JobState, now: int | None = None) -> HostsTold:
    """The hosts of a folded history, as of ``now``; by default, as of the last record."""
    at = max(state.at, now or 0)
    there = sorted(state.hosts.seen())
    rows = [_row(state, host, at) for host in there]
    rows.sort(key=lambda row: (row.quarantined_until == 0, not row.on_probation, -row.failures_24h, row.host))
    racks = Counter[str]()
    places: dict[str, list[str]] = {}
    for host, known in state.hosts.hosts.items():
        for strike in known.recent(at):
            racks[known.rack] += 1
            places.setdefault(strike.place, []).append(host)
    several = {place: (len(found), len(set(found))) for place, found in sorted(places.items()) if len(set(found)) > 1}
    return HostsTold(state.job.name, at, tuple(rows), {rack: racks[rack] for rack in sorted(racks) if rack}, several)


def _row(state: JobState, host: str, at: int) -> HostRow:
    known = state.hosts.hosts.get(host) or hosts.HostMemory()
    strikes = known.recent(at)
    last = strikes[-1] if strikes else None
    held = known.until > at
    return HostRow(
        host,
        state.hosts.rack_of(host),
        tuple(
            node.node
            for node in state.nodes.nodes.values()
            if not node.ended and state.hosts.host_of(node.node) == host
        ),
        len(strikes),
        dict(sorted(Counter(strike.verdict for strike in strikes).items())),
        last.signature if last else "",
        last.at if last else 0,
        known.until if held else 0,
        known.asked,
        known.probation and not held,
        known.times,
        known.why,
    )

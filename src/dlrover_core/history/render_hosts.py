"""What is known of the hosts, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import tzinfo

from dlrover_core.history.hosts import HostRow, HostsTold
from dlrover_core.history.phrases import duration, one_line
from dlrover_core.history.render import clock, table
from dlrover_core.words import count

ROWS_MAX = 64


def hosts(told: HostsTold, zone: tzinfo | None = None) -> str:
    """Every host in a line, quarantined ones first; then racks and places with several failures."""
    if not told.hosts:
        return f"job {told.job}: no host is known yet"
    head = ("host", "rack", "failures in 24 h", "state", "nodes", "why")
    rows = [head, *(_row(row, told.at) for row in told.hosts[:ROWS_MAX])]
    more = len(told.hosts) - ROWS_MAX
    lines = [f"job {told.job}: {count(len(told.hosts), 'host')}, as of {clock(told.at, zone)}", *table(rows)]
    if more > 0:
        lines.append(f"  ... and {count(more, 'host')} more; --json has all")
    return "\n".join([*lines, *_beyond(told)])


def _row(row: HostRow, at: int) -> tuple[str, ...]:
    by_class = ", ".join(f"{verdict} {number}" for verdict, number in row.by_class.items())
    return (
        one_line(row.host, 64),
        one_line(row.rack, 32) or "-",
        f"{row.failures_24h} ({by_class}; last {one_line(row.last_signature, 40)})" if row.failures_24h else "-",
        _state(row, at),
        one_line(", ".join(row.nodes), 60) or "-",
        one_line(row.why, 160) if row.quarantined_until or row.on_probation else "",
    )


def _state(row: HostRow, at: int) -> str:
    if row.quarantined_until:
        again = f", {row.times} in a row" if row.times > 1 else ""
        return f"quarantine for {duration(row.quarantined_until - at)} more{again}{', as asked' if row.asked else ''}"
    return "on probation" if row.on_probation else "ok"


def _beyond(told: HostsTold) -> Iterator[str]:
    """Failures of a whole rack, which suggest a switch, and of one place on several hosts, which suggest the program."""
    for rack, number in told.racks.items():
        struck = sum(row.rack == rack and row.failures_24h > 0 for row in told.hosts)
        if struck > 1:
            yield f"rack {one_line(rack, 32)}: {count(number, 'failure')} in 24 h on {count(struck, 'host')}"
    for place, (number, on) in told.places.items():
        yield (
            f"place {one_line(place, 64)}: {count(number, 'failure')} in 24 h on {count(on, 'host')}; "
            "that speaks for its ranks or their data, not for a host"
        )

"""What a simulation found, for people and for programs. Nothing of the machine it ran on is in it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dlrover_core.sim.constants import ASSUMED, Constant
from dlrover_core.sim.datasets import PLANNED, Dataset
from dlrover_core.sim.run import CLASSES, Recovery

PHASES = {
    "detect": "from the failure to the word of it",
    "decide": "from that to the action",
    "stop": "until the last worker is stopped",
    "wait": "for nodes",
    "form": "until all workers are started",
    "load": "collectives set up, state loaded",
    "replay": "steps made again",
}


class Incident(NamedTuple):
    """How often a cause struck; ``kind`` is its class."""

    cause: str
    kind: str
    times: int


class Report(NamedTuple):
    """One policy's run. ``lost_s``: work made again; ``recoveries``: every stop of the job."""

    policy: str
    outcome: str
    goodput: float
    virtual_s: float
    lost_s: float
    by_class: dict[str, float]
    incidents: tuple[Incident, ...]
    recoveries: tuple[Recovery, ...]
    events: int = 0
    log_hash: str = ""

    @property
    def failures(self) -> int:
        """What struck and was not planned."""
        return sum(one.times for one in self.incidents if one.kind != PLANNED)

    @property
    def planned(self) -> int:
        """What was."""
        return sum(one.times for one in self.incidents if one.kind == PLANNED)

    @property
    def stops_more(self) -> int:
        """Stops beyond one for each thing that struck: on what was still broken, or because a host was back."""
        return max(0, len(self.recoveries) - self.failures - self.planned)

    def phases(self) -> dict[str, tuple[float, float, float]]:
        """Mean, median and worst seconds of each phase, over all stops; and of them together."""
        if not self.recoveries:
            return {}
        columns = {name: [getattr(one, f"{name}_s") for one in self.recoveries] for name in PHASES}
        columns["all"] = [one.total_s for one in self.recoveries]
        return {name: (statistics.fmean(of), statistics.median(of), max(of)) for name, of in columns.items()}

    def values(self) -> dict[str, Any]:
        """For programs."""
        return {
            "policy": self.policy,
            "outcome": self.outcome,
            "goodput": self.goodput,
            "virtual_s": self.virtual_s,
            "lost_s": self.lost_s,
            "by_class_s": self.by_class,
            "failures": self.failures,
            "planned": self.planned,
            "stops": len(self.recoveries),
            "stops_more": self.stops_more,
            "incidents": [one._asdict() for one in self.incidents],
            "mttr_s": {
                name: dict(zip(("mean", "median", "worst"), of, strict=True)) for name, of in self.phases().items()
            },
            "events": self.events,
            "log_hash": self.log_hash,
        }


class Range(NamedTuple):
    """The least and the greatest goodput."""

    low: float
    high: float


class Comparison(NamedTuple):
    """All policies' reports on one question; ``asked`` as its command line says it.

    ``ranges``: with every assumed constant doubled, and halved; ``seeds``: with other failures, drawn alike.
    """

    asked: Mapping[str, Any]
    dataset: Dataset
    reports: Sequence[Report]
    ranges: Sequence[Range | None]
    seeds: Sequence[Range | None]
    constants: Sequence[Constant]

    def values(self) -> dict[str, Any]:
        """For programs."""
        reports = []
        for report, between, drawn in zip(self.reports, self.ranges, self.seeds, strict=True):
            told = {"range": between, "seeds_range": drawn}
            reports.append(report.values() | {key: one and one._asdict() for key, one in told.items()})
        return {
            **self.asked,
            "source": self.dataset.source,
            "assumptions": list(self.dataset.assumed),
            "policies": reports,
            "constants": [one._asdict() for one in self.constants],
        }

    def text(self) -> str:
        """For people."""
        lines = [*self._headline(), "", *self._goodput(), "", *self._classes()]
        lines += ["", *self._causes(), "", *self._mttr(), "", *self._constants()]
        return "\n".join(lines)

    def _headline(self) -> list[str]:
        asked = self.asked
        spares = f", {asked['spares']:,} spares" if asked["spares"] else ", no spares"
        lines = [
            (
                f"{asked['nodes']:,} nodes of {asked['workers_per_node']} workers{spares}, "
                f"{asked['days']:g} days, seed {asked['seed']}"
            ),
            f"failures as {self.dataset.name}: {self.dataset.title}",
            f"  {self.dataset.source}",
        ]
        lines += [f"  assumed: {one}" for one in self.dataset.assumed]
        if asked["nodes_min"] < asked["nodes"]:
            lines.append(f"it may shrink to {asked['nodes_min']:,} nodes, and is slower by as much")
        if asked["set"]:
            lines.append(f"set: {_settings(asked['set'])}")
        lines += [f"set by {name}: {_settings(changes)}" for name, changes in asked["policies_set"].items()]
        return lines

    def _goodput(self) -> list[str]:
        rows = [("", *(one.policy for one in self.reports))]
        rows.append(("goodput", *(percent(one.goodput) for one in self.reports)))
        for what, ranges in (
            (f"  {self.asked['seeds']} seeds", self.seeds),
            ("  assumed constants doubled, halved", self.ranges),
        ):
            if any(one is not None for one in ranges):
                between = (f"{percent(one.low)} to {percent(one.high)}" if one is not None else "-" for one in ranges)
                rows.append((what, *between))
        rows.append(("failures", *(f"{one.failures:,}" for one in self.reports)))
        rows.append(("planned interruptions", *(f"{one.planned:,}" for one in self.reports)))
        rows.append(("stops of all workers", *(f"{len(one.recoveries):,}" for one in self.reports)))
        rows.append(("  more than one for each", *(f"{one.stops_more:,}" for one in self.reports)))
        if any(one.outcome not in ("succeeded", "ended") for one in self.reports):
            rows.append(("outcome", *(one.outcome for one in self.reports)))
        return table(rows)

    def _classes(self) -> list[str]:
        rows = [("where the time went", *(one.policy for one in self.reports), "")]
        names = [*CLASSES, *sorted({name for one in self.reports for name in one.by_class} - set(CLASSES))]
        for name in names:
            shares = [one.by_class.get(name, 0.0) / one.virtual_s if one.virtual_s else 0.0 for one in self.reports]
            if any(shares):
                rows.append((f"  {name}", *(percent(share) for share in shares), CLASSES.get(name, "")))
        return table(rows)

    def _causes(self) -> list[str]:
        counts = [{(one.cause, one.kind): one.times for one in report.incidents} for report in self.reports]
        every = sorted(
            {cause for of in counts for cause in of}, key=lambda one: (-max(of.get(one, 0) for of in counts), one)
        )
        rows = [("what struck", *(one.policy for one in self.reports), "")]
        rows += [(f"  {cause}", *(f"{of.get((cause, kind), 0):,}" for of in counts), kind) for cause, kind in every]
        return table(rows)

    def _mttr(self) -> list[str]:
        rows = [("mean time to recover, s", *(one.policy for one in self.reports), "")]
        phases = [one.phases() for one in self.reports]
        for name in (*PHASES, "all"):
            cells = [
                "-" if name not in of else f"{of[name][0]:,.1f} ({of[name][1]:,.1f}, worst {of[name][2]:,.1f})"
                for of in phases
            ]
            rows.append((f"  {name}", *cells, PHASES.get(name, "mean (median, worst)")))
        return table(rows)

    def _constants(self) -> list[str]:
        rows = [("constants", "", "", "")]
        rows += [
            (
                f"  {one.name}",
                f"{one.value:.4g} {one.unit}",
                one.mark,
                f"{one.doc} [{one.source}]" if one.source else one.doc,
            )
            for one in self.constants
        ]
        assumed = sum(one.mark == ASSUMED for one in self.constants)
        return [
            *table(rows),
            f"  {assumed} of {len(self.constants)} are assumed: whatever rests on them is a range, not a figure",
        ]


def _settings(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in changes.items())


def percent(share: float) -> str:
    """With two digits: 99.03 %."""
    return f"{100 * share:.2f} %"


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns, aligned; numbers are not, they differ in their units."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

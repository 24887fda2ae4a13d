"""The labelled incidents and lines of `tests/incidents`, and how a judgement on one is scored.

A file may hold cascades: one row for what many ranks say. They are written out here, each rank with its own time, from a seed
that is the incident's name, and everything is put into the order of arrival.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dlrover_core.diagnosis.evidence import CGROUP, KERNEL, LOG
from dlrover_core.diagnosis.offline import Observation, diagnose
from dlrover_core.diagnosis.procedure import Judgement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).resolve().parents[1] / "incidents"
HALVES = ("seen", "unseen")
SILENCE = "~"  # in `accept`: to say nothing is right, too
EVICTIONS = ("isolate", "reset")  # actions that keep a job off a host
MATCHED = (LOG, KERNEL, CGROUP)  # sources whose lines the matcher reads; the others are judged


@dataclass(frozen=True, slots=True)
class Line:
    """One text and what it means; an empty label: nothing."""

    id: str
    label: str
    half: str
    seen: Observation
    accept: tuple[str, ...] = ()

    def right(self, signature: str) -> bool:
        """Is that what it means? Empty: nothing was recognised."""
        return kind(signature) == self.label or (kind(signature) or SILENCE) in self.accept


@dataclass(frozen=True, slots=True)
class Incident:
    """A failure as it was observed, in the order of arrival, and what it was."""

    name: str
    half: str
    made: str
    root: str
    verdict: str
    node: str
    rank: int
    evict: bool
    control: bool
    observations: tuple[Observation, ...] = field(repr=False)
    roots: tuple[str, ...] = ()
    verdicts: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def somebody(self) -> bool:
        """Is anybody to be named?"""
        return bool(self.node) or self.rank >= 0


class Score(NamedTuple):
    """How a judgement compares. ``where``: the guilty node or rank is named (None: there is none); ``evicted``: wrongly."""

    root: bool
    where: bool | None
    evicted: bool
    said: str


def judgement_on(observations: Sequence[Observation]) -> Judgement | None:
    """Ours; None: nothing was recognised."""
    try:
        return diagnose(observations)
    except ValueError:
        return None


def kind(signature: str) -> str:
    """Without the number of an unnamed exit code or signal: exit.code7 is one kind with exit.code3."""
    return signature.rstrip("0123456789") if signature.startswith(("exit.code", "exit.signal")) else signature


def score(incident: Incident, judgement: Judgement | None) -> Score:
    """Root cause, place, and whether a host was blamed for what no host did."""
    if judgement is None:
        return Score(root=False, where=False if incident.somebody else None, evicted=False, said="nothing")
    evicts = judgement.action in EVICTIONS and bool(judgement.blamed or judgement.host)
    innocent = judgement.blamed not in (incident.node, *incident.nodes)
    return Score(
        kind(judgement.signature) in (incident.root, *incident.roots),
        located(incident, judgement.blamed or judgement.root.node, judgement.rank) if incident.somebody else None,
        evicts and (incident.control or innocent),
        f"{judgement.signature} at {judgement.blamed or '-'}/{judgement.rank}, {judgement.action}",
    )


def located(incident: Incident, node: str, rank: int) -> bool:
    """Is that node, or that rank, the guilty one?"""
    if node and node in (incident.node, *incident.nodes):
        return True
    return rank >= 0 and rank in (incident.rank, *incident.ranks)


def lines() -> list[Line]:
    """All labelled lines."""
    return [_line(row) for row in _read(FOLDER / "lines.toml")["line"]]


def incidents() -> list[Incident]:
    """All whole incidents, by name."""
    files = sorted(path for path in FOLDER.glob("*.toml") if path.stem != "lines")
    return [_incident(path.stem, _read(path)) for path in files]


def spread(name: str, row: Mapping[str, Any]) -> Iterator[tuple[float, Observation]]:
    """A cascade's rows, one for each rank: when it arrives, and what it is."""
    chance = random.Random(f"{name}/{row['at_s']}/{row.get('text', '')}")
    for rank in ranks(row["ranks"]):
        at_s = round(row["at_s"] + chance.random() * row["spread_s"], 3)
        node = f"{row.get('group', 'worker')}-{rank // row['nproc']}-0"
        words = {"rank": rank, "node": node, "local": rank % row["nproc"], "port": chance.randrange(30_000, 60_000)}
        words |= {"ms": chance.randrange(10, 99), "port8": chance.randrange(1, 9)}
        text = row.get("text", "")
        for word, value in words.items():
            text = text.replace(f"{{{word}}}", str(value))
        yield at_s, Observation(at_s, row["source"], node, f"host-of-{node}", rank, text, row.get("exit_code", 0))


def ranks(spans: str) -> list[int]:
    """The ranks of "0-6,8,10-15"."""
    ends = [span.partition("-") for span in spans.split(",")]
    return [rank for first, _, last in ends for rank in range(int(first), int(last or first) + 1)]


def _incident(name: str, told: Mapping[str, Any]) -> Incident:
    label = told["label"]
    rows = [(row.get("arrives_s", row["at_s"]), _observation(row)) for row in told.get("observation", ())]
    for row in told.get("cascade", ()):
        rows += spread(name, row)
    rows.sort(key=lambda one: one[0])
    hosts = {row["node"]: row["host"] for row in told.get("observation", ()) if "host" in row and "node" in row}
    return Incident(
        name=name,
        half=told["half"],
        made=told["made"],
        root=label["root"],
        verdict=label["class"],
        node=label["node"],
        rank=label["rank"],
        evict=label["evict"],
        control=label["negative_control"],
        observations=tuple(one._replace(host=hosts.get(one.node, one.host)) for _, one in rows),
        roots=tuple(label.get("accept", ())),
        verdicts=tuple(label.get("accept_classes", ())),
        nodes=tuple(label.get("accept_nodes", ())),
        ranks=tuple(label.get("accept_ranks", ())),
    )


def _line(row: Mapping[str, Any]) -> Line:
    worker = row["source"] not in ("kernel", "cgroup", "platform")
    seen = Observation(0.0, row["source"], "worker-0-0", "host-0", 0 if worker else -1, row["text"])
    seen = seen._replace(exit_code=row.get("exit_code", 0), phase=row.get("phase", ""), reason=row.get("reason", ""))
    return Line(row["id"], row["label"], row["half"], seen, tuple(row.get("accept", ())))


def _observation(row: Mapping[str, Any]) -> Observation:
    node = row.get("node", "")
    known = {name: row[name] for name in Observation._fields if name in row}
    return Observation(**{"host": f"host-of-{node}" if node else "", **known})


def _read(path: Path) -> Mapping[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def share(right: Sequence[bool]) -> float:
    """How many of them are right, 0 to 1."""
    return sum(right) / len(right) if right else 1.0

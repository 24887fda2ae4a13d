"""A second opinion: nodes and worlds, folded once more by rules so plain that one can see that they are right.

The real state is packed with counts, seats and places that follow from it and are kept beside it (`job.tally`); this one counts
everything anew whenever it is asked. `Reference` folds both side by side and compares the node that an event is about at once,
and everything every so many events. Where they differ, one of them is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dlrover_core.job import job
from dlrover_core.job.sets import NO_SETS, sets_of
from dlrover_core.job.state import REGISTRY, JobState
from dlrover_core.kernel.events import Record
from dlrover_core.testing.promises import Look, Promise

UNDER_WAY = ("planned", "pending")
ALIVE = ("running", "suspect")

# By event: from which states a node goes where. From any other state it stays where it is.
MOVES: dict[str, tuple[tuple[str, ...], str]] = {
    "NodePending": (UNDER_WAY, "pending"),
    "NodeRunning": (UNDER_WAY, "running"),
    "NodeJoined": (UNDER_WAY, "running"),
    "NodeSuspected": (("running",), "suspect"),
    "NodeHeard": (("suspect",), "running"),
    "NodeLost": ((*UNDER_WAY, *ALIVE, "failed"), "lost"),
    "NodeSucceeded": ((*UNDER_WAY, *ALIVE), "succeeded"),
    "NodeFailed": ((*UNDER_WAY, *ALIVE), "failed"),
}
LEAVES = ("NodeLost", "NodeSucceeded", "NodeFailed", "NodeLeft", "NodeGone", "NodeReleased")


class Naive:
    """Nodes and worlds as dictionaries. A node: [state, joined, released, host, group]; a world: generation, members, reports."""

    def __init__(self) -> None:
        self.nodes: dict[str, list[Any]] = {}
        self.worlds: dict[str, dict[str, Any]] = {}
        self.offers: dict[str, list[str]] = {}
        self.given_up: set[str] = set()
        self.sets = NO_SETS

    def fold(self, name: str, fact: Any) -> None:
        """One event."""
        if name.startswith("Node"):
            if name == "NodePlanned":
                self.nodes[fact.node] = ["planned", False, "", "", fact.group]
            elif fact.node in self.nodes:
                self._node(name, fact, self.nodes[fact.node])
            if name in LEAVES:
                self.offers.pop(fact.node, None)
            if name == "NodeReleased" and fact.reason == "given up":
                self.given_up.add(fact.node.rsplit("-", 1)[0])
        elif name.startswith("Workers"):
            self.worlds[self.sets.of(fact.node)][name.removeprefix("Workers").lower()].add(fact.node)
        elif name == "StoreOffered":
            self.offers.setdefault(fact.node, []).append(fact.address)
        elif name == "StoreWithdrawn":
            self.offers[fact.node].remove(fact.address)
        elif name == "WorldFormed":
            self._formed(fact)
        elif name == "WorldDissolved":
            self.worlds[fact.group]["active"] = False
        elif name == "PlaceReopened":
            self.given_up.discard(f"{fact.group}-{fact.index}")
        elif name == "GroupScaled":
            self.given_up.difference_update(f"{fact.group}-{index}" for index in fact.revived)
        elif name == "JobCreated":
            self.nodes, self.offers, self.given_up = {}, {}, set()
            self.sets = sets_of(fact.spec)
            for world in self.worlds.values():
                world.update(active=False, members=[], started=set(), stopped=set(), finished=set())

    def _node(self, name: str, fact: Any, node: list[Any]) -> None:
        sources, target = MOVES.get(name, ((), ""))
        if node[0] in sources and getattr(fact, "accepted", True):
            node[0] = target
        if name in ("NodePlaced", "NodeRunning", "NodeJoined"):
            node[3] = fact.host
        if name == "NodeJoined":
            node[1] = True
        elif name == "NodeReleased":
            node[2] = fact.reason
        elif name in LEAVES:
            node[1] = False
        if name in ("NodeLost", "NodeLeft"):
            node[2] = node[2] or {"NodeLost": "lost", "NodeLeft": "left"}[name]
        elif name == "NodeGone":
            del self.nodes[fact.node]

    def _formed(self, fact: Any) -> None:
        members = [
            f"{group}-{place}-{incarnation}"
            for group, index, count, incarnation, _ in fact.members
            for place in range(index, index + count)
        ]
        reports: dict[str, Any] = {"started": set(), "stopped": set(), "finished": set()}
        self.worlds[fact.group] = {"generation": fact.generation, "active": True, "members": members, **reports}
        self.offers[members[0]] = [one for one in self.offers.get(members[0], []) if one != fact.store]

    def counts(self) -> dict[str, Any]:
        """What the real state keeps beside it, counted."""
        there = [one for one in self.nodes.values() if one[1] and one[0] in ALIVE]
        ready = [one[4] for one in there if not one[2]]
        return {
            "ready": {group: ready.count(group) for group in sorted(set(ready))},
            "alive": len(there),
            "suspects": sum(one[0] == "suspect" for one in there),
            "shunned": sum(bool(one[3]) and (one[0] == "lost" or one[2] == "drained") for one in self.nodes.values()),
            "loose": sorted(name for name, one in self.nodes.items() if one[0] != "running" or not one[1] or one[2]),
            "given_up": sorted(self.given_up),
        }


_PREFIXES = ("Node", "Workers", "Store", "World", "PlaceReopened", "GroupScaled", "JobCreated")
_NAMES = {kind.cls: name for name, kind in REGISTRY.by_name.items() if name.startswith(_PREFIXES)}


class Reference(Promise):
    """The real state says of nodes and worlds what a plainer one says; so do the counts that are kept beside it."""

    name = "reference"
    every = 1000

    def __init__(self) -> None:
        self.naive = Naive()
        self._next = 0

    def _fold(self, state: JobState, fact: Any, record: Record) -> None:
        name = _NAMES[type(fact)]
        self.naive.fold(name, fact)
        if name.startswith("Node"):
            self._same_node(state, fact.node, record.seq)
        if record.seq >= self._next:
            self._same(state, f"at {record.seq}")
            self._next = record.seq + max(self.every, 8 * len(self.naive.nodes))

    def _led(self, state: JobState, _fact: job.LeaderStarted, record: Record) -> None:
        """A new leader knows everything."""
        self._same(state, f"at {record.seq}")

    looks: ClassVar[Mapping[type, Look]] = {**dict.fromkeys(_NAMES, _fold), job.LeaderStarted: _led}

    def end(self, run: Any) -> None:
        """Compare everything once more."""
        self._same(run.state, "at the end")

    def _same_node(self, state: JobState, name: str, seq: int) -> None:
        real, plain = state.nodes.nodes.get(name), self.naive.nodes.get(name)
        told = [real.state, real.joined, real.released, real.host, real.group] if real is not None else None
        assert told == plain, f"at {seq} node {name} is {told}, and should be {plain}"

    def _same(self, state: JobState, when: str) -> None:
        naive = self.naive
        assert list(state.nodes.nodes) == list(naive.nodes), f"{when} other nodes are there than should be"
        for name in naive.nodes:
            self._same_node(state, name, state.seq)
        for group, plain in naive.worlds.items():
            real = state.world.worlds[group]
            told = {
                "generation": real.generation,
                "active": real.active,
                "members": [member.node for member in real.members],
                **{which: set(getattr(real, which)) for which in ("started", "stopped", "finished")},
            }
            assert told == plain, f"{when} the world of {group} is {told}, and should be {plain}"
            assert list(real.places) == plain["members"], f"{when} the places of {group} are not those of its members"
        offers = {name: list(offers) for name, offers in state.world.offers.items() if offers}
        assert offers == {name: one for name, one in naive.offers.items() if one}, f"{when} other stores are on offer"
        self._same_counts(state, when)

    def _same_counts(self, state: JobState, when: str) -> None:
        tally = getattr(state.nodes, "_tally", None)
        if tally is None:
            return
        told = {
            "ready": {group: count for group, count in sorted(tally.ready.items()) if count},
            "alive": tally.alive,
            "suspects": tally.suspects,
            "shunned": tally.shunned,
            "loose": sorted(tally.loose),
            "given_up": sorted(f"{group}-{index}" for group, indexes in tally.given_up.items() for index in indexes),
        }
        plain = self.naive.counts()
        assert told == plain, f"{when} {told} is counted, and should be {plain}"

"""Node checks: which nodes have passed, which checks run, and which nodes may train. What follows is decided in `rules.checks`.

A verdict holds as long as the node's agent lives, and for ``check_fresh_s``, so a plain restart costs no check.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from dlrover_core.diagnosis.pairing import FAULTY, UNCLEAR, Groups, Outcome, Round
from dlrover_core.job import plans, world
from dlrover_core.job.memo import Remembering
from dlrover_core.job.ranges import Ranges, from_ranges, with_groups
from dlrover_core.job.sets import Coupled
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.state import lasting
from dlrover_core.kernel.wire import command, part

OFF, BASIC, FULL = "off", "basic", "full"
# The reason of a drained slow node begins with these words.
SLOW_WORDS = "the node check was slow"


@event(
    120,
    version=2,
    upcast={1: lambda old: (*old[:4], with_groups(old[0], old[4]), with_groups(old[0], old[5]), *old[6:])},
)
class CheckStarted(NamedTuple):
    """A round of a check begins.

    number:   of the check
    round:    1 or 2
    kind:     `BASIC` or `FULL`
    nodes:    the nodes in question, as ranges
    partners: nodes known to be good that help, as ranges
    groups:   which places of ``nodes`` and ``partners``, in this order, work together
    stores:   the store of each group; empty: its node works alone
    aside:    a world trains meanwhile
    """

    group: str
    number: int
    round: int
    kind: str
    nodes: Ranges
    partners: Ranges
    groups: Groups
    stores: tuple[str, ...]
    aside: bool
    why: str


@event(121)
class CheckReported(NamedTuple):
    """A node's result of a round.

    ok:       everything went well
    fit:      the part that the node does alone went well
    took_us:  time of everything
    alone_us: time of the part that the node does alone
    what:     what failed; empty: nothing
    """

    node: str
    number: int
    round: int
    ok: bool
    fit: bool
    took_us: int
    alone_us: int
    what: str


@event(122, version=2, upcast={1: lambda old: (*old[:4], with_groups(old[0], old[4]))})
class CheckJudged(NamedTuple):
    """A check is over.

    rounds: how many rounds it took
    found:  node, verdict and reason for each node that is not simply good
    passed: the good nodes, as ranges
    """

    group: str
    number: int
    rounds: int
    found: tuple[tuple[str, str, str], ...]
    passed: Ranges


@event(123)
class CheckAsked(NamedTuple):
    """Earlier verdicts no longer count: these ``nodes`` (empty: the whole group) are checked before the next world forms."""

    group: str
    nodes: tuple[str, ...]
    why: str


@command(16)
class ReportCheck(NamedTuple):
    """An agent has done its part of a round. Fields as in `CheckReported`."""

    node: str
    number: int
    round: int
    ok: bool
    fit: bool = True
    took_us: int = 0
    alone_us: int = 0
    what: str = ""


@part(2)
class CheckWork(NamedTuple):
    """To a node: take part in a check.

    number:    of the check; 0: there is none
    round:     1 or 2
    kind:      `BASIC` or `FULL`
    rank:      the node's place among the nodes that work together
    size:      how many nodes work together
    store:     the address of their store; empty: the node works alone
    others:    names of the other nodes
    within_us: time limit
    at:        when the leader decided it, microseconds by its clock
    """

    number: int = 0
    round: int = 0
    kind: str = ""
    rank: int = 0
    size: int = 0
    store: str = ""
    others: tuple[str, ...] = ()
    within_us: int = 0
    at: int = 0


# Invariants of checks, after every event; `Check.check` and `CheckSlice.check` yield the broken ones.
#
#   N        `number`: the number of the newest check; c is the number of one that runs
#   m        `members`: the nodes of a check, by place; the first f (`fresh`) are in question, the others help
#   r        `round`
#   G, G1    `groups`, `first_groups`: the places that work together in this round, and in the first round
#   B, Q     `stores`: one for each group of G; `outcomes`: results of this round, by place
#   good     the nodes that passed, with the time; `unclear`: checks in a row without a conclusion
#
#   number   1 <= c <= N, and no two checks have one number
#   people   0 < f <= |m|, and no node is in m twice
#   round    r is 1 or 2, and G1 is empty exactly if r = 1
#   groups   every place of G is one of m, in one group only; |B| = |G|; Q is of places of G
#   verdict  no node is both good and unclear; every counter is at least 1


@dataclass(slots=True)
class Check(Remembering):
    """A check that runs.

    members:             nodes by place: first those in question, then those that help
    fresh:               how many members are in question
    aside:               a world trains meanwhile
    began_at:            when the present round began
    groups:              places that work together in this round
    stores:              the store of each group
    outcomes:            results of this round, by place
    first_groups, first: groups and results of the first round, once the second one runs
    """

    number: int
    kind: str
    why: str
    members: tuple[str, ...]
    fresh: int
    aside: bool
    round: int = 1
    began_at: int = 0
    groups: Groups = ()
    stores: tuple[str, ...] = ()
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    first_groups: Groups = ()
    first: dict[int, Outcome] = field(default_factory=dict)

    @property
    def busy(self) -> frozenset[int]:
        """The places that work in this round."""
        return self.recall("busy", lambda: frozenset(one for group in self.groups for one in group))

    @property
    def silent(self) -> set[int]:
        """The busy places that have not reported yet."""
        return self.recall("silent", lambda: set(self.busy.difference(self.outcomes)))

    def place(self, node: str) -> int:
        """The place of a node among the members; -1: it is no member."""
        places: dict[str, int] = self.recall("places", lambda: {name: at for at, name in enumerate(self.members)})
        return places.get(node, -1)

    def group_of(self, place: int) -> tuple[int, ...]:
        """The places that work together with this place in this round, itself included."""
        groups: dict[int, tuple[int, ...]] = self.recall(
            "group", lambda: {one: group for group in self.groups for one in group}
        )
        return groups[place]

    def hear(self, place: int, outcome: Outcome) -> None:
        """Take in a result of this round."""
        self.outcomes[place] = outcome
        self.silent.discard(place)

    @property
    def rounds(self) -> list[Round]:
        """The results so far, round by round."""
        now = Round(self.groups, self.outcomes)
        return [now] if self.round == 1 else [Round(self.first_groups, self.first), now]

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above, as far as one check shows it."""
        if not 0 < self.fresh <= len(self.members) or len(set(self.members)) < len(self.members):
            yield f"people: f = {self.fresh}, m = {self.members}"
        if self.round not in (1, 2) or bool(self.first_groups) != (self.round == 2):
            yield f"round: r = {self.round}, G1 = {self.first_groups}"
        places = [place for group in self.groups for place in group]
        if len(set(places)) < len(places) or not set(places) <= set(range(len(self.members))):
            yield f"groups: G = {self.groups} of {len(self.members)} places"
        if len(self.stores) != len(self.groups) or not self.outcomes.keys() <= set(places):
            yield f"groups: B = {self.stores}, Q = {list(self.outcomes)}, G = {self.groups}"


@dataclass(slots=True)
class CheckSlice(Coupled):
    """Checks, verdicts and counters.

    number:      of the newest check
    running:     checks that run, by set
    good:        nodes that passed and when, by set
    since_world: checks since the newest world, by set
    unclear:     checks in a row without a conclusion, by node
    replaced:    places whose slow node was replaced
    failed:      nodes found faulty in a row, by place
    asked:       why the next world of a set waits for a check (`CheckAsked`)
    changes:     number of changes of the nodes that may train
    """

    number: int = lasting(int)
    running: dict[str, Check] = field(default_factory=dict)
    good: dict[str, dict[str, int]] = field(default_factory=dict)
    since_world: dict[str, int] = field(default_factory=dict)
    unclear: dict[str, int] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)
    changes: int = lasting(int)

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above `Check`."""
        numbers = [check.number for check in self.running.values()]
        if len(set(numbers)) < len(numbers) or not all(1 <= number <= self.number for number in numbers):
            yield f"number: c = {numbers}, N = {self.number}"
        for group, check in self.running.items():
            yield from (f"{group}: {wrong}" for wrong in check.check())
        both = [node for node in self.unclear if node in self.good.get(self.set_of(node), {})]
        if both:
            yield f"verdict: {both} are good and unclear"
        if min((*self.since_world.values(), *self.unclear.values(), *self.failed.values()), default=1) < 1:
            yield f"verdict: counted are {self.since_world}, {self.unclear}, {self.failed}"


# ---- evolve


def _on_started(slice_: CheckSlice, fact: CheckStarted, record: Record) -> None:
    names = [[one.node for one in from_ranges(fact.group, part)] for part in (fact.nodes, fact.partners)]
    slice_.number = fact.number
    before = slice_.running.get(fact.group)
    check = Check(
        fact.number, fact.kind, fact.why, (*names[0], *names[1]), len(names[0]), fact.aside, fact.round, record.at
    )
    check.groups, check.stores = fact.groups, fact.stores
    if before is not None:
        check.first_groups, check.first, check.why = before.groups, before.outcomes, before.why
    slice_.running[fact.group] = check


def _on_reported(slice_: CheckSlice, fact: CheckReported, record: Record) -> None:
    check = slice_.running[slice_.set_of(fact.node)]
    outcome = Outcome(fact.ok, fact.took_us / 1e6, fact.fit, fact.alone_us / 1e6, fact.what)
    check.hear(check.place(fact.node), outcome)


def _on_judged(slice_: CheckSlice, fact: CheckJudged, record: Record) -> None:
    del slice_.running[fact.group]
    slice_.asked.pop(fact.group, None)
    slice_.changes += 1
    slice_.since_world[fact.group] = slice_.since_world.get(fact.group, 0) + 1
    good = slice_.good.setdefault(fact.group, {})
    for member in from_ranges(fact.group, fact.passed):
        good[member.node] = record.at
        slice_.unclear.pop(member.node, None)
        slice_.failed.pop(member.node.rsplit("-", 1)[0], None)
    for name, kind, _ in fact.found:
        if kind == UNCLEAR:
            slice_.unclear[name] = slice_.unclear.get(name, 0) + 1
        if kind in (FAULTY, UNCLEAR):
            good.pop(name, None)
        if kind == FAULTY:
            place = name.rsplit("-", 1)[0]
            slice_.failed[place] = slice_.failed.get(place, 0) + 1


def _on_asked(slice_: CheckSlice, fact: CheckAsked, record: Record) -> None:
    good = slice_.good.get(fact.group, {})
    for name in fact.nodes or list(good):
        good.pop(name, None)
    slice_.asked[fact.group] = fact.why
    slice_.changes += 1
    slice_.since_world.pop(fact.group, None)


def _on_formed(slice_: CheckSlice, fact: world.WorldFormed, record: Record) -> None:
    slice_.since_world.pop(fact.group, None)


def _forget(slice_: CheckSlice, fact: world.Ended, record: Record) -> None:
    slice_.good.get(slice_.set_of(fact.node), {}).pop(fact.node, None)
    slice_.unclear.pop(fact.node, None)


def _on_drained(slice_: CheckSlice, fact: plans.NodeDrained, record: Record) -> None:
    place = fact.node.rsplit("-", 1)[0]
    if fact.reason.startswith(SLOW_WORDS) and place not in slice_.replaced:
        slice_.replaced.append(place)


EVENTS = (CheckStarted, CheckReported, CheckJudged, CheckAsked)

FACTS = Facts(
    kinds=EVENTS,
    evolve={
        CheckStarted: _on_started,
        CheckReported: _on_reported,
        CheckJudged: _on_judged,
        CheckAsked: _on_asked,
        world.WorldFormed: _on_formed,
        plans.NodeDrained: _on_drained,
        **dict.fromkeys(get_args(world.Ended), _forget),
    },
)

"""What must hold of a job after every event, whatever was done to it: each promise is a class of its own.

A promise is called after every record with the state that the record led to, remembers what it needs, looks at the one event
and raises AssertionError when it is broken. It costs the same however long the history is. What only the end can show, as that
everything mended, it asks of the whole run in ``end``.

An invariant of your own is a function ``(state, record)``, or a subclass of `Promise` where it must remember something::

    class NoNodeTwice(Promise):
        name = "no node is planned twice"

        def __init__(self) -> None:
            self.seen: set[str] = set()

        def _planned(self, state, fact, record) -> None:
            assert fact.node not in self.seen, f"{record.seq}: {fact.node} is planned again"
            self.seen.add(fact.node)

        looks = {NodePlanned: _planned}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from types import MethodType
from typing import Any, ClassVar, Union

from dlrover_core.job import incidents, job, nodes, plans, progress, queueing, silence, world
from dlrover_core.job.node_lifecycle import COMING
from dlrover_core.job.ranges import brief
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import CommandFailed, CommandRefused
from dlrover_core.kernel.events import Record
from dlrover_core.rules.desired import desired
from dlrover_core.sim.run import Broken, Watcher
from dlrover_core.spec import GroupSpec, JobSpec

__all__ = [
    "Commands", "Invariant", "Look", "Order", "Patience", "Places", "Promise", "Provoked", "Sizes", "Slices",
    "Together", "Watcher", "Worlds",
]  # fmt: skip

Look = Callable[[Any, JobState, Any, Record], None]


class Promise:
    """One invariant. ``looks``: what to call for which event; whoever must see every event overrides ``__call__`` instead."""

    name: ClassVar[str] = ""
    looks: ClassVar[Mapping[type, Look]] = {}

    def __call__(self, state: JobState, record: Record) -> None:
        """Look at one record and the state that it led to. Raises AssertionError."""
        look = self.looks.get(type(record.event))
        if look is not None:
            look(self, state, record.event, record)

    def end(self, run: Any) -> None:
        """Look at the whole run, once it is over. Raises AssertionError."""


Invariant = Union[type[Promise], Watcher, Sequence["Invariant"]]


class Together:
    """Several promises as one watcher, which asks only those that an event concerns.

    Raises `Broken`, which begins with the name of the promise.
    """

    def __init__(self, *invariants: Invariant) -> None:
        self.parts = tuple(_instances(invariants))
        self._every: list[tuple[str, Watcher]] = []
        self._looks: dict[type, list[tuple[str, Callable[[JobState, Any, Record], None]]]] = {}
        for part in self.parts:
            if isinstance(part, Promise) and type(part).__call__ is Promise.__call__:
                for cls, look in part.looks.items():
                    self._looks.setdefault(cls, []).append((part.name, MethodType(look, part)))
            else:
                self._every.append((_name(part), part))

    def __call__(self, state: JobState, record: Record) -> None:
        """Ask whoever is concerned."""
        fact, asked = record.event, ""
        try:
            for name, part in self._every:
                asked = name
                part(state, record)
            for name, look in self._looks.get(type(fact), ()):
                asked = name
                look(state, fact, record)
        except AssertionError as error:
            raise Broken(f"{asked}: {error}", record.seq, repr(fact)) from error

    def end(self, run: Any) -> None:
        """Ask everybody about the whole."""
        for part in self.parts:
            end = getattr(part, "end", None)
            if end is not None:
                try:
                    end(run)
                except AssertionError as error:
                    raise Broken(f"{_name(part)}: {error}") from error


def _instances(invariants: Iterable[Invariant]) -> Iterable[Watcher]:
    for one in invariants:
        if isinstance(one, type):
            yield one()
        elif callable(one):
            yield one
        else:
            yield from _instances(one)


def _name(part: Any) -> str:
    return str(getattr(part, "name", "") or getattr(part, "__name__", "") or type(part).__name__)


# ---- the log


class Order(Promise):
    """Numbers are contiguous, time and tokens never go back, effects stand in one moment with their causes and behind them.

    A leader's token is larger than any that wrote before it: no leader decides after a newer one.
    """

    name = "order"

    def __init__(self) -> None:
        self._seq = self._at = self._token = self._leader = 0
        # Where the present moment of the present leader begins: an effect is decided together with its cause.
        self._moment = 1

    def __call__(self, state: JobState, record: Record) -> None:
        """See the class."""
        seq, at, token, cause, fact, _ = record
        assert seq == self._seq + 1, f"record {seq} stands where {self._seq + 1} should"
        if at != self._at or token != self._token:
            assert at >= self._at, f"time goes back at {seq}"
            assert token >= self._token, f"token {token} writes at {seq} after {self._token}"
            self._at, self._token, self._moment = at, token, seq
        self._seq = seq
        assert cause == 0 or self._moment <= cause < seq, f"record {seq} is caused by {cause}"
        assert state.seq == seq and state.token == token, f"the state is that of {state.seq}, not of {seq}"
        if type(fact) is job.LeaderStarted:
            assert token > self._leader, f"{seq}: {fact.holder} leads with token {token}, as somebody did before it"
            self._leader = token


class Commands(Promise):
    """No command is decided twice, none of a sender's is left out, deciding never raises, and the gone have no say.

    A boot that was followed by another never comes back.
    """

    name = "commands"

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int, int]] = {}
        self._gone: set[str] = set()

    def __call__(self, state: JobState, record: Record) -> None:  # noqa: ARG002  # a watcher's
        """See the class."""
        fact, origin = record.event, record.origin
        kind = type(fact)
        if origin is not None:
            sender, boot, number = origin
            known, before, retired = self._last.get(sender, (boot, 0, -1))
            if known != boot:
                assert boot != retired, f"{record.seq}: boot {boot} of {sender} speaks again after {known}"
                before, retired = 0, known
            assert number == before + 1, f"{record.seq}: {sender} says {number} after {before}"
            assert sender not in self._gone or kind is CommandRefused, (
                f"{record.seq}: {sender} is gone, and decides {fact}"
            )
            self._last[sender] = boot, number, retired
        if kind is CommandFailed:
            raise AssertionError(f"{record.seq}: {fact}")
        if kind is nodes.NodeGone:
            node = fact.node  # type: ignore[attr-defined]  # its kind says so
            self._gone.add(node)
            self._last.pop(node, None)
        elif kind is job.JobCreated:
            self._gone.clear()
            self._last.clear()


# ---- what every part of the state says of itself


def _checked() -> dict[type, tuple[tuple[str, Callable[[JobState], Any]], ...]]:
    """The slices that have a ``check()``, by the events that are folded into them."""
    found: dict[type, tuple[tuple[str, Callable[[JobState], Any]], ...]] = {}
    for part in fields(JobState):
        if hasattr(part.default_factory, "check"):
            for cls in {cls for facts in part.metadata["facts"] for cls in facts.evolve}:
                found[cls] = (*found.get(cls, ()), (part.name, attrgetter(part.name)))
    return found


class Slices(Promise):
    """The formula above every slice of the state holds: each slice's ``check()`` is asked after every event that changes it.

    In large jobs it is asked after every so many events.
    """

    name = "slices"
    SMALL = 64
    CHECKED = _checked()

    def __init__(self) -> None:
        self._next = 0

    def _ask(self, state: JobState, fact: Any, record: Record) -> None:
        if record.seq < self._next:
            return
        for name, slice_of in self.CHECKED[type(fact)]:
            for wrong in slice_of(state).check():
                raise AssertionError(f"{record.seq}: {name}: {wrong}")
        many = len(state.nodes.nodes)
        self._next = record.seq + many if many > self.SMALL else 0

    looks: ClassVar[Mapping[type, Look]] = dict.fromkeys(CHECKED, _ask)

    def end(self, run: Any) -> None:
        """Ask all of them once more."""
        for name, slice_of in dict(one for asked in self.CHECKED.values() for one in asked).items():
            for wrong in slice_of(run.state).check():
                raise AssertionError(f"at the end: {name}: {wrong}")


# ---- who trains


class Worlds(Promise):
    """One world per generation, generations count on, every rank is held once, and by a node that was there.

    A place is held by one incarnation; a store is fresh, on offer and of rank 0's node; only members report, of the newest
    generation, and each once.
    """

    name = "worlds"

    def __init__(self) -> None:
        self._generations: dict[str, int] = {}
        self._joined: dict[str, int] = {}
        self._offered: dict[str, str] = {}
        self._used: set[str] = set()
        self._heard: dict[str, tuple[set[str], set[str], set[str]]] = {}
        self._stepped: dict[str, int] = {}

    def _created(self, _state: JobState, _fact: job.JobCreated, _record: Record) -> None:
        self._joined.clear()
        self._offered.clear()

    def _join(self, _state: JobState, fact: nodes.NodeJoined, _record: Record) -> None:
        self._joined[fact.node] = fact.nproc

    def _leave(self, _state: JobState, fact: Any, _record: Record) -> None:
        self._joined.pop(fact.node, None)

    def _offer(self, _state: JobState, fact: world.StoreOffered, record: Record) -> None:
        assert fact.node in self._joined, f"{record.seq}: {fact.node} offers a store and is not there"
        self._offered[fact.address] = fact.node

    def _withdraw(self, _state: JobState, fact: world.StoreWithdrawn, record: Record) -> None:
        assert self._offered.pop(fact.address, "") == fact.node, f"{record.seq}: {fact.address} was not on offer"

    def _formed(self, state: JobState, fact: world.WorldFormed, record: Record) -> None:
        group, seq = fact.group, record.seq
        assert fact.generation == self._generations.get(group, 0) + 1, f"{seq}: generation {fact.generation}"
        self._generations[group] = fact.generation
        self._heard[group] = set(), set(), set()
        joined, rank = self._joined, 0
        taken: set[tuple[str, int]] = set()
        for its, index, count, incarnation, nproc in fact.members:
            places = range(index, index + count)
            named = {(its, place) for place in places}
            assert count > 0 and taken.isdisjoint(named), (
                f"{seq}: a place of {brief(group, fact.members)} is named twice"
            )
            taken.update(named)
            for place in places:
                node = f"{its}-{place}-{incarnation}"
                assert node in joined, f"{seq}: {node} had not joined, or was gone"
                assert joined[node] == nproc, f"{seq}: {node} runs {joined[node]} workers, not {nproc}"
            rank += count * nproc
        self._hold(state.world.worlds[group], rank, record)
        first = "{0}-{1}-{3}".format(*fact.members[0])
        if not state.sets.stored(group):
            assert not fact.store, f"{seq}: a world of {group} has the store {fact.store}"
            return
        assert fact.store not in self._used, f"{seq}: the store {fact.store} serves a second generation"
        assert self._offered.pop(fact.store, "") == first, f"{seq}: {first} does not offer the store {fact.store}"
        self._used.add(fact.store)

    @staticmethod
    def _hold(current: world.World, ranks: int, record: Record) -> None:
        """Rank blocks lie end to end: each rank is held once, none is missing."""
        rank = 0
        for _, nproc, first_rank in current.members:
            assert first_rank == rank, f"{record.seq}: rank {rank} is held by nobody, or twice"
            rank += nproc
        assert rank == ranks == current.size, f"{record.seq}: {current.size} ranks, of which {rank} are held"

    def _dissolved(self, _state: JobState, fact: world.WorldDissolved, record: Record) -> None:
        newest = self._generations.get(fact.group, 0)
        assert fact.generation == newest, f"{record.seq}: generation {fact.generation} ends, {newest} is the newest"

    def _report(self, which: int, verb: str, state: JobState, fact: Any, record: Record) -> None:
        group = state.set_of(fact.node)
        newest = self._generations.get(group, 0)
        assert fact.generation == newest, f"{record.seq}: {fact.node} {verb} generation {fact.generation}, not {newest}"
        heard = self._heard[group][which]
        assert fact.node not in heard, f"{record.seq}: {fact.node} {verb} generation {newest} twice"
        assert fact.node in state.world.worlds[group].places, f"{record.seq}: {fact.node} {verb}, and is no member"
        heard.add(fact.node)

    def _started(self, state: JobState, fact: world.WorkersStarted, record: Record) -> None:
        self._report(0, "started", state, fact, record)

    def _stopped(self, state: JobState, fact: world.WorkersStopped, record: Record) -> None:
        self._report(1, "stopped", state, fact, record)

    def _finished(self, state: JobState, fact: world.WorkersFinished, record: Record) -> None:
        self._report(2, "finished", state, fact, record)
        assert state.world.of(fact.node).active, f"{record.seq}: {fact.node} finished what was dissolved"

    def _first_step(self, state: JobState, fact: Any, record: Record) -> None:
        group = state.set_of(fact.node)
        current = state.world.of(fact.node)
        assert current.active and fact.generation == current.generation == self._generations.get(group), (
            f"{record.seq}: a step of generation {fact.generation}, {current.generation} is the newest"
        )
        assert self._stepped.get(group, 0) < fact.generation, f"{record.seq}: two first steps of {fact.generation}"
        self._stepped[group] = fact.generation

    looks: ClassVar[Mapping[type, Look]] = {
        job.JobCreated: _created,
        nodes.NodeJoined: _join,
        **dict.fromkeys(
            (nodes.NodeFailed, nodes.NodeGone, nodes.NodeLost, nodes.NodeLeft, nodes.NodeSucceeded), _leave
        ),
        world.StoreOffered: _offer,
        world.StoreWithdrawn: _withdraw,
        world.WorldFormed: _formed,
        world.WorldDissolved: _dissolved,
        world.WorkersStarted: _started,
        world.WorkersStopped: _stopped,
        world.WorkersFinished: _finished,
        progress.FirstStep: _first_step,
    }


class Sizes(Promise):
    """Every world has a size that is in effect as it forms, and none forms while the job is suspended, stopping or over."""

    name = "sizes"

    def __init__(self) -> None:
        self._groups: dict[str, GroupSpec] = {}
        self._forms = False

    def _created(self, _state: JobState, fact: job.JobCreated, _record: Record) -> None:
        self._groups = {group.name: group for group in JobSpec.from_json(fact.spec).groups}
        self._forms = True

    def _scaled(self, _state: JobState, fact: job.GroupScaled, _record: Record) -> None:
        group = self._groups[fact.group]
        self._groups[fact.group] = replace(group, nodes_min=fact.nodes_min, nodes_max=fact.nodes_max)

    def _halted(self, _state: JobState, _fact: object, _record: Record) -> None:
        self._forms = False

    def _resumed(self, _state: JobState, _fact: job.JobResumed, _record: Record) -> None:
        self._forms = True

    def _formed(self, state: JobState, fact: world.WorldFormed, record: Record) -> None:
        assert self._forms, f"{record.seq}: a world forms though the job is {state.job.state}"
        for name in state.sets.groups(fact.group):
            group, size = self._groups[name], sum(count for its, _, count, _, _ in fact.members if its == name)
            least, most = (group.floor, group.nodes_max) if group.coupled else (1, 1)
            assert least <= size <= most, f"{record.seq}: {size} nodes are not within {group}"
            assert size % group.unit == 0, f"{record.seq}: {size} nodes are no multiple of {group.unit}"

    looks: ClassVar[Mapping[type, Look]] = {
        job.JobCreated: _created,
        job.GroupScaled: _scaled,
        job.JobResumed: _resumed,
        **dict.fromkeys(
            (job.JobSuspended, job.JobStopping, job.JobStopped, job.JobSucceeded, job.JobFailed, job.JobAbandoned),
            _halted,
        ),
        world.WorldFormed: _formed,
    }


class Provoked(Promise):
    """No workers are stopped for nothing: a world only ends because of a failure, a newcomer, a person's command, or because its
    nodes are given back to others that wait for room.

    A new leader is none of these.
    """

    name = "provoked"

    def __init__(self) -> None:
        self._since: dict[str, str] = {}
        # What concerned all sets last, and which of them have formed since.
        self._whole = ""
        self._formed_since: set[str] = set()

    def _everybody(self, _state: JobState, fact: object, _record: Record) -> None:
        self._whole = type(fact).__name__
        self._since.clear()
        self._formed_since.clear()

    def _one(self, state: JobState, fact: Any, _record: Record) -> None:
        self._since[state.set_of(fact.node)] = type(fact).__name__

    def _group(self, _state: JobState, fact: Any, _record: Record) -> None:
        self._since[fact.group] = type(fact).__name__

    def _scaled(self, state: JobState, fact: job.GroupScaled, _record: Record) -> None:
        """The sets of that group: those that come, stay, and go."""
        coming = state.sets.of_group(state.job.spec.group(fact.group))
        here = (name for name in state.world.worlds if fact.group in state.sets.groups(name))
        self._since.update(dict.fromkeys((*coming, *here), type(fact).__name__))

    def _given_up(self, _state: JobState, fact: job.SetGivenUp, _record: Record) -> None:
        self._since[fact.set] = type(fact).__name__

    def _why(self, name: str) -> bool:
        return name in self._since or bool(self._whole and name not in self._formed_since)

    def _dissolved(self, _state: JobState, fact: world.WorldDissolved, record: Record) -> None:
        assert self._why(fact.group), f"{record.seq}: generation {fact.generation} ends for nothing; of {fact.group}"
        # Its successor takes its place for the same reason.
        self._since[fact.group] = "WorldDissolved"

    def _formed(self, _state: JobState, fact: world.WorldFormed, record: Record) -> None:
        assert self._why(fact.group), f"{record.seq}: generation {fact.generation} forms for nothing; of {fact.group}"
        self._formed_since.add(fact.group)
        self._since.pop(fact.group, None)

    looks: ClassVar[Mapping[type, Look]] = {
        **dict.fromkeys((job.JobCreated, job.JobSuspended, job.JobResumed), _everybody),
        **dict.fromkeys(
            (
                nodes.NodeJoined, nodes.NodeFailed, nodes.NodeGone, nodes.NodeLost, nodes.NodeLeft, nodes.NodeReleased,
                plans.NodeDrained, incidents.ActionChosen,
            ),
            _one,
        ),
        **dict.fromkeys((plans.WorldPlanned, queueing.GivenBack), _group),
        job.GroupScaled: _scaled,
        job.SetGivenUp: _given_up,
        world.WorldDissolved: _dissolved,
        world.WorldFormed: _formed,
    }  # fmt: skip


# ---- nodes


class Places(Promise):
    """Incarnations never go back, none is planned twice, and a place is wanted of one incarnation at a time.

    But for one that leaves by plan: its successor is there before it goes.
    """

    name = "places"

    def __init__(self) -> None:
        self._newest: dict[tuple[str, int], int] = {}

    def _planned(self, state: JobState, fact: nodes.NodePlanned, record: Record) -> None:
        place = fact.group, fact.index
        before = self._newest.get(place, -1)
        assert fact.incarnation == before + 1, f"{record.seq}: {fact.node} follows {before}"
        assert fact.node == f"{fact.group}-{fact.index}-{fact.incarnation}", f"{record.seq}: a node called {fact.node}"
        self._newest[place] = fact.incarnation
        last = state.nodes.nodes.get(f"{fact.group}-{fact.index}-{before}")
        leaves = last is not None and last.node in state.plans.leaving
        assert last is None or leaves or last.released or last.state not in COMING, (
            f"{record.seq}: {fact.node} is planned beside {last}"
        )

    looks: ClassVar[Mapping[type, Look]] = {nodes.NodePlanned: _planned}


class Told(Promise):
    """What follows from the state for the one whom an event is about: who is released is told to leave, and a successor is not
    launched before its place is free, unless its predecessor leaves by plan.
    """

    name = "told"

    def _released(self, state: JobState, fact: Any, record: Record) -> None:
        order = desired(state).orders.get(fact.node)
        assert order is None or order.leave, f"{record.seq}: {fact.node} is released, and told to stay: {order.reason}"

    def _planned(self, state: JobState, fact: nodes.NodePlanned, record: Record) -> None:
        place = f"{fact.group}-{fact.index}-"
        running = [
            node.node
            for node in (
                state.nodes.nodes.get(f"{place}{one}") for one in range(max(0, fact.incarnation - 8), fact.incarnation)
            )
            if node is not None
            and not node.ended
            and node.state not in ("lost", "gone")
            and node.node not in state.plans.leaving
        ]
        if running:
            launched = [launch.node for launch in desired(state).launch]
            assert fact.node not in launched, f"{record.seq}: {fact.node} is launched while {running} may still run"

    looks: ClassVar[Mapping[type, Look]] = {nodes.NodeReleased: _released, nodes.NodePlanned: _planned}


class Patience(Promise):
    """Silence is not death: a silent node is given up after `unreachable_s`, not before, counted anew by each new leader.

    And then it is given up: nobody is silent for ever.
    """

    name = "patience"
    MARGIN_S = 5.0

    def __init__(self) -> None:
        self._calm_at = 0
        self._silent: dict[str, int] = {}

    def __call__(self, state: JobState, record: Record) -> None:
        """See the class."""
        if self._silent and record.cause == 0 and state.job.live:
            spec = state.job.spec
            node, since = next(iter(self._silent.items()))
            waited_s = (record.at - max(since, self._calm_at)) / 1_000_000
            most_s = max(spec.unreachable_s, spec.mass_silence_s) + spec.stop_grace_s + spec.kill_wait_s + self.MARGIN_S
            assert waited_s <= most_s or type(record.event) in _CALMS, (
                f"{record.seq}: {node} has been silent for {waited_s} s"
            )
        super().__call__(state, record)

    def _calm(self, _state: JobState, _fact: object, record: Record) -> None:
        self._calm_at = record.at

    def _created(self, state: JobState, fact: object, record: Record) -> None:
        self._calm(state, fact, record)
        self._silent.clear()

    def _suspected(self, _state: JobState, fact: silence.NodeSuspected, record: Record) -> None:
        self._silent[fact.node] = record.at

    def _over(self, _state: JobState, fact: Any, _record: Record) -> None:
        self._silent.pop(fact.node, None)

    def _lost(self, state: JobState, fact: nodes.NodeLost, record: Record) -> None:
        since = self._silent.pop(fact.node, 0)
        if fact.reason == "silent" and state.job.live:
            waited_s = (record.at - max(since, self._calm_at)) / 1_000_000
            assert waited_s >= state.job.spec.unreachable_s, f"{record.seq}: {fact.node} is given up after {waited_s} s"

    looks: ClassVar[Mapping[type, Look]] = {
        job.JobCreated: _created,
        **dict.fromkeys((job.LeaderStarted, job.MasterPaused, job.JobResumed), _calm),
        silence.NodeSuspected: _suspected,
        **dict.fromkeys((silence.NodeHeard, nodes.NodeFailed, nodes.NodeGone, nodes.NodeSucceeded), _over),
        nodes.NodeLost: _lost,
    }


_CALMS = (job.LeaderStarted, job.MasterPaused, job.JobResumed)

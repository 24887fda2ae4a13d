"""What must hold of checkpoints after every event, and of the states of a `Saving` at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from dlrover_core.job import checkpoints, job, nodes, world
from dlrover_core.job.ranges import Ranges, from_ranges
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.testing.promises import Look, Promise

if TYPE_CHECKING:
    from dlrover_core.testing.saving import Saving, State

Generation = tuple[str, int]


class Checkpoints(Promise):
    """Commits only go forward, saves are ordered only of what the nodes that are left hold, and edges are told once.

    Who saves says so once per generation, and before anything of it is committed; what is held is told by members, once.
    """

    name = "checkpoints"

    def __init__(self) -> None:
        self._committed: dict[str, tuple[int, int]] = {}
        self._members: dict[Generation, Ranges] = {}
        self._keep: set[Generation] = set()
        self._held: dict[Generation, dict[str, checkpoints.StepsHeld]] = {}
        self._restored: set[tuple[str, int]] = set()
        self._failing: set[str] = set()
        self._ended: set[str] = set()

    def _created(self, _state: JobState, _fact: job.JobCreated, _record: Record) -> None:
        self._committed.clear()
        self._members.clear()
        self._keep.clear()
        self._held.clear()
        self._restored.clear()
        self._failing.clear()
        self._ended.clear()

    def _formed(self, _state: JobState, fact: world.WorldFormed, _record: Record) -> None:
        self._members[fact.group, fact.generation] = fact.members
        # What is older than the one before is of no use to anybody. That it saves is remembered: storage may be slower.
        old = fact.group, fact.generation - 3
        self._members.pop(old, None)
        self._held.pop(old, None)

    def _keeping(self, state: JobState, fact: checkpoints.KeepingStarted, record: Record) -> None:
        this, current = (fact.group, fact.generation), state.world.worlds[fact.group]
        assert this not in self._keep, f"{record.seq}: generation {fact.generation} says twice that it saves"
        assert current.active and current.generation == fact.generation, f"{record.seq}: {this} does not run"
        self._keep.add(this)

    def _commit(self, state: JobState, fact: checkpoints.CheckpointCommitted, record: Record) -> None:
        this, before = (fact.generation, fact.step), self._committed.get(fact.group, (0, -1))
        assert this > before, f"{record.seq}: {this} is committed after {before}"
        assert (fact.group, fact.generation) in self._keep, f"{record.seq}: {this} has never said that it saves"
        assert fact.parts > 0, f"{record.seq}: a checkpoint without parts"
        self._committed[fact.group] = this
        kept = state.checkpoints.of(fact.group)
        assert kept.newest == this, f"{record.seq}: {this} is not remembered"
        assert len(kept.committed) <= checkpoints.COMMITTED_KEPT, f"{record.seq}: {len(kept.committed)} are remembered"

    def _holds(self, state: JobState, fact: checkpoints.StepsHeld, record: Record) -> None:
        this = state.set_of(fact.node), fact.generation
        assert fact.node in self._places(this), f"{record.seq}: {fact.node} is no member of {this}"
        if not fact.plan:
            held = self._held.setdefault(this, {})
            assert fact.node not in held, f"{record.seq}: {fact.node} tells twice what it holds of {this}"
            held[fact.node] = fact

    def _places(self, this: Generation) -> Mapping[str, int]:
        members = from_ranges(this[0], self._members.get(this, ()))
        return {member.node: place for place, member in enumerate(members)}

    def _ordered(self, _state: JobState, fact: checkpoints.SaveOrdered, record: Record) -> None:
        this = fact.group, fact.generation
        before = self._committed.get(fact.group, (0, -1))
        assert (fact.generation, fact.step) > before, f"{record.seq}: {fact.step} is ordered after {before}"
        places = self._places(this)
        covered: set[int] = set()
        for node, held in self._held.get(this, {}).items():
            if node not in self._ended:
                own = [places[node]] if fact.step in held.steps else []
                covered.update([*own, *(at for at, step in held.copies if step == fact.step)])
        missing = sorted(set(places.values()) - covered)
        assert not missing, f"{record.seq}: nobody who is left holds the parts {missing} of step {fact.step}"

    def _restore(self, state: JobState, fact: checkpoints.Restored, record: Record) -> None:
        key, current = (fact.node, fact.generation), state.world.of(fact.node)
        assert key not in self._restored, f"{record.seq}: {fact.node} is restored twice in {fact.generation}"
        assert current.generation == fact.generation and current.member(fact.node) is not None, f"{record.seq}: {key}"
        self._restored.add(key)

    def _failed(self, _state: JobState, fact: checkpoints.StorageFailed, record: Record) -> None:
        assert fact.node not in self._failing, f"{record.seq}: the storage of {fact.node} fails twice"
        self._failing.add(fact.node)

    def _back(self, _state: JobState, fact: checkpoints.StorageBack, record: Record) -> None:
        assert fact.node in self._failing, f"{record.seq}: the storage of {fact.node} had not failed"
        self._failing.discard(fact.node)

    def _gone(self, state: JobState, fact: Any, record: Record) -> None:
        # Who is released still stops its workers, and tells what they leave.
        if type(fact) is not nodes.NodeReleased:
            self._ended.add(fact.node)
        self._failing.discard(fact.node)
        assert fact.node not in state.checkpoints.replicas, f"{record.seq}: {fact.node} is gone, and takes copies"

    looks: ClassVar[Mapping[type, Look]] = {
        job.JobCreated: _created,
        world.WorldFormed: _formed,
        checkpoints.KeepingStarted: _keeping,
        checkpoints.CheckpointCommitted: _commit,
        checkpoints.StepsHeld: _holds,
        checkpoints.SaveOrdered: _ordered,
        checkpoints.Restored: _restore,
        checkpoints.StorageFailed: _failed,
        checkpoints.StorageBack: _back,
        **dict.fromkeys(
            (nodes.NodeFailed, nodes.NodeGone, nodes.NodeLost, nodes.NodeReleased, nodes.NodeLeft, nodes.NodeSucceeded),
            _gone,
        ),
    }


def check_saved(records: Iterable[Record], saving: Saving) -> None:
    """Every commit names a step of which every part had been written, and whoever began anew began with the newest there was."""
    newest: State = (0, 0)
    floor: dict[int, State] = {}
    restores = {one.generation: one for one in saving.restores}
    for record in records:
        fact = record.event
        if isinstance(fact, checkpoints.CheckpointCommitted):
            state = fact.generation, fact.step
            missing = set(range(saving.parts[fact.generation])) - saving.written.get(state, set())
            assert not missing, f"{record.seq}: {state} is committed, its parts {missing} are nowhere"
            newest = state
        elif isinstance(fact, world.WorldFormed):
            floor[fact.generation] = newest
        elif isinstance(fact, checkpoints.Restored):
            began = restores[fact.generation]
            assert fact.step == began.state[1], f"{record.seq}: {fact} began with {began.state}"
            was = floor[fact.generation]
            assert began.state >= was, (
                f"{record.seq}: {began} is older than {was}, which was on storage as its world formed"
            )

"""At every moment at which a group has no world there is a reason, and where there is none a tick forms the world."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgpack
import pytest

from dlrover_core.job.state import CODEC, FOLD, JobState
from dlrover_core.job.waiting import Wait
from dlrover_core.job.world import WorldFormed
from dlrover_core.kernel.events import Record
from dlrover_core.rules import worlds
from dlrover_core.rules.membership import why_waiting
from dlrover_core.rules.model import MODEL
from dlrover_core.sim.simulation import simulate
from dlrover_core.testing.swarm import draw

HISTORIES = Path(__file__).parents[1] / "unit" / "histories"
SEEDS, NODES, FAULTS_MAX, EVENTS_MAX = range(24), 4, 12, 600


def formed(state: JobState, at: int) -> list[str]:
    """The sets whose world a tick forms at that time."""
    tick = worlds.RULES.tick
    assert tick is not None
    return [fact.group for fact in tick(state, at) if isinstance(fact, WorldFormed)]


def look(state: JobState, group: str) -> Wait | None:
    """The reason of now. It is true now, it is looked at when its time comes, and it is another one then."""
    wait, due = why_waiting(state, group), MODEL.due(state)
    assert (wait is None) == (group in formed(state, state.at)), f"{state.seq}: {wait}, and a tick says otherwise"
    if wait is None or wait.until:
        looks_at = wait.until if wait is not None else state.at
        assert due is not None, f"{state.seq}: nobody looks again"
        assert due <= looks_at, f"{state.seq}: nobody looks again before {due}"
    if wait is not None and wait.until:
        assert wait.until > state.at, f"{state.seq}: {wait} is over"
        later = why_waiting(state, group, wait.until)
        assert group not in formed(state, wait.until - 1), f"{state.seq}: a tick forms it before {wait} is over"
        assert later is None or later.why != wait.why or later.until > wait.until, f"{state.seq}: {wait} never ends"
    return wait


def check(records: Iterable[Record]) -> int:
    """How many moments ended without a world, each for a reason."""
    state, waits = FOLD.new(), 0
    for record in records:
        if state.job.forms and record.at > state.at:
            # Whatever was decided together has been decided.
            for name in state.sets.all(state.job.spec):
                current = state.world.worlds.get(name)
                if current is None or not current.active:
                    waits += look(state, name) is not None
                    by_time = isinstance(record.event, WorldFormed) and not record.cause
                    stale = why_waiting(state, name, record.at) if by_time else None
                    assert stale is None, f"{record.seq}: a world forms in spite of {stale}"
        FOLD.apply(state, record)
    return waits


@pytest.mark.parametrize("path", sorted(HISTORIES.glob("*.msgpack")), ids=lambda path: path.stem)
def test_recorded_histories(path: Path) -> None:
    """Between any two moments of a recorded history."""
    payloads = msgpack.unpackb(path.read_bytes())
    check(record for payload in payloads for record in CODEC.decode(payload).records)


@pytest.mark.parametrize("seed", SEEDS)
def test_seeded_histories(seed: int) -> None:
    """So it is with drawn jobs that drawn faults strike."""
    assert check(simulate(draw(seed, nodes=NODES, faults_max=FAULTS_MAX)).records[:EVENTS_MAX]) > 0

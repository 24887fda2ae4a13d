"""No event changes what agents and backends are to be told unless `Model.levels` says so: masters look nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgpack
import pytest

from dlrover_core.job.orders import Desired
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.state import pack, unpack
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL
from dlrover_core.sim.simulation import simulate
from dlrover_core.testing.swarm import draw

HISTORIES = Path(__file__).parents[1] / "unit" / "histories"
SEEDS, NODES, FAULTS_MAX, EVENTS_MAX = range(12), 4, 12, 300


def anew(state: JobState, at: int) -> Desired:
    """What should be true by a copy of the state at that time: nothing is remembered from before."""
    copy = unpack(JobState, pack(state))
    copy.at = at
    return desired(copy)


def check(records: Iterable[Record]) -> int:
    """How many records changed what should be true; each of them was one that levels, whatever its batch."""
    state, changed, now = MODEL.new(), 0, None
    for record in records:
        # Time alone ends quarantines: what an event changes is seen at one time.
        before = now if now is not None and not state.hosts.hosts else anew(state, record.at)
        MODEL.apply(state, record)
        now = anew(state, record.at)
        if now != before:
            changed += 1
            assert MODEL.levels(state, [record]), f"{record.event} changes what should be true, and levels nothing"
    return changed


@pytest.mark.parametrize("path", sorted(HISTORIES.glob("*.msgpack")), ids=lambda path: path.stem)
def test_recorded_histories(path: Path) -> None:
    """Every record of a recorded history that changes what should be true is one after which masters look."""
    payloads = msgpack.unpackb(path.read_bytes())
    assert check(record for payload in payloads for record in CODEC.decode(payload).records) > 10


@pytest.mark.parametrize("seed", SEEDS)
def test_seeded_histories(seed: int) -> None:
    """So it is with drawn jobs that drawn faults strike."""
    assert check(simulate(draw(seed, nodes=NODES, faults_max=FAULTS_MAX)).records[:EVENTS_MAX]) > 1

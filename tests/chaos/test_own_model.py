"""A master is given what decides: its deadlines are those of that model, whatever others would decide."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from dlrover_core.job import job
from dlrover_core.job.state import FOLD, JobState
from dlrover_core.kernel.engine import Model, Rules
from dlrover_core.kernel.events import Event
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime.master import Master
from dlrover_core.spec import GroupSpec, JobSpec, us
from dlrover_core.testing import cluster as clusters
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.training import Training

AFTER_US, LATE_US = us(0.25), 4242


def _due(state: JobState) -> int | None:
    at = state.job.created_at + AFTER_US
    return at if state.job.live and state.at < at else None


def _tick(state: JobState, now: int) -> Iterator[Event]:
    if _due(state) is not None and now >= state.job.created_at + AFTER_US:
        yield job.MasterPaused(LATE_US)


def test_a_master_keeps_the_deadlines_of_its_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline that only the given model knows is met: the master wakes up for it though nothing else happens then."""
    model = Model(FOLD, [*MODEL.rules, Rules(due=_due, tick=_tick)])
    monkeypatch.setattr(clusters, "Master", partial(Master, model=model))

    async def told() -> None:
        async with Cluster(JobSpec("j", (GroupSpec(),)), training=Training(50)) as cluster:
            assert (await cluster.outcome()).state == "succeeded"
            records = await cluster.records()
            created = next(one.at for one in records if isinstance(one.event, job.JobCreated))
            (noted,) = [one for one in records if one.event == job.MasterPaused(LATE_US)]
            assert noted.at - created < AFTER_US + us(0.01)

    virtual_loop.run(told())

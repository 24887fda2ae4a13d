"""The smoke size of the campaign `ray_seeds`: jobs in a real Ray cluster under drawn faults."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import campaign_ray
from tools.campaign_ray import KINDS, MEANWHILE, NODES, Blow, Grounds, Plan, drawn
from tools.trials import Patience

SMOKE = (0, 1, 2, 3)


@pytest.fixture(name="grounds", scope="module")
def made_grounds() -> Iterator[Grounds]:
    """One cluster for all seeds."""
    with contextlib.closing(Grounds()) as grounds:
        yield grounds


@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(400)
@pytest.mark.nightly(
    reason="a cluster and several deaths in it take half a minute; single faults are tried by day in test_ray_job"
)
@pytest.mark.parametrize("seed", SMOKE)
def test_every_seed_ends_right(grounds: Grounds, seed: int) -> None:
    """No rank twice at any time, one chain of steps, the launches that the blows explain, and nothing left at the end."""
    grounds.trial(seed, Patience())


def test_files_of_a_broken_trial_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the job has said, and Ray's logs; sockets are left out."""
    monkeypatch.setattr(campaign_ray.tempfile, "mkdtemp", lambda prefix: str(tmp_path / prefix))
    logs = tmp_path / "cluster" / "ray" / "session_latest" / "logs"
    for folder in (tmp_path / "job", logs):
        folder.mkdir(parents=True)
        (folder / "said").write_text("words")
    monkeypatch.chdir(tmp_path / "job")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
        kept = campaign_ray._kept(7, tmp_path / "job", tmp_path / "cluster")
    assert [(kept / name / "said").read_text() for name in ("job", "ray")] == ["words", "words"]
    assert kept.name == "ray-seeds-broken-7-"


def test_plans_are_the_seeds() -> None:
    """A seed always draws the same; all kinds of blows come up, during an outage too, and none but a drain lasts for ever."""
    plans = [drawn(seed) for seed in range(200)]
    blows = [blow for plan in plans for blow in plan.blows]
    assert plans == [drawn(seed) for seed in range(200)]
    assert {blow.kind for blow in blows} == set(KINDS)
    assert {blow.meanwhile for blow in blows} == set(MEANWHILE)
    assert all(blow.for_s > 0 for blow in blows if blow.kind in {"freeze", "state"})
    assert {plan.nnodes for plan in plans} == {"2", "1:2"}
    assert {plan.is_calm for plan in plans} == {True, False}
    assert all(plan.driver < len(plan.blows) for plan in plans)
    assert 30 < sum(plan.driver >= 0 for plan in plans) < 70


def test_launches_that_blows_explain() -> None:
    """A worker costs no node, an agent one, a host as many as there are; what happens during an outage counts, too."""
    outage = Blow(0.0, "state", 0, 1.0, "raylet")
    assert Plan("2", False, (Blow(0.0, "worker", 0), Blow(0.0, "agent", 0))).launches_max == NODES + 1
    assert Plan("2", False, (outage,)).launches_max == 2 * NODES
    assert not Plan("2", False, (outage,)).is_calm

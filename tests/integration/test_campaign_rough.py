"""The campaign `rough`: one short rough world of fixed strikes, and the schedules that seeds draw."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.campaign_rough import rough
from tools.rough_ground import left_out
from tools.rough_kinds import BETWEEN_HOSTS, EVERYWHERE, NAMED_KINDS, Strike, drawn, has_hosts
from tools.trials import Patience

SEED, SECONDS, PAUSE_S = 0, 6.5, 0.04
STRIKES = (
    Strike(0.6, "kill", "worker", 0.3),
    Strike(0.9, "clock", "a", lasts_s=2.0, amount=5.0),
    Strike(1.2, "stop", "dlrover-master", 0.0, 0.8),
    Strike(1.8, "disk-full", "stored", lasts_s=1.5),
    Strike(2.3, "kill", "dlrover-master", 0.0),
    Strike(2.7, "hostile", which=0.5, lasts_s=2.0),
    Strike(3.2, "kill", "dlrover-saver", 0.9),
    Strike(3.5, "disk-stall", "state", lasts_s=1.0),
    Strike(5.0, "oom", "worker", 0.6),
)


@pytest.mark.nightly(
    reason="test_rough_handling.py strikes the same processes and fills disks, test_hostile_peers.py has the peers,"
    " test_rough_witness.py the campaign's own judgement, in make test"
)
@pytest.mark.timeout(300)
def test_a_short_rough_world_keeps_every_promise(tmp_path: Path) -> None:
    """Workers, a master and a saver are struck, the clock jumps, a disk is full and one stalls: the witness finds nothing wrong.

    Kinds that are not possible here are left out, and said.
    """
    out = left_out(SEED)
    strikes = [one for one in STRIKES if one.kind not in out]
    found = rough(tmp_path / "w", SEED, strikes, SECONDS, Patience(), pause=PAUSE_S, epilogue=False)
    assert "broken" not in found, found["broken"]
    assert found["not_possible_here"] == out
    assert found["strikes"] == len(strikes)
    assert found["restarts"] == sum(one.kind in {"kill", "oom"} and one.target == "worker" for one in strikes)


def test_schedules_are_the_seeds() -> None:
    """A seed always draws the same strikes, in the order of their times; another seed draws others."""
    strikes = drawn(1, 3600.0)
    assert strikes == drawn(1, 3600.0)
    assert strikes != drawn(6, 3600.0)
    assert [one.at_s for one in strikes] == sorted(one.at_s for one in strikes)
    assert 3600 / 9 < len(strikes) < 3600 / 5


def test_an_hour_has_every_kind() -> None:
    """Five seeds have all kinds between them; those of the network and of etcd come to jobs on several hosts alone."""
    kinds = {seed: {one.kind for one in drawn(seed, 3600.0)} for seed in range(5)}
    assert set().union(*kinds.values()) == set(NAMED_KINDS) == {*EVERYWHERE, *BETWEEN_HOSTS}
    assert [seed for seed, those in kinds.items() if those & set(BETWEEN_HOSTS)] == [1, 3]
    assert [seed for seed in kinds if has_hosts(seed)] == [1, 3]


def test_what_is_left_out_changes_nothing_else() -> None:
    """A machine without a compiler has the same strikes but for the clock's."""
    strikes = drawn(2, 600.0)
    assert drawn(2, 600.0, {"clock"}) == [one for one in strikes if one.kind != "clock"]

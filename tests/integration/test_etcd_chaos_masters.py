"""Masters on three hosts, an etcd of three members, training on two: whatever dies, stops or is cut off, nothing decided is lost.

What is done is in `outages`, what must hold after each of them in `shared_log`. One job lives through an outage of each kind
in ``make test``, others through more of them in ``make nightly``. Those that are not told here are in the campaign, with all
of these: ``make campaign NAME=masters``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from outages import play
from shared_log import Stage, Void
from tools.etcd_cluster import Cluster
from twins import twins

SEED = 4

pytestmark = pytest.mark.timeout(240)
more = pytest.mark.nightly(reason="test_one_outage_of_each_kind stands for it in make test")


def outages(folder: Path, *names: str) -> None:
    """One job lives through all of them. Where etcd itself loses data nothing is proven: it is tried once more on a fresh one."""
    for attempt in ("first", "second"):
        try:
            return _outages(folder / attempt, names)
        except Void as void:
            sys.stderr.write(f"the {attempt} trial is void: {void}\n")
    pytest.fail("etcd lost data twice in succession")


def _outages(folder: Path, names: Sequence[str]) -> None:
    with Stage(folder) as stage:
        for name in names:
            play(stage, name, SEED)
        stage.finish()


def test_one_outage_of_each_kind(tmp_path: Path) -> None:
    """Etcd without a majority, a zombie whose append comes late, a lease that ends early.

    Of answers that get lost test_etcd_chaos_log.py has a story in `make test`.
    """
    outages(tmp_path, "quorum_lost", "zombie_with_an_append", "lease_revoked")


@more
def test_members_of_etcd_die_and_stop(tmp_path: Path) -> None:
    """The leading member, another one, two, all: training goes on, and decisions as soon as there is a majority."""
    outages(
        tmp_path,
        "etcd_leader_killed",
        "etcd_leader_stopped",
        "etcd_follower_killed",
        "etcd_follower_stopped",
        "quorum_lost",
        "all_members_restarted",
    )


@more
def test_masters_die_stop_and_come_back(tmp_path: Path) -> None:
    """Another one leads, with all that was decided; what the old one still wants is refused by etcd and by agents."""
    outages(
        tmp_path,
        "handed_over",
        "leading_master_killed",
        "zombie",
        "zombie_with_an_append",
        "impostor",
    )


@more
def test_the_way_to_etcd_breaks(tmp_path: Path) -> None:
    """A master that is cut off for long stands by for another one; answers that get lost it bears."""
    outages(
        tmp_path,
        "cut_off",
        "cut_off_from_answers",
        "cut_off_from_asking",
        "answers_lost",
    )


@more
def test_what_is_done_to_the_keys(tmp_path: Path) -> None:
    """Revisions are compacted, leases end early, space runs out."""
    outages(tmp_path, "compaction", "lease_revoked", "out_of_space")


def test_two_masters_at_the_same_instant(etcd_server: Cluster, tmp_path: Path) -> None:
    """Whoever comes first begins the run, and the other one stands by for it."""
    twins(etcd_server, tmp_path / "0", 0)


@pytest.mark.nightly(reason="test_two_masters_at_the_same_instant stands for it in make test")
def test_two_masters_at_the_same_instant_again_and_again(etcd_server: Cluster, tmp_path: Path) -> None:
    """The same, with other masters that are the first."""
    for number in range(1, 4):
        twins(etcd_server, tmp_path / str(number), number)

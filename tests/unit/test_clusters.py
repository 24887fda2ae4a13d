"""Addresses as news: who is named under a place, under which version, and who is told."""

from __future__ import annotations

import dataclasses
import typing
import zlib

import pytest
from drive import Drive

from dlrover_core.errors import MalformedMessage
from dlrover_core.job import clusters, nodes, plans, world
from dlrover_core.job.clusters import Cluster, OfferPorts
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Accepted, NotDone
from dlrover_core.kernel.state import pack, unpack
from dlrover_core.rules.desired import desired
from dlrover_core.runtime import messages
from dlrover_core.spec import GroupSpec
from dlrover_core.testing.apart import Addresses
from dlrover_core.testing.invariants import watched

TRAINER = GroupSpec("trainer", 2, 2, nproc=2, uses=("rollout",))
ROLLOUT = GroupSpec("rollout", 2, 2, nproc=2, uses=("trainer",))
GROUPS = (TRAINER, ROLLOUT, GroupSpec("evaluator", nproc=2, uses=("trainer",)), GroupSpec("other", nproc=2))


def begun(*groups: GroupSpec) -> Drive:
    """All nodes are there, their workers run, and nobody has offered anything."""
    drive = Drive(groups=groups or GROUPS)
    for node in list(drive.state.nodes.nodes):
        drive.observe(node, "running")
        drive.join(node)
    for current in list(drive.state.world.worlds.values()):
        for member in current.members:
            drive.do(world.ReportStarted(member.node, current.generation))
    return drive


def offered(drive: Drive, node: str, address: str = "10.0.0.1", first: int = 2000) -> Drive:
    """Its agent offers two ports."""
    assert isinstance(drive.do(OfferPorts(node, address, first, 2)), Accepted)
    return drive


def told(drive: Drive, node: str) -> Cluster:
    """What a node is told."""
    return desired(drive.state).orders[node].part(Cluster)


def peers(drive: Drive, node: str) -> dict[str, dict[str, list[str]]]:
    """Whom its workers can call."""
    return clusters.listed(told(drive, node).peers)


def lose(drive: Drive, node: str) -> str:
    """A node dies; its successor is there. Its name."""
    drive.observe(node, "failed", -9, "preempted")
    drive.observe(node, "gone")
    group, index, incarnation = node.split("-")
    successor = f"{group}-{index}-{int(incarnation) + 1}"
    drive.join(successor)
    return successor


# ---- who is told what


def test_who_uses_a_group_is_told_its_addresses_and_nobody_else() -> None:
    """A version, and one address for each worker, by place."""
    drive = offered(begun(), "rollout-1-0")
    assert peers(drive, "trainer-0-0") == {"rollout": {"1": ["10.0.0.1:2000", "10.0.0.1:2001"]}}
    assert told(drive, "trainer-0-0") == told(drive, "trainer-1-0")
    assert told(drive, "evaluator-0-0") == Cluster(version=1, peers='{"trainer":{}}')
    assert told(drive, "other-0-0") == Cluster()


def test_a_job_whose_groups_use_nobody_is_told_nothing() -> None:
    """As before: no part, no port."""
    drive = begun(GroupSpec("worker", 2, 2, nproc=2))
    assert told(drive, "worker-0-0") == Cluster()
    refused = drive.do(OfferPorts("worker-0-0", "10.0.0.1", 2000, 2))
    assert isinstance(refused, NotDone)
    assert "no group uses 'worker'" in refused.reason


def test_versions_grow_with_every_change_of_what_one_uses_and_with_nothing_else() -> None:
    """Who uses trainers hears nothing of rollouts."""
    drive = begun()
    versions: list[tuple[int, int]] = []
    for node in ("rollout-0-0", "trainer-0-0", "rollout-1-0"):
        offered(drive, node, first=2000 + len(versions) * 10)
        versions.append((told(drive, "trainer-0-0").version, told(drive, "evaluator-0-0").version))
    assert versions == [(2, 1), (2, 3), (4, 3)]


def test_addresses_of_ipv6_are_in_brackets() -> None:
    """So that the port can be told from the address."""
    drive = offered(begun(), "rollout-0-0", "fd00::1")
    assert peers(drive, "trainer-0-0")["rollout"]["0"][0] == "[fd00::1]:2000"


# ---- a peer that moves


def test_a_moved_peer_is_news_and_restarts_nobody() -> None:
    """The node dies: its place is named by nobody; its successor offers: another address. The users' generation stays."""
    drive = offered(begun(), "rollout-0-0")
    before = drive.state.world.worlds["trainer"].generation
    successor = lose(drive, "rollout-0-0")
    assert peers(drive, "trainer-0-0") == {"rollout": {}}
    offered(drive, successor, "10.0.0.9", 2400)
    assert peers(drive, "trainer-0-0")["rollout"] == {"0": ["10.0.0.9:2400", "10.0.0.9:2401"]}
    assert told(drive, "trainer-0-0").version == 4
    assert drive.state.world.worlds["trainer"].generation == before


def test_a_successor_is_told_where_its_place_was_called_until_it_has_offered() -> None:
    """On the same host it has the same ports again."""
    drive = offered(begun(), "rollout-0-0")
    successor = lose(drive, "rollout-0-0")
    assert told(drive, successor)[:3] == (2, "10.0.0.1", 2000)
    assert told(drive, "rollout-1-0")[:3] == (2, "", 0)
    offered(drive, successor)
    assert told(drive, successor)[:3] == (2, "", 0)


def test_a_successor_is_named_when_its_workers_run_while_its_predecessor_works() -> None:
    """In a planned change both are there: whose workers were started last is called."""
    drive = offered(begun(), "rollout-0-0")
    state = drive.state
    watched(drive.records, Addresses)
    slice_ = state.clusters
    for fact in (
        clusters.PortsOffered("rollout-0-1", "10.0.0.9", 2400, 2),
        world.WorkersStarted("rollout-0-1", 2),
        nodes.NodeReleased("rollout-0-0", "drained"),
    ):
        named = dict(slice_.holders)
        clusters.FACTS.evolve[type(fact)](slice_, fact, drive.records[-1])
        assert list(slice_.check()) == []
        if isinstance(fact, clusters.PortsOffered):
            assert slice_.holders == named, "the one that works is called still"
        else:
            assert slice_.holders == {"rollout-0": "rollout-0-1"}
    assert slice_.version == 3


def test_a_successor_is_named_when_its_predecessor_dies_before_it_works() -> None:
    """Whoever has offered and lives is named, or nobody could be called."""
    slice_ = offered(begun(), "rollout-0-0").state.clusters
    record = begun().records[-1]
    for fact in (
        clusters.PortsOffered("rollout-0-1", "10.0.0.9", 2400, 2),
        nodes.NodeLost("rollout-0-0", "silent"),
    ):
        clusters.FACTS.evolve[type(fact)](slice_, fact, record)
    assert slice_.holders == {"rollout-0": "rollout-0-1"}
    assert slice_.vacant == {}


def test_workers_that_start_again_on_their_node_are_no_news() -> None:
    """One fact for each node that starts, not one for each worker."""
    drive = offered(begun(), "rollout-0-0")
    before = drive.state.clusters.version
    drive.exit("rollout-0-0", 0, generation=1)
    current = drive.state.world.worlds["rollout"]
    for member in current.members:
        drive.do(world.ReportStarted(member.node, current.generation))
    assert (current.generation, drive.state.clusters.version) == (2, before)


# ---- what is refused


@pytest.mark.parametrize(
    ("offer", "why"),
    [
        (OfferPorts("rollout-7-0", "a", 2000, 2), "is not a node of run"),
        (OfferPorts("rollout-0-0", "", 2000, 2), "an address has 1 to"),
        (OfferPorts("rollout-0-0", "a" * 256, 2000, 2), "an address has 1 to"),
        (OfferPorts("rollout-0-0", "a", 2000, 3), "not one for each of 2 workers"),
        (OfferPorts("rollout-0-0", "a", 0, 2), "not one for each of 2 workers"),
        (OfferPorts("rollout-0-0", "a", 65_535, 2), "not one for each of 2 workers"),
        (OfferPorts("other-0-0", "a", 2000, 2), "no group uses 'other'"),
    ],
)
def test_offers_that_cannot_be(offer: OfferPorts, why: str) -> None:
    """Bounded, of a living node, of a group that somebody uses."""
    drive = begun()
    refused = drive.do(offer)
    assert isinstance(refused, NotDone)
    assert why in refused.reason
    assert drive.state.clusters == clusters.ClusterSlice()


def test_a_node_that_leaves_offers_nothing() -> None:
    """Its place would name a node that nobody reaches."""
    drive = begun()
    drive.observe("rollout-0-0", "failed", -9, "preempted")
    refused = drive.do(OfferPorts("rollout-0-0", "10.0.0.1", 2000, 2))
    assert isinstance(refused, NotDone)
    assert "nobody is to call its workers" in refused.reason


def test_an_offer_that_is_known_is_no_event() -> None:
    """Edges, not levels."""
    drive = offered(begun(), "rollout-0-0")
    assert isinstance(drive.do(OfferPorts("rollout-0-0", "10.0.0.1", 2000, 2)), Accepted)
    assert drive.new == []


# ---- what is kept


def test_who_takes_over_tells_the_same() -> None:
    """From the log, and from a snapshot."""
    drive = offered(offered(begun(), "rollout-0-0"), "rollout-1-0", first=2010)
    before = told(drive, "trainer-0-0")
    copied = unpack(JobState, pack(drive.state))
    assert copied.clusters.told(("rollout",)) == (before.version, before.peers)
    drive.take_over()
    assert told(drive, "trainer-0-0") == before


def test_a_new_run_names_nobody_and_keeps_the_ports_of_places() -> None:
    """Nodes of the run before are strangers; who comes to a place is told its ports."""
    slice_ = offered(begun(), "rollout-0-0").state.clusters
    fact = begun().records[0]
    clusters.FACTS.evolve[type(fact.event)](slice_, fact.event, fact)
    assert list(slice_.check()) == []
    assert (slice_.holders, slice_.offers, slice_.version) == ({}, {}, 3)
    assert slice_.vacant["rollout-0"].first == 2000


def large(nodes: int) -> clusters.ClusterSlice:
    """Everything is named of a group of so many nodes of eight workers, with names and ports that do not resemble one another."""
    slice_, record = clusters.ClusterSlice(), begun().records[-1]
    for index in range(nodes):
        address = f"host-{zlib.crc32(str(index).encode()):08x}.{index}.cluster.internal"
        offer = clusters.PortsOffered(f"rollout-{index}-0", address, 20_000 + index * 7919 % 9000, 8)
        clusters.FACTS.evolve[clusters.PortsOffered](slice_, offer, record)
    return slice_


def test_the_largest_group_fits_in_a_message() -> None:
    """16,384 nodes of eight workers reach an agent whole, in a text of bounded length."""
    slice_ = large(16_384)
    version, text = slice_.told(("rollout",))
    order = desired(begun().state).orders["trainer-0-0"].telling(Cluster(version=version, peers=text))
    received = messages.decode(messages.encode(messages.level(1, order)))
    assert isinstance(received, messages.Level)
    places = clusters.listed(messages.order_of(received).part(Cluster).peers)["rollout"]
    assert list(places) == [str(index) for index in range(16_384)]
    assert all(places[index] == one.addresses for index, one in slice_.named(("rollout",))["rollout"].items())


def test_more_than_a_message_holds_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order goes out without addresses, which the agent says: an order that could not be sent would stop the job."""
    monkeypatch.setattr(clusters, "PACKED_MAX", 20_000)
    version, text = large(1000).told(("rollout",))
    assert (version, text) == (1001, "")
    with pytest.raises(MalformedMessage, match="too many for one message"):
        clusters.listed(text)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"a":[]}',
        '{"a":{"0":["h",1]}}',
        '{"a":{"x":["h",1,1]}}',
        '{"a":{"0":["h","p",1]}}',
        "z",
        "z!",
        "zaaaa",
    ],
)
def test_what_are_no_addresses_is_malformed(text: str) -> None:
    """Whoever says so."""
    with pytest.raises(MalformedMessage, match="these are"):
        clusters.listed(text)


def test_a_text_that_swells_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short message does not fill an agent's memory."""
    _, text = large(1000).told(("rollout",))
    monkeypatch.setattr(clusters, "UNPACKED_MAX", 1000)
    with pytest.raises(MalformedMessage, match="more than 1000 bytes"):
        clusters.listed(text)


def test_groups_that_share_a_world_are_told_apart() -> None:
    """Each what it uses."""
    together = [dataclasses.replace(one, set="all") for one in (TRAINER, ROLLOUT)]
    drive = offered(begun(*together), "rollout-0-0")
    assert "rollout" in peers(drive, "trainer-0-0")
    assert "trainer" in peers(drive, "rollout-0-0")


def test_every_way_to_end_is_minded() -> None:
    """A node that ended in whatever way is named no more."""
    for fact in typing.get_args(world.Ended):
        assert fact in clusters.FACTS.evolve
    assert plans.NodeDrained not in clusters.FACTS.evolve, "it works until it is released"


# ---- the promise


def broken(slice_: clusters.ClusterSlice) -> str:
    """What its check says."""
    return " ".join(slice_.check())


def test_the_formula_names_what_does_not_hold() -> None:
    """Each line of it."""
    good = offered(begun(), "rollout-0-0").state.clusters
    assert broken(good) == ""
    good.changed["rollout"] = 9
    assert "version: v(rollout) = 9" in broken(good)
    good = offered(begun(), "rollout-0-0").state.clusters
    good.holders["rollout-1"] = "rollout-0-0"
    assert "places: named are" in broken(good)
    good = offered(begun(), "rollout-0-0").state.clusters
    good.holders["rollout-0"] = "rollout-0-9"
    assert "places: h(rollout-0) = 'rollout-0-9'" in broken(good)
    good = offered(begun(), "rollout-0-0").state.clusters
    good.vacant["rollout-0"] = clusters.Offer("a", 1, 1)
    assert "vacant: ['rollout-0'] have nodes" in broken(good)
    good = offered(begun(), "rollout-0-0").state.clusters
    good.offers["rollout-0"]["rollout-0-0"] = clusters.Offer("a", 65_535, 2)
    assert "ports: rollout-0-0" in broken(good)


def test_a_version_that_says_two_things_breaks_the_promise() -> None:
    """And so does one that names a node that is gone."""
    drive = offered(begun(), "rollout-0-0")
    promise, record = Addresses(), drive.records[-1]
    promise(drive.state, record)
    slice_ = drive.state.clusters
    slice_.offers["rollout-0"]["rollout-0-0"] = clusters.Offer("10.0.0.2", 2000, 2)
    with pytest.raises(AssertionError, match="version 2"):
        promise(drive.state, record)
    del drive.state.nodes.nodes["rollout-0-0"]
    with pytest.raises(AssertionError, match="which is gone, is named under rollout-0"):
        promise(drive.state, record)


def test_the_promise_holds_of_a_history() -> None:
    """Nodes that die, come back and move."""
    drive = offered(begun(), "rollout-0-0")
    for first in (2000, 2400):
        offered(drive, lose(drive, drive.state.nodes.latest("rollout", 0).node), first=first)
    watched(drive.records, Addresses)

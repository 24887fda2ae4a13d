"""Clusters: the addresses at which workers of one group reach workers of another group.

A group names the groups whose addresses it needs (`GroupSpec.uses`). Every node of a used group reserves ports for its
workers and offers them once, when its agent starts. Every agent of the using group gets all addresses, by place, under a
version that grows with every change. New addresses form no new world: a peer that moves restarts no worker.

A place names the node whose workers were started last. Its successor may already be there and wait for a planned change;
the place names the successor once it works, or once its predecessor ends. A place without a living node names no address.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast, get_args

from dlrover_core.errors import MalformedMessage
from dlrover_core.job import job, world
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.state import lasting
from dlrover_core.kernel.wire import command, part

PORT_MAX = 65_535
PLAIN_MAX, PACKED_MAX, UNPACKED_MAX = 16 * 1024, 768 * 1024, 64 * 1024 * 1024
_PACKED = "z"


@event(150)
class PortsOffered(NamedTuple):
    """Workers of other groups reach a node's workers at ``address``, on ``ports`` ports in a row, from ``first`` on."""

    node: str
    address: str
    first: int
    ports: int


@command(23, since=5)
class OfferPorts(NamedTuple):
    """An agent has reserved ``ports`` ports for its workers, from ``first`` on, and other workers reach them at ``address``."""

    node: str
    address: str
    first: int
    ports: int


@part(11)
class Cluster(NamedTuple):
    """To a node: the ports that it offers, and the addresses that its workers may use.

    ports:   how many ports it reserves for its workers; 0: none, because no group uses its own
    address: the address of the last node in its place
    first:   the first port of that node, to be taken again where the address is the same; 0: there was no such node
    version: of ``peers``, grows with every change; 0: its group uses no other
    peers:   the addresses, as `packed` makes them and `listed` reads them; empty: too many for a message
    """

    ports: int = 0
    address: str = ""
    first: int = 0
    version: int = 0
    peers: str = ""


class Offer(NamedTuple):
    """One node's offer, with the fields of `PortsOffered`."""

    address: str
    first: int
    ports: int

    @property
    def addresses(self) -> list[str]:
        """The ``host:port`` of each worker."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return [f"{host}:{port}" for port in range(self.first, self.first + self.ports)]


Places = dict[str, dict[str, list[str]]]
"""By group, by place: the ``host:port`` of each worker."""


def packed(groups: Mapping[str, Mapping[str, Offer]]) -> str:
    """Offers by group and place, as JSON. A long text is compressed, written in base64, and begins with ``z``.

    Empty: the text is too long all the same. 16,384 nodes with long names take 0.4 MB; a message has room for 1 MiB.
    """
    text = json.dumps(groups, separators=(",", ":"))
    if len(text) > PLAIN_MAX:
        text = _PACKED + base64.b64encode(zlib.compress(text.encode(), 1)).decode()
    return text if len(text) <= PACKED_MAX else ""


def listed(text: str) -> Places:
    """The addresses in a `packed` text. Raises `MalformedMessage`."""
    if not text:
        raise MalformedMessage("they are too many for one message: let the group use smaller ones")
    try:
        plain, rest = text, b""
        if text.startswith(_PACKED):
            unpacking = zlib.decompressobj()
            plain = unpacking.decompress(base64.b64decode(text[1:], validate=True), UNPACKED_MAX).decode()
            rest = unpacking.unconsumed_tail
        found = {} if rest else {group: _expanded(places) for group, places in json.loads(plain).items()}
    except (ValueError, TypeError, AttributeError, zlib.error) as error:
        raise MalformedMessage(f"these are no addresses: {error}") from error
    if rest:
        raise MalformedMessage(f"these are more than {UNPACKED_MAX} bytes of addresses")
    return found


def _expanded(places: Mapping[str, tuple[str, int, int]]) -> dict[str, list[str]]:
    offers = {str(int(place)): Offer(*one) for place, one in places.items()}
    for one in offers.values():
        if not (one.first >= 1 and one.ports >= 1 and one.first + one.ports - 1 <= PORT_MAX):
            raise ValueError(f"{one.ports} ports from {one.first} on")
    return {place: one.addresses for place, one in offers.items()}


# Invariants of clusters, after every event; `ClusterSlice.check` yields the broken ones.
#
#   V     `version`: the number of the newest change of any address
#   v(g)  `changed`: the number of the newest change of an address of group g
#   O(p)  `offers`: the nodes of place p with an offer
#   h(p)  `holders`: the node that place p names
#   l(p)  `vacant`: the offer of the last node that p named, while p names none
#
#   version  1 < v(g) <= V for every g that ever had an address
#   places   h(p) is defined exactly if O(p) is not empty, and is in O(p); all of O(p) are nodes of p; so a version names each
#            place once, and each node under one place
#   vacant   l(p) is defined only where h(p) is not
#   ports    of every offer: 1 <= first, 1 <= ports, first + ports - 1 <= `PORT_MAX`


class Texts:
    """The cache beside a `ClusterSlice`: the text of `Cluster.peers`, made once for each version."""

    __slots__ = ("_texts",)
    _texts: dict[tuple[str, ...], tuple[int, str]]

    def told(self, uses: Sequence[str]) -> tuple[int, str]:
        """Version and addresses of groups, as `Cluster.version` and `Cluster.peers`."""
        slice_ = cast("ClusterSlice", self)
        try:
            texts = self._texts
        except AttributeError:
            texts = self._texts = {}
        version, known = slice_.newest(uses), tuple(uses)
        found = texts.get(known)
        if found is None or found[0] != version:
            found = texts[known] = version, packed(slice_.named(uses))
        return found


@dataclass(slots=True)
class ClusterSlice(Texts):
    """All offers, and the node that each place names.

    version: of the newest change; 1: there was none
    changed: version of the newest change, by group
    offers:  offers by place, then by node, oldest first
    holders: the node that a place names, by place
    vacant:  the offer of the last node, by place that names no node now
    """

    version: int = lasting(lambda: 1)
    changed: dict[str, int] = lasting(dict)
    offers: dict[str, dict[str, Offer]] = lasting(dict)
    holders: dict[str, str] = lasting(dict)
    vacant: dict[str, Offer] = lasting(dict)

    def newest(self, uses: Sequence[str]) -> int:
        """The version of the addresses of these groups; 1: there are none yet."""
        return max((self.changed.get(group, 1) for group in uses), default=1)

    def named(self, uses: Sequence[str]) -> dict[str, dict[str, Offer]]:
        """The offers that these groups name, by group and place, in the order of places."""
        found: dict[str, dict[str, Offer]] = {group: {} for group in uses}
        for place, node in self.holders.items():
            group, _, index = place.rpartition("-")
            if group in found:
                found[group][index] = self.offers[place][node]
        return {group: dict(sorted(places.items(), key=lambda one: int(one[0]))) for group, places in found.items()}

    def offer(self, node: str) -> Offer | None:
        """Add a node's offer."""
        return self.offers.get(_place(node), {}).get(node)

    def name(self, place: str, node: str) -> None:
        """From now on a place names this node; empty: no node."""
        if node:
            self.holders[place] = node
            self.vacant.pop(place, None)
        else:
            del self.holders[place]
        self.version += 1
        self.changed[place.rpartition("-")[0]] = self.version

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above."""
        for group, changed in self.changed.items():
            if not 1 < changed <= self.version:
                yield f"version: v({group}) = {changed}, V = {self.version}"
        if self.holders.keys() != self.offers.keys():
            yield f"places: named are {list(self.holders)}, offered {list(self.offers)}"
        for place, offers in self.offers.items():
            strangers = [node for node in offers if _place(node) != place]
            if strangers or self.holders.get(place) not in offers:
                yield f"places: h({place}) = {self.holders.get(place)!r}, O({place}) = {list(offers)}"
        both = self.vacant.keys() & self.holders.keys()
        if both:
            yield f"vacant: {sorted(both)} have nodes"
        for place, offers in self.offers.items():
            for node, one in offers.items():
                if not (one.first >= 1 and one.ports >= 1 and one.first + one.ports - 1 <= PORT_MAX):
                    yield f"ports: {node} of {place} offers {one}"


def _place(node: str) -> str:
    return node.rsplit("-", 1)[0]


# ---- evolve


def _on_created(slice_: ClusterSlice, fact: job.JobCreated, record: Record) -> None:
    """A new run starts without offers. The first node of a place gets the ports that the place had."""
    for place, node in list(slice_.holders.items()):
        slice_.vacant[place] = slice_.offers[place][node]
        slice_.name(place, "")
    slice_.offers.clear()


def _on_offered(slice_: ClusterSlice, fact: PortsOffered, record: Record) -> None:
    place = _place(fact.node)
    slice_.offers.setdefault(place, {})[fact.node] = Offer(*fact[1:])
    if slice_.holders.get(place, fact.node) == fact.node:
        slice_.name(place, fact.node)


def _on_started(slice_: ClusterSlice, fact: world.WorkersStarted, record: Record) -> None:
    place = _place(fact.node)
    if slice_.holders.get(place, fact.node) != fact.node and fact.node in slice_.offers[place]:
        slice_.name(place, fact.node)


def _on_ended(slice_: ClusterSlice, fact: world.Ended, record: Record) -> None:
    place = _place(fact.node)
    offers = slice_.offers.get(place, {})
    offer = offers.pop(fact.node, None)
    if offer is None:
        return
    if not offers:
        del slice_.offers[place]
    if slice_.holders[place] == fact.node:
        if not offers:
            slice_.vacant[place] = offer
        slice_.name(place, next(reversed(offers), ""))


EVENTS = (PortsOffered,)

FACTS = Facts(
    kinds=EVENTS,
    evolve={
        job.JobCreated: _on_created,
        PortsOffered: _on_offered,
        world.WorkersStarted: _on_started,
        **dict.fromkeys(get_args(world.Ended), _on_ended),
    },
)

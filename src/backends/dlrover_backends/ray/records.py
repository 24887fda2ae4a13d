"""What Ray says of actors, hosts and placement groups, as plain values."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from dlrover_core.runtime.within import within

PROBE_S = 1.0
ORPHAN_S = 1.0
"""A desk makes the actor milliseconds after the group. A group that has none for so long was left by one that died."""
STATES = ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "RESTARTING", "DEAD")
"""What an actor that is not started again by Ray goes through, in this order."""


class Actor(NamedTuple):
    """One actor, a living or a dead one.

    id:        Ray's id, in hexadecimal digits
    name:      the node's name; of a standby that is no node its own
    namespace: Ray's namespace, which is the run's
    state:     DEPENDENCIES_UNREADY, PENDING_CREATION, ALIVE, RESTARTING or DEAD
    host_id:   the id of the host that it is or was on; empty: on none yet
    pid:       its process there; 0: none yet
    ended_ms:  when it ended, by the cluster's wall clock; 0: not yet
    cause:     Ray's ActorDeathCause, with the names of its fields; empty: it is not dead
    seat:      the own name of a standby that is a node; empty: ``name`` is its name
    """

    id: str
    name: str
    namespace: str = ""
    state: str = "ALIVE"
    host_id: str = ""
    pid: int = 0
    ended_ms: int = 0
    cause: Mapping[str, Any] = {}  # never written to
    seat: str = ""

    @property
    def called(self) -> str:
        """Its name in Ray."""
        return self.seat or self.name

    @property
    def is_dead(self) -> bool:
        """Is it over, for good?"""
        return self.state == "DEAD"


class Host(NamedTuple):
    """One of the cluster's machines: Ray calls it a node.

    id:       Ray's id; a raylet that is started again has another
    name:     its name, which stays: what ``ray start --node-name`` said, else the IP address
    address:  its IP address
    alive:    does the cluster believe it to be there?
    has:      its resources, all together
    labels:   its labels
    drain_ms: when it will be gone, in milliseconds of the wall clock; 0: nobody says; None: it is not drained
    port:     where its raylet listens; 0: unknown
    ended:    does the host say itself that there is no raylet? Ray believes in it for a quarter of a minute longer
    """

    id: str
    name: str
    address: str = ""
    alive: bool = True
    has: Mapping[str, float] = {}  # as above
    labels: Mapping[str, str] = {}  # as above
    drain_ms: int | None = None
    port: int = 0
    ended: bool = False

    async def has_no_raylet(self) -> bool:
        """Does the host say itself, within `PROBE_S`, that nobody listens there? One that is silent may be cut off."""
        try:
            _, writer = await within(PROBE_S, asyncio.open_connection(self.address, self.port))
        except ConnectionRefusedError:
            return True
        except (OSError, asyncio.TimeoutError):
            return False
        writer.close()
        return False


class Group(NamedTuple):
    """The placement group of one node.

    id:         Ray's id
    name:       our name for it
    state:      PENDING, PREPARED, CREATED, RESCHEDULING or REMOVED
    scheduling: how far that is: QUEUED, NO_RESOURCES, INFEASIBLE, FINISHED ...
    wants:      the resources of its bundle
    """

    id: str
    name: str
    state: str = "CREATED"
    scheduling: str = ""
    wants: Mapping[str, float] = {}  # as above


class Place(NamedTuple):
    """What a node was launched with, as the key-value store keeps it.

    wants: the resources of its bundle
    avoid: names of hosts that it must not run on
    group: of a standby, whose next node it may be; empty: it is no standby
    shape: of a standby, what nodes it fits
    slow:  does its runtime environment need more than a new process?
    """

    wants: Mapping[str, float] = {}  # as above
    avoid: tuple[str, ...] = ()
    group: str = ""
    shape: str = ""
    slow: bool = False


class Snapshot(NamedTuple):
    """All of a run at one time.

    actors:   nodes' actors, by the nodes' names
    hosts:    by their ids
    groups:   placement groups by our names
    standbys: actors that are no nodes, by their own names
    retired:  those of them that no node will be
    """

    actors: Mapping[str, Actor]
    hosts: Mapping[str, Host]
    groups: Mapping[str, Group]
    standbys: Mapping[str, Actor] = {}  # as above
    retired: frozenset[str] = frozenset()

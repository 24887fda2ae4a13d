"""Parts masters' keepers that have come to share a host, so that the death of one host takes one of them alone.

Ray starts a keeper whose host has died wherever there is room, which may be beside the other one, and never moves an actor. So
each keeper looks now and then. The one with the lowest number on a host has the others made anew on hosts without any. It may die
in between; so one that is gone is made again, by the one with the lowest number of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from dlrover_backends.ray.records import Actor

LOOK_S = 30.0
"""Keepers that share a host at two looks in a row are parted: those of a start are moved by `masters.settle` meanwhile."""
SELDOM = 20
"""While all is well and no host comes or goes, one of so many looks reads the cluster's table of actors, which may be large."""


def moves(own: str, keepers: Collection[Actor], hosts: Collection[str]) -> dict[str, tuple[str, str]]:
    """The keepers that the one called ``own`` is to move: their actors' ids and where to, by their names.

    ``keepers``: those of the run that are not over; ``hosts``: ids of hosts that live and will stay
    """
    running = {one.name: one for one in keepers if one.state == "ALIVE" and one.host_id}
    if own not in running or len(running) < len(keepers):  # one that is started anew may come to any host
        return {}
    there = sorted((one for one in running.values() if one.host_id == running[own].host_id), key=_number)
    free = sorted(set(hosts) - {one.host_id for one in running.values()})
    if there[0].name != own:
        return {}
    return {one.name: (one.id, host) for one, host in zip(there[1:], free, strict=False)}


def gone(own: str, names: Sequence[str], keepers: Collection[Actor], hosts: Collection[str]) -> dict[str, str]:
    """The keepers that the one called ``own`` is to make: where, by their names.

    ``names``: what the keepers are called, by their numbers; ``keepers``, ``hosts``: as above
    """
    running = [one for one in keepers if one.state == "ALIVE" and one.name in names]
    if not running or min(running, key=_number).name != own:
        return {}
    there = {one.name: one.host_id for one in keepers}
    free = sorted(set(hosts) - set(there.values()))
    places = itertools.chain(free, itertools.cycle(sorted(hosts)))
    return dict(zip((one for one in names if one not in there), places, strict=False))


def is_well(names: Sequence[str], keepers: Collection[Actor], hosts: Collection[str]) -> bool:
    """Does each of them run, on a host that will stay? Then, while all hosts stay, Ray moves none."""
    running = {one.name for one in keepers if one.state == "ALIVE" and one.host_id in hosts}
    return running == set(names)


def _number(keeper: Actor) -> int:
    return int(keeper.name.rpartition("#")[2])

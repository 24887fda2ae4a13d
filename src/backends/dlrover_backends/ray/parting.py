"""Parts masters' keepers that have come to share a host, so that the death of one host takes one of them alone.

Ray starts a keeper whose host has died wherever there is room, which may be beside the other one, and never moves an actor. So
each keeper looks now and then. The one with the lowest number on a host has the others made anew on hosts without any.
"""

from __future__ import annotations

from collections.abc import Collection

from dlrover_backends.ray.records import Actor

LOOK_S = 30.0
"""Keepers that share a host at two looks in a row are parted: those of a start are moved by `masters.settle` meanwhile."""


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


def _number(keeper: Actor) -> int:
    return int(keeper.name.rpartition("#")[2])

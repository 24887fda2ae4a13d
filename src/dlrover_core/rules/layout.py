"""Layout of a world: survivors keep their places, newcomers take vacated places."""

from __future__ import annotations

from collections.abc import Sequence

from dlrover_core.job import nodes
from dlrover_core.job.names import group_of


def layout(before: Sequence[str], ready: Sequence[nodes.Node], count: int) -> list[nodes.Node]:
    """The chosen ``count`` of the ready nodes in rank order: survivors keep their places, newcomers take vacated ones.

    ``before``: the last world's nodes in rank order. A survivor beyond the new size moves into the first vacated place. A
    relaunched node gets its predecessor's place if that is still free. No node is named twice, and none is lost.
    """
    here = {node.node: node for node in ready}
    survivors = [name for name in before if name in here][:count]
    kept = set(survivors)
    newcomers = sorted(
        (node for node in ready if node.node not in kept), key=lambda node: (node.index, node.incarnation)
    )
    newcomers = newcomers[: count - len(survivors)]
    places: list[nodes.Node | None] = [None] * count
    moved = []
    for place, name in enumerate(before):
        if name in kept:
            if place < count:
                places[place] = here[name]
            else:
                moved.append(here[name])
    vacated = {name.rsplit("-", 1)[0]: place for place, name in enumerate(before[:count]) if name not in kept}
    late = []
    for node in newcomers:
        place = vacated.get(f"{node.group}-{node.index}", -1)
        if place >= 0 and places[place] is None:
            places[place] = node
        else:
            late.append(node)
    fill = iter([*moved, *late])
    return [node if node is not None else next(fill) for node in places]


def by_group(before: Sequence[str], ready: Sequence[nodes.Node], counts: Sequence[tuple[str, int]]) -> list[nodes.Node]:
    """The layout of a set of several groups: so many nodes of each group, group by group."""
    if len(counts) == 1:
        return layout(before, ready, counts[0][1])
    found: list[nodes.Node] = []
    for group, count in counts:
        found += layout(
            [name for name in before if group_of(name) == group], [node for node in ready if node.group == group], count
        )
    return found

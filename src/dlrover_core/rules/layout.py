"""Who goes where in a world: survivors stay, newcomers take what was vacated."""

from __future__ import annotations

from collections.abc import Sequence

from dlrover_core.job import nodes


def layout(before: Sequence[str], ready: Sequence[nodes.Node], count: int) -> list[nodes.Node]:
    """``count`` of the ready nodes in rank order: survivors stay where they were, newcomers take what was vacated.

    ``before`` is the last world's nodes in rank order. A place beyond the new size moves into the first hole. A relaunched
    node finds its predecessor's place if it is still free. Nobody is named twice, nobody is lost.
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

"""Who keeps a copy of whose states: in another failure domain as far as possible, everybody one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

ALONE = -1


def partners(domains: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """For each place the place that keeps its copy; `ALONE` where there is nobody else.

    ``domains``: of each place the failure domains that it lies in, coarsest first (its rack, its host), as many for each. Every
    place keeps exactly one other's copy. The places are laid out domain by domain, and each takes the one as many further on as
    the largest domain has places: no two of them can then lie in one domain, unless it holds more than half of all. So the
    coarsest kind of domain counts of which none does; where there is no such kind, the finest, and as many as can be lie
    elsewhere. Takes O(n log n), and depends on nothing but the argument.
    """
    places = len(domains)
    if places < 2:
        return (ALONE,) * places
    levels = len(domains[0])
    largest, known = places, 0
    for level in range(levels):
        known = level + 1
        largest = max(Counter(tuple(one[:known]) for one in domains).values())
        if 2 * largest <= places:
            break
    sizes = Counter(tuple(one[:known]) for one in domains)
    ordered = sorted(range(places), key=lambda place: (-sizes[tuple(domains[place][:known])], *domains[place], place))
    shift = largest % places or 1
    found = [ALONE] * places
    for at, place in enumerate(ordered):
        found[place] = ordered[(at + shift) % places]
    return tuple(found)

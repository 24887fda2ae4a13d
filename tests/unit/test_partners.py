"""Who keeps a copy of whose states: elsewhere as far as can be, everybody one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.checkpoint.partners import ALONE, partners

DOMAINS = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("12345678")), max_size=24)


@given(DOMAINS)
def test_everybody_keeps_one_and_nobody_its_own(domains: list[tuple[str, str]]) -> None:
    """Each place keeps exactly one copy, and that of another place; alone there is nobody."""
    found = partners(domains)
    if len(domains) < 2:
        assert found == (ALONE,) * len(domains)
    else:
        assert sorted(found) == list(range(len(domains)))
        assert all(partner != place for place, partner in enumerate(found))


@given(DOMAINS)
def test_copies_lie_in_other_domains(domains: list[tuple[str, str]]) -> None:
    """No copy shares a domain with its original where none has more than half of the places; the coarsest such kind counts."""
    found, places = partners(domains), len(domains)
    for known in (1, 2):
        sizes = Counter(one[:known] for one in domains)
        if places > 1 and 2 * max(sizes.values()) <= places:
            assert all(domains[place][:known] != domains[partner][:known] for place, partner in enumerate(found))
            return


@given(DOMAINS)
def test_as_many_as_can_be_lie_elsewhere(domains: list[tuple[str, str]]) -> None:
    """Where one domain has more than half, only as many of its copies stay in it as find no place outside."""
    found, places = partners(domains), len(domains)
    sizes = Counter(domains)
    if places > 1 and 2 * max(sizes.values()) > places:
        inside = sum(domains[place] == domains[partner] for place, partner in enumerate(found))
        assert inside == 2 * max(sizes.values()) - places


@given(DOMAINS)
def test_the_same_world_has_the_same_partners(domains: list[tuple[str, str]]) -> None:
    """Nothing but the domains counts: copies are not sent anew because somebody worked it out again."""
    assert partners(domains) == partners(list(domains))


@pytest.mark.parametrize("places", [2, 3, 16_384])
def test_every_node_on_its_own_host(places: int) -> None:
    """Without racks, each copy is on another host; sixteen thousand nodes are worked out at once."""
    found = partners([("", f"host-{place}") for place in range(places)])
    assert sorted(found) == list(range(places))
    assert all(partner != place for place, partner in enumerate(found))


def test_racks_before_hosts() -> None:
    """Four nodes in two racks: each copy is in the other rack, not only on another host."""
    racks = ["r1", "r1", "r2", "r2"]
    found = partners([(rack, f"host-{place}") for place, rack in enumerate(racks)])
    assert all(racks[place] != racks[partner] for place, partner in enumerate(found))

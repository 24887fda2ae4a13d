"""Paired checks: DLRover's behaviours 25 and 26, its chaos report, and what must not be concluded."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.diagnosis import pairing
from dlrover_core.diagnosis.pairing import FAULTY, GOOD, SLOWER, UNCLEAR, Groups, Outcome, Round, Verdict


def passed(took_s: float = 1.0, alone_s: float = 0.0) -> Outcome:
    """It did well."""
    return Outcome(True, took_s, alone_s=alone_s)


FAILED = Outcome(False, what="all_reduce timed out")
UNFIT = Outcome(False, fit=False, what="disk full")


def outcomes(times: Mapping[int, float], *failed: int) -> dict[int, Outcome]:
    """One round's, of those that did well in so long, and those that failed."""
    return {**{node: passed(took) for node, took in times.items()}, **dict.fromkeys(failed, FAILED)}


def kinds(verdicts: Mapping[int, Verdict]) -> dict[int, str]:
    """Everybody who is not simply good."""
    return {node: one.kind for node, one in verdicts.items() if one.kind != GOOD}


def played(groups: Groups, *ill: int, links: tuple[tuple[int, int], ...] = ()) -> Round:
    """A round in which a group fails that has one of the ``ill`` in it, or both ends of a broken link."""
    told: dict[int, Outcome] = {}
    for group in groups:
        bad = len(group) > 1 and (
            any(one in ill for one in group) or any(one in group and other in group for one, other in links)
        )
        told.update(dict.fromkeys(group, FAILED if bad else passed()))
    return Round(groups, told)


def checked(nodes: int, *ill: int, links: tuple[tuple[int, int], ...] = ()) -> dict[int, str]:
    """The verdicts of one whole check."""
    rounds = [played(pairing.first(nodes), *ill, links=links)]
    if pairing.doubtful(rounds[0].outcomes):
        rounds.append(played(pairing.second(rounds[0].outcomes), *ill, links=links))
    return kinds(pairing.judge(rounds))


# ---- who with whom


@pytest.mark.parametrize(
    ("nodes", "groups"),
    [
        (1, ((0,),)),
        (2, ((0, 1),)),
        (3, ((0, 1, 2),)),
        (4, ((0, 1), (2, 3))),
        (5, ((0, 1), (2, 3, 4))),
        (6, ((0, 1), (2, 3), (4, 5))),
    ],
)
def test_the_first_round_pairs_neighbours(nodes: int, groups: Groups) -> None:
    """Adjacent pairs by index; an odd last one makes the last group three."""
    assert pairing.first(nodes) == groups


def test_newcomers_work_with_those_known_to_be_good() -> None:
    """Each newcomer has a good partner as far as they go; the rest are paired among themselves."""
    assert pairing.first(1, 1) == ((0, 1),)
    assert pairing.first(2, 2) == ((0, 2), (1, 3))
    assert pairing.first(3, 1) == ((0, 3), (1, 2))
    assert pairing.first(2, 1) == ((0, 2), (1,))


def test_behaviour_25() -> None:
    """Four nodes: [0,1],[2,3]; node 3 fails; then [0,3],[1,2]; who passes later is at fault in nothing."""
    assert pairing.first(4) == ((0, 1), (2, 3))
    for failed in ((3,), (2, 3)):
        times = {node: 1.0 for node in range(4) if node not in failed}
        assert pairing.second(outcomes(times, *failed)) == ((0, 3), (1, 2))
    rounds = [
        Round(((0, 1), (2, 3)), outcomes({0: 1, 1: 1}, 2, 3)),
        Round(((0, 3), (1, 2)), outcomes(dict.fromkeys(range(4), 1))),
    ]
    assert kinds(pairing.judge(rounds)) == {}
    rounds[1] = Round(((0, 3), (1, 2)), outcomes({1: 1, 2: 1}, 0, 3))
    assert kinds(pairing.judge(rounds)) == {3: FAULTY}


def test_behaviour_26_six_nodes() -> None:
    """4 and 5 are slow at first; 0 is paired with 5; in both rounds slow is 5 alone."""
    before = outcomes(dict.fromkeys(range(4), 5.0) | {4: 15.0, 5: 15.0})
    assert pairing.slow(before) == [4, 5]
    groups = pairing.second(before)
    assert groups == ((0, 5), (1, 4), (2, 3))
    after = outcomes(dict.fromkeys((1, 2, 3, 4), 5.0) | {0: 15.0, 5: 15.0})
    verdicts = pairing.judge([Round(pairing.first(6), before), Round(groups, after)])
    assert kinds(verdicts) == {5: SLOWER}


def test_behaviour_26_five_nodes() -> None:
    """Groups [0,1],[2,3,4]; 0 and 1 slow at first; 1 alone in both rounds."""
    before = outcomes({0: 15.0, 1: 15.0, 2: 5.0, 3: 5.0, 4: 5.0})
    assert pairing.slow(before) == [0, 1]
    groups = pairing.second(before)
    assert groups == ((2, 1), (3, 0, 4))
    after = outcomes({0: 5.0, 1: 15.0, 2: 15.0, 3: 5.0, 4: 5.0})
    assert kinds(pairing.judge([Round(pairing.first(5), before), Round(groups, after)])) == {1: SLOWER}


def test_the_chaos_report() -> None:
    """CPU load on node 1 of 4, as DLRover measured it: node 1 is the straggler, and its partner of round 1 is not."""
    before = outcomes({0: 206.9, 1: 151.8, 2: 20.3, 3: 20.3})
    after = outcomes({2: 20.3, 3: 20.3, 0: 23.2, 1: 136.0})
    assert pairing.doubtful(before)
    assert pairing.slow(before) == [0, 1]
    verdicts = pairing.judge([Round(pairing.first(4), before), Round(pairing.second(before), after)])
    assert kinds(verdicts) == {1: SLOWER}
    assert "136 s where the median is 21.8 s" in verdicts[1].why
    replaced = outcomes({0: 21.4, 1: 22.8, 2: 21.0, 3: 22.9})
    assert not pairing.doubtful(replaced)


# ---- what is concluded, and what is not


def test_nobody_is_blamed_after_one_round() -> None:
    """A pair that failed once may be ill in either half: unclear, not faulty; and slow once is not slow."""
    first = Round(pairing.first(4), outcomes({0: 1.0, 1: 1.0}, 2, 3))
    assert kinds(pairing.judge([first])) == {2: UNCLEAR, 3: UNCLEAR}
    assert kinds(pairing.judge([Round(pairing.first(4), outcomes({0: 9.0, 1: 9.0, 2: 1.0, 3: 1.0}))])) == {}


def test_who_fails_alone_is_at_fault_at_once() -> None:
    """A full disk needs no partner to be found; who worked with it is tried again, and with nobody left stays good."""
    first = {0: UNFIT, 1: FAILED, 2: passed(), 3: passed()}
    assert pairing.doubtful(first)
    groups = pairing.second(first)
    assert groups == ((2, 1), (3,))
    verdicts = pairing.judge([Round(pairing.first(4), first), played(groups)])
    assert kinds(verdicts) == {0: FAULTY}
    assert verdicts[0].why == "disk full"
    assert kinds(pairing.judge([Round(((0, 1),), {0: UNFIT, 1: FAILED})])) == {0: FAULTY}


@pytest.mark.parametrize("nodes", range(4, 12))
def test_one_ill_node_among_many_is_found(nodes: int) -> None:
    """Of four nodes and more whichever is ill is named, and nobody else."""
    for ill in range(nodes):
        found = checked(nodes, ill)
        assert {node for node, kind in found.items() if kind == FAULTY} <= {ill}
        if nodes % 2 == 0:
            assert found == {ill: FAULTY}


def test_a_broken_link_is_nobodys_fault() -> None:
    """Two nodes that fail only with each other pass with others: nobody is evicted for the cable between them."""
    assert checked(4, links=((0, 1),)) == {}
    assert checked(6, links=((2, 3),)) == {}


def test_two_nodes_cannot_be_told_apart() -> None:
    """They fail together, twice: unclear, both."""
    assert checked(2, 0) == {0: UNCLEAR, 1: UNCLEAR}
    assert checked(2, 1) == {0: UNCLEAR, 1: UNCLEAR}


def test_three_nodes() -> None:
    """The one left out is exonerated with the others or stays unclear; a later check with good partners names it."""
    assert checked(3, 1) == {1: UNCLEAR}
    assert checked(3, 0) == {0: UNCLEAR, 1: UNCLEAR, 2: UNCLEAR}
    assert {pairing.second(outcomes({}, 0, 1, 2), turn=turn)[0] for turn in range(3)} == {(0, 2), (1, 0), (2, 1)}
    # The second check: node 1 with 0, then with 2, both found good.
    first = played(pairing.first(1, 2), 0)
    assert first.groups == ((0, 1),)
    groups = pairing.second(first.outcomes, good=(1, 2))
    assert groups[0] == (2, 0)
    assert kinds(pairing.judge([first, played(groups, 0)], known=(1, 2)))[0] == FAULTY


def test_few_nodes_are_slow_by_their_own_work() -> None:
    """Of two, both wait for the slower one: only what each did alone says which it is."""
    told = {0: passed(9.0, alone_s=0.5), 1: passed(9.0, alone_s=8.0)}
    assert kinds(pairing.judge([Round(((0, 1),), told), Round(((0, 1),), told)])) == {1: SLOWER}
    close = {0: passed(0.3, alone_s=0.05), 1: passed(0.3, alone_s=0.24)}
    assert kinds(pairing.judge([Round(((0, 1),), close), Round(((0, 1),), close)])) == {}


def test_a_tiny_median_makes_nobody_slow() -> None:
    """Thrice the median is nothing where that is milliseconds: the floor is 200 ms."""
    assert pairing.slow(outcomes({0: 0.02, 1: 0.02, 2: 0.02, 3: 0.06})) == []
    assert pairing.slow(outcomes({0: 0.02, 1: 0.02, 2: 0.02, 3: 0.23})) == [3]


def test_a_partner_that_ended_is_no_evidence() -> None:
    """Who failed because its partner's node went away is not blamed for it."""
    gone = Round(((0, 1), (2, 3)), {0: FAILED, 2: passed(), 3: passed()})
    assert kinds(pairing.judge([gone])) == {}


@given(st.integers(1, 40), st.data())
def test_everybody_works_exactly_once(nodes: int, data: st.DataObject) -> None:
    """Both rounds name each node once, and nobody works alone while another is free, three excepted."""
    failed = data.draw(st.sets(st.integers(0, nodes - 1)))
    told = {node: FAILED if node in failed else passed(float(node)) for node in range(nodes)}
    for groups in (pairing.first(nodes), pairing.second(told)):
        assert sorted(node for group in groups for node in group) == list(range(nodes))
        assert nodes in (1, 3) or all(1 < len(group) <= 3 for group in groups)


@given(st.integers(4, 30), st.data())
def test_good_nodes_are_never_called_faulty(nodes: int, data: st.DataObject) -> None:
    """However many are ill, or links broken: whoever is well is at most unclear."""
    ill = data.draw(st.sets(st.integers(0, nodes - 1)))
    found = checked(nodes, *ill)
    assert {node for node, kind in found.items() if kind == FAULTY} <= ill

"""Paired node checks: who works with whom in which round, and what two rounds say about whom.

A node that trains badly with a partner may be ill, or the partner may be. So nobody is blamed after one round. In the second
round, which is only needed where the first one showed something, the fastest works with the slowest, the second fastest with
the second slowest, and so on: whoever was dragged down by a partner is now with another one.

What is concluded, and what is not:

* What a node does alone (its disk, its own products) needs no partner: who is *unfit* there is faulty after one round.
* Faulty is who failed in every round that it took part in, the last time with a partner that is good: one that passed in some
  round, or that an earlier check had found good.
* Slow is who needed more than `SLOW` x the median in both rounds, and more than `FLOOR_S` beyond it; more than `SUSPECT` x in
  both is suspected to be broken.
* Where the evidence does not separate them (two nodes that fail together; a partner that is as doubtful), nobody is blamed:
  *unclear*. The three of one group are told apart, as far as that goes, by leaving one out of the second round.

Numbers stand for nodes: places in the list of those that are checked. Nothing here knows events or time.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

Groups = tuple[tuple[int, ...], ...]

SLOW, SUSPECT, FLOOR_S = 1.5, 3.0, 0.2
GOOD, SLOWER, FAULTY, UNCLEAR = "good", "slow", "faulty", "unclear"


class Outcome(NamedTuple):
    """What one node says of one round. ``fit``: it passed what it did alone, in ``alone_s``; ``took_s``: all it did.

    ``what`` says what failed.
    """

    ok: bool
    took_s: float = 0.0
    fit: bool = True
    alone_s: float = 0.0
    what: str = ""


class Round(NamedTuple):
    """Who worked together, and what came of it. Whoever ended meanwhile has no outcome."""

    groups: Groups
    outcomes: Mapping[int, Outcome]

    def partners(self, node: int) -> tuple[int, ...]:
        """Those that it worked with."""
        return next((tuple(one for one in group if one != node) for group in self.groups if node in group), ())


class Verdict(NamedTuple):
    """What is concluded about one node, and why."""

    kind: str
    why: str = ""


# ---- who with whom


def first(fresh: int, good: int = 0) -> Groups:
    """The first round: adjacent pairs, an odd last one joins the pair before it.

    Where ``good`` ones, known from before, follow the ``fresh`` ones, each fresh one works with one of them as far as they go.
    """
    mixed = [(one, fresh + one) for one in range(min(fresh, good))]
    return (*mixed, *_adjacent(list(range(len(mixed), fresh))))


def _adjacent(nodes: Sequence[int]) -> Groups:
    pairs = [tuple(nodes[at : at + 2]) for at in range(0, len(nodes), 2)]
    if len(pairs) > 1 and len(pairs[-1]) == 1:
        pairs[-2:] = [pairs[-2] + pairs[-1]]
    return tuple(pairs)


def second(outcomes: Mapping[int, Outcome], good: Collection[int] = (), turn: int = 0) -> Groups:
    """The second round: by time, the fastest with the slowest. Who failed is slowest; who is ``good`` from before, fastest.

    An odd one in the middle joins the last pair. Of three it stays out: another one at each ``turn``. The unfit take no part.
    """
    here = [node for node in {*outcomes, *good} if node not in outcomes or outcomes[node].fit]
    order = sorted(here, key=lambda node: (_time(outcomes.get(node)), node not in good, node))
    if len(order) == 3:
        turned = [*order[turn % 3 :], *order[: turn % 3]]
        return ((turned[0], turned[2]), (turned[1],))
    half = len(order) // 2
    pairs: list[tuple[int, ...]] = [(order[at], order[-1 - at]) for at in range(half)]
    if len(order) % 2:
        middle = (order[half],)
        pairs[-1:] = [(*pairs[-1], *middle)] if pairs else [middle]
    return tuple(pairs)


def _time(outcome: Outcome | None) -> float:
    if outcome is None:
        return -1.0
    return outcome.took_s if outcome.ok else float("inf")


# ---- what it says


def slow(outcomes: Mapping[int, Outcome], factor: float = SLOW, floor_s: float = FLOOR_S) -> list[int]:
    """Whose time in this round is more than ``factor`` x the median, and more than ``floor_s`` beyond it."""
    times = {node: one.took_s for node, one in outcomes.items() if one.ok}
    if not times:
        return []
    median = statistics.median(times.values())
    return sorted(node for node, took in times.items() if took > factor * median and took - median > floor_s)


def doubtful(outcomes: Mapping[int, Outcome]) -> bool:
    """Does this round ask for another one? Not for the sake of those that failed alone, but for whoever failed with them."""
    return any(one.fit and not one.ok for one in outcomes.values()) or bool(slow(outcomes))


def judge(rounds: Sequence[Round], known: Collection[int] = ()) -> dict[int, Verdict]:
    """What these rounds, one or two, say about everybody who took part; ``known``: good from an earlier check."""
    nodes = sorted({node for one in rounds for node in one.outcomes})
    passed = {node for node in nodes if _passes(node, rounds)}
    late = _slow(rounds)
    return {node: late.get(node) or _verdict(node, rounds, passed, known) for node in nodes}


def _passes(node: int, rounds: Sequence[Round]) -> bool:
    """Did it do well with others, or alone where it never had any?"""
    told = [(bool(one.partners(node)), one.outcomes[node].ok) for one in rounds if node in one.outcomes]
    shared = [ok for with_others, ok in told if with_others]
    return any(shared) if shared else all(ok for _, ok in told)


def _verdict(node: int, rounds: Sequence[Round], passed: Collection[int], known: Collection[int]) -> Verdict:
    seen = [one for one in rounds if node in one.outcomes]
    unfit = next((one for one in seen if not one.outcomes[node].fit), None)
    if unfit is not None:
        return Verdict(FAULTY, unfit.outcomes[node].what)
    if node in passed:
        return Verdict(GOOD)
    # It failed whenever it worked with others, and did well alone.
    shared = [(one, _sound(one, node)) for one in seen if one.partners(node)]
    blamed = [(one, partners) for one, partners in shared if partners]
    what = next((one.outcomes[node].what for one in reversed(seen) if not one.outcomes[node].ok), "")
    if not blamed:
        return Verdict(GOOD, "its partners failed alone; it did well alone")
    last, partners = blamed[-1]
    if len(shared) > 1 and last is shared[-1][0] and all(one in passed or one in known for one in partners):
        return Verdict(FAULTY, what)
    return Verdict(UNCLEAR, what)


def _sound(one: Round, node: int) -> tuple[int, ...]:
    """Its partners of a round, if that can say anything of it: not where one of them was unfit, or ended."""
    partners = one.partners(node)
    sound = all(other in one.outcomes and one.outcomes[other].fit for other in partners)
    return partners if sound else ()


def _slow(rounds: Sequence[Round]) -> dict[int, Verdict]:
    """Who was slow in both rounds; of two or three nodes, whose own work, alone, was."""
    outcomes = [one.outcomes for one in rounds]
    if len({node for one in outcomes for node in one}) <= 3:
        return _slow_alone(outcomes)
    if len(rounds) < 2:
        return {}
    both = set(slow(outcomes[0])) & set(slow(outcomes[1]))
    worse = set(slow(outcomes[0], SUSPECT)) & set(slow(outcomes[1], SUSPECT))
    return {node: Verdict(SLOWER, _times(outcomes, node, suspect=node in worse)) for node in both}


def _times(outcomes: Sequence[Mapping[int, Outcome]], node: int, *, suspect: bool) -> str:
    told = []
    for one in outcomes:
        median = statistics.median(other.took_s for other in one.values() if other.ok)
        told.append(f"{one[node].took_s:.3g} s where the median is {median:.3g} s")
    return f"{', then '.join(told)}{'; it may be broken' if suspect else ''}"


def _slow_alone(outcomes: Sequence[Mapping[int, Outcome]]) -> dict[int, Verdict]:
    """So few have no median, and partners wait for each other; what each needed alone is its own."""
    found: dict[int, Verdict] = {}
    if len(outcomes) < 2:
        return found
    least = [min((other.alone_s for other in one.values() if other.fit), default=0.0) for one in outcomes]
    for node in set(outcomes[0]) & set(outcomes[1]):
        times = [one[node].alone_s for one in outcomes]
        late = [took > SLOW * best and took - best > FLOOR_S for took, best in zip(times, least, strict=True)]
        if all(late) and outcomes[0][node].ok and outcomes[1][node].ok:
            told = ", then ".join(f"{took:.3g} s" for took in times)
            found[node] = Verdict(SLOWER, f"alone it needs {told}; the fastest {least[-1]:.3g} s")
    return found

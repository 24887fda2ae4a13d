"""Node checks: nodes are checked before they train, in pairs where asked for, and no node is blamed for its partner.

A check begins at the moment at which a world would form if all nodes had passed; the world waits for the verdict. Only
nodes without a verdict, or with one older than ``check_fresh_s``, are checked, so a plain restart costs no check. Idle
nodes known to be good help as partners. A late node is checked while the others train, before the world takes it in.

A check has at most two rounds (`diagnosis.pairing`). A round ends when every node has reported, or after ``check_s``: a
node that has not answered by then has failed. A node that ends in a round closes its group: its partners stop, and are
checked again. A faulty node leaves as any failed node does (incident, budget, quarantine). A slow node is reported, or
replaced.

Where the evidence does not separate nodes, none is blamed. They are checked again, if possible with partners found good
meanwhile. After `UNCLEAR_MAX` such checks they are released without a strike at their hosts. If no node at all passes, the
job fails and says so: other nodes would fail too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, get_args

from dlrover_core.diagnosis import pairing, signatures
from dlrover_core.diagnosis.evidence import CHECK
from dlrover_core.diagnosis.pairing import FAULTY, GOOD, SLOWER, UNCLEAR, Groups, Verdict
from dlrover_core.errors import Refused
from dlrover_core.job import evidence, job, nodes, plans, world
from dlrover_core.job.checks import (
    FULL,
    OFF,
    SLOW_WORDS,
    Check,
    CheckAsked,
    CheckJudged,
    CheckReported,
    CheckStarted,
    CheckWork,
    ReportCheck,
)
from dlrover_core.job.names import group_of
from dlrover_core.job.node_lifecycle import LIFECYCLE
from dlrover_core.job.ranges import Ranges, to_ranges
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, always, to_named
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import coupling, membership, slots, worlds
from dlrover_core.spec import us
from dlrover_core.words import first_few

FAILED, SLOW = "check.failed", "check.slow"
WHAT_MAX = 500
# The agents' own time limit is `check_s`; their reports need a moment.
GRACE_S = 5.0
# Checks without a conclusion after which a node is released.
UNCLEAR_MAX = 4


# ---- when a check begins, and of which nodes


def _helpers(state: JobState, group: str) -> list[nodes.Node]:
    """Idle nodes known to be good that are heard."""
    current = state.world.at(group)
    idle = [node for node in membership.ready_nodes(state, group) if not (current.active and current.member(node.node))]
    return sorted((node for node in idle if node.state != "suspect"), key=_place)


def _place(node: nodes.Node) -> tuple[int, int]:
    return node.index, node.incarnation


def _begin_at(state: JobState, group: str) -> int | None:
    """When a check of this group can begin if nothing else happens; None: never."""
    spec, checks, policy = state.job.spec, state.checks, state.job.policy(group)
    held = group in checks.running or membership.end_pending(state, group)
    if policy.precheck == OFF or not state.job.forms or held or not coupling.exists(state, group):
        return None
    current = state.world.at(group)
    if current.active:
        takes = (policy.on_join != "never" or bool(state.plans.leaving)) and not current.finished
        return state.at if takes and membership.unchecked(state, group) else None
    last_call, everybody, ready = membership.last_call(state, group), True, coupling.ready(state, group)
    for one, here in coupling.ready_by_group(state, group):
        floor, wanted = coupling.floor_of(state, group, one), coupling.wanted_of(state, group, one)
        if here // one.unit * one.unit < floor:
            return None
        everybody = everybody and here >= wanted // one.unit * one.unit >= floor
    begin_at = state.at if everybody else last_call
    if begin_at > state.at and ready > len(checks.good.get(group, ())):
        return begin_at  # a closer look can wait until then; looking at every arrival would cost a pass over thousands each
    if not (fresh := membership.unchecked(state, group)):
        return None
    if any(_stopping(current, node.node) for node in [*fresh, *_helpers(state, group)]):
        begin_at = max(begin_at, current.changed_at + us(spec.stop_grace_s + spec.kill_wait_s + spec.linger_s))
    if policy.precheck == FULL and not _with_stores(state, *_cast(state, group))[1]:
        begin_at = max(begin_at, last_call)
    return begin_at


def _stopping(last: world.World, node: str) -> bool:
    """May workers of the last world still run on this node, as far as is known?"""
    return last.member(node) is not None and node not in last.stopped and node not in last.finished


def _cast(state: JobState, group: str) -> tuple[list[nodes.Node], list[nodes.Node], Groups]:
    """The nodes in question, the helpers (at least two: the second round needs other partners), and the first round's groups."""
    fresh = sorted(membership.unchecked(state, group), key=_place)
    good = _helpers(state, group)[: max(2, len(fresh))] if state.job.policy(group).precheck == FULL else []
    if state.job.policy(group).precheck != FULL:
        return fresh, good, tuple((place,) for place in range(len(fresh)))
    return fresh, good, pairing.first(len(fresh), len(good))


def _with_stores(
    state: JobState, fresh: Sequence[nodes.Node], good: Sequence[nodes.Node], groups: Groups
) -> tuple[Groups, bool, tuple[str, ...]]:
    """The groups, led by members with a store; whether every group has one; and the stores.

    The members of a group without a store work alone.
    """
    names = [node.node for node in (*fresh, *good)]
    led: list[tuple[int, ...]] = []
    stores: list[str] = []
    whole = True
    for group in groups:
        leader = next((one for one in group if state.world.offers.get(names[one])), None) if len(group) > 1 else None
        if leader is None:
            whole = whole and len(group) == 1
            led += [(one,) for one in group]
            stores += [""] * len(group)
        else:
            led.append((leader, *(one for one in group if one != leader)))
            stores.append(state.world.offers[names[leader]][0])
    return tuple(led), whole, tuple(stores)


def _begin(state: JobState, group: str, now: int) -> Iterator[Event]:
    begin_at = _begin_at(state, group)
    if begin_at is None or begin_at > now:
        return
    fresh, good, groups = _cast(state, group)
    groups, _, stores = _with_stores(state, fresh, good, groups)
    active = state.world.at(group).active
    why = state.checks.asked.get(group) or ("late nodes" if active else "before training")
    yield CheckStarted(
        group,
        state.checks.number + 1,
        1,
        state.job.policy(group).precheck,
        to_ranges(fresh),
        to_ranges(good),
        groups,
        stores,
        active,
        why,
    )


# ---- decide


def _report(state: JobState, command: ReportCheck, now: int) -> Iterator[Event]:
    node = slots.present(state, command.node)
    check = state.checks.running.get(state.set_of(node.node))
    if check is None or (check.number, check.round) != (command.number, command.round):
        raise Refused(f"round {command.round} of check {command.number} is over")
    place = check.place(node.node)
    if place not in check.busy or place in check.outcomes:
        raise Refused(f"node {node.node!r} has no word in this round, or has said it already")
    took, alone = (max(0, one) for one in (command.took_us, command.alone_us))
    ok = command.ok and command.fit
    yield CheckReported(node.node, command.number, command.round, ok, command.fit, took, alone, command.what[:WHAT_MAX])


# ---- react: the course of a check


def _on_report(state: JobState, fact: CheckReported, record: Record) -> Iterator[Event]:
    yield from _advance(state, state.set_of(fact.node), record.at)


def _advance(state: JobState, group: str, now: int, *, late: bool = False) -> Iterator[Event]:
    """The next round, or the verdict, once no further report can come. ``late``: missing reports are no longer waited for."""
    check = state.checks.running.get(group)
    if check is None or not state.job.live:
        return
    if not late and any(True for _ in _awaited(state, check)):
        return
    silent = sorted(_awaited(state, check))
    if silent:
        for place in silent:
            what = f"no answer within {state.job.spec.check_s:g} s"
            yield CheckReported(check.members[place], check.number, check.round, False, False, 0, 0, what)
        return  # the last of these reports advances the check
    again = _second(state, check) if check.round == 1 and check.kind == FULL else None
    yield again if again is not None else _judged(state, group, check)


def _awaited(state: JobState, check: Check) -> Iterator[int]:
    """The places that have yet to report in this round. A node that lost a partner need not, and is not blamed for it."""
    return (one for one in check.silent if not closed(state, check, check.group_of(one)))


def _second(state: JobState, check: Check) -> CheckStarted | None:
    """The second round, if the first one left something unclear and a partner is left to work with; else None."""
    spoke = {place: one for place, one in check.outcomes.items() if here(state, check.members[place])}
    if not pairing.doubtful(spoke):
        return None
    good = [place for place in range(check.fresh, len(check.members)) if here(state, check.members[place])]
    turn = max((state.checks.unclear.get(check.members[place], 0) for place in spoke), default=0)
    groups = pairing.second(spoke, good, turn)
    if all(len(group) == 1 for group in groups):
        return None
    known = [state.nodes.nodes.get(name) for name in check.members]
    stand_in = [
        node or nodes.Node(name, group_of(name), 0, 0, 0) for node, name in zip(known, check.members, strict=True)
    ]
    led, _, stores = _with_stores(state, stand_in, (), groups)
    group = state.set_of(check.members[0])
    fresh, partners = (_ranges(state, part) for part in (check.members[: check.fresh], check.members[check.fresh :]))
    return CheckStarted(
        group, check.number, 2, check.kind, fresh, partners, led, stores, check.aside, "with other partners"
    )


def _ranges(state: JobState, names: Sequence[str]) -> Ranges:
    """Names as ranges, also of nodes that are gone."""
    found: list[nodes.Node] = []
    for name in names:
        group, index, incarnation = name.rsplit("-", 2)
        nproc = state.job.spec.group(group).nproc
        found.append(nodes.Node(name, group, int(index), int(incarnation), 0, nproc=nproc))
    return to_ranges(found)


def _judged(state: JobState, group: str, check: Check) -> CheckJudged:
    known = range(check.fresh, len(check.members))
    verdicts = pairing.judge(check.rounds, known)
    found, passed = [], []
    for place, verdict in sorted(verdicts.items()):
        name = check.members[place]
        if not here(state, name):
            continue
        # Skip UNCLEAR for helpers, and for nodes whose partner has ended since: the next check decides.
        if verdict.kind == UNCLEAR and (place in known or _bereft(state, check, place)):
            continue
        if verdict.kind in (GOOD, SLOWER):
            passed.append(name)
        if verdict.kind != GOOD:
            found.append((name, verdict.kind, _said(check, place, verdict)[:WHAT_MAX]))
    return CheckJudged(group, check.number, check.round, tuple(found), _ranges(state, passed))


def _bereft(state: JobState, check: Check, place: int) -> bool:
    """Has the node at this place worked with a partner that has ended?"""
    return any(not here(state, check.members[other]) for one in check.rounds for other in one.partners(place))


def _said(check: Check, place: int, verdict: Verdict) -> str:
    """The reason of a verdict, and the partners."""
    partners = {check.members[other] for one in check.rounds for other in one.partners(place) if place in one.outcomes}
    unfit = any(place in one.outcomes and not one.outcomes[place].fit for one in check.rounds)
    if verdict.kind == SLOWER or unfit or not partners:
        return verdict.why
    return f"{verdict.why} (with {', '.join(sorted(partners))})"


def _conclude(state: JobState, fact: CheckJudged, record: Record) -> Iterator[Event]:
    """Faulty nodes leave; slow ones are reported, and replaced if the spec says so; then a world forms, or a check begins."""
    bad = [(name, why) for name, kind, why in fact.found if kind == FAULTY or _hopeless(state, fact, name, kind)]
    for name, kind, why in fact.found:
        yield from _evident(state, name, kind, why)
    if _nobody_left(state, fact, bad):
        yield _nobody(state, fact, bad)
        return
    for name, why in bad:
        unsure = (
            "check_unclear: it cannot be told apart from its partners: "
            if _is(fact, name, UNCLEAR)
            else "check_failed: "
        )
        node = state.nodes.nodes.get(name)
        if node is not None and LIFECYCLE.may(node.state, "fail"):
            yield nodes.NodeFailed(name, -1, f"{unsure}{why}"[: nodes.TEXT_MAX], seen=False)
    drained = _slow_to_replace(state, fact) if state.job.spec.check_slow == "replace" else []
    yield from drained
    if not drained:
        # Where nodes are drained, their leave brings the others on.
        yield from _go_on(state, fact.group, record.at)


def _is(fact: CheckJudged, name: str, kind: str) -> bool:
    return any(one == name and other == kind for one, other, _ in fact.found)


def _hopeless(state: JobState, fact: CheckJudged, name: str, kind: str) -> bool:
    """Will a further check learn nothing about this node? Two nodes alone always fail together."""
    lonely = not state.checks.good.get(fact.group) and sum(_is(fact, one, UNCLEAR) for one, _, _ in fact.found) == 2
    return kind == UNCLEAR and (lonely or state.checks.unclear.get(name, 0) >= UNCLEAR_MAX)


def _evident(state: JobState, name: str, kind: str, why: str) -> Iterator[Event]:
    """The verdict as evidence. While a world runs, a faulty newcomer's own death tells as much."""
    known = signatures.table(state.job.spec.signatures).get({FAULTY: FAILED, SLOWER: SLOW}.get(kind, ""))
    node = state.nodes.nodes.get(name)
    if known is None or node is None or (kind == FAULTY and state.world.of(name).active):
        return
    yield evidence.EvidenceSeen(name, CHECK, known.id, known.verdict, known.confidence, why, host=node.host)


def _nobody_left(state: JobState, fact: CheckJudged, bad: Sequence[tuple[str, str]]) -> bool:
    """Have all nodes failed, and were they several, at once or one after the other? Such a failure is not the nodes' fault."""
    here = [node.node for node in state.nodes.in_set(fact.group) if node.ready]
    several = len(bad) > 1 or any(state.checks.failed.get(name.rsplit("-", 1)[0], 0) > 1 for name, _ in bad)
    return bool(bad) and several and {name for name, _ in bad}.issuperset(here)


def _nobody(state: JobState, fact: CheckJudged, bad: Sequence[tuple[str, str]]) -> Event:
    told = first_few([f"{name}: {why}" for name, why in bad], between="; ")
    unsure = any(_is(fact, name, UNCLEAR) for name, _ in bad)
    hint = "; which of them it is cannot be told from so few: run the check with more nodes" if unsure else ""
    root = f"node check: none of {len(bad)} nodes passed: {told}{hint}"
    return coupling.failed(state, fact.group, "precheck: a world needs nodes that pass their check", 0, root)


def _slow_to_replace(state: JobState, fact: CheckJudged) -> list[Event]:
    """Drains of slow nodes, at most one per place: a whole cluster may be as slow."""
    found: list[Event] = []
    for name, kind, why in fact.found:
        node = state.nodes.nodes.get(name)
        place = name.rsplit("-", 1)[0]
        if kind == SLOWER and node is not None and node.ready and place not in state.checks.replaced:
            found.append(plans.NodeDrained(name, node.host, f"{SLOW_WORDS}: {why}"[: nodes.TEXT_MAX]))
    return found


def _go_on(state: JobState, group: str, now: int) -> Iterator[Event]:
    if not state.job.live:
        return
    yield from worlds.form_where_awaited(state, group, now, "nodes are checked")
    if worlds.grows(state, group, now):
        yield from worlds.grow(state, group, now)
    yield from _begin(state, group, now)


@lru_cache(maxsize=8)
def _checked(spec_json: str) -> bool:
    """Is any set checked before it trains? Asked at most events, and in most jobs none is."""
    return any(policy.precheck != OFF for policy in job.policies(spec_json).values())


def _look(state: JobState, fact: Any, record: Record) -> Iterator[Event]:
    """Something has changed in a group: a check may begin now."""
    if not _checked(state.job.spec_json):
        return
    for name in _sets_of(state, fact):
        if state.job.policy(name).precheck != OFF:
            yield from _begin(state, name, record.at)


def _sets_of(state: JobState, fact: Any) -> Iterator[str]:
    """The sets that an event is about."""
    if isinstance(fact, job.GroupScaled):
        yield from state.sets.of_group(state.job.spec.group(fact.group))
    else:
        yield fact.group if hasattr(fact, "group") else state.set_of(fact.node)


def _checks(state: JobState) -> list[str]:
    """The sets that are checked before they train."""
    if not _checked(state.job.spec_json):
        return []
    return [name for name in coupling.sets(state) if state.job.policy(name).precheck != OFF]


def _look_at_all(state: JobState, fact: object, record: Record) -> Iterator[Event]:
    for name in _checks(state):
        yield from _begin(state, name, record.at)


def _on_end(state: JobState, fact: Any, record: Record) -> Iterator[Event]:
    """A node that ends in the middle of a round is no longer waited for."""
    if state.checks.running:
        yield from _advance(state, state.set_of(fact.node), record.at)
    yield from _look(state, fact, record)


# ---- time


def _deadline(state: JobState, check: Check) -> int:
    return max(check.began_at, state.job.calm_at) + us(state.job.spec.check_s + GRACE_S)


def _due(state: JobState) -> int | None:
    names = _checks(state) if state.job.live else []
    times = [_deadline(state, check) for check in state.checks.running.values()] if state.job.live else []
    begins = (_begin_at(state, name) for name in names)
    return min([*times, *(one for one in begins if one is not None)], default=None)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    if not state.job.live:
        return
    for group, check in list(state.checks.running.items()):
        if now >= _deadline(state, check):
            yield from _advance(state, group, now, late=True)
    for name in _checks(state):
        yield from _begin(state, name, now)


def here(state: JobState, name: str) -> bool:
    """Can this node still be checked?"""
    node = state.nodes.nodes.get(name)
    return node is not None and node.ready


def closed(state: JobState, check: Check, members: tuple[int, ...]) -> bool:
    """Has one of these members ended in this round, so that the others can report nothing more?"""
    return not all(here(state, check.members[one]) for one in members)


def ask(state: JobState, group: str, why: str, suspects: Collection[str] = ()) -> Iterator[Event]:
    """Ask for a check of these nodes (none: all of the group) before the next world, after a failure whose verdict is in doubt.

    Yields nothing where the job has no checks.
    """
    if state.job.policy(group).precheck != OFF and state.job.live:
        yield CheckAsked(group, tuple(suspects), why)


# ---- what agents are told


def _check_work(state: JobState, group: str) -> Mapping[str, CheckWork]:
    """The work of each node in the present round of a check."""
    check = state.checks.running.get(group)
    if check is None or not state.job.live:
        return {}
    told: dict[str, CheckWork] = {}
    for members, store in zip(check.groups, check.stores, strict=True):
        if closed(state, check, members):
            continue  # a member has ended, so the group's work cannot
        for rank, place in enumerate(members):
            told[check.members[place]] = CheckWork(
                number=check.number,
                round=check.round,
                kind=check.kind,
                rank=rank,
                size=len(members),
                store=store,
                others=tuple(check.members[one] for one in members if one != place),
                within_us=us(state.job.spec.check_s),
                at=check.began_at,
            )
    return told


RULES = Rules(
    decide={ReportCheck: _report},
    react={
        CheckReported: _on_report,
        CheckJudged: _conclude,
        CheckAsked: _look,
        nodes.NodeJoined: _look,
        world.StoreOffered: _look,
        world.WorkersStopped: _look,
        world.WorldDissolved: _look,
        job.GroupScaled: _look,
        job.JobResumed: _look_at_all,
        **dict.fromkeys(get_args(world.Ended), _on_end),
    },
    due=_due,
    tick=_tick,
    levels=dict.fromkeys((CheckStarted, CheckJudged), always),
    tells=to_named(_check_work),
)

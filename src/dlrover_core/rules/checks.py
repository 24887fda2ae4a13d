"""Checks: nodes are checked before they train, in pairs where asked for, and nobody is blamed for its partner.

A check begins at the moment at which a world would form, had everybody been checked; until it is judged the world waits. Only
those whose verdict is missing or older than ``check_fresh_s`` are checked, so that a plain restart costs nothing, and those known
to be good help as partners where they are idle. A late node is checked aside, while the others train, before it is taken in.
Two rounds at most (`diagnosis.pairing`); each ends when everybody has reported, or after ``check_s``: who has not answered by
then has failed. A node that ends in a round closes its group: its partners stop, and are checked again. The faulty leave as
failed nodes do (incident, budget, quarantine); the slow are reported, or replaced.

Whom the evidence does not separate nobody blames: they are checked again, with partners found good meanwhile where there are
any, and after `UNCLEAR_MAX` such checks are let go without a word against their hosts. Where nobody at all passes, the job ends
and says so: another node would fare no better.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
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
from dlrover_core.rules import membership, slots, worlds
from dlrover_core.spec import us

FAILED, SLOW = "check.failed", "check.slow"
WHAT_MAX = 500
NAMED_MAX = 8
# The agents' own time limit is `check_s`; their words need a moment.
GRACE_S = 5.0
# Checks without a conclusion after which a node goes.
UNCLEAR_MAX = 4


# ---- when a check begins, and of whom


def _helpers(state: JobState, group: str) -> list[nodes.Node]:
    """Nodes known to be good that do nothing, and can be heard."""
    current = state.world.worlds.get(group) or world.World()
    idle = [node for node in membership.ready_nodes(state, group) if not (current.active and current.member(node.node))]
    return sorted((node for node in idle if node.state != "suspect"), key=_place)


def _place(node: nodes.Node) -> tuple[int, int]:
    return node.index, node.incarnation


def _begin_at(state: JobState, group: str) -> int | None:
    """When a check of this group can begin if nothing else happens; None: not at all."""
    spec, checks = state.job.spec, state.checks
    if spec.precheck == OFF or not state.job.forms or group in checks.running or membership.end_pending(state, group):
        return None
    current = state.world.worlds.get(group) or world.World()
    if current.active:
        takes = (spec.on_join != "never" or bool(state.plans.leaving)) and not current.finished
        return state.at if takes and membership.unchecked(state, group) else None
    ready, unit, floor = state.nodes.tally.ready.get(group, 0), spec.group(group).unit, spec.group(group).floor
    last_call = membership.last_call(state, group)
    if ready // unit * unit < floor:
        return None
    everybody = ready >= slots.wanted(state, group) // unit * unit >= floor
    begin_at = state.at if everybody else last_call
    if begin_at > state.at and ready > len(checks.good.get(group, ())):
        return begin_at  # looked at closely when it comes: until then every arrival of thousands costs a look each
    if not (fresh := membership.unchecked(state, group)):
        return None
    if any(_stopping(current, node.node) for node in [*fresh, *_helpers(state, group)]):
        begin_at = max(begin_at, current.changed_at + us(spec.stop_grace_s + spec.kill_wait_s + spec.linger_s))
    if spec.precheck == FULL and not _with_stores(state, *_cast(state, group))[1]:
        begin_at = max(begin_at, last_call)
    return begin_at


def _stopping(last: world.World, node: str) -> bool:
    """Do workers of the last world still run there, for all that is known?"""
    return last.member(node) is not None and node not in last.stopped and node not in last.finished


def _cast(state: JobState, group: str) -> tuple[list[nodes.Node], list[nodes.Node], Groups]:
    """Who is in question, who helps (two for a lone one: it may need another partner), and who works with whom first."""
    fresh = sorted(membership.unchecked(state, group), key=_place)
    good = _helpers(state, group)[: max(2, len(fresh))] if state.job.spec.precheck == FULL else []
    if state.job.spec.precheck != FULL:
        return fresh, good, tuple((place,) for place in range(len(fresh)))
    return fresh, good, pairing.first(len(fresh), len(good))


def _with_stores(
    state: JobState, fresh: Sequence[nodes.Node], good: Sequence[nodes.Node], groups: Groups
) -> tuple[Groups, bool, tuple[str, ...]]:
    """The groups, each led by a member that offers a store; whether all have one; and the stores. Without, all work alone."""
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
    active = (state.world.worlds.get(group) or world.World()).active
    why = state.checks.asked.get(group) or ("late nodes" if active else "before training")
    yield CheckStarted(
        group,
        state.checks.number + 1,
        1,
        state.job.spec.precheck,
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
    check = state.checks.running.get(node.group)
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
    yield from _advance(state, group_of(fact.node), record.at)


def _advance(state: JobState, group: str, now: int, *, late: bool = False) -> Iterator[Event]:
    """The next round, or the verdict, once everybody has spoken who still can; or nobody is waited for any more."""
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
        return  # the last of these words advances it
    again = _second(state, check) if check.round == 1 and check.kind == FULL else None
    yield again if again is not None else _judged(state, group, check)


def _awaited(state: JobState, check: Check) -> Iterator[int]:
    """Who has yet to speak in this round. Whoever lost a partner in it need not, nor is that held against it."""
    return (one for one in check.silent if not closed(state, check, check.group_of(one)))


def _second(state: JobState, check: Check) -> CheckStarted | None:
    """The second round, where the first one leaves something to be told apart, and somebody is left to work with."""
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
    group = group_of(check.members[0])
    fresh, partners = (_ranges(state, part) for part in (check.members[: check.fresh], check.members[check.fresh :]))
    return CheckStarted(
        group, check.number, 2, check.kind, fresh, partners, led, stores, check.aside, "who is it: other partners"
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
        # A helper that fails once with somebody in question is still as good as it was; and of whom one has to be unsure only
        # because of somebody who has ended since, the next check will say more.
        if verdict.kind == UNCLEAR and (place in known or _bereft(state, check, place)):
            continue
        if verdict.kind in (GOOD, SLOWER):
            passed.append(name)
        if verdict.kind != GOOD:
            found.append((name, verdict.kind, _said(check, place, verdict)[:WHAT_MAX]))
    return CheckJudged(group, check.number, check.round, tuple(found), _ranges(state, passed))


def _bereft(state: JobState, check: Check, place: int) -> bool:
    """Has it worked with somebody who is no more?"""
    return any(not here(state, check.members[other]) for one in check.rounds for other in one.partners(place))


def _said(check: Check, place: int, verdict: Verdict) -> str:
    """Why, and with whom."""
    partners = {check.members[other] for one in check.rounds for other in one.partners(place) if place in one.outcomes}
    unfit = any(place in one.outcomes and not one.outcomes[place].fit for one in check.rounds)
    if verdict.kind == SLOWER or unfit or not partners:
        return verdict.why
    return f"{verdict.why} (with {', '.join(sorted(partners))})"


def _conclude(state: JobState, fact: CheckJudged, record: Record) -> Iterator[Event]:
    """The faulty go; the slow are told of, and replaced where that is wanted; then a world, or the next check."""
    bad = [(name, why) for name, kind, why in fact.found if kind == FAULTY or _hopeless(state, fact, name, kind)]
    for name, kind, why in fact.found:
        yield from _evident(state, name, kind, why)
    if _nobody_left(state, fact, bad):
        yield _nobody(fact, bad)
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
        # Whoever is drained leaves in reaction to that, and then those who stay go on.
        yield from _go_on(state, fact.group, record.at)


def _is(fact: CheckJudged, name: str, kind: str) -> bool:
    return any(one == name and other == kind for one, other, _ in fact.found)


def _hopeless(state: JobState, fact: CheckJudged, name: str, kind: str) -> bool:
    """Will nothing more be learnt of it? Two alone can only ever fail together."""
    lonely = not state.checks.good.get(fact.group) and sum(_is(fact, one, UNCLEAR) for one, _, _ in fact.found) == 2
    return kind == UNCLEAR and (lonely or state.checks.unclear.get(name, 0) >= UNCLEAR_MAX)


def _evident(state: JobState, name: str, kind: str, why: str) -> Iterator[Event]:
    """The verdict as evidence. Beside a running world a newcomer's failure is its own death's business alone."""
    known = signatures.table(state.job.spec.signatures).get({FAULTY: FAILED, SLOWER: SLOW}.get(kind, ""))
    node = state.nodes.nodes.get(name)
    if known is None or node is None or (kind == FAULTY and state.world.of(name).active):
        return
    yield evidence.EvidenceSeen(name, CHECK, known.id, known.verdict, known.confidence, why, host=node.host)


def _nobody_left(state: JobState, fact: CheckJudged, bad: Sequence[tuple[str, str]]) -> bool:
    """Is everybody there no good, and were there several, or one after the other? What fails everywhere is no node's fault."""
    here = [node.node for node in state.nodes.of(fact.group) if node.ready]
    several = len(bad) > 1 or any(state.checks.failed.get(name.rsplit("-", 1)[0], 0) > 1 for name, _ in bad)
    return bool(bad) and several and {name for name, _ in bad}.issuperset(here)


def _nobody(fact: CheckJudged, bad: Sequence[tuple[str, str]]) -> Event:
    told = [f"{name}: {why}" for name, why in bad[:NAMED_MAX]]
    if len(bad) > NAMED_MAX:
        told.append(f"and {len(bad) - NAMED_MAX} more")
    unsure = any(_is(fact, name, UNCLEAR) for name, _ in bad)
    hint = "; which of them it is cannot be told from so few: run the check with more nodes" if unsure else ""
    root = f"node check: none of {len(bad)} nodes passed: {'; '.join(told)}{hint}"
    return job.JobFailed("precheck: a world needs nodes that pass their check", 0, root)


def _slow_to_replace(state: JobState, fact: CheckJudged) -> list[Event]:
    """Each place once: a whole cluster may be as slow."""
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
    if worlds.growable(state, group) and worlds.grow_at(state, group) <= now:
        yield from worlds.grow(state, group, now)
    yield from _begin(state, group, now)


def _look(state: JobState, fact: Any, record: Record) -> Iterator[Event]:
    """Something has changed in a group: a check may begin now."""
    if state.job.spec.precheck != OFF:
        group = fact.group if hasattr(fact, "group") else group_of(fact.node)
        yield from _begin(state, group, record.at)


def _look_at_all(state: JobState, fact: object, record: Record) -> Iterator[Event]:
    if state.job.spec.precheck != OFF:
        for group in state.job.spec.groups:
            yield from _begin(state, group.name, record.at)


def _on_end(state: JobState, fact: Any, record: Record) -> Iterator[Event]:
    """Whoever goes in the middle of a round is waited for no more."""
    if state.checks.running:
        yield from _advance(state, group_of(fact.node), record.at)
    yield from _look(state, fact, record)


# ---- time


def _deadline(state: JobState, check: Check) -> int:
    return max(check.began_at, state.job.calm_at) + us(state.job.spec.check_s + GRACE_S)


def _due(state: JobState) -> int | None:
    if state.job.spec.precheck == OFF or not state.job.live:
        return None
    times = [_deadline(state, check) for check in state.checks.running.values()]
    begins = (_begin_at(state, group.name) for group in state.job.spec.groups)
    return min([*times, *(one for one in begins if one is not None)], default=None)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    if state.job.spec.precheck == OFF or not state.job.live:
        return
    for group, check in list(state.checks.running.items()):
        if now >= _deadline(state, check):
            yield from _advance(state, group, now, late=True)
    for group_spec in state.job.spec.groups:
        yield from _begin(state, group_spec.name, now)


def here(state: JobState, name: str) -> bool:
    """Is it still one that can be checked?"""
    node = state.nodes.nodes.get(name)
    return node is not None and node.ready


def closed(state: JobState, check: Check, members: tuple[int, ...]) -> bool:
    """Is there nothing more to be heard of those who work together, because one of them has ended in this round?"""
    return not all(here(state, check.members[one]) for one in members)


def ask(state: JobState, group: str, why: str, suspects: Collection[str] = ()) -> Iterator[Event]:
    """Let these nodes, or all of the group, be checked before the next world forms: after a failure whose verdict is in doubt.

    Yields nothing where the job does without checks.
    """
    if state.job.spec.precheck != OFF and state.job.live:
        yield CheckAsked(group, tuple(suspects), why)


# ---- what agents are told


def _check_work(state: JobState, group: str) -> Mapping[str, CheckWork]:
    """To each node that works in the present round of a check."""
    check = state.checks.running.get(group)
    if check is None or not state.job.live:
        return {}
    told: dict[str, CheckWork] = {}
    for members, store in zip(check.groups, check.stores, strict=True):
        if closed(state, check, members):
            continue  # what they began to do together cannot end
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

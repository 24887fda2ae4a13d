"""Pace: ranks that compute slower than they did, and losses that are no numbers. What the job knows of both, and does.

A straggler slows everybody: synchronous steps are as long as the slowest rank's. It is told at once (`SlowRank`, and as evidence,
so that it stands in every story), and it ends as an event, too. With ``slow_action`` ``replace`` its node is replaced once what
it has cost so far is as much as replacing it costs: the rule of whoever rents skis and does not know for how long. At worst that
costs twice what the best choice in hindsight would have. What it has cost is counted as if the job computed all the time; what
replacing costs is what the job's own replacements took, and ``slow_replace_s`` before there was one. Where half of the world or
more is slow nobody is replaced: that is no machine's fault.

A broken loss becomes evidence once per generation, for the ladder to answer with a restart. Where some of the ranks that report
had it first, it may be theirs; where all had it in the same step it is the run's, and no node is to blame. So is one that a
single rank reports of many: the others may have had it as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from dlrover_core.diagnosis import ladder, signatures
from dlrover_core.diagnosis.changepoint import SOUGHT
from dlrover_core.diagnosis.evidence import LOSS, SLOW
from dlrover_core.diagnosis.slots import GRADIENT, INFINITE
from dlrover_core.errors import Refused
from dlrover_core.job import changing, evidence, failures, hosts, job, nodes, world
from dlrover_core.job.crash_loops import AT_STEP
from dlrover_core.job.world import group_of
from dlrover_core.kernel.engine import Facts, Rules
from dlrover_core.kernel.events import Event, Record, event
from dlrover_core.spec import us

if TYPE_CHECKING:
    from dlrover_core.job.state import JobState

REPORT, REPLACE = "report", "replace"
SPIKE = "loss.spike"
PARTS = 10_000
RECOVERIES_KEPT = 16
STEP_DIGITS_MAX = 18
SLOW_MAX = 4096
RANKS_SHOWN = 8
SECOND_US = 1_000_000


@event(140)
class SlowRank(NamedTuple):
    """A rank takes ``now_us`` to compute a step, where it took ``before_us``, over the ``steps`` up to ``step``.

    ``peers``: what the others' costs did meanwhile, in parts of 10,000 of what they were.
    """

    node: str
    generation: int
    rank: int
    before_us: int
    now_us: int
    steps: int
    step: int
    peers: int


@event(141)
class SlowEnded(NamedTuple):
    """A rank computes as it did, after ``slow_us``."""

    node: str
    rank: int
    slow_us: int


@event(142)
class SlowReplaced(NamedTuple):
    """A node is replaced: its slow rank has cost ``lost_us``, replacing it costs ``cost_us``; ``measured``, or by the spec."""

    node: str
    rank: int
    lost_us: int
    cost_us: int
    measured: bool


@event(143)
class LossBroken(NamedTuple):
    """No finite loss from ``step`` on: ``ranks`` had it first, of ``reporting`` that tell theirs. ``how``: as in `slots`."""

    node: str
    generation: int
    rank: int
    step: int
    how: int
    ranks: int
    reporting: int


class NoteSlow(NamedTuple):
    """Beats tell that a rank became slower, by itself; the fields are those of `SlowRank`."""

    node: str
    generation: int
    rank: int
    before_us: int
    now_us: int
    steps: int
    peers: int
    step: int


class NoteRecovered(NamedTuple):
    """Beats tell that a slow rank computes as it did."""

    node: str
    generation: int
    rank: int


class NoteLoss(NamedTuple):
    """Beats tell that there is no finite loss any more; the fields are those of `LossBroken`."""

    node: str
    generation: int
    rank: int
    step: int
    how: int
    ranks: int
    reporting: int


class NoteLossJump(NamedTuple):
    """Beats tell that a rank's loss is ``times`` thousandths of what it was."""

    node: str
    generation: int
    rank: int
    step: int
    times: int


@dataclass(slots=True)
class Slow:
    """One slow rank, since when, and how slow."""

    node: str
    rank: int
    since: int
    before_us: int
    now_us: int

    def lost_us(self, now: int) -> int:
        """What it has cost: of every step the part that it takes longer."""
        return (now - self.since) * (self.now_us - self.before_us) // max(1, self.now_us)

    def costs_at(self, cost_us: int) -> int:
        """When it will have cost that much."""
        return self.since + cost_us * self.now_us // max(1, self.now_us - self.before_us)


@dataclass(slots=True)
class PaceSlice:
    """Slow ranks by node and rank; what replacements took; the generation whose loss was told to be broken, by group.

    ``jumps``: generation and step of the newest jump of a loss that was told, by group.
    """

    slow: dict[str, Slow] = field(default_factory=dict)
    replacing: list[int] = field(default_factory=list)
    recoveries: list[int] = field(default_factory=list)
    broken: dict[str, int] = field(default_factory=dict)
    jumps: dict[str, tuple[int, int]] = field(default_factory=dict)

    def standing(self) -> set[tuple[str, int]]:
        """Node and rank of every slow one."""
        return {(one.node, one.rank) for one in self.slow.values()}


def rank_key(node: str, rank: int) -> str:
    """How a slow rank is found: by its node and its number."""
    return f"{node}:{rank}"


def _member(state: JobState, node: str, generation: int, rank: int) -> world.Member:
    """The place of a rank in the world that runs. Raises `Refused`."""
    nodes.present(state, node)
    current = state.world.of(node)
    member = current.member(node)
    if not current.active or member is None or current.generation != generation:
        raise Refused(f"{node} is no member of a running generation {generation}")
    if not member.first_rank <= rank < member.first_rank + member.nproc:
        raise Refused(f"rank {rank} does not run on {node}")
    return member


# ---- decide: stragglers


def _slow(state: JobState, command: NoteSlow, now: int) -> Iterator[Event]:
    member = _member(state, command.node, command.generation, command.rank)
    if command.now_us <= command.before_us or command.before_us < 1:
        raise Refused(f"rank {command.rank} is not slower than it was")
    known = state.pace.slow.get(rank_key(command.node, command.rank))
    if known is not None and command.now_us < SOUGHT * known.now_us:
        raise Refused(f"rank {command.rank} is known to be slow")
    if len(state.pace.slow) >= SLOW_MAX:
        raise Refused(f"{SLOW_MAX} ranks are slow already")
    yield SlowRank(
        command.node,
        command.generation,
        command.rank,
        command.before_us,
        command.now_us,
        command.steps,
        command.step,
        command.peers,
    )
    slow = f"rank {command.rank} on {command.node} computes {_times(command)} slower than it did"
    measured = (
        f"(median {_ms(command.now_us)} vs {_ms(command.before_us)} over {command.steps} steps{_beside(command)})"
    )
    yield _evidence(state, command.node, command.generation, command.rank, SLOW, "slow.rank", f"{slow} {measured}")
    ranks = range(member.first_rank, member.first_rank + member.nproc)
    if member.nproc > 1 and all(rank_key(command.node, one) in state.pace.slow for one in ranks):
        text = f"all {member.nproc} ranks on {command.node} compute slower than they did: it is the node"
        yield _evidence(state, command.node, command.generation, -1, SLOW, "slow.rank", text)


def _times(command: NoteSlow) -> str:
    return f"{command.now_us / command.before_us:.2f}x"


def _beside(command: NoteSlow) -> str:
    return f", its peers {command.peers / PARTS:.2f}x" if command.peers else ""


def _ms(microseconds: int) -> str:
    return f"{microseconds / 1000:.3g} ms" if microseconds < SECOND_US else f"{microseconds / SECOND_US:.3g} s"


def _recovered(state: JobState, command: NoteRecovered, now: int) -> Iterator[Event]:
    slow = state.pace.slow.get(rank_key(command.node, command.rank))
    if slow is None:
        raise Refused(f"rank {command.rank} on {command.node} is not slow")
    yield SlowEnded(command.node, command.rank, max(0, now - slow.since))


# ---- decide: losses


def _loss(state: JobState, command: NoteLoss, now: int) -> Iterator[Event]:
    member = _member(state, command.node, command.generation, command.rank)
    group = group_of(command.node)
    if state.pace.broken.get(group) == command.generation:
        raise Refused(f"generation {command.generation} is known to have no finite loss")
    yield LossBroken(*command)
    whose = f"rank {command.rank} on {command.node}"
    what = {INFINITE: "an infinite loss", GRADIENT: "gradients that are no numbers"}.get(command.how, "a NaN loss")
    if command.ranks < command.reporting:
        more = f" and {command.ranks - 1} more" if command.ranks > 1 else ""
        text = f"{whose}{more} of {command.reporting} ranks had {what} first, in step {command.step}"
        signature, rank = "loss.nan", command.rank
    else:
        size = state.world.worlds[group].size
        who = (
            "all ranks"
            if command.reporting == size
            else f"{command.reporting} of {size} ranks, all that report theirs,"
        )
        text = f"{who} had {what} in step {command.step}"
        signature, rank = "loss.nan_everywhere", member.first_rank
    yield _evidence(state, command.node, command.generation, rank, LOSS, signature, text, command.step)


def _jump(state: JobState, command: NoteLossJump, now: int) -> Iterator[Event]:
    _member(state, command.node, command.generation, command.rank)
    generation, step = state.pace.jumps.get(group_of(command.node), (0, 0))
    if generation == command.generation and command.step <= step:
        # Beats repeat it, and a new leader has not heard that it was told.
        raise Refused(f"a jump of the loss in step {step} is known")
    text = f"the loss of rank {command.rank} on {command.node} is {command.times / 1000:.1f}x what it was, in step {command.step}"
    yield _evidence(state, command.node, command.generation, command.rank, LOSS, SPIKE, text, command.step)


def _evidence(
    state: JobState, node: str, generation: int, rank: int, source: str, signature: str, text: str, step: int = -1
) -> evidence.EvidenceSeen:
    known = signatures.table(state.job.spec.signatures).get(signature)
    assert known is not None, "a table has all that come with it"
    return evidence.EvidenceSeen(
        node,
        source,
        known.id,
        known.verdict,
        known.confidence,
        text[: evidence.TEXT_MAX],
        rank,
        generation,
        place=f"{AT_STEP}{step}" if step >= 0 else "",
        host=state.nodes.nodes[node].host,
        step=step,
    )


# ---- replacing


def cost_us(state: JobState) -> int:
    """What it takes to replace a node."""
    measured = state.pace.recoveries
    return round(median(measured)) if measured else us(state.job.spec.slow_replace_s)


def _candidates(state: JobState) -> Iterator[tuple[int, Slow]]:
    """Whose node may be replaced, and from when on that pays."""
    if state.job.spec.slow_action != REPLACE or not state.job.live:
        return
    cost = cost_us(state)
    for slow in state.pace.slow.values():
        current, node = state.world.of(slow.node), state.nodes.nodes.get(slow.node)
        ill = {one.node for one in state.pace.slow.values() if group_of(one.node) == group_of(slow.node)}
        here = node is not None and not node.released and slow.node not in state.planning.leaving
        if current.active and here and 2 * len(ill) < len(current.members):
            yield slow.costs_at(cost), slow


def _due(state: JobState) -> int | None:
    return min((at for at, _ in _candidates(state)), default=None)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    """One at a time: with the next world it is seen what that has brought."""
    for at, slow in sorted(_candidates(state), key=lambda one: (one[0], one[1].node, one[1].rank)):
        if now < at:
            return
        node, why = state.nodes.nodes[slow.node], f"rank {slow.rank} on {slow.node} was slow"
        yield SlowReplaced(slow.node, slow.rank, slow.lost_us(now), cost_us(state), bool(state.pace.recoveries))
        yield from hosts.keep_off(state, node.host, why, now)
        leave = changing.drained(state, node, node.host, why, now, us(state.job.spec.plan_s))
        if leave.deadline:
            yield leave  # where that can be without loss: once its successor is there
        else:
            yield from nodes.replace(state, slow.node)
        return


# ---- evolve


def _on_created(slice_: PaceSlice, fact: job.JobCreated, record: Record) -> None:
    """Of an earlier run's recoveries the costs stay true."""
    slice_.slow.clear()
    slice_.replacing.clear()
    slice_.broken.clear()
    slice_.jumps.clear()


def _on_slow(slice_: PaceSlice, fact: SlowRank, record: Record) -> None:
    key = rank_key(fact.node, fact.rank)
    since = slice_.slow[key].since if key in slice_.slow else record.at
    slice_.slow[key] = Slow(fact.node, fact.rank, since, fact.before_us, fact.now_us)


def _on_ended(slice_: PaceSlice, fact: SlowEnded, record: Record) -> None:
    slice_.slow.pop(rank_key(fact.node, fact.rank), None)


def _forget(slice_: PaceSlice, fact: world.Ended, record: Record) -> None:
    for key in [key for key, one in slice_.slow.items() if one.node == fact.node]:
        del slice_.slow[key]


def _on_broken(slice_: PaceSlice, fact: LossBroken, record: Record) -> None:
    slice_.broken[group_of(fact.node)] = fact.generation


def _on_evidence(slice_: PaceSlice, fact: evidence.EvidenceSeen, record: Record) -> None:
    told = fact.place.removeprefix(AT_STEP)
    if fact.signature == SPIKE and told.isdecimal() and len(told) <= STEP_DIGITS_MAX:
        slice_.jumps[group_of(fact.node)] = (fact.generation, int(told))


def _on_chosen(slice_: PaceSlice, fact: failures.ActionChosen, record: Record) -> None:
    if fact.action == ladder.RELAUNCH_NODE and fact.incident not in slice_.replacing:
        slice_.replacing = [*slice_.replacing[-RECOVERIES_KEPT:], fact.incident]


def _on_closed(slice_: PaceSlice, fact: failures.IncidentClosed, record: Record) -> None:
    """What a replacement took, and the steps it lost are not even in it."""
    if fact.incident in slice_.replacing:
        slice_.replacing.remove(fact.incident)
        slice_.recoveries = [*slice_.recoveries[-RECOVERIES_KEPT + 1 :], fact.down_us]


FACTS = Facts(
    kinds=(SlowRank, SlowEnded, SlowReplaced, LossBroken),
    evolve={
        job.JobCreated: _on_created,
        SlowRank: _on_slow,
        SlowEnded: _on_ended,
        LossBroken: _on_broken,
        evidence.EvidenceSeen: _on_evidence,
        failures.ActionChosen: _on_chosen,
        failures.IncidentClosed: _on_closed,
        nodes.NodeFailed: _forget,
        nodes.NodeGone: _forget,
        nodes.NodeLost: _forget,
        nodes.NodeReleased: _forget,
        nodes.NodeLeft: _forget,
        nodes.NodeSucceeded: _forget,
    },
)

RULES = Rules(
    decide={NoteSlow: _slow, NoteRecovered: _recovered, NoteLoss: _loss, NoteLossJump: _jump},
    due=_due,
    tick=_tick,
)

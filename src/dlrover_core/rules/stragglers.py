"""Stragglers and broken losses: both are reported at once; a slow node is replaced when that pays.

A straggler slows all ranks: a synchronous step takes as long as the slowest rank's. It is recorded at once (`SlowRank`, and
as evidence, so that every incident's story shows it), and so is its end. With ``slow_action`` ``replace``, its node is
replaced once the straggler has cost as much time as a replacement does. This is the break-even rule of the ski-rental
problem: it costs at most twice what the best choice in hindsight would have. The cost is counted as if the job computed all
the time. A replacement costs what earlier ones in this job took; before the first, ``slow_replace_s``. If half of the world
or more is slow, no node is replaced: the machines are not the cause.

A broken loss becomes evidence once per generation, and the ladder answers it with a restart. If only some of the reporting
ranks had it first, they may be at fault. If all had it in the same step, or a single rank reports for many, no node is
blamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from dlrover_core.diagnosis import signatures
from dlrover_core.diagnosis.changepoint import SOUGHT
from dlrover_core.diagnosis.evidence import LOSS, SLOW
from dlrover_core.diagnosis.slots import GRADIENT, INFINITE
from dlrover_core.errors import Refused
from dlrover_core.job import evidence, ranges, stragglers
from dlrover_core.job.crash_loops import AT_STEP
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules
from dlrover_core.kernel.events import Event
from dlrover_core.rules import hosts, plans, slots
from dlrover_core.spec import us

REPLACE = "replace"
SLOW_MAX = 4096
SECOND_US = 1_000_000


def _member(state: JobState, node: str, generation: int, rank: int) -> ranges.Member:
    """The place of a rank in the running world. Raises `Refused`."""
    slots.present(state, node)
    current = state.world.of(node)
    member = current.member(node)
    if not current.active or member is None or current.generation != generation:
        raise Refused(f"{node} is no member of a running generation {generation}")
    if not member.first_rank <= rank < member.first_rank + member.nproc:
        raise Refused(f"rank {rank} does not run on {node}")
    return member


# ---- decide: stragglers


def _slow(state: JobState, command: stragglers.NoteSlow, now: int) -> Iterator[Event]:
    member = _member(state, command.node, command.generation, command.rank)
    if command.now_us <= command.before_us or command.before_us < 1:
        raise Refused(f"rank {command.rank} is not slower than it was")
    known = state.stragglers.slow.get(stragglers.rank_key(command.node, command.rank))
    if known is not None and command.now_us < SOUGHT * known.now_us:
        raise Refused(f"rank {command.rank} is known to be slow")
    if len(state.stragglers.slow) >= SLOW_MAX:
        raise Refused(f"{SLOW_MAX} ranks are slow already")
    yield stragglers.SlowRank(
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
    if member.nproc > 1 and all(stragglers.rank_key(command.node, one) in state.stragglers.slow for one in ranks):
        text = f"all {member.nproc} ranks on {command.node} compute slower than they did: it is the node"
        yield _evidence(state, command.node, command.generation, -1, SLOW, "slow.rank", text)


def _times(command: stragglers.NoteSlow) -> str:
    return f"{command.now_us / command.before_us:.2f}x"


def _beside(command: stragglers.NoteSlow) -> str:
    return f", its peers {command.peers / stragglers.PARTS:.2f}x" if command.peers else ""


def _ms(microseconds: int) -> str:
    return f"{microseconds / 1000:.3g} ms" if microseconds < SECOND_US else f"{microseconds / SECOND_US:.3g} s"


def _recovered(state: JobState, command: stragglers.NoteRecovered, now: int) -> Iterator[Event]:
    slow = state.stragglers.slow.get(stragglers.rank_key(command.node, command.rank))
    if slow is None:
        raise Refused(f"rank {command.rank} on {command.node} is not slow")
    yield stragglers.SlowEnded(command.node, command.rank, max(0, now - slow.since))


# ---- decide: losses


def _loss(state: JobState, command: stragglers.NoteLoss, now: int) -> Iterator[Event]:
    member = _member(state, command.node, command.generation, command.rank)
    group = state.set_of(command.node)
    if state.stragglers.broken.get(group) == command.generation:
        raise Refused(f"generation {command.generation} is known to have no finite loss")
    yield stragglers.LossBroken(*command)
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


def _jump(state: JobState, command: stragglers.NoteLossJump, now: int) -> Iterator[Event]:
    _member(state, command.node, command.generation, command.rank)
    generation, step = state.stragglers.jumps.get(state.set_of(command.node), (0, 0))
    if generation == command.generation and command.step <= step:
        # Heartbeats repeat it, and a new leader does not know that it was recorded.
        raise Refused(f"a jump of the loss in step {step} is known")
    text = f"the loss of rank {command.rank} on {command.node} is {command.times / 1000:.1f}x what it was, in step {command.step}"
    yield _evidence(state, command.node, command.generation, command.rank, LOSS, stragglers.SPIKE, text, command.step)


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
    """The time that a replacement of a node costs."""
    measured = state.stragglers.recoveries
    return round(median(measured)) if measured else us(state.job.spec.slow_replace_s)


def _candidates(state: JobState) -> Iterator[tuple[int, stragglers.Slow]]:
    """Slow ranks whose node may be replaced, each with the time from which that pays."""
    if not state.job.live:
        return
    cost = cost_us(state)
    for slow in state.stragglers.slow.values():
        name = state.set_of(slow.node)
        if state.job.policy(name).slow_action != REPLACE:
            continue
        current, node = state.world.of(slow.node), state.nodes.nodes.get(slow.node)
        ill = {one.node for one in state.stragglers.slow.values() if state.set_of(one.node) == name}
        here = node is not None and not node.released and slow.node not in state.plans.leaving
        if current.active and here and 2 * len(ill) < len(current.members):
            yield slow.costs_at(cost), slow


def _due(state: JobState) -> int | None:
    return min((at for at, _ in _candidates(state)), default=None)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    """Replace one node at a time: the next world shows what it has brought."""
    for at, slow in sorted(_candidates(state), key=lambda one: (one[0], one[1].node, one[1].rank)):
        if now < at:
            return
        node, why = state.nodes.nodes[slow.node], f"rank {slow.rank} on {slow.node} was slow"
        yield stragglers.SlowReplaced(
            slow.node, slow.rank, slow.lost_us(now), cost_us(state), bool(state.stragglers.recoveries)
        )
        yield from hosts.keep_off(state, node.host, why, now)
        leave = plans.drained(state, node, node.host, why, now, us(state.job.spec.plan_s))
        if leave.deadline:
            yield leave  # without loss where possible: once the successor is ready
        else:
            yield from slots.replace(state, slow.node)
        return


RULES = Rules(
    decide={
        stragglers.NoteSlow: _slow,
        stragglers.NoteRecovered: _recovered,
        stragglers.NoteLoss: _loss,
        stragglers.NoteLossJump: _jump,
    },
    due=_due,
    tick=_tick,
)

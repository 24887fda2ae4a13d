"""Suspending: workers stop; unless the nodes are kept, what they hold is written to storage and all of them are released.

A suspension that frees the nodes begins at a step boundary where ranks can agree on one: a plan without joining and leaving
nodes (`rules.plans`) brings them there, and the job is suspended once the ranks of all sets wait. What the nodes hold is
written to storage, and its nodes are released when nothing is left to be written (`rules.freeing`). No node is planned
meanwhile. When the job is resumed, every wanted place gets a new node.

The command is refused, with what would be lost, until the person accepts the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from dlrover_core.errors import Refused
from dlrover_core.job import job, world
from dlrover_core.job.state import JobState
from dlrover_core.job.waiting import JOB, Wait
from dlrover_core.kernel.engine import Rules
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import coupling, freeing, membership, operations, plans, worlds
from dlrover_core.spec import us

# ---- decide


def _suspend(state: JobState, command: job.SuspendJob, now: int) -> Iterator[Event]:
    if not state.job.forms:
        raise Refused(f"the job is {state.job.state}{' already' if state.job.state == 'suspended' else ''}")
    if state.job.pausing:
        raise Refused("the job is about to be suspended already")
    membership.refuse_while_failing(state)
    if command.keep_nodes:
        yield job.JobSuspended(command.reason)
        return
    if state.job.spec.joining:
        raise Refused("the nodes of this job come by themselves, nobody could start them again: say --keep-nodes")
    lost = list(losses(state))
    if lost and not command.lose:
        raise Refused(
            f"its nodes would go, and what they have made is not on storage: {'; '.join(lost)}. --yes accepts that, "
            "--keep-nodes stops the workers and keeps the nodes"
        )
    if any(membership.able(state, name) for name in coupling.sets(state)):
        yield job.SuspensionPlanned(command.reason, now + us(state.job.spec.plan_s), command.lose)
    else:
        yield job.JobSuspended(command.reason, frees=True, lose=command.lose)


def _resume(state: JobState, command: job.ResumeJob, now: int) -> Iterator[Event]:
    if state.job.state != "suspended" and not state.job.pausing:
        raise Refused(f"the job is {state.job.state}; only a suspended one can be resumed")
    yield job.JobResumed(command.reason)


# ---- what would be lost


def losses(state: JobState) -> Iterator[str]:
    """What the job would lose with its nodes: a clause for every set with a state that is not on storage and will not be."""
    told = any(one.step >= 0 for one in state.progress.groups.values())
    for name in coupling.sets(state):
        kept, step = state.checkpoints.of(name), state.progress.of(name).step
        if name not in state.world.worlds or coupling.over(state, name):
            continue  # it has made nothing, or all that it was to make
        made = f"the {step} steps it has made are" if step >= 0 else "whatever it has made is"
        failing = [node for node in state.checkpoints.failing if state.set_of(node) == name]
        if not kept.generation and (step >= 0 or (state.sets.ends(name) and not told)):
            yield f"{name} saves nothing with FlashCheckpoint, and {made} lost unless its program saves by itself"
        elif kept.generation and not kept.url:
            yield f"{name} saves into memory alone, and {made} lost"
        elif failing:
            newest = f"step {kept.newest[1]} is the newest there" if kept.committed else "no step is there yet"
            yield f"{name} cannot write to {kept.url} now, where {newest}"


# ---- its beginning


def _asked(state: JobState, fact: job.SuspensionPlanned, record: Record) -> Iterator[Event]:
    for name in coupling.sets(state):
        yield from plans.advance(state, name, record.at)
    yield from _begin(state, record.at)


def _begin(state: JobState, now: int) -> Iterator[Event]:
    """Suspend the job, once all ranks that can wait at their boundary, or the time is over."""
    suspension = state.job.suspension
    if suspension is None or not state.job.pausing or _ends(state):
        return
    if now < _begin_at(state, suspension) and any(_comes(state, name) for name in coupling.sets(state)):
        return
    yield job.JobSuspended(suspension.reason, frees=True, lose=suspension.lose)


def _ends(state: JobState) -> bool:
    """Is the end of some set decided, with only its evidence awaited?"""
    return any(one.end_pending for one in state.incidents.by_number.values())


def _comes(state: JobState, name: str) -> bool:
    """Are ranks of a set on the way to the boundary of the suspension?"""
    plan = state.plans.by_group.get(name)
    if plan is None or not plan.pauses or not membership.able(state, name):
        return False
    return not plan.go_at or plan.awaited(len(state.world.worlds[name].members)) > 0


def _begin_at(state: JobState, suspension: job.Suspension) -> int:
    """When the job is suspended even if ranks have not reached their boundary."""
    held = [plans.held_until(state, plan) for plan in state.plans.by_group.values() if plan.pauses and plan.at_boundary]
    return min([suspension.deadline, *held])


def _come(state: JobState, fact: object, record: Record) -> Iterator[Event]:
    yield from _begin(state, record.at)


# ---- its course


def _pause(state: JobState, fact: job.JobSuspended, record: Record) -> Iterator[Event]:
    for name in coupling.sets(state):
        yield from worlds.dissolve(state, name, "the job is suspended", planned=True)
        yield from operations.recall(state, name)
    if state.job.freed:
        for name in list(state.sets.all(state.job.spec)):
            yield from freeing.begin(state, name, record.at, "the job is suspended")


def reason(state: JobState, name: str, now: int) -> Wait:
    """Why a set of a suspended job has no world, and what keeps its remaining nodes."""
    found = freeing.awaits(state, name, now)
    if found is None or all(node.released for node in state.nodes.in_set(name)):
        return Wait(name, JOB, "the job is suspended, without nodes")
    return found._replace(words=f"the job is suspended, and its nodes are released after this: {found.words}")


# ---- its end


def _go_on(state: JobState, fact: job.JobResumed, record: Record) -> Iterator[Event]:
    for name in coupling.sets(state):
        yield from plans.advance(state, name, record.at)
        yield from operations.recall(state, name)
        yield from worlds.form_where_awaited(state, name, record.at, "the job is resumed")


# ---- time


def _due(state: JobState) -> int | None:
    suspension = state.job.suspension
    if suspension is None:
        return None
    return _begin_at(state, suspension) if state.job.pausing and not _ends(state) else None


def _tick(state: JobState, now: int) -> Iterator[Event]:
    yield from _begin(state, now)


RULES = Rules(
    decide={job.SuspendJob: _suspend, job.ResumeJob: _resume},
    react={
        job.SuspensionPlanned: _asked,
        job.JobSuspended: _pause,
        job.JobResumed: _go_on,
        world.WorldDissolved: _come,
        world.WorkersFinished: _come,
        **dict.fromkeys(get_args(freeing.Word), _come),
    },
    due=_due,
    tick=_tick,
)

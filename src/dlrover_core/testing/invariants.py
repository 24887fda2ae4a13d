"""What must hold of every history, whatever was done to the job. `check` asks it of a cluster, `check_history` of a log.

Each function raises AssertionError with the sequence number at which the promise was broken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dlrover_core.job import failures, job, nodes, world
from dlrover_core.job.state import MODEL, JobState
from dlrover_core.kernel.engine import CommandFailed
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.state import digest
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing.cluster import Cluster


async def check(cluster: Cluster) -> JobState:
    """The log keeps every promise, and the leader's state is its fold. Returns that state."""
    state = check_history(await cluster.records())
    assert digest(state) == digest(cluster.state), "the master's state is not the fold of the log"
    return state


def check_history(records: Sequence[Record]) -> JobState:
    """Every promise about a log; returns its fold."""
    check_order(records)
    check_commands(records)
    check_worlds(records)
    check_sizes(records)
    check_nodes(records)
    check_incidents(records)
    # Folding is what proves that every transition was legal: an illegal one raises.
    return MODEL.fold(records)


def check_order(records: Sequence[Record]) -> None:
    """Numbers are contiguous, time and tokens never go back, causes come before what they caused."""
    at = token = 0
    for expected, record in enumerate(records, 1):
        assert record.seq == expected, f"record {record.seq} stands where {expected} should"
        assert record.at >= at, f"time goes back at {record.seq}"
        assert record.token >= token, f"token {record.token} writes at {record.seq} after {token}"
        assert 0 <= record.cause < record.seq, f"record {record.seq} is caused by {record.cause}"
        at, token = record.at, record.token


def check_commands(records: Iterable[Record]) -> None:
    """No command was decided twice, none of a sender's was left out, and deciding never raised."""
    last: dict[str, tuple[int, int]] = {}
    for record in records:
        assert not isinstance(record.event, CommandFailed), f"{record.seq}: {record.event}"
        if record.origin is not None:
            sender, boot, number = record.origin
            known, before = last.get(sender, (boot, 0))
            before = before if known == boot else 0
            assert number == before + 1, f"{record.seq}: {sender} says {number} after {before}"
            last[sender] = boot, number


def check_worlds(records: Iterable[Record]) -> None:
    """One world per generation, generations count on, every rank is held once, and by a node that was there."""
    generations: dict[str, int] = {}
    joined: set[str] = set()
    stores: set[str] = set()
    for record in records:
        fact = record.event
        if isinstance(fact, nodes.NodeJoined):
            joined.add(fact.node)
        elif isinstance(fact, (nodes.NodeFailed, nodes.NodeGone, nodes.NodeLost, nodes.NodeLeft)):
            joined.discard(fact.node)
        elif isinstance(fact, world.WorldFormed):
            assert fact.generation == generations.get(fact.group, 0) + 1, f"{record.seq}: generation {fact.generation}"
            generations[fact.group] = fact.generation
            members = world.from_ranges(fact.group, fact.members)
            ranks = [rank for member in members for rank in range(member.first_rank, member.first_rank + member.nproc)]
            assert ranks == list(range(len(ranks))), f"{record.seq}: ranks {ranks}"
            assert len({member.node for member in members}) == len(members), f"{record.seq}: a node is named twice"
            strangers = {member.node for member in members} - joined
            assert not strangers, f"{record.seq}: {sorted(strangers)} had not joined, or were gone"
            assert fact.store not in stores, f"{record.seq}: the store {fact.store} serves a second generation"
            stores.add(fact.store)


def check_sizes(records: Iterable[Record]) -> None:
    """Every world has a size that was in effect as it formed, and none forms while the job is suspended."""
    groups: dict[str, GroupSpec] = {}
    suspended = False
    for record in records:
        fact = record.event
        if isinstance(fact, job.JobCreated):
            groups = {group.name: group for group in JobSpec.from_json(fact.spec).groups}
            suspended = False
        elif isinstance(fact, job.GroupScaled):
            groups[fact.group] = replace(groups[fact.group], nodes_min=fact.nodes_min, nodes_max=fact.nodes_max)
        elif isinstance(fact, (job.JobSuspended, job.JobResumed)):
            suspended = isinstance(fact, job.JobSuspended)
        elif isinstance(fact, world.WorldFormed):
            assert not suspended, f"{record.seq}: a world forms though the job is suspended"
            group, size = groups[fact.group], sum(count for _, count, _, _ in fact.members)
            assert group.floor <= size <= group.nodes_max, f"{record.seq}: {size} nodes are not within {group}"
            assert size % group.unit == 0, f"{record.seq}: {size} nodes are no multiple of {group.unit}"


def check_nodes(records: Iterable[Record]) -> None:
    """Incarnations never go back, and no node is planned twice."""
    newest: dict[tuple[str, int], int] = {}
    for record in records:
        fact = record.event
        if isinstance(fact, nodes.NodePlanned):
            place = fact.group, fact.index
            assert fact.incarnation == newest.get(place, -1) + 1, (
                f"{record.seq}: {fact.node} follows {newest.get(place)}"
            )
            newest[place] = fact.incarnation


def check_incidents(records: Iterable[Record]) -> None:
    """Incidents count on, close once, and have at most one action in force: another needs a new verdict or a final one."""
    opened = 0
    verdicts: dict[int, int] = {}
    actions: dict[int, list[str]] = {}
    closed: set[int] = set()
    for record in records:
        fact = record.event
        if isinstance(fact, failures.IncidentOpened):
            assert fact.incident == opened + 1, f"{record.seq}: incident {fact.incident} after {opened}"
            opened = fact.incident
        elif isinstance(fact, failures.Diagnosed):
            assert fact.incident not in closed or fact.revises, f"{record.seq}: a closed incident is judged"
            verdicts[fact.incident] = verdicts.get(fact.incident, 0) + 1
        elif isinstance(fact, failures.ActionChosen):
            taken = actions.setdefault(fact.incident, [])
            final = taken[-1:] == ["AWAIT_EVIDENCE"]
            assert len(taken) < verdicts.get(fact.incident, 0) or final, (
                f"{record.seq}: {fact.action} on top of {taken}"
            )
            assert taken.count("RESTART_PROCESSES") == 0 or fact.action != "RESTART_PROCESSES", (
                f"{record.seq}: restarts twice"
            )
            assert fact.budget_left >= 0, f"{record.seq}: the budget is overdrawn"
            taken.append(fact.action)
        elif isinstance(fact, failures.IncidentClosed):
            assert fact.incident not in closed, f"{record.seq}: incident {fact.incident} closes twice"
            assert fact.down_us >= 0 and fact.steps_lost >= -1, f"{record.seq}: {fact}"
            closed.add(fact.incident)


def check_steps(cluster: Cluster) -> None:
    """Every step was made exactly once by whoever held the newest generation, in order, to the last."""
    training = cluster.training
    assert [step for _, step in training.log] == list(range(1, training.done + 1)), "a step was lost or made twice"
    generations = [generation for generation, _ in training.log]
    assert generations == sorted(generations), "an older generation made a step after a newer one"

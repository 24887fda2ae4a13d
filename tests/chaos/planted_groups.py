"""Bugs planted in the code of coupling sets, queues and addresses: seeds of jobs of several groups have to find them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

from tests.chaos.planted import BUGS, GROUPS, Patches, bug, evolves, nothing, reacts

from dlrover_core.job import clusters, incidents, job, nodes, queueing, world
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import coupling, freeing, slots, worlds
from dlrover_core.rules import queueing as queueing_rules
from dlrover_core.rules import silence as silence_rules
from dlrover_core.rules import suspension as suspension_rules


@bug("others_restarted", GROUPS)
def _others_restarted() -> Patches:
    """A member that is lost ends the worlds of those too that its set uses."""

    def on_loss(whole: JobState, fact: Any, record: Record) -> Iterator[Event]:
        yield from worlds._on_loss(whole, fact, record)
        uses = whole.job.spec.group(fact.node.rsplit("-", 2)[0]).uses if whole.job.live else ()
        for name in [name for one in uses for name in whole.sets.of_group(whole.job.spec.group(one))]:
            yield from worlds.dissolve(whole, name, f"{fact.node} used it")

    for cls in (nodes.NodeGone, nodes.NodeLost, nodes.NodeFailed):
        yield reacts(cls, worlds._on_loss, on_loss)


@bug("set_is_its_group", GROUPS)
def _set_is_its_group() -> Patches:
    """A world of one node alone takes whoever of its group is ready."""
    true = nodes.NodeSlice.in_set

    def in_set(slice_: nodes.NodeSlice, name: str) -> list[nodes.Node]:
        found = true(slice_, name)
        return slice_.of(slice_.sets.groups(name)[0]) if slice_.sets.place(name) >= 0 and found else found

    yield mock.patch.object(nodes.NodeSlice, "in_set", in_set)


@bug("launch_clock_runs", GROUPS)
def _launch_clock_runs() -> Patches:
    """What a node waited for its platform counts as its own delay, once it is placed."""
    true = nodes._note_wait

    def note_wait(node: nodes.Node, waits: str, at: int) -> None:
        true(node, waits, at)
        node.waited_us = 0

    yield mock.patch.object(nodes, "_note_wait", note_wait)


@bug("waiting_is_late", GROUPS)
def _waiting_is_late() -> Patches:
    """A node that its platform has no place for is given up after the time for joining."""
    true = silence_rules._patience

    def patience(whole: JobState, node: nodes.Node) -> int | None:
        with mock.patch.object(node, "waits", ""):
            return true(whole, node)

    yield mock.patch.object(silence_rules, "_patience", patience)


@bug("given_back_again", GROUPS)
def _given_back_again() -> Patches:
    """A set that gave its nodes back asks for them at once."""

    def release(whole: JobState, fact: queueing.GivenBack, record: Record) -> Iterator[Event]:
        yield from queueing_rules._release(whole, fact, record)
        whole.queueing.back.pop(fact.group, None)
        yield from queueing_rules._ask(whole, queueing.AskedAgain(fact.group), record)

    yield reacts(queueing.GivenBack, queueing_rules._release, release)


@bug("pause_never_over", GROUPS)
def _pause_never_over() -> Patches:
    """A set that gave its nodes back never asks again."""
    yield reacts(queueing.AskedAgain, queueing_rules._ask, nothing)


@bug("kept_nodes_go", GROUPS)
def _kept_nodes_go() -> Patches:
    """A job that is suspended gives its nodes back, though a person asked to keep them."""

    def pause(whole: JobState, fact: job.JobSuspended, record: Record) -> Iterator[Event]:
        yield from suspension_rules._pause(whole, fact, record)
        for node in list(whole.nodes.nodes.values()):
            if not node.released:
                yield from slots.release(whole, node, nodes.SUSPENDED)

    yield reacts(job.JobSuspended, suspension_rules._pause, pause)


@bug("freed_before_workers_stop", GROUPS)
def _freed_before_workers_stop() -> Patches:
    """The nodes of a suspended job are released while their workers stop, and before they have said what they hold."""
    yield mock.patch.object(freeing, "awaits", return_value=None)


@bug("version_stands_still", GROUPS)
def _version_stands_still() -> Patches:
    """Another node is named under a place, and the version of addresses stays what it was."""
    true = clusters.ClusterSlice.name

    def name(slice_: clusters.ClusterSlice, place: str, node: str) -> None:
        before = slice_.version, dict(slice_.changed)
        true(slice_, place, node)
        if node and before[0] > 1:
            slice_.version, slice_.changed = before

    yield mock.patch.object(clusters.ClusterSlice, "name", name)


@bug("the_gone_are_named", GROUPS)
def _the_gone_are_named() -> Patches:
    """Addresses of a node that is lost are told on."""
    yield evolves(nodes.NodeLost, clusters._on_ended, nothing)


@bug("all_are_needed", GROUPS)
def _all_are_needed() -> Patches:
    """The job fails with whichever set cannot go on."""

    def failed(whole: JobState, name: str, reason: str, incident: int, root: str) -> Event:
        return job.JobFailed(reason, incident, root)

    yield mock.patch.object(coupling, "failed", failed)


@bug("all_are_waited_for", GROUPS)
def _all_are_waited_for() -> Patches:
    """The job's end waits for sets that train until they are stopped."""
    true = worlds._ended

    def ended(whole: JobState, generation: int) -> Iterator[Event]:
        if all(coupling.over(whole, name) for name in whole.sets.all(whole.job.spec)):
            yield from true(whole, generation)

    yield mock.patch.object(worlds, "_ended", ended)


@bug("charged_to_the_neighbour", GROUPS)
def _charged_to_the_neighbour() -> Patches:
    """Restarts are charged to the first set, whichever failed."""
    true = incidents._accounts

    def accounts(slice_: incidents.IncidentSlice, name: str) -> list[Any]:
        return true(slice_, next(iter(slice_.by_set), name))

    yield mock.patch.object(incidents, "_accounts", accounts)


@bug("one_finished_is_all", GROUPS)
def _one_finished_is_all() -> Patches:
    """The job succeeds with the first set that has finished."""

    def all_finished(whole: JobState, fact: world.WorkersFinished, record: Record) -> Iterator[Event]:
        if whole.job.live and coupling.over(whole, whole.set_of(fact.node)):
            yield job.JobSucceeded(fact.generation)

    yield reacts(world.WorkersFinished, worlds._all_finished, all_finished)


__all__ = ["BUGS"]

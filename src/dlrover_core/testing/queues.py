"""Waiting is not failing, as a promise: what a platform has no place for costs its job nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dlrover_core.job import incidents, job, nodes, queueing
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.testing.promises import Look, Promise


class Waiting(Promise):
    """A node that waits for its platform is not given up for it, and costs no budget; nor does what was given back.

    Only who holds something gives it back, and nobody of that set is planned before its pause is over. A set that has a world
    gives its nodes back only with a set that waits, and while no set trains that the job's end waits for. The time that a node
    has for joining does not run while it waits.
    """

    name = "waiting"

    def __init__(self) -> None:
        self._waits: dict[str, tuple[int, str]] = {}
        self._waited_us: dict[str, int] = {}
        self._planned_at: dict[str, int] = {}
        self._back: set[str] = set()
        self._pauses: dict[str, int] = {}
        self._calm_at = 0

    def _created(self, _state: JobState, _fact: job.JobCreated, record: Record) -> None:
        for kept in (self._waits, self._waited_us, self._planned_at, self._back, self._pauses):
            kept.clear()
        self._calm_at = record.at

    def _calm(self, _state: JobState, _fact: object, record: Record) -> None:
        self._calm_at = record.at

    def _pending(self, _state: JobState, fact: nodes.NodePending, record: Record) -> None:
        if fact.waits:
            since, _ = self._waits.get(fact.node, (record.at, ""))
            self._waits[fact.node] = since, fact.waits
        else:
            self._placed(fact.node, record.at)

    def _placed(self, node: str, at: int) -> None:
        since, _ = self._waits.pop(node, (at, ""))
        if since < at:
            self._waited_us[node] = self._waited_us.get(node, 0) + at - since

    def _over(self, _state: JobState, fact: nodes.NodeRunning | nodes.NodeGone, record: Record) -> None:
        self._placed(fact.node, record.at)

    def _released(self, _state: JobState, fact: nodes.NodeReleased, record: Record) -> None:
        self._placed(fact.node, record.at)
        if fact.reason == nodes.GIVEN_BACK:
            self._back.add(fact.node)

    def _lost(self, state: JobState, fact: nodes.NodeLost, record: Record) -> None:
        _, waits = self._waits.get(fact.node, (0, ""))
        assert not waits, f"{record.seq}: {fact.node} is given up ({fact.reason}), and only waits: {waits}"
        if fact.reason.startswith("did not start") and fact.node in self._planned_at:
            began = max(self._planned_at[fact.node] + self._waited_us.get(fact.node, 0), self._calm_at)
            launch_s = state.job.spec.launch_s
            had_s = (record.at - began) / 1e6
            assert had_s >= launch_s, f"{record.seq}: {fact.node} had {had_s} s for joining, of {launch_s}"

    def _failed(self, _state: JobState, fact: nodes.NodeFailed, record: Record) -> None:
        _, waits = self._waits.get(fact.node, (0, ""))
        self._placed(fact.node, record.at)
        assert not waits or fact.seen, f"{record.seq}: {fact.node} fails unseen, and only waits: {waits}"

    def _opened(self, _state: JobState, fact: incidents.IncidentOpened, record: Record) -> None:
        self._blameless(fact.node, f"{record.seq}: incident {fact.incident} over")

    def _chosen(self, _state: JobState, fact: incidents.ActionChosen, record: Record) -> None:
        self._blameless(fact.node, f"{record.seq}: {fact.action} for")

    def _blameless(self, node: str, what: str) -> None:
        assert node not in self._back, f"{what} {node}, which was given back"
        assert node not in self._waits, f"{what} {node}, which only waits"

    def _gave(self, _state: JobState, fact: queueing.GivenBack, record: Record) -> None:
        # Who waits beside one that holds something gives back its place in the queue, for the same time.
        alone = fact.until not in self._pauses.values()
        assert fact.held or not alone, f"{record.seq}: {fact.group} gives back, and holds nothing"
        assert fact.until > record.at, f"{record.seq}: {fact.group} asks again at {fact.until}, at once"
        self._pauses[fact.group] = fact.until

    def _asked(self, _state: JobState, fact: queueing.AskedAgain, record: Record) -> None:
        until = self._pauses.pop(fact.group)
        assert record.at >= until, f"{record.seq}: {fact.group} asks again {until - record.at} us before its time"

    def _planned(self, state: JobState, fact: nodes.NodePlanned, record: Record) -> None:
        name = state.sets.at(fact.group, fact.index)
        until = self._pauses.get(name)
        assert until is None, f"{record.seq}: {fact.node} is planned, and {name} pauses until {until}"
        self._planned_at[fact.node] = record.at

    looks: ClassVar[Mapping[type, Look]] = {
        job.JobCreated: _created,
        **dict.fromkeys((job.LeaderStarted, job.MasterPaused, job.JobResumed), _calm),
        nodes.NodePending: _pending,
        nodes.NodeRunning: _over,
        nodes.NodeJoined: _over,
        nodes.NodeGone: _over,
        nodes.NodeReleased: _released,
        nodes.NodeLost: _lost,
        nodes.NodeFailed: _failed,
        nodes.NodePlanned: _planned,
        incidents.IncidentOpened: _opened,
        incidents.ActionChosen: _chosen,
        queueing.GivenBack: _gave,
        queueing.AskedAgain: _asked,
    }

"""A scheduler levelled to what a leader desires, by the rules of `dlrover_core.runtime.levelling`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dlrover_core.errors import LaunchRefused
from dlrover_core.job import notices
from dlrover_core.job.nodes import REFUSED, Observed, ObserveNodes
from dlrover_core.job.orders import Desired, NodeLaunch
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Command
from dlrover_core.rules.desired import deletion_grace_s
from dlrover_core.sim.clock import SECOND_US, Clock
from dlrover_core.sim.network import Network
from dlrover_core.sim.scheduler import Scheduler

# As there; tests/unit/test_sim_rules.py compares them.
BACK_OFF_S = (0.2, 1.0, 5.0, 15.0, 30.0)

Call = tuple[str, str]


class Leader(Protocol):
    """Whose desired is levelled to."""

    desired: Desired
    token: int

    @property
    def state(self) -> JobState:
        """The working state."""
        ...

    def held(self, call: Callable[..., None], *args: Any) -> bool:
        """Is its process stopped? Then the call comes when it goes on."""
        ...

    def name_of(self, node: str) -> str:
        """A node's name in the scheduler."""
        ...

    def submit(self, command: Command) -> None:
        """Hear this."""
        ...


class Site(Protocol):
    """What a leveller needs of a run."""

    clock: Clock
    network: Network
    scheduler: Scheduler


class Leveller:
    """What one leader knows of its scheduler, and what it has asked of it."""

    def __init__(self, sim: Site, leader: Leader) -> None:
        self._sim, self._clock, self._leader = sim, sim.clock, leader
        self._listed: dict[str, Observed] = {}
        self._known = self._woken = self._clearing = False
        self._accepted: set[str] = set()
        self._failures: dict[Call, int] = {}
        self._not_before: dict[Call, int] = {}
        self._wakes_at = 0

    def observe(self, ago_us: int = 0) -> None:
        """List everything, as it is or as it was a while ago; changes follow."""
        self._clock.later(self._sim.network.hop_us, 0, self._listing, self._sim.scheduler.listed(ago_us))

    def _listing(self, nodes: tuple[Observed, ...]) -> None:
        if self._leader.held(self._listing, nodes):
            return
        name = self._leader.name_of
        self._known = True
        self._listed = {name(seen.node): seen for seen in nodes}
        self._accepted &= set(self._listed)
        self._leader.submit(ObserveNodes(nodes, complete=True))
        self._tell_notices(nodes)
        self.wake()

    def changed(self, seen: Observed) -> None:
        """One node changed."""
        self._clock.later(self._sim.network.hop_us, 0, self._seen, seen)

    def _seen(self, seen: Observed) -> None:
        if self._leader.held(self._seen, seen):
            return
        name = self._leader.name_of(seen.node)
        if seen.phase == "gone":
            self._listed.pop(name, None)
        else:
            self._listed[name] = seen
        self._leader.submit(ObserveNodes((seen,)))
        self._tell_notices((seen,))
        self.wake()

    def _tell_notices(self, nodes: tuple[Observed, ...]) -> None:
        for command in notices.told(self._leader.state.notices, nodes):
            self._leader.submit(command)

    def clear(self) -> None:
        """The job is over and has waited long enough: delete whatever is left."""
        self._clearing = True
        self.wake()

    def wake(self) -> None:
        """Level as soon as everything of this instant is told."""
        if not self._woken:
            self._woken = True
            self._clock.later(0, 0, self._pass)

    def _pass(self) -> None:
        if self._leader.held(self._pass):
            return
        self._woken = False
        if not self._known:
            return
        desired = self._leader.desired
        for node in desired.launch:
            if node.name not in self._listed and node.name not in self._accepted:
                self._call(("launch", node.name), node)
        for name in [name for name in self._listed if self._clearing or name not in desired.names]:
            self._call(("delete", name), None)
        self._wake_again()

    def _call(self, call: Call, node: NodeLaunch | None) -> None:
        now = self._clock.now
        if self._not_before.get(call, 0) > now:
            return
        token = self._leader.token
        try:
            if node is not None:
                self._sim.scheduler.launch(node, token)
                self._accepted.add(node.name)
            else:
                grace_s = deletion_grace_s(self._leader.state, call[1])
                self._sim.scheduler.delete(call[1], token, grace_s)
            self._failures.pop(call, None)
            self._not_before[call] = now + round(BACK_OFF_S[-1] * SECOND_US)
        except Exception as error:  # noqa: BLE001  # a scheduler may raise anything; it is asked again
            if node is not None and isinstance(error, LaunchRefused) and not error.permanent:
                self._leader.submit(ObserveNodes((Observed(node.node, REFUSED, waits=error.reason),)))
            failures = self._failures.get(call, 0)
            self._failures[call] = failures + 1
            self._not_before[call] = now + round(BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)] * SECOND_US)

    def _wake_again(self) -> None:
        """When the next call may be made again; those whose node is neither there nor wanted are forgotten."""
        now = self._clock.now
        alive = set(self._listed) | {node.name for node in self._leader.desired.launch}
        for table in (self._not_before, self._failures):
            for call in [call for call in table if call[1] not in alive]:
                del table[call]
        times = [
            at
            for (verb, name), at in self._not_before.items()
            if at > now and (verb == "delete" or (name not in self._listed and name not in self._accepted))
        ]
        if times and (self._wakes_at <= now or min(times) < self._wakes_at):
            self._wakes_at = min(times)
            self._clock.at(self._wakes_at, 0, self._again, self._wakes_at)

    def _again(self, at: int) -> None:
        if at == self._wakes_at:
            self.wake()

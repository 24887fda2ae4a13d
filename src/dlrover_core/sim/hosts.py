"""Hosts in racks: where nodes run, and what takes them away for a while. A host runs one node."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dlrover_core.errors import PlanError
from dlrover_core.job.nodes import AVOIDED
from dlrover_core.sim.clock import Clock, key_of
from dlrover_core.sim.scenario import Scenario
from dlrover_core.spec import us

NO_ROOM = "no room: every host is taken"
SICK_AFTER_US = 10_000_000
"""Workers on a sick host die this long after their start: a bad GPU shows as soon as it computes."""


@dataclass(slots=True)
class Host:
    """One machine. It is down, and sick, until these instants; ``node`` runs on it, empty: nobody does."""

    name: str
    number: int
    rack: int
    down_until: int = -1
    sick_until: int = -1
    cause: str = ""
    node: str = ""


class Hosts:
    """All hosts. ``back`` is called when one can be used again."""

    def __init__(self, scenario: Scenario, clock: Clock) -> None:
        self._clock = clock
        self.back: Callable[[], None] = lambda: None
        count = scenario.hosts
        self.hosts = [Host(f"host-{one}", one, one // scenario.hosts_per_rack) for one in range(count)]
        for host in self.hosts[count - scenario.short :] if scenario.short else ():
            self.take_down(host, us(scenario.room_s))
        self._by_name = {host.name: host for host in self.hosts}
        self.racks = self.hosts[-1].rack + 1
        # The numbers of those that nobody runs on, up or down, in order.
        self._free = list(range(count))

    def __getitem__(self, name: str) -> Host:
        """The host of that name. Raises `PlanError`."""
        if name not in self._by_name:
            raise PlanError(f"there is no host {name!r}: there are host-0 to host-{len(self.hosts) - 1}")
        return self._by_name[name]

    def find(self, avoid: tuple[str, ...]) -> Host | None:
        """The lowest free host that is up and is not to be avoided."""
        shunned = set(avoid)
        return next((host for host in self._up_and_free() if host.name not in shunned), None)

    def why_not(self) -> str:
        """Why a node that was not placed has no host."""
        free = [host.name for host in self._up_and_free()]
        return f"{AVOIDED}: {', '.join(free)}" if free else NO_ROOM

    def _up_and_free(self) -> Iterator[Host]:
        now = self._clock.now
        return (self.hosts[number] for number in self._free if self.hosts[number].down_until <= now)

    def take(self, host: Host, node: str) -> None:
        """A node runs on it from now on."""
        host.node = node
        del self._free[bisect_left(self._free, host.number)]

    def free(self, host: Host, node: str) -> bool:
        """The node has ended; did it run there until now?"""
        if host.node != node:
            return False
        host.node = ""
        insort(self._free, host.number)
        return True

    def usable(self) -> int:
        """How many hosts are up."""
        return sum(host.down_until <= self._clock.now for host in self.hosts)

    def take_down(self, host: Host, for_us: int) -> None:
        """It is gone, and back after so long."""
        host.down_until = max(host.down_until, self._clock.now + for_us)
        self._clock.later(for_us, key_of(host.name), self._up, host)

    def _up(self, host: Host) -> None:
        if host.down_until <= self._clock.now:
            self.back()

    def sicken(self, host: Host, for_us: int, cause: str) -> None:
        """Its workers die soon after each start, until it is cured."""
        host.sick_until, host.cause = self._clock.now + for_us, cause

    def rack(self, target: str | int) -> list[Host]:
        """The hosts of a rack, by its name or its number, counted around."""
        number = target if isinstance(target, int) else _number(target, "rack")
        return [host for host in self.hosts if host.rack == number % self.racks]


def _number(name: str, kind: str) -> int:
    begins, _, number = name.rpartition("-")
    if begins != kind or not number.isdigit():
        raise PlanError(f"{name!r} is no {kind}: there are {kind}-0, {kind}-1 ...")
    return int(number)

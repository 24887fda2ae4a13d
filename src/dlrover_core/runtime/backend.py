"""The `Backend` port: a scheduler that starts and deletes nodes, and reports what it observes.

A backend translates and never decides. Everything else (ladders, budgets, worlds, bounded concurrency, back-off) is core.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from typing import NamedTuple, Protocol, Union, runtime_checkable

from dlrover_core.diagnosis import evidence
from dlrover_core.job import nodes
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.spec import JobSpec

AVOIDED, DELETED, PRINTED = nodes.AVOIDED, nodes.DELETED, evidence.PRINTED

PHASES = ("pending", "running", "lost", "succeeded", "failed", "gone")


class Observation(NamedTuple):
    """What a backend sees of one node.

    name:      the node's, as it was launched
    phase:     one of `PHASES`; ``lost``: the platform cannot reach its host. A node whose agent is silent then is replaced at
               once, on another host; one whose agent is heard is not. A backend says it again with every `Listed`
    exit_code: of one that has ended
    reason:    the platform's word for its phase; what the node itself printed last may follow after `PRINTED`, and is not taken
               for the platform's
    host:      the platform's name of the host that it is on; empty: on none yet, or not known
    domain:    that host's failure domain (a rack, a zone); empty: not known
    notice:    why the platform will take the node away, a drain or a pre-emption; empty: it will not, or no longer. It is
               `DELETED` where a person deleted the node itself: the successor may use the same host
    notice_us: how long after this was said it will; 0: it does not say
    age_us:    how long ago this was so
    waits:     of a pending one why the platform has not placed it yet: no room, a quota, an image; empty: nothing is in its way.
               It begins with `AVOIDED` where there is room on hosts alone that the node must not run on
    seat:      the seat of the standby that the node is, as its agent says it in `Hello`; empty: it was started under its name
    """

    name: str
    phase: str
    exit_code: int = 0
    reason: str = ""
    host: str = ""
    domain: str = ""
    notice: str = ""
    notice_us: int = 0
    age_us: int = 0
    waits: str = ""
    seat: str = ""


class Listed(NamedTuple):
    """All nodes of the job. A node that is missing is gone."""

    nodes: tuple[Observation, ...]


class Changed(NamedTuple):
    """One node has changed."""

    node: Observation


class Admission(NamedTuple):
    """May the job have nodes at all? The newest counts, and nothing is said while the platform has no such notion.

    Without admission the job saves, gives its nodes back, and waits; with it the job goes on. Saying it again, with either
    answer, also lets launches that were refused for now be asked for again at once.

    admitted: yes or no
    reason:   the platform's words, for people
    """

    admitted: bool
    reason: str = ""


class GroupSize(NamedTuple):
    """How many nodes a group wants now, and what each of them needs.

    name:      the group's
    set:       the coupling set whose nodes train together; empty: each node by itself
    nodes_min: the fewest that form a world
    nodes_max: the most
    nproc, memory_mib, cpu_m, gpus: of each node, as in `NodeLaunch`
    standby:   how many agents wait warm for the place of a dead node
    """

    name: str
    set: str
    nodes_min: int
    nodes_max: int
    nproc: int = 1
    memory_mib: int = 0
    cpu_m: int = 0
    gpus: int = 0
    standby: int = 0


RUNNING, HELD, SUSPENDED = "running", "held", "suspended"
ENDS = ("succeeded", "failed", "stopped")


class Wanted(NamedTuple):
    """What the job as a whole wants of its platform.

    groups: sizes of its groups, as they are in effect
    state:  `RUNNING`; `HELD`: without nodes because of an `Admission`; `SUSPENDED`: without nodes because a person says so;
            or how the job has ended, one of `ENDS`
    reason: why, for people
    """

    groups: tuple[GroupSize, ...]
    state: str = RUNNING
    reason: str = ""


def sizes_of(spec: JobSpec) -> tuple[GroupSize, ...]:
    """The sizes of a job's groups."""
    return tuple(
        GroupSize(
            one.name,
            one.coupled,
            one.floor,
            one.nodes_max,
            one.nproc,
            one.memory_mib,
            one.cpu_m,
            one.gpus,
            one.standby,
        )
        for one in spec.groups
    )


@runtime_checkable
class Sizing(Protocol):
    """A backend whose platform has to know the whole job: a gang that starts together, a queue that admits it."""

    async def sized(self, wanted: Wanted, token: int) -> None:
        """The job wants this from now on. The leader says so before the first launch, after each change, and now and then.

        Idempotent. After any error the leader says it again; until it was heard once, no node is launched.
        """
        ...


@runtime_checkable
class Reserving(Protocol):
    """A backend that keeps standbys: agents without a name, which wait in seats that it has made."""

    def heard(self, seats: Collection[str]) -> None:
        """Agents wait in these seats and answer. It must not wait.

        The leader says so every two seconds while it may give orders, from when the job's first nodes have joined. Standbys are
        made and removed only while it does.
        """
        ...


@runtime_checkable
class Clearing(Protocol):
    """A backend that leaves things behind beside nodes. The launcher calls it once the job is over and no master lives."""

    async def clear(self) -> None:
        """Remove all that the run has made, living nodes included. Idempotent; it may raise anything."""
        ...


@runtime_checkable
class Checking(Protocol):
    """A backend whose platform can be asked beforehand. The launcher does so before it starts anything."""

    async def check(self) -> None:
        """Raises `SpecError` for what will not mend itself, in words that say what to do; it may raise anything else."""
        ...


@runtime_checkable
class Closing(Protocol):
    """A backend that holds connections. Each master calls it when it ends; another one of the same run may live on."""

    async def close(self) -> None:
        """Close what is one's own. Idempotent; it may raise anything."""
        ...


@runtime_checkable
class Reaching(Protocol):
    """A backend that knows whether its platform answers. Masters of a job that is to stop ask it once no agent is left."""

    async def away(self) -> str:
        """Why nobody answers there now, for people; empty: somebody does. It takes a second or two, and raises nothing."""
        ...


@runtime_checkable
class Printing(Protocol):
    """A backend whose nodes print elsewhere. The launcher runs it beside the masters, where somebody watches."""

    async def show(self, write: Callable[[bytes], None]) -> None:
        """Pass on what nodes print, whole lines, until cancelled; it may raise anything, and nothing follows then."""
        ...


class Backend(Protocol):
    """What a scheduler must offer. `dlrover_core.testing.BackendConformance` is this contract as tests."""

    async def launch(self, node: NodeLaunch, token: int) -> str | None:
        """Start a node. Idempotent by ``node.name``. Returns the seat of the standby that becomes it; None: none does.

        The leader gives the standby its name. `Observation.seat` says the same to the leaders to come.

        Raises `LaunchRefused`. After any other error the outcome is unknown, and the leader calls again.
        """
        ...

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        """Delete a node; an unknown name is no error. Returns when the request is accepted, not when the node is gone."""
        ...

    def observe(self) -> AsyncIterator[Union[Listed, Changed, Admission]]:
        """`Listed` first and after every error, then one `Changed` for every change; `Admission` where there is such a thing."""
        ...

    async def room(self, group: str) -> int | None:
        """How many more nodes of the group would start now; None: unknown."""
        ...

"""A concern is three files and three lines: one is added here from outside, and no file of core knows of it.

"Profile one node for so many steps". In core it would be ``job/profiles.py``, ``rules/profiles.py`` and the words for people in
``history``; and a line each in ``job/state.py`` (the slice), ``rules/model.py`` (``RULES``) and ``runtime/operations.py``
(the verb).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, get_args

import drive
import pytest
from drive import Drive

from dlrover_core.errors import Refused
from dlrover_core.job import world
from dlrover_core.job.checkpoints import Keep
from dlrover_core.job.names import group_of
from dlrover_core.job.orders import Order
from dlrover_core.job.state import JobState
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.engine import (
    Accepted,
    CommandRefused,
    Facts,
    Fold,
    Model,
    NotDone,
    Rules,
    always,
    kept,
    to_named,
)
from dlrover_core.kernel.events import Event, Record, Registry, event
from dlrover_core.kernel.state import digest, pack, unpack
from dlrover_core.kernel.wire import COMMANDS, PARTS, command, part
from dlrover_core.rules import slots
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime import messages
from dlrover_core.runtime.agent import Agent
from dlrover_core.runtime.duties import Desk, Orders
from dlrover_core.runtime.messages import Answer, Hello, Level, Numbered, Welcome
from dlrover_core.runtime.transport import Connection
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.invariants import check
from dlrover_core.testing.network import Network
from dlrover_core.testing.training import MemoryLauncher, Training

# ---- job/profiles.py: what is known


@event(9001)
class ProfileAsked(NamedTuple):
    """A node is to be profiled."""

    node: str
    number: int
    steps: int


@event(9002)
class ProfileTaken(NamedTuple):
    """It was, and the profile lies there."""

    node: str
    number: int
    path: str


class ProfileNode(NamedTuple):
    """A person: profile this node."""

    node: str
    steps: int


@command(9001, since=5)
class ReportProfile(NamedTuple):
    """An agent: the profile lies there."""

    node: str
    number: int
    path: str


@part(9001)
class Profile(NamedTuple):
    """To a node: profile so many steps; ``number`` 0: none."""

    number: int = 0
    steps: int = 0


@dataclass(slots=True)
class ProfileSlice:
    """The profiles that are asked for, by node, and how many ever were."""

    open: dict[str, ProfileAsked] = field(default_factory=dict)
    number: int = 0


def _on_asked(slice_: ProfileSlice, fact: ProfileAsked, record: Record) -> None:
    slice_.open[fact.node], slice_.number = fact, fact.number


def _on_over(slice_: ProfileSlice, fact: Any, record: Record) -> None:
    slice_.open.pop(fact.node, None)


FACTS = Facts(
    kinds=(ProfileAsked, ProfileTaken),
    evolve={ProfileAsked: _on_asked, ProfileTaken: _on_over, **dict.fromkeys(get_args(world.Ended), _on_over)},
)


# ---- rules/profiles.py: what is decided


def _ask(state: ToyState, command: ProfileNode, now: int) -> Iterator[Event]:
    if slots.present(state, command.node).node in state.profiles.open:
        raise Refused(f"{command.node} is profiled already")
    yield ProfileAsked(command.node, state.profiles.number + 1, command.steps)


def _report(state: ToyState, command: ReportProfile, now: int) -> Iterator[Event]:
    asked = state.profiles.open.get(command.node)
    if asked is None or asked.number != command.number:
        raise Refused(f"profile {command.number} is over")
    yield ProfileTaken(*command)


def _told(state: ToyState, group: str) -> Mapping[str, Profile]:
    return {
        one.node: Profile(one.number, one.steps) for one in state.profiles.open.values() if group_of(one.node) == group
    }


RULES = Rules(
    decide={ProfileNode: _ask, ReportProfile: _report},
    levels=dict.fromkeys((ProfileAsked, ProfileTaken), always),
    tells=to_named(_told),
)


# ---- the lines of job/state.py and rules/model.py


@dataclass(slots=True)
class ToyState(JobState):
    """Everything that core knows, and profiles."""

    profiles: ProfileSlice = kept(ProfileSlice, FACTS)


FOLD = Fold(ToyState)
CODEC = Codec(Registry(FOLD.events))
TOY: Model[Any] = Model(FOLD, (*MODEL.rules, RULES))

NODE, OTHER = "worker-0-0", "worker-1-0"


# ---- the agent's duty


class Profiler(Orders):
    """Profiles as ordered, and tells where the profile lies."""

    async def run(self, desk: Desk) -> None:
        """Until cancelled."""
        done = 0
        while True:
            asked = (await self.news(desk)).part(Profile)
            if asked.number > done:
                done = asked.number
                desk.send(ReportProfile(desk.node, done, f"/profiles/{asked.steps}"))


class Told(Profiler):
    """A duty that reports what nobody asked for."""

    async def run(self, desk: Desk) -> None:
        """Once."""
        desk.send(ReportProfile(desk.node, 7, "/profiles/7"))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Drive:
    """A job of two nodes that runs, led by a master that knows of profiles."""
    monkeypatch.setattr(drive, "MODEL", TOY)
    monkeypatch.setattr(drive, "CODEC", CODEC)
    monkeypatch.setattr(drive, "desired", partial(desired, model=TOY))
    return Drive(nodes_max=2, nproc=1).up()


def order_of(job: Drive, node: str = NODE, version: int = messages.VERSION) -> Order:
    """What an agent of a version reads of its order, off the wire."""
    frame = messages.encode(messages.level(1, desired(job.state, TOY).orders[node], version), version)
    level = messages.decode(frame, version)
    assert isinstance(level, Level)
    return messages.order_of(level, version)


def test_it_folds_and_its_snapshot_keeps_it(job: Drive) -> None:
    """Its events are decided, logged and folded; a snapshot has its slice; and it forgets with the node."""
    assert isinstance(job.do(ProfileNode(NODE, 20)), Accepted)
    assert job.new[-1].event == ProfileAsked(NODE, 1, 20)
    assert job.do(ProfileNode(NODE, 20)) == NotDone(job.records[-1].seq, f"{NODE} is profiled already")
    records = [record for batch in job.batches for record in CODEC.decode(batch.payload).records]
    assert digest(FOLD.fold(records)) == digest(job.state)
    again = unpack(ToyState, pack(job.state))
    assert again.profiles.open == {NODE: ProfileAsked(NODE, 1, 20)}
    assert FOLD.schema != MODEL.schema, "a snapshot without the slice is not taken for one with it"
    job.observe(NODE, "failed", -9)
    state: Any = job.state
    assert (state.profiles.open, state.profiles.number) == ({}, 1)


def test_its_node_is_told_and_no_other(job: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order bears its part at once; agents of older releases read their orders as ever, without it."""
    job.do(ProfileNode(NODE, 20))
    assert TOY.levels(job.state, job.new)
    assert order_of(job).part(Profile) == Profile(1, 20)
    assert order_of(job).generation == 1
    assert order_of(job, OTHER).part(Profile) == Profile()
    bare = desired(job.state, MODEL).orders[NODE]
    assert order_of(job, version=messages.OLDEST_VERSION)._replace(parts=()) == bare._replace(parts=())
    monkeypatch.delitem(PARTS, 9001)
    assert order_of(job) == bare, "who does not know it skips it"


def test_an_agent_does_it(job: Drive) -> None:
    """A real agent hears its part in a frame, its duty answers in one, and that is recorded and told no more."""
    job.do(ProfileNode(NODE, 20))

    async def story() -> Any:
        network, connections = Network(), asyncio.Queue[Connection]()

        async def accept(connection: Connection) -> None:
            connections.put_nowait(connection)

        await network.listener("m").serve(accept, dict)
        launcher, dialer = MemoryLauncher("h", 1, Training(10_000)), network.dialer("h")
        agent = Agent(
            NODE, launcher=launcher, dialer=dialer, masters=["m"], boot=1, host="h", address="h", duties=[Profiler()]
        )
        running = virtual_loop.spawn("agent", agent.run())
        connection = await connections.get()
        assert isinstance(messages.decode(await connection.receive()), Hello)
        await connection.send(messages.encode(Welcome(messages.VERSION, "run-1", 1, 10**6, 10**7, 10**8, 10**7, 3)))
        await connection.send(messages.encode(messages.level(1, desired(job.state, TOY).orders[NODE])))
        while True:
            said = messages.decode(await connection.receive())
            if isinstance(said, Numbered):
                await connection.send(messages.encode(Answer(said.number, 1)))
                if said.kind == 9001:
                    running.cancel()
                    return messages.command_of(said)

    report = virtual_loop.run(story())
    assert report == ReportProfile(NODE, 1, "/profiles/20")
    job.do(report)
    assert job.new[-1].event == ProfileTaken(*report)
    assert order_of(job).part(Profile) == Profile()
    assert order_of(job).part(Keep) == desired(job.state, MODEL).orders[NODE].part(Keep)


def test_a_master_that_is_too_old_refuses_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master without the concern refuses what an agent reports, by its name, once; the job goes on to its good end."""
    monkeypatch.delitem(COMMANDS, 9001)

    async def story() -> list[Any]:
        async with Cluster(JobSpec("j", (GroupSpec(nodes_min=2, nodes_max=2),)), training=Training(20)) as cluster:
            made = cluster.agent

            def with_duty(*args: Any) -> Agent:
                agent = made(*args)
                agent._duties = [*agent._duties, Told()]
                return agent

            cluster.agent = with_duty  # type: ignore[method-assign]
            assert (await cluster.outcome()).state == "succeeded"
            await check(cluster)
            return [record.event for record in await cluster.records()]

    refused = [one for one in virtual_loop.run(story()) if isinstance(one, CommandRefused) and one.command == "Unknown"]
    why = "ReportProfile is not known here: install the agent's release on the masters, too"
    assert refused == [CommandRefused("Unknown", why)] * 2, "one of each node"


def test_a_master_of_the_version_before_is_spared_it() -> None:
    """A master of protocol 4 gets in its place what it refuses by itself: numbers must not be left out."""
    said = messages.numbered(3, ReportProfile(NODE, 1, "/p"), messages.OLDEST_VERSION)
    assert messages.command_of(said) == world.WithdrawStore(NODE, "")

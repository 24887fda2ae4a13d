"""A concern is three files and three lines: one is added here from outside, and no file of core knows of it.

"Profile one node for so many steps". The three files lie in ``toy_concern`` as they would in core: ``job/profiles.py``,
``rules/profiles.py`` and ``history/words/profiles.py``. The lines are those of ``job/state.py`` (the slice), ``rules/model.py``
(``RULES``) and ``runtime/operations.py`` (the verb).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import drive
import pytest
from drive import Drive
from toy_concern.job import profiles
from toy_concern.job.profiles import Profile, ProfileAsked, ProfileNode, ProfileSlice, ProfileTaken, ReportProfile
from toy_concern.rules import profiles as asked_profiles

from dlrover_adapters.cli.main import main
from dlrover_core.errors import MalformedMessage
from dlrover_core.job import world
from dlrover_core.job.checkpoints import Keep
from dlrover_core.job.job import CreateJob
from dlrover_core.job.orders import Order
from dlrover_core.job.state import JobState
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.engine import (
    Accepted,
    CommandRefused,
    Fold,
    Model,
    NotDone,
    kept,
)
from dlrover_core.kernel.events import Registry
from dlrover_core.kernel.log import Appended
from dlrover_core.kernel.state import digest, pack, unpack
from dlrover_core.kernel.wire import COMMANDS, PARTS
from dlrover_core.logs import open_log
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime import messages, operations
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

# ---- the lines of job/state.py, rules/model.py and runtime/operations.py


@dataclass(slots=True)
class ToyState(JobState):
    """Everything that core knows, and profiles."""

    profiles: ProfileSlice = kept(ProfileSlice, profiles.FACTS)


FOLD = Fold(ToyState)
CODEC = Codec(Registry(FOLD.events))
TOY: Model[Any] = Model(FOLD, (*MODEL.rules, asked_profiles.RULES))

VERBS = {**operations.COMMANDS, "profile": ProfileNode}

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


def test_a_new_run_resets_it(job: Drive) -> None:
    """What is asked of one run is not asked of the next; numbers go on, as the slice says. No handler does that."""
    job.do(ProfileNode(NODE, 20))
    job.do(CreateJob("run-2", job.spec.to_json()))
    state: Any = job.state
    assert (state.job.run, state.profiles) == ("run-2", ProfileSlice(number=1))
    job.up()
    job.do(ProfileNode("worker-0-1", 5))
    assert job.new[-1].event == ProfileAsked("worker-0-1", 2, 5)


def test_people_read_of_it(
    job: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dlrover events` prints it, `dlrover explain` says it in its own words and knows what a profile answers."""
    job.do(ProfileNode(NODE, 20))
    job.do(ReportProfile(NODE, 1, "/profiles/20"))
    monkeypatch.setattr("dlrover_core.job.state.CODEC", CODEC)
    monkeypatch.setattr("dlrover_core.job.state.FOLD", FOLD)
    url = f"sqlite:{tmp_path / 'log.db'}"

    async def write() -> None:
        async with open_log(url, CODEC) as log:
            lead = await log.lead("j", "m", 60.0)
            for batch in job.batches:
                assert isinstance(await lead.append(batch), Appended)

    asyncio.run(write())
    assert main(["events", "j", "--log", url]) == 0
    assert f"ProfileAsked    node={NODE} number=1 steps=20" in capsys.readouterr().out
    assert main(["explain", "j", str(job.records[-1].seq), "--log", url]) == 0
    said = capsys.readouterr().out
    assert f"ProfileAsked    {NODE} is to be profiled for 20 steps" in said
    assert f"profile 1 of {NODE} lies at /profiles/20 <- #{job.records[-2].seq}" in said, "and what it answers"


def test_people_ask_for_it(job: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its verb is understood, and what is wrong in it is said, as of any other."""
    asked = {"command": "profile", "node": NODE, "steps": 20}
    with pytest.raises(MalformedMessage, match="there is no command 'profile'"):
        operations.command_of(asked)
    monkeypatch.setattr(operations, "COMMANDS", VERBS)
    job.do(operations.command_of(asked))
    assert job.new[-1].event == ProfileAsked(NODE, 1, 20)
    with pytest.raises(MalformedMessage, match="profile takes node, steps; steps is missing"):
        operations.command_of({"command": "profile", "node": NODE})


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

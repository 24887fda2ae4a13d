"""Planned changes of real worlds: growth, drain, shrinking and a node that leaves, none of which costs a step.

Every rank has all of one fixed batch, so that the losses are those of one process that nothing happens to, bit for bit, whatever
the world's size; and each step is told as it is made.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

import commands
import pytest
from hosts_net import Host, best
from running import BOUND_S, SCRIPTS, TOKEN, Job, eventually

from dlrover_core.job.checkpoints import Restored, StepsHeld
from dlrover_core.job.incidents import IncidentOpened
from dlrover_core.job.nodes import NodeJoined, NodeReleased
from dlrover_core.job.plans import BoundaryAsked, WorldPlanDropped, WorldPlanned
from dlrover_core.job.world import WorldFormed
from dlrover_core.kernel.events import Event
from dlrover_core.logs import open_log

RANKS = str(SCRIPTS / "planned_ranks.py")
LAUNCH = ("--nproc-per-node", "1", "--max-restarts", "0", "--set", "grow_window_s=0.1")
STEPS_MORE = 250
EVERY = 5  # steps between saves in memory, in the script
One = TypeVar("One")


def also(*case: str | int, stands: str) -> Any:
    """A case for the night: in `make test` another one stands for it."""
    return pytest.param(*case, marks=pytest.mark.nightly(reason=f"{stands} stands for it in make test"))


FSDP = "the same with FSDP2, where what only one rank has must be had from it,"
pytestmark = pytest.mark.timeout(240)


@functools.cache
def curve(steps: int) -> list[str]:
    """The losses of an undisturbed run."""
    line = [sys.executable, RANKS, "alone", str(steps)]
    # Nobody is waited for in there: how long it takes says how busy the machine is, and only the test's own bound holds.
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()


def curve_to(step: int) -> list[str]:
    """Of so many steps: most jobs make few, and so many more are not made for them."""
    return curve(-(-step // STEPS_MORE) * STEPS_MORE)[:step]


def told(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """What a rank wrote down, over all its lives."""
    path = folder / f"told-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def steps_of(folder: Path, life: int, rank: int = 0) -> list[int]:
    """The steps that a rank made in one life."""
    return [one["step"] for one in told(folder, rank) if "step" in one and one["life"] == life]


def makes(folder: Path, steps: int, life: int = 0, rank: int = 0) -> list[int]:
    """Wait until that life has made so many steps."""
    return eventually(
        lambda: found if len(found := steps_of(folder, life, rank)) >= steps else None,
        f"{steps} steps of rank {rank} in life {life}",
    )


def lives(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """What a rank said at the begin of each."""
    return [one for one in told(folder, rank) if "began" in one]


def nothing_lost(folder: Path, ranks: int = 1) -> list[dict[str, Any]]:
    """Every step was made once, in order, by every rank that was there all the time, and the losses are as they must be.

    What rank 0 said at the begin of each life.
    """
    for rank in range(ranks):
        made = [one for one in told(folder, rank) if "step" in one]
        off = next((at for at, one in enumerate(made) if one["step"] != at + 1), None)
        assert off is None, f"rank {rank}: not step {off + 1} follows but {made[off]}; lives: {lives(folder, rank)}"
        assert [one["loss"] for one in made] == curve_to(len(made)), f"rank {rank}"
    return lives(folder)


def dlrover(job: Job, verb: str, *words: str) -> str:
    """One command about a job, to its end."""
    done = commands.dlrover(
        [verb, job.name, "--state-dir", str(job.state), *words], {**os.environ, "DLROVER_TOKEN": TOKEN}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def formed(job: Job) -> list[dict[str, Any]]:
    """The worlds, as they were formed."""
    return [one["fields"] for one in job.events("WorldFormed")]


def happened(job: Job | Host) -> list[Event]:
    """What its log has so far."""

    async def read() -> list[Event]:
        async with open_log(f"sqlite://{job.state / 'log.db'}") as log:
            return [record.event async for record in log.read(job.name if isinstance(job, Job) else "many")]

    return asyncio.run(read())


def of(kind: type[One], events: list[Event]) -> list[One]:
    """Those of a kind."""
    return [one for one in events if isinstance(one, kind)]


def all_well(folder: Path, events: list[Event], worlds: int, ranks: int, tier: str = "memory|peer") -> None:
    """So many worlds, each going on with the very next step, from memory; each plan did what it was to, no incident.

    Whoever was to come was there before training was bothered.
    """
    # First what was in the way: with it the rest says nothing.
    assert of(IncidentOpened, events) == of(WorldPlanDropped, events) == []
    began = nothing_lost(folder, ranks)
    formed, planned = of(WorldFormed, events), of(WorldPlanned, events)
    assert len(formed) == len(began) == worlds
    assert [one["began"] for one in began] == [max(0, one.resume_step) for one in formed]
    assert [one["tier"] for one in began[:1]] == ["nothing"]
    assert {one["tier"] for one in began[1:]} <= set(tier.split("|"))
    assert all(one["began"] for one in began[1:])
    assert [one.fell for one in of(Restored, events) if one.fell] == []
    asked_at = [events.index(one) for one in of(BoundaryAsked, events) if not one.go]
    joined = {one.node: events.index(one) for one in of(NodeJoined, events)}
    assert len(planned) == len(asked_at) == worlds - 1
    for plan, at in zip(planned, asked_at, strict=True):
        assert all(joined[name] < at for name in plan.joining)


@pytest.mark.parametrize(
    ("kind", "place"), [also("ddp", 1, stands=FSDP), also("fsdp", 1, stands="the node of rank 0"), ("fsdp", 0)]
)
def test_a_drained_node_costs_no_step(tmp_path: Path, kind: str, place: int) -> None:
    """Its successor is there first; then the world is changed at a boundary, and goes on with the very next step.

    What only the leaving node has (FSDP2) is had from it before it goes. It may be the one of rank 0.
    """
    with Job(tmp_path, "--local-nodes", "2", *LAUNCH, RANKS, kind, str(tmp_path), "0") as job:
        makes(tmp_path, 10)
        dlrover(job, "drain", f"worker-{place}", "--wait")
        makes(tmp_path, 10, life=1)
        job.finish()
        assert job.ended() == 0
        events = happened(job)
        all_well(tmp_path, events, worlds=2, ranks=2, tier="memory" if place else "peer")
        assert of(WorldPlanned, events)[0][2:4] == ((f"worker-{place}-1",), (f"worker-{place}-0",))
        assert job.left() == []


@pytest.mark.nightly(reason="a drained node of rank 0 stands for it in make test: its successor has nothing, either")
def test_a_world_that_moves_costs_no_step(tmp_path: Path) -> None:
    """The only node is drained: its successor, which has nothing, has everything from its memory."""
    with Job(tmp_path, *LAUNCH, "--nproc-per-node", "2", RANKS, "fsdp", str(tmp_path), "0") as job:
        makes(tmp_path, 10)
        dlrover(job, "drain", "worker-0", "--wait")
        makes(tmp_path, 10, life=1)
        job.finish()
        assert job.ended() == 0
        all_well(tmp_path, happened(job), worlds=2, ranks=2, tier="peer")
        assert job.left() == []


@pytest.mark.nightly(reason="a drained node, stories of growth, and test_hosts.py stand for it in make test")
@pytest.mark.parametrize("kind", [also("ddp", stands=FSDP), "fsdp"])
def test_hosts_that_come_late_cost_no_step(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MIN:MAX, 2 ranks: another host comes, all 4 go on with the very next step; what the new ones lack they have from memory."""
    with best() as net, Host(net, "a", tmp_path) as a, Host(net, "b", tmp_path) as b:
        if net.prefixes["a"]:
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # it would take the name of this machine for its address
        at = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{a.address}:{net.port}", "--rdzv-id", "many")
        line = ("--nnodes", "1:2", *at, *LAUNCH[2:], "--nproc-per-node", "2", "--set", "last_call_s=0.1")
        command = (*line, RANKS, kind, str(tmp_path), "0")
        a.start(*command)
        makes(tmp_path, 10)
        b.start(*command)
        makes(tmp_path, 10, life=1, rank=3)
        (tmp_path / "finish").touch()
        assert (a.ended(), b.ended()) == (0, 0)
        all_well(tmp_path, happened(a), worlds=2, ranks=2)
        began = next(one["began"] for one in told(tmp_path, 3))
        assert steps_of(tmp_path, 1, rank=3) == list(range(began + 1, told(tmp_path)[-1]["ended"] + 1))
        assert [host.left() for host in (a, b)] == [[], []]


@pytest.mark.nightly(reason="a drained node stands for it in make test")
@pytest.mark.parametrize(
    ("kind", "heeds"),
    [
        also("ddp", "", stands=FSDP),
        also("fsdp", "", stands="the same with deaf ranks"),
        ("fsdp", "deaf"),
        also("ddp", "deaf", stands=FSDP),
    ],
)
def test_shrinking_costs_no_step(tmp_path: Path, kind: str, heeds: str) -> None:
    """`dlrover scale worker=1`: one of two nodes goes at a boundary, its part of the state stays.

    Ranks that do not heed SIGTERM wait at the boundary until they are killed, even if their script would rather go on: those
    steps would be made twice.
    """
    grace, words = (("--set", "stop_grace_s=1"), (heeds,)) if heeds else ((), ())
    with Job(tmp_path, "--local-nodes", "2", *LAUNCH, *grace, RANKS, kind, str(tmp_path), "0", *words) as job:
        makes(tmp_path, 10)
        dlrover(job, "scale", "worker=1", "--wait")
        makes(tmp_path, 10, life=1)
        job.finish()
        assert job.ended() == 0
        events = happened(job)
        all_well(tmp_path, events, worlds=2, ranks=1)
        assert len(of(WorldFormed, events)[1].members) == 1
        assert job.left() == []


@pytest.mark.nightly(reason="a drained node, and stories of nodes that are told to go, stand for it in make test")
def test_a_node_that_is_told_to_go_costs_no_step(tmp_path: Path) -> None:
    """SIGTERM to one agent, as from its platform: it leaves at a boundary once another is there, with status 0.

    Half of the grace is all that its successor has to come: as long as everything here is waited for.
    """
    grace = ("--set", f"stop_grace_s={2 * BOUND_S:g}")
    with Job(tmp_path, "--local-nodes", "2", *LAUNCH, *grace, RANKS, "fsdp", str(tmp_path), "0") as job:
        makes(tmp_path, 10)
        agent = job.one("dlrover-agent", "--node worker-1-0")
        agent.kill(signal.SIGTERM)
        makes(tmp_path, 10, life=1)
        agent.ends()
        job.finish()
        assert job.ended() == 0
        all_well(tmp_path, happened(job), worlds=2, ranks=2)
        assert job.left() == []


@pytest.mark.nightly(reason="stories of jobs that end stand for it in make test")
@pytest.mark.parametrize("when", [also("before", stands="a boundary that nobody gets to"), "leave"])
def test_a_script_that_ends_while_a_change_is_planned_ends_well(tmp_path: Path, when: str) -> None:
    """While the successor comes, or when the boundary is chosen already and none of the ranks gets there: the job succeeds."""
    with Job(tmp_path, "--local-nodes", "2", *LAUNCH, RANKS, "ddp", str(tmp_path), "0", when) as job:
        makes(tmp_path, 10)
        dlrover(job, "drain", "worker-1")
        eventually(lambda: bool(of(WorldPlanned, happened(job))), "a plan")
        if when == "before":
            job.finish()
        assert job.ended() == 0
        events = happened(job)
        assert len(nothing_lost(tmp_path, ranks=2)) == len(of(WorldFormed, events)) == 1
        assert [one.go for one in of(BoundaryAsked, events)] == ([False, True] if when == "leave" else [])
        assert of(IncidentOpened, events) == []
        assert job.left() == []


DROPS = {
    "a drain, nodes wait no longer": ("1", ("drain", "worker-1"), ("boundary_s=1",), "waited 1 s at its boundary"),
    "a growth, out of time": ("2", ("scale", "worker=2"), ("plan_s=3", "boundary_s=4"), "no boundary within 3 s"),
}


DRAIN, GROWTH = DROPS


@pytest.mark.nightly(reason="stories of plans that are dropped stand for it in make test")
@pytest.mark.parametrize("case", [also(DRAIN, stands="the growth"), GROWTH])
def test_ranks_go_on_from_the_boundary_of_a_plan_that_is_dropped(tmp_path: Path, case: str) -> None:
    """One rank does not come to the boundary in time: all go on with the next step; the change is made at another one."""
    nproc, command, settings, why = DROPS[case]
    nodes = ("--local-nodes", "2") if nproc == "1" else ()
    told_to = [word for one in settings for word in ("--set", one)]
    (tmp_path / "hold").touch()
    launch = (*nodes, *LAUNCH, "--nproc-per-node", nproc, *told_to)
    with Job(tmp_path, *launch, RANKS, "ddp", str(tmp_path), "0", "hold") as job:
        makes(tmp_path, 10)
        dlrover(job, *command)
        dropped = eventually(lambda: of(WorldPlanDropped, happened(job)) or None, "the end of a plan")
        waits_at = told(tmp_path)[-1]["step"]
        assert why in dropped[0].reason
        (tmp_path / "hold").unlink()
        makes(tmp_path, 10, life=1)
        job.finish()
        assert job.ended() == 0
        began, events = nothing_lost(tmp_path, ranks=2), happened(job)
        assert [one["tier"] for one in began] == ["nothing", "memory"]
        assert began[1]["began"] > waits_at
        assert of(WorldPlanDropped, events) == dropped
        assert of(IncidentOpened, events) == []
        assert job.left() == []


@pytest.mark.nightly(reason="test_flash_ddp.py, and stories of deaths at a boundary, stand for it in make test")
def test_a_rank_killed_at_the_boundary_costs_what_a_failure_costs(tmp_path: Path) -> None:
    """The plan is over, the world is formed anew from a step that all had in memory, and what was planned comes true with it."""
    (tmp_path / "hold").touch()
    launch = ("--local-nodes", "2", *LAUNCH, "--max-restarts", "1")
    with Job(tmp_path, *launch, RANKS, "ddp", str(tmp_path), "0", "hold") as job:
        makes(tmp_path, 10)
        dlrover(job, "drain", "worker-1")
        eventually(lambda: of(StepsHeld, happened(job)) or None, "a node at the boundary")
        job.one("worker-0").kill()
        eventually(lambda: of(IncidentOpened, happened(job)) or None, "an incident")
        (tmp_path / "hold").unlink()
        makes(tmp_path, 10, life=1)
        job.finish()
        assert job.ended() == 0
        first, second = steps_of(tmp_path, 0), steps_of(tmp_path, 1)
        assert first[-1] - 2 * EVERY < second[0] <= first[-1] + 1
        made = [one for one in told(tmp_path) if "step" in one]
        undisturbed = curve_to(made[-1]["step"])
        assert [one["loss"] for one in made] == [undisturbed[one["step"] - 1] for one in made]
        events = happened(job)
        assert len(of(WorldFormed, events)) == 2
        assert len(of(IncidentOpened, events)) == 1
        assert sorted(one.node for one in of(NodeJoined, events)) == ["worker-0-0", "worker-1-0", "worker-1-1"]
        assert job.left() == []


@pytest.mark.nightly(
    reason="stories of suspended jobs in tests/chaos/test_operations.py, and here a drained node, stand for it in make test"
)
def test_suspended_without_nodes_it_goes_on_with_the_next_step(tmp_path: Path) -> None:
    """All ranks save at a boundary, that is written, the node and its agent go; resumed, a new one goes on: no step is lost."""
    env = {"STATES_URL": f"file://{tmp_path / 'states'}"}
    with Job(tmp_path, *LAUNCH, RANKS, "ddp", str(tmp_path), "0", env=env) as job:
        makes(tmp_path, 7)
        said = dlrover(job, "suspend", "--wait", "--reason", "lunch")
        assert "suspended (lunch)" in said
        assert job.processes("dlrover-agent") == job.processes("worker-0") == []
        made = len(steps_of(tmp_path, 0))
        dlrover(job, "resume", "--wait")
        makes(tmp_path, 3, life=1)
        job.finish()
        assert job.ended() == 0
        assert [one["began"] for one in nothing_lost(tmp_path)] == [0, made]
        events = happened(job)
        assert [one.reason for one in of(NodeReleased, events)] == ["suspended"]
        assert of(IncidentOpened, events) == []
        assert "suspended, as asked" in job.dlrover("report")
        assert job.left() == []

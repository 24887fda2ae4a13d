"""The Ray backend against a real Ray: raylets on this machine, and nodes whose agents are stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import select
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from running import eventually
from tests.integration.ray_grounds import RayGround, desk_of, parent_of, processes_of

from dlrover_backends.ray.client import RayBackend
from dlrover_backends.ray.names import Run
from dlrover_backends.shared.asking import StaleToken
from dlrover_core import BackendContext
from dlrover_core.diagnosis import signatures
from dlrover_core.diagnosis.classify import of_platform
from dlrover_core.errors import LaunchRefused, SpecError
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backend import PRINTED, GroupSize, Wanted
from dlrover_core.runtime.backends import SEAT
from dlrover_core.testing import BackendConformance
from dlrover_core.testing.backend_stand import Abilities, Stand, make_launch, watching

pytestmark = [
    pytest.mark.slow_loop(reason="a desk's process is started from the loop"),
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(300),
]
AGENT = """
import os, signal, sys
def wrong(*_):
    sys.stderr.write("usage: dlrover-run\\ndlrover-run: error: script: no such file\\n")
    sys.stderr.flush()
    os._exit(2)
signal.signal(signal.SIGUSR1, wrong)
signal.pause()
"""
STAND_IN = (sys.executable, "-I", "-S", "-c", AGENT)
SAVER = """
import pathlib, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
pathlib.Path(sys.argv[1]).touch()
signal.sigwait([signal.SIGTERM])
time.sleep(12)
pathlib.Path(sys.argv[2]).touch()
"""
SMALL = "CPU=0.01"
RUNS = itertools.count(1)
STORY_S, STATES_S = 180.0, 30.0
NIGHTLY = "test_a_node_from_its_launch_to_its_end"


@pytest.fixture(name="ground")
def shared_ground(ray_light: RayGround) -> RayGround:
    """Two hosts, the second with a label."""
    return ray_light


def context(
    ground: RayGround, folder: Path, command: tuple[str, ...] = STAND_IN, resources: str = SMALL, **more: str
) -> BackendContext:
    """A new run whose agents are stand-ins."""
    told = {"address": ground.address, "resources": resources, **more}
    return BackendContext(
        "conformance",
        f"run-{os.getpid()}-{next(RUNS)}",  # processes of a run are found on the whole machine
        ("m:1",),
        "t",
        command=command,
        cwd=str(folder),
        directory=str(folder),
        args=",".join(f"{key}={quote(value)}" for key, value in told.items()),
    )


@contextlib.asynccontextmanager
async def running(here: BackendContext) -> AsyncIterator[RayBackend]:
    """A backend, of whose run nothing is left at the end."""
    backend = RayBackend(here)
    try:
        yield backend
    finally:
        await backend.clear()
        await backend.close()
        for pid in processes_of(here.run):  # an agent whose keeper was killed is about to end
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                select.select([pidfd], [], [], 10.0)
                os.close(pidfd)
        assert processes_of(here.run) == []


def agent_of(run: str, name: str) -> int:
    """The process that a keeper has started for a node."""
    [pid] = processes_of(run, name.partition("-")[2])
    return pid


def catches(pid: int, number: signal.Signals) -> bool:
    """Has the process a handler for this signal?"""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


@pytest.mark.nightly(reason=NIGHTLY)
class TestRay(BackendConformance):
    """The contract of a backend."""

    story_s = STORY_S
    ground: RayGround
    folder: Path
    command = STAND_IN

    @pytest.fixture(autouse=True)
    def _placed(self, ground: RayGround, tmp_path: Path) -> None:
        type(self).ground, type(self).folder = ground, tmp_path

    @contextlib.asynccontextmanager
    async def make_backend(self) -> AsyncIterator[Stand]:
        """A run of its own."""
        here = context(self.ground, self.folder, self.command)

        async def kill(name: str) -> None:
            os.kill(agent_of(here.run, name), signal.SIGKILL)

        async def fill() -> None:
            await asyncio.to_thread(self.ground.order, "fill")

        async def free() -> None:
            await asyncio.to_thread(self.ground.order, "free")

        cannot = {
            "lost": "a raylet that was given up ends; test_a_node_waits_for_room",
            "notices": "a host that is drained is never used again; test_a_node_waits_for_room",
        }
        async with running(here) as backend:
            try:
                yield Stand(backend, kill, Abilities(fill, free), cannot)
            finally:
                await free()

    def nonsense(self) -> NodeLaunch:
        """A program that is not there."""
        self.command = ("/no/such/program",)
        return make_launch()


def story(tell: Any) -> None:
    """Tell a story in an event loop of its own, with a bound."""
    asyncio.run(asyncio.wait_for(tell, STORY_S))


def test_actors_that_do_not_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not removed is said, and the run keeps its keys: the token of its newest master among them."""
    from dlrover_backends.ray import cluster, private
    from dlrover_backends.ray.records import Actor, Snapshot

    one = Actor("1", "worker-0-0")
    removed, store = list[str](), dict[str, bytes]()
    run = cluster.Cluster(Run("j", "r"))
    for name in ("end", "kill", "remove_group"):
        monkeypatch.setattr(run, name, lambda *_: None)
    monkeypatch.setattr(run, "look", lambda: Snapshot({one.name: one}, {}, {}))
    monkeypatch.setattr(private, "remove", removed.append)
    monkeypatch.setattr(private, "get", store.get)
    with pytest.raises(cluster.StillAlive, match="worker-0-0") as left:
        run.clear(0.0)
    assert (left.value.actors, removed) == ([one.name], [])
    monkeypatch.setattr(run, "look", lambda: Snapshot({one.name: one._replace(state="DEAD")}, {}, {}))
    run.clear(0.0)
    assert set(removed) == {"dlrover:j:r/"}


class Published:
    """The states of a run's actors as the cluster publishes them, by their names, each once."""

    def __init__(self) -> None:
        self.states: dict[str, list[str]] = {}
        self.begun, self._news = asyncio.Event(), asyncio.Event()

    async def hear(self, address: str, space: str) -> None:
        """Until cancelled, or something fails."""
        from dlrover_backends.ray import private

        async with contextlib.aclosing(private.published(address, space)) as news:
            async for told in news:
                self.begun.set()
                for one in told.actors:
                    known = self.states.setdefault(one.name, [])
                    known += [] if one.state in known else [one.state]
                self._news.set()

    async def come_to(self, wanted: dict[str, list[str]]) -> None:
        """The desk hears them by itself, and may be told before us."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._until(wanted), STATES_S)
        assert self.states == wanted

    async def _until(self, wanted: dict[str, list[str]]) -> None:
        while self.states != wanted:
            self._news.clear()
            await self._news.wait()


@contextlib.asynccontextmanager
async def published(ground: RayGround, run: Run) -> AsyncIterator[Published]:
    """What the cluster publishes about a run meanwhile."""
    found = Published()
    hearing, begun = (asyncio.ensure_future(one) for one in (found.hear(ground.address, run.space), found.begun.wait()))
    try:
        await asyncio.wait([hearing, begun], return_when=asyncio.FIRST_COMPLETED)
        assert not hearing.done(), hearing.exception()
        yield found
        assert not hearing.done(), hearing.exception()
    finally:
        hearing.cancel()
        begun.cancel()
        await asyncio.gather(hearing, begun, return_exceptions=True)


def test_a_node_from_its_launch_to_its_end(ground: RayGround, tmp_path: Path) -> None:
    """What a backend promises, in one run: started once, seen to die and why, never again, waiting is told, deleted is gone.

    The desk is killed in between: the next one finds everything. All of it is published by the cluster too.
    """
    here = context(ground, tmp_path)
    first, second, other, wrong = (make_launch(index) for index in range(4))

    async def told() -> None:
        async with (
            running(here) as backend,
            watching(backend) as watch,
            published(ground, Run(here.job, here.run)) as told_of,
        ):
            assert not watch.nodes
            await asyncio.gather(*(backend.launch(one, 7) for one in (first, first, second)))
            seen = await watch.running(first.name, second.name)
            assert {one.host for one in seen.values()} <= {"first", "second"}
            # An agent that is killed is told with its signal, through the keeper.
            os.kill(agent_of(here.run, first.name), signal.SIGKILL)
            dead = await watch.over(first.name)
            assert (dead.phase, dead.exit_code, dead.reason) == ("failed", 137, "killed by SIGKILL")
            # A keeper that is killed takes its agent with it.
            agent = agent_of(here.run, second.name)
            os.kill(parent_of(agent), signal.SIGKILL)
            dead = await watch.over(second.name)
            assert dead.reason.startswith("WORKER_DIED: Worker unexpectedly exits"), dead
            await asyncio.to_thread(
                eventually, lambda: not processes_of(here.run), "the end of an agent without keeper"
            )
            # Whoever holds nothing loses nothing.
            os.kill(desk_of(tmp_path), signal.SIGKILL)
            await backend.launch(first, 7)
            await asyncio.gather(*(backend.launch(one, 7) for one in (other, wrong)))
            seen = await watch.running(other.name, wrong.name)
            phases = {name: one.phase for name, one in seen.items() if one.phase != "running"}
            assert phases == {first.name: "failed", second.name: "failed"}
            # What an agent has printed last comes behind its exit status, and fails the job if no relaunch mends it.
            agent = agent_of(here.run, wrong.name)
            await asyncio.to_thread(eventually, lambda: catches(agent, signal.SIGUSR1), "an agent that heeds SIGUSR1")
            os.kill(agent, signal.SIGUSR1)
            dead = await watch.over(wrong.name)
            assert dead.reason == f"exit code 2{PRINTED}dlrover-run: error: script: no such file"
            assert (
                of_platform(signatures.table(), dead.phase, dead.exit_code, dead.reason).signature == "launcher.usage"
            )
            # Orders of a deposed master, whoever was told of its successor.
            with pytest.raises(StaleToken):
                await backend.delete(other.name, 6, 0.0)
            await backend.delete(other.name, 8, 5.0)
            await backend.delete(second.name, 8, 0.0)
            assert set(await watch.gone(other.name, second.name)) == {first.name, wrong.name}
            states = ["DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "DEAD"]
            await told_of.come_to({one.name: states for one in (first, second, other, wrong)})
            with pytest.raises(LaunchRefused) as refused:
                await backend.launch(other, 8)
            assert refused.value.permanent

    story(told())


@pytest.mark.parametrize(
    ("kind", "number", "said"),
    [
        ("ray_version", "2.41.0", "runs Ray 2.41.0 with Python"),
        ("python_version", "3.9.20", "with Python 3.9.20, and this is Ray"),
    ],
)
def test_a_cluster_of_another_version(ground: RayGround, tmp_path: Path, kind: str, number: str, said: str) -> None:
    """Before anything is started it is told which versions the cluster has, and what to do."""

    async def told() -> None:
        backend = RayBackend(context(ground, tmp_path))
        with pytest.raises(SpecError, match=re.escape(said)) as refused:
            await backend.check()
        assert "install the cluster's versions here, or run this on its head" in str(refused.value)
        await backend.close()

    before = ground.order("version", kind=kind, number=number)
    try:
        story(told())
    finally:
        ground.order("version", kind=kind, number=before)


def test_labels_that_ray_refuses(ground: RayGround, tmp_path: Path) -> None:
    """Ray's own word for it comes before anything is started; labels that it takes pass."""

    async def told() -> None:
        async with running(context(ground, tmp_path, label="zone=in(a,b);tier=!spot")) as backend:
            await backend.check()
            wrong = RayBackend(replace(backend._here, args=context(ground, tmp_path, label="zone=a b").args))
            with pytest.raises(SpecError, match=r"label: Ray refuses it: .*`a b`"):
                await wrong.check()
            await wrong.close()

    story(told())


def test_a_node_waits_for_room(ground: RayGround, tmp_path: Path) -> None:
    """A node that no host has room for is pending, says what the largest host has, and runs when there is room."""
    here = context(ground, tmp_path, resources="CPU=3", label="zone=c")
    node = make_launch()

    async def told() -> None:
        async with running(here) as backend, watching(backend) as watch:
            await backend.launch(node, 7)
            seen = await watch.until(lambda seen: node.name in seen and bool(seen[node.name].waits))
            assert seen[node.name].phase == "pending"
            assert seen[node.name].waits.startswith("Unschedulable: no host has CPU=3; the largest has CPU=2,"), seen
            host = await asyncio.to_thread(ground.add, num_cpus=3, node_name="third", labels={"zone": "c"})
            seen = await watch.running(node.name)
            assert seen[node.name].host == "third"
            # The cluster drains that host, with a deadline: a notice. Then it is lost to it.
            await asyncio.to_thread(
                ground.order, "drain", host=host, reason="PREEMPTION", deadline_ms=deadline_ms(600.0)
            )
            seen = await watch.until(lambda seen: bool(seen[node.name].notice))
            assert (seen[node.name].phase, seen[node.name].notice) == ("running", "Ray drains third")
            assert 590e6 < seen[node.name].notice_us <= 600e6
            await asyncio.to_thread(ground.order, "signal", host=host, name="SIGKILL")
            seen = await watch.until(lambda seen: seen[node.name].phase != "running")
            assert seen[node.name].phase in {"failed", "lost"}, seen

    story(told())


@pytest.mark.nightly(reason="a desk kills nodes 8 s after their grace; tests/unit/test_ray_lookout.py")
def test_a_removed_node_has_its_grace(ground: RayGround, tmp_path: Path) -> None:
    """An agent that saves for longer than the desk waits for keepers is left alone, though a new desk comes meanwhile."""
    waits, saved = tmp_path / "waits", tmp_path / "saved"
    here = context(ground, tmp_path, (sys.executable, "-I", "-S", "-c", SAVER, str(waits), str(saved)))
    node = make_launch(0)

    async def told() -> None:
        async with running(here) as backend, watching(backend) as watch:
            await backend.launch(node, 7)
            await watch.running(node.name)
            await asyncio.to_thread(eventually, waits.exists, "an agent that heeds SIGTERM")
            await backend.delete(node.name, 7, 60.0)
            os.kill(desk_of(tmp_path), signal.SIGKILL)
            await watch.gone(node.name)
            assert saved.exists()

    story(told())


def test_a_standby_becomes_a_node(ground: RayGround, tmp_path: Path) -> None:
    """A standby is made beside a node that runs, becomes the next one with the agent that it has, and is replaced.

    Asked again, and by another desk, the node is the same standby. Deleted, it is gone with its agent.
    """
    here = context(ground, tmp_path)
    first, again = make_launch(0), make_launch(0, 1)
    wanted = Wanted((GroupSize(first.group, "", 1, 1, standby=1),))

    async def told() -> None:
        loop = asyncio.get_running_loop()
        async with running(here) as backend, watching(backend) as watch:

            async def stands(number: int) -> int:
                """The agent of the standby with this number, once Ray calls its actor alive; meanwhile a master leads."""
                actor, space = f"{here.job}-{first.group}-standby-{number}", Run(here.job, here.run).space

                def found() -> list[int] | None:
                    loop.call_soon_threadsafe(backend.heard, (f"standby:{actor}",))
                    return processes_of(here.run, with_env=f"{SEAT}={actor}") or None

                [pid] = await asyncio.to_thread(eventually, found, f"the standby {actor}")
                await asyncio.to_thread(
                    eventually, lambda: actor in ground.order("named", namespace=space), f"Ray's word for {actor}"
                )
                return int(pid)

            await backend.sized(wanted, 7)
            assert await backend.launch(first, 7) is None
            await watch.running(first.name)
            agent = await stands(0)
            assert set(watch.nodes) == {first.name}
            os.kill(agent_of(here.run, first.name), signal.SIGKILL)
            await watch.over(first.name)
            seat = await backend.launch(again, 7)
            assert seat == f"standby:{here.job}-{first.group}-standby-0"
            seen = await watch.running(again.name)
            assert seen[again.name].seat == seat
            await stands(1)
            os.kill(desk_of(tmp_path), signal.SIGKILL)
            assert await backend.launch(again, 8) == seat
            seen = await watch.running(again.name)
            assert (seen[again.name].seat, parent_of(agent)) != ("", 1)
            await backend.delete(again.name, 8, 5.0)
            await watch.gone(again.name)
            assert agent not in processes_of(here.run)

    story(told())


def deadline_ms(after_s: float) -> int:
    """A deadline by the wall clock."""
    import time

    return int((time.time() + after_s) * 1000)

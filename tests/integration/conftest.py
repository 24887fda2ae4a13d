"""A launcher on real processes, for the tests of workers: `rig`.

Most tests need no torch: their workers run on `bare`, a framework of a few lines that is imported in no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dlrover_adapters.agent.config import LaunchConfig
from dlrover_adapters.agent.launcher import LinuxLauncher
from dlrover_core.runtime.launcher import Notice, StoreReady, WorkerExit, WorkersLaunch

BOUND_S = 60.0  # between two notices a worker may import torch twice
SCRIPTS = str(Path(__file__).parent / "scripts")  # what the tests of `dlrover-run` share
if SCRIPTS not in sys.path:
    sys.path.insert(0, SCRIPTS)
NO_TORCH = f"{SCRIPTS}/no_torch"
SOURCES = [str(Path(__file__).parents[2] / one) for one in ("src", "src/adapters", "src/backends")]

if TYPE_CHECKING:
    from tests.integration.ray_grounds import RayGround

BUSY_ETCDS = ("test_cli_etcd", "test_etcd_chaos_masters")  # whole jobs beside an etcd


MARKS_ALONE = "pytest.mark.alone("
"""A module with tests that must be alone contains this text. A run of such tests imports no other module."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests that must be alone are wanted, a module that marks none is left out."""
    if collection_path.suffix != ".py" or not config.option.markexpr.startswith("alone"):
        return None
    return True if MARKS_ALONE not in collection_path.read_text() else None


# These compute for longest. They begin first, so that no core is idle at the end while the other one finishes them.
LONGEST = ("test_own_objects", "test_zygote")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of etcd wait for nine tenths of their time: one worker runs them all, with one etcd, beside those that compute.

    The longest tests come first.
    """
    for path in {item.path for item in items if item.get_closest_marker("alone")}:
        if MARKS_ALONE not in path.read_text():
            raise pytest.UsageError(f"{path}: some of its tests must be alone; write {MARKS_ALONE!r} in this file")
    if config.pluginmanager.hasplugin("xdist"):
        items.sort(key=lambda item: item.path.stem not in LONGEST)
    for item in items if config.pluginmanager.hasplugin("xdist") else ():
        waits = "etcd" in item.path.stem and item.path.stem not in BUSY_ETCDS
        if waits and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("etcd"))


class Shared:
    """The Ray that tests of one process share, as long as they follow one another: idle it costs a tenth of a core."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._ground: RayGround | None = None

    def ground(self) -> RayGround:
        """Started if it does not run."""
        from running import WITHOUT_TORCH
        from tests.integration.ray_grounds import ray_ground

        if self._ground is None:
            second = {"num_cpus": 1, "node_name": "second", "labels": {"zone": "b"}}
            made = ray_ground({"num_cpus": 2, "node_name": "first"}, second, env=WITHOUT_TORCH)
            self._ground = self._stack.enter_context(made)
        return self._ground

    def close(self) -> None:
        """End it."""
        self._ground = None
        self._stack.close()


SHARED = Shared()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the Ray that tests share after the last of them."""
    if nextitem is None or not nextitem.path.stem.startswith("test_ray_"):
        SHARED.close()


@pytest.fixture(scope="module")
def ray_light() -> RayGround:
    """A Ray of two hosts, the second with a label, whose ranks have no torch. To start one takes as long as most tests do.

    A test leaves nothing there, and has names of its own.
    """
    return SHARED.ground()


BARE = """
import os
CPUS, CHECK, STEPS = "fake_affinity", "", True
def birth(env, nproc, signals): pass
def serve_store(host, port, fd):
    from torch._C._distributed_c10d import TCPStore
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
def import_core(): pass
def import_rest(): pass
def refusal_in_zygote(): return ""
def refusal_in_child(): return ""
def environment(launch, local_rank, role, error_file):
    return {"RANK": str(launch.first_rank + local_rank), "LOCAL_RANK": str(local_rank), "ERROR_FILE": error_file,
            "GENERATION": str(launch.generation), "RUN": launch.run}
def reseed(): pass
def begin(launch, rank, agent_socket, slot_fd, stepped): pass
def excused(): return frozenset()
def found(): return ()
def find(known): pass
def has_peers(): return False
def quietly():
    import contextlib
    return contextlib.nullcontext()
def record_error(error): pass
"""


class Rig:
    """One launcher, and what it noticed. Its workers `tell` it what they see."""

    def __init__(self, folder: Path, launcher: LinuxLauncher, nproc: int) -> None:
        self.folder, self.launcher, self.nproc = folder, launcher, nproc
        self.generation = 0
        self.notices: list[Notice] = []
        self.stores: list[str] = []
        self._stream = launcher.notices()
        self._told: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    async def next(self) -> Notice:
        """The next notice."""
        notice = await asyncio.wait_for(anext(self._stream), BOUND_S)
        self.notices.append(notice)
        if isinstance(notice, StoreReady):
            self.stores.append(notice.address)
        return notice

    async def until(self, matches: Callable[[Notice], bool]) -> Notice:
        """The next notice that ``matches``; those before it are in ``notices``."""
        while not matches(notice := await self.next()):
            pass
        return notice

    async def exits(self, count: int) -> list[WorkerExit]:
        """The next ``count`` exits, by rank."""
        found: list[WorkerExit] = []
        while len(found) < count:
            notice = await self.next()
            if isinstance(notice, WorkerExit):
                found.append(notice)
        return sorted(found, key=lambda one: one.rank)

    async def start(self, store: str = "127.0.0.1:1", **fields: object) -> None:
        """Start the next generation."""
        self.generation += 1
        nproc = self.nproc
        launch = WorkersLaunch("run", self.generation, 0, nproc, nproc, 0, 1, store, self.generation - 1, 3)
        await self.launcher.start(launch._replace(**fields))  # type: ignore[arg-type]

    async def run(self, **fields: object) -> list[WorkerExit]:
        """Start a generation and wait for its end."""
        await self.start(**fields)
        return await self.exits(self.nproc)

    async def told(self) -> list[Any]:
        """What the next worker `tell`s: its rank, then the arguments."""
        return await asyncio.wait_for(self._told.get(), BOUND_S)

    async def all_told(self) -> dict[int, list[Any]]:
        """What one message from each worker says, by rank."""
        found: dict[int, list[Any]] = {}
        while len(found) < self.nproc:
            rank, *words = await self.told()
            found[rank] = words
        return dict(sorted(found.items()))

    def listen(self) -> None:
        """Hear what workers tell."""
        self._ear.setblocking(False)
        self._ear.bind(str(self.folder / "ear"))
        asyncio.get_running_loop().add_reader(
            self._ear, lambda: self._told.put_nowait(json.loads(self._ear.recv(65536)))
        )

    def deafen(self) -> None:
        """Hear no more."""
        asyncio.get_running_loop().remove_reader(self._ear)
        self._ear.close()
        (self.folder / "ear").unlink()


# What scripts of these tests may use.
PRELUDE = """
import json, os, signal, socket, sys, time
RANK = int(os.environ.get("RANK", -1))
def tell(*words):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.sendto(json.dumps([RANK, *words]).encode(), os.path.join(os.environ["FOLDER"], "ear"))
def forever():
    while True: signal.pause()
"""

Make = Callable[..., contextlib.AbstractAsyncContextManager[Rig]]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """An open launcher for a script: ``async with`` it, with a script, ``torch=True``, and fields of `LaunchConfig`.

    ``light``: with what stands for torch, where a framework is needed and torch itself is not.
    """
    (tmp_path / "bare.py").write_text(BARE)
    monkeypatch.syspath_prepend(str(tmp_path))  # agents import a framework, too

    @contextlib.asynccontextmanager
    async def make(
        script: str = "",
        *,
        torch: bool = False,
        light: bool = False,
        env: dict[str, str] | None = None,
        **fields: object,
    ) -> AsyncIterator[Rig]:
        path = tmp_path / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(script))
        ours = [NO_TORCH, *SOURCES] if light else SOURCES
        born = {
            "FOLDER": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([*ours, str(tmp_path), os.environ.get("PYTHONPATH", "")]),
            # What optimizers need takes the longest to import.
            **({} if "optim" in script or "_dynamo" in script else {"DLROVER_WARM": "core"}),
            **(env or {}),
        }
        config = LaunchConfig((str(path),), env=born, stores=torch or light, run_dir=str(tmp_path / "run"))
        if not (torch or light):
            config = config._replace(framework="bare")
        config = config._replace(**fields)  # type: ignore[arg-type]
        launcher = LinuxLauncher(config)
        await asyncio.wait_for(launcher.open(), 60)
        one = Rig(tmp_path, launcher, config.nproc)
        one.listen()
        try:
            yield one
        finally:
            one.deafen()
            await asyncio.wait_for(launcher.close(), BOUND_S)
            async for notice in one._stream:
                one.notices.append(notice)
            assert list((tmp_path / "run").iterdir()) == []

    return make


async def _gone(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    dead = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_reader(fd, lambda: dead.done() or dead.set_result(None))
    try:
        await asyncio.wait_for(dead, BOUND_S)
    finally:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


@pytest.fixture
def gone() -> Callable[[int], Awaitable[None]]:
    """Await the end of any process."""
    return _gone

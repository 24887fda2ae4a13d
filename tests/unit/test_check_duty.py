"""The agent's side of a node check: what it looks at, what it runs, what it says, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from orders import ordering

from dlrover_adapters.agent.checks import basic, processes, scripts, workload
from dlrover_adapters.agent.checks.basic import MIB, Place
from dlrover_adapters.agent.checks.duty import CheckDuty
from dlrover_adapters.agent.checks.processes import Command
from dlrover_adapters.agent.checks.workload import Result
from dlrover_core.job.checks import ReportCheck
from dlrover_core.job.orders import Order
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.unchecked import Unchecked

BOUND_S = 30.0
SOURCES = [str(Path(__file__).parents[2] / one) for one in ("src", "src/adapters")]
WAITING = Order(leave=False, reason="waiting", grace_us=0)


def machine(folder: Path, **files: str) -> Path:
    """A root with these files; names with '__' for '/'."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


# ---- what it looks at


def test_this_machine_is_well(tmp_path: Path) -> None:
    """Nothing is wrong where the tests run, and looking leaves nothing behind."""
    assert basic.problems(Place((str(tmp_path),), others=True, asked_us=time.time_ns() // 1000)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to() -> None:
    """It is named, with the reason."""
    assert next(basic.disk(Place(("/proc",)))).startswith("disk: /proc cannot be written to: ")


def test_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose file system is as good as full fails, and says how much is left."""
    full = os.statvfs_result((4096, 4096, 1000, 10, 10, 100, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    assert list(basic.disk(Place((str(tmp_path),)))) == [
        f"disk: 0 MiB free in {tmp_path}, at least 64 are needed",
        f"disk: no inodes are left in {tmp_path}",
    ]


def test_memory_within_the_containers_limit(tmp_path: Path) -> None:
    """The host has plenty, the control group has not; page cache that would give way counts as free."""
    root = machine(
        tmp_path,
        proc__meminfo="MemTotal: 100000000 kB\nMemAvailable: 90000000 kB\n",
        proc__self__cgroup="0::/pod\n",
        **{
            "sys__fs__cgroup__pod__memory.max": str(1000 * MIB),
            "sys__fs__cgroup__pod__memory.current": str(950 * MIB),
            "sys__fs__cgroup__pod__memory.stat": "anon 1\ninactive_file 0\n",
        },
    )
    (problem,) = basic.memory(Place(nproc=2, root=root))
    assert problem == "memory: 50 MiB left within the limit of control group /pod, at least 256 are needed"
    (root / "sys/fs/cgroup/pod/memory.stat").write_text(f"inactive_file {500 * MIB}\n")
    assert list(basic.memory(Place(nproc=2, root=root))) == []


def test_too_little_memory(tmp_path: Path) -> None:
    """A host whose memory is used up fails."""
    root = machine(tmp_path, proc__meminfo="MemAvailable: 1024 kB\n")
    assert list(basic.memory(Place(root=root))) == ["memory: 1 MiB available, at least 192 are needed"]


def test_the_clock() -> None:
    """A word that comes before it was said means a clock that is behind; a late word means little."""
    now = time.time_ns() // 1000
    assert list(basic.clock(Place(asked_us=now - 60_000_000))) == []
    assert "s behind the master's" in next(basic.clock(Place(asked_us=now + 3600 * 1_000_000)))
    assert "s ahead of the master's" in next(basic.clock(Place(asked_us=now - 2 * 3600 * 1_000_000)))


def test_ports() -> None:
    """One master that answers is enough; none at all is told with why."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        assert list(basic.ports(Place(masters=("127.0.0.1:1", there)))) == []
    assert list(basic.ports(Place(masters=("127.0.0.1:1",)))) == [
        "ports: no master can be reached: 127.0.0.1:1: Connection refused"
    ]


def test_gpus_without_a_device_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver knows GPUs and this container was promised some: then they must be there."""
    root = machine(tmp_path, **{"proc__driver__nvidia__gpus__0000:01__information": "", "dev__null": ""})
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    assert list(basic.devices(Place(root=root))) == [
        "devices: the driver knows 1 GPUs, and not one of them has a device file here"
    ]
    machine(tmp_path, dev__nvidia0="")
    assert list(basic.devices(Place(root=root))) == []


def test_left_overs_of_an_earlier_run(tmp_path: Path) -> None:
    """An orphan that bears another run's mark and much memory is named; ours, and small ones, are not."""
    huge = 4 * 2**30 // os.sysconf("SC_PAGE_SIZE")

    def process(pid: int, mark: str, parent: int = 1, pages: int = huge) -> dict[str, str]:
        stat = f"{pid} (py thon) S {parent} {' '.join('0' for _ in range(19))} {pages} 0"
        return {
            f"proc__{pid}__stat": stat,
            f"proc__{pid}__environ": f"A=1\0MARK={mark}\0",
            f"proc__{pid}__comm": "python",
        }

    root = machine(
        tmp_path,
        **process(11, "old"),
        **process(12, "mine"),
        **process(13, "old", parent=5),
        **process(14, "old", pages=10),
    )
    assert list(basic.left_over(Place(mark="MARK=mine", root=root))) == [
        "left over: process 11 (python) holds 4096 MiB of memory, of an earlier run whose agent is gone"
    ]


# ---- what it runs


def environment() -> dict[str, str]:
    """Enough for our modules and those of a test."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*SOURCES, os.environ.get("PYTHONPATH", "")])}


def sessions(pid: int) -> list[int]:
    """Living processes of a session."""
    from dlrover_adapters.agent.process import members_of

    return [one.pid for one in members_of(frozenset({pid})) if one.state not in ("Z", "X")]


class Bell:
    """What a process rings by writing to it: a pipe with a name."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "seen.bell"
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    async def rung(self) -> None:
        """Wait for it."""
        loop, heard = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._fd, heard.set)
        try:
            await asyncio.wait_for(heard.wait(), BOUND_S)
        finally:
            loop.remove_reader(self._fd)
            os.close(self._fd)


def test_site_checks(tmp_path: Path) -> None:
    """0 is well; any other code fails with the last line; what does not exist or does not end is told as such."""

    def script(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    async def told() -> list[str]:
        lines = [
            script("well.sh", "echo fine"),
            f"{script('fabric.sh', 'echo looking; echo fabric manager is down; exit 202')} --fast",
            script("quiet.sh", "exit 14"),
            str(tmp_path / "none.sh"),
        ]
        return [
            *await scripts.problems(lines, environment(), BOUND_S),
            *await scripts.problems([script("slow.sh", "echo waiting; sleep 600 & wait")], environment(), 0.5),
        ]

    assert asyncio.run(told()) == [
        "check fabric.sh: exit code 202: fabric manager is down",
        "check quiet.sh: exit code 14",
        "check none.sh: exit code 127: cannot be started: No such file or directory",
        "check slow.sh: did not end within 0.5 s: waiting",
    ]


def test_site_checks_share_the_time(tmp_path: Path) -> None:
    """One that does not end takes the time of those after it: together they never take more than the limit."""
    slow, quick = tmp_path / "slow.sh", tmp_path / "quick.sh"
    for path, text in ((slow, "sleep 600 & wait"), (quick, "exit 0")):
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    told = asyncio.run(scripts.problems([str(slow), str(slow), str(quick)], environment(), 0.5))
    not_run = "not run: those before it took all of 0.5 s"
    assert told == [
        "check slow.sh: did not end within 0.5 s",
        f"check slow.sh: {not_run}",
        f"check quick.sh: {not_run}",
    ]


def test_nothing_is_left_of_what_was_cancelled(tmp_path: Path) -> None:
    """A check that is called off kills its processes, and what they have started, before it returns."""
    pids, bell = tmp_path / "pids", Bell(tmp_path)

    async def told() -> None:
        command = Command(("sh", "-c", f"sleep 600 & echo $$ > {pids}; echo > {bell.path}; wait"), environment())
        running = asyncio.ensure_future(processes.run([command], BOUND_S))
        await bell.rung()
        assert len(sessions(int(pids.read_text()))) == 2
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    asyncio.run(told())
    assert sessions(int(pids.read_text())) == []


def test_the_worst_worker_is_the_node() -> None:
    """Unfit goes before failed, and the longest time counts."""
    well, failed, unfit = (
        Result(True, True, 3, 2),
        Result(False, True, 9, 1, "late"),
        Result(False, False, 0, 0, "no GPU"),
    )
    assert workload.worst([well, well]) == well
    assert workload.worst([well, failed]) == Result(False, True, 9, 2, "late")
    assert workload.worst([failed, unfit]) == Result(False, False, 9, 1, "no GPU")


# ---- what it says

STUB = """
import json, os, sys, time
said = {name: os.environ["DLROVER_CHECK_" + name] for name in ("STORE", "PREFIX", "UNFIT", "NODE", "RANK")}
with open(os.environ["SEEN"], "a") as file:
    file.write(json.dumps([os.environ["RANK"], os.environ["WORLD_SIZE"], said]) + "\\n")
if os.path.exists(os.environ["SEEN"] + ".bell"):
    open(os.environ["SEEN"] + ".bell", "w").write("rung")
if os.environ.get("STUB") == "hang":
    time.sleep(600)
if os.environ.get("STUB") == "die":
    sys.exit("segfault in libcuda")
print(json.dumps({"ok": True, "fit": True, "took_s": 0.5, "alone_s": 0.25, "what": ""}))
"""


class Told:
    """A duty at work: orders in, reports out."""

    def __init__(self, duty: CheckDuty, node: str) -> None:
        self.duty = duty
        self.reports: asyncio.Queue[Any] = asyncio.Queue()
        self.desk = Desk(node, "run", WAITING, self.reports.put_nowait)

    async def check(self, **fields: Any) -> ReportCheck:
        """Order a check and wait for its report."""
        self.duty.ordered(ordering(WAITING, **{"check": 1, "check_round": 1, "check_us": 20_000_000, **fields}))
        return await asyncio.wait_for(self.reports.get(), BOUND_S)


@pytest.fixture
def at_work(tmp_path: Path) -> Callable[..., contextlib.AbstractAsyncContextManager[Told]]:
    """A duty on a well machine, whose workload is a stub that writes down what it was told."""
    (tmp_path / "stub_workload.py").write_text(STUB)
    (tmp_path / "seen").touch()

    @contextlib.asynccontextmanager
    async def make(place: Place | None = None, site: tuple[str, ...] = (), stub: str = "") -> AsyncIterator[Told]:
        env = environment()
        env.update(
            PYTHONPATH=os.pathsep.join([str(tmp_path), env["PYTHONPATH"]]), SEEN=str(tmp_path / "seen"), STUB=stub
        )
        duty = CheckDuty(
            place or Place(nproc=2), env=lambda: env, site=site, module="stub_workload", folder=str(tmp_path)
        )
        told = Told(duty, "worker-3-0")
        running = asyncio.ensure_future(duty.run(told.desk))
        try:
            yield told
        finally:
            running.cancel()
            await asyncio.wait([running])

    return make


def test_basic(at_work: Callable[..., contextlib.AbstractAsyncContextManager[Told]]) -> None:
    """It looks and runs the site's checks, and starts no workload; each round is answered once."""

    async def told() -> None:
        async with at_work() as one:
            report = await one.check(check_kind="basic", check_size=1)
            assert report[:5] == ("worker-3-0", 1, 1, True, True)
            one.duty.ordered(one.duty._order)  # type: ignore[arg-type]
            again = await one.check(check=2, check_kind="basic", check_size=1)
            assert again[1:3] == (2, 1)
        async with at_work(Place(("/proc",)), site=("false",)) as one:
            report = await one.check(check_kind="basic", check_size=1)
            assert (report.ok, report.fit) == (False, False)
            assert "disk: /proc cannot be written to" in report.what
            assert "check false: exit code 1" in report.what

    asyncio.run(told())


def test_full(at_work: Callable[..., contextlib.AbstractAsyncContextManager[Told]], tmp_path: Path) -> None:
    """Each worker of the node does its part over the store, under the round's own prefix; alone, over a file."""
    import json

    async def told() -> None:
        async with at_work() as one:
            report = await one.check(check_kind="full", check_rank=1, check_size=2, check_store="h:1", check_round=2)
            assert report == ReportCheck("worker-3-0", 1, 2, True, True, 500_000, 250_000, "")
            assert (await one.check(check=2, check_kind="full", check_size=1)).ok

    asyncio.run(told())
    seen = sorted(json.loads(line) for line in (tmp_path / "seen").read_text().splitlines())
    pair = {"STORE": "h:1", "PREFIX": "dlrover-check-1-2", "UNFIT": "", "NODE": "worker-3-0"}
    assert [one for one in seen if one[1] == "4"] == [
        ["2", "4", {**pair, "RANK": "6"}],
        ["3", "4", {**pair, "RANK": "7"}],
    ]
    assert {one[2]["STORE"].partition(":")[0] for one in seen if one[1] == "2"} == {"file"}


def test_an_unfit_node_tells_its_partners(
    at_work: Callable[..., contextlib.AbstractAsyncContextManager[Told]], tmp_path: Path
) -> None:
    """What is wrong alone is what is reported; the workers are told too, so that nobody waits for them."""

    async def told() -> None:
        async with at_work(Place(("/proc",), nproc=1)) as one:
            report = await one.check(check_kind="full", check_size=2, check_store="h:1")
            assert (report.ok, report.fit) == (False, False)
            assert report.what.startswith("disk: /proc")

    asyncio.run(told())
    assert '"UNFIT": "disk: /proc' in (tmp_path / "seen").read_text()


@pytest.mark.parametrize(
    ("stub", "limit_us", "what"),
    [
        ("die", 20_000_000, "workload: local rank 0 exit code 1: segfault in libcuda"),
        ("hang", 500_000, "did not end within"),
    ],
)
def test_a_workload_that_dies_or_hangs(
    at_work: Callable[..., contextlib.AbstractAsyncContextManager[Told]], stub: str, limit_us: int, what: str
) -> None:
    """It makes the node unfit, within the time limit."""

    async def told() -> None:
        async with at_work(Place(nproc=1), stub=stub) as one:
            report = await one.check(check_kind="full", check_size=1, check_us=limit_us)
            assert (report.ok, report.fit) == (False, False)
            assert what in report.what

    asyncio.run(told())


def test_another_order_ends_a_check(
    at_work: Callable[..., contextlib.AbstractAsyncContextManager[Told]], tmp_path: Path
) -> None:
    """Called off, nothing is reported and nothing runs on; the next round is done instead."""
    bell = Bell(tmp_path)

    async def told() -> None:
        async with at_work(Place(nproc=1), stub="hang") as one:
            one.duty.ordered(
                ordering(WAITING, check=1, check_round=1, check_us=60_000_000, check_kind="full", check_size=1)
            )
            await bell.rung()
            report = await one.check(check=2, check_kind="basic", check_size=1)
            assert report.number == 2
            assert one.reports.empty()

    asyncio.run(told())
    assert [one for one in Path("/proc").iterdir() if one.name.isdecimal() and _is_stub(one, tmp_path)] == []


def _is_stub(process: Path, folder: Path) -> bool:
    try:
        return f"SEEN={folder}/seen".encode() in (process / "environ").read_bytes() and process.name != str(os.getpid())
    except OSError:
        return False


def test_workers_that_still_run_are_no_check(
    at_work: Callable[..., contextlib.AbstractAsyncContextManager[Told]],
) -> None:
    """A node whose workers cannot be stopped does not measure against them."""

    async def told() -> None:
        async with at_work() as one:
            one.desk.generation = 7
            report = await one.check(check_kind="full", check_size=1)
            assert (report.ok, report.what) == (False, "workers of generation 7 still run here")

    asyncio.run(told())


def test_agents_that_cannot_be_checked_say_so_at_once() -> None:
    """Torch's own agent starts its workers itself: each round is answered well, once, so that nobody waits for it."""

    async def told() -> None:
        duty, reports = Unchecked(), asyncio.Queue[Any]()
        running = asyncio.ensure_future(duty.run(Desk("worker-0-0", "run", WAITING, reports.put_nowait)))
        asked = ordering(WAITING, check=1, check_round=1)
        for order in (WAITING, asked, asked, ordering(asked, check_round=2), WAITING):
            duty.ordered(order)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert [reports.get_nowait() for _ in range(reports.qsize())] == [
            ReportCheck("worker-0-0", 1, 1, True),
            ReportCheck("worker-0-0", 1, 2, True),
        ]
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(told())

"""What the agent's lookout sees and tells, over real files and a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from dlrover_adapters.agent import lookout as lookouts
from dlrover_adapters.agent.cgroup import MemoryGroup
from dlrover_adapters.agent.last_words import LastWords
from dlrover_adapters.agent.log_watch import Known, Output
from dlrover_adapters.agent.lookout import Lookout
from dlrover_core.diagnosis.matching import Matcher
from dlrover_core.job.evidence import ReportEvidence
from dlrover_core.runtime.agent import NOTHING
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.launcher import WorkerExit, WorkerStep

BOUND_S = 20.0
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
ABORTED = "NCCL communicator was aborted on rank 3"
LEAK = {
    "id": "mine.leak",
    "title": "a leak",
    "class": "USER",
    "action": "proc",
    "sources": ["log"],
    "patterns": ["pool [0-9]+ leaks"],
}
MINE = json.dumps([LEAK])


def open_files() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


class Seen:
    """A lookout at work, and what it told."""

    def __init__(self, folder: Path, lookout: Lookout) -> None:
        self.folder, self.lookout = folder, lookout
        self.told: asyncio.Queue[ReportEvidence] = asyncio.Queue()

    def worker(self, rank: int = 0, pid: int = 0) -> Path:
        """A worker of generation 1 begins to write."""
        path = self.folder / f"rank{rank}"
        path.touch()
        self.lookout.follow(Output(str(path), 1, rank, pid))
        return path

    def died(self, rank: int = 0, code: int = 1, *, asked: bool = False) -> None:
        """It has died; its file is gone as soon as that is heard."""
        self.lookout.finish(str(self.folder / f"rank{rank}"))
        self.lookout.noticed(WorkerExit(1, rank, rank, code, asked, time.monotonic_ns() // 1000))

    async def next(self) -> ReportEvidence:
        """The next that is told."""
        return await asyncio.wait_for(self.told.get(), BOUND_S)

    async def looked(self, times: int = 2) -> None:
        """Wait until the thread has looked again, whatever it has found."""
        looks, done = 0, asyncio.Event()
        loop, look = asyncio.get_running_loop(), self.lookout._look

        def counted() -> None:
            nonlocal looks
            look()
            looks += 1
            if looks >= times:
                loop.call_soon_threadsafe(done.set)

        self.lookout._look = counted  # type: ignore[method-assign]
        self.lookout._wake.set()
        await asyncio.wait_for(done.wait(), BOUND_S)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookouts, "LOOK_S", 0.02)


@contextlib.asynccontextmanager
async def looking(
    folder: Path, extra: str = "", kernel: str = "", group: MemoryGroup | None = None
) -> AsyncIterator[Seen]:
    """One that runs; afterwards nothing of it is left."""
    threads, fds = threading.active_count(), open_files()
    seen = Seen(folder, Lookout(extra, kernel=kernel, group=group))
    desk = Desk("worker-0-0", "run", NOTHING, seen.told.put_nowait)  # type: ignore[arg-type]
    desk.generation = 1
    running = asyncio.ensure_future(seen.lookout.run(desk))
    try:
        yield seen
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    helpers = sum(one.name.startswith("asyncio_") for one in threading.enumerate())  # the loop's own, which it keeps
    assert threading.active_count() - helpers <= threads
    assert open_files() <= fds


def test_a_known_line_is_told_with_its_rank(tmp_path: Path) -> None:
    """A line that the table knows is told once it is written: signature, rank, generation, and the line itself."""

    async def run() -> None:
        async with looking(tmp_path) as seen:
            worker = seen.worker(rank=3)
            worker.write_text(f"step 1\n{ECC}\nstep 2\n")
            told = await seen.next()
            assert (told.node, told.source, told.signature) == ("worker-0-0", "log", "cuda.ecc")
            assert (told.rank, told.generation) == (3, 1)
            assert told.text == ECC
            assert 0 <= told.age_us < BOUND_S * 1e6

    asyncio.run(run())


def test_the_users_own_signatures_count(tmp_path: Path) -> None:
    """What a job brings along is looked for as what we bring."""

    async def run() -> None:
        async with looking(tmp_path, MINE) as seen:
            seen.worker().write_text("pool 7 leaks\n")
            assert (await seen.next()).signature == "mine.leak"

    asyncio.run(run())


def test_last_words_are_read_at_once_and_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A death wakes the thread, which reads to the end of a file that is removed meanwhile, half lines too."""
    monkeypatch.setattr(lookouts, "LOOK_S", 3600.0)

    async def run() -> None:
        async with looking(tmp_path) as seen:
            worker = seen.worker()
            await seen.looked(1)  # it has opened the file
            worker.write_text(ECC)
            worker.unlink()
            seen.died()
            assert (await seen.next()).text == ECC

    asyncio.run(run())


def test_consequences_are_told_at_death_only(tmp_path: Path) -> None:
    """A survivor's word about its peers is told when the survivor has died, and not when it was stopped by us."""

    async def run() -> None:
        async with looking(tmp_path) as seen:
            for rank in (0, 1):
                seen.worker(rank).write_text(f"{ABORTED}\n")
            await seen.looked()
            seen.died(rank=0, code=-9, asked=True)
            await seen.looked()
            assert seen.told.empty()
            seen.died(rank=1)
            told = await seen.next()
            assert (told.rank, told.text) == (1, ABORTED)

    asyncio.run(run())


def test_the_kernels_word_is_told(tmp_path: Path) -> None:
    """An Xid is told with its GPU; where the kernel names one of our workers' processes, with that rank."""
    os.mkfifo(tmp_path / "kmsg")
    line = "6,1234,5678901,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=4321, name=python3, GPU has fallen off the bus.\n"

    async def run() -> None:
        async with looking(tmp_path, kernel=str(tmp_path / "kmsg")) as seen:
            seen.lookout._ours = lookouts.Ours()
            await seen.looked()
            kernel = os.open(tmp_path / "kmsg", os.O_WRONLY)
            os.write(kernel, line.encode())
            told = await seen.next()
            assert (told.source, told.signature, told.rank, told.generation) == ("kernel", "xid.fallen_off", -1, 1)
            assert "0000:3b:00" in told.subject
            seen.worker(rank=2, pid=4321)
            await seen.looked()
            os.write(kernel, line.encode())
            assert (await seen.next()).rank == 2
            os.close(kernel)

    asyncio.run(run())


def test_an_oom_kill_names_its_rank(tmp_path: Path) -> None:
    """The counter of our memory group rises and a worker dies of SIGKILL: that rank was the OOM killer's, and why."""
    for name, text in (("memory.max", "1000\n"), ("memory.events", "oom 0\noom_kill 0\n")):
        (tmp_path / name).write_text(text)

    async def run() -> None:
        async with looking(tmp_path, group=MemoryGroup(2, [tmp_path], "/us")) as seen:
            seen.worker(rank=5)
            await seen.looked()
            (tmp_path / "memory.events").write_text("oom 1\noom_kill 1\n")
            seen.died(rank=5, code=-9)
            told = await seen.next()
            assert (told.source, told.signature, told.rank) == ("cgroup", "cgroup.oom", 5)
            assert "limit" in told.text

    asyncio.run(run())


def test_a_death_is_known_by_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead worker's signature and place are found here, once the table is at hand: with the first step, or the first line."""
    monkeypatch.setattr(lookouts, "FIRST_S", BOUND_S)
    trace = 'Traceback (most recent call last):\n  File "/job/train.py", line 7, in f\n    batch[9]\nIndexError: out of range\n'
    words = LastWords(tail=trace, error="IndexError: out of range", error_at_us=1, trace=trace)

    async def run() -> None:
        async with looking(tmp_path) as seen:
            assert await asyncio.to_thread(seen.lookout.known, 1, words) == Known()
            seen.lookout.noticed(WorkerStep(1, 0, 0, first=True, at_us=1))
            known = await asyncio.to_thread(seen.lookout.known, 1, words)
            assert known.signature == "exception.IndexError"
            assert "train.py:7" in known.place
            assert seen.lookout.known(-11, LastWords("", "", 0)).signature == "exit.sigsegv"

    asyncio.run(run())


def test_what_was_seen_of_a_death_is_told_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks by what a death is known has had everything looked at: the leader hears of reasons before it acts."""
    monkeypatch.setattr(lookouts, "LOOK_S", 3600.0)
    monkeypatch.setattr(lookouts, "FIRST_S", BOUND_S)

    async def run() -> None:
        async with looking(tmp_path) as seen:
            worker = seen.worker()
            await seen.looked(1)
            worker.write_text(f"{ECC}\n")
            await asyncio.to_thread(seen.lookout.known, 1, LastWords("", "", 0))
            assert seen.told.get_nowait().signature == "cuda.ecc"

    asyncio.run(run())


def test_a_machine_that_offers_nothing_is_no_trouble(tmp_path: Path) -> None:
    """No kernel log, no group, no output yet, files that cannot be opened: the lookout goes on and tells what it can."""

    async def run() -> None:
        async with looking(tmp_path, kernel=str(tmp_path / "none")) as seen:
            seen.lookout.follow(Output(str(tmp_path / "no" / "file"), 1, 7, 0))
            seen.lookout.follow(Output(os.devnull, 1, 8, 0))
            seen.worker().write_text(f"{ECC}\n")
            assert (await seen.next()).rank == 0

    asyncio.run(run())


def test_a_source_that_fails_costs_no_other(tmp_path: Path) -> None:
    """A folder for a kernel log opens and cannot be read: that is said once, and output is watched as before."""

    async def run() -> None:
        async with looking(tmp_path, kernel=str(tmp_path)) as seen:
            await seen.looked()
            with structlog.testing.capture_logs() as said:
                seen.worker().write_text(f"{ECC}\n")
                assert (await seen.next()).rank == 0
            assert said == []
            assert seen.lookout._kernel is None

    with structlog.testing.capture_logs() as told:
        asyncio.run(run())
    assert [one["event"] for one in told if one["log_level"] == "warning"] == ["the kernel's log is not read any more"]


def test_a_fault_of_ours_costs_evidence_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If matching itself breaks, the thread ends and releases everything, and the agent goes on."""

    async def run() -> None:
        loop, tried = asyncio.get_running_loop(), asyncio.Event()

        def broken(*_: object) -> None:
            loop.call_soon_threadsafe(tried.set)
            raise ValueError("no such pattern")

        monkeypatch.setattr(Matcher, "scan", broken)
        async with looking(tmp_path) as seen:
            seen.worker().write_text(f"{ECC}\n")
            await asyncio.wait_for(tried.wait(), BOUND_S)
            seen.died()
            assert seen.told.empty()

    asyncio.run(run())

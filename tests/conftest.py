"""Gates around every test: callbacks must not hold the event loop, integration tests leave nothing behind, and a test is

skipped only where `skips.txt` allows it.

`slow_callbacks` fails tests of all three suites in which a callback on any asyncio loop used more than
50 ms of its thread's *CPU time*. CPU time and not wall time, because on a small busy machine any callback may be preempted for
longer than that: the check is about our code and not about the neighbours. The price is that a callback which blocks
without computing passes here; ruff's ASYNC rules look for those. Garbage collections are deducted: what they cost depends on
what else the process has loaded, torch for one.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import uuid
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from dlrover_core.diagnosis import matching

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from tools.etcd_cluster import Cluster

TESTS = Path(__file__).parent
SKIPS = TESTS / "skips.txt"
SLOW_S = 0.050
STALE_S = 0.001  # a thread's CPU time was read so long before a callback at most: to read it costs ten times the clock
DYING_S = 5.0  # a process that was killed is granted this long to be gone
SHARED_S = 30.0  # the same for shared memory whose process is dead: other tests' servants clean up when they come to it
MARK = "DLROVER_TEST_MARK"  # in the environment of everything an integration test starts, however far it flees
SHARED_MEMORY = Path("/dev/shm")
OUR_SEGMENTS = ("dlrover", "psm_", "torch_", "sem.")
# Python's own servants live as long as the test process and serve all tests.
SERVANTS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


# torch looks up the name of every address that it connects to, in the test process too: a datagram that is lost costs 5 s else.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
# aiohttp reads the system's authorities as it is imported, 60 ms of each agent and each master; tests trust none but their own.
os.environ.setdefault("SSL_CERT_FILE", os.devnull)


def pytest_configure(config: pytest.Config) -> None:
    """Whoever runs tests in the background ignores signals, and what tests start would inherit that."""
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    if "PYTEST_XDIST_WORKER" in os.environ:
        # Tests that run side by side see each only what they themselves leave behind.
        tempfile.tempdir = tempfile.mkdtemp(prefix="tests-")
        os.environ["TMPDIR"] = tempfile.tempdir
        config.option.basetemp = f"{tempfile.tempdir}/t"  # pytest's own is too long for the path of a socket
        atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)


def pytest_collection_finish() -> None:
    """Modules and items live to the end: no collection has to look through them again."""
    gc.collect()
    gc.freeze()


def _suite(path: Path) -> str:
    """The folder under tests/ that holds ``path``."""
    inside = path.relative_to(TESTS).parts if path.is_relative_to(TESTS) else ()
    return inside[0] if len(inside) > 1 else ""


# ---- skips


def pytest_addoption(parser: pytest.Parser) -> None:
    """An environment of one's own may lack what `make` installs."""
    words = "a test may be skipped that tests/skips.txt does not name, and is where it needs a library that is not here"
    parser.addoption("--any-skip", action="store_true", help=words)


def skips() -> dict[str, list[str]]:
    """The tests that may be skipped, and the beginnings of the reasons for which they may."""
    found: dict[str, list[str]] = {}
    for line in SKIPS.read_text().splitlines() if SKIPS.exists() else []:
        if line and not line.startswith("#"):
            name, _, reason = line.partition(": ")
            found.setdefault(name, []).append(reason)
    return found


def _missing(error: BaseException | None) -> str:
    """The library of others for whose lack this was raised; empty: something else was wrong."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return "" if name.startswith(("dlrover", "tests", "tools")) else name


def _judge(
    config: pytest.Config, report: pytest.TestReport | pytest.CollectReport, call: pytest.CallInfo[Any] | None
) -> None:
    """Make a failure of a skip that is not allowed; with ``--any-skip`` a skip of what lacks a library."""
    if config.option.any_skip:
        name = _missing(call.excinfo.value) if report.failed and call is not None and call.excinfo is not None else ""
        if name:
            report.outcome, report.longrepr = "skipped", (report.nodeid, 0, f"Skipped: {name} is not here")
        return
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    name = re.split(r"[\[@]", report.nodeid)[0].removeprefix("tests/")  # a group's name follows "@"
    if not any(reason.startswith(one) for one in skips().get(name, ())):
        report.outcome = "failed"
        report.longrepr = (
            f"skipped, which {SKIPS.name} beside conftest.py does not allow (or --any-skip): {name}: {reason}"
        )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, None]:
    """A skipped test fails, unless it may be skipped for that reason."""
    _judge(item.config, (yield).get_result(), call)


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, None]:
    """The same for a module that is skipped as a whole."""
    report = (yield).get_result()
    _judge(collector.config, report, getattr(report, "call", None))


# ---- slow callbacks


class _Stopwatch(threading.local):
    """This thread's CPU seconds without garbage collection."""

    collecting = 0.0
    began = 0.0
    read, read_at = 0.0, -1.0

    def begins(self, at: float) -> None:
        """A callback does, at this time of the clock, and this thread's CPU time was read too long before it."""
        self.read, self.read_at = time.thread_time() - self.collecting, at

    def took(self) -> float:
        """What that callback has used: up to `STALE_S` more, never less."""
        return time.thread_time() - self.collecting - self.read

    def collected(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self.began = time.thread_time()
        else:
            self.collecting += time.thread_time() - self.began


def _timed(
    run: Callable[[asyncio.Handle], None], watch: _Stopwatch, slow: list[str]
) -> Callable[[asyncio.Handle], None]:
    def timed(handle: asyncio.Handle) -> None:
        callback, began = handle._callback, perf_counter()
        if began - watch.read_at > STALE_S:  # looked at here: stories in virtual time run millions of callbacks
            watch.begins(began)
        try:
            run(handle)
        finally:
            # Nobody has more CPU time than time.
            if perf_counter() - began > SLOW_S and (took := watch.took()) > SLOW_S:
                owner = getattr(callback, "__self__", None)
                slow.append(f"{took * 1e3:.0f} ms in {owner if isinstance(owner, asyncio.Task) else callback!r}")

    return timed


@pytest.fixture(autouse=True)
def slow_callbacks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that held an event loop for longer than 50 ms of CPU time in one callback."""
    excuse = request.node.get_closest_marker("slow_loop")
    if excuse is not None and not excuse.kwargs.get("reason"):
        pytest.fail('say why: @pytest.mark.slow_loop(reason="...")')
    if excuse is not None or _suite(request.path) not in {"unit", "integration", "chaos"}:
        yield
        return
    matching.prepare()  # once per process, as a master does it before anything fails
    watch, slow = _Stopwatch(), list[str]()
    gc.callbacks.append(watch.collected)
    try:
        with monkeypatch.context() as patch:
            # Handle._run is the one place every callback of every loop passes through; asyncio's debug mode measures
            # wall time and only logs.
            patch.setattr(asyncio.Handle, "_run", _timed(asyncio.Handle._run, watch, slow))
            yield
    finally:
        gc.callbacks.remove(watch.collected)
    if slow:
        pytest.fail("callbacks held the event loop for more than 50 ms of CPU time:\n  " + "\n  ".join(slow))


# ---- nothing left behind


def _descendants() -> set[int]:
    """Processes that this one has started, and what those have. psutil reads every process there is to say it."""
    found, waiting = set[int](), [os.getpid()]
    while waiting:
        folder = f"/proc/{waiting.pop()}/task"
        try:
            for task in os.listdir(folder):  # noqa: PTH208  # twice for each test
                with open(f"{folder}/{task}/children", "rb") as file:  # noqa: PTH123
                    waiting += (new := [int(one) for one in file.read().split()])
                    found.update(new)
        except OSError:
            continue  # gone meanwhile
    return found


def _marked(mark: str) -> list[psutil.Process]:
    """Every process that carries this test's mark, and every child of ours: those too that were re-parented."""
    pids, line = _descendants(), f"{MARK}={mark}".encode()
    for pid in set(psutil.pids()) - pids - {os.getpid()}:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
                if line in file.read().split(b"\0"):
                    pids.add(pid)
        except OSError:
            continue  # gone meanwhile, or another user's
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return [one for one in found if not _servant(one)]


def _servant(process: psutil.Process) -> bool:
    try:
        return any(name in word for word in process.cmdline() for name in SERVANTS)
    except psutil.Error:
        return False


def _dead(process: psutil.Process) -> bool:
    """Gone, or a zombie that its parent has yet to reap: in a container, process 1 may never."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _told(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} ({process.status()}): {' '.join(process.cmdline()) or process.name()}"
    except psutil.Error:
        return f"process {process.pid}"


def _processes_left(mark: str, before: set[int]) -> list[str]:
    dying = [one for one in _marked(mark) if one.pid not in before]
    _, slow = psutil.wait_procs(dying, timeout=DYING_S)
    alive = [one for one in slow if not _dead(one)]
    left = [_told(one) for one in alive]
    for one in alive:  # the next test must not pay for this one
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=DYING_S)
    return left


def _sockets() -> set[str]:
    """The sockets this process has open."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except OSError:
            continue  # the listing's own descriptor
        if target.startswith("socket:"):
            found.add(target)
    return found


def _sockets_left(before: set[str]) -> set[str]:
    """Those that stay open: grpc closes its own in a thread, a moment after their channel is closed."""
    deadline = time.monotonic() + DYING_S
    while (left := _sockets() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _files() -> set[Path]:
    """Shared memory, and runtime files (sockets, locks) that lie in the temporary folder itself."""
    segments = (one for one in SHARED_MEMORY.glob("*") if one.name.startswith(OUR_SEGMENTS))
    return {*segments, *Path(tempfile.gettempdir()).glob("dlrover*")}


def _files_left(before: set[Path]) -> set[Path]:
    """Those that stay though nobody uses them: shared memory is one for all, and others' may be on its way in or out."""
    deadline = time.monotonic() + SHARED_S
    while left := {one for one in _files() - before if not _in_use(one) and one.exists()}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


def _in_use(path: Path) -> bool:
    """Whether a living process maps or holds ``path``: then it is another test run's, ours have all ended."""
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            if str(path) in (process / "maps").read_text(errors="replace"):
                return True
            if any(str(fd.readlink()).startswith(str(path)) for fd in (process / "fd").iterdir()):
                return True
        except OSError:
            continue
    return False


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails an integration test that leaves a process, a socket, a runtime file or a shared-memory segment."""
    if _suite(request.path) != "integration":
        yield
        return
    alone = request.node.get_closest_marker("alone")
    if alone is not None and not alone.kwargs.get("reason"):
        pytest.fail('say why: @pytest.mark.alone(reason="...")')
    mark = uuid.uuid4().hex
    pids = _descendants()
    sockets, files = _sockets(), _files()
    with monkeypatch.context() as patch:
        patch.setenv(MARK, mark)
        yield
    left = _processes_left(mark, pids)
    gc.collect()  # what is merely unreachable is closed here, and pytest reports its ResourceWarning
    gc.freeze()  # torch and all that lives on is not looked through again by the next test's collection: 90 ms each
    left += [f"open {one}" for one in sorted(_sockets_left(sockets))]
    left += [f"file {one}" for one in sorted(_files_left(files))]
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left))


# ---- a real etcd


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[Cluster]:
    """A real etcd of one member for all tests of this process, each under an `etcd_prefix` of its own."""
    from tools.etcd_cluster import Cluster

    with Cluster() as etcd:
        yield etcd


@pytest.fixture
def etcd_prefix() -> str:
    """A prefix nobody else uses."""
    return f"t/{uuid.uuid4().hex}"

"""Running one training script under two launchers, reading its diary, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from _bench import HERE, say

from dlrover_core.kernel.events import Record
from dlrover_core.logs import open_log

SCRIPT = HERE / "scripts" / "ddp_step.py"
TORCH = "2.13.0"
OURS, TORCHRUN, BEST = "dlrover-run", "torchrun", "torchrun at its best"
# Without it no agent of torch 2.13 can join later: who was there in the first round tells its address in no other one, and a new
# one waits for it (`DynamicRendezvousHandler.next_rendezvous`, ``_bootstrap_store_info``) until the job is lost.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
AS_IT_COMES = "as it comes: 30 s between SIGTERM and SIGKILL, one store for rendezvous and workers"
AT_ITS_BEST = "--shutdown-timeout 1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
NVRX = "nvidia-resiliency-ext==0.4.1"
"""Newer releases do not install on the machine that the results come from."""

MARK = "DLROVER_BENCH_RUN"
LIMIT_S = 120.0
LEFT_S, SWEPT_S = 2.0, 15.0
DESK, SWEEPER = "dlrover_backends.ray.desk", "dlrover-sweeper"
"""By these words the desk on Ray and a sweeper are known; the sweeper ends what a killed launcher has started."""


class Broken(Exception):
    """A run failed: there is nothing to measure."""


class Lost(Broken):
    """A job did not survive what was done to it."""


class Line(NamedTuple):
    """One line of the diary; ``at`` in seconds by CLOCK_MONOTONIC."""

    what: str
    attempt: int
    rank: int
    pid: int
    step: int
    at: float


class Job:
    """One run of the script in a folder of its own. Use `running`. Without a script, ``launch`` says what runs."""

    def __init__(
        self,
        launcher: str,
        folder: Path,
        arguments: Sequence[str],
        launch: Sequence[str] = (),
        script: Path | None = SCRIPT,
    ) -> None:
        self.launcher, self.folder = launcher, folder
        self.started, self.env = 0.0, dict(OWN_STORE if launcher == BEST else {})
        self.token, self.mark = secrets.token_hex(16), secrets.token_hex(8)
        self.diary = folder / "diary"
        self.command = _launch(launcher, folder, launch)
        if script is not None:
            places = ["--diary", str(self.diary), "--checkpoint", str(folder / "state.pt")]
            self.command += [str(script), *places, *arguments]
        self._read, self._lines = 0, list[Line]()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, in a session of its own."""
        # PYTHONPATH and the like would lead the peer into our environment.
        strange = ("DLROVER", "VIRTUAL_ENV", *(() if self.launcher == OURS else ("PYTHON",)))
        env = {key: value for key, value in os.environ.items() if not key.startswith(strange)}
        env |= {"TMPDIR": str(self.folder), "DLROVER_TOKEN": self.token, MARK: self.mark, **self.env}
        with (self.folder / "output").open("ab") as output:
            self.started = time.monotonic()
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def lines(self) -> list[Line]:
        """The diary so far."""
        with contextlib.suppress(FileNotFoundError), self.diary.open("rb") as file:
            file.seek(self._read)
            whole = file.read()
            whole = whole[: whole.rfind(b"\n") + 1]
            self._read += len(whole)
            for line in whole.decode().splitlines():
                what, attempt, rank, pid, step, at = line.split()
                self._lines.append(Line(what, int(attempt), int(rank), int(pid), int(step), int(at) / 1e9))
        return self._lines

    def until(self, true: Callable[[list[Line]], bool], every_s: float = 0.001, limit_s: float = LIMIT_S) -> list[Line]:
        """Wait until ``true`` accepts the diary, and return the diary. Raises `Broken` after ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while not true(lines := self.lines()):
            if time.monotonic() > deadline:
                raise Broken(f"{self.launcher}: nothing for {limit_s:g} s after {lines[-1:]}; it said: {self.said()}")
            if self.process is None or self.process.poll() is not None:
                raise Broken(f"{self.launcher} ended early; it said: {self.said()}")
            time.sleep(every_s)
        return lines

    def wait(self) -> int:
        """Wait for the end, and return the exit status."""
        assert self.process is not None
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Broken(f"{self.launcher} does not end; it said: {self.said()}") from None

    def said(self) -> str:
        """The lines with errors that it printed, and the last ones."""
        text = (self.folder / "output").read_text(errors="replace")
        errors = [line for line in text.splitlines() if "Error" in line][:12]
        return "\n".join([*errors, "...", text[-1000:]])

    def _left(self) -> dict[int, str]:
        """The run's living processes, by number. Desks are killed first: without a master they end only after ten seconds."""
        left = {pid: _named(pid) for pid in marked(self.mark)}
        for pid in [pid for pid, words in left.items() if DESK in words]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            del left[pid]
        return left

    def records(self) -> list[Record]:
        """Our log of the run."""

        async def read() -> list[Record]:
            async with open_log(f"sqlite://{self.folder / 'log.db'}") as log:
                jobs = await log.jobs()
                return [record async for record in log.read(jobs[0])]

        return asyncio.run(read())

    def end(self) -> list[str]:
        """Kill the run's processes, and return those that the launcher left behind, in words. A sweeper gets time to end them."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        began = time.monotonic()
        while left := self._left():
            sweeps = any(words.startswith(SWEEPER) for words in left.values())
            if time.monotonic() - began > (SWEPT_S if sweeps else LEFT_S):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return list(left.values())
            time.sleep(0.02)
        return []


Run = TypeVar("Run", bound=Job)


@contextlib.contextmanager
def running(
    launcher: str, arguments: Sequence[str], launch: Sequence[str] = (), script: Path = SCRIPT
) -> Iterator[Job]:
    """A job that runs, in a folder that is removed. ``launch``: the launcher's options, in place of two workers."""
    with kept(lambda folder: Job(launcher, folder, arguments, launch, script)) as job:
        yield job


@contextlib.contextmanager
def kept(make: Callable[[Path], Run]) -> Iterator[Run]:
    """A job that ``make`` makes in a folder, running; both are gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix="dlb-"))
    try:
        job = make(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        job.start()
        yield job
    finally:
        left = job.end()
        shutil.rmtree(folder, ignore_errors=True)
        if left:
            say(f"{job.launcher} left {len(left)} processes behind, killed now: {'; '.join(left)}")


def marked(mark: str) -> list[int]:
    """The pids of the processes that a job started and that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def _named(pid: int) -> str:
    """A process in words: its name, its number, and how it was started."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()} ({pid}): {line[:200]}"
    except OSError:
        return f"({pid}), gone since"


def _launch(launcher: str, folder: Path, options: Sequence[str]) -> list[str]:
    if launcher == OURS:
        ours = Path(sys.executable).parent / "dlrover-run"
        return [str(ours), "--job-id", "bench", "--state-dir", str(folder), *(options or ("--nproc-per-node", "2"))]
    standalone = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "3")
    best = ("--shutdown-timeout", "1") if launcher == BEST else ()
    return [str(peer_python().parent / "torchrun"), *best, *(options or standalone)]


def peer_python() -> Path:
    """The interpreter of torchrun's own environment, which is made where it is missing: torch and numpy, nothing of ours."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "dlrover-bench" / f"torch-{TORCH}"
    python = home / "bin" / "python"
    done = home / "bin" / "torchrun"
    if not done.exists():
        say(f"making the peer's environment in {home}, once")
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"torch=={TORCH}", "numpy"], check=True)
    return python


def nvrx_folder() -> Path:
    """A folder for ``PYTHONPATH`` with NVRx's launcher, filled where it is missing. Torch and the rest are this environment's."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "dlrover-bench" / NVRX.replace("==", "-")
    if not (home / "bin" / "ft_launcher").exists():
        say(f"installing NVRx's launcher in {home}, once")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(home), NVRX]
        subprocess.run([*command, "defusedxml", "nvidia-ml-py", "pynvml", "setproctitle"], check=True)
    return home


def clock_offset() -> float:
    """Seconds from CLOCK_MONOTONIC to the wall clock, now."""
    before = time.monotonic_ns()
    wall = time.time_ns()
    return (wall - (before + time.monotonic_ns()) / 2) / 1e9

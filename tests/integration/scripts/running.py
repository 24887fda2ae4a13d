"""A running `dlrover-run`, for tests that hurt it: what it says, what its log says, and which processes are whose."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from commands import dlrover

from dlrover_adapters.agent.looks import catches
from dlrover_adapters.cli.scratch import MARK
from dlrover_adapters.http.client import fetch_status
from dlrover_adapters.torch.witness import wanted_signal
from dlrover_core.errors import CoreError

if TYPE_CHECKING:
    from typing_extensions import Self

SCRIPTS = Path(__file__).parent
BIN = Path(sys.executable).parent
NO_TORCH = str(SCRIPTS / "no_torch")
NEEDS_TORCH = re.compile(
    r"^\s*(import|from)\b.*[ ,](torch|lightning|transformers|curve|numpy)\b|Flash|Elastic", re.MULTILINE
)
IMPORTS = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)
TORCH = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
"""For a job whose script needs no torch, but whose test is about it."""
WITHOUT_TORCH = {"DLROVER_WARM": "core", "PYTHONPATH": os.pathsep.join(filter(None, (NO_TORCH, TORCH["PYTHONPATH"])))}
"""For a job none of whose programs imports it (`warmth`)."""
BOUND_S = 90.0
TOKEN = "of-the-tests"
LOOK_S, SELDOM_S = 0.02, 0.2
LOOKING = 0.1
"""The share of its time for which a test that waits may look: a look at /proc, or a question to a master, costs milliseconds.

A command costs a second: it may be asked half of the time.
"""
Found = TypeVar("Found")


def eventually(look: Callable[[], Found | None], what: str, bound_s: float = BOUND_S) -> Found:
    """The first thing that ``look`` finds. Other processes' doings ring no bell here, so it looks again and again."""
    deadline = time.monotonic() + bound_s
    began = time.monotonic()
    while (found := look()) is None or found is False:
        now = time.monotonic()
        assert now < deadline, f"{what}: not within {bound_s:g} s"
        took = now - began
        threading.Event().wait(min(max(LOOK_S, took / LOOKING), max(SELDOM_S, took)))
        began = time.monotonic()
    return found


class Process:
    """A process, as /proc shows it."""

    def __init__(self, pid: int, name: str, line: str) -> None:
        self.pid, self.name, self.line = pid, name, line

    def __repr__(self) -> str:
        return f"{self.name}({self.pid})"

    @property
    def lives(self) -> bool:
        """Zombies do not."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")

    def standing(self) -> str:
        """Its state, the CPU time it has had, and what the kernel has each of its threads wait for (0: nothing, it runs)."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()
            threads = [
                f"{(one / 'comm').read_text().strip()}: {(one / 'wchan').read_text() or '?'}"
                for one in sorted(Path(f"/proc/{self.pid}/task").iterdir())
            ]
        except OSError:
            return f"{self} is gone"
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return f"{self} {fields[0].decode()}, {cpu_s:.2f} s of CPU; {', '.join(threads)}"

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def ends(self) -> None:
        """Wait until it is dead."""
        eventually(lambda: not self.lives, f"the end of {self}")


def processes(mark: str) -> list[Process]:
    """Every living process with ``mark`` in the environment it began with."""
    found = []
    for pid in [int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal()]:
        try:
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(Process(pid, Path(f"/proc/{pid}/comm").read_text().strip(), line))
        except OSError:  # it ended while we looked, or is another user's
            continue
    return [one for one in found if one.lives]


def scripts(command: Sequence[str], folder: Path = Path()) -> list[Path]:
    """The scripts that a command names."""
    return [one for word in command if word.endswith(".py") and (one := folder / word).exists()]


def warmth(command: Sequence[str], folder: Path = Path()) -> dict[str, str]:
    """The environment of a launcher: its processes import no more of torch than a script of ``command`` needs.

    What a script imports of `SCRIPTS` counts with it. What optimizers need only for one that has any; where no script imports
    torch, what stands for it (`NO_TORCH`). Imports are half of what a short job costs. A job that is given a PYTHONPATH of its
    own, such as `TORCH`, has the real one.
    """
    texts = [one.read_text() for one in scripts(command, folder)]
    texts += [one.read_text() for name in IMPORTS.findall("\n".join(texts)) if (one := SCRIPTS / f"{name}.py").exists()]
    if any("optim" in one for one in texts) or not (texts or "--no-python" in command):
        return {}
    if any(NEEDS_TORCH.search(one) for one in texts) or "full" in command:
        return {"DLROVER_WARM": "core"}
    return WITHOUT_TORCH


def begin(line: Sequence[str], env: Mapping[str, str], folder: Path, out: Path, err: Path) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, as under a shell's job control. ``out``, ``err``: files for what it prints."""
    with out.open("wb") as to_out, err.open("wb") as to_err:
        return subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=to_out,
            stderr=to_err,
            env=env,
            cwd=folder,
            start_new_session=True,
        )


class Job:
    """One `dlrover-run`, in a session of its own as under a shell's job control. Leave it to have it killed.

    ``prefix`` is a command that becomes another one, such as ``env``: the launcher is started through it.
    """

    def __init__(
        self,
        folder: Path,
        *command: str,
        job: str = "e2e",
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.folder, self.name, self.state = folder, job, folder / "state"
        self.out, self.err = folder / "out", folder / "err"
        self._told: str | None = None  # the log of a job that has ended by itself, which grows no more
        self._tells_births = any("born" in one.read_text() for one in scripts(command, folder))
        arguments = [*prefix, str(BIN / "dlrover-run"), "--state-dir", str(self.state), "--job-id", job, *command]
        born = {**os.environ, "DLROVER_TOKEN": TOKEN, "FOLDER": str(folder), **warmth(command, folder), **(env or {})}
        self.process = begin(arguments, born, folder, self.out, self.err)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            told = f"--- stderr\n{self.said()[-6000:]}\n--- stdout\n{self.out.read_text()[-2000:]}\n"
            sys.stderr.write(f"{told}--- control log\n{self.control_log()[-6000:]}\n--- events\n{self.happened()}\n")
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.settings:
            for one in processes(self.mark):
                with contextlib.suppress(ProcessLookupError):  # it may have ended since
                    one.kill()

    # ---- what it says

    def said(self) -> str:
        """Its standard error so far."""
        return self.err.read_text(errors="replace")

    def control_log(self) -> str:
        """What its processes logged."""
        path = self.state / "jobs" / self.name / "control.log"
        return path.read_text() if path.exists() else ""

    def happened(self) -> str:
        """The newest of its events, for people; empty if there is no log yet."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.dlrover("events")[-12_000:]
        return "they cannot be read"

    def ended(self, bound_s: float = BOUND_S) -> int:
        """Its exit status, when it has ended; what there still is of it, and where that stands, if it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(bound_s)
        living = [Process(self.process.pid, "dlrover-run", ""), *(processes(self.mark) if self.settings else [])]
        stands = "\n".join([*(one.standing() for one in living), *self.stacks(living)])
        raise AssertionError(f"dlrover-run has not ended within {bound_s:g} s\n{stands}")

    def stacks(self, living: Sequence[Process]) -> list[str]:
        """Where the workers among these are: they write it on a signal, without Python's lock, which a hang may have in hand."""
        number = wanted_signal("")
        for one in living:
            if one.name.startswith("worker-") and catches(one.pid, number):
                with contextlib.suppress(ProcessLookupError):  # it may have ended since
                    os.kill(one.pid, number)
        folder = Path(self.settings["run_dir"]) if self.settings else self.state
        found = sorted(folder.rglob("stacks-*.txt"))
        with contextlib.suppress(AssertionError):
            eventually(lambda: all(one.stat().st_size for one in found), "the workers' stacks", 2.0)
        return [f"{one.name}:\n{one.read_text(errors='replace')[-3000:]}" for one in found]

    @property
    def settings(self) -> dict[str, Any]:
        """What it wrote down for its masters and agents; empty before."""
        try:
            return dict(json.loads((self.state / "jobs" / self.name / "settings.json").read_text()))
        except FileNotFoundError:
            return {}

    def status(self) -> dict[str, Any] | None:
        """What the leading master says; None while there is none."""
        try:
            address = self.settings["masters"][0]
            return dict(asyncio.run(fetch_status(address, TOKEN, timeout_s=2.0)))
        except (KeyError, CoreError):
            return None

    def until(self, is_so: Callable[[dict[str, Any]], object], what: str, bound_s: float = BOUND_S) -> dict[str, Any]:
        """The first status that is so."""

        def look() -> dict[str, Any] | None:
            assert self.process.poll() is None, f"dlrover-run has ended with {self.process.returncode} before {what}"
            status = self.status()
            return status if status is not None and is_so(status) else None

        return eventually(look, what, bound_s)

    def trains(self, generation: int, beyond: int = -1) -> dict[str, Any]:
        """Wait until all is well in this generation, at a step of its own after ``beyond``, and the script of every rank runs.

        A generation that has begun says nothing about its scripts, and a status shows the last one's step until there is one.
        """

        def well(status: dict[str, Any]) -> bool:
            assert status["generation"] <= generation, f"generation {status['generation']}, not {generation}: {status}"
            return status["generation"] == generation and self._well(status, beyond)

        return self.until(well, f"generation {generation} trains beyond step {beyond}")

    def trains_after(self, generation: int) -> dict[str, Any]:
        """The same for whichever generation comes after this one."""
        return self.until(
            lambda status: status["generation"] > generation and self._well(status), f"steps after {generation}"
        )

    def _well(self, status: dict[str, Any], beyond: int = -1) -> bool:
        if status["open_incidents"] or status["live"] is None:
            return False
        return bool(status["live"]["step"] > beyond) and self._begun(status["world_size"])

    def _begun(self, ranks: int) -> bool:
        """Does the script of every rank run? Of those that write down their births; others' steps must do."""
        if not self._tells_births:
            return True
        lives = [[int(words[1]) for words in self.told(rank) if words[0] == "born"] for rank in range(ranks)]
        return all(pids and Process(pids[-1], "", "").lives for pids in lives)

    # ---- its processes

    @property
    def mark(self) -> str:
        """What everything that this run started has in its environment."""
        return f"{MARK}={eventually(lambda: self.settings or None, 'settings')['run']}"

    def processes(self, name: str = "", *words: str) -> list[Process]:
        """Those of this run with that name, whose command line has these words, the oldest first."""
        found = [
            one for one in processes(self.mark) if name in ("", one.name) and all(word in one.line for word in words)
        ]
        return sorted(found, key=lambda one: one.pid)

    def one(self, name: str, *words: str) -> Process:
        """The first of them, as soon as there is one."""
        return eventually(lambda: next(iter(self.processes(name, *words)), None), f"a {name} {words}")

    @property
    def sweeper(self) -> Process:
        """The process that cleans up if the launcher cannot."""

        def look() -> Process | None:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            for pid in children:
                with contextlib.suppress(OSError):  # reaped since
                    if Path(f"/proc/{pid}/comm").read_text() == "dlrover-sweeper\n":
                        return Process(int(pid), "sweeper", "")
            return None

        return eventually(look, "a sweeper")

    def left(self) -> list[str]:
        """What there still is of this run although it has ended, after a moment's patience: processes, files, sockets."""
        folder = Path(self.settings["run_dir"])

        def look() -> list[str]:
            found: list[str] = [repr(one) for one in processes(self.mark)]
            return [*found, *([str(folder)] if folder.exists() else [])]

        deadline = time.monotonic() + 10.0
        while (found := look()) and time.monotonic() < deadline:
            threading.Event().wait(LOOK_S)
        return found

    # ---- its log

    def dlrover(self, command: str, *arguments: str) -> str:
        """What ``dlrover COMMAND JOB`` prints."""
        line = [command, self.name, *arguments]
        if "--log" not in arguments:
            line += ["--state-dir", str(self.state)]
        return dlrover(line).stdout

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of these kinds, all without any."""
        code = self.process.poll()
        told = self._told or self.dlrover("events", "--json")
        found = [json.loads(line) for line in told.splitlines()]
        over = found and found[-1]["event"] in ("JobSucceeded", "JobFailed", "JobStopped")
        self._told = told if over and code is not None and code >= 0 else None
        return [one for one in found if not kinds or one["event"] in kinds]

    # ---- its workers

    def told(self, rank: int = 0) -> list[list[str]]:
        """What the script of a rank wrote down (`notes.py`), line by line."""
        try:
            return [line.split() for line in (self.folder / f"told-{rank}").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def finish(self) -> None:
        """Let the scripts end."""
        (self.folder / "finish").touch()

"""What campaigns share that strike the processes of a real training job: the job, the strikes, and the curve to compare with."""

from __future__ import annotations

import contextlib
import heapq
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from tools.trials import Patience

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tests" / "integration" / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

from hosts_net import Host, Net, namespace  # noqa: E402  # they lie with the tests
from running import BIN, TOKEN, Job, Process, processes  # noqa: E402  # it lies with the tests

__all__ = [
    "BIN", "SCRIPTS", "TOKEN", "Control", "Host", "Job", "Life", "Net", "Process", "Storm", "Striking", "Timed", "children",
    "flaws", "lives", "namespace", "processes",
]  # fmt: skip

CONTROL_S = 1800.0
LOOK_S = 0.5


class Storm(Job):
    """A job, without a word on our terminal when it is left by an exception: its folder is kept."""

    def __exit__(self, *_: object) -> None:
        super().__exit__(None, None, None)

    def living(self, role: str) -> list[Process]:
        """The processes of a role, the oldest first."""
        if role == "dlrover-sweeper":
            return sorted(children(self.process.pid, role), key=lambda one: one.pid)
        found = [one for one in processes(self.mark) if one.name == role or one.name.startswith(f"{role}-")]
        return sorted((one for one in found if one.pid != self.process.pid), key=lambda one: one.pid)

    def check_alive(self) -> None:
        """Raises AssertionError when it has ended."""
        status = self.process.poll()
        assert status is None, f"dlrover-run has ended with {status} in the storm: {self.said()[-600:]}"

    def over(self, patience: Patience, bound_s: float) -> int:
        """Its exit status, when it has ended."""
        patience.until(lambda: self.process.poll() is not None, f"the job's end; it said {self.said()[-600:]}", bound_s)
        return self.process.wait()


def children(parent: int, name: str) -> list[Process]:
    """The children of a process that have a name."""
    found = []
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has ended since
            if Path(f"/proc/{pid}/comm").read_text().strip() == name[:15]:
                found.append(Process(int(pid), name, ""))
    return found


# ---- strikes, one after the other


class Timed(Protocol):
    """A strike that is due at a moment."""

    @property
    def at_s(self) -> float:
        """Seconds after the job's first step."""
        ...


class Striking:
    """Does the strikes of a storm, one after the other, and takes back in time what each of them has begun.

    A subclass says in `strike` how one is done. ``check_alive`` raises AssertionError when the job has ended.
    """

    def __init__(self, check_alive: Callable[[], None], patience: Patience) -> None:
        self._check_alive, self._patience = check_alive, patience
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.done = Counter[str]()

    def strike(self, strike: Timed, now_s: float) -> None:
        """Do it; ``now_s`` are seconds after the first step."""
        raise NotImplementedError

    def run(self, strikes: Sequence[Timed], seconds: float) -> None:
        """All of them, until so many seconds have passed; then everything is taken back."""
        began = time.monotonic()
        try:
            for strike in strikes:
                self._wait(began + strike.at_s)
                self.strike(strike, time.monotonic() - began)
            self._wait(began + seconds)
        finally:
            while self._later:
                heapq.heappop(self._later)[2]()

    def later(self, after_s: float, do: Callable[[], None]) -> None:
        """Have something done after so long, or at the end if that is sooner."""
        self._number += 1
        heapq.heappush(self._later, (time.monotonic() + after_s, self._number, do))

    def stop(self, pid: int, seconds: float) -> None:
        """SIGSTOP a process, and SIGCONT later; SIGKILL where ``seconds`` is 0. Raises `ProcessLookupError`."""
        fd = os.pidfd_open(pid)

        def go_on() -> None:
            send(fd, signal.SIGCONT)
            os.close(fd)

        send(fd, signal.SIGSTOP if seconds else signal.SIGKILL)
        if seconds:
            self.later(seconds, go_on)
        else:
            os.close(fd)

    def _wait(self, until: float) -> None:
        while True:
            now = time.monotonic()
            self._check_alive()
            while self._later and self._later[0][0] <= now:
                heapq.heappop(self._later)[2]()
            if now >= until:
                return
            self._patience.sleep(min([until, now + LOOK_S, *(one[0] for one in self._later[:1])]) - now)


def send(fd: int, number: signal.Signals) -> None:
    """Signal the process of a pidfd, if it still lives."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(fd, number)


# ---- the curve; nothing of ours is used to judge it


class Life(NamedTuple):
    """What one process of a rank wrote down.

    ``restored``, ``tier``: where it began. ``stored``: the newest step on storage just before.
    ``steps``: of each step the loss, the sampler's position and the digest of drawn numbers.
    ``at``: of each step when it was made, by CLOCK_MONOTONIC in seconds.
    """

    rank: int
    pid: int
    restored: int
    tier: str
    stored: int
    began: float
    steps: dict[int, str]
    at: dict[int, float]


def lives(folder: Path) -> list[Life]:
    """All lives of all ranks that came as far as `restore`, the oldest first. A line that a kill cut short is left out."""
    found = []
    for path in folder.glob("curve-*"):
        _, rank, pid, _ = path.name.split("-")
        text = path.read_text()
        rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        restored, tier, stored, began = 0, "", 0, 0.0
        if rows and rows[0][0] == "begin":
            restored, tier, stored, began = int(rows[0][1]), rows[0][2], int(rows[0][3]), int(rows[0][4]) / 1e9
        made = [row for row in rows if row[0] != "begin"]
        steps = {int(row[0]): " ".join(row[1:-1]) for row in made}
        at = {int(row[0]): int(row[-1]) / 1e9 for row in made}
        if began or made:
            found.append(Life(int(rank), int(pid), restored, tier, stored, began, steps, at))
    return sorted(found, key=lambda one: one.began)


class Control:
    """An undisturbed run of plain torch, in ``folder``, with so many steps. It begins when it is made; `close` it."""

    def __init__(self, folder: Path, steps: int, ranks: int) -> None:
        folder.mkdir(parents=True)
        line = [sys.executable, str(SCRIPTS / "stormy.py"), "--control", str(steps), "--ranks", str(ranks)]
        with (folder / "said").open("wb") as said:
            self._process = subprocess.Popen(
                line, env={**os.environ, "FOLDER": str(folder)}, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        self._folder = folder

    def curve(self, patience: Patience) -> dict[int, dict[int, str]]:
        """Of each rank what it wrote down of each step, when it has ended."""
        patience.until(lambda: self._process.poll() is not None, "the end of the control", CONTROL_S)
        said = (self._folder / "said").read_text()[-600:]
        assert self._process.returncode == 0, f"the control failed: {said}"
        return {one.rank: one.steps for one in lives(self._folder)}

    def close(self) -> None:
        """End it."""
        self._process.kill()  # this is rank 0: the others end without it
        self._process.wait()


def flaws(found: Sequence[Life], undisturbed: dict[int, dict[int, str]]) -> list[str]:
    """What is wrong with a curve: values that are not the control's, steps left out, a beginning anew in spite of storage."""
    wrong = []
    for one in found:
        where = f"rank {one.rank} (pid {one.pid}, restored {one.restored} from {one.tier})"
        if one.stored and not one.restored:
            wrong.append(f"{where}: it began anew, though storage had step {one.stored}")
        if list(one.steps) != list(range(one.restored + 1, one.restored + 1 + len(one.steps))):
            wrong.append(f"{where}: steps are missing between {one.restored} and {max(one.steps)}")
        for step, value in one.steps.items():
            meant = undisturbed[one.rank].get(step)
            if value != meant:
                wrong.append(f"{where}, step {step}: loss, position, draws {value}; the control has {meant}")
    return wrong

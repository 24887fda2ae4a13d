"""What a worker shows: its slot, its stacks on a signal, its answers; and what is not taken from its script."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_adapters.agent import hang_duty, launcher, looks
from dlrover_adapters.agent.doorbell import Asked, Doorbell
from dlrover_adapters.agent.slot import StepSlot
from dlrover_adapters.torch import witness
from dlrover_adapters.torch.slot import Slot
from dlrover_adapters.torch.witness import Witness
from dlrover_core.diagnosis import stacks
from dlrover_core.diagnosis.stall import Pulse

S = 1_000_000
NUMBER = int(signal.SIGRTMIN) + 9


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StepSlot, Slot]]:
    """One page, both halves."""
    monkeypatch.setenv(witness.SIGNAL_VARIABLE, str(NUMBER))
    agents = StepSlot()
    yield agents, Slot(agents.fd)
    agents.close()
    faulthandler.unregister(NUMBER)
    signal.signal(NUMBER, signal.SIG_DFL)


def test_the_slot_tells_steps_and_pauses(shared: tuple[StepSlot, Slot]) -> None:
    """Since when, how long steps take, and the longest pause that ended by itself."""
    agents, worker = shared
    assert agents.pulse(5 * S, 9 * S) == Pulse(-1, 4 * S)
    worker.step(1, 10 * S)
    assert agents.pulse(5 * S, 11 * S) == Pulse(1, S)
    for number, at in ((2, 12), (3, 14), (4, 34), (5, 36)):
        worker.step(number, at * S)
    told = agents.pulse(0, 39 * S)
    assert (told.step, told.idle_us, told.pause_us, told.phase) == (5, 3 * S, 20 * S, 0)
    assert 2 * S < told.step_us < 4 * S, "one pause is not what steps take"


def test_an_announced_phase_has_its_own_clock_and_memory(shared: tuple[StepSlot, Slot]) -> None:
    """It counts from its beginning, what it took is learnt as that phase's, and steps learn nothing from it."""
    agents, worker = shared
    worker.step(1, 1 * S)
    worker.step(2, 2 * S)
    before = worker.phase("eval", 5 * S)
    assert agents.pulse(0, 65 * S) == Pulse(2, 60 * S, 1 * S, 0, 1)
    worker.back(before, 95 * S)
    worker.step(3, 96 * S)
    assert agents.pulse(0, 96 * S) == Pulse(3, 0, 1_300_000, 4 * S, 0), "4 s of the step were outside"
    inside = worker.phase("checkpoint", 97 * S)
    within = worker.phase("anything", 98 * S)
    assert agents.pulse(0, 98 * S).phase == 3
    worker.back(within, 99 * S)
    assert agents.pulse(0, 99 * S).phase == 2
    worker.back(inside, 100 * S)
    worker.phase("evaluation", 200 * S)
    assert agents.pulse(0, 201 * S) == Pulse(3, S, 1_300_000, 90 * S, 1)


def test_a_phase_after_every_step_does_not_hide_how_long_steps_take(shared: tuple[StepSlot, Slot]) -> None:
    """After two steps it is known, whatever is announced between them or around them."""
    agents, worker = shared
    for at in range(10, 50, 10):
        worker.step(at, at * S)
        worker.back(worker.phase("checkpoint", (at + 1) * S), (at + 8) * S)
    assert agents.pulse(0, 50 * S) == Pulse(40, 2 * S, 3 * S, 3 * S, 0)
    around = worker.phase("epoch", 48 * S)
    worker.step(50, 50 * S)
    worker.back(around, 50 * S)
    assert agents.pulse(0, 50 * S).step_us > 0


def test_phases_of_two_threads_may_overlap(shared: tuple[StepSlot, Slot]) -> None:
    """Each ends its own, in whatever order."""
    agents, worker = shared
    worker.step(1, S)
    save, other = worker.phase("checkpoint", 2 * S), worker.phase("evaluation", 3 * S)
    worker.back(save, 4 * S)
    assert agents.pulse(0, 4 * S).phase == 1
    worker.back(other, 5 * S)
    assert agents.pulse(0, 5 * S).phase == 0
    twice = [worker.phase("checkpoint", 6 * S), worker.phase("checkpoint", 7 * S)]
    worker.back(twice[0], 8 * S)
    assert agents.pulse(0, 8 * S).phase == 2
    worker.back(twice[1], 9 * S)
    assert agents.pulse(0, 9 * S).phase == 0


def test_stacks_are_shown_on_the_signal(shared: tuple[StepSlot, Slot], tmp_path: Path) -> None:
    """In a file beside the agent's socket, at once."""
    agents, worker = shared
    Witness(3, 1, str(tmp_path / "agent.sock"), worker)
    assert agents.shows_on == NUMBER
    os.kill(os.getpid(), agents.shows_on)
    text = (tmp_path / "stacks-3-1.txt").read_text()
    assert stacks.main_thread(text)[0].function == "test_stacks_are_shown_on_the_signal"


@pytest.mark.parametrize("late", [False, True])
def test_a_signal_of_the_scripts_stays_its_own(shared: tuple[StepSlot, Slot], tmp_path: Path, late: bool) -> None:
    """A handler that was there is left alone; one that comes later is noticed, and the agent told not to signal."""
    agents, worker = shared
    heard: list[int] = []
    if not late:
        signal.signal(NUMBER, lambda number, _: heard.append(number))
    shown = Witness(3, 1, str(tmp_path / "agent.sock"), worker)
    if late:
        signal.signal(NUMBER, lambda number, _: heard.append(number))
    shown.look()
    assert agents.shows_on == 0
    os.kill(os.getpid(), NUMBER)
    assert heard == [NUMBER]


@pytest.mark.parametrize(("text", "number"), [("SIGUSR2", signal.SIGUSR2), ("40", 40), ("NONSENSE", 0)])
def test_the_signal_is_the_users_choice(text: str, number: int) -> None:
    """By name or number; what is none means that none is used."""
    assert witness.wanted_signal(text) == number


def test_a_witness_answers_and_records(
    shared: tuple[StepSlot, Slot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked by its agent it answers at once, by then with its stacks; and writes what torch has recorded where it is told."""
    monkeypatch.setattr(witness, "_trains_with_others", lambda: True)
    monkeypatch.setattr(witness, "_recorded", lambda: b"recorded")

    async def ask() -> None:
        bell = Doorbell(str(tmp_path / "agent.sock"), lambda *_: None)
        bell.open()
        shown = Witness(3, 1, bell.path, shared[1])
        assert bell.ask(3, 1, 7, "") is None
        shown.look()
        bell.catch_up()
        asked = bell.ask(3, 1, 7, "")
        assert asked is not None
        await asyncio.wait_for(asked.answered, 10)
        found = stacks.main_thread((tmp_path / "stacks-3-1.txt").read_text())
        assert "test_a_witness_answers_and_records" in [one.function for one in found]
        asked = bell.ask(3, 1, 7, str(tmp_path / "dump"))
        assert asked is not None
        await asyncio.wait_for(asyncio.gather(asked.answered, asked.recorded), 10)
        assert (tmp_path / "dump").read_bytes() == b"recorded"
        bell.close()
        assert bell.ask(3, 1, 7, "") is None
        assert shown._thread is not None
        shown._thread.join(10)

    asyncio.run(ask())


def test_a_process_is_seen_from_outside() -> None:
    """Whether it is stopped, and whether it works, with all that it started."""
    line = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(line, start_new_session=True, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()  # it has read all that it imports
            first, until = looks.look(child.pid), time.monotonic() + 10
            while (second := looks.look(child.pid)).cpu_s < first.cpu_s + 0.1 and time.monotonic() < until:
                pass
            assert hang_duty._busy(first, second, moved=False)
            assert not hang_duty._busy(second, second, moved=True)
            assert not hang_duty._busy(first, second._replace(on_gpu=True), moved=False), "waiting for a GPU may spin"
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            assert looks.look(child.pid).state == "T"
            assert "State:" in looks.details(child.pid)
        finally:
            child.kill()
    assert looks.look(child.pid).state == ""
    assert looks.source_line(os.getpid(), __file__, 1) == '"""' + (__doc__ or "") + '"""'


@pytest.mark.parametrize(("code", "caught"), [("faulthandler.register(40)", True), ("pass", False)])
def test_only_who_survives_the_signal_gets_it(code: str, caught: bool) -> None:
    """After `os.execv`, or with its handlers reset, a process would die of it: the kernel knows, whatever the slot says."""
    line = [sys.executable, "-c", f"import faulthandler; {code}; print(flush=True); input()"]
    heard: list[int] = []
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        seen = SimpleNamespace(pid=child.pid, alive=True, signal=heard.append)
        slot = SimpleNamespace(shows_on=40, fd=0)
        shown = launcher.Rank(SimpleNamespace(rank=0, child=seen, slot=slot), "", None)  # type: ignore[arg-type]
        assert asyncio.run(shown.show()) is caught
    assert heard == [40] * caught
    assert not asyncio.run(shown.show()), "nobody can say of one that is gone"


class Told:
    """A worker as its agent sees it: its witness answers or does not, and shows these stacks; counts signals."""

    def __init__(self, path: Path, *, witness: bool, answers: bool = False, deaf: int = 0) -> None:
        self.rank, self.pid, self.stacks, self.signals = 0, os.getpid(), str(path), 0
        self._path = path
        self._witness, self._answers, self._deaf = witness, answers, deaf

    def idle_us(self) -> int:
        """Since its last step."""
        return 61 * S

    async def show(self) -> bool:
        """Signalled."""
        self.signals += 1
        if self.signals > self._deaf:
            self._write("signalled")
        return True

    def ask(self, _probe: int, path: str) -> Asked | None:
        """Asked."""
        loop = asyncio.get_running_loop()
        asked = Asked(loop.create_future(), loop.create_future())
        if self._answers:
            if not path:
                self._write("witnessed")
            asked.answered.set_result(None)
        return asked if self._witness else None

    def _write(self, function: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f'Thread 0x01 (most recent call first):\n  File "train.py", line 1 in {function}\n')


@pytest.mark.parametrize(
    ("busy", "how", "signals", "function"),
    [
        (False, {"witness": True, "answers": True}, 0, "witnessed"),
        (True, {"witness": True, "answers": True}, 0, "witnessed"),
        (False, {"witness": True}, 1, "signalled"),
        (True, {"witness": True}, 1, "signalled"),
        (False, {"witness": False}, 1, "signalled"),
        (False, {"witness": False, "deaf": 1}, 2, "signalled"),
        (True, {"witness": False}, 0, ""),
    ],
)
def test_nobody_is_signalled_in_whom_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool, how: dict[str, Any], signals: int, function: str
) -> None:
    """The signal's handler reads other threads' frames: only of one that is idle, or whose witness gets no lock; and once."""
    used = iter([0.0, 0.3 if busy else 0.01])
    monkeypatch.setattr(looks, "look", lambda _: looks.Look("S", "", next(used), 0, on_gpu=True))
    for name in ("APART_S", "ANSWER_S", "SHOWN_S"):
        monkeypatch.setattr(hang_duty, name, 0.02)
    monkeypatch.setattr(hang_duty, "SETTLED_S", 0.001)
    monkeypatch.setattr(hang_duty, "POLL_S", 0.001)
    one = Told(tmp_path / "stacks", **how)
    found = asyncio.run(hang_duty._seen(one, 1))  # type: ignore[arg-type]
    assert one.signals == signals
    assert "".join(frame.function for frame in found.facts.stack) == function
    assert found.facts.gil == ("" if not how["witness"] else "free" if how.get("answers") else "held")

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

import pytest

from dlrover_adapters.agent import hang_duty, looks
from dlrover_adapters.agent.doorbell import Doorbell
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
    assert agents.pulse(0, 96 * S) == Pulse(3, 0, 1 * S, 1 * S, 0)
    inside = worker.phase("checkpoint", 97 * S)
    within = worker.phase("anything", 98 * S)
    assert agents.pulse(0, 98 * S).phase == 3
    worker.back(within, 99 * S)
    assert agents.pulse(0, 99 * S).phase == 2
    worker.back(inside, 100 * S)
    worker.phase("evaluation", 200 * S)
    assert agents.pulse(0, 201 * S) == Pulse(3, S, 1 * S, 90 * S, 1)


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
    """Asked by its agent it answers at once, and writes what torch has recorded where it is told."""
    monkeypatch.setattr(witness, "_trains_with_others", lambda: True)
    monkeypatch.setattr(witness, "_recorded", lambda: b"recorded")

    async def ask() -> None:
        bell = Doorbell(str(tmp_path / "agent.sock"), lambda *_: None)
        bell.open()
        shown = Witness(3, 1, bell.path, shared[1])
        assert bell.ask(3, 1, 7, "") is None
        shown.look()
        bell.catch_up()
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
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) as child:
        try:
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

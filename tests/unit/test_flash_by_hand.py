"""`FlashCheckpoint.save`: what somebody asks for himself is saved, however slow storage is, by all ranks or by none."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import LIMIT_S, Clock, Training, complete, engine_of, held, pinned, under_agent, values

from dlrover_adapters.torch import steps
from dlrover_adapters.torch.checkpoint import by_hand, closing, flash
from dlrover_adapters.torch.checkpoint.flash import AgentGone, FlashCheckpoint, NoMemory
from dlrover_adapters.torch.checkpoint.meeting import Meeting
from dlrover_adapters.torch.checkpoint.omissions import Unstored
from dlrover_adapters.torch.checkpoint.standalone import Standalone
from dlrover_adapters.torch.checkpoint.vault import Vault, VaultGone, VaultRefused
from dlrover_core import GroupSpec, JobSpec
from dlrover_core.errors import CoreError

pytestmark = pytest.mark.usefixtures("alone")


# ---- one rank


def test_a_save_by_hand_waits_while_every_slot_is_in_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is announced as a phase, and told after two seconds; what `step` saves by itself never waits."""
    phases: list[str] = []

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        phases.append(name)
        yield
        phases.append(f"{name} is over")

    monkeypatch.setattr(steps, "phase", phase)
    run = Training()
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        for step in (1, 2):
            run.work(step)
            ckpt.step(step)
            ckpt.wait()
        let_go = [pinned(ckpt, 1), pinned(ckpt, 2)]
        clock = Clock(lambda now: let_go[0]() if now > 3.0 else None)
        engine_of(ckpt, clock)
        run.work(3)
        ckpt.step(3)
        assert (clock.pauses, ckpt.stats.skipped, phases) == (0, 1, [])
        assert ckpt.save(3)
        assert 3.0 < clock.now < 4.0
        assert "step 3 waits for memory" in caplog.text
        assert phases == ["checkpoint", "checkpoint", "checkpoint is over", "checkpoint is over"]
        assert held(ckpt).keys() == {2, 3}
        assert ckpt.stats.skipped == 1


def test_it_gives_up_after_a_while_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Well before the announced phase would be taken for a hang."""
    run = Training()
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        run.work(1)
        ckpt.step(1)
        ckpt.save(2)
        let_go = [pinned(ckpt, one) for one in held(ckpt)]
        clock = Clock()
        engine_of(ckpt, clock)
        assert not ckpt.save(3)
        assert (
            by_hand.BY_HAND_S
            <= clock.now
            < by_hand.BY_HAND_S + 1.0
            < 0.75 * JobSpec("job", (GroupSpec(),)).hang_phase_s
        )
        assert "step 3 was not saved, though that was asked for" in caplog.text
        assert ckpt.stats.skipped == 1
        for one in let_go:
            one()
        assert ckpt.save(3)


def test_ctrl_c_ends_the_wait() -> None:
    """And nothing is lost by it."""
    run = Training()

    def interrupt(_now: float) -> None:
        raise KeyboardInterrupt

    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        for step in (1, 2):
            run.work(step)
            ckpt.step(step)
            ckpt.wait()
        let_go = [pinned(ckpt, 1), pinned(ckpt, 2)]
        engine_of(ckpt, Clock(interrupt))
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(3)
        assert held(ckpt).keys() == {1, 2}
        for one in let_go:
            one()
        assert ckpt.save(3)
        assert held(ckpt).keys() == {2, 3}


def test_what_step_has_just_saved_is_not_copied_again(tmp_path: Path) -> None:
    """It goes to storage as it is; nobody waits for the slot that storage reads."""
    run = Training()
    with FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=1000) as ckpt:
        run.trains(ckpt, 1, 4)
        let_go = [pinned(ckpt, 2), pinned(ckpt, 4)]
        engine_of(ckpt, Clock(lambda _now: pytest.fail("it waits")))
        assert ckpt.save(4)
        assert (ckpt.stats.saves, held(ckpt)) == (2, {2: False, 4: True})
        assert complete(tmp_path) == [4]
        line: Any = ckpt._line
        line.written.clear()
        assert ckpt.save(4)
        ckpt.wait()
        assert line.written == [], "it is there already"
        line.written.append(4)
        for one in let_go:
            one()


def test_weights_that_were_swapped_for_the_save_are_saved(tmp_path: Path) -> None:
    """In the place of what `step` saved: nobody can take one for the other."""
    run = Training()
    with FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=1000) as ckpt:
        run.trains(ckpt, 1, 4)
        let_go = pinned(ckpt, 2)
        run.model.weight.data = torch.full((8, 8), 77.0)
        assert ckpt.save(4)
        assert held(ckpt) == {2: False, 4: True}
        let_go()
        run.set(0.0)
        assert ckpt.restore(4) == 4
        assert run.at == 77.0


class Position:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"at": 1}

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What is restored."""
        self.state = state


def test_a_state_that_is_due_is_never_replaced_by_another_one_of_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Storage may have it: `save` says no, what differs and what to do; the first state stays, and is what the end stores."""
    run = Training()
    with FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=2) as ckpt:
        agent = under_agent(ckpt)
        run.trains(ckpt, 1, 4)
        assert held(ckpt) == {2: True, 4: True}
        run.set(77.0)
        assert ckpt.save(4) is False
        assert (held(ckpt), values(ckpt, 4)) == ({2: True, 4: True}, 4.0)
        assert (ckpt.stats.failed, ckpt.stats.skipped, engine_of(ckpt)._newest) == (1, 0, (4, True))
        said = "tensor 'model.weight' differs now. Save the present state under another step number"
        assert said in caplog.text
        assert said in agent.alarms[0]
        assert "step 4 was not saved, though that was asked for" in caplog.text
        run.set(4.0)
        assert ckpt.save(4), "it is the same again"
        assert ckpt.save(5), "another number takes what is there now"
        ckpt.wait()
        assert agent.heard == [(2, True), (4, True), (5, True)]
        run.set(88.0)
        assert not ckpt.save(5), "nor what was saved by hand"
    assert agent.heard[-1] == (5, True)


def test_random_numbers_drawn_since_are_no_other_state(tmp_path: Path) -> None:
    """An evaluation draws some. An object that has another value is."""
    extra = Position()
    run = Training()
    with FlashCheckpoint(str(tmp_path), **run.parts, extra=extra, every=2, store_every=2) as ckpt:
        under_agent(ckpt)
        run.trains(ckpt, 1, 2)
        torch.rand(3)
        assert ckpt.save(2)
        assert ckpt.stats.saves == 1
        extra.state = {"at": 2}
        assert not ckpt.save(2)
        assert "object 'extra" in engine_of(ckpt).why_left_out


def test_a_state_of_another_form_does_not_replace_one_that_is_due(tmp_path: Path) -> None:
    """Nor is the memory given up in which the first one lies."""
    run = Training()
    with FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=2) as ckpt:
        under_agent(ckpt)
        run.trains(ckpt, 1, 2)
        memory = engine_of(ckpt).memory
        run.model.weight.data = torch.full((8, 8), 2.0, dtype=torch.bfloat16)
        assert not ckpt.save(2)
        assert "tensor 'model.weight' has another form now" in engine_of(ckpt).why_left_out
        assert engine_of(ckpt).memory is memory
        assert held(ckpt) == {2: True}
        assert ckpt.save(3)


# ---- the boundary of a planned change


@pytest.mark.parametrize("dropped", [False, True])
def test_at_a_boundary_a_slot_is_waited_for_until_the_plan_is_dropped(
    monkeypatch: pytest.MonkeyPatch, dropped: bool
) -> None:
    """As one save, announced as a phase; it is told to be missed only where it is given up."""
    told: list[tuple[int, int]] = []
    run = Training()
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        for step in (1, 2):
            run.work(step)
            ckpt.step(step)
            ckpt.wait()
        let_go = [pinned(ckpt, 1), pinned(ckpt, 2)]
        control = engine_of(ckpt).control

        def later(now: float) -> None:
            assert ckpt.stats.skipped == 0
            if now > 100.0 and dropped:
                control.armed = 0
            elif now > 100.0:
                let_go[0]()

        def boundary(_line: Standalone, plan: int, step: int) -> None:
            told.append((plan, step))
            control.armed = 0

        monkeypatch.setattr(Standalone, "boundary", boundary)
        engine_of(ckpt, Clock(later))
        control.armed = control.go = 9
        run.work(3)
        ckpt.step(3)
        assert told == ([] if dropped else [(9, 3)])
        assert (ckpt.stats.skipped, 3 in held(ckpt)) == (int(dropped), not dropped)


# ---- what storage never took


def test_a_state_that_was_due_and_is_overwritten_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Once storage has a newer one, so that it will never have this."""
    unstored = Unstored(tells=True)
    unstored.look(-1, 10)
    unstored.look(10, 20)
    unstored.look(10)
    assert unstored.count == 0
    unstored.look(30)
    assert unstored.count == 1
    assert "step 20 was due on storage and will not be there" in caplog.text
    unstored.look(30, 30)
    unstored.look(30, 40)
    unstored.forget()
    unstored.look(99)
    assert unstored.count == 1


def test_the_engine_looks_for_it(caplog: pytest.LogCaptureFixture) -> None:
    """With an agent storage takes them from memory whenever it is ready: `save` said yes, and the state is gone before."""
    run = Training()
    with FlashCheckpoint("", **run.parts, every=1, slots=3) as ckpt:
        run.work(99)
        ckpt.step(99)
        ckpt.wait()
        engine = engine_of(ckpt)

        class Agent:
            """In place of one: it takes what it is told."""

            told = ckpt._opened().told

            def saved(self, *_: Any, **__: Any) -> None:
                """Heard."""

        engine.line = Agent()
        for step in range(100, 106):
            engine.save(step, step, due=step in {100, 101})
            engine.settle()
            if step == 100:
                pinned(ckpt, 100)
        assert ckpt.stats.unstored == 0
        engine.control.committed = 101
        engine.save(106, 106, due=True)
        assert ckpt.stats.unstored == 0
        engine.control.committed = 107
        engine.save(107, 107, due=False)
        assert ckpt.stats.unstored == 1
        assert "step 101 was due on storage" in caplog.text
        engine.settle()


# ---- an agent that is not to be had


def test_an_agent_that_does_not_answer_is_an_error_of_a_restore_and_an_alarm_of_a_save(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A restore says what to look at, in an error of ours; a save is left out, says the same and training goes on."""

    def gone(_cls: object = None) -> Vault:
        raise VaultGone("no answer to 'hello' within 300 s")

    def refused(_cls: object = None) -> Vault:
        raise VaultRefused("too little memory")

    monkeypatch.setattr(Vault, "here", classmethod(lambda _cls: True))
    for connect, kind, said in (
        (gone, AgentGone, r"'hello' within 300 s.*dlrover status"),
        (refused, NoMemory, "little"),
    ):
        monkeypatch.setattr(Vault, "connect", classmethod(connect))
        run = Training()
        with FlashCheckpoint("", **run.parts, every=1) as ckpt:
            with pytest.raises(kind, match=said) as raised:
                ckpt.restore()
            assert isinstance(raised.value, CoreError)
            caplog.clear()
            ckpt.step(1)
            assert not ckpt.save(1)
            assert re.search(said, caplog.text)
            assert ckpt.stats.failed == 2


@pytest.mark.parametrize("call", ["prepare", "save", "by hand"])
def test_nor_does_it_later(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str) -> None:
    """In whichever call: the save is left out, and the next one is tried. Before the first save it is tried in that one."""

    def gone(*_: Any, **__: Any) -> None:
        raise VaultGone("no answer to 'arena' within 300 s")

    run = Training()
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        engine = engine_of(ckpt)
        monkeypatch.setattr(*((by_hand, "save") if call == "by hand" else (engine, call)), gone)
        assert not ckpt.save(1) if call == "by hand" else ckpt.step(1) is None
        assert "'arena' within 300 s" in caplog.text
        tried = call == "prepare"
        assert tried or isinstance(ckpt._alarms.newest, AgentGone)
        monkeypatch.undo()
        assert ckpt.save(2)
        assert (ckpt.stats.failed, held(ckpt).keys() - {1}) == (int(not tried), {2})
        assert tried or 1 not in held(ckpt)


# ---- without an agent


def test_parts_may_take_very_different_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever has written its own waits for the slowest disk for an hour, and so does the end of the script."""
    limits: list[float] = []

    def mine(limit_s: float = 0.0) -> Meeting:
        limits.append(limit_s)
        return Meeting(None, 0, 1)

    monkeypatch.setattr(Meeting, "of_environment", mine)
    run = Training()
    with FlashCheckpoint(str(tmp_path), **run.parts, every=1) as ckpt:
        ckpt.step(1)
    assert limits == [0.0, flash.PARTS_S]
    assert flash.PARTS_S >= 3600.0
    assert closing.CLOSE_S >= flash.PARTS_S


def test_the_end_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """After half a minute, and again when it waits no more."""
    waited: list[float | None] = []

    written = Standalone.wait

    def wait(line: Standalone, limit_s: float | None = None) -> bool:
        waited.append(limit_s)
        assert written(line, LIMIT_S)
        return False

    run = Training()
    with caplog.at_level(logging.WARNING), FlashCheckpoint(str(tmp_path), **run.parts, every=1) as ckpt:
        ckpt.step(1)
        ckpt.wait()
        monkeypatch.setattr(Standalone, "wait", wait)
    assert waited == [closing.CLOSING_S, closing.CLOSE_S]
    assert "still being written" in caplog.text
    assert "not waited for any more" in caplog.text

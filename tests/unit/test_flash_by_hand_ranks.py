"""`FlashCheckpoint.save` of several ranks: all of them have saved a step, or none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from by_hand import LIMIT_S, Clock, Training, complete, engine_of, held, pinned, under_agent, values
from torch.distributed import HashStore

from dlrover_adapters.torch.checkpoint import closing
from dlrover_adapters.torch.checkpoint.flash import FlashCheckpoint
from dlrover_adapters.torch.checkpoint.meeting import Meeting
from dlrover_adapters.torch.checkpoint.standalone import Standalone

pytestmark = pytest.mark.usefixtures("alone")


# ---- several


class Two:
    """Ranks of one world, as threads with the names of their numbers."""

    def __init__(self) -> None:
        self.together = threading.Barrier(2, timeout=LIMIT_S)

    def run(self, rank: Callable[[int], object]) -> None:
        """Both, to their end."""

        def named(number: int) -> None:
            threading.current_thread().name = str(number)
            try:
                rank(number)
            except BaseException:
                self.together.abort()
                raise

        with ThreadPoolExecutor(2) as pool:
            for one in [pool.submit(named, number) for number in range(2)]:
                one.result(LIMIT_S)

    def train(self, run: Training, ckpt: FlashCheckpoint, first: int, last: int) -> None:
        """With a collective in each step."""
        run.trains(ckpt, first, last, self.together.wait)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Two:
    """Those of this test."""
    store = HashStore()

    def mine(**_: Any) -> Meeting:
        return Meeting(store, int(threading.current_thread().name), 2, limit_s=LIMIT_S)

    monkeypatch.setattr(Meeting, "of_environment", mine)
    return Two()


def test_the_last_step_is_the_last_on_storage(two: Two, tmp_path: Path) -> None:
    """As in the README: `step(n)` saves it in memory, `save(n)` wants it on storage, `close` adds nothing older."""

    def rank(_number: int) -> None:
        run = Training()
        with FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=1000) as ckpt:
            two.train(run, ckpt, 1, 4)
            assert ckpt.save(4)
            assert held(ckpt) == {2: False, 4: True}
            assert ckpt.stats.saves == 2

    two.run(rank)
    assert complete(tmp_path) == [4]


def test_a_step_right_after_one_that_was_saved_finds_a_slot(two: Two, tmp_path: Path) -> None:
    """That they meet for it proves the one before, which the next call would have proven."""

    def rank(_number: int) -> None:
        run = Training()
        with FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=1000) as ckpt:
            two.train(run, ckpt, 1, 5)
            engine_of(ckpt, Clock(lambda _now: pytest.fail("it waits")))
            assert ckpt.save(5)
            assert held(ckpt) == {4: False, 5: True}

    two.run(rank)
    assert complete(tmp_path) == [5]


def test_all_wait_for_the_rank_whose_slots_are_read(two: Two, tmp_path: Path) -> None:
    """It left out step 6, the others did not; once its slot is free, all have it, and nothing else goes to storage."""
    done: list[int] = []

    def rank(number: int) -> None:
        run = Training()
        with FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=1000) as ckpt:
            two.train(run, ckpt, 1, 4)
            let_go = [pinned(ckpt, 2), pinned(ckpt, 4)] if number else []
            two.train(run, ckpt, 5, 6)
            assert ckpt.stats.skipped == number

            def waits(now: float) -> None:
                assert number == 1
                assert not done
                if now > 5.0:
                    let_go.pop(0)()

            engine_of(ckpt, Clock(waits))
            assert ckpt.save(6)
            done.append(number)
            assert held(ckpt)[6]
            for one in let_go:
                one()
            # What was told of the first attempt counts no more: the step is relied on.
            two.train(run, ckpt, 7, 9)
            assert held(ckpt).keys() == {6, 8}

    two.run(rank)
    assert complete(tmp_path) == [6, 8]


def test_the_last_step_that_one_rank_left_out_is_saved_at_the_end(
    two: Two, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 1 found no slot for step 6 and comes late to the end: rank 0 keeps its own, rank 1 waits for a slot, and none asks."""
    monkeypatch.setattr(
        Standalone, "missed", lambda *_: None
    )  # an agent is not told: it takes a step that all ranks have
    monkeypatch.setattr(closing, "Standalone", type(None))
    written = Standalone.wait
    monkeypatch.setattr(Standalone, "wait", lambda *_: True)
    ended = threading.Event()

    def rank(number: int) -> None:
        run = Training()
        ckpt = FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=6)
        two.train(run, ckpt, 1, 4)
        let_go = [pinned(ckpt, 2), pinned(ckpt, 4)] if number else []
        two.train(run, ckpt, 5, 6)
        assert ckpt.stats.skipped == number
        if number:
            assert ended.wait(LIMIT_S)
            engine_of(ckpt, Clock(lambda now: let_go.pop(0)() if now > 5.0 and len(let_go) > 1 else None))
        closing.store_last(ckpt)
        ended.set()
        assert held(ckpt)[6]
        line: Any = ckpt._line
        assert written(line, LIMIT_S)
        for one in let_go:
            one()
        ckpt._finish(wait=False)

    two.run(rank)
    assert complete(tmp_path) == [6]


def test_a_last_step_whose_weights_were_swapped_since_is_not_made_up(
    two: Two, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 1 left step 6 out, then both swap weights. Rank 0 holds step 6 as it was, so rank 1 must not save what it has now."""

    def rank(number: int) -> None:
        run = Training()
        ckpt = FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=6)
        two.train(run, ckpt, 1, 4)
        let_go = [pinned(ckpt, 2), pinned(ckpt, 4)] if number else []
        two.train(run, ckpt, 5, 6)
        engine = ckpt._engine
        assert engine is not None
        assert not number or not engine.has_changed(6)
        run.set(77.0)
        assert engine.has_changed(6) == bool(number)
        if number:
            monkeypatch.setattr(closing, "Standalone", type(None))  # as under an agent
            with pytest.raises(closing.NotStored, match="its weights have changed since"):
                closing._store_newest(ckpt, engine)
        for one in let_go:
            one()
        two.together.wait()
        ckpt._finish(wait=False)

    two.run(rank)


def test_what_one_rank_cannot_save_no_rank_saves(two: Two, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """They are told alike, and an older step stays whole on both."""

    def rank(number: int) -> None:
        run = Training()
        with FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=1000) as ckpt:
            two.train(run, ckpt, 1, 4)
            let_go = [pinned(ckpt, 2), pinned(ckpt, 4)] if number else []
            engine = engine_of(ckpt, Clock())
            two.together.wait()
            run.work(5)
            assert not ckpt.save(5)
            assert 4 in held(ckpt)
            assert engine.meeting.look("missed/5") is not None
            for one in let_go:
                one()
            two.together.wait()
            assert ckpt.save(5)

    two.run(rank)
    assert complete(tmp_path) == [5]
    assert caplog.text.count("step 5 was not saved, though that was asked for") == 2


def test_where_one_rank_has_changed_its_state_each_saves_its_own(two: Two, tmp_path: Path) -> None:
    """Who has not need not copy it again; agents' word of the step may be of what it was before, and is not relied on."""

    def rank(number: int) -> None:
        run = Training()
        with FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=1000) as ckpt:
            two.train(run, ckpt, 1, 4)
            two.together.wait()
            if number == 0:
                run.set(77.0)
            assert ckpt.save(4)
            engine = engine_of(ckpt)
            assert held(ckpt) == {2: False, 4: True}
            assert ckpt.stats.saves == 3 - number
            engine.control.whole = 5
            assert engine._begin(5, engine._kept[1].call + 1, 2) is None, "2 is what both have for sure"

    two.run(rank)
    assert complete(tmp_path) == [4]
    run = Training()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Meeting, "of_environment", lambda **_: Meeting(None, 0, 1))
        with FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=0) as again:
            assert again.restore(4) == 4
    assert run.at == 77.0


def test_where_one_rank_has_changed_what_is_due_all_keep_what_they_have(two: Two, tmp_path: Path) -> None:
    """Not a mixture: no rank writes a part of the second state. All answer alike, and all stay in step afterwards."""

    def rank(number: int) -> None:
        run = Training()
        with FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=2) as ckpt:
            agent = under_agent(ckpt)
            two.train(run, ckpt, 1, 4)
            two.together.wait()
            if number == 1:
                run.set(77.0)
            assert not ckpt.save(4)
            assert (held(ckpt), values(ckpt, 4)) == ({2: True, 4: True}, 4.0)
            assert ckpt.stats.failed == 1
            words = "tensor 'model.weight' differs now" if number else "another rank differs now"
            assert words in engine_of(ckpt).why_left_out
            assert engine_of(ckpt).meeting.look("missed/4") is None
            run.set(4.0)
            assert ckpt.save(4)
            two.train(run, ckpt, 5, 6)
            assert agent.heard == [(2, True), (4, True), (6, True)]

    two.run(rank)


def test_ranks_that_do_not_meet_save_each_on_its_own(two: Two) -> None:
    """One may be hours behind: the other does not wait for it."""

    def rank(number: int) -> None:
        run = Training()
        with FlashCheckpoint("", **run.parts, every=2, coupled=False) as ckpt:
            engine_of(ckpt, Clock(lambda _now: pytest.fail("it waits")))
            ckpt.restore()
            if number == 0:
                for step in (1, 2):
                    run.work(step)
                    ckpt.step(step)
                assert ckpt.save(2)
                assert ckpt.save(3)
                assert held(ckpt).keys() == {2, 3}
            two.together.wait()

    two.run(rank)

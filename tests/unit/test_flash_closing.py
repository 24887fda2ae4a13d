"""The end of a script after an error of its last save: the save is made up for only where the state is known to be the step's."""

from __future__ import annotations

from pathlib import Path

import pytest
from by_hand import Training, engine_of, held
from test_flash_alarms import fails
from test_flash_by_hand_ranks import Two, two

from dlrover_adapters.torch.checkpoint import closing
from dlrover_adapters.torch.checkpoint.flash import FlashCheckpoint
from dlrover_adapters.torch.checkpoint.standalone import Standalone

__all__ = ["two"]

SAVES, CAPTURE, BEFORE = "saves", "capture", "before"


@pytest.fixture(autouse=True)
def _agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent writes what is saved: ranks do not meet for it."""
    monkeypatch.setattr(Standalone, "saved", lambda *_, **__: None)
    monkeypatch.setattr(Standalone, "missed", lambda *_: None)


def breaks(part: str, ckpt: FlashCheckpoint, patched: pytest.MonkeyPatch) -> None:
    """From now on this part of a save raises, on this rank alone."""
    engine = engine_of(ckpt)
    if part == SAVES:
        patched.setattr(engine.memory, "write_blob", fails(OSError("no space")))
    elif part == CAPTURE:
        patched.setattr(engine.capture, "chunks", fails(OSError("no space")))
    else:
        patched.setattr(ckpt, "_fence", fails(OSError("no space")))


@pytest.mark.parametrize(
    ("part", "swapped", "said"),
    [
        (SAVES, False, ""),
        (BEFORE, False, ""),
        (SAVES, True, r"step 6, .*OSError: no space.*its weights have changed since"),
        (BEFORE, True, r"step 6, .*OSError: no space.*its weights have changed since"),
        (CAPTURE, False, r"step 6, .*OSError: no space.*its weights may have changed since"),
    ],
)
def test_a_last_step_that_an_error_left_out_is_made_up_only_if_its_weights_are_the_same(
    part: str, said: str, two: Two, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, swapped: bool
) -> None:
    """The save of step 6 raises on rank 1, while rank 0 holds step 6 as it was."""

    def rank(number: int) -> None:
        run = Training()
        ckpt = FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=6)
        two.train(run, ckpt, 1, 4)
        with monkeypatch.context() as patched:
            if number:
                breaks(part, ckpt, patched)
            two.train(run, ckpt, 5, 6)
        assert bool(ckpt.stats.failed) == bool(number)
        two.together.wait()
        if swapped:
            run.set(77.0)
        if number:
            as_under_an_agent(ckpt, said)
        two.together.wait()
        ckpt._finish(wait=False)

    def as_under_an_agent(ckpt: FlashCheckpoint, said: str) -> None:
        engine = engine_of(ckpt)
        with monkeypatch.context() as patched:
            patched.setattr(closing, "Standalone", type(None))
            if said:
                with pytest.raises(closing.NotStored, match=said):
                    closing._store_newest(ckpt, engine)
            else:
                assert closing._store_newest(ckpt, engine) == 6
        assert (6 in held(ckpt)) is not bool(said)

    two.run(rank)


def test_a_last_step_whose_copy_failed_is_not_made_up(
    two: Two, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The copy is made beside training: when its error is known, nobody knows any more what the state of the step was."""

    def rank(number: int) -> None:
        run = Training()
        ckpt = FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=6)
        two.train(run, ckpt, 1, 5)
        engine = engine_of(ckpt)
        if number:
            monkeypatch.setattr(engine, "_landed", fails(OSError("no space")))
        two.together.wait()
        run.work(6)
        ckpt.step(6)
        engine.settle()
        two.together.wait()
        if number:
            monkeypatch.setattr(closing, "Standalone", type(None))
            with pytest.raises(closing.NotStored, match=r"step 6, .*its copy failed: no space.*may have changed"):
                closing._store_newest(ckpt, engine)
        two.together.wait()
        ckpt._finish(wait=False)

    two.run(rank)

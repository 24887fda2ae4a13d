"""Hugging Face's own Trainer, saved and resumed by us, installed as it is. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from dlrover_core.errors import SpecError

# Third parties': transformers, accelerate and torch warn of each other's deprecations and of a missing accelerator.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::ResourceWarning"
    ),
    pytest.mark.xdist_group("huggingface"),  # what they import is imported by one process
]


@pytest.fixture(scope="module")
def small() -> ModuleType:
    """What is trained here. It takes seconds to import, so that it is done once a test is run, not when all are collected."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import small_huggingface

    return small_huggingface


def test_a_training_goes_on_where_it_was_saved(small: ModuleType, tmp_path: Path) -> None:
    """A Trainer that ended in the middle of an epoch is resumed by another one: steps, epoch, log, learning rates and losses are

    those of an undisturbed Trainer of theirs, bit for bit, dropout and the order of the data included.
    """
    undisturbed, theirs = small.trained(tmp_path / "a", None)
    flash = {"url": str(tmp_path / "ckpts"), "every": 1, "store_every": 1}
    first, _ = small.trained(tmp_path / "b", flash, die_at=8)
    assert sorted(first.losses) == list(range(1, 9))
    second, ours = small.trained(tmp_path / "b", flash)
    assert sorted(second.losses) == list(range(9, small.STEPS + 1))
    assert {**first.losses, **second.losses} == undisturbed.losses
    assert (ours.state.global_step, ours.state.epoch) == (theirs.state.global_step, theirs.state.epoch)
    # The log of a step is written after it is saved: that of the last saved one is in no checkpoint, theirs or ours.
    rates = [[one["learning_rate"] for one in trainer.state.log_history if "loss" in one] for trainer in (ours, theirs)]
    assert [one for one in rates[1] if one not in rates[0]] in ([], [rates[1][7]])
    for name, value in theirs.model.state_dict().items():
        assert small.torch.equal(value, ours.model.state_dict()[name]), name


def test_their_own_checkpoint_wins_when_it_is_asked_for(small: ModuleType, tmp_path: Path) -> None:
    """``resume_from_checkpoint`` resumes from the Trainer's own folder, and saving goes on with us."""
    flash = {"url": str(tmp_path / "ckpts"), "every": 2, "store_every": 2}
    _, trainer = small.trained(tmp_path, flash)
    trainer.save_model = trainer.save_model  # as it is
    trainer._save_checkpoint(trainer.model, trial=None)
    folder = tmp_path / "hf" / f"checkpoint-{small.STEPS}"
    assert folder.is_dir()
    trainer.args.max_steps = small.STEPS + 2
    trainer.train(resume_from_checkpoint=str(folder))
    assert trainer.state.global_step == small.STEPS + 2


@pytest.mark.parametrize("name", ["_run_epoch", "_init_training_state", "_load_callback_state"])
def test_a_release_without_what_we_override_is_refused(
    small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """When the Trainer is made, with the name of what is missing: else it would train and save nothing."""
    monkeypatch.delattr(small.Trainer, name)
    with pytest.raises(SpecError, match=f"transformers: .*no {name}.* Install transformers 5"):
        small.trained(tmp_path, {"url": str(tmp_path / "ckpts"), "every": 1})


def test_a_method_with_other_arguments_is_refused(
    small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the name alone says nothing about how it is called."""
    monkeypatch.setattr(small.Trainer, "_prepare_for_training", lambda self, max_steps: None)
    with pytest.raises(SpecError, match="_prepare_for_training without train_dataloader, resume_from_checkpoint"):
        small.trained(tmp_path, {"url": str(tmp_path / "ckpts"), "every": 1})

"""Hugging Face's own Trainer, saved and resumed by us, installed as it is. Nothing is downloaded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers imports is not ours to mend
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from dlrover_adapters.torch.huggingface import FlashTrainer

# Third parties': transformers, accelerate and torch warn of each other's deprecations and of a missing accelerator.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::ResourceWarning"
)
STEPS = 14


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Forty sentences of eight words each, of sixteen words there are."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = torch.arange(number, number + 8) % 16
        return {"input_ids": words, "labels": words}


class Dies(Exception):
    """What ends a training."""


class Heard(TrainerCallback):
    """Remembers the losses; ends training after a step, if told to."""

    def __init__(self, die_at: int = 0) -> None:
        self.losses: dict[int, float] = {}
        self.trainer: Any = None
        self._die_at = die_at

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_kwargs: Any) -> None:
        """Of one step."""
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]

    def on_step_begin(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """The step before has been saved and logged; let it be stored, or the next one may find no slot free and be left out."""
        if getattr(self.trainer, "flash", None) is not None:
            self.trainer.flash.wait()
        if self._die_at and state.global_step == self._die_at:
            raise Dies


def trained(folder: Path, flash: dict[str, Any] | None, die_at: int = 0, **more: Any) -> tuple[Heard, Any]:
    """A GPT of a thousand parameters with dropout, trained; its losses, and the Trainer."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    args = TrainingArguments(
        output_dir=str(folder / "hf"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )
    heard = Heard(die_at)
    kind, options = (Trainer, {}) if flash is None else (FlashTrainer, {"flash": flash})
    heard.trainer = trainer = kind(model=model, args=args, train_dataset=Rows(), callbacks=[heard], **options)
    try:
        trainer.train()
    except Dies:
        trainer.flash.close()
    return heard, trainer


def test_a_training_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    """A Trainer that ended in the middle of an epoch is resumed by another one: steps, epoch, log, learning rates and losses are

    those of an undisturbed Trainer of theirs, bit for bit, dropout and the order of the data included.
    """
    undisturbed, theirs = trained(tmp_path / "a", None)
    flash = {"url": str(tmp_path / "ckpts"), "every": 1, "store_every": 1}
    first, _ = trained(tmp_path / "b", flash, die_at=8)
    assert sorted(first.losses) == list(range(1, 9))
    second, ours = trained(tmp_path / "b", flash)
    assert sorted(second.losses) == list(range(9, STEPS + 1))
    assert {**first.losses, **second.losses} == undisturbed.losses
    assert (ours.state.global_step, ours.state.epoch) == (theirs.state.global_step, theirs.state.epoch)
    # The log of a step is written after it is saved: that of the last saved one is in no checkpoint, theirs or ours.
    rates = [[one["learning_rate"] for one in trainer.state.log_history if "loss" in one] for trainer in (ours, theirs)]
    assert [one for one in rates[1] if one not in rates[0]] in ([], [rates[1][7]])
    for name, value in theirs.model.state_dict().items():
        assert torch.equal(value, ours.model.state_dict()[name]), name


def test_their_own_checkpoint_wins_when_it_is_asked_for(tmp_path: Path) -> None:
    """``resume_from_checkpoint`` resumes from the Trainer's own folder, and saving goes on with us."""
    flash = {"url": str(tmp_path / "ckpts"), "every": 2, "store_every": 2}
    _, trainer = trained(tmp_path, flash)
    trainer.save_model = trainer.save_model  # as it is
    trainer._save_checkpoint(trainer.model, trial=None)
    folder = tmp_path / "hf" / f"checkpoint-{STEPS}"
    assert folder.is_dir()
    trainer.args.max_steps = STEPS + 2
    trainer.train(resume_from_checkpoint=str(folder))
    assert trainer.state.global_step == STEPS + 2


def test_what_we_override_is_there() -> None:
    """The private methods of this release's Trainer that our class overrides still exist."""
    for name in (
        "set_initial_training_values",
        "_init_training_state",
        "_prepare_for_training",
        "_run_epoch",
        "_load_rng_state",
    ):
        assert callable(getattr(Trainer, name))
    assert callable(Trainer._load_callback_state)

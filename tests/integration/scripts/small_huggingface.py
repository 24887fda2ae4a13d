"""A small GPT, its data and a Trainer of Hugging Face's, for the tests of our own: they import it when they run.

What it imports takes seconds, which whoever only collects tests need not spend.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers imports is not ours to mend
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from dlrover_adapters.torch.huggingface import FlashTrainer

torch.set_num_threads(1)  # threads that spin are of no use to a model as small as this
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

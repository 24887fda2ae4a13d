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

    from dlrover_adapters.torch import ElasticDataset
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


SIZE, BATCH, SEED = 40, 8, 3


def sentence(number: int) -> dict[str, torch.Tensor]:
    """Eight words, the first of which is the sentence's number."""
    words = torch.arange(number, number + 8)
    return {"input_ids": words, "labels": words}


class Writing(FlashTrainer):
    """Notes the sentences of each step, when its batches enter it; ``spoilt``: a step whose gradients are infinite."""

    spoilt = -1

    def create_accelerator_and_postprocess(self) -> None:
        """With a scaler, where a step is to be spoilt."""
        super().create_accelerator_and_postprocess()
        self.entered: dict[int, list[int]] = {}
        if self.spoilt >= 0:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """A batch enters a step."""
        self.entered.setdefault(self.state.global_step + 1, []).extend(inputs["input_ids"][:, 0].tolist())
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Infinite, where it is to be spoilt."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * torch.inf if self.state.global_step == self.spoilt else loss


def elastic(
    folder: Path, steps: int, die_at: int = 0, kind: Any = Writing, **more: Any
) -> tuple[Heard, Any, ElasticDataset]:
    """The same on an `ElasticDataset`: five steps an epoch, each of four micro-batches of two; losses, the Trainer, the data."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    given = {"global_batch": BATCH, "micro_batch": 2, "epochs": 3, **more.pop("data", {})}
    data = ElasticDataset("train", size=SIZE, fetch=sentence, seed=SEED, **given)
    args = TrainingArguments(
        output_dir=str(folder / "hf"), max_steps=steps, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, **{"gradient_accumulation_steps": 1, **more},
    )  # fmt: skip
    heard = Heard(die_at)
    flash = {"url": str(folder / "ckpts"), "every": 1, "store_every": 1}
    heard.trainer = trainer = kind(model=model, args=args, train_dataset=data, callbacks=[heard], flash=flash)
    try:
        trainer.train()
    except Dies:
        trainer.flash.close()
        trainer.get_train_dataloader().close()
    return heard, trainer, data

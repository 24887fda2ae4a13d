"""Hugging Face's Trainer, saved and resumed by a `FlashCheckpoint`: ``FlashTrainer`` for ``Trainer``, and nothing else changes.

    trainer = FlashTrainer(model=model, args=args, train_dataset=dataset, flash={"url": "file:///ckpts/run1", "every": 10})
    trainer.train()          # goes on after the newest step that is whole anywhere; a first run starts anew

In memory and on storage lie model, optimizer, scheduler, gradient scaler, random numbers and the Trainer's own state (step,
epoch, log, the states of callbacks). The Trainer's own checkpoints (``save_strategy``) go on beside ours, for whoever wants files
of their kind; ``train(resume_from_checkpoint=...)`` resumes from those and not from ours. Which data a resumed epoch begins
with is the Trainer's business: it skips what was seen (``ignore_data_skip``), and gets the random numbers that belong there.

With an `ElasticDataset` as ``train_dataset`` each sample counts once, at any number of workers. The Trainer draws the batches of
a step before the step; a batch counts when it has gone through ``training_step`` and the step is made. The dataset's
``global_batch`` decides how many batches a step accumulates; without it, the Trainer's arguments do.

It overrides private methods of the Trainer, as transformers 5.23 has them. Where a release lacks one of them, or takes other
arguments, making a FlashTrainer raises: otherwise nothing would be saved, and nobody would notice. Not
with DeepSpeed, nor with FSDP through the Trainer.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import random
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from dlrover_core.errors import CoreError, SpecError

from . import steps
from .checkpoint.flash import FlashCheckpoint
from .data.dataset import ElasticDataset
from .data.loader import ElasticLoader

_OURS = "flash"
"""Where a checkpoint's folder would be named: the Trainer asks for what it does on resuming only where one is."""


_OVERRIDDEN = {
    "set_initial_training_values": ("args", "dataloader"),
    "_init_training_state": (
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_run_epoch": ("resume_from_checkpoint",),
    "_load_rng_state": ("checkpoint",),
    "_load_callback_state": (),
    "get_train_dataloader": (),
    "training_step": ("model", "inputs"),
}
"""Methods of the Trainer that are overridden or called, and arguments that they must take."""


class FlashTrainerMixin:
    """For a Trainer of your own: ``class Mine(FlashTrainerMixin, Theirs)``. ``flash``: options of `FlashCheckpoint`."""

    def __init__(self, *args: Any, flash: dict[str, Any], **kwargs: Any) -> None:
        _check(super())
        super().__init__(*args, **kwargs)
        self.flash_options = dict(flash)
        self.flash: FlashCheckpoint | None = None
        self._resumed = False
        self._prepared: Any = None
        self._loader: Any = None
        self._random: Any = None
        me: Any = self
        found = me.train_dataset
        self._counted = _Counted(me, found) if isinstance(found, ElasticDataset) else None
        if self._counted is not None:
            # Before all others, which may look where the data are.
            me.callback_handler.callbacks.insert(0, self._counted)
        self.add_callback(_Steps(self))  # type: ignore[attr-defined]  # Trainer has it

    # ---- what the Trainer asks for in turn: sizes, its state, everything prepared, an epoch

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Remember the loader: a resumed state needs everything prepared, which comes later."""
        self._loader = dataloader
        return super().set_initial_training_values(args, dataloader)  # type: ignore[misc]

    def _init_training_state(self, max_steps: int, steps: int, epochs: int, resume: str | None, trial: Any) -> Any:
        """The Trainer's state; with ours restored, if there is one. Returns epochs done, and batches done in the next one."""
        me: Any = self
        told = super()._init_training_state(max_steps, steps, epochs, resume, trial)  # type: ignore[misc]
        if me.is_deepspeed_enabled or me.is_fsdp_enabled:
            raise RuntimeError(
                "FlashTrainer saves models that the Trainer does not shard; use FlashCheckpoint in a loop of yours"
            )
        counted = self._counted
        if counted is not None:
            counted.begin(max_steps, steps, resume)
        self._resumed = False
        self._prepared = super()._prepare_for_training(max_steps, self._loader, resume)  # type: ignore[misc]
        kept = _TrainerState(me)
        self.flash = FlashCheckpoint(
            model=me.model,
            optimizer=me.optimizer,
            scheduler=me.lr_scheduler,
            extra=kept,
            **({} if counted is None else {"data": counted.data}) | self.flash_options,
        )
        if resume is not None or not self.flash.restore():
            return told
        self._resumed = True
        self._random = (random.getstate(), np.random.get_state(), torch.get_rng_state())  # noqa: NPY002 - what it uses
        me.state.init_training_references(me, max_steps, epochs, trial)
        if counted is not None:
            return counted.data.place.epoch, 0
        done, within = divmod(me.state.global_step, steps)
        return done, 0 if me.args.ignore_data_skip else within * me.args.gradient_accumulation_steps

    def _prepare_for_training(self, _max_steps: int, _loader: Any, _resume: str | None) -> Any:
        """It is prepared."""
        prepared, self._prepared = self._prepared, None
        return prepared

    def _run_epoch(self, *, resume_from_checkpoint: str | None, **kwargs: Any) -> Any:
        """An epoch; one that was under way skips what it had."""
        told = _OURS if self._resumed and resume_from_checkpoint is None else resume_from_checkpoint
        return super()._run_epoch(resume_from_checkpoint=told, **kwargs)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        """The Trainer's loader; of an `ElasticDataset` its own, which accelerate does not divide again."""
        return super().get_train_dataloader() if self._counted is None else self._counted.loader  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """A batch enters a step."""
        if self._counted is not None:
            self._counted.entered += 1
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The random numbers of the saved step, now that skipping has used some."""
        if checkpoint != _OURS:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
            return
        python, numpy, cpu = self._random
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - as above
        torch.set_rng_state(cpu)


class FlashTrainer(FlashTrainerMixin, Trainer):  # type: ignore[misc]  # transformers has no types that mypy could follow
    """The Trainer, saved in memory every few steps."""


def _check(trainer: Any) -> None:
    """Raise `SpecError` where the installed transformers' Trainer has not what is overridden."""
    missing = []
    for name, wanted in _OVERRIDDEN.items():
        method = getattr(trainer, name, None)
        if not callable(method):
            missing.append(f"no {name}")
        elif lacks := [one for one in wanted if one not in inspect.signature(method).parameters]:
            missing.append(f"{name} without {', '.join(lacks)}")
    if not hasattr(TrainerState, "init_training_references"):
        missing.append("no TrainerState.init_training_references")
    if missing:
        raise SpecError(
            "transformers",
            f"FlashTrainer overrides methods that the Trainer of transformers {transformers.__version__} does not have as they "
            f"were ({'; '.join(missing)}), so nothing would be saved. Install transformers 5.23, or use FlashCheckpoint in "
            "a loop of yours",
        )


class _TrainerState:
    """What of a Trainer is no model, optimizer or scheduler."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """The state as the Trainer's own checkpoints have it, as text, and the scaler's."""
        trainer = self._trainer
        told = dataclasses.asdict(trainer.state)
        exported: dict[str, Any] = {}
        for one in (*trainer.callback_handler.callbacks, trainer.control):
            if isinstance(one, ExportableState):
                exported.setdefault(type(one).__name__, []).append(one.state())
        told["stateful_callbacks"] = exported
        scaler = getattr(trainer.accelerator, "scaler", None)
        return {"state": json.dumps(told), "scaler": scaler.state_dict() if scaler is not None else None}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Give it back."""
        trainer = self._trainer
        trainer.state = TrainerState(**json.loads(saved["state"]))
        trainer._load_callback_state()
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None and saved["scaler"]:
            scaler.load_state_dict(saved["scaler"])


class _Counted(TrainerCallback):
    """Counts the samples of an `ElasticDataset` by the steps that their batches have entered."""

    def __init__(self, trainer: Any, data: ElasticDataset) -> None:
        self.data, self._trainer, self.entered, self._scale_before = data, trainer, 0, 0.0
        args = trainer.args = copy.copy(trainer.args)
        if args.n_gpu > 1:
            raise SpecError(
                "n_gpu", f"{args.n_gpu} GPUs in one process divide batches once more: start a process for each"
            )
        micro = args.per_device_train_batch_size
        data.ask(micro * args.gradient_accumulation_steps * args.world_size, micro)
        data.collate_by(trainer.data_collator)
        options = {
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and not args.use_cpu,
        }
        if args.dataloader_num_workers:
            options["prefetch_factor"] = args.dataloader_prefetch_factor
        self.loader = ElasticLoader(data, **options)
        args.gradient_accumulation_steps = self.loader.rounds
        args.per_device_train_batch_size = trainer._train_batch_size = data.division.micro_batch

    def begin(self, max_steps: int, steps_per_epoch: int, resume: str | None) -> None:
        """Training begins. Raises `SpecError` for what would train other samples than are counted."""
        self.entered, self._scale_before = 0, self._scale
        if resume is not None:
            raise SpecError(
                "resume_from_checkpoint",
                f"{resume!r} has no position of dataset {self.data.name!r}: leave it out, and flash= restores its newest state",
            )
        epochs = -(-max_steps // steps_per_epoch)
        if 0 < self.data.epochs < epochs:
            raise SpecError(
                "epochs",
                f"{self.data.epochs} of dataset {self.data.name!r}, and the Trainer trains {max_steps} steps, which are {epochs} "
                f"epochs: give the dataset epochs={epochs}, or 0, or the Trainer fewer",
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:  # noqa: ARG002  # their names
        """The step is made: its global batch is consumed."""
        entered, self.entered = self.entered, 0
        if entered != args.gradient_accumulation_steps:
            raise CoreError(
                f"{entered} batches went through training_step in step {state.global_step}, and its global batch has "
                f"{args.gradient_accumulation_steps}: call super().training_step once for each, and leave none out"
            )
        scale = self._scale
        if scale < self._scale_before:
            self.data.say_skipped()
        self._scale_before = scale
        self.data.step()
        place = self.data.place
        state.epoch = place.epoch + place.position / self.data.size

    def on_train_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:  # noqa: ARG002  # their names
        """No more batches are drawn."""
        self.loader.close()

    @property
    def _scale(self) -> float:
        """The gradient scaler's. It falls with a skipped step; accelerate does not notice those of fused optimizers (1.15)."""
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        return float(scaler.get_scale()) if scaler is not None else 0.0


class _Steps(TrainerCallback):
    """Saves after every optimizer step, and says that it was the last one."""

    def __init__(self, trainer: FlashTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:  # noqa: ARG002  # their names
        """It is known how many steps there are to be."""
        steps.total(state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:  # noqa: ARG002  # their names
        """A step is done."""
        if self._trainer.flash is not None:
            self._trainer.flash.step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:  # noqa: ARG002  # as above
        """Training has ended well."""
        if self._trainer.flash is not None:
            self._trainer.flash.close()
            self._trainer.flash = None

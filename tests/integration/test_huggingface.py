"""Hugging Face's own Trainer, saved and resumed by us, installed as it is. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dlrover_adapters.torch import FlashCheckpoint
from dlrover_core.data.permutation import Order
from dlrover_core.errors import CoreError, SpecError

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


# An ElasticDataset.


def order(small: ModuleType, steps: int) -> dict[int, list[int]]:
    """Of each step, the samples that it is to have."""
    epochs = -(-steps * small.BATCH // small.SIZE)
    every = [one for epoch in range(epochs) for one in Order(small.SIZE, small.SEED, epoch).indices(0, small.SIZE)]
    return {step + 1: every[step * small.BATCH : (step + 1) * small.BATCH] for step in range(steps)}


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_enters_one_step_though_the_trainer_draws_ahead(
    small: ModuleType, tmp_path: Path, workers: int
) -> None:
    """A Trainer that ended within the second epoch is resumed: each step has the next samples of the order, the position is that

    of the steps that were made, and the losses are those of an undisturbed Trainer, dropout included.
    """
    more = {"dataloader_num_workers": workers, **({"dataloader_prefetch_factor": 2} if workers else {})}
    undisturbed, theirs, _ = small.elastic(tmp_path / "a", 13, **more)
    first, before, data = small.elastic(tmp_path / "b", 13, 7, **more)
    assert (data.place[1:3], sorted(first.losses)) == ((1, 16), [1, 2, 3, 4, 5, 6, 7])
    second, after, again = small.elastic(tmp_path / "b", 13, **more)
    assert again.place[1:3] == (2, 24)
    assert before.entered | after.entered == theirs.entered == order(small, 13)
    assert sorted(after.entered) == list(range(8, 14))
    assert {**first.losses, **second.losses} == undisturbed.losses
    assert (after.state.epoch, after.args.gradient_accumulation_steps) == (2 + 24 / 40, 4)


def test_a_step_that_the_scaler_skips_is_consumed(
    small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its samples count, and a warning names them."""
    monkeypatch.setattr(small.Writing, "spoilt", 2)
    _, trainer, data = small.elastic(tmp_path, 4, max_grad_norm=0)
    assert (trainer.entered, data.place[1:3]) == (order(small, 4), (0, 32))
    (said,) = [one.getMessage() for one in caplog.records if "GradScaler" in one.getMessage()]
    assert "positions [16, 24) of epoch 0 of dataset 'train' count as consumed" in said


def test_what_would_count_other_samples_than_are_trained_is_refused(small: ModuleType, tmp_path: Path) -> None:
    """Batches that are left out, epochs that are not there, checkpoints without a position."""

    class Lazy(small.Writing):  # type: ignore[name-defined,misc]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if len(self.entered.get(1, ())) == small.BATCH - 2:
                return small.torch.zeros(())
            return super().training_step(model, inputs, *args, **kwargs)

    with pytest.raises(CoreError, match="3 batches went through training_step in step 1, and its global batch has 4"):
        small.elastic(tmp_path / "a", 4, kind=Lazy)
    with pytest.raises(
        SpecError, match="epochs: 1 of dataset 'train', and the Trainer trains 13 steps, which are 3 epochs"
    ):
        small.elastic(tmp_path / "b", 13, data={"epochs": 1})
    with pytest.raises(SpecError, match="global_batch: 8 of dataset 'train' is no multiple of 1 ranks times 3"):
        small.elastic(tmp_path / "c", 4, data={"micro_batch": 3})
    _, trainer, _ = small.elastic(tmp_path / "d", 1)
    with pytest.raises(SpecError, match="resume_from_checkpoint: 'x' has no position of dataset 'train': leave it out"):
        trainer._counted.begin(1, 5, "x")


def test_the_trainers_arguments_say_how_large_a_step_is_where_the_dataset_does_not(
    small: ModuleType, tmp_path: Path
) -> None:
    """Batch size times accumulation times ranks; a loop of accelerate's, with its own accumulation, counts by hand."""
    _, trainer, data = small.elastic(
        tmp_path, 3, data={"global_batch": None, "micro_batch": None},
        per_device_train_batch_size=4, gradient_accumulation_steps=2,
    )  # fmt: skip
    assert (data.place[1:3], trainer.entered) == ((0, 24), order(small, 3))


def test_a_loop_of_accelerates_counts_its_steps(small: ModuleType, tmp_path: Path) -> None:
    """As docs/data.md has it: killed within an epoch and restored, each sample enters one step, though loaders draw ahead."""
    from accelerate import Accelerator

    torch, found = small.torch, dict[int, list[int]]()
    for die_at in (7, 99):
        data = small.ElasticDataset(
            "train", size=40, fetch=torch.tensor, epochs=2, seed=3, global_batch=8, micro_batch=2
        )
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=8 // (2 * 1))
        net = torch.nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")
        with FlashCheckpoint(str(tmp_path), model=net, optimizer=optimizer, data=data, every=1, store_every=1) as ckpt:
            step = ckpt.restore()
            for numbers in loader:
                found.setdefault(step + 1, []).extend(numbers.tolist())
                with accelerator.accumulate(model):
                    accelerator.backward(model(numbers.float()[:, None] / 40).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                if not accelerator.sync_gradients:
                    continue
                data.step()
                step += 1
                ckpt.step(step)
                ckpt.wait()
                if step == die_at:
                    break
    assert (found, data.ended) == (order(small, 10), True)

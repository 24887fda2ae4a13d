"""End right after a save that was due, with ranks that come to ``close()`` at different times.

    ending.py KIND URL --mib 115 --kind-of frozen --every 2 --steps 8 --skews 0,200

KIND: ``plain`` (FlashCheckpoint), ``huggingface`` (FlashTrainer), ``lightning`` (FlashCheckpointIO). The state is a tensor
``mark``, whose value is minus the number of steps made, and a ballast of so many MiB: a frozen parameter, a buffer, or a trained
parameter. Training goes on until the memory for states is populated, then makes so many steps more, the last of which is due.
After that each rank waits as long as ``--skews`` says of it, and closes.

Each rank writes ``$FOLDER/ended-RANK``: its last step, and the last step whose save was not left out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

FLOATS = 2**18  # in a MiB
FROZEN, BUFFER, TRAINED = "frozen", "buffer", "trained"


class Marked(nn.Module):
    """Of which every step subtracts one from ``mark``, and from a trained ballast. Its loss is also a Trainer's."""

    def __init__(self, mib: int, kind_of: str) -> None:
        super().__init__()
        self.mark = nn.Parameter(torch.zeros(4))
        ballast = torch.arange(mib * FLOATS, dtype=torch.float32)
        if kind_of == BUFFER:
            self.register_buffer("ballast", ballast)
        else:
            self.ballast = nn.Parameter(ballast, requires_grad=kind_of == TRAINED)

    def forward(self, input_ids: Any = None, labels: Any = None) -> dict[str, torch.Tensor]:  # a Trainer's names
        """The loss, whose gradient is one everywhere."""
        loss = self.mark.sum()
        if self.ballast.requires_grad:
            loss = loss + self.ballast.sum()
        return {"loss": loss}


class Ending:
    """When training ends, and what each rank tells of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._end, self._seen = options, 0, 0
        self.saved = 0

    def last(self, step: int, ckpt: Any) -> bool:
        """Is step ``step`` the last one? A collective; after its save was asked for."""
        stats = ckpt.stats
        left_out = stats.skipped + stats.early
        if step % self._options.every == 0 and left_out == self._seen:
            self.saved = step
        self._seen = left_out
        if not self._end:
            ready = torch.tensor([float(stats.populated or not self._options.populated)])
            dist.all_reduce(ready, dist.ReduceOp.MIN)
            if ready:
                every = self._options.every
                self._end = (step + self._options.steps + every - 1) // every * every
        return step == self._end

    def wait(self, step: int) -> None:
        """Come late to ``close()``, as a rank that logs or evaluates does."""
        rank = int(os.environ["RANK"])
        told = {"last": step, "saved": self.saved}
        (Path(os.environ["FOLDER"]) / f"ended-{rank}").write_text(json.dumps(told))
        skews = self._options.skews
        time.sleep(skews[rank % len(skews)] / 1000)


def flash_options(options: argparse.Namespace) -> dict[str, Any]:
    """Of `FlashCheckpoint`."""
    frozen = ["*ballast"] if options.kind_of == FROZEN else []
    return {"url": options.url, "every": options.every, "store_every": options.store_every, "frozen": frozen}


def plain(options: argparse.Namespace) -> None:
    """A loop of one's own."""
    from dlrover_adapters.torch import FlashCheckpoint

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model, ending, step = Marked(options.mib, options.kind_of), Ending(options), 0
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    ckpt = FlashCheckpoint(model=model, optimizer=optimizer, **flash_options(options))
    ckpt.restore()
    over = False
    while not over:
        optimizer.zero_grad()
        model()["loss"].backward()
        dist.all_reduce(model.mark.grad)
        model.mark.grad /= dist.get_world_size()  # type: ignore[operator]
        optimizer.step()
        step += 1
        ckpt.step(step)
        over = ending.last(step, ckpt)
        time.sleep(0.0 if over else options.pause)
    ending.wait(step)
    ckpt.close()
    dist.destroy_process_group()


class Rows(torch.utils.data.Dataset[Any]):
    """Rows that nobody looks at."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = torch.zeros(1, dtype=torch.long)
        return {"input_ids": words, "labels": words}


def huggingface(options: argparse.Namespace) -> None:
    """Hugging Face's Trainer, under DDP where there are several ranks."""
    from transformers import TrainerCallback, TrainingArguments

    from dlrover_adapters.torch.huggingface import FlashTrainer

    torch.set_num_threads(1)
    ending = Ending(options)

    class Ends(TrainerCallback):  # type: ignore[misc]  # transformers has no types that mypy could follow
        """Is called before FlashTrainer's own callback: at the end of a step the step before has been saved."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if state.global_step and self.over(state.global_step):
                control.should_training_stop = True
            return control

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if state.global_step == ending._end:
                control.should_training_stop = True
            return control

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.over(state.global_step)
            ending.wait(state.global_step)

        def over(self, step: int) -> bool:
            """The one after this is counted by `on_step_end`."""
            time.sleep(options.pause)
            return ending.last(step, trainer.flash)

    args = TrainingArguments(
        output_dir=str(Path(os.environ["FOLDER"]) / "hf"), max_steps=100_000, per_device_train_batch_size=1,
        learning_rate=1.0, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, weight_decay=0.0,
        save_strategy="no", logging_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        ddp_broadcast_buffers=False, ddp_find_unused_parameters=False, remove_unused_columns=False,
    )  # fmt: skip
    model = Marked(options.mib, options.kind_of)
    trainer = FlashTrainer(
        model=model, args=args, train_dataset=Rows(), callbacks=[Ends()], flash=flash_options(options)
    )
    trainer.train()


def lightning(options: argparse.Namespace) -> None:
    """Lightning's Trainer with our plug-in, under DDP where there are several ranks; the files are Lightning's."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader

    from dlrover_adapters.torch.lightning import FlashCheckpointIO

    torch.set_num_threads(1)
    ending = Ending(options)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Marked(options.mib, options.kind_of)

        def training_step(self, _batch: Any, _index: int) -> torch.Tensor:
            time.sleep(options.pause)
            return self.model()["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=1.0)

    class Ends(Callback):
        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            ending.saved = trainer.global_step  # a save waits for its slot, and is never left out
            ending.wait(trainer.global_step)

    world = int(os.environ["WORLD_SIZE"])
    saves = ModelCheckpoint(options.url, every_n_train_steps=options.every, save_top_k=1, save_last=True)
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=world // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo", broadcast_buffers=False) if world > 1 else "auto",
        max_steps=options.every * max(1, options.steps // options.every), max_epochs=-1, callbacks=[saves, Ends()],
        plugins=[FlashCheckpointIO()], logger=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, default_root_dir=options.url,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Rows(), batch_size=1))


def main() -> None:
    """As the first lines say."""
    warnings.simplefilter("ignore")  # of third parties
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("plain", "huggingface", "lightning"))
    parser.add_argument("url")
    parser.add_argument("--mib", type=int, default=115)
    parser.add_argument("--kind-of", choices=(FROZEN, BUFFER, TRAINED), default=FROZEN)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--store-every", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.005, help="seconds of each step")
    parser.add_argument("--skews", type=lambda text: [int(one) for one in text.split(",")], default=[0])
    parser.add_argument(
        "--unpopulated", dest="populated", action="store_false", help="do not wait for populated memory"
    )
    options = parser.parse_args()
    {"plain": plain, "huggingface": huggingface, "lightning": lightning}[options.kind](options)


if __name__ == "__main__":
    main()

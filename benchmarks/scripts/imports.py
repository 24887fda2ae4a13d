"""A training script whose imports take seconds. `bench_imports.py` starts it, kills one of its ranks and reads its diary.

``imports.py hf|lightning|compile DIARY``. Each step is a line of the diary: rank, pid, step, CLOCK_MONOTONIC in nanoseconds.
``--setup``: one process makes its first step twice and prints the seconds of the second one, which needs no imports.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

KIND, DIARY = sys.argv[1], Path(sys.argv[2])
STEPS = 1 if "--setup" in sys.argv else 10**6
VOCABULARY, LENGTH = 128, 32


def note(step: int) -> None:
    """Write a step down; slowly, so that there is somebody to kill."""
    line = f"{os.environ.get('RANK', '0')} {os.getpid()} {step} {time.monotonic_ns()}\n"
    fd = os.open(DIARY, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line.encode())
    os.close(fd)
    time.sleep(0.1 if STEPS > 1 else 0.0)


class Rows(torch.utils.data.Dataset):
    """Random token sequences."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((LENGTH,), place % VOCABULARY)
        return {"input_ids": tokens, "labels": tokens}


def hf() -> None:
    """A Trainer of Hugging Face with a small Qwen2, saving nothing."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Trainer, TrainerCallback, TrainingArguments

    class Notes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            note(state.global_step)

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    arguments = TrainingArguments(
        str(DIARY.parent / "out"), max_steps=STEPS, per_device_train_batch_size=4, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[Notes()]).train()


def lightning() -> None:
    """Lightning's Trainer with DDP where there are several ranks."""
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(LENGTH, VOCABULARY)

        def training_step(self, batch: dict[str, torch.Tensor], place: int) -> torch.Tensor:
            note(place + 1)
            return self.layer(batch["input_ids"].float()).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_steps=STEPS, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(Rows(), batch_size=4))


class Block(torch.nn.Module):
    """Attention and a perceptron, as GPT has them."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.ask, self.answer = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.think = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.ask(self.before(x)).split(width, dim=2)
        q, k, v = (one.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for one in parts)
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.answer(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.think(self.between(x))


class Gpt(torch.nn.Module):
    """Two blocks; returns the loss."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(VOCABULARY, width), torch.nn.Embedding(LENGTH, width)
        self.blocks = torch.nn.Sequential(Block(), Block(), torch.nn.LayerNorm(width))
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        found = self.head(self.blocks(self.tokens(tokens) + self.places(torch.arange(LENGTH))))
        return torch.nn.functional.cross_entropy(found.flatten(0, 1), following.flatten())


def compiled() -> None:
    """A loop as nanoGPT's: a compiled GPT in DDP, AdamW, clipped gradients. What inductor generates is cached on disk."""
    distributed = "RANK" in os.environ
    if distributed:
        torch.distributed.init_process_group("gloo")
    model: torch.nn.Module = torch.compile(Gpt())
    if distributed:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for number in range(STEPS):
        tokens = torch.randint(VOCABULARY, (4, LENGTH + 1))
        model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        note(number + 1)


MAIN = {"hf": hf, "lightning": lightning, "compile": compiled}[KIND]

if __name__ == "__main__":
    MAIN()
    if "--setup" in sys.argv:
        torch._dynamo.reset()
        began = time.monotonic()
        MAIN()
        print(f"setup {time.monotonic() - began:.3f}")

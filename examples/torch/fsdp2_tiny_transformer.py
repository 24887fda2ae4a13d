"""Train a tiny character-level transformer on real text, sharded by FSDP2, with a checkpoint that any world size can load.

    dlrover-run --nproc-per-node 2 examples/torch/fsdp2_tiny_transformer.py --checkpoint /tmp/tiny --text war-and-peace.txt
    torchrun    --nproc-per-node 2 examples/torch/fsdp2_tiny_transformer.py --checkpoint /tmp/tiny --text war-and-peace.txt

Without --text it reads what every Python brings along: its own reference manual (`pydoc_data.topics`). On CPU it uses gloo, with
GPUs NCCL. Checkpoints are torch.distributed.checkpoint's: each rank writes its own shards, and a folder counts only once every
rank has written, so a killed run leaves the one before. Run again with another number of workers: the shards are dealt anew.

Each forward pass is a collective under FSDP2, so every rank must make the same number of micro-batches: one rank with one
fewer, and all wait for ever. Here each rank draws as many rows as the others, whatever the world size.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

try:
    from dlrover_adapters.torch import step as report_step
except ImportError:  # under plain torchrun

    def report_step(number: int) -> None:
        """Nobody listens."""


CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
ALPHABET = 128  # ASCII; everything else counts as one character


class Block(nn.Module):
    """One layer: causal self-attention and a perceptron, each around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows, characters, width."""
        heads = self.mix(self.before(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.think(self.between(x))


class Tiny(nn.Module):
    """A transformer that guesses the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(ALPHABET, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.guess = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ALPHABET)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Scores of the character after each of ``letters``, all rows in one."""
        x = self.letters(letters) + self.places(torch.arange(letters.shape[1], device=letters.device))
        for block in self.blocks:
            x = block(x)
        return self.guess(self.norm(x).flatten(0, 1))


def read(path: Path | None) -> torch.Tensor:
    """The text as numbers."""
    if path is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
    else:
        text = path.read_text(errors="replace")
    if len(text) <= CONTEXT + 1:
        raise SystemExit(f"{path} has {len(text)} characters; at least {CONTEXT + 2} are needed")
    return torch.tensor([min(ord(one), ALPHABET - 1) for one in text])


def rows(text: torch.Tensor, step: int, rank: int, world: int, batch: int) -> torch.Tensor:
    """This rank's rows of the step's ``batch``, drawn by the step's number alone: a step made again is the same step."""
    starts = torch.randint(len(text) - CONTEXT - 1, (batch,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts[rank::world].tolist()])


def newest(folder: Path) -> int:
    """The step of the newest checkpoint that is complete; 0 if there is none."""
    return max((int(one.name[5:]) for one in folder.glob("step-*") if one.name[5:].isdigit()), default=0)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """All ranks write their shards; only then the folder gets its name. The one before the last is removed."""
    weights, moments = get_state_dict(model, optimizer)
    part = folder / f"part-{step}"
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=part)
    if dist.get_rank() == 0:
        before = sorted((one for one in folder.glob("step-*")), key=lambda one: int(one.name[5:]))
        part.rename(folder / f"step-{step}")
        for one in before[:-1]:
            shutil.rmtree(one)
    dist.barrier()  # nobody goes on to a step that a killed rank 0 would have no checkpoint for


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint, dealt out to as many ranks as there are now; its step."""
    # Rank 0 looks, so that all load the same one.
    found = torch.tensor([newest(folder)])
    if torch.cuda.is_available():
        found = found.cuda()
    dist.broadcast(found, 0)
    step = int(found.item())
    if step:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"step-{step}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return step


def main() -> None:
    """Train, and print the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="rows of the whole world; a multiple of its size")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a folder")
    parser.add_argument("--text", type=Path, help="any text file (default: Python's own manual)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds added to every step, to have time to watch")
    options = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cuda:nccl,cpu:gloo" if kind == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.batch % world:
        raise SystemExit(
            f"--batch {options.batch} is no multiple of {world} ranks: some would make fewer rows than others"
        )
    options.checkpoint.mkdir(parents=True, exist_ok=True)
    text = read(options.text)
    torch.manual_seed(0)
    mesh = init_device_mesh(kind, (world,))
    model = Tiny().to(kind)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = load(options.checkpoint, model, optimizer)
    if rank == 0 and start:
        print(f"resumed after step {start} with {world} ranks", flush=True)
    for step in range(start + 1, options.steps + 1):
        mine = rows(text, step, rank, world, options.batch).to(kind)
        scores = model(mine[:, :-1])
        loss = nn.functional.cross_entropy(scores, mine[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report_step(step)
        dist.all_reduce(mean := loss.detach() / world)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.4f}", flush=True)
        if step % options.save_every == 0:
            save(options.checkpoint, model, optimizer, step)
        time.sleep(options.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

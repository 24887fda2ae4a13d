"""What the matrix trains: each class is one way to lay out a model and its optimizers over ranks.

Nothing here knows of checkpoints. A kind says in ``given`` what a checkpoint of it has to hold, and in `Kind.whole` what
its full tensors are, by names that do not depend on how many ranks share them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

ROWS, FEATURES = 8, 6
LARGE = 80_000
"""Elements of float32: more than a checkpoint serialises with the rest of an ``extra``."""


class Sampler:
    """A rank's position in its own data. No two ranks are at the same place after the same step."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def advance(self) -> int:
        """Count one more batch; return how many were taken before it."""
        taken = self.at // (2 + self.rank)
        self.at += 2 + self.rank
        return taken

    def state_dict(self) -> dict[str, int]:
        """The rank and its position."""
        return {"rank": self.rank, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over the saved rank and position, even if another rank saved them, so that this shows."""
        self.rank, self.at = state["rank"], state["at"]


class Kind:
    """One training. ``world``: its ranks; ``other``: ranks of the world that goes on with its state.

    Subclasses make ``models`` and ``optimizers`` in `build`, by key; the key "" stands for one that has none.
    """

    world, other = 2, 3
    models: dict[str, Any]
    optimizers: dict[str, torch.optim.Optimizer]

    def __init__(self, rank: int, world: int, seed: int) -> None:
        self.rank, self.ranks = rank, world
        self.sampler = Sampler(rank)
        self.extra: dict[str, Any] = {"sampler": self.sampler}
        self.more: dict[str, Any] = {}
        torch.manual_seed(seed)
        self.data = rank
        """Ranks with the same number here get the same batches."""
        self.build()
        self.schedulers = {key: torch.optim.lr_scheduler.StepLR(one, 3, 0.7) for key, one in self.optimizers.items()}
        self._named = dict(self.tensors())
        for generator in (torch.manual_seed, np.random.seed, random.seed):
            generator(1_000 * seed + rank)

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of the checkpoint."""
        parts = {"model": self.models, "optimizer": self.optimizers, "scheduler": self.schedulers}
        found = {name: one.get("", one) for name, one in parts.items()}
        return {**found, "extra": self.extra, **self.more}

    # ---- what subclasses say

    def build(self) -> None:
        """Make models and optimizers."""
        self.models = {"": self.made()}
        self.optimizers = {"": torch.optim.AdamW(self.models[""].parameters(), lr=0.01)}

    def made(self) -> nn.Module:
        """Make one whole model, whose numbers of rows no world size divides."""
        return nn.Sequential(nn.Linear(FEATURES, 11), nn.Tanh(), nn.Dropout(0.2), nn.Linear(11, 7))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Run forward and return the loss."""
        return self.models[""](batch).float().square().mean()  # type: ignore[no-any-return]

    def backward(self, batch: torch.Tensor) -> torch.Tensor:
        """Run forward and backward, average the gradients, and return the loss."""
        loss = self.loss(batch)
        loss.backward()
        self.average()
        return loss

    def average(self) -> None:
        """Average gradients by one all-reduce for each parameter, because DDP changes its buckets after its first step."""
        averaged(one for optimizer in self.optimizers.values() for one in parameters(optimizer))

    def update(self) -> None:
        """Change what a step changes beside parameters: buffers, averages. Called after the optimizers."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the models' tensors with names that are the same in a world of any size."""
        for key, model in self.models.items():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                yield f"{key}.{name}".replace("module.", ""), tensor

    # ---- what the script calls

    def step(self) -> str:
        """Train one step and return the loss as `float.hex`."""
        for one in self.optimizers.values():
            one.zero_grad()
        loss = self.backward(self.batch())
        for one in self.optimizers.values():
            one.step()
        for scheduler in self.schedulers.values():
            scheduler.step()
        with torch.no_grad():
            self.update()
        return loss.item().hex()

    def batch(self) -> torch.Tensor:
        """Make the next batch from the sampler's position."""
        seed = 100 * self.sampler.advance() + self.data
        return torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(seed))

    def evaluate(self) -> None:
        """Run forward without backward, on a batch of its own."""
        batch = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(self.data))
        for model in self.models.values():
            model.eval()
        with torch.no_grad():
            self.loss(batch)
        for model in self.models.values():
            model.train()

    def drawn(self) -> list[str]:
        """Draw a random number from each global generator."""
        return [torch.rand(()).item().hex(), float(np.random.random()).hex(), random.random().hex()]  # noqa: NPY002  # the global one

    def whole(self) -> dict[str, str]:
        """Return digests of all full tensors of models and optimizers, and learning rates. All ranks call it together."""
        found = {name: digest(tensor) for name, tensor in self._named.items()}
        for key, optimizer in self.optimizers.items():
            for number, (group, parameter) in enumerate(_grouped(optimizer)):
                for name, value in sorted(optimizer.state[parameter].items() if parameter in optimizer.state else ()):
                    found[f"{key}/{number}.{name}"] = digest(torch.as_tensor(value))
                found[f"{key}/{number}.lr"] = float(group["lr"]).hex()
        return found


def _grouped(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    return ((group, one) for group in optimizer.param_groups for one in group["params"])


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer."""
    return [one for _group, one in _grouped(optimizer)]


def averaged(tensors: Iterable[torch.Tensor], group: Any = None) -> None:
    """Replace each gradient by its mean over the ranks, with one all-reduce for each."""
    for one in tensors:
        if one.grad is not None and one.numel():
            summed = one.grad.float()
            dist.all_reduce(summed, group=group)
            one.grad.copy_(summed / dist.get_world_size(group))


def digest(tensor: torch.Tensor) -> str:
    """Hash a tensor's bytes, dtype and shape. A DTensor is gathered first, which all ranks have to do together."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(repr((tensor.dtype, tuple(tensor.shape))).encode() + raw, digest_size=6).hexdigest()


class Ddp(Kind):
    """`DistributedDataParallel` on two ranks: a sum of two numbers does not depend on their order."""

    def build(self) -> None:
        """Give the checkpoint the wrapped model."""
        self.models = {"": DistributedDataParallel(self.made())}
        self.optimizers = {"": torch.optim.AdamW(self.models[""].parameters(), lr=0.01)}

    def average(self) -> None:
        """Do nothing: DDP averages."""


class Buffers(Ddp):
    """Buffers that forward writes: BatchNorm's, and a counter."""

    def made(self) -> nn.Module:
        """Add BatchNorm, whose running means differ between ranks until DDP sends rank 0's, and a counter."""
        model = nn.Sequential(nn.Linear(FEATURES, 11), nn.BatchNorm1d(11), nn.Dropout(0.2), nn.Linear(11, 7))
        model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        model.register_buffer("not_saved", torch.ones(3), persistent=False)
        return model

    def update(self) -> None:
        """Count the steps."""
        self.models[""].module.seen += 1

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Leave out the buffers of other ranks than 0, because the next forward overwrites them."""
        for name, tensor in super().tensors():
            if self.rank == 0 or isinstance(tensor, nn.Parameter):
                yield name, tensor


class Fsdp(Kind):
    """FSDP2. The root module has parameters of its own, so a forward without backward leaves them gathered."""

    def build(self) -> None:
        """Shard one child, then the root."""
        model = self.made()
        mesh = self.mesh()
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.models = {"": model}
        self.optimizers = {"": torch.optim.AdamW(model.parameters(), lr=0.01)}

    def mesh(self) -> Any:
        """The device mesh: all ranks in one dimension."""
        return init_device_mesh("cpu", (self.ranks,))

    def average(self) -> None:
        """Do nothing: FSDP averages."""


class Hsdp(Fsdp):
    """Hybrid sharding: two replicas, each sharded over half of the ranks."""

    world, other = 4, 2

    def mesh(self) -> Any:
        """The device mesh: replicas by shards."""
        return init_device_mesh("cpu", (2, self.ranks // 2), mesh_dim_names=("replicate", "shard"))


class FsdpTp(Fsdp):
    """FSDP2 over tensor parallelism."""

    world, other = 4, 2

    def build(self) -> None:
        """Split layers over tensor-parallel ranks, then shard over data-parallel ranks."""
        mesh = init_device_mesh("cpu", (2, self.ranks // 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        self.data = mesh["dp"].get_local_rank()
        self.models = {"": model}
        self.optimizers = {"": torch.optim.AdamW(model.parameters(), lr=0.01)}


class Pipeline(Kind):
    """Two pipeline stages with local names, each on half of the ranks, each given under a key of its own."""

    world, other = 4, 2

    def build(self) -> None:
        """Make this rank's stage, and the group of the ranks that replicate it."""
        self.replicas = self.ranks // 2
        self.stage, self.data = self.rank // self.replicas, self.rank % self.replicas
        groups = [dist.new_group(list(range(one, one + self.replicas))) for one in (0, self.replicas)]
        self.group = groups[self.stage]
        stages = [nn.Sequential(nn.Linear(FEATURES, 11), nn.Dropout(0.2)), nn.Sequential(nn.Linear(11, 7))]
        key = f"stage{self.stage}"
        self.module = stages[self.stage]
        self.models = {key: self.module}
        rate = (0.01, 0.02)[self.stage]
        self.optimizers = {key: torch.optim.AdamW(self.module.parameters(), lr=rate)}

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Run this rank's stage. The first stage returns a number of its own, which is only compared."""
        if self.stage == 0:
            self.made_here = self.module(batch)
            dist.send(self.made_here.detach(), self.rank + self.replicas)
            return self.made_here.square().mean()  # type: ignore[no-any-return]
        self.came = torch.empty(ROWS, 11)
        dist.recv(self.came, self.rank - self.replicas)
        self.came.requires_grad_()
        return self.module(self.came).square().mean()  # type: ignore[no-any-return]

    def backward(self, batch: torch.Tensor) -> torch.Tensor:
        """Send gradients back from the second stage to the first."""
        loss = self.loss(batch)
        if self.stage == 0:
            gradient = torch.empty(ROWS, 11)
            dist.recv(gradient, self.rank + self.replicas)
            self.made_here.backward(gradient)
        else:
            loss.backward()
            assert self.came.grad is not None
            dist.send(self.came.grad, self.rank - self.replicas)
        averaged(self.module.parameters(), self.group)
        return loss


class _Half(nn.Module):
    """One tensor-parallel rank's half of two layers, in plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 5), nn.Linear(5, 4, bias=False)


class Plain(Kind):
    """Tensor-parallel shards in plain tensors; ranks with the same half give it under the same key."""

    world, other, keyed = 4, 2, True

    def build(self) -> None:
        """Split the model over neighbouring ranks, and replicate the halves over the other ones."""
        self.shard, self.data = self.rank % 2, self.rank // 2
        pairs = [dist.new_group([one, one + 1]) for one in range(0, self.ranks, 2)]
        shards = [dist.new_group(list(range(one, self.ranks, 2))) for one in (0, 1)]
        self.pair, self.group = pairs[self.data], shards[self.shard]
        self.module = [_Half(), _Half()][self.shard]
        key = f"tp{self.shard}" if self.keyed else ""
        self.models = {key: self.module}
        self.optimizers = {key: torch.optim.AdamW(self.module.parameters(), lr=0.01)}

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Add up the outputs of both halves."""
        mine = self.module.down(torch.tanh(self.module.up(batch)))
        summed = mine.detach().clone()
        dist.all_reduce(summed, group=self.pair)
        return (mine + (summed - mine).detach()).square().mean()  # type: ignore[no-any-return]

    def average(self) -> None:
        """Average over the ranks that have the same half."""
        averaged(self.module.parameters(), self.group)


class SameName(Plain):
    """The same shards under one name, which a checkpoint has to refuse."""

    world, other, keyed = 2, 2, False


class TwoOptimizers(Kind):
    """One optimizer for the body, another one for the head."""

    def build(self) -> None:
        """Give both under keys."""
        model = self.made()
        self.models = {"": model}
        self.optimizers = {
            "body": torch.optim.AdamW(model[0].parameters(), lr=0.01),
            "head": torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9, nesterov=True),
        }


class Ema(Kind):
    """A model and its moving average, which evaluation uses."""

    def build(self) -> None:
        """Give both models; the optimizer writes one of them."""
        model = self.made()
        self.models = {"net": model, "ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))}
        self.optimizers = {"": torch.optim.AdamW(model.parameters(), lr=0.01)}
        self.used = "net"

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Run the model, or in an evaluation the average."""
        return self.models[self.used](batch).square().mean()  # type: ignore[no-any-return]

    def update(self) -> None:
        """Update the average."""
        self.models["ema"].update_parameters(self.models["net"])

    def evaluate(self) -> None:
        """Evaluate the average."""
        self.used = "ema"
        super().evaluate()
        self.used = "net"


class Masters(torch.optim.AdamW):
    """Adam over fp32 copies of bf16 parameters. The copies belong to no model."""

    def __init__(self, low: Iterable[torch.Tensor]) -> None:
        self.low = list(low)
        super().__init__([one.detach().float().requires_grad_() for one in self.low], lr=0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Copy gradients to fp32, step, and copy the values back to bf16."""
        for low, master in zip(self.low, parameters(self), strict=True):
            master.grad = None if low.grad is None else low.grad.float()
        super().step(closure)
        for low, master in zip(self.low, parameters(self), strict=True):
            low.copy_(master)
            low.grad = None


class Fp32Masters(Kind):
    """A bf16 model whose hand-written optimizer holds fp32 copies of its parameters."""

    def build(self) -> None:
        """Make the copies from the new model, so that a restart without their values shows."""
        model = self.made().to(torch.bfloat16)
        self.models = {"": model}
        self.optimizers = {"": Masters(model.parameters())}

    def batch(self) -> torch.Tensor:
        """Use bf16."""
        return super().batch().to(torch.bfloat16)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Use bf16."""
        return super().loss(batch.to(torch.bfloat16))

    def average(self) -> None:
        """Average the gradients of the bf16 parameters."""
        averaged(self.models[""].parameters())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Add the fp32 copies."""
        yield from super().tensors()
        for number, master in enumerate(parameters(self.optimizers[""])):
            yield f"master.{number}", master


class Frozen(Kind):
    """A frozen base under a head that is trained."""

    def build(self) -> None:
        """Name the base in ``frozen=``."""
        model = self.made()
        model[0].requires_grad_(requires_grad=False)
        self.models = {"": model}
        self.optimizers = {"": torch.optim.AdamW(model[3].parameters(), lr=0.01)}
        self.more = {"frozen": [*model[0].parameters()]}


class Tied(Kind):
    """The first and the last layer share one weight."""

    def made(self) -> nn.Module:
        """Make two linear layers with one weight."""
        model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Dropout(0.2), nn.Linear(FEATURES, FEATURES))
        model[3].weight = model[0].weight
        return model

    def update(self) -> None:
        """Assert that the weights are still one tensor."""
        model = self.models[""]
        assert model[0].weight is model[3].weight
        assert model.state_dict()["0.weight"].data_ptr() == model.state_dict()["3.weight"].data_ptr()


class Odd(Kind):
    """0-d and empty tensors: parameters, buffers, and tensors in ``state=``."""

    def made(self) -> nn.Module:
        """Add a 0-d and an empty parameter and buffer."""
        model = super().made()
        model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
        model.register_parameter("nothing", nn.Parameter(torch.empty(0, 4)))
        model.register_buffer("count", torch.tensor(0, dtype=torch.int16))
        model.register_buffer("void", torch.empty(3, 0))
        return model

    def build(self) -> None:
        """Add a ``state`` with 0-d, empty and bool tensors."""
        super().build()
        self.state = {"mean": torch.tensor(0.0), "none": torch.empty(0), "flags": torch.tensor([True, False])}
        self.more = {"state": self.state}

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Use all parameters."""
        model = self.models[""]
        return (model(batch) * model.scale).square().mean() + model.nothing.sum()  # type: ignore[no-any-return]

    def update(self) -> None:
        """Change every tensor that has elements."""
        model = self.models[""]
        model.count += 3
        self.state["mean"].mul_(0.9).add_(model.scale)
        self.state["flags"].logical_not_()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Add those of ``state``."""
        yield from super().tensors()
        yield from ((f"state.{name}", one) for name, one in self.state.items())


class Low(Kind):
    """Layers in bf16, fp16 and fp32."""

    def build(self) -> None:
        """Train all of them with one optimizer."""
        model = nn.Sequential(nn.Linear(FEATURES, 11).bfloat16(), nn.Linear(11, 7).half(), nn.Linear(7, 5))
        self.models = {"": model}
        self.optimizers = {"": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)}

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Cast between the layers."""
        first, second, third = self.models[""]
        return third(second(first(batch.bfloat16()).half()).float()).square().mean()  # type: ignore[no-any-return]


class _Generator:
    """A generator that each rank has of its own, and a large tensor of what it drew."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)
        self.history = torch.zeros(LARGE)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Generator and tensor."""
        return {"generator": self.generator.get_state(), "history": self.history}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Generator and tensor."""
        self.generator.set_state(state["generator"])
        self.history = state["history"]


class Own(Kind):
    """The loss depends on what differs between ranks: sampler, generators, and a large tensor in ``extra``."""

    world, other = 4, 2

    def build(self) -> None:
        """Give two extras with keys."""
        super().build()
        self.noise = _Generator(self.rank)
        self.extra["noise"] = self.noise

    def made(self) -> nn.Module:
        """Drop much out."""
        return nn.Sequential(nn.Linear(FEATURES, 11), nn.Dropout(0.5), nn.Linear(11, 7), nn.Dropout(0.5))

    def batch(self) -> torch.Tensor:
        """Add noise from the generators of torch, numpy and Python, and from earlier draws."""
        noise = self.noise
        noise.history.mul_(0.5).add_(torch.rand(LARGE, generator=noise.generator))
        shift = random.random() + np.random.random() + float(noise.history.mean())  # noqa: NPY002  # as above
        return super().batch() + shift


KINDS: dict[str, type[Kind]] = {
    "ddp": Ddp,
    "fsdp2": Fsdp,
    "hsdp": Hsdp,
    "fsdp2_tp": FsdpTp,
    "pipeline": Pipeline,
    "plain_shards": Plain,
    "same_name": SameName,
    "two_optimizers": TwoOptimizers,
    "ema": Ema,
    "fp32_masters": Fp32Masters,
    "frozen": Frozen,
    "tied": Tied,
    "buffers": Buffers,
    "odd_shapes": Odd,
    "bf16_fp16": Low,
    "per_rank": Own,
}

"""Optimizers that step other tensors than the model's: their values are saved, or the save is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flashing import fingerprint, same
from torch import nn

from dlrover_adapters.torch.checkpoint.capture import Capture
from dlrover_adapters.torch.checkpoint.flash import FlashCheckpoint
from dlrover_core.errors import SpecError

pytestmark = pytest.mark.usefixtures("alone")


class Masters:
    """Mixed precision by hand: a model in bf16, Adam over copies in fp32, which are written back after each step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.masters = [one.detach().float().requires_grad_() for one in model.parameters()]
        self.inner = torch.optim.Adam(self.masters, lr=1e-3)

    def step(self) -> None:
        """Gradients to the copies, a step, and back."""
        for master, one in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = one.grad.float() if one.grad is not None else None
        self.inner.step()
        with torch.no_grad():
            for master, one in zip(self.masters, self.model.parameters(), strict=True):
                one.copy_(master)


def mixed(seed: int) -> tuple[nn.Module, Masters]:
    """A model in bf16 with its masters."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).bfloat16()
    return model, Masters(model)


def train(model: nn.Module, masters: Any, first: int, last: int) -> Iterator[int]:
    """Steps on data that their numbers make."""
    for step in range(first, last + 1):
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        model.zero_grad()
        model(batch).square().mean().backward()
        masters.step()
        yield step


def test_master_weights_come_back(tmp_path: Path) -> None:
    """Killed after step 5 and restored: model, masters and moments are those of an undisturbed run, bit for bit, at step 10."""
    model, masters = mixed(0)
    curve = [fingerprint({"m": model, "o": masters.inner, "w": masters.masters}) for _ in train(model, masters, 1, 10)]
    model, masters = mixed(0)
    with FlashCheckpoint(str(tmp_path), model=model, optimizer=masters.inner, every=1, store_every=1) as ckpt:
        for step in train(model, masters, 1, 5):
            ckpt.step(step)
            ckpt.wait()
    model, masters = mixed(1)
    with FlashCheckpoint(str(tmp_path), model=model, optimizer=masters.inner, every=1) as ckpt:
        assert ckpt.restore() == 5
    for step in train(model, masters, 6, 10):
        assert same(fingerprint({"m": model, "o": masters.inner, "w": masters.masters}), curve[step - 1]), step


def test_a_checkpoint_without_master_weights_is_refused(tmp_path: Path) -> None:
    """What an optimizer of the model's own parameters saved has no values for masters."""
    model, masters = mixed(0)
    plain = torch.optim.Adam(model.parameters())
    with FlashCheckpoint(str(tmp_path), model=model, optimizer=plain, every=1, store_every=1) as ckpt:
        ckpt.save(1)
    ckpt = FlashCheckpoint(str(tmp_path), model=model, optimizer=masters.inner, every=1)
    with pytest.raises(ValueError, match=r"optimizer\.params\.param_0 was not saved"):
        ckpt.restore()
    ckpt.close()


# ---- wrappers of the kinds that there are


class MegatronOptimizer:
    """As Megatron-LM's mixed precision: groups and state are properties that show the inner optimizer's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        self.fp32_from_float16_groups = [[torch.zeros(8, 8)]]

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self) -> None:
        """Not called."""

    def zero_grad(self) -> None:
        """Not called."""


class ChainedOptimizer(MegatronOptimizer):
    """As Megatron-LM's, over several of its own kind."""

    def __init__(self, several: list[MegatronOptimizer]) -> None:
        self.chained_optimizers = several
        self.__dict__["groups"] = [group for one in several for group in one.param_groups]

    param_groups = property(lambda self: self.groups)
    state = property(lambda _self: {})


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """An ordinary optimizer."""
    return torch.optim.Adam(model.parameters())


def test_wrappers_that_only_look_like_views_are_refused_by_their_class() -> None:
    """Groups and state are the inner one's, and yet they keep weights beside it."""
    model = nn.Linear(8, 8)
    wrapped = MegatronOptimizer(adam(model))
    with pytest.raises(SpecError, match=r"optimizer: MegatronOptimizer has another optimizer in it \(\.optimizer\)"):
        Capture(model=model, optimizer=wrapped)
    with pytest.raises(SpecError, match=r"ChainedOptimizer .*chained_optimizers\[0\]"):
        Capture(model=model, optimizer=ChainedOptimizer([wrapped]))


def test_accelerates_view_of_a_deepspeed_optimizer_is_refused() -> None:
    """The view is looked through; what it shows is no view."""
    wrapper = pytest.importorskip("accelerate.utils.deepspeed").DeepSpeedOptimizerWrapper
    model = nn.Linear(8, 8)
    one = wrapper.__new__(wrapper)
    one.optimizer = MegatronOptimizer(adam(model))
    with pytest.raises(SpecError, match="MegatronOptimizer has another optimizer in it"):
        Capture(model=model, optimizer=one)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_real_views_are_looked_through() -> None:
    """Accelerate's and Lightning's own wrappers, made by their libraries."""
    model = nn.Linear(8, 8)
    inner = adam(model)
    accelerate = pytest.importorskip("accelerate")
    shown = accelerate.Accelerator(cpu=True).prepare_optimizer(inner)
    assert type(shown).__name__ == "AcceleratedOptimizer"
    assert Capture(model=model, optimizer=shown).optimizers == {("optimizer",): inner}
    lightning = pytest.importorskip("lightning.pytorch.core.optimizer")
    assert Capture(model=model, optimizer=lightning.LightningOptimizer(inner)).optimizers == {("optimizer",): inner}
    fabric = pytest.importorskip("lightning.fabric.wrappers")._FabricOptimizer(inner, None)
    assert Capture(model=model, optimizer=fabric).optimizers == {("optimizer",): inner}


def test_a_class_derived_from_a_view_is_none() -> None:
    """It may have more."""
    view = pytest.importorskip("accelerate.optimizer").AcceleratedOptimizer

    class Mine(view):  # type: ignore[misc,valid-type]
        """Somebody's own."""

    model = nn.Linear(8, 8)
    one = Mine.__new__(Mine)
    one.optimizer = adam(model)
    with pytest.raises(SpecError, match="Mine has another optimizer in it"):
        Capture(model=model, optimizer=one)


class Hidden(torch.optim.SGD):
    """Keeps copies of its parameters as an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.masters = {"all": [one.detach().clone() for group in self.param_groups for one in group["params"]]}


def test_weights_in_an_attribute_are_refused_until_they_are_given() -> None:
    """With state=, as the error says, they are saved; small constants are no weights."""
    model = nn.Linear(32, 32)
    optimizer = Hidden(model.parameters())
    with pytest.raises(SpecError, match=r"optimizer\.masters: Hidden keeps tensors there"):
        Capture(model=model, optimizer=optimizer).chunks()
    names = {
        one.name for one in Capture(model=model, optimizer=optimizer, state={"masters": optimizer.masters}).chunks()
    }
    assert {"state.masters.all.0", "state.masters.all.1"} <= names
    optimizer.masters = {"all": [torch.zeros(256)]}
    Capture(model=model, optimizer=optimizer).chunks()


class More(torch.optim.Adam):
    """Its state dict has more than groups and state."""

    def state_dict(self) -> dict[str, Any]:
        """With it."""
        return {**super().state_dict(), "loss_scale": 2.0}


def test_more_than_groups_and_state_is_refused() -> None:
    """It would not be saved, also where there is a state."""
    model = nn.Linear(2, 2)
    optimizer = More(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(SpecError, match=r"More keeps its state elsewhere.*its state_dict also has loss_scale"):
        Capture(model=model, optimizer=optimizer).chunks()


# ---- placeholders


def test_placeholders_of_zero_3_are_refused_by_name() -> None:
    """Their values lie in DeepSpeed's partitions."""
    model = nn.Sequential(nn.Linear(4, 4))
    for name in ("ds_id", "ds_tensor", "ds_status"):
        model[0].weight = nn.Parameter(torch.empty(0))
        setattr(model[0].weight, name, 7)
        with pytest.raises(SpecError, match=r"model\.0\.weight: is a placeholder of DeepSpeed's ZeRO-3"):
            Capture(model=model).chunks()
    with pytest.raises(SpecError, match=r"optimizer\.params\.param_0: is a placeholder"):
        Capture(optimizer=torch.optim.SGD([model[0].weight], lr=0.1)).chunks()


@pytest.mark.parametrize(
    "module", [nn.Linear(3, 4), nn.Conv2d(3, 4, 2), nn.Embedding(5, 3)], ids=["linear", "conv", "embedding"]
)
def test_a_weight_without_elements_is_refused_where_its_module_says_more(module: nn.Module) -> None:
    """Partitioned by somebody we do not know."""
    module.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(SpecError, match=r"model\.weight: has no elements, though its module has .*=3"):
        Capture(model=module).chunks()


def test_a_parameter_without_elements_is_refused_where_its_state_has_some() -> None:
    """The optimizer's state is of another size."""
    one = nn.Parameter(torch.empty(0))
    optimizer = torch.optim.SGD([one], lr=0.1)
    optimizer.state[one]["momentum_buffer"] = torch.zeros(64)
    with pytest.raises(SpecError, match=r"param_0: has no elements, though its momentum_buffer .* has 64"):
        Capture(optimizer=optimizer).chunks()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_empty_and_0_d_tensors_are_saved_as_ever(tmp_path: Path) -> None:
    """Layers of no inputs or outputs, an empty buffer, a scale."""
    model = nn.ModuleDict({"a": nn.Linear(0, 4), "b": nn.Linear(4, 0), "c": nn.Embedding(0, 4)})
    model.register_parameter("scale", nn.Parameter(torch.tensor(3.0)))
    model.register_buffer("none", torch.empty(0, 5))
    optimizer = torch.optim.Adam(model.parameters())
    sum(one.sum() for one in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    with FlashCheckpoint(str(tmp_path), model=model, optimizer=optimizer, every=1, store_every=1) as ckpt:
        ckpt.save(1)
    was = fingerprint({"m": model, "o": optimizer})
    with torch.no_grad():
        model.scale.fill_(0.0)
    with FlashCheckpoint(str(tmp_path), model=model, optimizer=optimizer, every=1) as ckpt:
        assert ckpt.restore() == 1
    assert same(fingerprint({"m": model, "o": optimizer}), was)

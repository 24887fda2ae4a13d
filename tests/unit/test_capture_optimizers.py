"""Optimizers that are not what they seem: their states in a checkpoint."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from captured import by_name, trained
from torch import nn

from dlrover_adapters.torch.checkpoint import foresight
from dlrover_adapters.torch.checkpoint.capture import Capture
from dlrover_adapters.torch.checkpoint.sources import Mismatch
from dlrover_core.errors import SpecError

# ---- optimizers that are not what they seem


class Nested(torch.optim.Optimizer):
    """Keeps numbers and tensors in containers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keys that are no strings, too."""
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                if not state:
                    state.update(
                        {
                            "deep": {"n": 0, 3: torch.zeros_like(one)},
                            "row": [torch.ones(2), 5],
                            "t": 0,
                            7: torch.ones(3),
                        }
                    )
                    state["a.b"] = torch.full((2,), 4.0)
                state["deep"]["n"] += 1
                state["t"] += 1
                state["deep"][3].add_(one.grad)


def kept(capture: Capture) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Copies of what would be saved."""
    tensors = {one.name: one.tensor.clone() for one in capture.chunks()}
    return tensors, {name: torch.load(io.BytesIO(raw)) for name, raw in capture.objects()[0].items()}


def given_back(capture: Capture, saved: tuple[dict[str, torch.Tensor], dict[str, Any]]) -> tuple[str, ...]:
    """As a restore does it; what it notes."""
    tensors, objects = saved
    targets = capture.targets({name: (str(one.dtype)[6:], tuple(one.shape)) for name, one in tensors.items()})
    notes = capture.examine(objects)
    for one in targets:
        one.tensor.copy_(tensors[one.name])
    capture.load(objects)
    return notes


def stepped(make: Any, seed: int = 0) -> tuple[nn.Module, Any]:
    """A model whose optimizer has made three steps."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    optimizer = make(model.parameters())

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        closure()
        optimizer.step(closure)
    return model, optimizer


def alike(one: Any, other: Any) -> bool:
    """The same containers, keys and values."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize(
    "make", [Nested, lambda params: torch.optim.LBFGS(list(params), max_iter=3)], ids=["nested", "lbfgs"]
)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
def test_states_in_containers_come_back_as_they_were(make: Any, fresh: bool) -> None:
    """Numbers and tensors at any depth, into an optimizer that has none yet, and into one that has made steps."""
    model, optimizer = stepped(make)
    saved = kept(Capture(model=model, optimizer=optimizer))
    if fresh:
        other = nn.Linear(4, 4)
        again = make(other.parameters())
    else:
        other, again = stepped(make, seed=1)
    capture = Capture(model=other, optimizer=again)
    given_back(capture, saved)
    assert all(map(alike, optimizer.state.values(), again.state.values()))
    assert len(optimizer.state) == len(again.state)
    assert {one.name for one in capture.chunks()} == saved[0].keys()


def test_containers_that_grow_or_are_replaced_are_noticed() -> None:
    """A tensor that is appended is saved; what its mark leads to is there."""
    model, optimizer = stepped(Nested)
    capture = Capture(model=model, optimizer=optimizer)
    capture.chunks()
    optimizer.state[model.weight]["row"].append(torch.full((2,), 9.0))
    optimizer.state[model.bias]["row"] = [torch.full((2,), 8.0), 5]
    tensors, _ = kept(capture)
    assert tensors["optimizer.state.weight.row.2"].tolist() == [9.0, 9.0]
    assert tensors["optimizer.state.bias.row.0"].tolist() == [8.0, 8.0]


def test_groups_added_later_have_the_names_of_their_parameters() -> None:
    """And are the optimizer's from then on; a restarted script that adds them at once has the same names."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model["a"].parameters(), lr=0.1, momentum=0.9)
    capture = Capture(model=model, optimizer=optimizer)
    assert by_name(capture)["model.b.weight"].live
    optimizer.add_param_group({"params": model["b"].parameters()})
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    assert "optimizer.state.b.weight.momentum_buffer" in by_name(capture)
    assert not by_name(capture)["model.b.weight"].live


class Around(torch.optim.Optimizer):
    """A wrapper of the common kind."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Of the inner one."""
        self.inner.step()


class Showing:
    """What accelerate's, Megatron's and DeepSpeed's do: groups and state are the inner one's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    @property
    def param_groups(self) -> Any:
        """Its groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """Its state."""
        return self.optimizer.state


def test_nothing_is_foreseen_of_what_is_not_torchs_own() -> None:
    """The step of a wrapper is a step of the optimizer in it: that would train."""
    model, inner = trained(nn.Linear(8, 8))
    before = model[0].weight.detach().clone()
    assert foresight.foreseen(Around(inner)) is None
    assert torch.equal(before, model[0].weight)
    assert foresight.foreseen(Nested(nn.Linear(1, 1).parameters())) is None
    assert foresight.foreseen(torch.optim.Adam(nn.Linear(1, 1).parameters())) is not None


def test_a_wrapper_with_a_state_beside_the_one_that_counts_is_refused() -> None:
    """With the name of what is to be given; also where it shows groups and state of the inner one, as views do."""
    model, inner = trained(nn.Linear(8, 8))
    with pytest.raises(SpecError, match=r"its \.inner"):
        Capture(model=model, optimizer=Around(inner))
    with pytest.raises(SpecError, match=r"Showing has another optimizer in it .* its \.optimizer"):
        Capture(model=model, optimizer=Showing(inner))


def test_accelerates_optimizer_stands_for_the_one_in_it() -> None:
    """The installed library's, unchanged."""
    wrapped = pytest.importorskip("accelerate.optimizer").AcceleratedOptimizer
    model, inner = trained(nn.Linear(8, 8))
    optimizer = wrapped.__new__(wrapped)
    optimizer.optimizer = inner
    assert Capture(model=model, optimizer=optimizer).optimizers == {("optimizer",): inner}


class Elsewhere(torch.optim.SGD):
    """Keeps what it has under another name."""

    def state_dict(self) -> dict[str, Any]:
        """With it."""
        return {**super().state_dict(), "secret": torch.ones(1)}


def test_a_state_that_is_kept_elsewhere_is_refused_at_the_first_save() -> None:
    """Once a step was made that would have had one; before that nobody knows."""
    model = nn.Linear(2, 2)
    optimizer = Elsewhere(model.parameters(), lr=0.1)
    capture = Capture(model=model, optimizer=optimizer)
    optimizer.step()
    capture.chunks()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(SpecError, match="keeps its state elsewhere"):
        capture.chunks()


def test_a_tensor_without_memory_is_refused_in_words() -> None:
    """To read it would end the process."""
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(two(torch.ones(2, 2), torch.ones(2, 2)))
    with pytest.raises(SpecError, match=r"model\.weight.*TwoTensor has no memory"):
        Capture(model=model).chunks()
    with pytest.raises(SpecError, match="first batch"):
        Capture(model=nn.LazyLinear(2)).chunks()


def test_the_state_of_another_class_of_optimizer_is_refused() -> None:
    """Adam's into SGD; one that keeps the same is taken over, and said."""
    model, adam = stepped(torch.optim.Adam)
    saved = kept(Capture(model=model, optimizer=adam))
    with pytest.raises(Mismatch, match="saved from Adam, and is SGD now"):
        given_back(Capture(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)), saved)
    notes = given_back(Capture(model=model, optimizer=torch.optim.AdamW(model.parameters())), saved)
    assert ["saved from Adam, and is AdamW now" in one for one in notes] == [True]
    assert given_back(Capture(model=model, optimizer=torch.optim.Adam(model.parameters())), saved) == ()


def test_the_state_of_a_model_of_another_class_is_said() -> None:
    """Same names and shapes, and yet another network; what a model is wrapped in is no other class."""
    saved = kept(Capture(model=nn.Linear(2, 2)))
    assert given_back(Capture(model=torch.compile(nn.Linear(2, 2), backend="eager")), saved) == ()
    (note,) = given_back(Capture(model=Same(2, 2)), saved)
    assert "was a Linear and is a Same now" in note


class Same(nn.Linear):
    """Another class."""


def test_what_was_not_saved_and_what_nobody_asks_for_is_said() -> None:
    """A scheduler that was added later stays as it is, loudly."""
    model, optimizer = stepped(torch.optim.Adam)
    saved = kept(Capture(model=model, optimizer=optimizer, extra=torch.amp.GradScaler("cpu")))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    missing, more = given_back(Capture(model=model, optimizer=optimizer, scheduler=scheduler), saved)
    assert missing.startswith("scheduler is not in this checkpoint")
    assert "has extra," in more
    (more,) = given_back(Capture(model=model), saved)
    assert "optimizer.param_groups" in more


def test_a_base_model_that_nobody_trains_is_hinted_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """It is copied while training stands until the user says that nobody writes it."""
    model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    capture = Capture(model=model, optimizer=optimizer)
    assert by_name(capture)["model.0.weight"].live
    model[0].weight.data = model[0].weight.data.clone()
    capture.chunks()
    assert [one.getMessage().count("frozen=") for one in caplog.records] == [1]
    caplog.clear()
    Capture(
        model=model, optimizer=optimizer, frozen=[one for one in model.parameters() if not one.requires_grad]
    ).chunks()
    assert not caplog.records

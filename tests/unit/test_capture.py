"""What a save consists of, who keeps which part of it, and how it comes back."""

from __future__ import annotations

import gc
import io
import weakref
from typing import Any

import pytest
import torch
from captured import by_name, trained
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrover_adapters.checkpoint.table import Item, Table
from dlrover_adapters.torch.checkpoint import foresight
from dlrover_adapters.torch.checkpoint.boundary import Boundary
from dlrover_adapters.torch.checkpoint.capture import Capture
from dlrover_adapters.torch.checkpoint.layout import agreed, data_bytes
from dlrover_adapters.torch.checkpoint.meeting import Meeting
from dlrover_adapters.torch.checkpoint.sources import Mismatch
from dlrover_core.checkpoint.arena import PAGE, Control, Geometry
from dlrover_core.errors import SpecError


def test_a_model_goes_with_its_last_user() -> None:
    """Not when garbage is collected: its memory may be most of a GPU's, and a DDP model must be gone before its group.

    Until somebody walks through it, that is: torch's own walk leaves a ring behind that has all modules in it.
    """
    model, optimizer = trained(nn.Linear(8, 8))
    capture = Capture(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model, capture
        assert gone() is None
    finally:
        gc.enable()


# ---- which class


def test_only_what_an_awaited_optimizer_writes_is_copied_beside_training() -> None:
    """Its parameters and its state; buffers, frozen layers and foreign parameters are live."""
    model, optimizer = trained(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.append(nn.Linear(8, 8))
    found = by_name(Capture(model=model, optimizer=optimizer))
    beside = {name for name, one in found.items() if not one.live}
    assert beside == {
        *(f"model.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")),
        *(
            f"optimizer.state.{name}.{key}"
            for name in ("0.weight", "0.bias", "1.weight", "1.bias")
            for key in ("step", "exp_avg", "exp_avg_sq")
        ),
    }
    assert {name for name, one in found.items() if one.live} == {
        *(f"model.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
        "model.2.weight",
        "model.2.bias",
    }


def test_names_and_tensors_move_between_the_classes() -> None:
    """``frozen`` is what nobody writes, ``live`` what others than the optimizer write."""
    model, optimizer = trained(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.append(nn.Linear(8, 8))
    capture = Capture(model=model, optimizer=optimizer, frozen=["2.*", model[1].running_var], live=["model.0.weight"])
    found = by_name(capture)
    assert not found["model.2.weight"].live
    assert not found["model.1.running_var"].live
    assert found["model.1.running_mean"].live
    assert found["model.0.weight"].live


def test_tied_weights_lie_in_memory_once() -> None:
    """Under both names."""
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    model["head"].weight = model["embedding"].weight
    capture = Capture(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    table = table_of(capture)
    first, second = sorted(table.items)
    assert (first.name, second.name) == ("model.embedding.weight", "model.head.weight")
    assert first.at == second.at
    assert data_bytes(table) == 10 * 4 * 4


def test_wrappers_do_not_change_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a DDP model is one of the model."""
    model = nn.Linear(2, 2)
    monkeypatch.setattr(DistributedDataParallel, "__init__", lambda self, module: nn.Module.__init__(self))
    wrapped = DistributedDataParallel(model)
    wrapped.module = model
    assert by_name(Capture(model=wrapped)).keys() == {"model.weight", "model.bias"}


def test_a_parameter_of_no_model_has_a_number() -> None:
    """Optimizers of loose tensors are saved too."""
    loose = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([loose])
    loose.sum().backward()
    optimizer.step()
    assert by_name(Capture(optimizer=optimizer)).keys() == {
        "optimizer.params.param_0",
        *(f"optimizer.state.param_0.{key}" for key in ("step", "exp_avg", "exp_avg_sq")),
    }


def test_two_tensors_of_one_name_are_refused() -> None:
    """Silently saving one of them would lose the other."""
    state = {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}
    with pytest.raises(SpecError, match=r"state\.a\.b"):
        Capture(state=state).chunks()


# ---- what has changed


def test_the_walk_is_made_again_only_when_something_was_replaced() -> None:
    """A tensor, its memory, a module, a parameter more: each is noticed; an optimizer step is none of these."""
    model, optimizer = trained(nn.Linear(8, 8), nn.Linear(8, 8))
    capture = Capture(model=model, optimizer=optimizer)
    capture.chunks()
    optimizer.step()
    assert not capture.tensors_changed()
    for change in (
        lambda: setattr(model[0].weight, "data", torch.zeros(8, 8)),
        lambda: model.__setitem__(1, nn.Linear(8, 8)),
        lambda: model[0].register_buffer("more", torch.zeros(1)),
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
        lambda: optimizer.state.clear(),  # noqa: PLW0108  # another one by then
    ):
        change()
        assert capture.tensors_changed()
        capture.chunks()
        assert not capture.tensors_changed()


def test_lists_of_tensors_that_are_replaced_are_noticed() -> None:
    """``state["grads"] = [...]`` in every step."""
    state: dict[str, Any] = {"grads": [torch.zeros(2)]}
    capture = Capture(state=state)
    capture.chunks()
    state["grads"] = [torch.ones(2)]
    assert torch.equal(by_name(capture)["state.grads.0"].tensor, torch.ones(2))


# ---- foreseen


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        lambda params: torch.optim.AdamW(params, fused=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.1),
        torch.optim.RMSprop,
        torch.optim.NAdam,
    ],
)
def test_what_an_optimizer_will_keep_is_foreseen_without_a_trace(make: Any) -> None:
    """The same names and shapes as after its first step; no hook is called, nothing is written, no number drawn."""
    model = nn.Linear(8, 8)
    optimizer = make(model.parameters())
    called: list[object] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    before, drawn = [one.clone() for one in model.parameters()], torch.get_rng_state()
    capture = Capture(model=model, optimizer=optimizer)
    foreseen = capture.foreseen()
    assert foreseen is not None
    assert not called
    assert not optimizer.state
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(drawn, torch.get_rng_state())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    assert capture.signature(foreseen, ()) == capture.signature(capture.chunks(), ())


def test_an_optimizer_that_cannot_be_foreseen_is_no_error() -> None:
    """LBFGS needs a closure."""
    assert foresight.foreseen(torch.optim.LBFGS(nn.Linear(1, 1).parameters())) is None


# ---- back again


def test_a_state_of_another_model_is_refused_in_words() -> None:
    """Nothing is filled by halves."""
    model, optimizer = trained(nn.Linear(8, 8))
    capture = Capture(model=model, optimizer=optimizer)
    shapes = {one.name: (one.dtype, one.full_shape) for one in capture.chunks()}
    with pytest.raises(Mismatch, match=r"model\.0\.bias was not saved"):
        capture.targets({name: one for name, one in shapes.items() if name != "model.0.bias"})
    with pytest.raises(Mismatch, match="float32"):
        capture.targets({**shapes, "model.0.bias": ("float32", (4,))})
    with pytest.raises(Mismatch, match="no such tensor"):
        capture.targets({**shapes, "model.7.bias": ("float32", (4,))})
    with pytest.raises(Mismatch, match="no such parameter"):
        capture.targets({**shapes, "optimizer.state.7.bias.exp_avg": ("float32", (4,))})


def test_groups_of_other_parameters_are_refused() -> None:
    """Learning rates would go to the wrong ones."""
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    saved = Capture(
        model={"a": one, "b": other},
        optimizer=torch.optim.SGD([{"params": one.parameters()}, {"params": other.parameters(), "lr": 0.2}], lr=0.1),
    )
    streams, _ = saved.objects()
    objects = {name: torch.load(io.BytesIO(raw), weights_only=True) for name, raw in streams.items()}
    now = Capture(
        model={"a": one, "b": other},
        optimizer=torch.optim.SGD([{"params": other.parameters()}, {"params": one.parameters(), "lr": 0.2}], lr=0.1),
    )
    with pytest.raises(Mismatch, match="same order"):
        now.load(objects)


def test_a_state_is_filled_where_it_is() -> None:
    """Tensors in place, numbers set, what is not there yet made; keys that are no strings too."""
    state: dict[str, Any] = {
        "ema": {1: torch.ones(2)},
        "seen": 7,
        "names": ["a", "b"],
        "late": {"x": torch.full((1,), 3.0)},
    }
    saved = Capture(state=state)
    tensors = {one.name: one.tensor.clone() for one in saved.chunks()}
    objects = {name: torch.load(io.BytesIO(raw)) for name, raw in saved.objects()[0].items()}
    there = torch.zeros(2)
    fresh: dict[str, Any] = {"ema": {1: there}, "seen": 0, "names": []}
    capture = Capture(state=fresh)
    for target in capture.targets({name: ("float32", tuple(one.shape)) for name, one in tensors.items()}):
        target.tensor.copy_(tensors[target.name])
    capture.load(objects)
    assert fresh["ema"][1] is there
    assert torch.equal(there, torch.ones(2))
    assert (fresh["seen"], fresh["names"], fresh["late"]["x"].item()) == (7, ["a", "b"], 3.0)


def test_lists_that_are_not_there_yet_are_made() -> None:
    """Lists of tensors, of dicts and of both among other things grow to what was saved, beyond ten places too."""
    state: dict[str, Any] = {
        "row": [torch.full((1,), float(one)) for one in range(12)],
        "mixed": [1, torch.ones(2), None, {"a": torch.zeros(3), "b": "x"}, [torch.full((1,), 9.0)], {}],
    }
    saved = Capture(state=state)
    tensors = {one.name: one.tensor.clone() for one in saved.chunks()}
    objects = {name: torch.load(io.BytesIO(raw)) for name, raw in saved.objects()[0].items()}
    row: list[Any] = [torch.zeros(1)]
    fresh: dict[str, Any] = {"row": row}
    capture = Capture(state=fresh)
    shapes = {name: ("float32", tuple(one.shape)) for name, one in reversed(tensors.items())}
    for target in capture.targets(shapes):
        target.tensor.copy_(tensors[target.name])
    capture.load(dict(reversed(objects.items())))
    assert fresh["row"] is row
    assert [one.item() for one in row] == list(range(12))
    one, ones, none, both, nine, empty = fresh["mixed"]
    assert (one, none, both["b"], empty) == (1, None, "x", {})
    assert (ones.tolist(), both["a"].tolist(), nine[0].item()) == ([1, 1], [0, 0, 0], 9.0)


@pytest.mark.parametrize("place", ["1", "3", "50000000", "9" * 30, "9" * 5000, "-1", "x"])
@pytest.mark.parametrize("inside", ["", ".more"])
def test_a_stored_name_cannot_make_a_list_grow(place: str, inside: str) -> None:
    """Whoever writes to a storage chooses names: a place that nothing leads up to is an error, not that much memory."""
    for tensor in (True, False):
        row: list[Any] = []
        fresh: dict[str, Any] = {"row": row, "seen": 7}
        capture = Capture(state=fresh)
        name = f"state.row.{place}{inside}"
        assert not capture.targets({}) if not tensor else len(capture.targets({name: ("float32", (1,))})) == 1
        with pytest.raises(Mismatch, match="is a place in a list of which earlier places are missing"):
            capture.load({} if tensor else {name: 1})
        assert len(row) == 0


def test_every_object_loads_without_trust() -> None:
    """``torch.load(weights_only=True)`` opens what a usual training saves."""
    model, optimizer = trained(nn.Linear(8, 8))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    capture = Capture(model=model, optimizer=optimizer, scheduler=scheduler, extra=torch.amp.GradScaler("cpu"), rank=3)
    streams, paths = capture.objects()
    assert (
        streams.keys()
        == paths.keys()
        == {
            "optimizer.param_groups",
            "scheduler",
            "rank.3.extra",
            "rank.3.rng",
            "classes",
        }
    )
    for raw in streams.values():
        torch.load(io.BytesIO(raw), weights_only=True)


# ---- who keeps what


def table_of(capture: Capture) -> Table:
    """The table of a rank that is alone."""
    chunks = capture.chunks()
    return agreed(chunks, capture.signature(chunks, ()), {}, frozenset(), Meeting(None, 0, 1), 0)


def test_another_dtype_is_another_layout() -> None:
    """Of the same sizes in bytes, too."""
    layouts = {table_of(Capture(state={"a": torch.zeros(2, dtype=one)})).layout for one in (torch.int32, torch.float32)}
    assert len(layouts) == 2


def test_items_begin_where_vector_instructions_like_it() -> None:
    """At multiples of 64 bytes, and none overlaps another."""
    items: tuple[Item, ...] = table_of(
        Capture(state={"a": torch.zeros(3), "b": torch.zeros(5), "c": torch.zeros(0)})
    ).items
    assert [(one.at, one.size) for one in items] == [(0, 12), (64, 20), (128, 0)]


# ---- the boundary of a planned change


class Said:
    """A line and a meeting that write down."""

    def __init__(self, rank: int, posted: dict[str, bytes]) -> None:
        self.rank, self.world, self.posted, self.told = rank, 2, posted, list[tuple[str, int]]()

    def acked(self, plan: int) -> None:
        """Noted."""
        self.told.append(("acked", plan))

    def boundary(self, plan: int, step: int) -> None:
        """Noted."""
        self.told.append((f"boundary {plan}", step))

    def post(self, name: str, value: bytes) -> None:
        """For all to see."""
        self.posted[name] = value

    def look(self, name: str) -> bytes | None:
        """What is there."""
        return self.posted.get(name)


def control() -> Control:
    """The words of an arena."""
    return Control(bytearray(2 * PAGE), Geometry(1, 0, 0, 0))


def test_all_ranks_stop_after_the_step_that_rank_0_chose() -> None:
    """It says so one step before, and nobody gets past it unaware."""
    posted: dict[str, bytes] = {}
    words = [control(), control()]
    ranks = [Said(one, posted) for one in range(2)]
    ends: list[Any] = [Boundary(one, one) for one in ranks]  # type: ignore[arg-type]
    assert [one.reached(words[at], 4) for at, one in enumerate(ends)] == [0, 0]
    for one in words:
        one.armed = 9
    assert [one.reached(words[at], 5) for at, one in enumerate(ends)] == [0, 0]
    assert [one.acked for one in words] == [9, 9]
    assert [one.told for one in ranks] == [[("acked", 9)]] * 2
    words[0].go = 9
    assert [one.reached(words[at], 6) for at, one in enumerate(ends)] == [0, 0]
    assert [one.reached(words[at], 7) for at, one in enumerate(ends)] == [9, 9]
    words[1].armed = 0
    ends[1].wait(words[1], 9, 7, lambda: False)
    assert ranks[1].told[-1] == ("boundary 9", 7)
    assert words[1].boundary == 0
    assert ends[1].reached(words[1], 8) == 0


def test_where_hosts_are_ahead_of_their_devices_the_boundary_is_further_off() -> None:
    """On CUDA who is in call n + 1 may not have met rank 0 in its call n: nobody is to stop there."""
    posted: dict[str, bytes] = {}
    words = [control(), control()]
    ends: list[Any] = [Boundary(one, one, lag=3) for one in (Said(0, posted), Said(1, posted))]  # type: ignore[arg-type]
    for one in words:
        one.armed = one.go = 9
    assert ends[1].reached(words[1], 7) == 0, "before rank 0 has posted"
    assert [one.reached(words[at], 6) for at, one in enumerate(ends)] == [0, 0]
    assert [one.reached(words[at], 7) for at, one in enumerate(ends)] == [0, 0]
    assert [one.reached(words[at], 8) for at, one in enumerate(ends)] == [9, 9]

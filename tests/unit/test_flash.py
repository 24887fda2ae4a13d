"""FlashCheckpoint in one process: what is saved while training goes on is what was there, bit for bit."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flashing import Training, averaged_as_extra, batch_norm, give_back, net, plain, same, saved, scheduled
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dlrover_adapters.torch.checkpoint import copier as copiers
from dlrover_adapters.torch.checkpoint.copier import Flight
from dlrover_adapters.torch.checkpoint.flash import FlashCheckpoint
from dlrover_adapters.torch.checkpoint.meeting import Meeting

BEFORE, AFTER = 5, 4
pytestmark = pytest.mark.usefixtures("alone")


def spectral_norm() -> dict[str, Any]:
    """Vectors that forward writes."""
    model = net(nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def step(batch: torch.Tensor, _number: int) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step}


def averaged() -> dict[str, Any]:
    """An average that is written after the step."""
    found = plain()
    ema = AveragedModel(found["model"], multi_avg_fn=get_ema_multi_avg_fn(0.9))
    inner = found["step"]

    def step(batch: torch.Tensor, number: int) -> None:
        inner(batch, number)
        ema.update_parameters(found["model"])

    return {"model": {"net": found["model"], "ema": ema}, "optimizer": found["optimizer"], "step": step}


def scaled() -> dict[str, Any]:
    """Steps that are left out, of loss that is not finite."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def step(batch: torch.Tensor, number: int) -> None:
        optimizer.zero_grad()
        loss = model(batch).square().mean() * (float("inf") if number in {3, 5, 7} else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return {"model": model, "optimizer": optimizer, "extra": scaler, "step": step}


def accumulated() -> dict[str, Any]:
    """Steps of three batches each."""
    found = plain()
    model, optimizer = found["model"], found["optimizer"]
    state = {"grads": [], "since": 0}

    def step(batch: torch.Tensor, number: int) -> None:
        model(batch).square().mean().backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        state["grads"] = [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]
        state["since"] = number % 3

    return {**found, "state": state, "step": step}


def two_optimizers() -> dict[str, Any]:
    """Which do not always step together."""
    one, other = net(), net()
    first, second = torch.optim.Adam(one.parameters(), lr=1e-2), torch.optim.RMSprop(other.parameters(), lr=1e-3)

    def step(batch: torch.Tensor, number: int) -> None:
        for model, optimizer in ((one, first), (other, second)):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            if optimizer is first or number % 2:
                optimizer.step()

    return {"model": {"one": one, "other": other}, "optimizer": {"one": first, "other": second}, "step": step}


BUILDS = [
    plain, batch_norm, spectral_norm, averaged, averaged_as_extra, scaled, scheduled, accumulated, two_optimizers
]  # fmt: skip


def give_grads(parts: dict[str, Any]) -> None:
    """Accumulated gradients are the script's own to put back."""
    for one, grad in zip(parts["model"].parameters(), parts["state"]["grads"], strict=True):
        one.grad = grad


@pytest.mark.parametrize("mode", ["async", "blocking"])
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_a_restored_run_equals_the_undisturbed_one_bit_for_bit(build: Callable[[], dict[str, Any]], mode: str) -> None:
    """Whatever there is to training beside the model: it goes on as if nothing had happened."""
    undisturbed = list(Training(build).train(1, BEFORE + AFTER))

    run = Training(build)
    with FlashCheckpoint("", **run.parts, every=1, mode=mode) as ckpt:
        list(run.train(1, BEFORE, ckpt.step))
        ckpt.wait()
        assert ckpt.stats.saves == BEFORE
        step, tensors, objects = saved(ckpt)
        list(run.train(BEFORE + 1, BEFORE + 2, ckpt.step))  # it went on, and is lost
    assert step == BEFORE

    other = Training(build, seed=99)
    with FlashCheckpoint("", **other.parts, every=1, mode=mode) as again:
        other.data = run.data
        give_back(again._capture, tensors, objects)
        if build is accumulated:
            give_grads(other.parts)
        resumed = list(other.train(BEFORE + 1, BEFORE + AFTER, again.step))
    assert same(resumed, undisturbed[BEFORE:])


def test_training_is_not_changed_by_being_saved() -> None:
    """The same numbers with and without."""
    undisturbed = list(Training(batch_norm).train(1, 8))
    run = Training(batch_norm)
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        assert same(list(run.train(1, 8, ckpt.step)), undisturbed)


def test_a_frozen_run_of_many_saves_has_each_state_as_it_was() -> None:
    """Every published state is that of its step, not of the one that was made meanwhile."""
    run = Training(plain)
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        for step, left in enumerate(run.train(1, 12, ckpt.step), 1):
            ckpt.wait()
            held, tensors, _ = saved(ckpt)
            assert held == step
            assert all(torch.equal(tensors[f"model.{name}"], one) for name, one in left["model"].items())


# ---- beside training


class Held:
    """A copy that waits until it is let go."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """A copy that takes as long as the test likes."""
    work = Flight.work
    gate = Held()
    finish = Flight.finish

    def finish_later(flight: Flight) -> None:
        gate.begun.set()
        assert gate.go.wait(30)
        finish(flight)

    monkeypatch.setattr(Flight, "finish", finish_later)
    monkeypatch.setattr(Flight, "work", lambda flight: work(flight) if gate.go.is_set() else None)
    yield gate
    gate.go.set()


def let_go_soon(held: Held, seen: list[str], what: str) -> threading.Thread:
    """Lets the copy go from another thread, once the training thread is seen to wait."""

    def run() -> None:
        assert held.begun.wait(30)
        seen.append(what)
        held.go.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_step_does_not_wait_for_the_copy_and_the_optimizer_does(held: Held) -> None:
    """The copy ends beside forward and backward; the next optimizer step begins after it."""
    run = Training(plain)
    order: list[str] = []
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        train = run.train(1, 2, ckpt.step)
        next(train)
        assert ckpt._engine is not None
        assert ckpt._engine.copier.flight is not None
        before = {name: one.clone() for name, one in run.parts["model"].state_dict().items()}
        run.parts["optimizer"].register_step_pre_hook(lambda *_: order.append("step"))
        thread = let_go_soon(held, order, "copied")
        next(train)
        thread.join()
        ckpt.wait()
        assert order == ["copied", "step"]
        step, tensors, _ = saved(ckpt, 0)
        assert step == 1
        assert all(torch.equal(tensors[f"model.{name}"], one) for name, one in before.items())


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_loading_a_state_waits_for_the_copy(held: Held, part: str) -> None:
    """``load_state_dict`` in the middle of a save does not get into it."""
    run = Training(plain)
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        next(run.train(1, 1, ckpt.step))
        was = {name: one.clone() for name, one in run.parts["model"].state_dict().items()}
        moments = [state["exp_avg"].clone() for state in run.parts["optimizer"].state.values()]
        thread = let_go_soon(held, [], "")
        other = Training(plain, seed=7)
        next(other.train(1, 1))
        run.parts[part].load_state_dict(other.parts[part].state_dict())
        thread.join()
        ckpt.wait()
        _, tensors, _ = saved(ckpt)
        assert all(torch.equal(tensors[f"model.{name}"], one) for name, one in was.items())
        names = [name for name, _ in run.parts["model"].named_parameters()]
        for name, moment in zip(names, moments, strict=True):
            assert torch.equal(tensors[f"optimizer.state.{name}.exp_avg"], moment)


def test_weights_clipped_after_the_step_are_caught(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    """What writes parameters beside the optimizers tears the copy: it is thrown away, counted, and said with what to do."""
    run = Training(plain)
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        next(run.train(1, 1, ckpt.step))
        for one in run.parts["model"].parameters():
            one.data.clamp_(-1e-3, 1e-3)
        held.go.set()
        with pytest.warns(RuntimeWarning, match="thrown away"), caplog.at_level(logging.ERROR):
            ckpt.wait()
        assert (ckpt.stats.torn, ckpt.stats.saves) == (1, 0)
        assert "live=" in caplog.text
        assert ckpt._engine is not None
        assert ckpt._engine.control is not None
        assert not list(ckpt._engine.control.stamps())


def test_what_is_torn_again_and_again_is_copied_while_training_stands(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that always writes its weights late still gets its states."""
    run = Training(plain)
    with FlashCheckpoint("", **run.parts, every=1) as ckpt, pytest.warns(RuntimeWarning):  # noqa: PT031  # it comes from any of the steps
        for step in range(1, 8):
            list(run.train(step, step, ckpt.step))
            if ckpt._engine is not None and ckpt._engine.copier.flight is not None:
                flight = ckpt._engine.copier.flight
                flight.done.wait(30)
                flight.torn = True  # whoever wrote them was too late for this one, in truth
        ckpt.wait()
        assert ckpt._engine is not None
        assert not ckpt._engine.beside
    assert "training stands" in caplog.text


def test_full_verification_catches_a_single_changed_value(held: Held) -> None:
    """Of all the weights, one."""
    run = Training(plain)
    with FlashCheckpoint("", **run.parts, every=1, verify="full") as ckpt:
        next(run.train(1, 1, ckpt.step))
        run.parts["model"][0].weight.data[3, 3] += 1e-6
        held.go.set()
        with pytest.warns(RuntimeWarning, match="thrown away"):
            ckpt.wait()
        assert ckpt.stats.torn == 1


def test_what_is_named_live_may_be_written_at_any_time(held: Held) -> None:
    """It is copied within ``step``; its share is told."""
    run = Training(plain)
    with FlashCheckpoint("", **run.parts, every=1, live=["*.weight", "*.bias"]) as ckpt:
        next(run.train(1, 1, ckpt.step))
        was = {name: one.clone() for name, one in run.parts["model"].state_dict().items()}
        for one in run.parts["model"].parameters():
            one.data.clamp_(-1e-3, 1e-3)
        held.go.set()
        ckpt.wait()
        _, tensors, _ = saved(ckpt)
        assert all(torch.equal(tensors[f"model.{name}"], one) for name, one in was.items())
        assert ckpt.stats.live_bytes == sum(one.nbytes for one in was.values())


# ---- other ranks


class Pair:
    """The meeting of two ranks with the same model, as the first of them sees it."""

    def __init__(self) -> None:
        self.rank, self.world, self.posted = 0, 2, dict[str, bytes]()

    def all_gather(self, _name: str, mine: bytes) -> list[bytes]:
        """Both have the same to say."""
        return [mine, mine]

    def decide(self, _name: str, mine: bytes, how: Callable[[list[bytes]], bytes]) -> bytes:
        """What the first makes of that."""
        return how([mine, mine])

    def share(self, _name: str, value: bytes) -> bytes:
        """What the first has to say."""
        return value

    def post(self, name: str, value: bytes) -> None:
        """For the other to see."""
        self.posted[name] = value

    def look(self, name: str) -> bytes | None:
        """What either posted."""
        return self.posted.get(name)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    """This process is the first of two ranks."""
    found = Pair()
    monkeypatch.setattr(Meeting, "of_environment", lambda **_: found)
    return found


def steps_held(ckpt: FlashCheckpoint) -> set[int]:
    """What is whole in memory."""
    ckpt.wait()
    assert ckpt._engine is not None
    assert ckpt._engine.control is not None
    return {stamp.step for _, stamp in ckpt._engine.control.stamps()}


def test_a_state_that_another_rank_has_not_saved_is_not_relied_on(pair: Pair) -> None:
    """It is overwritten before the older one that both have."""
    run = Training(plain)
    with FlashCheckpoint("", **run.parts, every=2) as ckpt:
        list(run.train(1, 5, ckpt.step))
        assert steps_held(ckpt) == {2, 4}
        pair.post("missed/4", b"1")
        list(run.train(6, 7, ckpt.step))
        assert steps_held(ckpt) == {2, 6}
        list(run.train(8, 8, ckpt.step))
        assert steps_held(ckpt) == {6, 8}


def test_who_leaves_a_save_out_or_throws_it_away_says_so_before_it_goes_on(held: Held, pair: Pair) -> None:
    """The others rely on what nobody has said to have missed."""
    run = Training(plain)
    with FlashCheckpoint("", **run.parts, every=2) as ckpt:
        list(run.train(1, 2, ckpt.step))
        for one in run.parts["model"].parameters():
            one.data.clamp_(-1e-3, 1e-3)
        held.go.set()
        with pytest.warns(RuntimeWarning, match="thrown away"):
            list(run.train(3, 3, lambda step: (pair.posted["missed/2"], ckpt.step(step))))
        list(run.train(4, 7, ckpt.step))
        assert steps_held(ckpt) == {4, 6}
        assert ckpt._engine is not None
        assert ckpt._engine.control is not None
        for slot, stamp in ckpt._engine.control.stamps():
            if stamp.step == 4:
                ckpt._engine.control.pin(slot)
        list(run.train(8, 8, ckpt.step))
        assert pair.posted.keys() == {"missed/2", "missed/8"}


# ---- when training stands


def test_optimizers_that_no_hook_can_watch_are_copied_while_training_stands(caplog: pytest.LogCaptureFixture) -> None:
    """CUDA graphs hold capturable ones."""
    run = Training(plain)
    for group in run.parts["optimizer"].param_groups:
        group["capturable"] = True
    with caplog.at_level(logging.WARNING), FlashCheckpoint("", **run.parts, every=1) as ckpt:
        ckpt._engine_now()
        assert not ckpt._options.beside
        assert "capturable" in caplog.text


def test_an_optimizer_that_steps_within_backward_is_noticed(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    """From then on training stands for saves; the save in flight is not torn."""
    model = net()
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
    with FlashCheckpoint("", model=model, optimizer=list(optimizers.values()), every=1) as ckpt:
        ckpt.step(1)
        was = {name: one.clone() for name, one in model.state_dict().items()}
        thread = let_go_soon(held, [], "")
        model(torch.randn(4, 8)).square().mean().backward()
        thread.join()
        ckpt.wait()
        assert ckpt._engine is not None
        assert not ckpt._engine.beside
        _, tensors, _ = saved(ckpt)
        assert all(torch.equal(tensors[f"model.{name}"], one) for name, one in was.items())
    assert "within backward" in caplog.text


def test_the_order_of_calls_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The side stream begins after what was computed, and the compute stream, not the host, waits for its end."""
    told: list[str] = []

    class Stream:
        def __init__(self, device: object = None) -> None:
            pass

        def wait_stream(self, other: object) -> None:
            told.append(f"side waits for {other}")

    class Event:
        def record(self, stream: object = None) -> None:
            told.append("recorded")

        def wait(self) -> None:
            told.append("compute stream waits")

        def synchronize(self) -> None:
            told.append("copier waits")

    class Place:
        def copy_(self, tensor: object, *, non_blocking: bool) -> None:
            told.append(f"copy {non_blocking=}")

    class Tensor:
        device = "cuda:0"

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: "compute")
    moves: Any = copiers.Moves.__new__(copiers.Moves)
    moves.pairs, moves.batches, moves.strided, moves.cuda, moves.size = [], [], [], [(Place(), Tensor())], 1
    copier = copiers.Copier()
    flight = Flight(1, moves, [], lambda _flight: told.append("published"))
    copier._thread = threading.current_thread()
    copier.start(flight)
    assert told == ["side waits for compute", "copy non_blocking=True", "recorded"]
    copier.before_overwriting()
    assert told[3:] == ["compute stream waits"]
    flight.finish()
    assert told[4:] == ["copier waits", "published"]


# ---- models are left as they were


def test_models_and_optimizers_can_still_be_copied_and_pickled() -> None:
    """EMA copies are deep copies, and some people pickle whole models."""
    import copy

    run = Training(plain)
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        list(run.train(1, 1, ckpt.step))
        copy.deepcopy(run.parts["model"])
        pickle.loads(pickle.dumps(run.parts["model"]))  # noqa: S301  # our own
        copy.deepcopy(run.parts["optimizer"])


def test_closed_is_closed() -> None:
    """No hook is left, and another one may follow."""
    run = Training(plain)
    ckpt = FlashCheckpoint("", **run.parts, every=1)
    list(run.train(1, 2, ckpt.step))
    ckpt.close()
    ckpt.close()
    assert not run.parts["optimizer"]._optimizer_step_pre_hooks
    assert not any(module._load_state_dict_pre_hooks for module in run.parts["model"].modules())
    assert threading.active_count() == 1 or not any("dlrover" in one.name for one in threading.enumerate())

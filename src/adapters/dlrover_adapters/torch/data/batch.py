"""`ElasticBatch`: global steps of one batch of B samples, however many ranks share it.

    batch = ElasticBatch(model, optimizer, global_batch=512, micro_batch=16)
    for x, y in batch.over(loader):
        if batch.backward(loss_of(model(x), y)):  # the mean over these samples; True: the optimizer has made a step
            step += 1
            ckpt.step(step)

Rank r takes n_r of the B samples, in micro-batches of m at most. The mean loss of a micro-batch of n samples is multiplied by W
n / B: DDP and FSDP2 average gradients over the W ranks, so the sum of all is the gradient of the mean over the B samples. Where
the model's forward has collectives (FSDP2, SyncBatchNorm, ``equal_rounds=True``), every rank runs as many micro-batches as the
one with the most; those that it lacks are repetitions of weight zero. Gradients are synchronised once in a global step, in its
last micro-batch, and clipped once after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from dlrover_adapters.torch import steps
from dlrover_core.errors import CoreError, SpecError

from . import world
from .dataset import ElasticDataset
from .noting import notes
from .plan import Division, GlobalStep, Micro, division
from .quotas import EQUAL, MEASURED, Balance, QuotaTable, lead_of

_log = logging.getLogger("dlrover.torch")


class _Terms(NamedTuple):
    """What all ranks have to give alike; each field as it is called where it is given."""

    name: str
    size: int
    dataset: str
    epochs: int
    last: str
    global_batch: int
    micro_batch: int
    position: tuple[int, int]
    equal_rounds: bool
    quota: str
    left_out: tuple[int, ...] = ()


class ElasticBatch:
    """Makes global steps of ``global_batch`` samples, in micro-batches of ``micro_batch`` at most on each rank.

    ``model``: one process's own, or one in DistributedDataParallel or `fully_shard`. ``optimizer``: its optimizer. ``clip``: the
    greatest norm of all gradients, clipped once in a global step. ``scaler``: a `torch.amp.GradScaler`; the samples of a step
    that it skips count as consumed. ``schedule``: a function from the samples that were consumed before to what the first
    learning rate is multiplied by. ``tokens``: a function from a micro-batch to a number: losses are means over that many tokens
    instead of samples, and all micro-batches of a global step are drawn before its first forward. ``group``: the ranks that
    divide the data; None: those of the DDP model, else all. ``equal_rounds``: True: all ranks run equally many micro-batches, for
    a model with layers of your own that call collectives in their forward. With `fully_shard` or SyncBatchNorm they always do.
    ``quota``: how a global batch is divided: "equal", or "measured": a rank with slower forwards takes fewer samples, under DDP.

    Raises `SpecError` for what cannot be right.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        global_batch: int,
        micro_batch: int,
        clip: float | None = None,
        scaler: Any = None,
        schedule: Callable[[int], float] | None = None,
        tokens: Callable[[Any], int] | None = None,
        group: Any = None,
        equal_rounds: bool = False,
        quota: str = EQUAL,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._clip, self._scaler, self._schedule, self._tokens = clip, scaler, schedule, tokens
        if clip is not None and not clip > 0:
            raise SpecError("clip", f"{clip!r}: give a norm greater than 0, or None")
        self._sync = _Sync(model, equal_rounds=equal_rounds)
        self._group = group if group is not None else self._sync.group
        rank, size = world.of_group(self._group)
        self._division: Division = division(global_batch, micro_batch, size, rank)
        self._sync.check(size)
        self._quota = self._sync.checked_quota(quota)
        if size > 1 and rank == 0:
            _warn_of_statistics(model)
        self._note_rates()
        self._data: ElasticDataset | None = None
        self._balance: Balance | None = None
        self._step: GlobalStep | None = None
        self._micro: Micro | None = None
        self._awaited = self._last = False
        self._notes = notes()
        self._loop: object = None
        self.weight = 0.0
        """What the loss of the present micro-batch is multiplied by; 0: it is padding."""
        self.norm: torch.Tensor | None = None
        """Of all gradients of the last global step, before they were clipped; None: ``clip`` was not given."""
        self.skipped = 0
        """Global steps that the scaler has skipped in this process; their samples count as consumed."""

    # ---- what there is to know

    @property
    def samples(self) -> int:
        """How many samples all ranks together have consumed, of all epochs. 0 before `over`."""
        return self._data.samples if self._data is not None else 0

    @property
    def indices(self) -> list[int]:
        """The indices of the samples of the present micro-batch; empty: it is padding."""
        if self._data is None or self._step is None or self._micro is None or not self._micro.counts:
            return []
        return self._data.indices(self._step.batch, self._micro)

    @property
    def quota(self) -> tuple[int, ...]:
        """How many samples of the present global batch each rank takes, where it is a full one."""
        return self._division.quota if self._balance is None else self._balance.quota

    # ---- use

    def over(self, loader: Any) -> Iterator[Any]:
        """The micro-batches of all global steps from the dataset's position on. ``loader``: over an `ElasticDataset`, or it.

        Restore before. Each micro-batch goes through `backward`, padding too. All ranks iterate alike; ranks compare at once what
        has to be the same on all. A loop that is left within a step leaves the model synchronising gradients in each backward,
        as it was.

        Raises `SpecError`, and `CoreError` where the position was changed meanwhile.
        """
        data = _dataset_of(loader)
        table = QuotaTable(self._division.quota) if self._quota == MEASURED else None
        if table is not None:
            self._balance = Balance(self._division, table, self._group, lead_of(loader, data.ahead))
        data.divide(self._division, table)
        _agree(data, self._division, self._group, equal_rounds=self._sync.in_step, quota=self._quota)
        self._data, self._awaited = data, False
        self._optimizer.zero_grad(set_to_none=True)
        self._note_rates()
        with torch.random.fork_rng(
            devices=()
        ):  # a loader draws a seed: dropout after a restart is to be that of before
            drawn = iter(loader)
        self._loop = loop = object()
        try:
            yield from self._global_steps(data, drawn)
        finally:
            if self._loop is loop:  # a later loop may have begun, and be within a step
                self._sync.synchronise(True)

    def _global_steps(self, data: ElasticDataset, drawn: Iterator[Any]) -> Iterator[Any]:
        here = data.place[1:3]
        for step in data.steps():
            if data.place[1:3] != here:
                raise CoreError(
                    f"dataset {data.name!r} is at {data.place[1:3]}, not at {here} where this loop is: count steps with "
                    "backward() alone, and restore before the loop begins"
                )
            yield from self._micros(step, drawn)
            if self._balance is not None:
                self._balance.stepped()
            here = data.after(step.batch)

    def _micros(self, step: GlobalStep, drawn: Iterator[Any]) -> Iterator[Any]:
        rounds = step.rounds if self._sync.in_step else len(step.micros)
        contents: Iterator[Any] = (self._drawn(drawn) for _ in step.micros)
        told: list[int] = []
        total = 0
        if self._tokens is not None:
            contents = iter(found := list(contents))
            told = [self._tokens(one) if micro.counts else 0 for one, micro in zip(found, step.micros, strict=True)]
            total = sum(world.gathered(sum(told), self._division.world, self._group))
        self._step = step
        content: Any = None
        for number in range(rounds):
            padding = number >= len(step.micros)
            if not padding:
                content = next(contents)
            self._micro = None if padding else step.micros[number]
            self.weight = 0.0 if padding else self._weight(step, number, told, total)
            if self._micro is None or not self._micro.counts:
                self._sync.warn_of_padding()
            self._last = number == rounds - 1
            self._sync.synchronise(self._last)
            self._awaited = True
            self._note()
            if self._balance is not None:
                self._balance.drawn()
            yield content
            if self._awaited:
                raise CoreError(
                    "a micro-batch did not go through ElasticBatch.backward(loss): other ranks wait for its gradients; call it "
                    "for every one that over() gives, and leave none out"
                )

    def _drawn(self, drawn: Iterator[Any]) -> Any:
        """The next content. Loader processes wait for a stream where the agent does not see it."""
        if self._data is None or not self._data.waits:
            return _next(drawn)
        with steps.phase("waiting for data"):
            return _next(drawn)

    def _weight(self, step: GlobalStep, number: int, told: list[int], total: int) -> float:
        size = self._division.world
        if self._tokens is None:
            return size * self._trained(step, number) / max(1, self._trained(step))
        if total <= 0 and not self._trained(step):
            return 0.0
        if total <= 0:
            raise SpecError("tokens", f"{total} in all micro-batches of a step: give a positive number for each")
        return size * told[number] / total

    def _trained(self, step: GlobalStep, number: int = -1) -> int:
        """Samples of a micro-batch, or of the whole batch, that are not left out."""
        assert self._data is not None
        of = step.micros[number] if number >= 0 else Micro(step.batch.start, step.batch.end)
        return self._data.trained(step.batch, of.start, of.end) if of.counts else 0

    def backward(self, loss: torch.Tensor) -> bool:
        """Backward of the mean loss over the present micro-batch. True: it was the global step's last, and the step is made.

        Then gradients were clipped, the optimizer has made its step, and the samples are consumed: save now. Raises `SpecError`
        for a loss that is no mean, `CoreError` for a second call of the same micro-batch.
        """
        if not self._awaited:
            raise CoreError("ElasticBatch.backward(loss) is called once for each micro-batch that over() gives")
        if loss.dim():
            raise SpecError(
                "loss", f"of shape {list(loss.shape)}: give the mean over the micro-batch's samples, one number"
            )
        if self._balance is not None:
            self._balance.forwarded(loss, self._micro.samples if self._micro is not None else 0)
        weighted = loss * self.weight
        (self._scaler.scale(weighted) if self._scaler is not None else weighted).backward()
        self._awaited = False
        if self._last:
            self._make_step()
        if self._notes is not None:
            self._notes.stepped()
        return self._last

    def _note(self) -> None:
        """Have the agent know which samples are in work, should this process end before `backward` has returned."""
        if self._notes is None or self._data is None or self._step is None or not self._data.fixed:
            return
        if self._micro is not None and self._micro.counts:
            self._notes.step(self._data.in_work(self._step.batch.epoch, self._micro.start, self._micro.end))

    def _note_rates(self) -> None:
        """What the schedule multiplies; of a restored optimizer it is restored, too."""
        for one in self._optimizer.param_groups if self._schedule is not None else ():
            one.setdefault("initial_lr", one["lr"])

    def _make_step(self) -> None:
        assert self._data is not None
        assert self._step is not None
        if self._trained(self._step):
            self._optimize(self._data)
        elif self._division.rank == 0:
            batch = self._step.batch
            _log.warning(
                "all samples of a global batch of dataset %r are quarantined: positions [%d, %d) of epoch %d count as consumed, "
                "and the optimizer makes no step",
                self._data.name, batch.start, batch.end, batch.epoch,
            )  # fmt: skip
        self._optimizer.zero_grad(set_to_none=True)
        self._data.step()

    def _optimize(self, data: ElasticDataset) -> None:
        if self._schedule is not None:
            factor = self._schedule(data.samples)
            for one in self._optimizer.param_groups:
                one["lr"] = one["initial_lr"] * factor
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        if self._clip is not None:
            parameters = [one for group in self._optimizer.param_groups for one in group["params"]]
            self.norm = torch.nn.utils.clip_grad_norm_(parameters, self._clip)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._make_scaled_step()

    def _make_scaled_step(self) -> None:
        before = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._scaler.get_scale() < before:
            self.skipped += 1
            if self._division.rank == 0:
                assert self._step is not None
                batch = self._step.batch
                _log.warning(
                    "the GradScaler skipped a step, as gradients were infinite or no numbers: positions [%d, %d) of epoch %d "
                    "count as consumed, and the model has not learnt from them (%d such steps)",
                    batch.start, batch.end, batch.epoch, self.skipped,
                )  # fmt: skip


class _Sync:
    """When gradients of a model are synchronised, and whether its ranks have to run equally many micro-batches."""

    def __init__(self, model: torch.nn.Module, *, equal_rounds: bool) -> None:
        if not isinstance(model, torch.nn.Module):
            raise SpecError("model", f"a torch.nn.Module, got {type(model).__name__}")
        modules = list(model.modules())
        self._ddp = [one for one in modules if isinstance(one, DistributedDataParallel)]
        self._sharded: list[Any] = [one for one in modules if _is_sharded(one)]
        self._statistics = any(isinstance(one, torch.nn.SyncBatchNorm) for one in modules)
        self._equal_rounds = equal_rounds
        self._warned = False
        self.group: Any = self._ddp[0].process_group if self._ddp else None

    @property
    def in_step(self) -> bool:
        """Does a forward call collectives, so that all ranks have to make equally many?"""
        return bool(self._sharded) or self._statistics or self._equal_rounds

    def warn_of_padding(self) -> None:
        """Once: SyncBatchNorm cannot know that a micro-batch has weight zero."""
        if self._statistics and not self._warned:
            self._warned = True
            _log.warning(
                "this rank repeats samples at weight zero, because other ranks have more micro-batches in this step: they add "
                "nothing to the loss, but SyncBatchNorm's statistics count them again. To have no repetitions, give a "
                'global_batch that is a multiple of ranks times micro_batch, and ElasticDataset(last="drop")'
            )

    def check(self, size: int) -> None:
        """Raises `SpecError` where nobody would synchronise gradients, or among others than divide the data."""
        if size > 1 and not self._ddp and not self._sharded:
            raise SpecError(
                "model",
                f"is neither in DistributedDataParallel nor sharded by fully_shard, and {size} ranks divide the data: wrap it, "
                "so that gradients are synchronised",
            )
        if self._ddp:
            found = torch.distributed.get_world_size(self._ddp[0].process_group)
            if found != size:
                raise SpecError(
                    "group", f"{size} ranks divide the data, and the DDP model synchronises {found}: give its group"
                )

    def checked_quota(self, quota: str) -> str:
        """Raises `SpecError` for a quota that is none, or that ranks cannot go by."""
        if quota not in {EQUAL, MEASURED}:
            raise SpecError("quota", f'{quota!r}: give "equal" or "measured"')
        if quota == MEASURED and self.in_step:
            raise SpecError(
                "quota",
                '"measured", and all ranks run equally many micro-batches, for fully_shard, SyncBatchNorm or equal_rounds: fewer '
                'samples would make no rank faster; give "equal"',
            )
        return quota

    def synchronise(self, now: bool) -> None:
        """Before the forward: is this micro-batch the one in whose backward gradients are synchronised?"""
        for one in self._ddp:
            one.require_backward_grad_sync = now
        for each in self._sharded:
            each.set_requires_gradient_sync(now, recurse=False)


def _is_sharded(module: Any) -> bool:
    """Did `fully_shard` take it?"""
    return callable(getattr(module, "set_requires_gradient_sync", None)) and callable(getattr(module, "unshard", None))


def _warn_of_statistics(model: torch.nn.Module) -> None:
    batch_norm = torch.nn.modules.batchnorm._BatchNorm
    found = [
        name
        for name, one in model.named_modules()
        if isinstance(one, batch_norm) and not isinstance(one, torch.nn.SyncBatchNorm)
    ]
    if found:
        _log.warning(
            "%s of the model has statistics of each rank's own micro-batches, so training differs at other world sizes; "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) makes them common to the ranks",
            found[0],
        )


def _dataset_of(loader: Any) -> ElasticDataset:
    """Raises `SpecError` where a loader would not give the dataset's micro-batches, in order."""
    if isinstance(loader, ElasticDataset):
        return loader
    data = getattr(loader, "dataset", None)
    if not isinstance(data, ElasticDataset):
        raise SpecError(
            "loader",
            f"a DataLoader over an ElasticDataset, got {type(loader).__name__} over {type(data).__name__}; give the loader as it "
            "is, as accelerator.prepare(loader) divides it again",
        )
    if getattr(loader, "batch_size", None) is not None:
        raise SpecError(
            "batch_size", f"{loader.batch_size}: the dataset makes micro-batches itself; give batch_size=None"
        )
    if not getattr(loader, "in_order", True):
        raise SpecError("in_order", "False: the loader would give micro-batches out of order; give True")
    return data


def _agree(data: ElasticDataset, of: Division, group: Any, *, equal_rounds: bool, quota: str) -> None:
    """Raises `SpecError`, on all ranks, where they do not have the same data in the same place. A collective."""
    place = data.place
    mine = _Terms(
        data.name, data.size, place.fingerprint, data.epochs, data.last, of.global_batch, of.micro_batch,
        (place.epoch, place.position), equal_rounds, quota, data.left_out,
    )  # fmt: skip
    told = world.gathered(tuple(mine), of.world, group)
    for number, field in enumerate(_Terms._fields):
        first = told[0][number]
        rank = next((rank for rank, one in enumerate(told) if one[number] != first), None)
        if rank is not None:
            raise SpecError(
                field,
                f"{first!r} on rank 0 and {told[rank][number]!r} on rank {rank} (dataset {data.name!r}): give all ranks the same"
                + (
                    "; give the dataset to FlashCheckpoint(data=) and restore before the loop"
                    if field == "position"
                    else ""
                ),
            )


def _next(drawn: Iterator[Any]) -> Any:
    try:
        return next(drawn)
    except StopIteration as error:
        raise CoreError(
            "the loader ended before the dataset did: give DataLoader(data, batch_size=None) as it is, with no limit of its own"
        ) from error


__all__ = ["ElasticBatch"]

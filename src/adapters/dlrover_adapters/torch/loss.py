"""Watches the loss: told by the script (`report_loss`), or the gradients' norm on request; into the memory shared with the agent.

A loss counts as broken once `STREAK` steps in a row have had none that is finite, or `STUCK` reports within one step: a script
that skips a bad batch has no failure. Kept is the step of the first of them: which ranks had it first tells a sick machine from
a diverged run. A jump is a finite loss of more than `JUMP` times the median of those before it.

A tensor on a GPU is never waited for: it is copied aside and looked at with a later call, when it has arrived. What cannot be
looked at, as on another kind of device, is left out with one warning: to be watched costs no training.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from statistics import median
from typing import Any

from dlrover_core.diagnosis.slots import FINITE, GRADIENT, INFINITE, LOSS, LOSS_AT, NAN, NEVER

STREAK, STUCK = 3, 100
JUMP = 5.0
KEPT, KEPT_LEAST = 64, 16
USUAL_EVERY = 8  # losses; a median of all of them each time costs more than the rest
QUIET = 100  # losses after a jump in which no other one is told
PENDING_MAX = 8
GRADIENTS_EVERY = 10  # optimizer calls


class LossWatch:
    """What this rank's loss does; ``step`` is the last one that was completed."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory: mmap.mmap | None = memory
        self.step = 0
        self._reported = 0
        self._recent: deque[float] = deque(maxlen=KEPT)
        self._streak = self._reports = 0  # steps and reports in a row without a finite loss
        self._newest = NEVER  # of those steps
        self._first = (NEVER, FINITE)
        self._broken, self._how = NEVER, FINITE
        self._jumped, self._times = NEVER, 0
        self._usual = 0.0
        self._quiet_until = 0
        self._pending: deque[tuple[Any, Any, int, int]] = deque()
        self._optimizer_calls = 0

    def reported(self, value: Any, how: int = NAN) -> None:
        """A loss of the step in the making: a number, or a tensor with one element."""
        step = self.step + 1
        if not hasattr(value, "detach"):
            self._saw(float(value), step, how)
        elif value.device.type == "cpu":
            self._saw(float(value.detach()), step, how)
        elif value.device.type == "cuda":
            self._later(value.detach(), step, how)
        else:
            ignored(f"it is on device {value.device}, not on a CPU or a CUDA device")

    def gradients(self, optimizer: Any) -> None:
        """Look at the norm of what an optimizer has just applied, now and again."""
        self._optimizer_calls += 1
        if self._optimizer_calls % GRADIENTS_EVERY:
            return
        import torch

        found = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        if found and all(type(one) is torch.Tensor and not one.is_sparse for one in found):
            norms = torch._foreach_norm(found)
            self.reported(torch.stack([one.to(norms[0].device) for one in norms]).sum(), GRADIENT)

    def silence(self) -> None:
        """Write no more."""
        self._memory = None

    def _later(self, value: Any, step: int, how: int) -> None:
        import torch

        copy = torch.empty((), dtype=value.dtype, pin_memory=True)
        copy.copy_(value.reshape(()), non_blocking=True)
        cuda: Any = torch.cuda  # torch leaves its events untyped
        arrived = cuda.Event()
        arrived.record(cuda.current_stream(value.device))
        self._pending.append((copy, arrived, step, how))
        while self._pending and (self._pending[0][1].query() or len(self._pending) > PENDING_MAX):
            oldest, done, at, kind = self._pending.popleft()
            if done.query():
                self._saw(float(oldest), at, kind)

    def _saw(self, value: float, step: int, how: int) -> None:
        self._reported += 1
        if math.isfinite(value):
            self._streak = self._reports = 0
            self._broken, self._how = NEVER, FINITE
            if how != GRADIENT:
                self._compare(value, step)
        else:
            self._not_finite(step, INFINITE if how == NAN and math.isinf(value) else how)
        if self._memory is not None:
            LOSS.pack_into(self._memory, LOSS_AT, self._reported, self._broken, self._how, self._jumped, self._times)

    def _not_finite(self, step: int, how: int) -> None:
        if not self._reports:
            self._first = (step, how)
        self._streak += 1 if not self._reports or step != self._newest else 0
        self._newest = step
        self._reports += 1
        if self._streak >= STREAK or self._reports >= STUCK:
            self._broken, self._how = self._first

    def _compare(self, value: float, step: int) -> None:
        usual = self._usual
        if usual > 0 and value > JUMP * usual and self._reported >= self._quiet_until:
            self._jumped, self._times = step, min(round(value / usual * 1000), 10**9)
            self._quiet_until = self._reported + QUIET
        self._recent.append(value)
        if self._reported % USUAL_EVERY == 0 and len(self._recent) >= KEPT_LEAST:
            self._usual = median(self._recent)


_watch: LossWatch | None = None
_gradients = False
_said = False


def begin(memory: mmap.mmap, gradients: bool = False) -> LossWatch:
    """Watch this process's losses from now on, and its ``gradients``."""
    global _watch, _gradients
    _watch, _gradients = LossWatch(memory), gradients
    return _watch


def end() -> None:
    """Watch no more."""
    global _watch  # noqa: PLW0603 - as above
    if _watch is not None:
        _watch.silence()
    _watch = None


def applied(optimizer: Any) -> None:
    """An optimizer has applied its gradients."""
    if _gradients and _watch is not None:
        try:
            _watch.gradients(optimizer)
        except Exception as error:  # noqa: BLE001  # as below
            ignored(f"{type(error).__name__}: {error}")


def report_loss(value: Any) -> None:
    """What `dlrover_adapters.torch.report_loss` does."""
    if _watch is not None:
        try:
            _watch.reported(value)
        except Exception as error:  # noqa: BLE001  # whatever a script gives us, it goes on
            ignored(f"{type(error).__name__}: {error}")


def ignored(why: str) -> None:
    """Say once that a loss is not watched."""
    global _said  # noqa: PLW0603 - as above
    if not _said:
        import logging

        _said = True
        logging.getLogger("dlrover").warning("a loss cannot be watched, and is left out: %s", why)

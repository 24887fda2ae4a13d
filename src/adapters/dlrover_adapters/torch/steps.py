"""The step signal: tells the agent which training step this worker has done.

Two channels. The *slot* is a little memory shared with the agent (`slot`): always exact, read at any time. The
*doorbell* is a packet on the agent's Unix socket: at once for the first step, then at most every `RING_S`. Neither may ever
slow or break training: a full socket drops the packet (a newer one follows), a dead agent silences the signal.

A forked child of the worker (a DataLoader worker) signals no steps: they are not this rank's. It says one thing in the slot, that
it waits for data.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import msgpack

from dlrover_core.data.in_work import Notes
from dlrover_core.diagnosis.slots import DETECT_VARIABLE, GRADS_VARIABLE

from . import loss, meter
from .loss import LossWatch
from .meter import Meter
from .pace import Pace
from .slot import Slot
from .witness import Witness

RING_S = 0.5
UNTOLD_MAX = 3
STEP_MAX = 2**53
"""A script that imports `step` and has not called it by its third step counts as one that never will."""

_signal: StepSignal | None = None
_expected = False
_parents: tuple[int, Slot] | None = None
"""In a forked child: the worker's process, and its slot."""


class StepSignal:
    """This worker's signal: optimizer calls counted from one, or the script's own numbers once it tells them."""

    def __init__(
        self, generation: int, rank: int, agent_socket: str, slot_fd: int, stepped: Callable[[], int] | None = None
    ) -> None:
        self._stepped, self._imports_us = stepped, 0
        self._generation, self._rank = generation, rank
        self._step, self._told, self._untold = 0, False, 0
        self._pace = Pace()
        self._next_ring = 0.0
        self._slot: Slot | None = Slot(slot_fd)
        self._socket = _connect(agent_socket)
        self._meter: Meter | None = None
        self._losses: LossWatch | None = None
        self._witness = Witness(generation, rank, agent_socket, self._slot)

    def optimizer_called(self, optimizer: object) -> None:
        """Count an optimizer's call, unless the script counts for itself, or may be about to."""
        if self._told or not self._pace.called(optimizer):
            return
        self._untold += 1
        if _expected and self._untold < UNTOLD_MAX:
            return
        self._done(self._untold)

    def told(self, step: int) -> None:
        """The script says which step it has done."""
        self._told = True
        self._done(step)

    def total(self, steps: int) -> None:
        """The script says how many steps it means to make."""
        if self._slot is not None:
            self._slot.total(min(max(0, steps), 2**62))

    def phase(self, name: str) -> int:
        """A phase begins; its number."""
        return self._slot.phase(name, _now_us()) if self._slot is not None else 0

    def back(self, number: int) -> None:
        """The phase of this number is over."""
        if self._slot is not None:
            self._slot.back(number, _now_us())

    def measured_by(self, meter: Meter, losses: LossWatch) -> None:
        """These are told of every step."""
        self._meter, self._losses = meter, losses

    @property
    def slot(self) -> Slot | None:
        """What is shared with the agent; None: no longer."""
        return self._slot

    def silence(self) -> None:
        """Never signal again; in a forked child the parent keeps its own copies."""
        self._told, self._slot = True, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _done(self, step: int) -> None:
        self._step = step
        if self._stepped is not None:
            self._imports_us, self._stepped = self._stepped(), None
        if self._meter is not None and self._losses is not None:
            self._meter.step_done()
            self._losses.step = step
        now = time.monotonic()
        if self._slot is not None:
            self._slot.step(step, int(now * 1_000_000))
        if self._socket is not None and now >= self._next_ring:
            self._next_ring = now + RING_S
            self._ring(self._socket, step)
            self._witness.look()

    def _ring(self, bell: socket.socket, step: int) -> None:
        try:
            told = {"generation": self._generation, "rank": self._rank, "step": step, "told": self._told}
            bell.send(msgpack.packb(told | ({"imports_us": self._imports_us} if self._imports_us else {})))
            self._imports_us = 0
        except BlockingIOError:
            return  # the agent is busy; the next ring says more
        except OSError:
            bell.close()
            self._socket = None


def _connect(path: str) -> socket.socket | None:
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bell.setblocking(False)
    try:
        bell.connect(path)
    except OSError:
        bell.close()  # an agent that is gone takes us with it soon; one that is full is no reason not to train
        return None
    return bell


def _now_us() -> int:
    return int(time.monotonic() * 1_000_000)


def begin(
    generation: int, rank: int, agent_socket: str, slot_fd: int, stepped: Callable[[], int] | None = None
) -> None:
    """Signal every training step of this process from now on. Imports torch's optimizers.

    ``stepped`` is called once, at the first step, and tells how many microseconds imports took before it.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    signal = begin_told(generation, rank, agent_socket, slot_fd, stepped)
    if signal.slot is not None and os.environ.get(DETECT_VARIABLE) != "off":
        memory = signal.slot.memory
        signal.measured_by(meter.begin(memory), loss.begin(memory, os.environ.get(GRADS_VARIABLE) == "1"))
    register_optimizer_step_post_hook(_after_optimizer)


def begin_told(
    generation: int, rank: int, agent_socket: str, slot_fd: int, stepped: Callable[[], int] | None = None
) -> StepSignal:
    """Signal the steps that the script tells, and no others. Imports nothing of torch."""
    global _signal  # noqa: PLW0603 - a process is one rank; torch's hook registry is as global
    _signal = StepSignal(generation, rank, agent_socket, slot_fd, stepped)
    os.register_at_fork(after_in_child=_forked)
    return _signal


def expect() -> None:
    """The script has the means to tell its steps: wait for its first word before counting for it."""
    global _expected  # noqa: PLW0603 - a process is one rank
    _expected = True


def tell(step: int, of: int = 0) -> None:
    """What `dlrover_adapters.torch.step` does."""
    if _signal is not None:
        if of:
            _signal.total(int(of))
        _signal.told(max(-STEP_MAX, min(int(step), STEP_MAX)))


def total(steps: int) -> None:
    """Say how many steps there are to be made, so that it can be told how long they will take."""
    if _signal is not None:
        _signal.total(int(steps))


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """What `dlrover_adapters.torch.phase` does."""
    begun = _signal.phase(name) if _signal is not None else 0
    try:
        yield
    finally:
        if _signal is not None:
            _signal.back(begun)


@contextlib.contextmanager
def waiting(name: str) -> Iterator[None]:
    """A phase that is a part of a longer wait, for those who wait in parts: each says anew that the wait goes on.

    In a forked child of the worker it says so for the worker, which may wait for that child.
    """
    if _parents is not None and _parents[0] == os.getppid():
        _parents[1].waited(_now_us())
    with phase(name):
        yield


def handed() -> Any:
    """The page for a child that is being spawned just now, to be pickled for it; None: none is, or nobody watches."""
    child: Any = get_spawning_popen()
    slot = _signal.slot if _signal is not None else None
    return reduction.DupFd(slot.fd) if slot is not None and child is not None else None


def adopt(page: Any) -> None:
    """In a child that was spawned: the page that its worker `handed`. A forked child has it by itself."""
    global _parents  # noqa: PLW0603 - as above
    if page is None:
        return
    fd = page.detach()
    try:
        _parents = (os.getppid(), Slot(fd))
    finally:
        os.close(fd)


def notes() -> Notes | None:
    """Where this process, a worker or a child of one, notes what it has in work of its data; None: no agent watches it."""
    if _signal is not None:
        return _signal.slot.notes if _signal.slot is not None else None
    return _parents[1].notes if _parents is not None and _parents[0] == os.getppid() else None


def _after_optimizer(optimizer: object, _args: tuple[Any, ...], _kwargs: dict[Any, Any]) -> None:
    import torch

    # In a compiled optimizer the hook would be traced: a graph break, or an error under fullgraph. Such scripts call `step`.
    if _signal is not None and not torch.compiler.is_compiling():
        loss.applied(optimizer)
        _signal.optimizer_called(optimizer)


def _forked() -> None:
    global _signal, _parents  # noqa: PLW0603 - as above
    if _signal is not None:
        _parents = (os.getppid(), _signal.slot) if _signal.slot is not None else None
        with contextlib.suppress(OSError):
            _signal.silence()
        _signal = None
        meter.end()
        loss.end()

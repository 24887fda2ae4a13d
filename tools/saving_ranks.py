"""The ranks of the campaign `saves`: forked processes with the real engine, in lockstep, with a trap that kills one in a save."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

STEPS, DUE_EVERY, GENERATION = 60, 5, 7
LAYERS, WIDTH = 6, 128
SLOW, SLOW_S = 0.5, 0.004
"""How often the copier is late, and by how much at most."""
LIMIT_S = 20.0


class Plan(NamedTuple):
    """One trial: the ranks that die, how, when, and whether the survivors die at once."""

    world: int
    every: int
    victims: tuple[int, ...]
    at_call: int
    how: tuple[str, ...]
    after: tuple[int, ...]
    at_once: bool
    coupled: bool
    careless: bool = False


# ---- what a rank's state is


def value(rank: int, number: int, step: int) -> float:
    """Of every element of a rank's tensor after a step; exact in 64 bits."""
    return float((rank + 1) * 10_000_000_000 + number * 10_000_000 + step)


class Position:
    """What is no tensor, and changes with every step."""

    def __init__(self, rank: int) -> None:
        self.rank, self.step = rank, 0

    def state_dict(self) -> dict[str, Any]:
        """Some numbers and a text that grows."""
        return {"rank": self.rank, "step": self.step, "text": "x" * (self.step % 50)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Never asked for."""


def training(rank: int) -> tuple[Any, Any, Any]:
    """Model, optimizer and position; a step fills every tensor with its `value`."""
    import torch
    from torch import nn

    class Fill(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1.0})
            self.now = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            del closure
            self.now += 1
            for number, one in enumerate(self.param_groups[0]["params"]):
                state = self.state[one]
                if not state:
                    state["momentum"] = torch.zeros_like(one)
                one.fill_(value(rank, 2 * number, self.now))
                state["momentum"].fill_(value(rank, 2 * number + 1, self.now))

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)))
    model.register_buffer("seen", torch.zeros(2_000, dtype=torch.float64))
    return model, Fill(model.parameters()), Position(rank)


# ---- a rank


class Line:
    """The vault of these ranks: memory that the parent made before the fork, and nobody to tell."""

    nproc = 1

    def __init__(self, rank: int, world: int, fd: int) -> None:
        from dlrover_adapters.torch.checkpoint.vault import Told

        self.rank, self.local_rank, self.world = rank, 0, world
        self._fd = fd
        self.told = Told(GENERATION, f"node-{rank}", world, rank, "saves", "", -1, plans=False, memory=1 << 40)

    def arena(self, layout: int, geometry: Any) -> Any:
        """The parent's memory, of the size that is needed."""
        from dlrover_adapters.torch.checkpoint.vault import Arena

        del layout
        os.ftruncate(self._fd, geometry.total_bytes)
        return Arena(1, fresh=True, fd=os.dup(self._fd))

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_args, **_options: None


class Meeting:
    """What ranks agree on before the first save: by pipes. ``look`` and ``post`` share a folder of the trial, as a store does."""

    def __init__(self, rank: int, world: int, exchange: Exchange, folder: str) -> None:
        self.rank, self.world, self.local_rank = rank, world, 0
        self._exchange, self._folder = exchange, folder

    def decide(self, name: str, mine: bytes, how: Callable[[list[bytes]], bytes]) -> bytes:
        """Everybody does what rank 0 would."""
        return how(self.all_gather(name, mine))

    def all_gather(self, name: str, mine: bytes) -> list[bytes]:
        """By rank."""
        del name
        return self._exchange.gather(mine)

    def assign(
        self,
        name: str,
        mine: bytes,
        how: Callable[[dict[int, bytes]], tuple[bytes, Sequence[bytes]]],
        speakers: Sequence[int],
    ) -> tuple[bytes, bytes]:
        """For all ranks, and for this one."""
        said = self.all_gather(name, mine)
        common, shares = how({rank: said[rank] for rank in speakers})
        return common, shares[self.rank]

    @contextlib.contextmanager
    def refusing(self, name: str) -> Iterator[None]:
        """Nobody refuses here: a rank with an error ends the trial."""
        del name
        yield

    def share(self, name: str, mine: bytes | None) -> bytes:
        """What rank 0 says."""
        return self.all_gather(name, mine or b"")[0]

    def post(self, name: str, content: bytes) -> None:
        """There, whole, before this returns."""
        path = f"{self._folder}/{name.replace('/', '-')}"
        Path(f"{path}.{self.rank}").write_bytes(content)
        Path(f"{path}.{self.rank}").replace(path)

    def look(self, name: str) -> bytes | None:
        """Or nothing yet."""
        with contextlib.suppress(FileNotFoundError):
            return Path(f"{self._folder}/{name.replace('/', '-')}").read_bytes()
        return None


class Exchange:
    """Every rank tells every other one something, and waits for what they say: a collective. A dead peer is never heard."""

    def __init__(self, world: int) -> None:
        self._pipes = {(of, to): os.pipe() for of in range(world) for to in range(world) if of != to}
        self._rank, self._world = -1, world

    def as_rank(self, rank: int) -> None:
        """In the child; the other ends are closed, so that a death is seen."""
        self._rank = rank
        for (of, to), (reads, writes) in self._pipes.items():
            if of != rank:
                os.close(writes)
            if to != rank:
                os.close(reads)

    def close(self) -> None:
        """In the parent."""
        for reads, writes in self._pipes.values():
            os.close(reads)
            os.close(writes)

    def gather(self, mine: bytes) -> list[bytes]:
        """By rank. Waits for ever for a dead one."""
        packed = struct.pack("<I", len(mine)) + mine
        others = [one for one in range(self._world) if one != self._rank]
        for to in others:
            # No longer than a pipe holds, or two ranks would wait for each other.
            assert len(packed) <= 65_536, len(packed)
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipes[self._rank, to][1], packed)
        found = {self._rank: mine}
        for of in others:
            size = struct.unpack("<I", self._read(of, 4))[0]
            found[of] = self._read(of, size)
        return [found[rank] for rank in range(self._world)]

    def _read(self, of: int, size: int) -> bytes:
        got = b""
        while len(got) < size:
            more = os.read(self._pipes[of, self._rank][0], size - len(got))
            if not more:
                threading.Event().wait(LIMIT_S)  # as a collective whose peer is gone: killed long before
                os._exit(3)
            got += more
        return got


class Trap:
    """Kills this process after so many bytecode instructions of one of its threads, and leaves a note of where that was."""

    def __init__(self, note: mmap.mmap, at: int) -> None:
        self._note, self._at = note, at
        self._left = -1

    def arm(self, instructions: int) -> Callable[..., Any]:
        """The trace function; for `sys.settrace`."""
        self._left = instructions
        return self._trace

    def _trace(self, frame: FrameType, event: str, _arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self._left -= 1
            if self._left <= 0:
                code = frame.f_code
                where = f"{Path(code.co_filename).name}:{code.co_name}"[: NOTE_BYTES - 1].encode()
                self._note[self._at : self._at + len(where)] = where
                os.kill(os.getpid(), signal.SIGKILL)
        return self._trace


NOTE_BYTES = 120
RANK_BYTES = 256
"""Of the words that each rank shares with the parent: its call, what it has published, whether it saves; then the note."""


class Words:
    """One rank's share of the page between it and the parent."""

    def __init__(self, page: mmap.mmap, rank: int) -> None:
        self._page, self._base = page, rank * RANK_BYTES
        self._words = (ctypes.c_uint64 * 4).from_buffer(page, self._base)

    call = property(lambda self: self._words[0], lambda self, value: self._words.__setitem__(0, value))
    published = property(lambda self: self._words[1], lambda self, value: self._words.__setitem__(1, value))
    saving = property(lambda self: self._words[2], lambda self, value: self._words.__setitem__(2, value))

    @property
    def note_at(self) -> int:
        """Where the trap writes."""
        return self._base + RANK_BYTES - NOTE_BYTES

    def note(self) -> str:
        """What it has written."""
        raw = bytes(self._page[self.note_at : self._base + RANK_BYTES])
        return raw.rstrip(b"\0").decode(errors="replace")

    def release(self) -> None:
        """Let the page go."""
        del self._words


def live(plan: Plan, rank: int, exchange: Exchange, fd: int, page: mmap.mmap, folder: str, ready: int) -> None:
    """What a child does, until it is killed."""
    import torch

    from dlrover_adapters.torch.checkpoint import engine as engines
    from dlrover_adapters.torch.checkpoint.capture import Capture
    from dlrover_adapters.torch.checkpoint.engine import Engine
    from dlrover_adapters.torch.checkpoint.hooks import Hooks
    from dlrover_adapters.torch.checkpoint.stats import Options
    from dlrover_core.checkpoint.slots import slots_for

    torch.set_num_threads(1)
    exchange.as_rank(rank)
    words, trap = Words(page, rank), Trap(page, rank * RANK_BYTES + RANK_BYTES - NOTE_BYTES)
    model, optimizer, position = training(rank)
    own = f"rank{rank}"  # ranks hold different values, so under different names
    capture = Capture(model={own: model}, optimizer={own: optimizer}, extra=position, rank=rank)
    meeting: Any = Meeting(rank, plan.world, exchange, folder)
    slots = 2 if plan.careless else slots_for(plan.every, plan.world)
    if plan.careless:
        setattr(engines, "choose", _oldest)  # it is no part of that module, as mypy has it
    options = Options(beside=True, verify="sample", coupled=plan.coupled, slots=slots)
    line: Any = Line(rank, plan.world, fd)
    engine = Engine(capture, line, meeting, options)
    hooks = Hooks(engine, [optimizer], [model])
    del hooks
    landed = engine._landed

    def told(flight: Any, *rest: Any) -> None:
        landed(flight, *rest)
        words.published = flight.step  # noted after it is true: never too much

    setattr(engine, "_landed", told)  # whatever else it is given
    _slow_copies(random.Random(f"slow.{plan.at_call}.{plan.after}.{rank}"))
    engine.prepare()
    mine = plan.victims.index(rank) if rank in plan.victims else -1
    how, after = (plan.how[mine], plan.after[mine]) if mine >= 0 else ("", 0)
    for step in range(1, STEPS + 1):
        optimizer.step()
        model.seen.fill_(value(rank, 999, step))
        position.step = step
        words.call = step
        if step % plan.every == 0:
            armed = step == plan.at_call
            words.saving = step
            if armed and how == "time":
                os.write(ready, bytes([rank]))
            if armed and how == "copier" and engine.copier._thread is None:
                how = "instruction"  # there is no such thread before the first copy
            if armed and how == "copier":
                _trace_thread(engine.copier._thread, trap, after)
            if armed and how == "instruction":
                sys.settrace(trap.arm(after))
            engine.save(step, step, due=step % DUE_EVERY == 0)
        else:
            engine.settle()
        if plan.coupled:
            exchange.gather(b"")
    engine.settle()
    if mine >= 0:
        os.kill(os.getpid(), signal.SIGKILL)  # its copier has not come so far: the training thread helps it
    threading.Event().wait(LIMIT_S)  # to be killed


def _slow_copies(dice: random.Random) -> None:
    """Have some copies take as long as large ones do: others are further on when this rank dies."""
    from dlrover_adapters.torch.checkpoint.copier import Flight

    take = Flight._take

    def later(self: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and dice.random() < SLOW:
            time.sleep(dice.random() * SLOW_S)
        return take(self)

    Flight._take = later  # type: ignore[method-assign]


def _oldest(slots: Any, **_about: Any) -> int:
    """The fault that is planted to see that it is found: whatever is oldest is overwritten, needed or not."""
    return min(range(len(slots)), key=lambda one: slots[one].step)


def _trace_thread(thread: threading.Thread | None, trap: Trap, after: int) -> None:
    """Count the instructions of a thread that runs already."""
    assert thread is not None
    trace = trap.arm(after)
    threading.settrace_all_threads(trace) if hasattr(threading, "settrace_all_threads") else _settrace_others(trace)


def _settrace_others(trace: Callable[..., Any]) -> None:
    """Before Python 3.12 nobody can set another thread's trace; its next flight does it by itself."""
    from dlrover_adapters.torch.checkpoint.copier import Flight

    finish = Flight.finish

    def traced(self: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            sys.settrace(trace)
        finish(self)

    Flight.finish = traced  # type: ignore[method-assign]

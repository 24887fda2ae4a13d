"""Training loops that save by hand, and a clock that the test holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlrover_adapters.checkpoint import listing
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.torch.checkpoint.flash import FlashCheckpoint

LIMIT_S = 60.0


class Training:
    """A model of one layer, whose values say which step it is."""

    def __init__(self) -> None:
        self.model = nn.Linear(8, 8)
        nn.init.zeros_(self.model.bias)  # alike on all ranks
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def work(self, step: int) -> None:
        """One step."""
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 8)).sum().backward()
        self.optimizer.step()
        self.set(float(step))

    def trains(self, ckpt: FlashCheckpoint, first: int, last: int, meet: Callable[[], object] = lambda: None) -> None:
        """Steps, saved as is due; ``meet``: before each, as a collective would."""
        for step in range(first, last + 1):
            meet()
            self.work(step)
            ckpt.step(step)
        ckpt.wait()

    def set(self, value: float) -> None:
        """Something else than the optimizer writes the weights."""
        with torch.no_grad():
            self.model.weight.fill_(value)

    @property
    def at(self) -> float:
        """The step whose values it has."""
        return float(self.model.weight.detach().flatten()[0])


class Clock:
    """Time goes on by pauses alone; ``then``: what happens in each."""

    def __init__(self, then: Callable[[float], object] = lambda _now: None) -> None:
        self.now, self.then, self.pauses = 0.0, then, 0

    def __call__(self) -> float:
        """Now."""
        return self.now

    def pause(self, seconds: float) -> None:
        """In place of a sleep."""
        self.now += seconds
        self.pauses += 1
        self.then(self.now)


def engine_of(ckpt: FlashCheckpoint, clock: Clock | None = None) -> Any:
    """Its engine, by this clock."""
    engine = ckpt._engine_now()
    if clock is not None:
        engine.clock, engine.pause = clock, clock.pause
    return engine


def held(ckpt: FlashCheckpoint) -> dict[int, bool]:
    """The steps that are whole in memory, and whether they are due on storage."""
    ckpt.wait()
    return {stamp.step: stamp.due for _, stamp in engine_of(ckpt).control.stamps()}


def pinned(ckpt: FlashCheckpoint, step: int) -> Callable[[], None]:
    """Somebody reads this one, until what this gives is called."""
    control = engine_of(ckpt).control
    slot = next(slot for slot, stamp in control.stamps() if stamp.step == step)
    control.pin(slot)
    return lambda: control.unpin(slot)


def complete(url: Path) -> list[int]:
    """Steps that are whole on storage."""
    return [one.step for one in listing.steps(Place(str(url))) if one.state == listing.COMPLETE]


class Agent:
    """In place of one: it hears what is saved, and writes nothing. ``heard``: each step, and whether it was due."""

    def __init__(self, line: Any) -> None:
        self._line = line
        self.heard: list[tuple[int, bool]] = []
        self.alarms: list[str] = []

    def __getattr__(self, name: str) -> Any:
        """All else as without an agent."""
        return getattr(self._line, name)

    def saved(self, _arena: int, _slot: int, step: int, *, due: bool) -> None:
        """As `Vault`."""
        self.heard.append((step, due))

    def alarm(self, words: str) -> None:
        """As `Vault`."""
        self.alarms.append(words)


def under_agent(ckpt: FlashCheckpoint) -> Agent:
    """From now on it saves through an agent."""
    engine, opened = engine_of(ckpt), ckpt._opened()
    found: Any = Agent(opened)
    ckpt._line = engine.line = found
    engine.alarms.tell = found.alarm
    made: Agent = found
    return made


def values(ckpt: FlashCheckpoint, step: int) -> float:
    """The weights that memory has for a step."""
    engine = engine_of(ckpt)
    slots = [slot for slot, stamp in engine.control.stamps() if stamp.step == step]
    assert len(slots) == 1
    moves, _ = engine._moves_to(slots[0])
    pair = next(one for one in moves.pairs if one.item.name.endswith("weight"))
    return float(engine.memory.place(slots[0], pair.item).flatten()[0])

"""An agent that holds memory, and a worker's line to it, for tests of states that come whole."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Iterator
from typing import Any

import pytest

from dlrover_adapters.checkpoint.hashing import digests
from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_adapters.torch import steps
from dlrover_adapters.torch.checkpoint.vault import (
    MEMORY,
    Arena,
    Fetched,
    Holding,
    Inventory,
    Keeping,
    Told,
    Vault,
    VaultGone,
)
from dlrover_core.checkpoint.arena import Control, Geometry


class Agent:
    """Holds memory as an agent does, for one rank; what workers say to it. Its lines are `line`."""

    def __init__(self) -> None:
        self.arenas: dict[int, tuple[int, tuple[int, Geometry]]] = {}
        self.kept: list[Keeping] = []
        self.due: list[tuple[int, bool]] = []
        self.generation = 1
        self._ids = itertools.count(1)

    def close(self) -> None:
        """Let the memory go."""
        for fd, _ in self.arenas.values():
            os.close(fd)

    def views(self) -> Iterator[tuple[int, int, SlotView]]:
        """All slots that hold something: arena, slot, what is in it."""
        for number, (fd, _) in self.arenas.items():
            memory = mmap.mmap(fd, 0)
            for slot, _stamp in Control(memory).stamps():
                yield number, slot, SlotView(memory, slot)

    def hash(self) -> None:
        """What the saver does at publication."""
        for _, slot, view in self.views():
            words = b"".join(one.to_bytes(8, "little") for one in digests(view.data))
            at = view.control.geometry.digests_at(slot)
            view.memory[at : at + len(words)] = words
            view.control.note_hashed(slot, view.stamp.sequence)


class Line:
    """A worker's line to the agent, with what `Shelf` and `recalled` use of a `Vault`."""

    rank, local_rank, world, nproc, gone = 0, 0, 1, 1, ""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.told = Told(agent.generation, "worker-0", 1, 0, "run", "", -1, False, 2**40)

    def arena(self, layout: int, geometry: Geometry, *, beside: int = 0) -> Arena:
        """The same again where it fits."""
        for number, (fd, like) in self._agent.arenas.items():
            if like == (layout, geometry):
                return Arena(number, False, os.dup(fd))
        fd, number = os.memfd_create("test"), next(self._agent._ids)
        os.ftruncate(fd, geometry.total_bytes)
        self._agent.arenas[number] = (fd, (layout, geometry))
        return Arena(number, True, os.dup(fd))

    def ready(self, arena: int, holders: Any = None, own: Any = ()) -> None:
        """Its words make sense."""
        Control(mmap.mmap(self._agent.arenas[arena][0], 0))
        assert holders == ((0,),)

    def keeping(self, keeping: Keeping) -> None:
        """For the master."""
        self._agent.kept.append(keeping)

    def saved(self, arena: int, slot: int, step: int, *, due: bool) -> None:
        """Published."""
        self._agent.due.append((step, due))

    def inventory(self) -> Inventory:
        """As the agent looks."""
        return Inventory(
            tuple(
                Holding(one, MEMORY, 0, 1, view.stamp.generation, view.stamp.step, view.table.layout, slot)
                for one, slot, view in self._agent.views()
            ),
            "",
            -1,
        )

    def borrow(self, holding: int) -> int:
        """To be read."""
        if self.gone:
            raise VaultGone(self.gone)
        return os.dup(self._agent.arenas[holding][0])

    def fetch(self, *_args: Any, **_kwargs: Any) -> Fetched:
        """There is nobody else."""
        raise AssertionError

    def close(self) -> None:
        """The line."""
        self.gone = "closed"


@contextlib.contextmanager
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """An agent that this process runs under."""
    one = Agent()
    monkeypatch.setattr(Vault, "here", classmethod(lambda _cls: True))
    monkeypatch.setattr(Vault, "connect", classmethod(lambda _cls: Line(one)))
    yield one
    one.close()


def phases(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is announced from now on to whoever looks for hangs: a phase's name, and "" at its end."""
    told: list[str] = []

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        told.append(name)
        yield
        told.append("")

    monkeypatch.setattr(steps, "phase", phase)
    return told

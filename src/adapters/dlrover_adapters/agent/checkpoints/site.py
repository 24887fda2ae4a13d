"""What the parts of the checkpoint duty share: what is kept here, by whom, and how ranks want it kept."""

from __future__ import annotations

from typing import Any, NamedTuple

from dlrover_core.job.checkpoints import Keep
from dlrover_core.job.orders import Order
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.keeping import Everywhere
from dlrover_core.runtime.launcher import WorkersLaunch

from .arenas import MEMORY, REPLICA, Arena, Arenas, State
from .saving import Saving

TEXT_MAX = 1024


class Keeping(NamedTuple):
    """How a rank's states are kept, as it says: `dlrover_adapters.torch.checkpoint.vault.Keeping`."""

    url: str
    every: int
    store_every: int
    keep: int
    format: str
    planned: bool
    node_bytes: int
    writes: bool
    local: str

    @classmethod
    def of(cls, body: dict[str, Any]) -> Keeping | None:
        """From a packet; None: it makes no sense."""
        texts = [body.get(name) for name in ("url", "format", "local")]
        numbers = [body.get(name) for name in ("every", "store_every", "keep", "node_bytes")]
        flags = [body.get(name) for name in ("planned", "writes")]
        if not all(isinstance(one, str) and len(one) <= TEXT_MAX for one in texts):
            return None
        if not all(type(one) is int and 0 <= one < 2**53 for one in numbers):
            return None
        if not all(type(one) is bool for one in flags):
            return None
        return cls(**{name: body[name] for name in cls._fields})


class Site:
    """This node, as its duty sees it. ``keeping`` is the newest that any rank said, of this generation or one before."""

    def __init__(self, desk: Desk, arenas: Arenas, saving: Saving) -> None:
        self.desk, self.arenas, self.saving = desk, arenas, saving
        self.launch: WorkersLaunch | None = None
        self.keeping: Keeping | None = None
        self.spread = 0
        self.places: dict[int, int] = {}
        """This node's place in each generation that ran here."""
        self.whole: list[State] = []
        """The states that all local ranks hold whole, ascending; of the last look."""
        self._holds: dict[str, list[State]] = {}

    @property
    def order(self) -> Order:
        """The newest order."""
        return self.desk.order

    @property
    def keep(self) -> Keep:
        """The part of the order that is about checkpoints."""
        return self.desk.order.part(Keep)

    @property
    def everywhere(self) -> Everywhere:
        """The newest steps that all nodes have, as the leader last said."""
        return self.desk.heard(Everywhere)

    @property
    def generation(self) -> int:
        """That of the workers that run, or ran last; 0: none."""
        return self.launch.generation if self.launch is not None else 0

    @property
    def nproc(self) -> int:
        """Ranks on every node."""
        return self.launch.nproc if self.launch is not None else 0

    def begin(self, launch: WorkersLaunch) -> None:
        """These workers run from now on."""
        self.launch = launch
        self.places[launch.generation] = launch.node_rank
        for old in sorted(self.places)[:-8]:
            del self.places[old]

    def look(self) -> None:
        """See what is there now."""
        self.whole = self.arenas.whole(self.nproc)

    def steps(self, generation: int) -> tuple[int, ...]:
        """Of a generation, the steps that are whole here, ascending."""
        return tuple(one.step for one in self.whole if one.generation == generation)

    def own(self, state: State) -> list[tuple[Arena, int]]:
        """Where a state lies, by local rank."""
        return [place for _, place in sorted(self.arenas.held().get(state, {}).items())]

    def cut(self, state: State) -> bytes:
        """What a state has consumed of each dataset, packed, as the slot of its first rank says; empty: it says nothing."""
        own = self.own(state)
        return own[0][0].cut(own[0][1]) if own else b""

    def hold(self, who: str, states: list[State]) -> None:
        """Keep these from being overwritten, beside what others than ``who`` keep; until the next call."""
        self._holds[who] = states
        held, wanted = self.arenas.held(), {one for states in self._holds.values() for one in states}
        self.saving.hold(
            sorted([arena.id, slot, *state] for state in wanted for arena, slot in held.get(state, {}).values())
        )

    def wanted(self, arena: Arena) -> bool:
        """Does it hold a state that somebody here keeps from being overwritten?"""
        wanted = {one for states in self._holds.values() for one in states}
        return any(State(stamp.generation, stamp.step) in wanted for _, stamp in arena.stamps())

    def pinned(self, state: State) -> bool:
        """Is it held by all local ranks, and kept from being overwritten?"""
        return state in self.whole and all(
            arena.control is not None and arena.control.pinned(slot) for arena, slot in self.own(state)
        )

    def is_due(self, state: State) -> bool:
        """Is it to go to storage by itself?"""
        return any(stamp.due for arena, at in self.own(state) for slot, stamp in arena.stamps() if slot == at)

    def copies(self, generation: int) -> dict[State, dict[int, dict[int, Arena]]]:
        """Copies of other nodes' states: by state, by the place of their node in that world, by rank."""
        found: dict[State, dict[int, dict[int, Arena]]] = {}
        for one in self.arenas:
            if one.kind != MEMORY and one.fetched is None and self.nproc:
                for _, stamp in one.stamps():
                    state = State(generation, stamp.step)
                    # Objects alone are of use only beside the tensors, which all of this node's ranks have.
                    if stamp.generation == generation and (one.kind == REPLICA or state in self.whole):
                        places = found.setdefault(state, {})
                        places.setdefault(one.owner.rank // self.nproc, {})[one.owner.rank] = one
        return found

    def copied(self, generation: int) -> tuple[tuple[int, int], ...]:
        """Of which other places of a generation everything is here, each with the step."""
        return tuple(
            sorted(
                (place, state.step)
                for state, places in self.copies(generation).items()
                for place, ranks in places.items()
                if len(ranks) == self.nproc
            )
        )

    def mine(self) -> list[Arena]:
        """The arenas that the ranks of this generation save into."""
        return [one for one in self.arenas.own(self.generation) if one.kind == MEMORY]

    @property
    def committed(self) -> State:
        """The newest state on storage, by the log; of step -1: none."""
        return State(self.keep.committed_of, self.keep.committed)

"""Copies of this node's states in its partner's memory, one on its way at a time.

Where each node has all tensors, of the newest state what only its ranks have (random numbers, positions in the data) and what is
live. That is little, and keeps up with the saves. Where tensors are spread, all of the step that all nodes aim at, as
`core.checkpoint.copies` says; that one, and the last that all have copied, are kept from being overwritten here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from dlrover_core.checkpoint.copies import NONE, PATIENCE, roundest

from .arenas import State
from .saving import Unsaved
from .site import Site

BACK_OFF_S, BACK_OFF_MAX_S = 1.0, 30.0
NOTHING = State(0, NONE)

log = structlog.get_logger("dlrover.agent")


class Copying:
    """Of one node. ``safe``: the newest state that all nodes have at their partners and keep at home, of any generation."""

    def __init__(self, site: Site, changed: Callable[[], None]) -> None:
        self._site, self._changed = site, changed
        self._address = ""
        self._there: list[State] = []  # at the partner, the newest last; as it said at the last copy
        self._sent: dict[State, dict[int, int]] = {}  # of each, the publications that were sent
        self._sending: asyncio.Task[None] | None = None
        self._retry_at, self._back_off_s = 0.0, BACK_OFF_S
        self._given_up = NOTHING
        self._refused: dict[State, tuple[dict[int, int], float, float]] = {}
        """States that the partner refused: their publications, the time of the next try, and the pause after that one."""
        self._keeps, self._kept_since = NOTHING, 0
        self.safe = NOTHING

    @property
    def spread(self) -> bool:
        """Is there no node that has all of the state?"""
        return self._site.spread != 1

    def _has(self, state: State) -> bool:
        """Whether the partner has the state as it is here. A step that was saved again since it was sent is another state."""
        if state not in self._there or self._address != self._site.keep.replica_to:
            return False
        sent = self._sent.get(state, {})
        return all(sent.get(arena) == sequence for arena, sequence in self._publications(state).items())

    def _publications(self, state: State) -> dict[int, int]:
        """By arena, the number of the publication of a state that lies here; empty: it is not here any more."""
        own = [(arena.id, dict(arena.stamps()).get(slot)) for arena, slot in self._site.own(state)]
        return {number: stamp.sequence for number, stamp in own if stamp is not None}

    @property
    def copied(self) -> int:
        """The newest step of this generation that the partner has; of shares only one that is kept here. -1: none."""
        states = [self._keeps] if self.spread else self._there
        return max(
            (one.step for one in states if one.generation == self._site.generation and self._has(one)), default=NONE
        )

    @property
    def told(self) -> tuple[int, int]:
        """The step that is kept to be copied, and the safe one, of this generation; as `KeptBeat` has it."""
        if not self.spread:
            return NONE, NONE
        safe = self.safe.step if self.safe.generation == self._site.generation and self._has(self.safe) else NONE
        return self._keeps.step if self._site.pinned(self._keeps) else NONE, safe if self._site.pinned(
            self.safe
        ) else NONE

    def look(self) -> None:
        """Keep what is to be kept, and send what is new, if somebody takes it and nothing is on its way."""
        site = self._site
        address, now = site.keep.replica_to, asyncio.get_running_loop().time()
        if address != self._address and self._sending is None:
            self._address, self._there, self._refused = address, [], {}
        if not site.launch or not address:
            return
        state = self._shared() if self.spread else self._light()
        if (
            self._sending is None
            and now >= self._retry_at
            and state.generation == site.generation
            and not self._has(state)
            and not self._unwanted(state, now)
        ):
            self._sending = asyncio.ensure_future(self._send(address, state))

    def _unwanted(self, state: State, now: float) -> bool:
        """Whether the partner has refused the state as it is here, a short while ago. Newer states are sent all the same."""
        sent, until, _ = self._refused.get(state, ({}, 0.0, 0.0))
        return now < until and sent == self._publications(state)

    @property
    def _everywhere(self) -> State:
        """The newest state of this generation that is whole on all nodes, as the leader says."""
        return State(self._site.generation, self._site.everywhere.whole)

    def _light(self) -> State:
        """The state to send now where each node has all tensors: the newest here, then what is whole everywhere.

        Another node may have left the newest out. Then only what is whole everywhere can be restored, and the partner has to have
        that as well.
        """
        newest = next(iter(self._site.whole[-1:]), NOTHING)
        done = self._has(newest) or self._unwanted(newest, asyncio.get_running_loop().time())
        return self._everywhere if done and self._everywhere in self._site.whole else newest

    def _shared(self) -> State:
        """The state to send now: the aim, once it is kept."""
        site, said = self._site, self._site.everywhere
        safe, beats = State(site.generation, said.safe), site.desk.beats_seen
        # What the leader says may be of a generation before; what we have sent of this one is not.
        if safe > self.safe and self._has(safe):
            self.safe = safe
            self._there = [one for one in self._there if one >= safe]
        if self._keeps.step != said.aim and beats - self._kept_since >= PATIENCE:
            self._given_up = max(self._given_up, self._keeps)
        done = max(self.safe, self._given_up)
        every = site.keeping.every if site.keeping is not None else 1
        step = roundest(
            site.steps(site.generation), every, done.step if done.generation == site.generation else NONE, said.aim
        )
        if (keeps := State(site.generation, step)) != self._keeps:
            self._keeps, self._kept_since = keeps, beats
        site.hold("copies", [self.safe, self._keeps])
        return self._keeps if self._keeps.step == said.aim and site.pinned(self._keeps) else NOTHING

    async def _send(self, address: str, state: State) -> None:
        site = self._site
        ids, publications = [arena.id for arena, _ in site.own(state)], self._publications(state)
        keep = self.safe if self.spread else self._everywhere
        body = {
            "op": "send",
            "address": address,
            "ids": ids,
            "generation": state.generation,
            "step": state.step,
            "keep": list(keep if self._has(keep) else NOTHING),
            "light": not self.spread,
            "pace": 0,
            "speaks": site.generation,
        }
        try:
            done = await site.saving.order(body)
            if address == self._address:
                there = {State(*one) for one in done.body["there"]}
                self._sent = {one: sent for one, sent in self._sent.items() if one in there} | {state: publications}
                self._there = sorted(self._sent)
            self._retry_at, self._back_off_s = 0.0, BACK_OFF_S
            site.desk.hurry()
        except Unsaved as error:
            now = asyncio.get_running_loop().time()
            self._given_up = max(self._given_up, state)
            if error.refused:
                self._unwant(state, publications, now, str(error))
                return
            if not self._retry_at:
                log.warning("no copy of this node's state is with its partner", address=address, reason=str(error))
            self._retry_at = now + self._back_off_s
            self._back_off_s = min(BACK_OFF_MAX_S, 2 * self._back_off_s)
        finally:
            self._sending = None
            self._changed()

    def _unwant(self, state: State, publications: dict[int, int], now: float, why: str) -> None:
        """The partner lives, and does not want this state: only this one waits."""
        self._retry_at, self._back_off_s = 0.0, BACK_OFF_S
        if state not in self._refused:
            log.info("the partner refused a copy", generation=state.generation, step=state.step, reason=why)
        after = self._refused.get(state, ({}, 0.0, BACK_OFF_S))[2]
        here = self._site.whole
        self._refused = {one: what for one, what in self._refused.items() if one in here}
        self._refused[state] = publications, now + after, min(BACK_OFF_MAX_S, 2 * after)

    async def settle(self) -> None:
        """The agent goes: the newest state, whatever is on its way."""
        site = self._site
        while self._sending is not None:
            await asyncio.wait([self._sending])
        if site.keep.replica_to and site.whole and not self._has(site.whole[-1]):
            await self._send(site.keep.replica_to, site.whole[-1])

    async def close(self) -> None:
        """Nothing more of it."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

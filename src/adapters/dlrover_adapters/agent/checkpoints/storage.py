"""What a node writes to storage, and when: what is due, what the leader orders of a generation that has ended, and the seal.

One step at a time. A storage that fails is told once, training never: the step goes to the next tier at once (a folder of this
host, if there is one), and what is due later is tried again after a while that doubles up to `BACK_OFF_MAX_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import structlog

from dlrover_core.checkpoint.arena import SLOTS_MAX
from dlrover_core.job.checkpoints import Persist, ReportStorage, storage_calm_s
from dlrover_core.runtime.keeping import WRITTEN_MAX, Written

from .arenas import Arena, State
from .saving import Unsaved
from .site import Keeping, Site

BACK_OFF_S, BACK_OFF_MAX_S = 1.0, 60.0
COMMIT_S = 30.0
"""After a good end it is awaited for so long that others have written what we have: who has lost its part never will."""
SEAL_S, HELD_WAIT_S, SETTLE_S, SETTLE_LOOK_S = 3.0, 5.0, 10.0, 0.05
"""At any other end, after the last thing that happened: a node that is alone; one of several; that of rank 0. Looked so often."""
TORN_MAX = 3
"""Writes of one state that the saver gave up though the state is whole in memory; then the state is damaged."""
TRIES_MAX = 6
"""Failures in a row after which a job that has succeeded waits for its storage no more: about half a minute."""
REASON_MAX = 500

NOTHING = State(0, -1)

log = structlog.get_logger("dlrover.agent")


def _state(one: Written) -> State:
    return State(one.generation, one.step)


def _what(one: Written) -> tuple[int, int, bool]:
    """A state, and whether because it was ordered."""
    return one.step, one.generation, bool(one.places)


class Awaited(NamedTuple):
    """What is on its way to storage: a step, in words what happens to it, and about how many bytes of how many; 0: unknown."""

    step: int
    doing: str
    written: int = 0
    size: int = 0

    @property
    def words(self) -> str:
        """What happens to it, for people."""
        from dlrover_core.history.phrases import size  # rare, and an agent's start should be fast

        return f"{self.doing}: {size(self.written)} of {size(self.size)}" if self.size else self.doing


class Storage:
    """Of one node. ``written``: what all parts of this node are on storage of, the newest last. ``changed``: look again."""

    def __init__(self, site: Site, changed: Callable[[], None]) -> None:
        self._site, self._changed = site, changed
        self.written: list[Written] = []
        self.failing = ""
        self.holds: list[State] = []
        self._hold_until = 0.0
        self._working: State | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ordered: asyncio.Task[None] | None = None
        self._ordered_what: tuple[State, tuple[int, ...]] | None = None
        self._sealed, self._sealing = NOTHING, False
        self._seal_at, self._seal_back_off_s, self._seal_failures = 0.0, BACK_OFF_S, 0
        self._tried = self._asked = self._failed_on = NOTHING
        self._lost: list[State] = []
        self._torn = NOTHING, 0
        self._retry_at, self._back_off_s = 0.0, BACK_OFF_S
        self._writes = False
        self._failures, self._failed_at = 0, 0.0
        self._outages, self._told_at = 0, 0.0
        self._awaited, self._awaited_since = NOTHING, 0.0

    async def close(self) -> None:
        """Nothing more of it here; what the saver is at ends with it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("what was to be done with storage failed", what=task.get_name(), reason=repr(error))

    def has(self, state: State) -> bool:
        """Is it on storage, as far as this node is concerned?"""
        return any((one.generation, one.step) == state for one in self.written)

    def unfinished(self, *, writes: bool) -> bool:
        """Is something on its way to storage that a script which has just ended well counts on?

        What is due and not written, or written and not committed, or committed and not sealed; unless it failed too often.
        """
        site, keeping = self._site, self._site.keeping
        if keeping is None or not keeping.url or not writes:
            return False
        if self._working is not None or self._sealing:
            return True
        due, newest = self._due(), self._newest
        if due is not None:
            # However often others failed before it, each is tried.
            return self._failures < TRIES_MAX or due != self._failed_on
        if newest > site.committed:
            return self._commit_may_come(newest)
        return site.committed == newest and self._leads and self._unsealed and self._seal_failures < TRIES_MAX

    @property
    def _newest(self) -> State:
        """The newest that this generation has written because it was due."""
        own = [_state(one) for one in self.written if one.generation == self._site.generation and not one.places]
        return max(own, default=NOTHING)

    @property
    def awaited(self) -> Awaited:
        """What `unfinished` waits for."""
        if self._working is not None:
            written, size = self._site.saving.progress
            return Awaited(self._working.step, "is being written", min(written, size), size)
        due = self._due()
        if due is not None:
            return Awaited(due.step, f"is tried again: {self.failing}" if self.failing else "is to be written")
        if self._newest > self._site.committed:
            return Awaited(self._newest.step, "is written here, and waits for other nodes' parts")
        return Awaited(self._site.committed.step, "is written, and waits for its seal")

    def missing(self) -> Awaited | None:
        """Of what this generation was to store, what is not there as the agent goes, and why; None: nothing."""
        keeping, site = self._site.keeping, self._site
        if keeping is None or not keeping.url or not self._writes:
            return None
        asked = self._asked
        if asked.generation == site.generation and asked > site.committed:
            if self.has(asked):
                return Awaited(asked.step, "not all nodes have written their parts")
            if asked == self._working:
                return self.awaited._replace(doing="was still being written")
            return Awaited(asked.step, self.failing or "it was lost in memory before it was written")
        if self._unsealed:
            return Awaited(site.committed.step, "its parts are there, and no seal")
        return None

    def unstored(self) -> tuple[str, int]:
        """Why what this generation was to store is not there, once nothing is on its way any more; empty: nothing is missing.

        And the step, if other nodes may still write their parts of it: it counts unless it is committed when all have finished.
        """
        missing = self.missing()
        if missing is None:
            return "", -1
        keeping, newest = self._site.keeping, self._site.committed.step
        url = keeping.url if keeping is not None else ""
        there = f"the newest there is step {newest}" if newest >= 0 else "no step is there"
        again = f"goes on from step {newest}" if newest >= 0 else "begins anew"
        told = (
            f"step {missing.step} is not a checkpoint on storage ({url}): {missing.words}; {there}. See that the storage can be "
            f"written, then start the job again: it {again}"
        )
        others = self._asked > self._site.committed and self.has(self._asked)
        return told, missing.step if others else -1

    @property
    def _leads(self) -> bool:
        return self._site.launch is not None and self._site.launch.node_rank == 0

    def _commit_may_come(self, state: State) -> bool:
        """Whether somebody else may still be writing its parts of what we have written."""
        now = asyncio.get_running_loop().time()
        if state != self._awaited:
            self._awaited, self._awaited_since = state, now
        return now - self._awaited_since < COMMIT_S

    # ---- what is due

    def look(self, *, writes: bool) -> None:
        """Begin what is to be done now."""
        keeping, self._writes = self._site.keeping, writes
        if keeping is None or not keeping.url:
            return
        self._look_at_order(keeping)
        self._seal(keeping)
        now = asyncio.get_running_loop().time()
        if self.failing and not self._failures and now - self._told_at >= storage_calm_s(self._outages):
            self._back(keeping)
        if writes and self._working is None and now >= self._retry_at:
            due = self._due()
            if due is not None:
                self._working = due
                self._spawn(self._write_due(due, keeping), f"step {due.step} to storage")
        ordered = self._ordered_what[0] if self._ordered_what is not None else NOTHING
        if self.holds and self.holds[0] != ordered and (now >= self._hold_until or self._needless(self.holds[0])):
            self.release()

    def _due(self) -> State | None:
        """The newest state that is to be written and was not."""
        for state in reversed(self._site.whole):
            if state <= self._tried or state.generation != self._site.generation:
                return None
            if state in self._lost:
                continue
            if self._site.is_due(state):
                self._asked = max(self._asked, state)
                if not self.has(state):
                    return state
            if self._replaces(state) and not self.has(state):
                return state
        return None

    def _replaces(self, state: State) -> bool:
        """Whether this is the newest state left of a generation whose last due state was lost. Jobs of one node only: of several
        nodes each may have another one.
        """
        launch = self._site.launch
        alone = launch is not None and launch.nodes <= 1
        newer = any(state.generation == one.generation and state < one for one in self._lost)
        return alone and newer and state == max(one for one in self._site.whole if one not in self._lost)

    async def _write_due(self, state: State, keeping: Keeping) -> None:
        try:
            await self._write(state, keeping, self._site.own(state))
            self._tried = state
        except Unsaved as error:
            lost = error.lost and not self._whole_still(state)
            if not lost and error.lost:
                self._torn_in_memory(state, error)
                return
            self._failed(keeping, state, error)
            if lost:
                # What is older and whole may take its place.
                self._lost = [*self._lost, state][-SLOTS_MAX:]
            else:
                # Tried again while it is in memory, or the next that is due: only what all nodes write alike is ever whole there.
                await self._next_tier(state, keeping)
        finally:
            self._working = None
            self._changed()

    def _whole_still(self, state: State) -> bool:
        """Whether a state that the saver reported as lost is still whole in memory. It is then tried again, `TORN_MAX` times."""
        self._site.look()
        times = self._torn[1] if self._torn[0] == state else 0
        return state in self._site.whole and times + 1 < TORN_MAX

    def _torn_in_memory(self, state: State, error: Unsaved) -> None:
        self._torn = state, (self._torn[1] if self._torn[0] == state else 0) + 1
        self._retry_at = asyncio.get_running_loop().time() + BACK_OFF_S
        log.warning(
            "a step is whole in memory and was not read whole; it is tried again", step=state.step, reason=str(error)
        )

    async def _next_tier(self, state: State, keeping: Keeping) -> None:
        if keeping.local:
            try:
                await self._order("persist", state, keeping._replace(url=keeping.local), self._site.own(state))
            except Unsaved as error:
                log.warning("nor can the host's own folder be written", url=keeping.local, reason=str(error))

    async def _write(
        self,
        state: State,
        keeping: Keeping,
        own: Sequence[tuple[Arena, int]],
        copies: Sequence[tuple[int, int]] = (),
        places: int = 0,
    ) -> None:
        """Have the parts of a state written, and tell so; ``places`` as in `Written`. Raises `Unsaved`."""
        done = await self._order("persist", state, keeping, own, copies)
        said = done.get("cut", b""), done.get("trained", b"")
        one = Written(state.step, int(done["size"]), int(done["took_us"]), state.generation, places, *said)
        others = [old for old in self.written if _what(old) != _what(one)]
        self.written = [*others, one][-WRITTEN_MAX:]
        self._worked()
        self._changed()

    async def _order(
        self,
        op: str,
        state: State,
        keeping: Keeping,
        own: Sequence[tuple[Arena, int]] = (),
        copies: Sequence[tuple[int, int]] = (),
    ) -> dict[str, Any]:
        body = {
            "op": op,
            "ids": [arena.id for arena, _ in own],
            "copies": [list(one) for one in copies],
            "generation": state.generation,
            "step": state.step,
            "url": keeping.url,
            "format": keeping.format,
            "keep": keeping.keep,
            "run": self._site.desk.run,
        }
        if op == "persist" and not own and not copies:
            raise Unsaved(f"step {state.step} of generation {state.generation} is not in memory any more", lost=True)
        return (await self._site.saving.order(body)).body

    # ---- a storage that fails

    def _failed(self, keeping: Keeping, state: State, error: Unsaved) -> None:
        reason = str(error)
        if error.lost:
            log.warning("a step was not written to storage", step=state.step, reason=reason)
            return
        self._failures, self._failed_on = self._failures + 1, state
        self._failed_at = asyncio.get_running_loop().time()
        self._retry_at = self._failed_at + self._back_off_s
        self._back_off_s = min(BACK_OFF_MAX_S, 2 * self._back_off_s)
        if not self.failing:
            self.failing = reason[:REASON_MAX]
            self._outages, self._told_at = self._outages + 1, self._failed_at
            log.error("parts cannot be written to storage", url=keeping.url, reason=reason)
            self._site.desk.send(ReportStorage(self._site.desk.node, keeping.url, self.failing))

    def try_anew(self) -> None:
        """A script has ended well and only its last state is waited for: however long storage has failed, try it at once, and
        `TRIES_MAX` times.
        """
        self._failures, self._failed_on = 0, NOTHING
        self._retry_at, self._back_off_s = 0.0, BACK_OFF_S

    def _worked(self) -> None:
        self._failures = 0
        self._retry_at, self._back_off_s = 0.0, BACK_OFF_S

    def _back(self, keeping: Keeping) -> None:
        self.failing = ""
        log.info("parts can be written to storage again", url=keeping.url)
        self._site.desk.send(ReportStorage(self._site.desk.node, keeping.url, ""))

    # ---- what the leader orders of a generation that has ended

    def hold(self, state: State, seconds: float) -> None:
        """Keep this one from being overwritten for so long: the leader may order it."""
        self.holds = [state]
        self._hold_until = asyncio.get_running_loop().time() + seconds
        self._tell_holds()

    def _needless(self, state: State) -> bool:
        """Whether the leader will not order this state any more: it or a newer one is on storage, or the leader has decided."""
        return self._site.committed >= state or self._site.keep.decided >= state.generation

    def release(self) -> None:
        """They are of no more use."""
        self.holds = []
        self._tell_holds()

    def _tell_holds(self) -> None:
        self._site.hold("storage", self.holds)

    def _look_at_order(self, keeping: Keeping) -> None:
        persist = self._site.order.part(Persist)
        if persist.step < 0:
            if self._ordered is not None:
                self._ordered.cancel()
            self._ordered = self._ordered_what = None
            return
        wanted = State(persist.of, persist.step), persist.places
        if wanted != self._ordered_what:
            if self._ordered is not None:
                self._ordered.cancel()
            self._ordered_what = wanted
            # The others may be overwritten now, this one not yet.
            self.hold(wanted[0], 0.0)
            self._ordered = self._spawn(self._obey(*wanted, keeping), f"step {persist.step} as ordered")

    async def _obey(self, state: State, places: tuple[int, ...], keeping: Keeping) -> None:
        """As often as it takes, or as long as it is in memory: the order stands until the leader takes it back."""
        back_off_s = BACK_OFF_S
        while True:
            own, copies = self._parts(state, places)
            try:
                await self._write(state, keeping, own, copies, len(places))
            except Unsaved as error:
                self._failed(keeping, state, error)
                # A storage that is down must not hold up who saves into memory: what runs now is more than what has ended.
                self._let_go(state)
                if error.lost:
                    return
                await asyncio.sleep(back_off_s)
                back_off_s = min(BACK_OFF_MAX_S, 2 * back_off_s)
            else:
                self._let_go(state)
                return

    def _let_go(self, state: State) -> None:
        if self.holds == [state]:
            self.release()

    def _parts(self, state: State, places: tuple[int, ...]) -> tuple[list[tuple[Arena, int]], list[tuple[int, int]]]:
        """Where the parts of these places are: in our own arenas, and the rank and layout of copies."""
        mine = self._site.places.get(state.generation, -1)
        own = self._site.own(state) if mine in places or not places else []
        there = self._site.copies(state.generation).get(state, {})
        copies = [
            (rank, arena.owner.layout)
            for place in places
            if place != mine
            for rank, arena in sorted(there.get(place, {}).items())
        ]
        return own, copies

    # ---- the seal

    def _seal(self, keeping: Keeping) -> None:
        """A step is committed: make it a checkpoint that anybody can open, and remove what is too old.

        The node of rank 0 does, and whoever was ordered to write parts of it: rank 0's node may be why that was ordered. Twice is
        as good as once.
        """
        if self._sealing or not self._unsealed:
            return
        committed = self._site.committed
        if asyncio.get_running_loop().time() >= self._seal_at:
            self._sealing = True
            self._spawn(self._seal_it(committed, keeping), f"seal of step {committed.step}")

    @property
    def _unsealed(self) -> bool:
        """Has the newest committed step no seal yet that is ours to write?"""
        committed = self._site.committed
        if committed == self._sealed or committed.step < 0:
            return False
        return self._leads or any(_state(one) == committed and one.places for one in self.written)

    async def _seal_it(self, state: State, keeping: Keeping) -> None:
        try:
            await self._order("seal", state, keeping)
            self._sealed, self._seal_back_off_s, self._seal_failures = state, BACK_OFF_S, 0
        except Unsaved as error:
            self._seal_failures += 1
            log.warning("a step on storage cannot be sealed", step=state.step, url=keeping.url, reason=str(error))
            self._seal_at = asyncio.get_running_loop().time() + self._seal_back_off_s
            self._seal_back_off_s = min(BACK_OFF_MAX_S, 2 * self._seal_back_off_s)
        finally:
            self._sealing = False
            self._changed()

    # ---- the end

    async def finish(self) -> None:
        """The job has succeeded: what other nodes were still writing when this one had finished is committed now; seal it."""
        keeping = self._site.keeping
        self._seal_at, self._seal_failures = 0.0, min(self._seal_failures, TRIES_MAX - 1)
        while keeping is not None and keeping.url and self._unsealed and self._seal_failures < TRIES_MAX:
            self._seal(keeping)
            await asyncio.sleep(SETTLE_LOOK_S)

    async def settle(self, everywhere: Callable[[], int]) -> None:
        """The agent goes: what only memory has is written now, and sealed once all have written it.

        First the newest state that all nodes hold, as ``everywhere`` says of the generation that ran (-1: nobody knows), then
        what is newer: another node may have been stopped a step before us, and a step with a part missing is none. And whatever
        the leader orders, once it has heard what each of us holds.
        """
        site, keeping = self._site, self._site.keeping
        if keeping is None or not keeping.url:
            return
        loop, given_up = asyncio.get_running_loop(), set[State]()
        alone = site.launch is None or site.launch.nodes <= 1
        patience_s = SEAL_S if alone else SETTLE_S if self._leads else HELD_WAIT_S
        until, ordered, obeyed = loop.time() + patience_s, False, False
        while loop.time() < until:
            site.look()  # workers may save in their last moments
            self._look_at_order(keeping)
            self._seal(keeping)
            was, ordered = ordered, site.order.part(Persist).step >= 0
            obeyed = obeyed or (was and not ordered)
            state = self._unsaved(everywhere(), given_up, alone=alone)
            if state is not None and self._working is None:
                await self._write_last(state, keeping, given_up)
            elif not self._works and self._settled(obeyed=obeyed):
                return
            else:
                idle = not self._works and not site.desk.generation
                await asyncio.sleep(SETTLE_LOOK_S)
                if idle:
                    continue
            until = loop.time() + patience_s

    async def _write_last(self, state: State, keeping: Keeping, given_up: set[State]) -> None:
        try:
            await self._write(state, keeping, self._site.own(state))
        except Unsaved as error:
            self._failed(keeping, state, error)
            given_up.add(state)
            if not error.lost:
                await self._next_tier(state, keeping)

    def _unsaved(self, everywhere: int, given_up: set[State], *, alone: bool) -> State | None:
        """The next state to write as the agent goes."""
        site = self._site
        states = site.whole if self._writes else []
        if alone:
            states = states[-1:]
        elif states:
            states = [one for one in states if one >= State(states[-1].generation, max(0, everywhere))]
        left = [one for one in states if one > site.committed and one not in given_up and not self.has(one)]
        return left[0] if left else None

    @property
    def _works(self) -> bool:
        """Is something being written, with success as far as is known?"""
        ordered = self._ordered is not None and not self._ordered.done()
        return self._working is not None or self._sealing or (ordered and not self._failures)

    def _settled(self, *, obeyed: bool) -> bool:
        """Is nothing left to wait for? ``obeyed``: the leader has ordered something, and taken it back."""
        site = self._site
        newest = max([*site.whole[-1:], *map(_state, self.written)], default=NOTHING)
        if site.desk.generation or (newest > site.committed and not obeyed):
            return False
        return not self._leads or site.committed.step < 0 or site.committed == self._sealed

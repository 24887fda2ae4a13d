"""The duty of keeping states: what ranks save is told to the leader, and what it decides is done with it.

Memory is a level, told with the beats; what the leader must know once (that ranks save with us, from where they began, what is
held when a generation ends) are reports. Its orders are levels, too: nothing here asks whether something was done before, it
looks whether it is so. Training is never touched: whatever fails is told, and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from dlrover_core.checkpoint.arena import ArenaBroken
from dlrover_core.job.checkpoints import OfferReplica, ReportHeld
from dlrover_core.job.orders import Order
from dlrover_core.job.plans import Boundary
from dlrover_core.job.shards import Terms
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.keeping import HELD_MAX, KeptBeat, Written
from dlrover_core.runtime.launcher import Notice, WorkerExit, WorkersGone
from dlrover_core.runtime.within import within
from dlrover_core.words import plain

from .arenas import MEMORY, OBJECTS, Arena, NoRoom, State, word
from .copying import Copying
from .ranks import Ranks
from .saving import Saving, Serving, Unsaved
from .site import TEXT_MAX, Keeping, Site
from .storage import Storage
from .vault import Caller, Greeting, Refused, Vault, Wanted

LOST_S = 30.0
"""Where no look has succeeded for so long, by a fault of ours, nobody waits any more for what is on its way to storage."""
LOOK_S = 1.0
"""What ranks say may be lost; the words in their arenas are not, and are looked at so often."""
APART_S = 0.05
"""Between two looks."""
HOLD_S = 30.0
"""After the end of a generation its newest state is kept from being overwritten until the leader has decided, or for so long."""
REACHABLE_S = 5.0
SECOND_US = 1_000_000
FRAMES_MAX = 3

log = structlog.get_logger("dlrover.agent")


class Keeps(Protocol):
    """Where states are kept: a launcher."""

    vault: Vault | None
    saving: Saving | None


class CheckpointDuty:
    """Of one agent. ``token`` proves to other nodes' savers that we are of the job; they dial ``host``, ours listens on ``bind``.

    An empty ``bind``: nothing goes between nodes. ``tls``: files of the CA, of the certificate that this node shows, and of its
    key; empty: transfers are not encrypted. ``say`` tells people at once what they wait for, or have lost, at a good end.
    """

    def __init__(
        self,
        launcher: Keeps,
        *,
        token: bytes,
        host: str,
        bind: str,
        tls: tuple[str, ...] = (),
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._say = say
        self._launcher, self._token, self._host, self._bind, self._tls = launcher, token, host, bind, tls
        self._wake = asyncio.Event()
        self._site: Site | None = None
        self._storage: Storage | None = None
        self._copying: Copying | None = None
        self._ranks = Ranks()
        self._ended: list[int] = []
        self._failed: set[int] = set()
        self._told_ended = 0
        self._offered = ""
        self._fetching: dict[tuple[int, ...], asyncio.Task[tuple[Arena, int]]] = {}
        self._hashed: dict[int, int] = {}
        self._first_saved: dict[int, int] = {}
        self._stumbles: set[str] = set()
        self._alarmed: set[Caller] = set()
        self._lost_since = math.inf
        self._wrote: dict[int, bool] = {}  # whether there was something to write, by generation
        self._told_written: tuple[Written, ...] = ()

    # ---- what happens; at once

    def ordered(self, order: Order) -> None:  # noqa: ARG002  # the desk has it
        """A new order."""
        self._wake.set()

    def noticed(self, notice: Notice) -> None:
        """Workers that are gone leave their states here."""
        try:
            self._noticed(notice)
        except Exception as error:  # noqa: BLE001  # as in `run`
            self._stumbled(error)

    def _noticed(self, notice: Notice) -> None:
        if isinstance(notice, WorkerExit) and self._launcher.vault is not None:
            self._launcher.vault.catch_up()
        match notice:
            case WorkerExit(exit_code=0, asked=False):
                # At once: before it is told that all have finished.
                if self._site is not None:
                    self._site.look()
                    self._rest()
            case WorkerExit() if notice.asked or notice.exit_code != 0:
                self._failed.add(notice.generation)
            case WorkersGone(generation):
                self._ended.append(generation)
                if generation not in self._failed and self._storage is not None and self._site is not None:
                    self._storage.try_anew()
                    # On a busy disk what is patient waits for seconds before each access.
                    self._site.saving.hasten()
                self._wake.set()

    def greeting(self) -> Greeting:
        """As `vault.Listener` has it; the others below, too."""
        site = self._site
        if site is None:
            return Greeting()
        keep, resume_step = site.keep, site.order.work.resume_step
        return Greeting(site.saving.address, keep.committed, True, resume_step, keep.lenders, copies=bool(self._bind))

    def greeted(self, caller: Caller) -> None:
        """The first rank that saves with us brings the saver with it."""
        site, vault = self._site, self._launcher.vault
        if site is None or vault is None or vault.launch is None:
            return
        if site.generation != vault.launch.generation:
            site.arenas.forget_heads()
            site.begin(vault.launch)
            # What was whole everywhere, or planned, was so of another generation.
            site.desk.unhear()
        site.saving.begin()
        if self._bind:
            site.saving.serve(Serving(vault.launch.run, self._token, self._bind, self._host, self._tls))
        else:
            site.saving.alone()
        site.saving.level(site.generation)
        self._ranks.greeted(caller)
        self._wake.set()

    def opened(self, arena: Arena) -> None:
        """A rank that begins has neither seen a plan nor saved at a boundary, whatever its predecessor has."""
        for name in ("acked", "boundary", "armed", "go", "whole"):
            word(arena, name, 0)
        if arena.ready:
            self.ready(arena)

    def ready(self, arena: Arena) -> None:
        """The saver may have it."""
        site = self._site
        if site is not None and site.launch is not None:
            site.saving.give(arena, site.launch.node_rank)
            site.spread = arena.spread
            self._wake.set()

    def dropped(self, arena: Arena) -> None:
        """It is no more."""
        self._hashed.pop(arena.id, None)
        if self._site is not None:
            self._site.saving.forget(arena)

    def dataset(self, caller: Caller, terms: Terms) -> None:
        """A rank trains on this dataset."""
        if self._site is not None:
            self._ranks.dataset(self._site, caller, terms)
            self._wake.set()

    def told(self, caller: Caller, body: dict[str, Any]) -> None:
        """A rank has something to say."""
        if body.get("op") == "keeping":
            keeping = Keeping.of(body)
            if keeping is not None and self._site is not None:
                self._ranks.keeps(caller, keeping)
                if caller.local_rank == min(self._ranks.callers, default=0) or self._site.keeping is None:
                    self._site.keeping = keeping
        elif body.get("op") == "alarm":
            self._alarm(caller, _words(body))
        elif body.get("op") == "lost":
            words = _words(body)
            log.error("training begins anew", generation=caller.generation, reason=words)
            self._say(words)
        else:
            self._ranks.told(caller, body)
        self._wake.set()

    def _alarm(self, caller: Caller, words: str) -> None:
        """A rank has left a save out because of an error: all are logged, and the first of each rank is told to people."""
        log.error("a rank left a save out", rank=caller.rank, generation=caller.generation, reason=words)
        if caller not in self._alarmed:
            self._alarmed = {one for one in self._alarmed if one.generation == caller.generation} | {caller}
            self._say(f"rank {caller.rank}: {words}")

    async def reachable(self) -> None:
        """Wait for the saver's address."""
        if self._site is not None:
            await self._site.saving.reachable(REACHABLE_S)

    async def fetch(self, wanted: Wanted) -> tuple[Arena, int]:
        """Have the saver bring it; once, whoever of our ranks asks."""
        site = self._site
        if site is None:
            raise Refused("this node has not joined yet")
        slot = wanted.rank, wanted.generation, wanted.step, wanted.layout
        known = site.arenas.brought(slot, whole=wanted.whole)
        if known is not None:
            return known, 0
        key = (*slot, wanted.whole)
        under_way = self._fetching.get(key)
        if under_way is None:
            launch = self._launcher.vault.launch if self._launcher.vault is not None else None
            speaks = max(site.generation, launch.generation if launch is not None else 0)
            under_way = self._fetching[key] = asyncio.ensure_future(self._fetch(site, wanted, slot, speaks))
            under_way.add_done_callback(functools.partial(self._fetched, key))
        return await asyncio.shield(under_way)

    def _fetched(self, key: tuple[int, ...], done: asyncio.Task[tuple[Arena, int]]) -> None:
        del self._fetching[key]
        if not done.cancelled():
            done.exception()  # seen, though whoever asked may have gone

    @staticmethod
    async def _fetch(site: Site, wanted: Wanted, slot: tuple[int, ...], speaks: int) -> tuple[Arena, int]:
        order = {
            "op": "fetch",
            "address": wanted.address,
            "wanted": list(slot),
            "whole": wanted.whole,
            "speaks": speaks,
        }
        try:
            done = await within(wanted.within_s, site.saving.order(order))
            return site.arenas.fetched(slot, done.fd, whole=wanted.whole), int(done.body["took_us"])
        except (Unsaved, NoRoom, ArenaBroken) as error:
            raise Refused(str(error)) from error
        except asyncio.TimeoutError as error:
            raise Refused(f"{wanted.address} did not send it within {wanted.within_s:g} s") from error

    # ---- its life

    async def run(self, desk: Desk) -> None:
        """Until cancelled."""
        vault, saving = self._launcher.vault, self._launcher.saving
        if vault is None or saving is None:
            return
        site = self._site = Site(desk, vault.arenas, saving)
        self._storage, self._copying = Storage(site, self._wake.set), Copying(site, self._wake.set)
        vault.listener, saving.changed, desk.seen_news = self, self._wake.set, self._wake.set
        desk.waits, desk.unstored = self._waits, self._unstored
        try:
            while True:
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(LOOK_S, self._wake.wait()) if saving.begun else await self._wake.wait()
                self._wake.clear()
                if saving.begun:
                    try:
                        self._look(site, self._storage, self._copying)
                        self._lost_since = math.inf
                    except Exception as error:  # noqa: BLE001  # training must not end because of its checkpoints
                        self._stumbled(error)
                        now = asyncio.get_running_loop().time()
                        self._lost_since = min(self._lost_since, now)
                        if now - self._lost_since >= LOST_S:
                            desk.at_rest.set()
                    await asyncio.sleep(APART_S)  # many ranks that save at every step are looked at once
        finally:
            vault.listener = None
            desk.at_rest.set()
            for task in self._fetching.values():
                task.cancel()
            await self._storage.close()
            await self._copying.close()

    async def settle(self, order: Order) -> None:
        """The agent goes, its workers with it: what is newest goes to storage and to the partner, within their grace."""
        if self._site is None or self._storage is None or self._copying is None or not self._site.saving.begun:
            return
        site, storage, well = self._site, self._storage, order.outcome == "succeeded"
        site.saving.hasten()
        # A script that has ended well has saved what it wanted to: nothing is added to that.
        work = storage.finish() if well else storage.settle(lambda: self._whole(site))
        both = asyncio.gather(work, *([] if well else [self._copying.settle()]))
        in_time = True
        try:
            await within(order.grace_us / SECOND_US, both)
        except asyncio.TimeoutError:
            in_time = False
            log.warning("the agent goes before everything is on storage", grace_us=order.grace_us)
        except Exception as error:  # noqa: BLE001  # the agent goes all the same
            self._stumbled(error)
        if well or not in_time:
            self._tell_missing(site, storage)

    def _tell_missing(self, site: Site, storage: Storage) -> None:
        """Nobody would look for it where the job has ended well, nor where a stop had to be quick."""
        missing, newest = storage.missing(), site.committed.step
        if missing is not None:
            log.error("a step is not on storage", step=missing.step, reason=missing.words, committed=newest)
            there = f"the newest there is step {newest}" if newest >= 0 else "no step is there"
            self._say(f"step {missing.step} is not a checkpoint on storage: {missing.words}; {there}")

    def _waits(self, for_s: float) -> None:
        """All workers have ended well, and their agent waits for us."""
        if self._storage is None:
            return
        try:
            awaited = self._storage.awaited
            log.info(
                "the script has ended; what it saved is on its way to storage", for_s=round(for_s), **awaited._asdict()
            )
            self._say(f"the script has ended; step {awaited.step} {awaited.words}")
        except Exception as error:  # noqa: BLE001  # as in `run`
            self._stumbled(error)

    def _unstored(self) -> tuple[str, int]:
        """As `Desk.unstored`."""
        try:
            return self._storage.unstored() if self._storage is not None else ("", -1)
        except Exception as error:  # noqa: BLE001  # as in `run`
            self._stumbled(error)
            return "", -1

    def _stumbled(self, error: Exception) -> None:
        """A fault of ours: told once, and the next look may do better."""
        if repr(error) not in self._stumbles:
            self._stumbles.add(repr(error))
            where = "".join(traceback.format_tb(error.__traceback__)[-FRAMES_MAX:])
            log.error("the checkpoint duty failed; it goes on", reason=repr(error), where=where)

    def _look(self, site: Site, storage: Storage, copying: Copying) -> None:
        """See what there is, and do what follows."""
        site.look()
        self._hash(site)
        self._level(site)
        self._supersede(site, copying)
        self._end(site, storage)
        self._ranks.report(site)
        storage.look(writes=self._ranks.writes)
        copying.look()
        self._rest()
        self._tell(site, storage, copying)

    def _rest(self) -> None:
        """Whoever has finished is not told so as long as something of it is on its way to storage."""
        if self._site is not None and self._storage is not None:
            at_rest = self._site.desk.at_rest
            at_rest.clear() if self._storage.unfinished(writes=self._ranks.writes) else at_rest.set()

    # ---- levels

    def _hash(self, site: Site) -> None:
        """Whatever was published since the last look."""
        for arena in site.mine():
            newest = max((stamp.sequence for _, stamp in arena.stamps()), default=0)
            if newest and self._hashed.get(arena.id) != newest:
                self._hashed[arena.id] = newest
                site.saving.hash(arena)
        steps = site.steps(site.generation)
        if steps:
            self._first_saved.setdefault(site.generation, steps[0])

    def _whole(self, site: Site) -> int:
        """The newest step of this generation that all nodes hold; -1: none. What the leader said of another one is none."""
        first, steps, whole = self._first_saved.get(site.generation), site.steps(site.generation), site.everywhere.whole
        return whole if first is not None and steps and first <= whole <= steps[-1] else -1

    def _level(self, site: Site) -> None:
        keep, boundary, whole = site.keep, site.order.part(Boundary), self._whole(site)
        runs = site.order.generation == site.generation
        for arena in site.mine():
            word(arena, "whole", whole + 1)
            word(arena, "committed", keep.committed + 1)
            word(arena, "mtbf_s", max(0, keep.mtbf_s))
            if runs:  # or else they are about to be stopped: who waits at a boundary must not go on
                word(arena, "armed", boundary.plan)
                word(arena, "go", boundary.plan if boundary.go else 0)

    def _supersede(self, site: Site, copying: Copying) -> None:
        """Older arenas are read until a step of this generation is whole everywhere; copies of shares, until one is safe."""
        if self._whole(site) < 0 or self._launcher.vault is None:
            return
        for arena in site.arenas.superseded(site.generation, self._whole(site)):
            if arena.generation < site.generation or not site.wanted(arena):
                self._launcher.vault.forget(arena)
        # Newer copies go into the memory of those of the same world, so these take no room from them.
        none_safe = copying.spread and site.keep.replica_to and copying.safe.generation < site.generation
        world = site.launch.world_size if site.launch is not None else 0
        for arena in site.arenas:
            if none_safe and arena.fetched is None and arena.owner.world == world:
                continue
            stamps = arena.stamps()
            # Objects alone take no room to speak of; the newer ones, which may still be on their way, take their place.
            oldest = site.generation - (arena.kind == OBJECTS)
            if arena.kind != MEMORY and stamps and max(stamp.generation for _, stamp in stamps) < oldest:
                self._launcher.vault.forget(arena)

    # ---- what is told

    def _end(self, site: Site, storage: Storage) -> None:
        """A generation's workers are gone: what is left of them."""
        for generation in self._ended:
            if generation <= self._told_ended:
                continue
            self._told_ended = generation
            steps = site.steps(generation)
            self._ranks.ended(site, generation)
            cut = site.cut(State(generation, steps[-1])) if steps else b""
            held = steps[-HELD_MAX:], 0, site.copied(generation)[:16], cut
            site.desk.send(ReportHeld(site.desk.node, generation, *held))
            state = State(generation, self._orderable(site, steps))
            keeping = site.keeping
            if state.step >= 0 and state > site.committed and generation in self._failed and keeping and keeping.url:
                storage.hold(state, HOLD_S)
        self._ended.clear()

    @staticmethod
    def _orderable(site: Site, steps: tuple[int, ...]) -> int:
        """The one step of these that the leader would order; -1: none. Only this is kept: who runs next needs a slot, too."""
        if not steps:
            return -1
        # Where each node has all of the state the newest is whole; else what all hold, if the leader has said so.
        spread = site.spread != 1 and site.launch is not None and site.launch.nodes > 1
        return site.everywhere.whole if spread and site.everywhere.whole in steps else steps[-1]

    def _tell(self, site: Site, storage: Storage, copying: Copying) -> None:
        if self._offered != site.saving.address:
            self._offered = site.saving.address
            site.desk.send(OfferReplica(site.desk.node, self._offered))
        if self._ranks.settled(site) and site.generation == self._ranks.generation:
            held = site.steps(site.generation)
            written = tuple(storage.written)
            before = max((one for one in self._wrote if one < site.generation), default=0)
            self._wrote = {before: self._wrote.get(before, False), site.generation: self._ranks.writes}
            told = KeptBeat(
                site.generation, self._ranks.writes, copying.copied, held[-HELD_MAX:], written, *copying.told,
                before, self._wrote[before],
            )  # fmt: skip
            site.desk.tell(told)
            if written != self._told_written:
                self._told_written = written
                site.desk.hurry()


def _words(body: dict[str, Any]) -> str:
    """A rank's message for people as plain text; empty if the packet holds no text."""
    words = body.get("words")
    return plain(words, TEXT_MAX) if isinstance(words, str) else ""

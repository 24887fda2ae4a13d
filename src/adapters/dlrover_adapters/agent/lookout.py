"""The duty of seeing: what workers write, what the kernel says and whom the OOM killer took, told to the leader as evidence.

One thread looks at everything every `LOOK_S`, and at once when a worker has died: so reading and matching are off the agent's
loop, the cost of a look does not grow with what workers write between two of them, and nothing has to be woken by a line. The
thread reads and matches; what that amounts to is decided on the loop (`Sightings`), where deaths are heard too. Whatever goes
wrong here costs evidence and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import structlog

from dlrover_core.diagnosis.evidence import CGROUP, KERNEL, LOG
from dlrover_core.diagnosis.sightings import Sighting, Sightings, worth_telling
from dlrover_core.diagnosis.signatures import Table, table
from dlrover_core.job.evidence import ReportEvidence
from dlrover_core.job.orders import Order
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.launcher import Notice, WorkerExit, WorkerStep

from . import cgroup, kernel_log
from .cgroup import SIGKILLED, Killed, Kills, Memory, MemoryGroup
from .kernel_log import KernelLog, Ours
from .log_watch import Known, Output, Tail

if TYPE_CHECKING:
    from dlrover_core.diagnosis.matching import Hit, Matcher

    from .last_words import LastWords

LOOK_S = 0.5
DUE_S = 2.0
"""How often it is looked whether something that had to wait may be told."""

READ_BYTES_MAX = 1024 * 1024
"""What one look reads of all output: a flood of lines costs a bounded share of a core, and its end is what counts."""

FIRST_S = 0.2
"""A death waits at most so long for what else was seen of it, so that the leader knows why before it acts: mostly 1 ms."""

CLOSE_S = 5.0
PIDS_MAX = 1024
OOM, HOST_OOM = "cgroup.oom", "host.oom"

_log = structlog.get_logger(__name__)


class _Found(NamedTuple):
    """What one look has found."""

    sightings: list[Sighting]
    memory: Memory | None


class Lookout:
    """The duty, and the `OutputWatch` of its launcher. ``extra``: a user's own signatures.

    ``kernel``: the file of the kernel's log, empty for none. ``group``: our memory group, if it counts kills.
    """

    def __init__(self, extra: str = "", *, kernel: str = "", group: MemoryGroup | None = None) -> None:
        self._extra, self._kernel_path, self._group = extra, kernel, group
        self._sightings, self._kills = Sightings(), Kills()
        self._desk: Desk | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._orders: deque[tuple[str, Output | None]] = deque()
        self._wake, self._ended, self._steps = threading.Event(), False, False
        self._looked, self._begun, self._done = threading.Condition(), 0, 0
        self._table: Table | None = None
        # The thread's own.
        self._tails: dict[str, Tail] = {}
        self._ranks: dict[int, int] = {}
        self._kernel: KernelLog | None = None
        self._ours = Ours()
        self._matcher: Matcher | None = None
        self._skipped_told = False
        self._memory_told: Memory | None = None

    @classmethod
    def of_this_machine(cls, extra: str = "") -> Lookout:
        """With whatever sources there are here."""
        return cls(extra, kernel=kernel_log.chosen_path(dict(os.environ)), group=cgroup.found())

    # ---- the launcher's side

    def follow(self, output: Output) -> None:
        """Read it from now on, if anybody does."""
        if not self._ended:
            self._orders.append((output.path, output))
            self._wake.set()  # a worker may die, and its file vanish, before the next look

    def finish(self, path: str) -> None:
        """Read the rest now."""
        if not self._ended:
            self._orders.append((path, None))
            self._wake.set()

    def known(self, exit_code: int, words: LastWords) -> Known:
        """By the table, here and not where all nodes' deaths arrive; unless it is not at hand yet: making it takes too long."""
        self._look_now()
        if self._matcher is None or self._table is None:
            return Known()
        from dlrover_core.diagnosis.classify import of_exit, place_of

        found = of_exit(self._table, exit_code, words.error, words.tail)
        return Known(found.signature, place_of(words.trace) or found.place)

    def _look_now(self) -> None:
        """Wait until everything was looked at once more, and what was found is on its way to the loop, before what we return."""
        with self._looked:
            next_one = self._begun + 1
            self._wake.set()
            self._looked.wait_for(lambda: self._done >= next_one or self._ended, FIRST_S)

    # ---- the agent's side

    async def run(self, desk: Desk) -> None:
        """Look, until cancelled."""
        self._desk, self._loop = desk, asyncio.get_running_loop()
        thread = threading.Thread(target=self._watch, name="lookout", daemon=True)
        thread.start()
        try:
            while True:
                await asyncio.sleep(DUE_S)
                now = _now_us()
                self._tell(self._sightings.due(now), now)
                self._tell_killed(self._kills.due(now), now)
        finally:
            self._ended = True
            self._wake.set()
            await asyncio.shield(asyncio.to_thread(thread.join, CLOSE_S))

    def ordered(self, order: Order) -> None:
        """An order says nothing about failures."""

    def noticed(self, notice: Notice) -> None:
        """A worker that died by itself: its own words are told now. With the first step there is time to get ready for that."""
        if isinstance(notice, WorkerStep) and notice.first and not self._steps:
            self._steps = True
            self._wake.set()
        if not isinstance(notice, WorkerExit) or notice.exit_code == 0 or (notice.asked and not notice.error):
            return
        now = _now_us()
        self._tell(self._sightings.died(notice.generation, notice.rank, now), now)
        if notice.exit_code == SIGKILLED and not notice.asked:
            self._tell_killed(self._kills.died(notice.generation, notice.rank, now), now)

    def _found(self, found: _Found) -> None:
        """On the loop: what the thread has found."""
        now = _now_us()
        for one in found.sightings:
            self._tell(self._sightings.seen(one, now), now)
        if found.memory is not None:
            self._tell_killed(self._kills.counted(found.memory, now), now)

    def _tell_killed(self, killed: list[Killed], now: int) -> None:
        for one in killed:
            known = self._table.get(OOM if one.limit else HOST_OOM) if self._table is not None else None
            if known is not None:
                whose = f"rank {one.rank}" if one.rank >= 0 else f"{one.processes} that are no workers"
                why = "a limit of its memory group was reached" if one.limit else "no limit in sight: the host ran out"
                text = f"the OOM killer took {whose}: {why}"
                generation = one.generation or (self._desk.generation if self._desk is not None else 0)
                seen = Sighting(known, CGROUP, text, now, one.rank, generation)
                self._tell(self._sightings.seen(seen, now), now)

    def _tell(self, sightings: list[Sighting], now: int) -> None:
        assert self._desk is not None, "nothing is found before run()"
        for one in sightings:
            self._desk.send(
                ReportEvidence(
                    self._desk.node,
                    one.source,
                    one.signature.id,
                    one.text,
                    one.rank,
                    one.generation,
                    max(0, now - one.at),
                    one.place,
                    one.subject,
                )
            )

    # ---- in the thread

    def _watch(self) -> None:
        try:
            self._open()
            while not self._ended:
                self._wake.wait(LOOK_S)
                self._wake.clear()
                with self._looked:
                    self._begun += 1
                self._look()
                with self._looked:
                    self._done = self._begun
                    self._looked.notify_all()
        except Exception as error:  # noqa: BLE001  # whatever it is, training goes on without evidence
            _log.warning("nothing is watched any more", error=f"{type(error).__name__}: {error}")
        finally:
            with self._looked:
                self._ended = True
                self._looked.notify_all()
            for tail in self._tails.values():
                tail.close()
            if self._kernel is not None:
                self._kernel.close()

    def _open(self) -> None:
        self._table = table(self._extra)
        if self._kernel_path:
            try:
                self._kernel = KernelLog(self._kernel_path)
            except OSError as error:
                _log.debug("the kernel's log is not read", path=self._kernel_path, reason=str(error))
        self._ours = Ours(self._group.name if self._group is not None else "", numbers=kernel_log.sees_all_pids())

    def _look(self) -> None:
        """Everything once: output, so that the dead have spoken before the kernel's reasons; then the rest."""
        if self._steps:
            self._its_matcher()
        sightings = self._output()
        now = _now_us()
        if self._kernel is not None:
            try:
                sightings += self._kernel_lines(self._kernel, now)
            except OSError as error:
                _log.warning("the kernel's log is not read any more", path=self._kernel.path, reason=str(error))
                self._kernel.close()
                self._kernel = None
        memory = None
        if self._group is not None:
            with contextlib.suppress(OSError, ValueError):
                memory = self._group.look()
        self._hand_over(_Found(sightings, memory))

    def _hand_over(self, found: _Found) -> None:
        if not found.sightings and (found.memory is None or found.memory == self._memory_told):
            return
        self._memory_told = found.memory
        assert self._loop is not None, "the thread is started on a loop"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to be told
            self._loop.call_soon_threadsafe(self._found, found)

    def _output(self) -> list[Sighting]:
        ended = self._obey()
        share = max(READ_BYTES_MAX // max(1, len(self._tails)), 64 * 1024)
        found: list[Sighting] = []
        for tail in list(self._tails.values()):
            last = tail.output.path in ended
            try:
                text, age_us = tail.read(READ_BYTES_MAX if last else share, last=last)
            except OSError as error:
                _log.debug("output cannot be read", path=tail.output.path, reason=str(error))
                text, age_us, last = "", 0, True
            if text:
                output = tail.output
                found += self._matched(text, LOG, _now_us() - age_us, output.rank, output.generation)
            if tail.skipped and not self._skipped_told:
                self._skipped_told = True
                _log.info("workers write more than is worth reading: some of it is not searched", path=tail.output.path)
            if last:
                tail.close()
                del self._tails[tail.output.path]
        return found

    def _obey(self) -> set[str]:
        """Open what is to be followed; returned are the files whose writers are dead."""
        ended: set[str] = set()
        while self._orders:
            path, output = self._orders.popleft()
            if output is None:
                ended.add(path)
            elif path != os.devnull and path not in self._tails:
                with contextlib.suppress(OSError):
                    self._tails[path] = Tail(output)
                    self._ranks[output.pid] = output.rank
        while len(self._ranks) > PIDS_MAX:
            del self._ranks[next(iter(self._ranks))]
        return ended

    def _kernel_lines(self, kernel: KernelLog, now: int) -> list[Sighting]:
        found: list[Sighting] = []
        generation = self._desk.generation if self._desk is not None else 0
        for line in kernel.read(now):
            if self._ours.keeps(line.text, self._ranks):
                rank = self._ours.rank(line.text, self._ranks)
                found += self._matched(line.text, KERNEL, line.at_us, rank, generation)
        return found

    def _matched(self, text: str, source: str, at: int, rank: int, generation: int) -> list[Sighting]:
        """What the table knows in it: one sighting of each kind, with its count and the newest line."""
        kinds: dict[tuple[str, str], tuple[Hit, int]] = {}
        for hit in self._its_matcher().scan(text, source):
            if worth_telling(hit.signature):
                key = (hit.signature.id, hit.subject)
                kinds[key] = (hit, kinds[key][1] + 1 if key in kinds else 1)
        return [
            Sighting(hit.signature, source, hit.line, at, rank, generation, hit.subject, times=times)
            for hit, times in kinds.values()
        ]

    def _its_matcher(self) -> Matcher:
        """Made here and not before: an agent's start should be fast, and patterns take a while. `classify` has the same one."""
        if self._matcher is None:
            from dlrover_core.diagnosis import classify  # noqa: F401  # so that `known` finds it loaded
            from dlrover_core.diagnosis.matching import matcher

            assert self._table is not None, "_open comes first"
            self._matcher = matcher(self._table)
        return self._matcher


def _now_us() -> int:
    return time.monotonic_ns() // 1000

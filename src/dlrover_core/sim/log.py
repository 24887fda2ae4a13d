"""The log of a simulated job: it takes what the newest leader appends, and fails as logs do.

What has landed is folded into a follower of its own, record by record, where somebody wants to see every record or a standby
is to be warm; a new leader's state is folded from the newest snapshot and the batches after it, and must be the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dlrover_core.job.state import CODEC, FOLD, JobState
from dlrover_core.kernel.events import Batch, Record
from dlrover_core.kernel.state import digest, unpack
from dlrover_core.sim.clock import Clock
from dlrover_core.sim.run import Broken, Watcher, kept
from dlrover_core.sim.scenario import Scenario
from dlrover_core.spec import us

# As in runtime/pipeline.py; tests/unit/test_sim_rules.py compares them.
RETRY_S = (0.05, 0.2, 0.5, 1.0, 2.0)
LANDED, ALREADY, DOWN, FENCED = "landed", "already there", "unavailable", "fenced"


@dataclass(slots=True)
class Troubles:
    """What befalls the next appends, each once; and until when there is no log at all."""

    ack_lost: int = 0
    slow_us: int = 0
    fenced: int = 0
    crash_before: int = 0
    crash_after: int = 0
    crash_for_us: int = 0
    down_until: int = -1
    why: str = ""


class Leader(Protocol):
    """Who appends."""

    token: int

    @property
    def state(self) -> JobState:
        """The working state."""
        ...

    def appended(self, batch: Batch, outcome: str) -> None:
        """What became of an append."""
        ...


class Site(Protocol):
    """What the log needs of a run."""

    clock: Clock
    scenario: Scenario

    def lead(self, after_us: int, why: str) -> None:
        """Another master leads after a while."""
        ...

    def crash(self, after_us: int) -> bool:
        """The leader's process is killed."""
        ...

    def durable(self, records: Sequence[Record], state: JobState) -> None:
        """Records have landed."""
        ...


class Log:
    """All batches of one job. ``token`` is that of the newest leadership."""

    def __init__(self, sim: Site, watch: tuple[Watcher, ...], every: int, *, keep: bool, follow: bool) -> None:
        self._sim, self._clock = sim, sim.clock
        self._append_us = us(sim.scenario.append_s)
        self.token = 0
        self.seq = 0
        self.at = 0
        self.troubles = Troubles()
        self._hash = hashlib.blake2b(digest_size=16)
        self._snapshot: bytes | None = None
        self._payloads: list[bytes] = []
        self._last: tuple[int, int] = (0, 0)
        self._in_flight: tuple[Leader, Batch, int] | None = None
        self.records: list[Record] = []
        self._keep, self._watch, self._every = keep, watch, max(1, every)
        self._batches = 0
        self.follower: JobState | None = FOLD.new() if watch or follow else None

    @property
    def hash(self) -> str:
        """Of all that was appended."""
        return self._hash.hexdigest()

    def append(self, leader: Leader, batch: Batch) -> None:
        """Append, and tell the leader how that went when it is known."""
        troubles, now = self.troubles, self._clock.now
        took_us = self._append_us
        if troubles.fenced:
            troubles.fenced -= 1
            self._sim.lead(0, "somebody else takes the lead")
            self._clock.later(took_us, 0, leader.appended, batch, FENCED)
            return
        if leader.token < self.token:
            self._clock.later(took_us, 0, leader.appended, batch, FENCED)
            return
        if troubles.crash_before:
            troubles.crash_before -= 1
            self._sim.crash(troubles.crash_for_us)
            return
        if now < troubles.down_until:
            self._clock.later(took_us, 0, leader.appended, batch, DOWN)
            return
        if self._last == (batch.token, batch.counter):
            self._clock.later(took_us, 0, leader.appended, batch, ALREADY)
            return
        if troubles.crash_after:
            troubles.crash_after -= 1
            self._land(leader, batch)
            self._sim.crash(troubles.crash_for_us)
            return
        if troubles.ack_lost:
            troubles.ack_lost -= 1
            self._land(leader, batch)
            self._clock.later(took_us, 0, leader.appended, batch, DOWN)
            return
        took_us, troubles.slow_us = took_us + troubles.slow_us, 0
        self._in_flight = (leader, batch, now + took_us // 2)
        self._clock.later(took_us, 0, self._acknowledged, leader, batch)

    def _acknowledged(self, leader: Leader, batch: Batch) -> None:
        if self._in_flight is None or self._in_flight[1] is not batch:
            return
        self._in_flight = None
        if self._clock.now < self.troubles.down_until:
            leader.appended(batch, DOWN)
        elif leader.token < self.token:
            leader.appended(batch, FENCED)
        else:
            self._land(leader, batch)
            leader.appended(batch, LANDED)

    def crashed(self) -> None:
        """The leader is dead. What it was appending has landed, or not."""
        if self._in_flight is not None:
            leader, batch, lands_at = self._in_flight
            self._in_flight = None
            if self._clock.now >= lands_at and self._clock.now >= self.troubles.down_until:
                self._land(leader, batch)

    def _land(self, leader: Leader, batch: Batch) -> None:
        if batch.first_seq != self.seq + 1:
            raise Broken(f"the log's head is {self.seq}, its leader appends from {batch.first_seq} on")
        self._last = (batch.token, batch.counter)
        self.seq, self.at = batch.last_seq, batch.records[-1].at
        self._hash.update(batch.payload)
        self._payloads.append(batch.payload)
        self._batches += 1
        if self.follower is not None:
            self._follow(batch)
        if self._keep:
            self.records.extend(batch.records)
        self._sim.durable(batch.records, leader.state)

    def _follow(self, batch: Batch) -> None:
        """Fold what the bytes say, not what the leader meant."""
        follower, watch = self.follower, self._watch
        assert follower is not None
        seen = bool(watch) and self._batches % self._every == 0
        for record in CODEC.decode(batch.payload).records:
            FOLD.apply(follower, record)
            if seen:
                for watcher in watch:
                    kept(watcher, follower, record)

    def snapshot(self, state: bytes) -> None:
        """A snapshot of all that has landed: what came before need not be folded again."""
        self._snapshot = state
        self._payloads.clear()

    def restored(self) -> JobState:
        """The state for the next leader. Raises `Broken` where a standby that followed has another one."""
        state = FOLD.new() if self._snapshot is None else unpack(JobState, self._snapshot)
        for payload in self._payloads:
            FOLD.fold(CODEC.decode(payload).records, state)
        if self.follower is not None and digest(state) != digest(self.follower):
            raise Broken(f"the standby's state is not what the log folds to at record {self.seq}")
        return state

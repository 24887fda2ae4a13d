"""One node's share of a leased dataset: what its agent hands out to workers, takes back from dead ones, and tells the leader.

Of what the node holds by its order, a position is *to do*, in the *hands* of a worker, *acknowledged*, or *given back*
because the leader has asked for it. The node keeps an acknowledgement, and a position that it gave back, until its order
shows that the leader knows. So nothing is lost with a leader, and no position is handed out after it was given back.
With ``lineage="model"`` all of it begins anew with each generation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from dlrover_core.data.ranges import Ranges, Span
from dlrover_core.job.leases import KILO, RATE_MAX, SPANS_MAX, LeaseTold, spans_of
from dlrover_core.job.shards import MODEL_LEASE
from dlrover_core.runtime.leasing import Ask

LEASE_S = 20.0
"""A node wants to hold work for so long at its own pace. It asks again when half is left: at most once in half of this."""
RATE_S = 10.0
"""The pace is measured over so many seconds."""
RATE_LEAST_S = 0.1
ACKS_JOINED = 256
"""So many acknowledgements are collected before they are joined to ranges."""


class Hand(NamedTuple):
    """Positions up to ``end`` that a worker has, by its session."""

    end: int
    session: Hashable


class Pace:
    """Samples that were used lately."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()
        self._began = -1.0

    def begin(self, now_s: float) -> None:
        """Something is used from now on; the first call counts."""
        self._began = now_s if self._began < 0 else self._began

    def count(self, samples: int, now_s: float) -> None:
        """So many were used."""
        second = int(now_s)
        if self._seconds and self._seconds[-1][0] == second:
            samples += self._seconds.pop()[1]
        self._seconds.append((second, samples))

    def rate(self, now_s: float) -> int:
        """Samples in 1,000 s; 0: none were used, as far as is remembered."""
        while self._seconds and self._seconds[0][0] < now_s - RATE_S:
            self._seconds.popleft()
        many = sum(samples for _, samples in self._seconds)
        for_s = min(max(now_s - self._began, RATE_LEAST_S), RATE_S)
        return min(int(many * KILO / for_s), RATE_MAX)


class NodeLeases:
    """One dataset. Sessions are whoever holds shards: any hashable name; one that is gone is never used again.

    ``finished``: all of it is used, wherever; ``shard``: the largest shard that a session has asked for. ``of_model``: its
    lineage is a model's; ``generation``: the one that it is leased to, as of `LeaseTold`.
    """

    def __init__(self, name: str) -> None:
        self.name, self.finished, self.shard = name, False, 1
        self.of_model, self.generation = False, 0
        self.sessions: set[Hashable] = set()
        self._pace = Pace()
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Nothing is held."""
        self._held, self._acked, self._yielded = Ranges(), Ranges(), Ranges()
        self._recall, self._size = 0, 1
        self._acks: list[Span] = []
        self._todo: deque[Span] = deque()
        self._left = 0
        self._hands: dict[int, Hand] = {}
        self._runs: dict[Hashable, int] = {}
        self._told: tuple[bytes, int, bool, int] = (b"", 0, False, 0)

    # ---- the leader's word

    def told(self, said: LeaseTold) -> None:
        """What an order says of this dataset."""
        news = (said.spans, said.recall, said.finished, said.generation)
        self.of_model = said.assignment == MODEL_LEASE
        if news == self._told:
            return
        if said.generation != self.generation:
            self._begin_anew()
            self.generation = said.generation
        self._told, self.finished, self._size = news, said.finished, said.size
        self._held = Ranges(spans_of(said.spans))
        if not said.recall:
            self._recall, self._yielded = 0, Ranges()
        elif said.recall != self._recall:
            self._recall, self._yielded = said.recall, Ranges()
            self._refill()
            asked, todo = Ranges(spans_of(said.recalled)).count, Ranges(self._todo)
            _, last = todo.take(todo.count - asked)
            self._yielded = Ranges(tuple(last)[-SPANS_MAX:])
        self._refill()

    # ---- workers

    def serves(self, generation: int) -> bool:
        """May workers of this generation draw, and do their words count?"""
        return not self.of_model or 0 < generation == self.generation

    def draw(self, session: Hashable, most: int, now_s: float) -> Span | None:
        """Hand the lowest positions out, of one epoch, ``most`` at most; None: there are none now.

        With ``lineage="model"``, those that follow on what the session had last: what a rank was trained on is saved with every
        state, and is to be few ranges.
        """
        self._pace.begin(now_s)
        if not self._todo:
            return None
        if self.of_model:
            self._bring_forward(session, most)
        first = self._todo.popleft()
        epoch_end = first.start - first.start % self._size + self._size
        taken = Span(first.start, min(first.end, epoch_end, first.start + most))
        if taken.end < first.end:
            self._todo.appendleft(Span(taken.end, first.end))
        self._left -= taken.end - taken.start
        self._hands[taken.start] = Hand(taken.end, session)
        if self.of_model:
            self._runs[session] = taken.end
        return taken

    def _bring_forward(self, session: Hashable, most: int) -> None:
        """Put the positions that a session goes on with first; where it cannot go on, the second half of the longest range."""
        at = self._runs.get(session, -1)
        place = next((n for n, span in enumerate(self._todo) if span.start == at), -1)
        if place < 0:
            place = max(range(len(self._todo)), key=lambda n: self._todo[n].end - self._todo[n].start)
            span = self._todo[place]
            half = (span.end - span.start) // (2 * most) * most
            if half and span.start in self._runs.values():  # another session goes on there
                self._todo[place] = Span(span.start, span.start + half)
                self._todo.appendleft(Span(span.start + half, span.end))
                return
        span = self._todo[place]
        del self._todo[place]
        self._todo.appendleft(span)

    def claim(self, span: Span, session: Hashable, now_s: float) -> bool:
        """A rank takes these, which a session has in hand; False: it has not, so others use them."""
        for start, hand in self._hands.items():
            if start <= span.start and span.end <= hand.end and hand.session == session:
                del self._hands[start]
                for left in (Span(start, span.start), Span(span.end, hand.end)):
                    if left.start < left.end:
                        self._hands[left.start] = Hand(left.end, session)
                self._used(span, now_s)
                return True
        return False

    def ack(self, span: Span, now_s: float) -> None:
        """These were used, whoever says so. What this node does not hold is not counted."""
        hand = self._hands.get(span.start)
        if hand is not None and hand.end >= span.end:
            del self._hands[span.start]
            if hand.end > span.end:
                self._hands[span.end] = hand
        elif not self._take_from_hands(span):
            return
        self._used(span, now_s)

    def _used(self, span: Span, now_s: float) -> None:
        self._pace.count(span.end - span.start, now_s)
        self._acks.append(span)
        if len(self._acks) >= ACKS_JOINED:
            self._join_acks()

    def _take_from_hands(self, span: Span) -> bool:
        """The same for positions of several shards, or of a worker that is gone: they are used once less. False: none is ours."""
        one = Ranges([span])
        if not one & self._held:
            return False
        for start, hand in list(self._hands.items()):
            rest = Ranges([(start, hand.end)]) - one
            if rest.count < hand.end - start:
                del self._hands[start]
                self._hands.update({left.start: Hand(left.end, hand.session) for left in rest})
        self._acks.append(span)
        self._refill()
        return True

    def returned(self, session: Hashable, spans: Iterable[Span]) -> None:
        """A worker has not used these, and does not want them: they are handed out again, once each."""
        back = Ranges(spans)
        for start, hand in list(self._hands.items()):
            had = Ranges([(start, hand.end)])
            if hand.session == session and had & back:
                del self._hands[start]
                self._hands.update({left.start: Hand(left.end, session) for left in had - back})
        self._refill()

    def gone(self, session: Hashable) -> Ranges:
        """A worker is no more: what it had is handed out again, and is returned: it may be used twice."""
        self.sessions.discard(session)
        self._runs.pop(session, None)
        had = Ranges((start, hand.end) for start, hand in self._hands.items() if hand.session == session)
        for span in [start for start, hand in self._hands.items() if hand.session == session]:
            del self._hands[span]
        had = had & self._held
        if had:
            self._refill()
        return had

    # ---- to the leader

    def ask(self, now_s: float, *, waiting: bool) -> Ask:
        """What the next heartbeat says; ``waiting``: a worker waits."""
        self._join_acks()
        rate = self._pace.rate(now_s)
        least = self.shard * len(self.sessions)
        target = max(2 * least, int(rate * LEASE_S / KILO))
        enough = not self.sessions or self.finished or 2 * self._left >= target
        aim = 0 if enough else target + sum(hand.end - start for start, hand in self._hands.items())
        acked = Ranges(tuple(self._acked)[:SPANS_MAX])
        return Ask(
            self.name,
            aim=aim,
            least=least,
            rate=rate,
            todo=self._left,
            idle=waiting and not self._todo and not self.finished,
            acked=acked.pack(),
            recall=self._recall,
            yielded=self._yielded.pack(),
            generation=self.generation,
        )

    @property
    def holds(self) -> bool:
        """Has the node positions that are not acknowledged?"""
        self._join_acks()
        return bool(self._held - self._acked)

    @property
    def acked(self) -> Ranges:
        """What its workers have used, as far as no order shows that the leader knows."""
        self._join_acks()
        return self._acked

    @property
    def answered(self) -> bool:
        """Is there an answer that the leader may not have?"""
        return bool(self._recall)

    def full(self, session: Hashable, most: int) -> bool:
        """Has a session ``most`` shards in hand?"""
        if len(self._hands) < most:
            return False
        return sum(hand.session == session for hand in self._hands.values()) >= most

    @property
    def left(self) -> int:
        """Positions that can be handed out now."""
        return self._left

    @property
    def in_hands(self) -> Ranges:
        """Positions that workers have."""
        return Ranges((start, hand.end) for start, hand in self._hands.items())

    # ---- inside

    def _join_acks(self) -> None:
        if self._acks:
            self._acked, self._acks = self._acked | Ranges(self._acks), []
        self._acked = self._acked & self._held

    def _refill(self) -> None:
        self._join_acks()
        self._fill(self._held - self._acked - self._yielded - self.in_hands)

    def _fill(self, todo: Iterable[Span]) -> None:
        self._todo = deque(todo)
        self._left = sum(end - start for start, end in self._todo)

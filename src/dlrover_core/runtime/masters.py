"""Whom an agent dials next, and after what pause.

Any master of a job is as good as another to begin with: who does not lead says who does. So an agent goes round the masters
that it knows, and pauses after each round, longer and longer. Whoever it is sent to is dialled at once, but only once on one
try: masters that send it back and forth cost it the same pauses as masters that are not there. A pause counts from when the
round began: one that itself took long, as with a standby that keeps agents while nobody leads, was pause enough.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from dlrover_core.runtime.messages import Goodbye

RETRY_FIRST_S, RETRY_MAX_S = 0.05, 2.0
LEARNT_MAX = 8
ADDRESS_CHARS_MAX = 300
# Longer than a standby keeps an agent that it can send nowhere.
ANSWER_S = 4.0


class Masters:
    """The masters that one agent knows: those it was told at its start, then those it was sent to, the newest few."""

    def __init__(self, listed: Sequence[str]) -> None:
        self._listed, self._learnt = list(dict.fromkeys(listed)), list[str]()
        self._index = self._rounds = self._left = 0
        self._began = 0.0
        self._sent_on = False
        self.address = self._listed[0]

    @property
    def known(self) -> list[str]:
        """All of them, in the order in which they are dialled."""
        return self._listed + self._learnt

    def answer_s(self, silence_s: float) -> float:
        """How long to wait for a first word: where there are others to ask, not as long as for the only one.

        Longer with every round, for all of them may be slow.
        """
        known = len(self.known)
        return silence_s if known == 1 else min(silence_s, ANSWER_S * 2.0 ** min(self._rounds, 10))

    def dials(self, now: float) -> None:
        """`address` is dialled now."""
        if self._left <= 0:
            self._began, self._left = now, len(self.known)

    def moved(self, address: str) -> None:
        """The master at ``address`` has the agent now, found beside the one that it had."""
        self._learn(address)
        self.address = address
        self._rounds = self._left = 0
        self._sent_on = False

    def lost(self, now: float, *, steady: bool, away: Goodbye | None, jitter_of: str, silent: bool = False) -> float:
        """A try is over: seconds to wait before `address`, which may be another one by now.

        ``steady``: a master had us for a while. ``away`` is its goodbye, if it said one: it may name whom to dial instead.
        ``silent``: it had left beats unanswered before, so it hung, and whoever comes in its place needs time: others are first.
        Pauses have a jitter that is the agent's own, drawn from ``jitter_of``.
        """
        dialled, jumped = self.address, self._sent_on
        self._sent_on = False
        sent_to = away.address if away is not None and len(away.address) <= ADDRESS_CHARS_MAX else ""
        if steady:
            self._rounds, self._left, jumped = 0, 0, False
            self._index = self.known.index(dialled) if dialled in self.known else self._index
        elif away is None and dialled in self._learnt:
            self._forget(dialled)
        if sent_to:
            self._learn(sent_to)
            self.address = sent_to
            if not jumped:
                self._sent_on = True
                return 0.0
            self._left = 0
        elif not steady or silent or away is not None:
            self._advance(dialled if jumped else "")
            self._left -= 1
        if steady or self._left > 0:
            # After a conversation at once to whoever leads now; only then with growing pauses.
            return 0.0
        self._rounds += 1
        return max(0.0, pause_s(self._rounds - 1, jitter_of) - (now - self._began))

    def _advance(self, failed: str) -> None:
        """The next one in turn, but not the one that we were sent to and that has just failed."""
        known = self.known
        for _ in known:
            self._index = (self._index + 1) % len(known)
            if known[self._index] != failed:
                break
        self.address = known[self._index]

    def _learn(self, address: str) -> None:
        if address in self._listed:
            return
        if address in self._learnt:
            self._forget(address)
        elif len(self._learnt) == LEARNT_MAX:
            self._forget(self._learnt[0])
        self._learnt.append(address)

    def _forget(self, address: str) -> None:
        at = len(self._listed) + self._learnt.index(address)
        self._learnt.remove(address)
        if at <= self._index:
            self._index -= 1


def pause_s(attempt: int, jitter_of: str) -> float:
    """The pause after so many rounds in vain; its jitter is drawn from ``jitter_of``."""
    jitter = zlib.crc32(f"{jitter_of}:{attempt}".encode()) / 2**32
    return min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(attempt, 10)) * (0.5 + jitter / 2)

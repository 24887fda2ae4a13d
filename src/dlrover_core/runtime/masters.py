"""Which master an agent dials next, and after what pause.

Any master of a job will do at first, because a standby names the leader. So an agent goes round the masters that it knows,
and pauses after each round, longer and longer. A master that it is sent to is dialled at once, but only once in one try:
masters that send an agent back and forth cost it the same pauses as masters that are not there. A pause counts from the
start of the round: a long round, as at a standby that keeps agents while no master leads, was pause enough.

Masters may move: the process that started an agent may name them anew at any time. The new ones are dialled then, at once
if no master has the agent. Which master is to be believed is decided elsewhere: a lower fencing token is refused as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Sequence

from dlrover_core.errors import SpecError
from dlrover_core.runtime.messages import Goodbye
from dlrover_core.runtime.within import within

RETRY_FIRST_S, RETRY_MAX_S = 0.05, 2.0
LISTED_MAX, LEARNT_MAX = 16, 8
ADDRESS_CHARS_MAX = 300
# Longer than a standby keeps an agent while no master leads.
ANSWER_S = 4.0


class Masters:
    """The masters that one agent knows: those named at its start, and the newest few that it was sent to."""

    def __init__(self, listed: Sequence[str]) -> None:
        self._listed, self._learnt = list(dict.fromkeys(listed)), list[str]()
        self._index = self._rounds = self._left = 0
        self._began = 0.0
        self._sent_on = False
        self.address = self._listed[0]
        self.named = asyncio.Event()
        """Set while masters were named that are yet to be dialled."""

    def name(self, listed: Sequence[str], *, served: bool) -> None:
        """Take these masters in place of the known ones. ``served``: the one at `address` has the agent, and keeps it.

        Raises `SpecError` for an invalid list; nothing has changed then.
        """
        if not listed or len(listed) > LISTED_MAX:
            raise SpecError("masters", f"1 to {LISTED_MAX} addresses are a list of masters, not {len(listed)}")
        wrong = [one for one in listed if not one or len(one) > ADDRESS_CHARS_MAX]
        if wrong:
            raise SpecError("masters", f"{wrong[0][:ADDRESS_CHARS_MAX]!r} is no address of a master")
        self._listed = list(dict.fromkeys(listed))
        self._learnt = [one for one in self._learnt if one not in self._listed]
        self._index = self._rounds = self._left = 0
        self._sent_on = False
        if served:
            self._learn(self.address)
            return
        self.address = self._listed[0]
        self.named.set()

    async def rest(self, seconds: float) -> None:
        """Pause before the next try, or until masters are named."""
        if seconds:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(seconds, self.named.wait())

    @property
    def known(self) -> list[str]:
        """All masters, in the order in which they are dialled."""
        return self._listed + self._learnt

    def answer_s(self, silence_s: float) -> float:
        """How long to wait for a first answer: less where there are other masters to ask.

        It grows with every round, because all masters may be slow.
        """
        known = len(self.known)
        return silence_s if known == 1 else min(silence_s, ANSWER_S * 2.0 ** min(self._rounds, 10))

    def dials(self, now: float) -> None:
        """`address` is dialled now."""
        if self._left <= 0:
            self._began, self._left = now, len(self.known)

    def moved(self, address: str) -> None:
        """The master at ``address`` has the agent now, found while another one was silent."""
        self._learn(address)
        self.address = address
        self._rounds = self._left = 0
        self._sent_on = False

    def lost(self, now: float, *, steady: bool, away: Goodbye | None, jitter_of: str, silent: bool = False) -> float:
        """A try is over: seconds to wait before dialling `address`, which may have changed.

        steady:    a master had the agent for a while
        away:      the goodbye of the master, which may name another one; None: it said none
        silent:    it had left heartbeats unanswered, so it hung, and its successor needs time: other masters are tried
                   first
        jitter_of: seed of the pause's jitter, different for each agent
        """
        if self.named.is_set():  # named during the try: `address` is new
            self.named.clear()
            return 0.0
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
            # After a conversation, dial the new leader at once; later with growing pauses.
            return 0.0
        self._rounds += 1
        return max(0.0, pause_s(self._rounds - 1, jitter_of) - (now - self._began))

    def _advance(self, failed: str) -> None:
        """Go to the next master in turn, past the one that the agent was sent to and that has just failed."""
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
    """The pause after so many rounds in vain; its jitter follows from ``jitter_of``."""
    jitter = zlib.crc32(f"{jitter_of}:{attempt}".encode()) / 2**32
    return min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(attempt, 10)) * (0.5 + jitter / 2)

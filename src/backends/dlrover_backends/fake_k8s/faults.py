"""Faults that the fake API server plays on request: refusals, lost answers, old lists, watches that end or freeze.

A `Fault` says which requests it meets and what happens to them. `Faults.add` arms one; `Faults.seeded` draws one for
some of all requests, from a seed.
"""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

READS = frozenset({"get", "list", "watch"})
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


class What(Enum):
    """What a fault does to a request."""

    ERROR = "error"  # an answer with `code`, instead of doing it
    CONFLICT = "conflict"  # 409 as for a stale version, instead of doing it
    THROTTLED = "throttled"  # 429 with Retry-After as text, instead of doing it
    EXPIRED = "expired"  # 410: an ERROR event of a watch, an HTTP answer of a list
    LOST = "lost"  # done, and the connection cut without an answer
    REFUSED = "refused"  # the connection cut, and nothing done
    SLOW = "slow"  # answered after `delay_s`
    STALE = "stale"  # a list or get from `behind` writes ago, if it asked for any version: a consistent one never is
    CUT = "cut"  # a watch whose connection breaks after `events` events
    FROZEN = "frozen"  # a watch that sends nothing after `events` events, and stays open
    ENDED = "ended"  # a watch that ends cleanly after `events` events


@dataclass
class Fault:
    """One fault and the requests that it meets.

    Attributes:
        what: what happens.
        verbs: verbs that it meets; empty for all that it can happen to.
        resource: plural name, as a pattern.
        name: object's name, as a pattern; a request without a name is ''.
        user: user's name, as a pattern.
        skip: how many matching requests pass before.
        times: how many requests it happens to; None for all.
        code: HTTP status of an ERROR.
        retry_after_s: the Retry-After of an ERROR, None for none; and of THROTTLED, None for 1.
        delay_s: how long a SLOW answer takes.
        late: whether a SLOW request is done at once, and only its answer is under way for so long.
        behind: how many writes ago a STALE answer was true.
        events: how many events a watch sends before CUT, FROZEN or ENDED.
    """

    what: What
    verbs: frozenset[str] = frozenset()
    resource: str = "*"
    name: str = "*"
    user: str = "*"
    skip: int = 0
    times: int | None = 1
    code: int = 500
    retry_after_s: int | None = None
    delay_s: float = 0.1
    late: bool = False
    behind: int = 1
    events: int = 0

    def meets(self, verb: str, resource: str, name: str, user: str) -> bool:
        """Whether it would happen to this request."""
        return (
            verb in (self.verbs or _POSSIBLE[self.what])
            and fnmatch.fnmatchcase(resource, self.resource)
            and fnmatch.fnmatchcase(name, self.name)
            and fnmatch.fnmatchcase(user, self.user)
        )


_POSSIBLE: dict[What, frozenset[str]] = {
    What.ERROR: READS | WRITES,
    What.CONFLICT: frozenset({"update", "patch"}),
    What.THROTTLED: READS | WRITES,
    What.EXPIRED: frozenset({"watch", "list"}),
    What.LOST: WRITES,
    What.REFUSED: READS | WRITES,
    What.SLOW: READS | WRITES,
    What.STALE: frozenset({"list", "get"}),
    What.CUT: frozenset({"watch"}),
    What.FROZEN: frozenset({"watch"}),
    What.ENDED: frozenset({"watch"}),
}


class Faults:
    """Faults of one server: those armed, and those drawn from a seed."""

    def __init__(self) -> None:
        self._armed: list[Fault] = []
        self._drawn: _Drawn | None = None
        self.happened: list[tuple[str, str, str, str]] = []  # what, verb, resource, name

    def add(self, fault: Fault) -> Fault:
        """Arm a fault; later ones wait for earlier ones that meet the same request."""
        self._armed.append(fault)
        return fault

    def clear(self) -> None:
        """Disarm everything, and draw no more."""
        self._armed.clear()
        self._drawn = None

    def seeded(self, seed: int, rates: Mapping[What, float], *, user: str = "*", most: int = 1000) -> None:
        """Draw faults for requests to come.

        Args:
            seed: of the drawing.
            rates: probability of each fault per request that it can happen to; they sum to at most 1.
            user: whose requests, as a pattern.
            most: how many faults at most.
        """
        if sum(rates.values()) > 1:
            raise ValueError(f"rates sum to {sum(rates.values())}: at most 1 is possible")
        self._drawn = _Drawn(random.Random(seed), dict(rates), user, most)

    def meet(self, verb: str, resource: str, name: str, user: str) -> Fault | None:
        """The fault that happens to this request, if one does."""
        fault = self._next(verb, resource, name, user)
        if fault is None and self._drawn is not None:
            fault = self._drawn.meet(verb, user)
        if fault is not None:
            self.happened.append((fault.what.value, verb, resource, name))
        return fault

    def _next(self, verb: str, resource: str, name: str, user: str) -> Fault | None:
        for fault in self._armed:
            if not fault.meets(verb, resource, name, user):
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            if fault.times is not None:
                fault.times -= 1
                if fault.times == 0:
                    self._armed.remove(fault)
            return fault
        return None


@dataclass
class _Drawn:
    draw: random.Random
    rates: dict[What, float]
    user: str
    left: int

    def meet(self, verb: str, user: str) -> Fault | None:
        if not self.left or not fnmatch.fnmatchcase(user, self.user):
            return None
        dice = self.draw.random()
        details = self.draw.random()
        for what, rate in self.rates.items():
            if dice >= rate:
                dice -= rate
                continue
            if verb not in _POSSIBLE[what]:
                return None
            self.left -= 1
            codes = (500, 503, 504)
            return Fault(
                what,
                code=codes[int(details * len(codes))],
                retry_after_s=0 if what is What.THROTTLED else None,
                delay_s=0.05 + 0.2 * details,
                late=details > 0.5,
                behind=1 + int(details * 5),
                events=int(details * 4),
            )
        return None

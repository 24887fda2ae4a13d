"""What of the things a node sees is worth telling its leader, and when: bounded in number, and nothing told twice in vain.

A failing program repeats itself, and so do all its ranks. Of each rank and signature the first sighting is told at once and the
rest are counted; the count goes along when it is told again, because that is still going on or because its rank has died. What
is only a consequence of somebody else's failure waits for the death of its own rank: while the rank lives it says nothing, and
with the rank's last lines the leader often knows it already, so one of each kind is enough for a whole node.

Invariant: in no `MINUTE_S` are more than `TOLD_MAX` told, and some of them are kept for deaths, which are what it is all for.
What finds no room waits, and is told with its count when there is some. Time is microseconds of any steady clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from dlrover_core.diagnosis.evidence import CASC, CLASSES
from dlrover_core.diagnosis.signatures import Signature

SECOND_US = 1_000_000
MINUTE_S = 60.0
TOLD_MAX = 20
FOR_DEATHS = 8
"""Of those, so many are for the words of the dead."""

AGAIN_S = 240.0
"""What goes on is told again after this long: a leader looks ten minutes back."""

KINDS_MAX = 512
DEAD_MAX = 4096
TEXT_MAX = 480


class Sighting(NamedTuple):
    """Something that the table knows, seen at least so many ``times``, the last time at ``at``; ``rank`` -1: of no one worker."""

    signature: Signature
    source: str
    text: str
    at: int
    rank: int = -1
    generation: int = 0
    subject: str = ""
    place: str = ""
    times: int = 1


_Key = tuple[int, int, str, str, str]


@dataclass(slots=True)
class _Kind:
    """One signature of one rank: the newest sighting, how many were not told yet, and when it was told last."""

    newest: Sighting
    untold: int = 0
    total: int = 0
    told_at: int | None = None


def worth_telling(signature: Signature) -> bool:
    """Does it ever say anything about a failure? What is to be recorded only and has no class does not."""
    return signature.verdict in CLASSES


class Sightings:
    """One node's. Every method returns what is to be told now, oldest kind first."""

    def __init__(self) -> None:
        self._kinds: dict[_Key, _Kind] = {}
        self._told: deque[int] = deque(maxlen=TOLD_MAX)
        self._dead: dict[tuple[int, int], None] = {}
        self._consequences: dict[tuple[int, str], None] = {}

    def seen(self, one: Sighting, now: int) -> list[Sighting]:
        """Take it. Its rank may have died before: a thread reads faster or slower than the kernel tells of deaths."""
        if not worth_telling(one.signature):
            return []
        kind = self._kind(one)
        kind.newest = one
        kind.untold += one.times
        kind.total += one.times
        died = (one.generation, one.rank) in self._dead
        return self._tell(kind, now, last=died) if self._due(kind, now, died=died) else []

    def died(self, generation: int, rank: int, now: int) -> list[Sighting]:
        """That worker is dead by itself: whatever is known of it and was not told is told now, causes before consequences."""
        self._dead[generation, rank] = None
        while len(self._dead) > DEAD_MAX:
            del self._dead[next(iter(self._dead))]
        its = [one for one in self._kinds.values() if (one.newest.generation, one.newest.rank) == (generation, rank)]
        its = sorted((one for one in its if one.untold), key=lambda one: (_follows(one), -one.newest.at))
        return [told for one in its for told in self._tell(one, now, last=True)]

    def due(self, now: int) -> list[Sighting]:
        """What found no room, or goes on."""
        found: list[Sighting] = []
        for one in list(self._kinds.values()):
            died = (one.newest.generation, one.newest.rank) in self._dead
            if one.untold and self._due(one, now, died=died):
                found += self._tell(one, now, last=died)
        return found

    def _kind(self, one: Sighting) -> _Kind:
        key = (one.generation, one.rank, one.source, one.signature.id, one.subject)
        found = self._kinds.pop(key, None) or _Kind(one)
        self._kinds[key] = found  # at the end: the one that was silent longest is forgotten first
        while len(self._kinds) > KINDS_MAX:
            del self._kinds[next(iter(self._kinds))]
        return found

    def _due(self, kind: _Kind, now: int, *, died: bool) -> bool:
        if _follows(kind) and not died:
            return False
        return kind.told_at is None or died or now - kind.told_at >= AGAIN_S * SECOND_US

    def _tell(self, kind: _Kind, now: int, *, last: bool) -> list[Sighting]:
        """Tell it, if there is room. ``last``: its rank is dead."""
        one = kind.newest
        if _follows(kind) and (one.generation, one.signature.id) in self._consequences:
            kind.untold = 0
            return []
        if not self._room(now, last=last):
            return []
        if _follows(kind):
            self._consequences[one.generation, one.signature.id] = None
            while len(self._consequences) > KINDS_MAX:
                del self._consequences[next(iter(self._consequences))]
        self._told.append(now)
        kind.untold, kind.told_at = 0, now
        return [one._replace(text=counted(one.text, kind.total), times=kind.total)]

    def _room(self, now: int, *, last: bool) -> bool:
        recent = sum(now - at < MINUTE_S * SECOND_US for at in self._told)
        return recent < (TOLD_MAX if last else TOLD_MAX - FOR_DEATHS)


def _follows(kind: _Kind) -> bool:
    """Is it the consequence of another's failure? What speaks of the node itself waits for nobody's death."""
    return kind.newest.signature.verdict == CASC and kind.newest.rank >= 0


def counted(text: str, times: int) -> str:
    """The line, with how often it was seen if that is more than once: at least, for a matcher does not count a flood out."""
    line = text.strip()[:TEXT_MAX]
    return f"{line} ({times}+ times)" if times > 1 else line

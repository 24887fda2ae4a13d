"""Which lines that a rank wrote while it lived may be why something died.

Programs print what they have handled: a traceback that was caught is no cause of whatever ends the job later. A line is a
rank's last words if the rank died unasked within seconds of it, and of an end that such words can explain: no Python exception
explains a SIGKILL. What is left is *handled*: it stands behind every death, but for words on the machine under the one that died.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

from dlrover_core.diagnosis.evidence import (
    CASC,
    ERROR,
    EXIT,
    HW,
    LOG,
    NET,
    NODE,
    OPENING,
    PLAT,
    PLATFORM,
    RES,
    Evidence,
)
from dlrover_core.diagnosis.signatures import PRIORITY_CASC, Table

# From its last words to its end: seconds; up to 30 it may be why. A line may be read a moment after the death is told.
WORDS_S, MAYBE_S, LATE_S = 10.0, 30.0, 5.0
# Who aborts itself waits for dumps first; NCCL's monitor in torch, once it has said why, for as long as for a heartbeat.
ABORT_S, MONITOR_S = 120.0, 660.0
# A platform tells of a node's end when it next looks.
NODE_S = 60.0
# Ends that say nothing about what the program did: a signal from outside, or as a shell tells of it.
UNSAID = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGKILL, 128 + signal.SIGTERM)


def watched(one: Evidence) -> bool:
    """Is it a line of a rank's output, and not what is known of its end?"""
    return one.source == LOG and not one.exit_code


class Lines:
    """The lines among an incident's evidence: last words, handled ones, and those in between, which may be the cause.

    ``copies``: what its rank says at its end too, which counts more; ``since``: when such an end began.
    """

    def __init__(self, seen: Sequence[Evidence], table: Table, *, complete: bool) -> None:
        self._table, self._complete = table, complete
        self._deaths: dict[int, list[Evidence]] = {}
        self._ends: dict[str, list[Evidence]] = {}
        for one in seen:
            if dead(one):
                self._deaths.setdefault(one.rank, []).append(one)
            elif one.source in (NODE, PLATFORM):
                self._ends.setdefault(where(one), []).append(one)
        self._first = min((one.at for its in self._deaths.values() for one in its), default=None)
        self.last: set[Evidence] = set()
        self.handled: set[Evidence] = set()
        self.copies: set[Evidence] = set()
        self.since: dict[Evidence, int] = {}
        for one in seen:
            if watched(one):
                self._sort(one)

    def counts(self, one: Evidence) -> bool:
        """May it stand for how its rank ended?"""
        return not watched(one) or one.verdict == CASC or one in self.last

    def behind(self, live: Iterable[Evidence]) -> set[Evidence]:
        """Those that somebody's end stands before. A cascade is no such end: somebody's words may be behind it."""
        known = [one for one in live if one.verdict != CASC]
        ends = [one for one in known if dead(one) or one.source in (NODE, PLATFORM)]
        if not ends:
            # What stands still, or computes nonsense, may well do so because of what was said; a traceback is too little.
            opened = any(one.source in OPENING for one in known)
            return {one for one in self.handled if opened and _raised(one)}
        homes = {where(one) for one in ends}
        return {one for one in self.handled if one.verdict != CASC and not self._machine(one, homes)}

    def _sort(self, one: Evidence) -> None:
        own = self._own(one)
        same = [death for death in own if death.signature == one.signature and one.verdict != CASC]
        if same:
            self.copies.add(one)
            for death in same:
                if 0 < death.at - one.at <= WORDS_S * 1e6:
                    self.since[death] = min(one.at, self.since.get(death, one.at))
            return
        fits = [death for death in own if self._fits(one, death) and death.at - one.at >= -LATE_S * 1e6]
        if fits:
            death = min(fits, key=lambda fit: (fit.at, fit.seq))
            gap = (death.at - one.at) / 1e6
            if gap <= _last_s(one, death):
                self.last.add(one)
            if gap <= max(MAYBE_S, _last_s(one, death)):
                return
        if not self._with_node(one, own):
            self.handled.add(one)

    def _own(self, one: Evidence) -> list[Evidence]:
        """The ends of its rank; of a line that names none those on its node."""
        if one.rank >= 0:
            return self._deaths.get(one.rank, [])
        place = where(one)
        return [death for its in self._deaths.values() for death in its if not place or where(death) == place]

    def _fits(self, one: Evidence, death: Evidence) -> bool:
        """Can such words explain such an end?"""
        if _raised(one):
            # An uncaught exception ends a process with 1; who said something else at the end had handled this.
            return death.exit_code in (0, 1) and (death.signature.startswith("exit.") or death.verdict == CASC)
        known = self._table.get(one.signature)
        return death.exit_code not in UNSAID or (known is not None and known.priority >= PRIORITY_CASC)

    def _with_node(self, one: Evidence, own: Sequence[Evidence]) -> bool:
        """Did its whole node end soon after? A rank of which nothing else will be heard may have died of it."""
        if own or (_raised(one) and not self._complete):
            return False
        return any(-LATE_S <= (end.at - one.at) / 1e6 <= NODE_S for end in self._ends.get(where(one), ()))

    def _machine(self, one: Evidence, homes: set[str]) -> bool:
        """Does it speak of more than its process: of the machine that somebody died on, or of any just before the first death?

        Whoever stands on a broken machine is often stopped by us before it dies of it.
        """
        known = self._table.get(one.signature)
        if known is None or known.scope == "process":
            return False
        near = self._first is not None and abs(one.at - self._first) <= WORDS_S * 1e6
        return one.verdict in (HW, NET, RES, PLAT) and (near or where(one) in homes)


def dead(one: Evidence) -> bool:
    """Does it tell of the end of a rank?"""
    return one.rank >= 0 and (one.source in (EXIT, ERROR) or (one.source == LOG and one.exit_code != 0))


def _last_s(one: Evidence, death: Evidence) -> float:
    """How long before such an end such words were its last."""
    aborts = death.exit_code in (-signal.SIGABRT, 128 + signal.SIGABRT)
    if aborts and not _raised(one):
        return MONITOR_S if one.signature.startswith("nccl.") else ABORT_S
    return ABORT_S if one.verdict == CASC else WORDS_S


def _raised(one: Evidence) -> bool:
    """Is it a Python exception of no other kind?"""
    return one.signature.split(".", maxsplit=1)[0] == "exception"


def where(one: Evidence) -> str:
    """The node, or else the host, that a piece of evidence is about."""
    return one.node or one.host

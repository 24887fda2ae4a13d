"""Where everybody complains about somebody else: whom do they mean?

Each function answers with a set of (rank, node, host), from all that was seen and from who took part, where that is known.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dlrover_core.diagnosis.evidence import CASC, EXIT, Evidence
from dlrover_core.spec import us

# How far a rank had come, in its watchdog's own words.
_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (\d+)|SeqNum=(\d+)|sequence number (\d+)", re.IGNORECASE)


# How long a collective, a store or a barrier had been waited for.
_WAITED_MS = re.compile(
    r"ran for (\d{1,12}) milliseconds|Timeout\(ms\) ?= ?(\d{1,12})|[Tt]imed? ?out (?:after|of) ?(\d{1,12}) ?ms\b"
)
_WAITED_S = re.compile(
    r"\b(?:[Tt]imed? ?out (?:after|of)|after waiting(?: for)?) ?(\d{1,6})(?:\.\d+)? ?s(?:ec(?:ond)?s?)?\b"
)
WAITED_S_MAX, MINUTE_S = 86_400.0, 60.0
# What MPI's launcher, and Horovod above it, say to the ranks that are left.
_SHUT_DOWN = ("horovod.", "mpi.abort")
OWN_CODE_MAX = 127  # above it, a shell's code of a signal


class Member(NamedTuple):
    """A node that took part: its ranks are ``first_rank`` to ``first_rank + nproc - 1``."""

    node: str
    host: str
    first_rank: int
    nproc: int


def named(seen: Sequence[Evidence], members: Sequence[Member]) -> set[tuple[int, str, str]]:
    """Those whom most of the complaints name, if they name few."""
    votes: Counter[tuple[int, str, str]] = Counter()
    for one in [one for one in seen if one.verdict == CASC]:
        votes.update(whom(seen, members, one))
    if not votes:
        return set()
    spoke = {one.rank for one in seen if one.rank >= 0}
    silent = {who: count for who, count in votes.items() if who[0] not in spoke} or votes
    most = max(silent.values())
    return {who for who, count in silent.items() if count == most}


def waited_s(seen: Sequence[Evidence], least_s: float) -> float:
    """So long before the first end its cause may lie: a minute more than the longest wait, at least ``least_s``."""
    waited = [0.0]
    for one in seen:
        if one.verdict == CASC:
            text = one.text[-4000:]
            waited += [int(next(filter(None, found))) / 1000 for found in _WAITED_MS.findall(text)]
            waited += [float(found) for found in _WAITED_S.findall(text)]
    return max(least_s, min(WAITED_S_MAX, max(waited)) + MINUTE_S)


def whom(seen: Sequence[Evidence], members: Sequence[Member], one: Evidence) -> list[tuple[int, str, str]]:
    """Whom an observation names."""
    return [who for name in one.subject.split(",") if name.strip() for who in _who(seen, members, name.strip())]


def _who(seen: Sequence[Evidence], members: Sequence[Member], name: str) -> list[tuple[int, str, str]]:
    """The rank, node or host of that name. An address that nobody has is nobody, as is a number that is no rank's."""
    if name.isdigit():
        at = _home(seen, members, int(name))
        return [(int(name), *at)] if any(at) or not members else []
    bare = name.rsplit(":", 1)[0].strip("[]")
    for member in members:
        if bare in (member.node, member.host):
            return [(-1, member.node, member.host)]
    for one in seen:
        if bare and bare in (one.node, one.host):
            return [(-1, one.node, one.host)]
    return []


def _home(seen: Sequence[Evidence], members: Sequence[Member], rank: int) -> tuple[str, str]:
    """A rank's node and host."""
    for member in members:
        if member.first_rank <= rank < member.first_rank + member.nproc:
            return member.node, member.host
    return next(((one.node, one.host) for one in seen if one.rank == rank), ("", ""))


def behind(seen: Sequence[Evidence], members: Sequence[Member]) -> set[tuple[int, str, str]]:
    """The ranks that have come less far than the others."""
    reached: dict[int, int] = {}
    for one in seen:
        found = _ENQUEUED.search(one.text) if one.rank >= 0 else None
        if found is not None:
            number = int(next(group for group in found.groups() if group))
            reached[one.rank] = min(number, reached.get(one.rank, number))
    steps = {one.rank: one.step for one in seen if one.rank >= 0 and one.step >= 0}
    for known in (reached, steps):
        least = min(known.values(), default=0)
        if known and least < max(known.values()):
            behind = {rank for rank, number in known.items() if number == least}
            return {(rank, *_home(seen, members, rank)) for rank in behind}
    return set()


def ended(seen: Sequence[Evidence], members: Sequence[Member]) -> set[tuple[int, str, str]]:
    """The only rank whose end MPI's launcher tells, by a code of its own: it names the first, and the others were shut down."""
    if not all(one.signature.startswith(_SHUT_DOWN) for one in seen if one.verdict == CASC):
        return set()
    told = {one.rank: one.exit_code for one in seen if one.source == EXIT and one.rank >= 0}
    if len(told) != 1:
        return set()
    ((rank, code),) = told.items()
    own = 0 < code <= OWN_CODE_MAX
    return {(rank, *_home(seen, members, rank))} if own else set()


def unheard(seen: Sequence[Evidence], members: Sequence[Member]) -> set[tuple[int, str, str]]:
    """Who is the only one that said nothing?"""
    spoke = {one.rank for one in seen if one.rank >= 0}
    if members:
        everybody = {rank for one in members for rank in range(one.first_rank, one.first_rank + one.nproc)}
        silent = everybody - spoke
        homes = {_home(seen, members, rank) for rank in silent}
        if len(homes) == 1 and len(silent) < len(everybody):
            return {(min(silent), *next(iter(homes)))}
        return {(rank, *_home(seen, members, rank)) for rank in silent} if len(silent) < len(everybody) else set()
    if len(spoke) < 3:  # of a log of one or two ranks' words nobody can say who is missing
        return set()
    return {(rank, "", "") for rank in set(range(max(spoke) + 1)) - spoke}


def newest_burst(live: Sequence[Evidence], before_s: float) -> int:
    """When the last burst of what was seen began, where nobody's end is known: older ones are other stories."""
    begin = live[0].at
    for before, after in itertools.pairwise(live):
        if after.at - before.at > us(before_s):
            begin = after.at
    return begin

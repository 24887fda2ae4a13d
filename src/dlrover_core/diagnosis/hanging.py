"""Who hangs: from what was seen of every rank to one that is named, or to nobody.

In a synchronous world one rank that does not come holds up all; the others are found waiting for it. So the guilty one differs:
its process is stopped, or its recorder lags behind, or it holds Python's lock, or its stack is not in a collective while others'
are, or it called another collective, or it is in an uninterruptible sleep, or its stack is the odd one, or nobody could look at
it. The first of these that some, and not all, of the ranks show decides; what all show, none is guilty of.

A rank that differs but works (it uses CPU or disk and moves) is no hang yet: rank 0 may evaluate while others wait.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dlrover_core.diagnosis import flight, stacks
from dlrover_core.diagnosis.flight import Newest
from dlrover_core.diagnosis.stacks import Frame
from dlrover_core.words import first_few

FACTS_BYTES_MAX = 4096
SOURCE_CHARS_MAX = 120
PATH_CHARS_MAX = 80
ALSO_NAMED_MAX = 4

STOPPED = ("T", "t")
RANK, STOPPED_RANK, GLOBAL = "hang.rank", "hang.stopped", "hang.global"


class Facts(NamedTuple):
    """What was seen of one rank. ``state`` is its letter in /proc; ``gil``: free, held, or empty where nobody could ask.

    ``idle_us``: since its last step, when this was seen. ``recorded``: its flight recorder was read, however little it held.
    ``busy``: between two looks it computed, or read or wrote, or its stack moved. ``source``: the text of the user's newest line.
    """

    rank: int
    state: str = ""
    wchan: str = ""
    idle_us: int = -1
    gil: str = ""
    busy: bool = False
    stack: tuple[Frame, ...] = ()
    source: str = ""
    recorded: bool = False
    groups: tuple[Newest, ...] = ()

    @property
    def waits(self) -> str:
        """The call in which it waits for others; empty: it does not."""
        return self.called or next((one.op for one in self.groups if one.active), "")

    @property
    def called(self) -> str:
        """The same by its stack alone: a collective that nobody waits for yet may be under way anywhere."""
        return stacks.waits_in(self.stack, self.source)

    @property
    def seen(self) -> bool:
        """Is there anything to judge it by?"""
        return bool(self.stack or self.state or self.recorded)


class Named(NamedTuple):
    """The verdict. ``ranks``: all who are guilty alike, ``rank`` the first; empty and -1: nobody stands out.

    ``busy``: it works, so it may be about to end by itself.
    """

    signature: str
    rank: int
    ranks: tuple[int, ...]
    rule: str
    busy: bool
    where: str
    others: str


def to_text(facts: Facts) -> str:
    """As an agent reports it: JSON, at most `FACTS_BYTES_MAX` bytes."""
    stack = [_cut(one) for one in facts.stack]
    groups = list(facts.groups)
    while True:
        told = facts._asdict() | {"stack": stack, "groups": groups, "source": facts.source.strip()[:SOURCE_CHARS_MAX]}
        text = json.dumps(told, separators=(",", ":"))
        if len(text) <= FACTS_BYTES_MAX or not (stack or groups):
            return text[:FACTS_BYTES_MAX]
        (stack or groups).pop()


def _cut(frame: Frame) -> Frame:
    return frame._replace(file=frame.file[-PATH_CHARS_MAX:], function=frame.function[:PATH_CHARS_MAX])


def from_text(text: str) -> Facts | None:
    """The facts that `to_text` wrote; None for anything else."""
    try:
        told = json.loads(text)
        told["stack"] = tuple(Frame(str(file), int(line), str(function)) for file, line, function in told["stack"])
        told["groups"] = tuple(_group(one) for one in told["groups"])
        known = {name: told[name] for name in Facts._fields if name in told}
        for name, value in known.items():
            if name != "rank" and type(value) is not type(Facts._field_defaults[name]):
                return None
        return Facts(**known) if type(known.get("rank")) is int else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _group(told: Sequence[object]) -> Newest:
    group, seq, op, sizes, active, waits = told
    return Newest(str(group), int(str(seq)), str(op), str(sizes), bool(active), str(waits))


def name(seen: Mapping[int, Facts], ranks: Sequence[int]) -> Named:
    """Who of ``ranks`` hangs, by what was ``seen`` of those that could be looked at."""
    told = {rank: one for rank, one in seen.items() if one.seen}
    for rule, find in _RULES:
        guilty = find(told, ranks)
        if guilty and (len(guilty) < len(ranks) or len(ranks) == 1 or rule == _STOPPED):
            return _named(rule, sorted(guilty), told, ranks)
    if len(ranks) == 1:
        return _named("it is the only one", list(ranks), told, ranks)
    busy = any(one.busy and not one.waits for one in told.values())
    return Named(GLOBAL, -1, (), _conflict(told), busy, "", _others(told, ()))


def _named(rule: str, guilty: list[int], told: Mapping[int, Facts], ranks: Sequence[int]) -> Named:
    one = told.get(guilty[0])
    stuck = rule in (_STOPPED, _HELD) or one is None
    return Named(
        STOPPED_RANK if rule == _STOPPED else RANK,
        guilty[0],
        tuple(guilty),
        rule,
        not stuck and any(told[rank].busy for rank in guilty if rank in told),
        stacks.where(one.stack, one.source) if one is not None else "",
        _others(told, guilty) if len(ranks) > 1 else "",
    )


# ---- the rules, the surest first: each finds ranks that differ


def _stopped(told: Mapping[int, Facts], ranks: Sequence[int]) -> list[int]:
    return [rank for rank, one in told.items() if one.state in STOPPED]


def _lagging(told: Mapping[int, Facts], ranks: Sequence[int]) -> list[int]:
    found = _flight(told)
    return list(found.ranks) if found is not None and found.how in ("lag", "missing") else []


def _mismatched(told: Mapping[int, Facts], ranks: Sequence[int]) -> list[int]:
    found = _flight(told)
    return list(found.ranks) if found is not None and found.how == "mismatch" else []


def _flight(told: Mapping[int, Facts]) -> flight.Parted | None:
    return flight.parted({rank: one.groups for rank, one in told.items() if one.recorded})


def _holding(told: Mapping[int, Facts], ranks: Sequence[int]) -> list[int]:
    # In a collective the lock is free: whoever is there and does not answer is only late.
    return [rank for rank, one in told.items() if one.gil == "held" and not one.called]


def _elsewhere(told: Mapping[int, Facts], ranks: Sequence[int]) -> list[int]:
    if not any(one.called for one in told.values()):
        return []
    found = [rank for rank, one in told.items() if not one.called and one.stack]
    return [rank for rank in found if not told[rank].waits] or found


def _uninterruptible(told: Mapping[int, Facts], ranks: Sequence[int]) -> list[int]:
    return [rank for rank, one in told.items() if one.state == "D"]


def _odd(told: Mapping[int, Facts], ranks: Sequence[int]) -> list[int]:
    """The smallest cluster of stacks, where most are alike."""
    alike = Counter(stacks.shape(one.stack) for one in told.values() if one.stack)
    if len(alike) < 2:
        return []
    most, least = alike.most_common()[0], alike.most_common()[-1]
    if most[1] * 2 <= sum(alike.values()):
        return []
    return [rank for rank, one in told.items() if one.stack and stacks.shape(one.stack) == least[0]]


def _unseen(told: Mapping[int, Facts], ranks: Sequence[int]) -> list[int]:
    return [rank for rank in ranks if rank not in told]


_STOPPED, _HELD = "its process is stopped", "it holds Python's lock (GIL)"
_RULES: tuple[tuple[str, Callable[[Mapping[int, Facts], Sequence[int]], list[int]]], ...] = (
    (_STOPPED, _stopped),
    ("it lags behind in the flight recorder", _lagging),
    (_HELD, _holding),
    ("its stack is in no collective, others' are", _elsewhere),
    ("it called another collective", _mismatched),
    ("it is in an uninterruptible sleep", _uninterruptible),
    ("its stack is the odd one", _odd),
    ("nobody could look at it", _unseen),
)


def _conflict(told: Mapping[int, Facts]) -> str:
    found = _flight(told)
    if found is not None and found.how == "mismatch":
        return f"ranks called different collectives: {found.op}"
    return "no rank stands out"


def _others(told: Mapping[int, Facts], guilty: Sequence[int]) -> str:
    waits = Counter(one.waits for rank, one in told.items() if rank not in guilty and one.waits)
    return waits.most_common(1)[0][0] if waits else ""


def sentence(named: Named, node: str, facts: Facts | None, idle_us: int, path: str) -> str:
    """The verdict in one line for people."""
    idle = f"{idle_us / 1_000_000:.0f} s without a step"
    stored = f"; stacks: {path}" if path else ""
    if named.rank < 0:
        waiting = f"; ranks wait in {named.others}" if named.others else ""
        return f"the job hangs, {idle}: {named.rule}{waiting}{stored}"
    also = [str(rank) for rank in named.ranks[1:]]
    more = f" (also {first_few(also, ALSO_NAMED_MAX)})" if also else ""
    place = f" in {named.where}" if named.where else f" in the kernel ({facts.wchan})" if facts and facts.wchan else ""
    others = f"; the others wait in {named.others}" if named.others else ""
    return f"rank {named.rank}{more} hangs on {node.rpartition('-')[0] or node}{place}, {idle}: {named.rule}{others}{stored}"

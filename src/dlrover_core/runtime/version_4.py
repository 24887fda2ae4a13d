"""Version 4 of the protocol, for older peers: orders, heartbeats and their answers as flat fields. This module is frozen.

Newer fields are left out: `Keep.decided`, `Pulse.total`, and the commands' newest fields. The module goes once agents of
version 5 are a release old.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from dlrover_core.diagnosis.stall import Pulse
from dlrover_core.errors import MalformedMessage
from dlrover_core.job.checkpoints import Keep, Persist, ReportHeld, ReportRestored
from dlrover_core.job.checks import CheckWork
from dlrover_core.job.hangs import Probe
from dlrover_core.job.incidents import ReportExit
from dlrover_core.job.orders import Order, Work
from dlrover_core.job.plans import Boundary
from dlrover_core.job.progress import ReportFirstStep
from dlrover_core.job.world import ReportFinished
from dlrover_core.kernel.wire import Part, find
from dlrover_core.runtime.checked import Message, checked
from dlrover_core.runtime.keeping import HELD_MAX, WRITTEN_MAX, Everywhere, KeptBeat, Written
from dlrover_core.runtime.paces import LOSSES_MAX, SLOW_MAX, LossBeat, PaceBeat, RankLoss, SlowRank

Ints = tuple[int, ...]

_ORDER: tuple[tuple[type, str], ...] = tuple(
    (cls, name)
    for cls, names in (
        (Order, "leave reason grace_us"),
        (Work, "generation first_rank nproc world_size node_rank nodes store resume_step"),
        (Order, "over"),
        (Work, "restarts"),
        (Order, "linger_us outcome root"),
        (Probe, "hang"),
        (CheckWork, "number round kind rank size store others within_us at"),
        (Keep, "committed"),
        (Persist, "step of"),
        (Boundary, "plan go"),
        (Keep, "replica_to mtbf_s"),
        (Persist, "places"),
        (Keep, "lenders committed_of"),
    )
    for name in names.split()
)
"""The fields of an order: class and field of each."""
_WIDTHS = {ReportExit: 11, ReportFinished: 3, ReportFirstStep: 5, ReportHeld: 5, ReportRestored: 6}
"""How many fields commands had in version 4 that have grown since."""


class _Beat(NamedTuple):
    generation: int
    step: int
    lag_us: int
    idle_us: int = -1
    step_us: int = 0
    pause_us: int = 0
    phase: int = 0
    pace: tuple[int, ...] = ()
    losses: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()


class _Seen(NamedTuple):
    token: int
    whole: int = -1
    aim: int = -1
    safe: int = -1


def order(told: Order) -> tuple[Any, ...]:
    """The flat fields of an order."""
    return tuple(getattr(_piece(told, cls), name) for cls, name in _ORDER)


def _piece(told: Order, cls: Any) -> Any:
    return told if cls is Order else told.work if cls is Work else told.part(cls)


def order_of(fields: tuple[Any, ...]) -> Order:
    """The order in flat fields; fields missing at the end are empty. Raises `MalformedMessage`."""
    if not 3 <= len(fields) <= len(_ORDER):
        raise MalformedMessage(f"an order has {len(_ORDER)} fields in version 4, got {len(fields)}")
    said: dict[Any, dict[str, Any]] = {}
    for (cls, name), value in zip(_ORDER, fields, strict=False):
        said.setdefault(cls, {})[name] = value
    base = Order(**said.pop(Order))
    checked(Order, base[:-2])
    pieces = [checked(cls, tuple(cls(**fields))) for cls, fields in said.items()]
    return base._replace(work=find(pieces, Work)).telling(*(one for one in pieces if not isinstance(one, Work)))


def pace(told: PaceBeat) -> Ints:
    """What a node's ranks compute, as integers; empty: unknown."""
    if told == PaceBeat():
        return ()
    flat = [value for one in told.slow[:SLOW_MAX] for value in one[:6]]
    return (told.step, told.common, told.others, told.slower, *flat)


def pace_of(told: Ints) -> PaceBeat:
    """The same from a heartbeat's integers. Here and below, integers without meaning are ignored."""
    if len(told) < 4 or (len(told) - 4) % 6:
        return PaceBeat()
    slow = tuple(SlowRank(*told[at : at + 6]) for at in range(4, len(told), 6))
    return PaceBeat(told[0], told[1], told[2], told[3], slow)


def losses(told: LossBeat) -> Ints:
    """A node's losses, as integers; empty: no rank reports."""
    flat = (value for one in told.ranks[:LOSSES_MAX] for value in one[:5])
    return (told.reporting, *flat) if told.reporting else ()


def losses_of(told: Ints) -> LossBeat:
    """The same from a heartbeat's integers."""
    if not told or (len(told) - 1) % 5:
        return LossBeat()
    return LossBeat(told[0], tuple(RankLoss(*told[at : at + 5]) for at in range(1, len(told), 5)))


def kept(told: KeptBeat) -> Ints:
    """What a node holds in memory, as integers; empty: nothing."""
    if not told.generation:
        return ()
    held, flat = told.held[-HELD_MAX:], [value for one in told.written[-WRITTEN_MAX:] for value in one[:5]]
    copies = (told.copied, told.keeps, told.safe)
    return (told.generation, int(told.writes), *copies, told.before, int(told.wrote), len(held), *held, *flat)


def kept_of(told: Ints) -> KeptBeat:
    """The same from a heartbeat's integers."""
    count = told[7] if len(told) >= 8 else -1
    if not 0 <= count <= min(HELD_MAX, len(told) - 8) or (len(told) - 8 - count) % 5:
        return KeptBeat()
    held, flat = told[8 : 8 + count], told[8 + count :]
    written = tuple(
        Written(step, size, took_us, generation, places)
        for step, size, took_us, generation, places in (flat[at : at + 5] for at in range(0, len(flat), 5))
    )
    return KeptBeat(told[0], bool(told[1]), told[2], held, written, told[3], told[4], told[5], bool(told[6]))


def beat(generation: int, step: int, lag_us: int, parts: Iterable[Part]) -> tuple[Any, ...]:
    """The flat fields of a heartbeat."""
    told = tuple(parts)
    ranks = pace(find(told, PaceBeat)), losses(find(told, LossBeat))
    return (generation, step, lag_us, *find(told, Pulse)[1:5], *ranks, kept(find(told, KeptBeat)))


def beat_of(fields: tuple[Any, ...]) -> tuple[int, int, int, tuple[Part, ...]]:
    """Generation, step, lag and parts of a heartbeat's flat fields. Raises `MalformedMessage`."""
    flat = checked(_Beat, fields)
    pulse = Pulse(flat.step, *flat[3:7]) if flat.idle_us >= 0 else Pulse()
    parts = (pulse, pace_of(flat.pace), losses_of(flat.losses), kept_of(flat.kept))
    return flat.generation, flat.step, flat.lag_us, tuple(one for one in parts if one != type(one)())


def seen(parts: Iterable[Part]) -> tuple[int, ...]:
    """The flat fields of the answer to a heartbeat, after the token."""
    return tuple(find(parts, Everywhere))


def seen_of(fields: tuple[Any, ...]) -> tuple[int, tuple[Part, ...]]:
    """Token and parts of an answer's flat fields. Raises `MalformedMessage`."""
    token, *told = checked(_Seen, fields)
    return token, (Everywhere(*told),)


def command(message: Message) -> Message:
    """The fields of a command that version 4 has."""
    return message[: _WIDTHS.get(type(message))]

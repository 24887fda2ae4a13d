"""What agents and masters say to each other: msgpack arrays ``[kind, fields]``, every field checked on the way in.

Kinds are integers in append-only tables; a new field goes to the end of its message, with a default, so that a peer of the
previous version is understood. Nothing pickled is ever decoded. Bytes that are not a message raise `MalformedMessage`.
Any text can be encoded, and what agents report arrives as plain text (`words`).
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Union, cast

import msgpack

from dlrover_core.errors import MalformedMessage
from dlrover_core.job import failures, nodes, world
from dlrover_core.job.orders import Order
from dlrover_core.kernel.wire import COMMANDS, number_of, since
from dlrover_core.runtime.transport import FRAME_BYTES_MAX
from dlrover_core.words import INTEGER_MAX, plain_fields

VERSION = 5
OLDEST_VERSION = 1
# No message has more fields, and none has maps or extensions: what announces them costs nothing to refuse.
FIELDS_MAX = 64
Message = tuple[object, ...]


class Hello(NamedTuple):
    """An agent's first frame. ``token`` is the highest fencing token it has seen; ``generation`` what its workers run.

    An empty ``node`` is a standby: it can run ``nproc`` workers on ``host`` and waits to be assigned a node. ``seat`` names the
    one place on its host that at most one living agent holds (proven by a lock there): a second agent in a seat is the proof
    that the first one is dead. ``place``: the index that it must have in its group; -1: any.
    """

    version: int
    run: str
    node: str
    boot: int
    generation: int
    token: int
    host: str = ""
    nproc: int = 0
    seat: str = ""
    place: int = -1


class Welcome(NamedTuple):
    """The leader's answer: its token, the run, and the settings an agent needs, in microseconds."""

    version: int
    run: str
    token: int
    heartbeat_us: int
    silence_us: int
    unreachable_us: int
    kill_wait_us: int
    max_restarts: int
    stop_grace_us: int = 30_000_000


class Goodbye(NamedTuple):
    """Not welcome here. ``leave``: stop the workers and go; else try ``address``, or again later.

    ``outcome`` as in an `Order`: what became of the job or of this node. From an agent: its process ends now, by itself.
    """

    reason: str
    leave: bool
    address: str = ""
    outcome: str = ""


class Numbered(NamedTuple):
    """A command with its number: kind and fields of the command."""

    number: int
    kind: int
    fields: tuple[Any, ...]


class Answer(NamedTuple):
    """The command ``number`` is durable at ``seq``; with a ``reason`` it was refused."""

    number: int
    seq: int
    reason: str = ""


class Again(NamedTuple):
    """Send again from ``expected`` on."""

    expected: int


class Level(NamedTuple):
    """What the agent should be doing, by the leader with ``token``."""

    token: int
    order: tuple[Any, ...]


class Beat(NamedTuple):
    """An agent lives. ``step`` is the highest its workers have made (-1 unknown), ``lag_us`` its loop's lag.

    What follows is a `diagnosis.stall.Pulse`, as of now. ``pace`` and ``losses``: what ranks compute and lose, as `runtime.paces`
    writes it. ``kept``: what is whole in memory and on storage, as `runtime.keeping` writes it.
    ``total``: the steps that the script means to make; 0: it has not said.
    """

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
    total: int = 0


class BeatSeen(NamedTuple):
    """The leader lives. ``whole``: the newest step that all nodes of the group hold in memory; -1: none is known.

    Of states that no node has alone: ``aim``: the step that all copy to their partners now, ``safe``: the one that all have.
    """

    token: int
    whole: int = -1
    aim: int = -1
    safe: int = -1


class Assigned(NamedTuple):
    """To a standby: be this node. It says `Hello` again, under that name, on the same connection."""

    token: int
    node: str


_FRAMES: dict[int, type] = {
    1: Hello,
    2: Welcome,
    3: Goodbye,
    4: Numbered,
    5: Answer,
    6: Again,
    7: Level,
    8: Beat,
    9: BeatSeen,
    10: Assigned,
}

# Frames with words of the peer's own. The fields of a command are cleaned by `command_of`.
_WORDY = frozenset({Hello, Goodbye})
_FRAME_KIND = {cls: kind for kind, cls in _FRAMES.items()}


# How many fields the kinds that have grown since had in an older version: its peers refuse any further one.
_WIDTHS: Mapping[int, Mapping[type, int]] = {
    1: {
        Hello: 6, Goodbye: 3, Order: 14, nodes.ReportJoined: 4, Beat: 3, BeatSeen: 1, failures.ReportExit: 9,
        world.ReportFinished: 3,
    },
    2: {Order: 16, Beat: 3, BeatSeen: 1, failures.ReportExit: 9, world.ReportFinished: 3},
    3: {Order: 26, Beat: 9, BeatSeen: 1, world.ReportFinished: 3},
    4: {Order: 36, world.ReportFinished: 3},
}  # fmt: skip


def fields_for(message: Message, version: int) -> Message:
    """The fields of a message that a peer of ``version`` knows."""
    if version >= VERSION:
        return message
    return message[: _WIDTHS.get(max(version, OLDEST_VERSION), {}).get(type(message))]


def encode(message: Message, version: int = VERSION) -> bytes:
    """A message as a frame for a peer of ``version``."""
    # A host greets under the same plain name that it joins by.
    said = plain_fields(message) if isinstance(message, Hello) else message
    body = (_FRAME_KIND[type(message)], fields_for(said, version))
    # Half characters may be in any word: a host's name, an exception's text.
    frame = cast(bytes, msgpack.packb(body, unicode_errors="backslashreplace"))
    if len(frame) > FRAME_BYTES_MAX:
        raise MalformedMessage(
            f"{type(message).__name__} of {len(frame)} bytes exceeds the frame limit of {FRAME_BYTES_MAX}"
        )
    return frame


def decode(frame: bytes) -> Message:
    """The message in a frame. Raises `MalformedMessage`."""
    if len(frame) > FRAME_BYTES_MAX:
        raise MalformedMessage(f"a frame of {len(frame)} bytes exceeds the limit of {FRAME_BYTES_MAX}")
    try:
        raw = msgpack.unpackb(frame, use_list=False, max_array_len=FIELDS_MAX, max_map_len=0, max_ext_len=0)
    except Exception as error:  # msgpack raises half a dozen kinds on garbage
        raise MalformedMessage(f"{len(frame)} bytes are not msgpack: {error}") from error
    if not (isinstance(raw, tuple) and len(raw) == 2 and type(raw[0]) is int and isinstance(raw[1], tuple)):
        raise MalformedMessage("a frame is [kind, fields]")
    cls = _FRAMES.get(raw[0])
    if cls is None:
        raise MalformedMessage(f"message kind {raw[0]} is unknown; a newer peer?")
    message = checked(cls, raw[1])
    return plain_fields(message) if cls in _WORDY else message


def numbered(number: int, command: Message, version: int = VERSION) -> Numbered:
    """A command under its number, for a master of ``version``.

    One that such a master does not know may have been queued for another: numbers must not be left out, so it gets one that it
    refuses.
    """
    if version < since(type(command)):
        command = world.WithdrawStore(cast(Any, command).node, "")
    return Numbered(number, number_of(type(command)), tuple(fields_for(command, version)))


def level(token: int, order: Order, version: int = VERSION) -> Level:
    """An order, for an agent of ``version``."""
    return Level(token, tuple(fields_for(order, version)))


def command_of(message: Numbered) -> Message:
    """The command that `numbered` wrapped. Raises `MalformedMessage`."""
    cls = COMMANDS.get(message.kind)
    if cls is None:
        raise MalformedMessage(f"command kind {message.kind} is unknown; a newer agent?")
    return plain_fields(checked(cls, message.fields))


def order_of(message: Level) -> Order:
    """The order in a `Level`. Raises `MalformedMessage`."""
    return cast(Order, checked(Order, message.order))


def checked(cls: type, fields: tuple[Any, ...]) -> Message:
    """``cls`` from untrusted fields: count and types as declared; missing trailing fields take their defaults."""
    checks = _checks(cls)
    defaults = cast(Any, cls)._field_defaults
    if not len(checks) - len(defaults) <= len(fields) <= len(checks):
        raise MalformedMessage(f"{cls.__name__} has {len(checks)} fields, got {len(fields)}")
    for (name, check), value in zip(checks, fields, strict=False):
        if not check(value):
            raise MalformedMessage(f"{cls.__name__}.{name}: {_shown(value)} is not what was declared")
    return cast(Message, cls(*fields))


def _shown(value: Any) -> str:
    # Never the text of a container: at a depth that msgpack still reads, Python's own repr raises RecursionError.
    shown = f" {str(value)[:40]!r}" if isinstance(value, (int, float, str)) else ""
    return f"{type(value).__name__}{shown}"


_CHECKS: dict[type, tuple[tuple[str, Callable[[Any], bool]], ...]] = {}


def _checks(cls: type) -> tuple[tuple[str, Callable[[Any], bool]], ...]:
    found = _CHECKS.get(cls)
    if found is None:
        hints = typing.get_type_hints(cls)
        found = _CHECKS[cls] = tuple((name, _check(hints[name])) for name in cast(Any, cls)._fields)
    return found


def _check(hint: Any) -> Callable[[Any], bool]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda _: True
    if hint is int:
        # bool is an int to Python, not to us; the bound leaves room to add and subtract in what msgpack and SQLite can hold.
        return lambda value: type(value) is int and -INTEGER_MAX <= value <= INTEGER_MAX
    if hint in (str, bytes, bool, float):
        return lambda value: type(value) is hint
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        inner = _check(args[0])
        return lambda value: isinstance(value, tuple) and all(inner(one) for one in value)
    if origin is tuple:
        each = [_check(arg) for arg in args]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(each)
            and all(check(one) for check, one in zip(each, value, strict=True))
        )
    if origin in (Union, types.UnionType):
        options = [_check(arg) for arg in args]
        return lambda value: any(option(value) for option in options)
    if hint is type(None):
        return lambda value: value is None
    raise TypeError(f"messages carry no {hint}")

"""What agents and masters say to each other: msgpack arrays ``[kind, fields]``, every field checked on arrival.

Kinds are integers in an append-only table. Orders, heartbeats and their answers carry parts (`kernel.wire`). A peer skips
unknown parts, and refuses an unknown command by its name, so a new concern needs no protocol version. Peers of the previous
version are served (`version_4`). Nothing pickled is ever decoded. Bytes that are no message raise `MalformedMessage`. Any
text can be encoded, and what agents report arrives as plain text (`words`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import msgpack

from dlrover_core.errors import MalformedMessage
from dlrover_core.job import world
from dlrover_core.job.orders import Order, Work
from dlrover_core.kernel.wire import COMMANDS, PARTS, Part, Unknown, number_of, since
from dlrover_core.runtime import version_4
from dlrover_core.runtime.checked import checked, known
from dlrover_core.runtime.levels import Beat, BeatSeen
from dlrover_core.runtime.transport import FRAME_BYTES_MAX
from dlrover_core.words import plain, plain_fields

VERSION = 5
OLDEST_VERSION = 4
# No message has more fields, or any map or extension. A frame that announces more is refused before it is decoded.
FIELDS_MAX = 64
NAME_MAX = 60
Message = tuple[object, ...]


class Hello(NamedTuple):
    """An agent's first frame.

    version:    of the protocol
    run:        the run that it belongs to; empty: any
    node:       its node; empty: it is a standby, and waits for a node
    boot:       a number drawn once per process
    generation: of its workers; 0: none
    token:      the highest fencing token that it has seen
    host:       its host
    nproc:      workers that it can run
    seat:       the place on its host that at most one living agent holds, by a file lock; a second agent in a seat proves
                that the first one is dead
    place:      the index that its node must have; -1: any
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
    """The leader's answer: its fencing token, the run, and the settings of an agent. Times are in microseconds."""

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
    """The agent is turned away, or, from an agent: its process ends by itself.

    reason:  in words
    leave:   stop the workers and leave; else try ``address``, or the same master later
    address: the leader's; empty: unknown
    outcome: as in an `Order`: what became of the job or of the node
    """

    reason: str
    leave: bool
    address: str = ""
    outcome: str = ""


class Numbered(NamedTuple):
    """A command with its number: kind and fields of the command, and its name, for a master that may not know the kind."""

    number: int
    kind: int
    fields: tuple[Any, ...]
    name: str = ""


class Answer(NamedTuple):
    """The command ``number`` is durable at ``seq``; with a ``reason``, it was refused."""

    number: int
    seq: int
    reason: str = ""


class Again(NamedTuple):
    """Send the commands from ``expected`` on again."""

    expected: int


class Level(NamedTuple):
    """An order, by the leader with ``token``."""

    token: int
    order: tuple[Any, ...]


class Assigned(NamedTuple):
    """To a standby: become this node. It says `Hello` again, under that name, on the same connection."""

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

# Frames with text of the peer. `command_of` cleans the fields of a command.
_WORDY = frozenset({Hello, Goodbye})
_FRAME_KIND = {cls: kind for kind, cls in _FRAMES.items()}


def encode(message: Message, version: int = VERSION) -> bytes:
    """A message as a frame for a peer of ``version``; for a version that is not served, only a `Goodbye`."""
    # A host greets under the same plain name that it joins by.
    said = plain_fields(message) if isinstance(message, Hello) else message
    fields = _fields(said) if version >= VERSION else _old_fields(said, version)
    # Any text may hold half a character: a host's name, an exception's message.
    frame = cast(bytes, msgpack.packb((_FRAME_KIND[type(message)], fields), unicode_errors="backslashreplace"))
    if len(frame) > FRAME_BYTES_MAX:
        raise MalformedMessage(
            f"{type(message).__name__} of {len(frame)} bytes exceeds the frame limit of {FRAME_BYTES_MAX}"
        )
    return frame


def _fields(message: Message) -> Message:
    if isinstance(message, (Beat, BeatSeen)) and message.parts:
        return (*message[:-1], _told(message.parts))
    return message


def _old_fields(message: Message, version: int) -> Message:
    if version < OLDEST_VERSION or isinstance(message, Numbered):
        return message[:3]  # all fields that these versions had; a Goodbye has them in every version
    if isinstance(message, Beat):
        return version_4.beat(*message)
    return (message.token, *version_4.seen(message.parts)) if isinstance(message, BeatSeen) else message


def _told(parts: tuple[Part, ...]) -> tuple[tuple[int, Part], ...]:
    return tuple((number_of(type(one)), one) for one in parts)


def type_of(frame: bytes) -> type | None:
    """The class of the message in a frame of our version, without decoding the fields."""
    return _FRAMES.get(frame[1])


def decode(frame: bytes, version: int = VERSION) -> Message:
    """The message in a frame of a peer of ``version``. Raises `MalformedMessage`."""
    if len(frame) > FRAME_BYTES_MAX:
        raise MalformedMessage(f"a frame of {len(frame)} bytes exceeds the limit of {FRAME_BYTES_MAX}")
    try:
        raw = msgpack.unpackb(frame, use_list=False, max_array_len=FIELDS_MAX, max_map_len=0, max_ext_len=0)
    except Exception as error:  # msgpack raises half a dozen kinds on garbage
        raise MalformedMessage(f"{len(frame)} bytes are not msgpack: {error}") from error
    if not (isinstance(raw, tuple) and len(raw) == 2 and type(raw[0]) is int and isinstance(raw[1], tuple)):
        raise MalformedMessage("a frame is [kind, fields]")
    cls, fields = _FRAMES.get(raw[0]), raw[1]
    if cls is None:
        raise MalformedMessage(f"message kind {raw[0]} is unknown; a newer peer?")
    if version < VERSION and cls is Beat:
        return Beat(*version_4.beat_of(fields))
    if version < VERSION and cls is BeatSeen:
        return BeatSeen(*version_4.seen_of(fields))
    message: Message = checked(cast(Any, cls), fields)
    if cls in _WORDY:
        return plain_fields(message)
    if isinstance(message, (Beat, BeatSeen)) and message.parts:
        return cast(Message, cls(*message[:-1], _parts_of(message.parts)))
    return message


def _parts_of(told: tuple[Any, ...]) -> tuple[Part, ...]:
    """The known parts. Raises `MalformedMessage`."""
    parts: list[Part] = []
    for one in told:
        if not (len(one) == 2 and type(one[0]) is int and isinstance(one[1], tuple)):
            raise MalformedMessage("a part is [number, fields]")
        cls = PARTS.get(one[0])
        if cls is not None:
            parts.append(known(cls, one[1]))
    return tuple(parts)


def numbered(number: int, command: Message, version: int = VERSION) -> Numbered:
    """A command with its number, for a master of ``version``.

    A command that such a master does not know may already have a number, and numbers must have no gaps. So it is replaced
    by a command that the master refuses. From version 5 on, a master refuses an unknown command by its name.
    """
    cls = type(command)
    if version < since(cls):
        command, cls = world.WithdrawStore(cast(Any, command).node, ""), world.WithdrawStore
    if version < VERSION:
        return Numbered(number, number_of(cls), tuple(version_4.command(command)))
    return Numbered(number, number_of(cls), tuple(command), cls.__name__ if since(cls) > OLDEST_VERSION else "")


def command_of(message: Numbered) -> Message:
    """The command in a `Numbered`; `Unknown`, if it is not known here. Raises `MalformedMessage`."""
    cls = COMMANDS.get(message.kind)
    if cls is None:
        return Unknown(plain(message.name, NAME_MAX) or f"command {message.kind}")
    return plain_fields(known(cls, message.fields))


def level(token: int, order: Order, version: int = VERSION) -> Level:
    """An order, for an agent of ``version``."""
    if version < VERSION:
        return Level(token, version_4.order(order))
    return Level(token, (order[:_BASE], order.work if order.generation else (), _told(order.parts)))


def order_of(message: Level, version: int = VERSION) -> Order:
    """The order in a `Level` of a master of ``version``. Raises `MalformedMessage`."""
    if version < VERSION:
        return version_4.order_of(message.order)
    base, work, parts = checked(_Order, message.order[:3])
    order = checked(Order, cast(Any, base)[:_BASE])
    return order._replace(work=known(Work, cast(Any, work)), parts=_parts_of(cast(Any, parts)))


class _Order(NamedTuple):
    base: tuple[Any, ...]
    work: tuple[Any, ...]
    parts: tuple[Part, ...]


_BASE = len(Order._fields) - 2

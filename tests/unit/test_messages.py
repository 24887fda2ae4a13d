"""What agents and masters say: round trips, and everything a peer may send that is no message."""

from __future__ import annotations

import json
import os
import typing
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import of, records

from dlrover_core.errors import MalformedMessage
from dlrover_core.job.orders import Order, Work
from dlrover_core.kernel.wire import COMMANDS, PARTS, Unknown, command, number_of
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime import (
    messages,
    sessions,  # noqa: F401  # with it, all that agents and masters say is declared
)
from dlrover_core.runtime.checked import checked
from dlrover_core.runtime.messages import (
    Hello,
    Level,
    Numbered,
    command_of,
    decode,
    encode,
    numbered,
    order_of,
)
from dlrover_core.runtime.transport import FRAME_BYTES_MAX
from dlrover_core.words import INTEGER_MAX

FRAMES = messages._FRAMES
WORDS = Path(__file__).parent / "golden" / "words.json"
RENEW = "DLROVER_GOLDEN"  # DLROVER_GOLDEN=write pytest tests/unit/test_messages.py adds new numbers; it changes none


@pytest.mark.parametrize("cls", FRAMES.values(), ids=lambda cls: cls.__name__)
def test_every_message_round_trips(cls: Any) -> None:
    """A message comes out of its frame as it went in."""
    message = of(cls)
    assert decode(encode(message)) == message
    assert type(decode(encode(message))) is cls


@pytest.mark.parametrize("cls", COMMANDS.values(), ids=lambda cls: cls.__name__)
def test_every_command_round_trips(cls: Any) -> None:
    """A command comes out of its numbered frame as it went in."""
    command = of(cls)
    again = decode(encode(numbered(7, command)))
    assert isinstance(again, Numbered)
    assert again.number == 7
    assert command_of(again) == command
    assert type(command_of(again)) is cls


def test_orders_round_trip() -> None:
    """An order comes out of its level as it went in."""
    order = of(Order)._replace(parts=tuple(of(cls) for cls in PARTS.values()))
    level = decode(encode(messages.level(3, order)))
    assert isinstance(level, Level)
    assert order_of(level) == order


def test_kinds_are_append_only() -> None:
    """Numbers of messages and commands are part of the protocol: add, never renumber."""
    assert [cls.__name__ for _, cls in sorted(FRAMES.items())][:9] == [
        "Hello", "Welcome", "Goodbye", "Numbered", "Answer", "Again", "Level", "Beat", "BeatSeen",
    ]  # fmt: skip
    assert sorted(FRAMES) == list(range(1, len(FRAMES) + 1))


def broken_words(pinned: dict[str, dict[str, Any]], declared: dict[str, dict[str, Any]]) -> list[str]:
    """What a peer of an older release would take for something else, one line each."""
    wrong = []
    for number, old in pinned.items():
        new = declared.get(number)
        if new is None or new["name"] != old["name"]:
            wrong.append(f"number {number} was {old['name']}: a number is never reused")
        elif new["fields"][: len(old["fields"])] != old["fields"]:
            wrong.append(f"{old['name']} has other fields: only a new one with a default may come, at the end")
    return wrong


def _declared(known: dict[int, type]) -> dict[str, dict[str, Any]]:
    found = {}
    ours = {number: cls for number, cls in known.items() if cls.__module__.startswith("dlrover_core.")}
    for number, cls in sorted(ours.items()):
        hints = typing.get_type_hints(cls)
        fields = [f"{name}: {hints[name]}".replace("<class '", "").replace("'>", "") for name in cls._fields]  # type: ignore[attr-defined]
        found[str(number)] = {"name": cls.__name__, "fields": fields}
    return found


def test_numbers_are_append_only() -> None:
    """No number of a command or a part is reused, and no field is changed; the golden file bears all that there are."""
    assert MODEL.tells, "all that a master knows is loaded with its rules"
    declared = {"commands": _declared(COMMANDS), "parts": _declared(PARTS)}
    if os.environ.get(RENEW) == "write":
        WORDS.write_text(json.dumps(declared, indent=1) + "\n")
    pinned = json.loads(WORDS.read_text())
    assert [line for what in pinned for line in broken_words(pinned[what], declared[what])] == []
    assert pinned == declared, f"new commands, parts or fields: {RENEW}=write pytest {__file__}"


@pytest.mark.parametrize(
    ("now", "complaint"),
    [
        ({}, "never reused"),
        ({"name": "B", "fields": ["a: int"]}, "never reused"),
        ({"name": "A", "fields": ["b: int"]}, "other fields"),
    ],
    ids=["gone", "renamed", "changed"],
)
def test_broken_words_are_found(now: dict[str, Any], complaint: str) -> None:
    """The pin finds what it is meant to find."""
    pinned = {"1": {"name": "A", "fields": ["a: int"]}}
    assert complaint in broken_words(pinned, {"1": now} if now else {})[0]
    assert broken_words(pinned, {"1": {"name": "A", "fields": ["a: int", "b: int"]}}) == []


def test_a_number_stands_for_one_class() -> None:
    """A second class of a taken number is refused as it is declared; a class without one cannot be sent."""
    with pytest.raises(ValueError, match="number 1 is both ReportJoined and Other"):

        @command(1)
        class Other(NamedTuple):
            """Another."""

    with pytest.raises(TypeError, match="int has no number"):
        number_of(int)


ALL = [*FRAMES.values(), *COMMANDS.values(), *PARTS.values(), Work]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_trailing_defaults_may_be_missing(cls: Any) -> None:
    """A peer of the previous version leaves out what it does not know; those fields take their defaults."""
    whole, defaults = tuple(of(cls)), cls._field_defaults
    for fewer in range(1, len(defaults) + 1):
        message = checked(cls, whole[:-fewer])
        assert message == (*whole[:-fewer], *list(defaults.values())[-fewer:])
    with pytest.raises(MalformedMessage, match="fields, got"):
        checked(cls, whole[: len(whole) - len(defaults) - 1]) if len(whole) > len(defaults) else checked(
            cls, (*whole, 1)
        )
    with pytest.raises(MalformedMessage, match="fields, got"):
        checked(cls, (*whole, 1))


@pytest.mark.parametrize("number", PARTS)
def test_parts_grow_at_their_end(number: int) -> None:
    """A newer peer's further fields are skipped, in a part and in its rows; what an older one lacks takes its default."""
    part: Any = of(PARTS[number])
    rows = {
        name
        for name, value in part._asdict().items()
        if value and isinstance(value, tuple) and hasattr(value[0], "_fields")
    }
    newer = [[[*one, 99] for one in value] if name in rows else value for name, value in part._asdict().items()]
    assert decode(msgpack.packb([8, [1, 2, 3, [[number, [*newer, "more"]]]]])).parts == (part,)  # type: ignore[attr-defined]
    older = decode(msgpack.packb([8, [1, 2, 3, [[number, list(part[:-1])]]]]))
    assert older.parts == (part._replace(**{part._fields[-1]: part._field_defaults[part._fields[-1]]}),)  # type: ignore[attr-defined]
    for name in rows:
        with pytest.raises(MalformedMessage, match=f"{type(part).__name__}.{name}: "):
            decode(
                msgpack.packb(
                    [8, [1, 2, 3, [[number, [5 if one == name else value for one, value in part._asdict().items()]]]]]
                )
            )


WRONG = [None, True, 1.5, b"x", (), {}, "text", 5, INTEGER_MAX + 1, -(2**63), (1, "a", None)]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_wrong_types_are_refused_by_name(cls: Any) -> None:
    """Each field accepts its declared type only, and the refusal names the field."""
    whole = tuple(of(cls))
    for place, right in enumerate(whole):
        if cls._fields[place] in ("fields", "order"):
            continue
        for wrong in WRONG:
            same = type(wrong) is type(right)
            if same and not (isinstance(wrong, int) and abs(wrong) > INTEGER_MAX):
                continue
            with pytest.raises(MalformedMessage, match=f"{cls.__name__}.{cls._fields[place]}: "):
                checked(cls, (*whole[:place], wrong, *whole[place + 1 :]))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x92\x01",
        msgpack.packb(None),
        msgpack.packb(1),
        msgpack.packb([1]),
        msgpack.packb([1, 2]),
        msgpack.packb([1, []]),
        msgpack.packb([1, {}]),
        msgpack.packb(["1", []]),
        msgpack.packb([True, list(of(Hello))]),
        msgpack.packb([1.0, list(of(Hello))]),
        msgpack.packb([99, []]),
        msgpack.packb([-1, []]),
        msgpack.packb({1: 2}),
        msgpack.packb([1, [], 3]),
        msgpack.packb([1, list(of(Hello))]) + b"\x00",
        msgpack.packb([1, [{(1, 2): 3}]]),
        msgpack.packb(msgpack.ExtType(5, b"x")),
        b"\x92\x01\x91\xd6\xff1234",
        b"\x92\x01\x96\xa1\xff\x01\x01\x01\x01\x01",
    ],
    ids=lambda frame: frame[:16].hex(),
)
def test_garbage_is_refused(frame: bytes) -> None:
    """Bytes that are no message raise MalformedMessage."""
    with pytest.raises(MalformedMessage):
        decode(frame)


@pytest.mark.parametrize("depth", [100, 500, 900, 1000, 1020, 5000, 200_000])
def test_depth_is_refused(depth: int) -> None:
    """A frame nested as deep as msgpack reads, or deeper, is refused like any other."""
    nested = b"\x91" * depth + b"\x01"
    with pytest.raises(MalformedMessage):
        decode(b"\x92\x01\x96" + nested + b"\x01" * 5)
    wrapped = b"\x92\x04\x93\x01\x02" + nested
    with pytest.raises(MalformedMessage):
        command_of(decode(wrapped))  # type: ignore[arg-type]


def test_oversize_is_refused_both_ways() -> None:
    """A frame above 1 MiB is neither made nor read, whatever is in it."""
    with pytest.raises(MalformedMessage, match="exceeds the frame limit of 1048576"):
        encode(messages.Goodbye("x" * FRAME_BYTES_MAX, leave=False))
    with pytest.raises(MalformedMessage, match="exceeds the limit"):
        decode(b"\x00" * (FRAME_BYTES_MAX + 1))
    assert decode(encode(messages.Goodbye("x" * (FRAME_BYTES_MAX - 100), leave=False)))


def test_unknown_kinds_say_that_the_peer_may_be_newer() -> None:
    """An unknown kind is refused with a hint."""
    with pytest.raises(MalformedMessage, match="a newer peer"):
        decode(msgpack.packb([99, []]))
    assert command_of(Numbered(1, 99, ())) == Unknown("command 99")
    assert command_of(Numbered(1, 99, (), "ReportLater")) == Unknown("ReportLater")


def _harmless(frame: bytes) -> None:
    """Only MalformedMessage ever rises, all the way to the command or order."""
    try:
        message = decode(frame)
        if isinstance(message, Numbered):
            command_of(message)
        elif isinstance(message, Level):
            order_of(message)
        encode(message)
    except MalformedMessage:
        return


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=8) | st.dictionaries(st.integers(0, 9) | st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=15,
)


@settings(max_examples=examples(120, 400))
@given(st.binary(max_size=64))
def test_any_bytes(frame: bytes) -> None:
    """Whatever bytes come, decoding gives a message or MalformedMessage."""
    _harmless(frame)


@settings(max_examples=examples(120, 400))
@given(st.integers(0, 12), st.lists(_values, max_size=9))
def test_any_fields(kind: int, fields: list[Any]) -> None:
    """Whatever values come under whatever kind, decoding gives a message or MalformedMessage."""
    _harmless(msgpack.packb([kind, fields]))


@settings(max_examples=examples(120, 400))
@given(st.integers(0, 12), st.lists(_values, max_size=10))
def test_any_command(kind: int, fields: list[Any]) -> None:
    """Whatever a numbered command holds, it is a command or MalformedMessage."""
    _harmless(msgpack.packb([4, [1, kind, fields]]))


@settings(max_examples=examples(120, 400))
@given(st.sampled_from([*FRAMES.values()]), st.integers(0, 999), st.integers(0, 255))
def test_one_byte_changed(cls: Any, spot: int, value: int) -> None:
    """One changed byte of a good frame gives a message or MalformedMessage."""
    frame = bytearray(encode(of(cls)))
    frame[spot % len(frame)] = value
    _harmless(bytes(frame))


def test_numbers_leave_room() -> None:
    """The largest number of a message can be added to and subtracted from and still lies in 64 bits."""
    assert msgpack.unpackb(msgpack.packb(INTEGER_MAX + INTEGER_MAX)) == 2**63
    assert checked(messages.Again, (INTEGER_MAX,)) == messages.Again(INTEGER_MAX)
    assert len(records()) > 0

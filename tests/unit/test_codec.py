"""How batches lie in the log: exact bytes, versions, garbage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import records

from dlrover_core.errors import LogError, SchemaTooNew
from dlrover_core.job.state import CODEC, REGISTRY
from dlrover_core.kernel.codec import FORMAT, Codec
from dlrover_core.kernel.events import Origin, Record, Registry, event

GOLDEN = Path(__file__).parent / "golden" / "batch_of_every_kind.hex"
RENEW = "DLROVER_GOLDEN"  # DLROVER_GOLDEN=write pytest tests/unit/test_codec.py


@event(7)
class Moved(NamedTuple):
    """The first version."""

    node: str


@event(7, version=3, upcast={1: lambda old: (*old, 0), 2: lambda old: (old[1], old[0])})
class MovedLater(NamedTuple):
    """The third: version 2 had ``by`` behind ``node``, version 3 puts it in front."""

    by: int
    node: str


def test_round_trip_of_every_kind() -> None:
    """A batch with one record of every kind decodes to itself."""
    batch = CODEC.batch(5, 9, records())
    assert CODEC.decode(batch.payload) == batch
    assert len(batch.records) == len(REGISTRY.by_kind)


def test_golden_bytes() -> None:
    """The bytes of every kind are what they were: logs of yesterday are read tomorrow."""
    payload = CODEC.batch(5, 9, records()).payload
    if os.environ.get(RENEW) == "write":
        GOLDEN.write_text("\n".join(payload.hex()[at : at + 120] for at in range(0, len(payload.hex()), 120)) + "\n")
    golden = bytes.fromhex(GOLDEN.read_text())
    assert CODEC.decode(golden).records == tuple(records())
    assert payload == golden, f"bytes of some kind changed; if the change is meant: {RENEW}=write pytest {__file__}"


def test_entries_sealed_one_by_one_are_the_batch() -> None:
    """The engine's way (entries packed as they come) and the tools' way give the same bytes."""
    made = records()
    entries = [CODEC.entry(record, made[0].at) for record in made]
    assert CODEC.seal(5, 9, made[0].at, made, entries).payload == CODEC.batch(5, 9, made).payload


def test_a_batch_is_plain_msgpack() -> None:
    """Any msgpack reader sees [format, token, counter, at, first seq, entries]."""
    raw = msgpack.unpackb(CODEC.batch(5, 9, records()).payload)
    assert raw[:5] == [FORMAT, 5, 9, 1_000_001, 1]
    assert len(raw[5]) == len(REGISTRY.by_kind)


def test_older_versions_pass_every_upcaster_in_turn() -> None:
    """A registry with version 3 of a kind reads bytes of versions 1 and 2."""
    old = Codec(Registry([Moved])).batch(1, 1, [Record(1, 0, 1, 0, Moved("worker-0-0"))])
    new = Codec(Registry([MovedLater]))
    assert new.decode(old.payload).records[0].event == MovedLater(0, "worker-0-0")
    second = msgpack.packb((1, 1, 1, 0, 1, [(7, 2, 0, 0, ("worker-0-0", 4))]))
    assert new.decode(second).records[0].event == MovedLater(4, "worker-0-0")


def test_newer_versions_and_unknown_kinds_are_too_new() -> None:
    """Bytes of a newer version, of an unknown kind or of a newer format raise SchemaTooNew that says to upgrade."""
    newer = Codec(Registry([MovedLater])).batch(1, 1, [Record(1, 0, 1, 0, MovedLater(1, "n"))])
    with pytest.raises(SchemaTooNew, match=r"Moved\) version 3.*upgrade"):
        Codec(Registry([Moved])).decode(newer.payload)
    with pytest.raises(SchemaTooNew, match=r"event kind 7 \(unknown\)"):
        CODEC.decode(newer.payload)
    with pytest.raises(SchemaTooNew, match="format 2"):
        CODEC.decode(msgpack.packb((2, 1, 1, 0, 1, [])))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x01",
        b"not a batch",
        msgpack.packb([1, 1, 1]),
        msgpack.packb((1, 1, 1, 0, 1, [5])),
        msgpack.packb((1, 1, 1, 0, 1, 5)),
        msgpack.packb((1, 1, 1, 0, 1, [(21, 1)])),
        msgpack.packb((1, 1, 1, 0, 1, [(21, 1, 0, 0, ("one", "too many"))])),
        msgpack.packb((1, 1, 1, 0, 1, [(21, 1, 0, 0, 5)])),
        msgpack.packb((1, 1, 1, "x", 1, [(21, 1, 0, 0, ("n",))])),
        msgpack.packb((1, 1, 1, 0, 1, [([21], 1, 0, 0, ("n",))])),
        msgpack.packb((1, 1, 1, 0, 1, [({}, 1, 0, 0, ("n",))])),
        msgpack.packb((1, 1, 1, 0, 1, [(21, "1", 0, 0, ("n",))])),
    ],
)
def test_garbage_is_a_log_error(payload: bytes) -> None:
    """Bytes that are no batch raise LogError and nothing else."""
    with pytest.raises(LogError):
        CODEC.decode(payload)


@given(st.binary(max_size=200))
def test_any_bytes(payload: bytes) -> None:
    """Whatever bytes come, decoding gives a batch or a LogError."""
    try:
        CODEC.decode(payload)
    except LogError:
        return


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_one_byte_changed(spot: int, value: int) -> None:
    """One changed byte gives another batch or a LogError, never another exception."""
    payload = bytearray(CODEC.batch(5, 9, records()).payload)
    payload[spot % len(payload)] = value
    try:
        CODEC.decode(bytes(payload))
    except LogError:
        return


@given(
    st.integers(1, 2**40),
    st.lists(
        st.tuples(st.integers(0, 2**40), st.booleans(), st.none() | st.integers(1, 2**62)), min_size=1, max_size=40
    ),
    st.integers(0, 2**50),
)
def test_round_trip_of_places(first: int, rows: list[tuple[int, bool, int | None]], at: int) -> None:
    """Sequence numbers, times, causes and origins come back as they went in, however large."""
    made = []
    for place, (dt, caused, number) in enumerate(rows):
        origin = None if number is None else Origin("worker-0-0", number, number)
        made.append(
            Record(first + place, at + dt, 3, first - 1 if caused else 0, REGISTRY.by_kind[21].cls("n"), origin)
        )
    batch = CODEC.batch(3, 1, made)
    assert CODEC.decode(batch.payload) == batch

"""State as plain values: packed, unpacked, hashed, and its schema named."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytest
from drive import Drive
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.job import silence
from dlrover_core.job.state import JobState
from dlrover_core.kernel.state import digest, lasting, pack, reset, schema, unpack
from dlrover_core.rules.model import MODEL

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Spot(NamedTuple):
    """A plain tuple with names."""

    name: str
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Part:
    """A nested slice."""

    number: int = 0
    spot: Spot | None = None


@dataclass(slots=True)
class Whole:
    """Every shape that states use."""

    text: str = ""
    raw: bytes = b""
    share: float = 0.0
    flag: bool = False
    parts: dict[str, Part] = field(default_factory=dict)
    by_number: dict[int, Part] = field(default_factory=dict)
    rows: list[Part] = field(default_factory=list)
    spots: tuple[Spot, ...] = ()
    names: tuple[str, ...] = ()
    maybe: Optional[Part] = None  # noqa: UP045  # both spellings of an optional are read


@dataclass(slots=True)
class Run:
    """A slice of which one field outlives a run."""

    count: int = lasting(int)
    limit: int = 7
    names: list[str] = field(default_factory=list)


_spots = st.builds(Spot, st.text(max_size=5), st.lists(st.integers(0, 9), max_size=3).map(tuple))
_parts = st.builds(Part, st.integers(-(2**63), 2**64 - 1), st.none() | _spots)
_wholes = st.builds(
    Whole,
    st.text(max_size=5),
    st.binary(max_size=5),
    st.floats(allow_nan=False),
    st.booleans(),
    st.dictionaries(st.text(max_size=3), _parts, max_size=3),
    st.dictionaries(st.integers(0, 99), _parts, max_size=3),
    st.lists(_parts, max_size=3),
    st.lists(_spots, max_size=3).map(tuple),
    st.lists(st.text(max_size=3), max_size=3).map(tuple),
    st.none() | _parts,
)


@given(_wholes)
def test_identity(whole: Whole) -> None:
    """A state unpacked from its bytes equals it, has the same types inside, and packs to the same bytes."""
    again = unpack(Whole, pack(whole))
    assert again == whole
    assert pack(again) == pack(whole)
    assert all(type(spot) is Spot for spot in again.spots)
    assert all(type(part) is Part for part in again.parts.values())


def test_identity_of_a_real_state() -> None:
    """A job's state in the middle of trouble survives packing, and goes on alike."""
    drive = Drive().up()
    drive.exit("worker-1-0", 3)
    drive.observe("worker-1-0", "failed", -9)
    drive.do(silence.NoteSilence("worker-0-0", 5))
    again = unpack(JobState, pack(drive.state))
    assert again == drive.state
    assert digest(again) == digest(drive.state)
    assert MODEL.due(again) == MODEL.due(drive.state)


def test_the_digest_is_of_the_values() -> None:
    """Equal states have equal digests, different ones different; it is 128 bits of hex."""
    assert digest(Whole()) == digest(Whole())
    assert digest(Whole()) != digest(Whole(text="a"))
    assert len(digest(Whole())) == 32


def _shape(**fields: Any) -> type:
    return make_dataclass("Shape", list(fields.items()))


def _part(**fields: Any) -> type:
    return make_dataclass("Inner", list(fields.items()))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_shape(a=int), _shape(b=int)),
        (_shape(a=int), _shape(a=str)),
        (_shape(a=int), _shape(a=int, b=int)),
        (_shape(a=int, b=int), _shape(b=int, a=int)),
        (_shape(a=_part(x=int)), _shape(a=_part(y=int))),
        (_shape(a=dict[str, _part(x=int)]), _shape(a=dict[str, _part(x=int, y=int)])),
        (_shape(a=list[_part(x=int)] | None), _shape(a=list[_part(x=str)] | None)),
        (
            _shape(a=tuple[NamedTuple("Row", [("x", int)]), ...]),  # type: ignore[misc]
            _shape(a=tuple[NamedTuple("Row", [("x", int), ("y", int)]), ...]),  # type: ignore[misc]
        ),
    ],
)
def test_the_schema_changes_with_the_shape(one: type, other: type) -> None:
    """Another name, type, number or order of fields, however deep and in tuples too, is another schema."""
    assert schema(one) != schema(other)


def test_the_schema_is_of_the_shape_alone() -> None:
    """The same shape declared again has the same schema."""
    assert schema(_shape(a=int)) == schema(_shape(a=int))
    assert MODEL.schema == schema(JobState)


def test_a_class_that_moves_keeps_its_schema() -> None:
    """A snapshot is read as before where a class of the state, however deep, stands in another module."""
    here, there = _part(x=int), _part(x=int)
    there.__module__ = "another.module"
    assert schema(_shape(a=here)) == schema(_shape(a=there))
    assert schema(_shape(a=dict[str, here] | None)) == schema(_shape(a=dict[str, there] | None))  # type: ignore[valid-type]


def test_a_state_of_another_shape_is_never_misread() -> None:
    """Bytes with too few or too many fields do not unpack."""
    with pytest.raises(ValueError, match="zip"):
        unpack(_shape(a=int, b=int), pack(_shape(a=int)(1)))


_HISTORY = f"""
import sys; sys.path[:0] = [{str(ROOT / "src")!r}, {str(HERE)!r}]
from drive import Drive
drive = Drive(nodes_max=5, nodes_min=2, nproc=2).up()
drive.exit("worker-1-0", 3); drive.cascade("worker-0-0", 0)
drive.observe("worker-4-0", "gone"); drive.wait(60); drive.observe("worker-2-0", "failed", 1, "hardware: gpu")
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL
print(drive.engine.digest(), MODEL.schema, [one.name for one in desired(drive.state).launch], len(drive.records))
"""


def test_the_digest_does_not_depend_on_hash_seeds() -> None:
    """Two processes with different string hashes fold the same history to the same digest."""
    told = []
    for seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", _HISTORY], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        told.append(done.stdout)
    assert told[0] == told[1]
    assert len(told[0]) > 50


def test_a_new_run_keeps_what_lasts() -> None:
    """All other fields are what they are at first; no two runs share a list."""
    one = Run()
    one.count, one.limit = 3, 1
    one.names.append("a")
    names = one.names
    reset(one)
    assert (one.count, one.limit, one.names, names) == (3, 7, [], ["a"])


def test_what_lasts() -> None:
    """What a job remembers of its earlier runs is chosen with care: whoever adds to it says so here."""
    slices = {spot.name: spot.default_factory for spot in fields(JobState) if "facts" in spot.metadata}
    assert {
        f"{name}.{spot.name}" for name, cls in slices.items() for spot in fields(cls) if "lasts" in spot.metadata
    } == {
        "job.state",
        "job.archived",
        "nodes.slots",
        "hosts.hosts",
        "world.worlds",
        "incidents.number",
        "incidents.history",
        "stragglers.recoveries",
        "hangs.number",
        "checks.number",
        "checks.changes",
        "plans.number",
        "checkpoints.offered",
        *(f"clusters.{name}" for name in ("version", "changed", "offers", "holders", "vacant")),
    }

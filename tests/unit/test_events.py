"""Events, kinds, and the registry that is append-only."""

from __future__ import annotations

import json
import os
import typing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dlrover_core.job.state import REGISTRY
from dlrover_core.kernel.events import Batch, Record, Registry, event, kind_of
from dlrover_core.rules.model import MODEL

KINDS = Path(__file__).parent / "golden" / "kinds.json"
RENEW = "DLROVER_GOLDEN"  # DLROVER_GOLDEN=write pytest tests/unit/test_events.py adds new kinds; it changes none


def _declared() -> dict[str, dict[str, Any]]:
    found = {}
    for number, kind in sorted(REGISTRY.by_kind.items()):
        hints = typing.get_type_hints(kind.cls)
        fields = [f"{name}: {_text(hints[name])}" for name in kind.cls._fields]  # type: ignore[attr-defined]
        found[str(number)] = {"name": kind.name, "version": kind.version, "fields": fields}
    return found


def _text(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def broken_promises(pinned: dict[str, dict[str, Any]], declared: dict[str, dict[str, Any]]) -> list[str]:
    """What an append-only registry forbids, one line each."""
    wrong = []
    for number, old in pinned.items():
        new = declared.get(number)
        if new is None:
            wrong.append(f"kind {number} ({old['name']}) is gone: a log may hold it")
        elif new["name"] != old["name"]:
            wrong.append(f"kind {number} was {old['name']} and is {new['name']}: a number is never reused or renamed")
        elif new["version"] < old["version"]:
            wrong.append(f"{old['name']} went back from version {old['version']} to {new['version']}")
        elif new["fields"] != old["fields"] and new["version"] == old["version"]:
            wrong.append(
                f"{old['name']} has other fields but still version {old['version']}: raise it and add an upcaster"
            )
    return wrong


def test_registry_is_append_only() -> None:
    """No kind's number is reused or renamed, and no kind's fields change without a new version."""
    pinned = json.loads(KINDS.read_text()) if KINDS.exists() else {}
    declared = _declared()
    assert broken_promises(pinned, declared) == []
    if os.environ.get(RENEW) == "write":
        KINDS.write_text(json.dumps(declared, indent=1) + "\n")
        pinned = declared
    assert pinned == declared, f"new kinds or versions: {RENEW}=write pytest {__file__}"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": "Other"}, "never reused or renamed"),
        ({"fields": ["a: str"]}, "raise it"),
        ({"version": 1, "fields": ["a: int"]}, "went back"),
        (None, "is gone"),
    ],
)
def test_append_only_is_checked(change: dict[str, Any] | None, complaint: str) -> None:
    """The pin finds what it is meant to find."""
    pinned = {"1": {"name": "One", "version": 2, "fields": ["a: int"]}}
    declared = {} if change is None else {"1": {**pinned["1"], **change}}
    assert complaint in broken_promises(pinned, declared)[0]


def test_a_new_version_may_change_fields() -> None:
    """With its version raised a kind may have other fields."""
    pinned = {"1": {"name": "One", "version": 1, "fields": ["a: int"]}}
    assert broken_promises(pinned, {"1": {"name": "One", "version": 2, "fields": ["a: str"]}}) == []


def test_every_event_is_a_plain_tuple() -> None:
    """Every event is a NamedTuple with a docstring, and so is immutable and slotted."""
    for cls in MODEL.events:
        assert issubclass(cls, tuple)
        assert cls.__doc__
        assert not hasattr(cls, "__dict__") or cls.__slots__ == ()


def test_two_classes_of_one_number_are_refused() -> None:
    """A registry refuses two kinds with one number."""

    @event(1)
    class One(NamedTuple):
        """One."""

    @event(1)
    class Another(NamedTuple):
        """Another."""

    with pytest.raises(ValueError, match="both One and Another"):
        Registry([One, Another])


def test_every_version_step_needs_its_upcaster() -> None:
    """A kind of version 3 without the step from 2 is refused."""

    @event(1, version=3, upcast={1: lambda fields: fields})
    class Third(NamedTuple):
        """Third."""

    with pytest.raises(ValueError, match=r"no upcaster from \[2\]"):
        Registry([Third])


def test_a_class_without_declaration_is_no_event() -> None:
    """What was not declared with @event has no kind."""
    with pytest.raises(TypeError, match=r"@event\(kind\)"):
        kind_of(int)


def test_a_batch_knows_its_ends() -> None:
    """A batch's first and last sequence numbers are those of its records."""
    records = tuple(Record(seq, 0, 1, 0, ()) for seq in (4, 5, 6))
    batch = Batch(1, 1, 0, records, b"")
    assert (batch.first_seq, batch.last_seq) == (4, 6)

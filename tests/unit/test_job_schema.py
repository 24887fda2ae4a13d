"""The JSON schema of job files is what the parser takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as some

from dlrover_adapters.cli import job_file, job_schema
from dlrover_adapters.cli.job_fields import GROUP_FIELDS, JOB_FIELDS, RESOURCE_FIELDS
from dlrover_core.errors import SpecError

SCHEMA = job_schema.schema()
_KINDS: Mapping[str, Any] = {"string": str, "array": list, "object": dict, "boolean": bool}


def faults(value: Any, schema: Mapping[str, Any], path: str = "$") -> Iterator[str]:
    """What a validator says of ``value``: the keywords that our schema uses, by the book. Unknown ones are an error."""
    for word, told in schema.items():
        check = _CHECKS.get(word)
        if check is None:
            assert word in {"description", "$schema", "title"}, word
        else:
            yield from check(value, told, schema, path)


def _type(value: Any, told: str, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    whole = number and (isinstance(value, int) or value.is_integer())
    if not (number if told == "number" else whole if told == "integer" else isinstance(value, _KINDS[told])):
        yield f"{path} is no {told}"


def _bound(word: str) -> Any:
    wrong: Any = {
        "minimum": lambda value, told: value < told,
        "maximum": lambda value, told: value > told,
        "exclusiveMinimum": lambda value, told: value <= told,
        "exclusiveMaximum": lambda value, told: value >= told,
    }[word]

    def check(value: Any, told: float, schema: Mapping[str, Any], path: str) -> Iterator[str]:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and wrong(value, told):
            yield f"{path} is beyond {word} {told}"

    return check


def _length(kind: type, word: str) -> Any:
    def check(value: Any, told: int, schema: Mapping[str, Any], path: str) -> Iterator[str]:
        if isinstance(value, kind) and (len(value) < told if word.startswith("min") else len(value) > told):
            yield f"{path} is beyond {word} {told}"

    return check


def _pattern(value: Any, told: str, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if isinstance(value, str) and re.search(told.replace("$", r"\Z"), value) is None:
        yield f"{path} does not match {told}"


def _enum(value: Any, told: list[str], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if value not in told:
        yield f"{path} is none of {told}"


def _properties(value: Any, told: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for name in told if isinstance(value, dict) else ():
        if name in value:
            yield from faults(value[name], told[name], f"{path}.{name}")


def _additional(value: Any, told: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for name in set(value) - set(schema.get("properties", {})) if isinstance(value, dict) else ():
        if told is False:
            yield f"{path} has {name}"
        else:
            yield from faults(value[name], told, f"{path}.{name}")


def _names(value: Any, told: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for name in value if isinstance(value, dict) else ():
        yield from faults(name, told, f"{path}.{name}")


def _items(value: Any, told: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for place, one in enumerate(value if isinstance(value, list) else ()):
        yield from faults(one, told, f"{path}[{place}]")


def _first_items(value: Any, told: list[Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for one, each in zip(value if isinstance(value, list) else (), told, strict=False):
        yield from faults(one, each, path)


def _required(value: Any, told: list[str], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for name in told if isinstance(value, dict) else ():
        if name not in value:
            yield f"{path} lacks {name}"


def _together(value: Any, told: Mapping[str, list[str]], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for name in set(told) & set(value) if isinstance(value, dict) else ():
        yield from _required(value, told[name], schema, path)


def _one_of(value: Any, told: list[Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if sum(not list(faults(value, one, path)) for one in told) != 1:
        yield f"{path} is not one of {len(told)}"


def _all_of(value: Any, told: list[Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for one in told:
        yield from faults(value, one, path)


def _not(value: Any, told: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if not list(faults(value, told, path)):
        yield f"{path} is what it must not be"


_CHECKS: Mapping[str, Any] = {
    **{word: _bound(word) for word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
    **{word: _length(str, word) for word in ("minLength", "maxLength")},
    "minItems": _length(list, "minItems"),
    "minProperties": _length(dict, "minProperties"),
    "type": _type,
    "pattern": _pattern,
    "enum": _enum,
    "properties": _properties,
    "items": _items,
    "prefixItems": _first_items,
    "additionalProperties": _additional,
    "propertyNames": _names,
    "required": _required,
    "not": _not,
    "dependentRequired": _together,
    "oneOf": _one_of,
    "allOf": _all_of,
}


def refused(document: Any) -> str:
    """What the parser says of it; empty: nothing."""
    try:
        job_file.parsed(document, "job.toml")
    except SpecError as error:
        return str(error)
    return ""


def unread(kind: Any, value: Any) -> str:
    """Why a kind does not read a value; empty: it does."""
    try:
        kind.read(value)
    except job_file.Wrong as wrong:
        return str(wrong)
    return ""


# What is right or wrong for some field or other.
VALUES = some.sampled_from(
    [
        *(0, 1, 3, -1, 16_385, 10**9 + 1, 2.5, -0.5, 10**9, True, False),
        *("", "x", "auto", "none", "gpu", "each", "group", "2:4", "4", "2-4", "500m", "0.5", "8Gi", "512Mi", "8", "Mi"),
        *(
            "trainer",
            "Trainer",
            "a.b",
            "torch",
            "off",
            "basic",
            "report",
            "restart",
            "node",
            "0,1",
            "0:3,1:1",
            "info",
            "never",
        ),
        *([], ["x"], [""], ["a", 1], ["json", "os.path"], ["a b"], {}, {"A": "b"}, {"A": 1}, {"A-B": "c"}, "x\ny"),
    ]
)
NAMES = [name for one in GROUP_FIELDS for name in (one.name, one.also) if name]
GROUP = some.dictionaries(some.sampled_from([*NAMES, "resources", "nmae"]), VALUES, max_size=4)


@settings(max_examples=examples(120, 400), deadline=None)
@given(GROUP, some.dictionaries(some.sampled_from([one.name for one in JOB_FIELDS] + ["nmae"]), VALUES, max_size=3))
def test_schema_and_parser_agree(group: dict[str, Any], job: dict[str, Any]) -> None:
    """What the schema refuses, the parser does; what only the parser refuses is beyond a schema, and of a kind listed here."""
    document = {**job, "groups": {"a": group if {"program", "module"} & set(group) else {"command": "sh", **group}}}
    said, found = refused(document), list(faults(document, SCHEMA))
    if found:
        assert said, found
    elif said:
        assert any(words in said for words in BEYOND), (said, document)


BEYOND = (
    "is not a file",
    "need 1 <= MIN <= MAX",
    "is more than maxReplicas",
    "is not a group of this job",
    "is this group itself",
    "stands there twice",
    "every node is a set",
    "ends = false or critical = false",
    "the store is torch's",
    "torch is asked for it",
    "nothing is imported for a command",
    "is set for every worker",
)
"""What it takes a look at other fields, other groups, or the disk to find."""


@pytest.mark.parametrize("field", JOB_FIELDS + GROUP_FIELDS + RESOURCE_FIELDS, ids=lambda field: str(field.name))
def test_each_kind_agrees_with_its_schema(field: Any) -> None:
    """Value by value: what a kind reads, its schema takes, and the other way round."""
    for value in VALUES.elements:  # type: ignore[attr-defined]  # of `sampled_from`
        said, found = unread(field.kind, value), list(faults(value, field.kind.schema()))
        assert bool(said) == bool(found) or any(words in said for words in BEYOND), (value, said, found)


def test_the_schema_is_printed() -> None:
    """`dlrover-run --job-schema`, without a script."""
    line = [sys.executable, "-c", "from dlrover_adapters.cli import run; run.main()", "--job-schema"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == SCHEMA
    assert SCHEMA["required"] == ["groups"]


def test_every_field_says_what_it_does() -> None:
    """In the table, and so in the schema and on the page."""
    for one in (*JOB_FIELDS, *GROUP_FIELDS, *RESOURCE_FIELDS):
        assert one.doc, one.name
        assert one.kind.words(), one.name

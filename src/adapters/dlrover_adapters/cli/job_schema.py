"""The JSON schema of job files (`dlrover-run --job-schema`), made from the table of fields that the parser reads by."""

from __future__ import annotations

import json
from typing import Any

from dlrover_adapters.cli.job_fields import GROUP_FIELDS, JOB_FIELDS, RESOURCE_FIELDS, Field
from dlrover_adapters.cli.job_kinds import GROUP_NAME

_SIZES = (("nodes", "replicas"), ("nodes", "minReplicas"), ("replicas", "minReplicas"))

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """What a job file may hold."""
    fields = _table(GROUP_FIELDS, {"resources": _table(RESOURCE_FIELDS)})
    group = {
        **fields,
        "oneOf": [{"required": [one]} for one in ("program", "module", "command")],
        "dependentRequired": {"minReplicas": ["maxReplicas"], "maxReplicas": ["minReplicas"]},
        "allOf": [
            *fields.get("allOf", []),
            *({"not": {"required": list(pair)}} for pair in _SIZES),
        ],
    }
    groups = {
        "type": "object",
        "description": "the groups of nodes, by name",
        "minProperties": 1,
        "propertyNames": {"pattern": f"^({GROUP_NAME})$"},
        "additionalProperties": group,
    }
    return {
        "$schema": DIALECT,
        "title": "a job of dlrover-run",
        **_table(JOB_FIELDS, {"groups": groups}),
        "required": ["groups"],
    }


def text() -> str:
    """The schema as it is printed."""
    return json.dumps(schema(), indent=2)


def _table(fields: tuple[Field, ...], beside: dict[str, Any] | None = None) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    twice = []
    for field in fields:
        told = {"description": _description(field), **field.kind.schema()}
        properties[field.name] = told
        if field.also:
            properties[field.also] = {**told, "description": f"the same as {field.name}"}
            twice.append({"not": {"required": [field.name, field.also]}})
    properties.update(beside or {})
    found = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**found, "allOf": twice} if twice else found


def _description(field: Field) -> str:
    default = f" (default: {field.default})" if field.default else ""
    return f"{field.doc}{default}"

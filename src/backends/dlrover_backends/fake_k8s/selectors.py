"""Label and field selectors, as strings of a query and as objects of a spec."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dlrover_backends.fake_k8s.answers import bad_request
from dlrover_backends.fake_k8s.kinds import Kind

Object = dict[str, Any]
Test = Callable[[Object], bool]

_SET = re.compile(r"^\s*(?P<key>[\w./-]+)\s+(?P<op>in|notin)\s+\((?P<values>[^)]*)\)\s*$")
_EQUAL = re.compile(r"^\s*(?P<key>[\w./-]+)\s*(?P<op>==|=|!=)\s*(?P<value>[\w.-]*)\s*$")
_EXISTS = re.compile(r"^\s*(?P<no>!?)\s*(?P<key>[\w./-]+)\s*$")

# Beside metadata.name and metadata.namespace, which every kind has.
FIELDS = {
    ("", "pods"): {
        "spec.nodeName": "",
        "spec.restartPolicy": "",
        "spec.schedulerName": "",
        "spec.serviceAccountName": "",
        "spec.hostNetwork": "false",
        "status.phase": "",
        "status.podIP": "",
        "status.nominatedNodeName": "",
    },
    ("", "nodes"): {"spec.unschedulable": "false"},
    ("", "events"): {
        "involvedObject.kind": "",
        "involvedObject.namespace": "",
        "involvedObject.name": "",
        "involvedObject.uid": "",
        "involvedObject.apiVersion": "",
        "involvedObject.resourceVersion": "",
        "involvedObject.fieldPath": "",
        "reason": "",
        "reportingComponent": "",
        "source": "",
        "type": "",
    },
    ("", "namespaces"): {"status.phase": ""},
    ("", "secrets"): {"type": ""},
    ("batch", "jobs"): {"status.successful": "0"},
}


def labels(text: str) -> Callable[[dict[str, str]], bool]:
    """A test of labels from a query's labelSelector.

    Raises:
        Refused: the selector cannot be parsed.
    """
    tests = [_requirement(part) for part in _parts(text)]
    return lambda found: all(test(found) for test in tests)


def _parts(text: str) -> list[str]:
    return [part for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _requirement(part: str) -> Callable[[dict[str, str]], bool]:
    if match := _SET.match(part):
        key, values = match["key"], {one.strip() for one in match["values"].split(",")}
        if match["op"] == "in":
            return lambda found: key in found and found[key] in values
        return lambda found: found.get(key) not in values
    if match := _EQUAL.match(part):
        key, value = match["key"], match["value"]
        if match["op"] == "!=":
            return lambda found: found.get(key) != value
        return lambda found: found.get(key) == value
    if match := _EXISTS.match(part):
        key = match["key"]
        if match["no"]:
            return lambda found: key not in found
        return lambda found: key in found
    found = part.strip().lstrip("!")[:1] if part.strip().startswith("!") and part.strip()[1:2] != "!" else "!"
    raise bad_request(f"unable to parse requirement: found '{found}', expected: identifier")


def labels_of_object(selector: Object | None) -> Callable[[dict[str, str]], bool]:
    """A test of labels from a selector object with matchLabels and matchExpressions."""
    wanted = (selector or {}).get("matchLabels") or {}
    expressions = (selector or {}).get("matchExpressions") or []

    def matches(found: dict[str, str]) -> bool:
        return all(found.get(key) == value for key, value in wanted.items()) and all(
            expression(one, found) for one in expressions
        )

    return matches


def expression(one: Object, found: dict[str, str]) -> bool:
    """Whether labels satisfy one of matchExpressions, of a label selector or of node affinity."""
    key, operator, values = one["key"], one["operator"], one.get("values") or []
    if operator == "In":
        return found.get(key) in values
    if operator == "NotIn":
        return found.get(key) not in values
    if operator == "Exists":
        return key in found
    if operator == "DoesNotExist":
        return key not in found
    if operator in {"Gt", "Lt"}:
        if key not in found or not found[key].lstrip("-").isdigit():
            return False
        return int(found[key]) > int(values[0]) if operator == "Gt" else int(found[key]) < int(values[0])
    return False


def fields(kind: Kind, text: str) -> Test:
    """A test of objects from a query's fieldSelector.

    Raises:
        Refused: the server cannot select this kind by that field.
    """
    tests: list[Test] = []
    for part in text.split(","):
        match = re.match(r"^(?P<path>[^=!]+)(?P<op>==|=|!=)(?P<value>.*)$", part)
        if match is None:
            raise bad_request(f"invalid selector: '{part}'; can't understand '{part}'")
        path, value = match["path"], match["value"]
        known = FIELDS.get(kind.key, {})
        if path not in known and path not in {"metadata.name", "metadata.namespace"}:
            raise bad_request(f"field label not supported: {path}")
        tests.append(_field(path.split("."), known.get(path, ""), value, wanted=match["op"] != "!="))
    return lambda obj: all(test(obj) for test in tests)


def _field(path: list[str], default: str, value: str, *, wanted: bool) -> Test:
    def matches(obj: Object) -> bool:
        found: Any = obj
        for step in path:
            found = (found or {}).get(step) if isinstance(found, dict) else None
        if isinstance(found, bool):
            found = str(found).lower()
        elif isinstance(found, dict):
            found = found.get("component")
        return (str(found if found is not None else default) == value) is wanted

    return matches

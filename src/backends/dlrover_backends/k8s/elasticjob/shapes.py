"""The shape of a pod template, as far as it is read here or by the masters. Pure.

The definition of ElasticJobs takes anything under ``template``; what no API server would take is told before a pod is made.
"""

from __future__ import annotations

from typing import Any

from dlrover_backends.k8s.api import Json
from dlrover_backends.k8s.quantities import shown
from dlrover_core.errors import SpecError

_NAMED = {"env": "{name: A, value: b}", "volumeMounts": "{name: data, mountPath: /data}"}
_LISTS = {
    **_NAMED,
    "envFrom": "{configMapRef: {name: a}}",
    "ports": "{containerPort: 8080}",
}
_MAPS = ("resources", "securityContext")
_POD_LISTS = {"volumes": "{name: data, emptyDir: {}}", "tolerations": "{key: a, operator: Exists}"}
_POD_MAPS = ("affinity", "nodeSelector", "securityContext")


def pod(template: Json, at: str) -> None:
    """Check metadata and spec of a pod. ``at``: where it stands. Raises `SpecError`."""
    metadata, spec = template["metadata"], template["spec"]
    for field in ("labels", "annotations"):
        _texts(metadata.get(field), f"{at}.metadata.{field}")
    for field, example in _POD_LISTS.items():
        _mappings(spec.get(field), f"{at}.spec.{field}", example)
    for field in _POD_MAPS:
        _mapping(spec.get(field), f"{at}.spec.{field}")
    for kind in ("containers", "initContainers"):
        where = f"{at}.spec.{kind}"
        for index, one in enumerate(_mappings(spec.get(kind), where, "{name: main, image: IMAGE}")):
            _container(one, f"{where}[{index}]")


def _container(one: Json, at: str) -> None:
    if not one.get("image"):
        raise SpecError(f"{at}.image", "missing: write NAME:TAG")
    for field in ("name", "image"):
        if not isinstance(one.get(field, ""), str):
            raise SpecError(f"{at}.{field}", f"{shown(one[field])} is no text")
    for field, example in _LISTS.items():
        found = _mappings(one.get(field), f"{at}.{field}", example)
        if field in _NAMED:
            _names(found, f"{at}.{field}", example)
    for index, each in enumerate(one.get("env") or ()):
        value = each.get("value")
        if value is not None and not isinstance(value, str):
            name, text = each["name"], str(value).lower() if isinstance(value, bool) else value
            said = f"write value: {shown(str(text))}" if isinstance(value, (bool, int, float)) else "write a text"
            raise SpecError(f"{at}.env[{index}].value", f"{shown(value)} of {name} is no text: {said}")
    for field in _MAPS:
        _mapping(one.get(field), f"{at}.{field}")


def _names(found: list[Json], at: str, example: str) -> None:
    for index, each in enumerate(found):
        if not isinstance(each.get("name"), str) or not each["name"]:
            raise SpecError(f"{at}[{index}].name", f"{shown(each)} has no name: write {example}")


def _mappings(value: Any, at: str, example: str) -> list[Json]:
    """A list of mappings; empty: there is none."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise SpecError(at, f"{shown(value)} is no list of mappings: write a list of {example}")
    return value


def _mapping(value: Any, at: str) -> None:
    if value is not None and not isinstance(value, dict):
        raise SpecError(at, f"{shown(value)} is no mapping of names to values")


def _texts(value: Any, at: str) -> None:
    _mapping(value, at)
    for name, one in (value or {}).items():
        if not isinstance(one, str):
            raise SpecError(f"{at}.{name}", f"{shown(one)} is no text: write it in quotes")

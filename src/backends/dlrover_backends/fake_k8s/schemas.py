"""Structural schemas of custom resources: pruning, defaults, types, limits, and rules in a part of CEL."""

from __future__ import annotations

import ast
import re
from typing import Any

from dlrover_backends.fake_k8s.answers import cause, required, unsupported, wrong
from dlrover_backends.fake_k8s.validating import shown

Object = dict[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_ROOT = {"apiVersion", "kind", "metadata"}


def pruned(schema: Object, value: Any, path: str = "", found: list[str] | None = None) -> tuple[Any, list[str]]:
    """The value without fields that the schema does not know, and their paths."""
    found = [] if found is None else found
    if isinstance(value, dict):
        if schema.get("x-kubernetes-preserve-unknown-fields") and not schema.get("properties"):
            return value, found
        properties = schema.get("properties") or {}
        more = schema.get("additionalProperties")
        result = {}
        for key, one in value.items():
            at = f"{path}.{key}" if path else key
            if not path and key in _ROOT:
                result[key] = one
            elif key in properties:
                result[key] = pruned(properties[key], one, at, found)[0]
            elif isinstance(more, dict):
                result[key] = pruned(more, one, at, found)[0]
            elif more or schema.get("x-kubernetes-preserve-unknown-fields"):
                result[key] = one
            else:
                found.append(at)
        return result, found
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [pruned(schema["items"], one, f"{path}[{i}]", found)[0] for i, one in enumerate(value)], found
    return value, found


def defaulted(schema: Object, value: Any) -> Any:
    """The value with the schema's defaults."""
    if isinstance(value, dict):
        result = dict(value)
        for key, one in (schema.get("properties") or {}).items():
            if key not in result and "default" in one:
                result[key] = one["default"]
            if key in result:
                result[key] = defaulted(one, result[key])
        more = schema.get("additionalProperties")
        if isinstance(more, dict):
            known = schema.get("properties") or {}
            result = {key: one if key in known else defaulted(more, one) for key, one in result.items()}
        return result
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [defaulted(schema["items"], one) for one in value]
    return value


def causes(schema: Object, obj: Object, old: Object | None = None) -> list[Object]:
    """What is wrong with an object: by types and limits, or if those hold by rules."""
    found = _causes(schema, obj, "")
    if not found:
        return _rules(schema, obj, old, "")
    if any(one["reason"] != "FieldValueInvalid" for one in found) and _has_rules(schema):
        words = (
            "some validation rules were not checked because the object was invalid; correct the existing errors to "
            "complete validation"
        )
        found.append(cause("FieldValueInvalid", f"Invalid value: null: {words}", "<nil>"))
    return found


def _causes(schema: Object, value: Any, path: str) -> list[Object]:
    if value is None:
        return [] if schema.get("nullable") or not path else [_type(path, "null", schema)]
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, (int, str)) else [_type(path, _name(value), schema)]
    wanted = schema.get("type")
    if wanted and (not isinstance(value, _TYPES[wanted]) or (isinstance(value, bool) and wanted != "boolean")):
        return [_type(path, _name(value), schema)]
    found: list[Object] = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(unsupported(path, shown(value), schema["enum"]))
    found += _limits(schema, value, path)
    if isinstance(value, dict):
        for key in schema.get("required") or []:
            if key not in value:
                found.append(required(f"{path}.{key}" if path else key))
        more = schema.get("additionalProperties")
        for key, one in value.items():
            inner = (schema.get("properties") or {}).get(key, more if isinstance(more, dict) else None)
            if inner and not (not path and key in _ROOT):
                found += _causes(inner, one, f"{path}.{key}" if path else key)
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for index, one in enumerate(value):
            found += _causes(schema["items"], one, f"{path}[{index}]")
    return found


def _limits(schema: Object, value: Any, path: str) -> list[Object]:
    found: list[Object] = []
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and "minimum" in schema and value < schema["minimum"]:
        words = f"{path} in body should be greater than or equal to {schema['minimum']}"
        found.append(wrong(path, shown(value), words))
    if number and "maximum" in schema and value > schema["maximum"]:
        found.append(wrong(path, shown(value), f"{path} in body should be less than or equal to {schema['maximum']}"))
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            found.append(wrong(path, shown(value), f"{path} in body should match '{schema['pattern']}'"))
        if len(value) > schema.get("maxLength", len(value)):
            words = f"Too long: may not be more than {schema['maxLength']} bytes"
            found.append(cause("FieldValueTooLong", words, path))
        if len(value) < schema.get("minLength", 0):
            words = f"{path} in body should be at least {schema['minLength']} chars long"
            found.append(wrong(path, shown(value), words))
    if isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            words = f"Too many: {len(value)}: must have at most {schema['maxItems']} items"
            found.append(cause("FieldValueTooMany", words, path))
        if len(value) < schema.get("minItems", 0):
            words = f"{path} in body should have at least {schema['minItems']} items"
            found.append(wrong(path, str(len(value)), words))
    return found


def _name(value: Any) -> str:
    for name in ("boolean", "object", "array", "string", "integer", "number"):
        if isinstance(value, _TYPES[name]):
            return name
    return "null"


def _type(path: str, found: str, schema: Object) -> Object:
    wanted = schema.get("type") or "integer or string"
    words = f'Invalid value: "{found}": {path} in body must be of type {wanted}: "{found}"'
    return cause("FieldValueTypeInvalid", words, path)


def scale_causes(scale: Object | None, obj: Object) -> list[Object]:
    """What is wrong with the number of replicas that the scale subresource shows."""
    if not scale:
        return []
    path = scale["specReplicasPath"]
    value = at(obj, path)
    if value is None:
        return []
    if isinstance(value, bool) or not isinstance(value, int):
        words = f"Invalid value: 0: {path} accessor error: {value} is of the type {_name(value)}, expected int64"
        return [cause("FieldValueInvalid", words, path)]
    if value < 0:
        return [wrong(path, str(value), "should be a non-negative integer")]
    return []


def at(obj: Any, path: str) -> Any:
    """What lies at a path like `.spec.replicas`; None if nothing does."""
    for step in path.strip(".").split("."):
        obj = obj.get(step) if isinstance(obj, dict) else None
    return obj


def definition_causes(schema: Object) -> list[Object]:
    """What a schema lacks to be structural."""
    root = "spec.validation.openAPIV3Schema"
    found = _untyped(schema, root)
    if not schema.get("type"):
        found.append(required(f"{root}.type", "must not be empty at the root"))
    return found


def _untyped(schema: Object, path: str) -> list[Object]:
    found: list[Object] = []
    for key, one in (schema.get("properties") or {}).items():
        inner = f"{path}.properties[{key}]"
        free = one.get("x-kubernetes-int-or-string") or one.get("x-kubernetes-preserve-unknown-fields")
        if not one.get("type") and not free:
            found.append(required(f"{inner}.type", "must not be empty for specified object fields"))
        found += _untyped(one, inner)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found += _untyped(schema[key], f"{path}.{key}")
    return found


def _has_rules(schema: Object) -> bool:
    inner = [*(schema.get("properties") or {}).values(), schema.get("items"), schema.get("additionalProperties")]
    return bool(schema.get("x-kubernetes-validations")) or any(
        _has_rules(one) for one in inner if isinstance(one, dict)
    )


def _rules(schema: Object, value: Any, old: Any, path: str) -> list[Object]:
    found: list[Object] = []
    for rule in schema.get("x-kubernetes-validations") or []:
        if "oldSelf" in rule["rule"] and old is None:
            continue
        if holds(rule["rule"], value, old) is False:
            words = rule.get("message") or f"failed rule: {rule['rule']}"
            at_field = path + rule.get("fieldPath", "")
            found.append(cause(rule.get("reason", "FieldValueInvalid"), f"Invalid value: {words}", at_field))
    if isinstance(value, dict):
        more = schema.get("additionalProperties")
        for key, one in value.items():
            inner = (schema.get("properties") or {}).get(key, more if isinstance(more, dict) else None)
            if inner:
                before = old.get(key) if isinstance(old, dict) else None
                found += _rules(inner, one, before, f"{path}.{key}" if path else key)
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for index, one in enumerate(value):
            found += _rules(schema["items"], one, None, f"{path}[{index}]")
    return found


class _Seen:
    """A value as a rule sees it: fields as attributes."""

    def __init__(self, value: Object) -> None:
        self._value = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _seen(self._value[name])

    def __contains__(self, key: object) -> bool:
        return key in self._value

    def __len__(self) -> int:
        return len(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Seen) and other._value == self._value

    def __hash__(self) -> int:
        return id(self)


def _seen(value: Any) -> Any:
    if isinstance(value, dict):
        return _Seen(value)
    return [_seen(one) for one in value] if isinstance(value, list) else value


def holds(rule: str, value: Any, old: Any = None) -> bool | None:
    """Whether a rule holds; None if it is written in more of CEL than this knows."""
    text = re.sub(r"!(?!=)", " not ", rule)
    text = text.replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"\bhas\(([\w.]+)\)", r"has(lambda: \1)", text)
    text = re.sub(r"\btrue\b", "True", re.sub(r"\bfalse\b", "False", re.sub(r"\bnull\b", "None", text)))

    def has(look: Any) -> bool:
        try:
            look()
        except KeyError:
            return False
        return True

    names = {"has": has, "self": _seen(value), "oldSelf": _seen(old), "size": len, "int": int, "string": str}
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return bool(eval(compile(tree, "<rule>", "eval"), {"__builtins__": {}, **names}))  # noqa: S307  test's own schema
    except (SyntaxError, NameError, AttributeError, TypeError):
        return None
    except KeyError:
        return False

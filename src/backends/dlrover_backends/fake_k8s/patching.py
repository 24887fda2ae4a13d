"""The patch formats of the Kubernetes API: JSON patch, merge patch, strategic merge patch, server-side apply."""

from __future__ import annotations

import copy
from typing import Any

from dlrover_backends.fake_k8s.answers import Refused, status

Object = dict[str, Any]

# Lists that a strategic merge patch merges, by the field that names an item; a list that is not here is replaced.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "conditions": "type",
    "addresses": "type",
    "imagePullSecrets": "name",
    "ownerReferences": "uid",
    "podIPs": "ip",
    "hostIPs": "ip",
    "schedulingGates": "name",
    "resourceClaims": "name",
    "topologySpreadConstraints": "topologyKey",
    "hostAliases": "ip",
    "secrets": "name",
}
MERGED_SETS = frozenset({"finalizers"})


def merge(target: Any, patch: Any) -> Any:
    """RFC 7386: null removes, objects merge, all else is replaced."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def strategic(target: Any, patch: Any, field: str = "") -> Any:
    """A merge patch that also merges the lists of MERGE_KEYS."""
    if isinstance(patch, list):
        return _strategic_list(target, patch, field)
    if not isinstance(patch, dict):
        return patch
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            of = key.partition("/")[2]
            result[of] = [one for one in result.get(of) or [] if one not in value]
        elif key.startswith("$"):
            continue
        elif value is None:
            result.pop(key, None)
        else:
            order = patch.get(f"$setElementOrder/{key}")
            result[key] = (
                strategic(result.get(key), value, key)
                if order is None
                else _ordered(result.get(key), value, order, key)
            )
    return result


def _ordered(target: Any, patch: Any, order: list[Any], field: str) -> Any:
    """A merged list in the order that the patch names."""
    merged = strategic(target, patch, field)
    name = MERGE_KEYS.get(field)
    if name is None or not isinstance(merged, list):
        return merged
    places = [one.get(name) if isinstance(one, dict) else one for one in order]
    return sorted(merged, key=lambda one: places.index(one.get(name)) if one.get(name) in places else len(places))


def _strategic_list(target: Any, patch: list[Any], field: str) -> Any:
    have = list(target) if isinstance(target, list) else []
    if field in MERGED_SETS:
        return have + [one for one in patch if one not in have]
    name = "containerPort" if field == "ports" and any("containerPort" in one for one in patch) else None
    name = name or MERGE_KEYS.get(field)
    if name is None or not all(isinstance(one, dict) for one in patch):
        return [strategic(None, one) if isinstance(one, dict) else one for one in patch]
    if any(one.get("$patch") == "replace" for one in patch):
        return [one for one in patch if "$patch" not in one]
    there = {one.get(name): (place, one) for place, one in enumerate(have)}
    named = {one.get(name) for one in patch}
    kept = [one for one in have if one.get(name) not in named]
    merged = [
        strategic(there[one.get(name)][1] if one.get(name) in there else None, one)
        for one in patch
        if one.get("$patch") != "delete"
    ]
    result: list[Any] = []
    while kept and merged:  # as the API server orders them: an item that is new goes before what the patch leaves alone
        first, second = kept[0].get(name), merged[0].get(name)
        before = second in there and there[first][0] < there[second][0]
        result.append(kept.pop(0) if before else merged.pop(0))
    return result + kept + merged


def json_patch(target: Object, steps: list[Object]) -> Object:
    """RFC 6902.

    Raises:
        Refused: a test failed, or a path leads nowhere.
    """
    result: Any = copy.deepcopy(target)
    for step in steps:
        try:
            result = _step(result, step)
        except (KeyError, IndexError, ValueError, TypeError) as wrong:
            words = "the server rejected our request due to an error in our request"
            raise Refused(422, status(422, words, details={})) from wrong
    if not isinstance(result, dict):
        raise Refused(422, status(422, "the server rejected our request due to an error in our request", details={}))
    return result


def _step(document: Any, step: Object) -> Any:
    path = [one.replace("~1", "/").replace("~0", "~") for one in step["path"].split("/")[1:]]
    op = step["op"]
    if op == "test":
        if _walk(document, path) != step["value"]:
            raise ValueError(step["path"])
        return document
    if op in {"move", "copy"}:
        source = [one.replace("~1", "/").replace("~0", "~") for one in step["from"].split("/")[1:]]
        value = copy.deepcopy(_walk(document, source))
        if op == "move":
            _remove(document, source)
        return _set(document, path, value, insert=True)
    if op == "remove":
        _remove(document, path)
        return document
    if op == "replace":
        _walk(document, path)
        return _set(document, path, step["value"], insert=False)
    if op == "add":
        return _set(document, path, step["value"], insert=True)
    raise ValueError(op)


def _walk(document: Any, path: list[str]) -> Any:
    for one in path:
        document = document[int(one)] if isinstance(document, list) else document[one]
    return document


def _remove(document: Any, path: list[str]) -> None:
    parent = _walk(document, path[:-1])
    if isinstance(parent, list):
        del parent[int(path[-1])]
    else:
        del parent[path[-1]]


def _set(document: Any, path: list[str], value: Any, *, insert: bool) -> Any:
    if not path:
        return value
    parent, last = _walk(document, path[:-1]), path[-1]
    if isinstance(parent, list):
        if last == "-":
            parent.append(value)
        elif insert:
            parent.insert(int(last), value)
        else:
            parent[int(last)] = value
    else:
        parent[last] = value
    return document


Path = tuple[str, ...]
NOT_OWNED = {
    ("apiVersion",),
    ("kind",),
    ("metadata", "name"),
    ("metadata", "namespace"),
    ("metadata", "resourceVersion"),
}


def leaves(obj: Any, path: Path = ()) -> dict[Path, Any]:
    """The fields of an applied object by path; a list counts as one field."""
    if isinstance(obj, dict) and obj:
        found: dict[Path, Any] = {}
        for key, value in obj.items():
            found.update(leaves(value, (*path, key)))
        return found
    return {} if path in NOT_OWNED else {path: obj}


class Applied:
    """Who applied which fields of one object: server-side apply, with lists as single fields."""

    def __init__(self) -> None:
        self.owners: dict[str, set[Path]] = {}

    def apply(self, target: Object, patch: Object, manager: str, *, force: bool) -> Object:
        """The object after an apply.

        Raises:
            Refused: another manager owns a field with another value, and `force` is off.
        """
        wanted = leaves(patch)
        now = leaves(target)
        conflicts = [
            (owner, path)
            for owner, owned in self.owners.items()
            if owner != manager
            for path in sorted(owned & wanted.keys())
            if now.get(path) != wanted[path]
        ]
        if conflicts and not force:
            causes = [
                {"reason": "FieldManagerConflict", "message": f'conflict with "{owner}"', "field": "." + ".".join(path)}
                for owner, path in conflicts
            ]
            listed = "; ".join(f'conflict with "{owner}": .{".".join(path)}' for owner, path in conflicts)
            count = f"{len(conflicts)} conflict{'s' if len(conflicts) > 1 else ''}"
            raise Refused(409, status(409, f"Apply failed with {count}: {listed}", details={"causes": causes}))
        for owner, path in conflicts:
            self.owners[owner].discard(path)
        dropped = self.owners.get(manager, set()) - wanted.keys()
        self.owners[manager] = set(wanted)
        result = merge(target, patch)
        for path in dropped:
            if not any(path in owned for owner, owned in self.owners.items() if owner != manager):
                result = _without(result, path)
        assert isinstance(result, dict)
        return result


def _without(obj: Any, path: Path) -> Any:
    if not isinstance(obj, dict) or path[0] not in obj:
        return obj
    result = dict(obj)
    if len(path) == 1:
        del result[path[0]]
    else:
        result[path[0]] = _without(result[path[0]], path[1:])
    return result

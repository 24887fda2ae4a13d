"""Admission: namespaces that end, priorities, service accounts, quotas."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from dlrover_backends.fake_k8s import answers
from dlrover_backends.fake_k8s.kinds import Kind
from dlrover_backends.fake_k8s.quantities import amount
from dlrover_backends.fake_k8s.store import Store

Object = dict[str, Any]

_SYSTEM = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}
_CLASSES = ("scheduling.k8s.io", "priorityclasses")


def namespace(store: Store, kind: Kind, where: str, name: str, namespaces: Kind) -> None:
    """Refuse a namespace that is not there, or that is on its way out.

    Raises:
        Refused: 404 or 403.
    """
    found = store.get(("", "namespaces"), ("", where))
    if found is None:
        raise answers.not_found(namespaces, where)
    if found.obj["metadata"].get("deletionTimestamp"):
        cause = answers.cause("NamespaceTerminating", f"namespace {where} is being terminated", "metadata.namespace")
        words = f"unable to create new content in namespace {where} because it is being terminated"
        raise answers.forbidden(kind, name, words, [cause])


def priority(store: Store, kind: Kind, obj: Object) -> Object:
    """A pod with the priority of its class.

    Raises:
        Refused: 403 for a class that does not exist.
    """
    spec = dict(obj["spec"])
    wanted = spec.get("priorityClassName")
    value, policy = 0, "PreemptLowerPriority"
    if wanted in _SYSTEM:
        value = _SYSTEM[wanted]
    elif wanted:
        found = store.get(_CLASSES, ("", wanted))
        if found is None:
            words = f"no PriorityClass with name {wanted} was found"
            raise answers.forbidden(kind, obj["metadata"].get("name", ""), words)
        value = found.obj["value"]
        policy = found.obj.get("preemptionPolicy", policy)
    else:
        for one in store.shelf(_CLASSES).objects.values():
            if one.obj.get("globalDefault"):
                spec["priorityClassName"], value = one.obj["metadata"]["name"], one.obj["value"]
    spec["priority"] = value
    spec.setdefault("preemptionPolicy", policy)
    return {**obj, "spec": spec}


def service_account(store: Store, kind: Kind, where: str, obj: Object) -> None:
    """Refuse a pod whose service account does not exist.

    Raises:
        Refused: 403.
    """
    spec = obj.get("spec") or {}
    name = spec.get("serviceAccountName") or spec.get("serviceAccount") or "default"
    if name != "default" and store.get(("", "serviceaccounts"), (where, name)) is None:
        words = f'error looking up service account {where}/{name}: serviceaccount "{name}" not found'
        raise answers.forbidden(kind, obj["metadata"].get("name", ""), words)


def usage(pod: Object) -> dict[str, Decimal]:
    """What one pod counts for in a quota."""
    used: dict[str, Decimal] = {"pods": Decimal(1), "count/pods": Decimal(1)}
    for container in pod["spec"].get("containers") or []:
        resources = container.get("resources") or {}
        for side in ("requests", "limits"):
            for what, value in (resources.get(side) or {}).items():
                for key in (f"{side}.{what}", *((what,) if side == "requests" and what in {"cpu", "memory"} else ())):
                    used[key] = used.get(key, Decimal(0)) + amount(value)
    return used


def used(store: Store, where: str, hard: Object) -> Object:
    """What a namespace uses of a quota's resources, as quantities."""
    sums = dict.fromkeys(hard, Decimal(0))
    for (namespace_of, _), stored in store.shelf(("", "pods")).objects.items():
        if namespace_of == where and stored.obj.get("status", {}).get("phase") not in {"Succeeded", "Failed"}:
            for what, value in usage(stored.obj).items():
                if what in sums:
                    sums[what] += value
    for what in hard:
        if what.startswith("count/") and what != "count/pods":
            plural, _, group = what.removeprefix("count/").partition(".")
            sums[what] = Decimal(sum(key[0] == where for key in store.shelf((group, plural)).objects))
    return {what: written(value) for what, value in sums.items()}


def written(value: Decimal) -> str:
    """A number as a quantity: whole, or in thousandths."""
    if value == value.to_integral_value():
        return str(int(value))
    return f"{int(value * 1000)}m"


def quota(store: Store, kind: Kind, where: str, obj: Object) -> None:
    """Refuse what a namespace's quotas have no room for.

    Raises:
        Refused: 403, naming the quota and its numbers.
    """
    name = obj["metadata"].get("name", "")
    quotas = [one for key, one in store.shelf(("", "resourcequotas")).objects.items() if key[0] == where]
    if not quotas:
        return
    asked = usage(obj) if kind.key == ("", "pods") else {}
    counted = f"count/{kind.qualified}"
    asked.setdefault(counted, Decimal(1))
    for one in sorted(quotas, key=lambda stored: str(stored.obj["metadata"]["name"])):
        hard = one.obj["spec"].get("hard") or {}
        now = used(store, where, hard)
        missing = [what for what in sorted(hard) if kind.key == ("", "pods") and "." in what and what not in asked]
        title = one.obj["metadata"]["name"]
        if missing and any(what.startswith(("requests.", "limits.")) for what in missing):
            words = f"failed quota: {title}: must specify {','.join(missing)}"
            raise answers.forbidden(kind, name, words)
        over = [what for what in sorted(hard) if what in asked and amount(now[what]) + asked[what] > amount(hard[what])]
        if over:
            requested = ",".join(f"{what}={written(asked[what])}" for what in over)
            held = ",".join(f"{what}={now[what]}" for what in over)
            limited = ",".join(f"{what}={hard[what]}" for what in over)
            words = f"exceeded quota: {title}, requested: {requested}, used: {held}, limited: {limited}"
            raise answers.forbidden(kind, name, words)

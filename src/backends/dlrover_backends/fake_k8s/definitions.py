"""The controllers of CustomResourceDefinitions and of quotas: a definition is served a moment after its creation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dlrover_backends.fake_k8s import admission
from dlrover_backends.fake_k8s.api import Api
from dlrover_backends.fake_k8s.kinds import Kind
from dlrover_backends.fake_k8s.store import Change, Key

Object = dict[str, Any]


class Definitions:
    """Serves kinds that are defined, and counts quotas.

    Args:
        api: the objects.
        soon: runs a function after the answer to the present request.
        delay_s: until a new definition is served.
    """

    def __init__(self, api: Api, soon: Callable[[Callable[[], None]], None], delay_s: float) -> None:
        self.api = api
        self._soon = soon
        self._delay_s = delay_s
        self.initializing: set[tuple[str, str]] = set()
        self._coming: dict[str, list[asyncio.TimerHandle]] = {}
        api.listen(self._heard)

    def _heard(self, kind: tuple[str, str], change: Change) -> None:
        if kind == ("", "resourcequotas") and not change.deleted and not change.now.obj.get("status"):
            self._soon(lambda: self._count_quota(change.key))
        if kind != ("apiextensions.k8s.io", "customresourcedefinitions") or change.deleted:
            return
        if change.was is None:
            spec = change.now.obj["spec"]
            self.initializing.add((spec["group"], spec["names"]["plural"]))
        self._define(change.now.obj, establish=change.was is None)

    def _count_quota(self, key: Key) -> None:
        found = self.api.store.get(("", "resourcequotas"), key)
        if found is not None:
            hard = found.obj["spec"].get("hard") or {}
            status = {"hard": hard, "used": admission.used(self.api.store, key[0], hard)}
            self.api.store.put(("", "resourcequotas"), key, {**found.obj, "status": status})

    def _define(self, definition: Object, *, establish: bool) -> None:
        spec = definition["spec"]
        names = spec["names"]
        for version in spec["versions"]:
            if not version.get("served"):
                continue
            subresources = version.get("subresources") or {}
            self.api.serve(
                Kind(
                    spec["group"],
                    version["name"],
                    names["plural"],
                    names["kind"],
                    namespaced=spec["scope"] == "Namespaced",
                    singular=names.get("singular", ""),
                    short=tuple(names.get("shortNames") or ()),
                    custom=True,
                    generation=True,
                    status="status" in subresources,
                    schema=(version.get("schema") or {}).get("openAPIV3Schema"),
                    scale=subresources.get("scale"),
                    columns=tuple(version.get("additionalPrinterColumns") or ()),
                )
            )
        if establish:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                self._accept(definition["metadata"]["name"], established=True)
                return
            name = definition["metadata"]["name"]
            self._coming[name] = [
                loop.call_later(self._delay_s / 2, lambda: self._accept(name, established=False)),
                loop.call_later(self._delay_s, lambda: self._accept(name, established=True)),
            ]

    def establish(self) -> None:
        """Serve all definitions now."""
        for name, timers in list(self._coming.items()):
            for timer in timers:
                timer.cancel()
            self._accept(name, established=False)
            self._accept(name, established=True)

    def _accept(self, name: str, *, established: bool) -> None:
        key = ("apiextensions.k8s.io", "customresourcedefinitions")
        found = self.api.store.get(key, ("", name))
        if found is None or "deletionTimestamp" in found.obj["metadata"]:
            return
        spec, now = found.obj["spec"], self.api.now()
        reason = "InitialNamesAccepted" if established else "Installing"
        accepted = {"type": "NamesAccepted", "status": "True", "lastTransitionTime": now, "reason": "NoConflicts"}
        accepted["message"] = "no conflicts found"
        served = {"type": "Established", "status": str(established), "lastTransitionTime": now, "reason": reason}
        served["message"] = "the initial names have been accepted"
        status = {**found.obj["status"], "conditions": [accepted, served], "acceptedNames": spec["names"]}
        if established:
            self._coming.pop(name, None)
            self.initializing.discard((spec["group"], spec["names"]["plural"]))
        self.api.store.put(key, ("", name), {**found.obj, "status": status})

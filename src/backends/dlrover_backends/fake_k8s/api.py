"""The verbs of the fake API server on its store: create, read, write, delete. No sockets, no waiting."""

from __future__ import annotations

import copy
import datetime as dt
import random
from collections.abc import Callable
from typing import Any

from dlrover_backends.fake_k8s import admission, answers, defaults, schemas, validating
from dlrover_backends.fake_k8s.answers import Refused, not_found
from dlrover_backends.fake_k8s.kinds import BUILT_IN, Kind
from dlrover_backends.fake_k8s.patching import Applied
from dlrover_backends.fake_k8s.store import Change, Key, Store, Stored

Object = dict[str, Any]

NAMESPACES = ("", "namespaces")
PODS = ("", "pods")
CLEANUP = "customresourcecleanup.apiextensions.k8s.io"


def stamp(now: dt.datetime) -> str:
    """A time as the API writes it: whole seconds."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


class Api:
    """Objects under the rules of the Kubernetes API.

    Args:
        seed: of uids and generated names; None for others each time.
        clock: what time it is; UTC.
        first: the version before the first write.
        services: first half of services' addresses.
    """

    def __init__(
        self,
        seed: int | None = None,
        clock: Callable[[], dt.datetime] | None = None,
        first: int = 100,
        services: str = "10.96",
    ) -> None:
        self.store = Store(first)
        self._services = services
        self.draw = random.Random(seed)
        self.clock = clock or (lambda: dt.datetime.now(dt.timezone.utc))
        self.kinds: dict[tuple[str, str, str], Kind] = {}
        self.applied: dict[str, Applied] = {}
        for kind in BUILT_IN:
            self.serve(kind)
        for name in ("default", "kube-system", "kube-node-lease"):
            self.create(self.kind("", "v1", "namespaces"), "", {"metadata": {"name": name}})

    def serve(self, kind: Kind) -> None:
        """Serve one more kind."""
        self.kinds[kind.group, kind.version, kind.plural] = kind

    def withdraw(self, group: str, plural: str) -> None:
        """Serve a kind no longer, at any version."""
        for key in [one for one in self.kinds if one[0] == group and one[2] == plural]:
            del self.kinds[key]

    def kind(self, group: str, version: str, plural: str) -> Kind:
        """A kind that is served.

        Raises:
            Refused: 404 as text.
        """
        found = self.kinds.get((group, version, plural))
        if found is None:
            raise answers.no_such_path()
        return found

    def by_key(self, key: tuple[str, str]) -> Kind:
        """A kind by group and plural name."""
        return next(kind for kind in self.kinds.values() if kind.key == key)

    def by_name(self, api_version: str, name: str) -> Kind | None:
        """The kind that an ownerReference names."""
        found = [k for k in self.kinds.values() if k.kind == name and k.api_version == api_version]
        return found[0] if found else None

    def now(self) -> str:
        """The present time, as the API writes it."""
        return stamp(self.clock())

    def stored(self, kind: Kind, where: str, name: str) -> Stored:
        """One object.

        Raises:
            Refused: 404.
        """
        found = self.store.get(kind.key, (where, name))
        if found is None:
            raise not_found(kind, name)
        return found

    # -- create ------------------------------------------------------------------------------------------------

    def create(
        self, kind: Kind, where: str, obj: Object, *, dry: bool = False, strict: str = "Warn"
    ) -> tuple[Object, list[str]]:
        """Store a new object; returns it, and warnings.

        Raises:
            Refused: the object is not as the kind wants it, or its name is taken.
        """
        obj, warnings = self._decoded(kind, where, obj, strict)
        try:
            return self._created(kind, where, obj, dry=dry), warnings
        except Refused as refused:
            refused.warnings = warnings
            raise

    def _created(self, kind: Kind, where: str, obj: Object, *, dry: bool) -> Object:
        metadata = obj["metadata"]
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + defaults.suffix(self.draw)
        name = str(metadata.get("name") or "")
        if kind.namespaced:
            metadata["namespace"] = where
            admission.namespace(self.store, kind, where, name, self.kind("", "v1", "namespaces"))
        uid = defaults.drawn_uid(self.draw)
        for key in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds", "generation", "selfLink"):
            metadata.pop(key, None)
        metadata.update(uid=uid, creationTimestamp=self.now())
        if kind.generation:
            metadata["generation"] = 1
        obj = self._filled(kind, where, obj, uid)
        causes = validating.name_causes(kind, name) + validating.label_causes(metadata.get("labels"), "metadata.labels")
        validating.check(kind, name, causes + self._causes(kind, obj))
        there = self.store.get(kind.key, (where, name))
        if there is not None:
            raise answers.already_exists(kind, name, leaving="deletionTimestamp" in there.obj["metadata"])
        admission.quota(self.store, kind, where, obj)
        obj = defaults.tidied(obj)
        return obj if dry else self.store.put(kind.key, (where, name), obj).obj

    def _decoded(self, kind: Kind, where: str, obj: Object, strict: str) -> tuple[Object, list[str]]:
        """The body as the kind's decoder leaves it: fields that nobody knows are dropped, or refused."""
        obj = copy.deepcopy(obj)
        obj["apiVersion"], obj["kind"] = kind.api_version, kind.kind
        metadata = obj.setdefault("metadata", {})
        if kind.namespaced and metadata.get("namespace", where) != where:
            words = "the namespace of the provided object does not match the namespace sent on the request"
            raise answers.bad_request(words)
        if kind.schema is not None:
            obj, unknown = schemas.pruned(kind.schema, obj)
        else:
            if kind.key == PODS:
                validating.quantities(obj)
            unknown = validating.unknown_fields(kind, obj)
            for path in unknown:
                validating.drop(obj, path)
        if unknown and strict == "Strict":
            listed = ", ".join(f'unknown field "{path}"' for path in unknown)
            words = (
                f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: strict decoding error: '
            )
            raise answers.bad_request(words + listed)
        return obj, [f'unknown field "{path}"' for path in unknown] if strict == "Warn" else []

    def _filled(self, kind: Kind, where: str, obj: Object, uid: str) -> Object:
        if kind.custom:
            if kind.status:
                obj.pop("status", None)
            return defaults_of(kind, obj)
        if kind.key == PODS:
            admission.service_account(self.store, kind, where, obj)
            obj = defaults.pod(admission.priority(self.store, kind, {**obj, "spec": obj.get("spec") or {}}), self.draw)
            if obj["spec"].get("schedulingGates"):
                words = "Scheduling is blocked due to non-empty scheduling gates"
                gated = {"type": "PodScheduled", "status": "False", "lastProbeTime": None, "message": words}
                gated.update(lastTransitionTime=self.now(), reason="SchedulingGated")
                obj["status"]["conditions"] = [gated]
            return obj
        if kind.key == ("batch", "jobs"):
            return defaults.job(obj, uid)
        simple: dict[str, Callable[[Object], Object]] = {
            "services": lambda one: defaults.service(one, self.draw, self._services),
            "secrets": defaults.secret,
            "events": defaults.event,
            "poddisruptionbudgets": defaults.budget,
            "nodes": defaults.node,
            "namespaces": defaults.namespace,
            "customresourcedefinitions": defaults.definition,
            "resourcequotas": lambda one: {**one, "status": {}},
            "priorityclasses": lambda one: {"preemptionPolicy": "PreemptLowerPriority", **one},
            "persistentvolumeclaims": lambda one: {**one, "status": {"phase": "Pending"}},
        }
        fill = simple.get(kind.plural)
        return fill(obj) if fill is not None else obj

    def _causes(self, kind: Kind, obj: Object, old: Object | None = None) -> list[Object]:
        if kind.schema is not None:
            found = schemas.causes(kind.schema, obj, old)
            scale = schemas.scale_causes(kind.scale, obj)
            if scale and found and found[-1]["field"] == "<nil>":
                return [*found[:-1], *scale, found[-1]]
            return found + scale
        if kind.key == PODS and old is None:
            return validating.pod_causes(obj)
        if kind.key == ("batch", "jobs") and old is None:
            causes = validating.spec_causes(obj["spec"]["template"]["spec"], "spec.template.spec")
            policy = obj["spec"]["template"]["spec"].get("restartPolicy")
            if policy == "Always":
                field = "spec.template.spec.restartPolicy"
                causes.append(answers.unsupported(field, '"Always"', ("OnFailure", "Never")))
            return causes
        if kind.plural == "customresourcedefinitions" and old is None:
            versions = obj["spec"].get("versions") or []
            schema = ((versions[0].get("schema") if versions else None) or {}).get("openAPIV3Schema") or {}
            return schemas.definition_causes(schema)
        return []

    # -- write -------------------------------------------------------------------------------------------------

    def write(
        self,
        kind: Kind,
        where: str,
        name: str,
        obj: Object,
        *,
        sub: str = "",
        dry: bool = False,
        strict: str = "Ignore",
    ) -> tuple[Object, list[str]]:
        """Replace an object, or its status; returns it as the server answers, and warnings.

        Raises:
            Refused: 404, a stale version, or a change that the kind does not allow.
        """
        current = self.stored(kind, where, name)
        was = current.obj
        if obj.get("metadata", {}).get("name", name) != name:
            words = "the name of the object ({0}) does not match the name on the URL ({1})"
            raise answers.bad_request(words.format(obj["metadata"]["name"], name))
        version = (obj.get("metadata") or {}).get("resourceVersion")
        if version and version != str(current.version):
            raise answers.modified(kind, name)
        obj, warnings = self._decoded(kind, where, obj, strict)
        new = self._merged(kind, was, obj, sub)
        causes = validating.metadata_update_causes(was, obj)
        if kind.key == PODS:
            causes += validating.container_transitions(was, new) if sub == "status" else []
            causes += validating.pod_update_causes(was, new) if not sub else []
        causes += validating.label_causes(new["metadata"].get("labels"), "metadata.labels")
        validating.check(kind, name, causes + self._causes(kind, new, was))
        if new == was:
            return was, warnings
        if kind.generation and _meat(new) != _meat(was):
            new["metadata"] = {**new["metadata"], "generation": was["metadata"].get("generation", 0) + 1}
        if dry:
            return new, warnings
        if self._may_go(kind, new):
            self.store.remove(kind.key, (where, name))
            return new, warnings
        return self.store.put(kind.key, (where, name), new).obj, warnings

    def _merged(self, kind: Kind, was: Object, obj: Object, sub: str) -> Object:
        """What is stored of a write: system fields stay, and each path writes its own half."""
        old = was["metadata"]
        kept = {
            key: old[key]
            for key in (
                "name",
                "generateName",
                "namespace",
                "uid",
                "resourceVersion",
                "generation",
                "creationTimestamp",
                "deletionTimestamp",
                "deletionGracePeriodSeconds",
            )
            if key in old
        }
        given = obj.get("metadata") or {}
        if sub == "status" and kind.custom:
            given = old
        own = {key: given[key] for key in ("labels", "annotations", "finalizers", "ownerReferences") if key in given}
        metadata = {**kept, **own}
        if sub == "status":
            new = {**was, "metadata": metadata, "status": obj.get("status") or {}}
            if kind.key in {PODS, ("", "nodes")}:
                new["status"] = defaults.typed_status(new["status"])
        else:
            new = {**obj, "metadata": metadata}
            if kind.status or kind.key == ("", "pods"):
                new.pop("status", None)
                if "status" in was:
                    new["status"] = was["status"]
            if kind.key == PODS:
                new["spec"] = defaults.spec_of_pods(dict(obj.get("spec") or {}))
                if not new["spec"].get("schedulingGates"):
                    new["spec"].pop("schedulingGates", None)
            elif kind.key == ("", "secrets"):
                new = defaults.secret(new)
        if kind.custom:
            new = defaults_of(kind, new)
        return defaults.tidied(new)

    def _may_go(self, kind: Kind, obj: Object) -> bool:
        metadata = obj["metadata"]
        if "deletionTimestamp" not in metadata or metadata.get("finalizers"):
            return False
        if kind.plural == "namespaces":
            return False
        return kind.key != PODS or metadata.get("deletionGracePeriodSeconds") == 0

    def patch_status(self, kind: Kind, where: str, name: str, change: Callable[[Object], Object]) -> None:
        """Let a controller inside the server change an object's status; an object that is gone is fine."""
        found = self.store.get(kind.key, (where, name))
        if found is None:
            return
        new = change(copy.deepcopy(found.obj))
        if new != found.obj:
            self.store.put(kind.key, (where, name), new)

    # -- bind, evict -------------------------------------------------------------------------------------------

    def bind(self, where: str, name: str, node: str) -> None:
        """Assign a pod to a node.

        Raises:
            Refused: 404, or 409 for a pod that has a node, is gated, or is being deleted.
        """
        kind = self.kind("", "v1", "pods")
        pod = self.stored(kind, where, name).obj
        if pod["metadata"].get("deletionTimestamp"):
            raise answers.conflict("pods/binding", name, f"pod {name} is being deleted, cannot be assigned to a host")
        if pod["spec"].get("nodeName"):
            words = f'pod {name} is already assigned to node "{pod["spec"]["nodeName"]}"'
            raise answers.conflict("pods/binding", name, words)
        status = {key: value for key, value in pod["status"].items() if key != "nominatedNodeName"}
        scheduled = {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": self.now()}
        others = [one for one in status.get("conditions") or [] if one["type"] != "PodScheduled"]
        status["conditions"] = [*others, scheduled]
        # As recorded, binding does not count as a change of the spec: the generation stays.
        new = {**pod, "spec": {**pod["spec"], "nodeName": node}, "status": status}
        self.store.put(kind.key, (where, name), new)

    def versions(self, kind: Kind, version: int) -> dict[Key, Stored]:
        """Objects of a kind at an earlier version.

        Raises:
            LookupError: that version is compacted.
        """
        return self.store.at(kind.key, version)

    def listen(self, listener: Callable[[tuple[str, str], Change], None]) -> None:
        """Call a function after each write."""
        self.store.listeners.append(listener)


def defaults_of(kind: Kind, obj: Object) -> Object:
    return schemas.defaulted(kind.schema, obj) if kind.schema is not None else obj


def _meat(obj: Object) -> Object:
    return {key: value for key, value in obj.items() if key not in {"metadata", "status"}}


__all__ = ["Api", "Refused", "stamp"]

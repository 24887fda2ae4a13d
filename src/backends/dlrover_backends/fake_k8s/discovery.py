"""What is said of the server itself: version, health, and which groups and kinds it serves."""

from __future__ import annotations

from typing import Any

from dlrover_backends.fake_k8s.api import Api
from dlrover_backends.fake_k8s.kinds import Kind
from dlrover_backends.fake_k8s.store import encoded

Object = dict[str, Any]

_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_VERSION = {
    "major": "1",
    "minor": "36",
    "emulationMajor": "1",
    "emulationMinor": "36",
    "minCompatibilityMajor": "1",
    "minCompatibilityMinor": "35",
    "gitVersion": "v1.36.2",
    "gitCommit": "fake",
    "gitTreeState": "clean",
    "buildDate": "2026-08-21T00:00:00Z",
    "goVersion": "none",
    "compiler": "none",
    "platform": "linux/amd64",
}


def plain(path: str, api: Api, port: int) -> tuple[str, bytes] | None:
    """The answer to a path that is about no object: content type and body; None for all other paths."""
    path = path.rstrip("/")
    if path in {"/readyz", "/livez", "/healthz"}:
        return "text/plain", b"ok"
    parts = path.strip("/").split("/")
    if path == "/version":
        return "application/json", encoded(_VERSION)
    if path == "/api":
        server = [{"clientCIDR": "0.0.0.0/0", "serverAddress": f"127.0.0.1:{port}"}]
        body: Object = {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": server}
        return "application/json", encoded(body)
    if path == "/apis":
        return "application/json", encoded(_groups(api))
    if parts[0] == "api" and len(parts) == 2:
        return _resources(api, "", parts[1])
    if parts[0] == "apis" and len(parts) == 3:
        return _resources(api, parts[1], parts[2])
    return None


def _groups(api: Api) -> Object:
    groups: dict[str, list[str]] = {}
    for group, version, _ in api.kinds:
        if group and version not in groups.setdefault(group, []):
            groups[group].append(version)
    listed = []
    for group, versions in groups.items():
        shown = [{"groupVersion": f"{group}/{version}", "version": version} for version in versions]
        listed.append({"name": group, "versions": shown, "preferredVersion": shown[0]})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}


def _resources(api: Api, group: str, version: str) -> tuple[str, bytes] | None:
    kinds = [kind for (of, at, _), kind in api.kinds.items() if of == group and at == version]
    if not kinds:
        return None
    resources: list[Object] = []
    for kind in kinds:
        resources.append(_resource(kind))
        if kind.status:
            resources.append({**_sub(kind), "name": f"{kind.plural}/status"})
        if kind.scale is not None:
            scale = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
            resources.append({**_sub(kind), "name": f"{kind.plural}/scale", **scale})
    body: Object = {"kind": "APIResourceList"}
    if group:
        body["apiVersion"] = "v1"
    body.update(groupVersion=f"{group}/{version}" if group else version, resources=resources)
    return "application/json", encoded(body)


def _resource(kind: Kind) -> Object:
    verbs = (
        ["delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"] if kind.custom else _VERBS
    )
    found: Object = {
        "name": kind.plural,
        "singularName": kind.singular,
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": verbs,
    }
    if kind.short:
        found["shortNames"] = list(kind.short)
    return found


def _sub(kind: Kind) -> Object:
    return {"singularName": "", "namespaced": kind.namespaced, "kind": kind.kind, "verbs": ["get", "patch", "update"]}

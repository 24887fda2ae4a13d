"""What the API server fills in when an object is created, and how it tidies what comes in."""

from __future__ import annotations

import random
import string
from typing import Any

Object = dict[str, Any]

TOLERATION_S = 300
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"  # of generated names, as the API server draws them


def suffix(draw: random.Random) -> str:
    """Five characters after generateName."""
    return "".join(draw.choice(_SUFFIX) for _ in range(5))


def pod(obj: Object, draw: random.Random) -> Object:
    """A pod as stored: defaults of its spec, tolerations of a lost host, quality of service, phase Pending."""
    spec = spec_of_pods(dict(obj.get("spec") or {}))
    tolerations = list(spec.get("tolerations") or [])
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if not any(_tolerates(one, key) for one in tolerations):
            one: Object = {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": TOLERATION_S}
            tolerations.append(one)
    spec["tolerations"] = tolerations
    if spec.get("automountServiceAccountToken") is not False:
        _mount_token(spec, draw)
    status: Object = {"phase": "Pending", "qosClass": quality(spec)}
    return {**obj, "spec": spec, "status": status}


def _tolerates(one: Object, key: str) -> bool:
    return one.get("effect") in {None, "", "NoExecute"} and (one.get("key") in {None, "", key})


def spec_of_pods(spec: Object) -> Object:
    """Defaults of a pod's spec; of a template's, too."""
    spec.setdefault("restartPolicy", "Always")
    if spec.get("terminationGracePeriodSeconds") is None:
        spec["terminationGracePeriodSeconds"] = 30
    spec.setdefault("dnsPolicy", "ClusterFirst")
    account = spec.get("serviceAccountName") or spec.get("serviceAccount") or "default"
    spec["serviceAccountName"] = spec["serviceAccount"] = account
    spec.setdefault("securityContext", {})
    spec.setdefault("schedulerName", "default-scheduler")
    spec.setdefault("enableServiceLinks", True)
    spec["containers"] = [_container(one) for one in spec.get("containers") or []]
    if spec.get("initContainers"):
        spec["initContainers"] = [_container(one) for one in spec["initContainers"]]
    if spec.get("volumes"):
        spec["volumes"] = [_volume(one) for one in spec["volumes"]]
    return spec


def _container(one: Object) -> Object:
    one = dict(one)
    one.setdefault("resources", {})
    resources = one["resources"]
    if resources.get("limits"):
        requests = {**resources["limits"], **(resources.get("requests") or {})}
        one["resources"] = {**resources, "requests": requests}
    one.setdefault("terminationMessagePath", "/dev/termination-log")
    one.setdefault("terminationMessagePolicy", "File")
    image = str(one.get("image") or "")
    tag = image.rpartition("/")[2].partition(":")[2]
    one.setdefault("imagePullPolicy", "Always" if tag in {"", "latest"} and "@" not in image else "IfNotPresent")
    if one.get("ports"):
        one["ports"] = [{"protocol": "TCP", **port} for port in one["ports"]]
    if one.get("env"):
        one["env"] = [_variable(env) for env in one["env"]]
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        if one.get(probe):
            more = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}
            one[probe] = {**more, **one[probe]}
    return one


def _variable(env: Object) -> Object:
    source = env.get("valueFrom") or {}
    if "fieldRef" in source:
        return {**env, "valueFrom": {**source, "fieldRef": {"apiVersion": "v1", **source["fieldRef"]}}}
    if "resourceFieldRef" in source:
        return {**env, "valueFrom": {**source, "resourceFieldRef": {"divisor": "0", **source["resourceFieldRef"]}}}
    return env


def _volume(one: Object) -> Object:
    for kind in ("secret", "configMap", "downwardAPI", "projected"):
        if kind in one:
            return {**one, kind: {"defaultMode": 420, **one[kind]}}
    return one


def _mount_token(spec: Object, draw: random.Random) -> None:
    name = f"kube-api-access-{suffix(draw)}"
    path = "/var/run/secrets/kubernetes.io/serviceaccount"
    for place in ("initContainers", "containers"):
        if spec.get(place):
            spec[place] = [
                {
                    **one,
                    "volumeMounts": [
                        *(one.get("volumeMounts") or []),
                        {"name": name, "readOnly": True, "mountPath": path},
                    ],
                }
                if not any(mount.get("mountPath") == path for mount in one.get("volumeMounts") or [])
                else one
                for one in spec[place]
            ]
    names = {"items": [{"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}]}
    sources: list[Object] = [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": names},
    ]
    spec["volumes"] = [
        *(spec.get("volumes") or []),
        {"name": name, "projected": {"sources": sources, "defaultMode": 420}},
    ]


def quality(spec: Object) -> str:
    """The quality of service of a pod: Guaranteed, Burstable or BestEffort."""
    containers = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    asked = [one.get("resources") or {} for one in containers]
    core = [(each.get("requests") or {}, each.get("limits") or {}) for each in asked]
    if not any(set(requests) & {"cpu", "memory"} or set(limits) & {"cpu", "memory"} for requests, limits in core):
        return "BestEffort"
    if all(
        limits.get(one) is not None and requests.get(one) == limits.get(one)
        for requests, limits in core
        for one in ("cpu", "memory")
    ):
        return "Guaranteed"
    return "Burstable"


def service(obj: Object, draw: random.Random, network: str) -> Object:
    """A service as stored; one with a cluster address gets one."""
    spec = dict(obj.get("spec") or {})
    spec["ports"] = [
        {"protocol": "TCP", **port, "targetPort": port.get("targetPort", port.get("port"))}
        for port in spec.get("ports") or []
    ]
    if not spec["ports"]:
        del spec["ports"]
    if not spec.get("clusterIP"):
        spec["clusterIP"] = f"{network}.{draw.randrange(256)}.{draw.randrange(1, 255)}"
    spec.setdefault("clusterIPs", [spec["clusterIP"]])
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    spec.setdefault("ipFamilies", ["IPv4"])
    spec.setdefault("ipFamilyPolicy", "SingleStack")
    spec.setdefault("internalTrafficPolicy", "Cluster")
    return {**obj, "spec": spec, "status": {"loadBalancer": {}}}


def job(obj: Object, uid: str) -> Object:
    """A batch/v1 Job as stored: defaults, and the selector and labels that name its uid."""
    spec = dict(obj.get("spec") or {})
    if spec.get("completions") is None and spec.get("parallelism") is None:
        spec["completions"] = 1
    if spec.get("parallelism") is None:
        spec["parallelism"] = 1
    spec.setdefault("backoffLimit", 6)
    spec.setdefault("completionMode", "NonIndexed")
    spec.setdefault("suspend", False)
    spec.setdefault("manualSelector", False)
    spec.setdefault("podReplacementPolicy", "Failed" if spec.get("podFailurePolicy") else "TerminatingOrFailed")
    template = dict(spec.get("template") or {})
    name = obj["metadata"]["name"]
    marks = {
        "batch.kubernetes.io/controller-uid": uid,
        "batch.kubernetes.io/job-name": name,
        "controller-uid": uid,
        "job-name": name,
    }
    metadata = dict(template.get("metadata") or {})
    metadata["labels"] = {**(metadata.get("labels") or {}), **marks}
    inner = spec_of_pods(dict(template.get("spec") or {}))
    for key in ("serviceAccountName", "serviceAccount", "enableServiceLinks"):
        if key not in (template.get("spec") or {}):
            inner.pop(key, None)
    spec["template"] = {**template, "metadata": metadata, "spec": inner}
    if not spec["manualSelector"]:
        spec.pop("manualSelector")
        spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
    return {**obj, "spec": spec, "status": obj.get("status") or {}}


def secret(obj: Object) -> Object:
    """A secret as stored: stringData goes into data, in base64."""
    import base64

    data = dict(obj.get("data") or {})
    for key, value in (obj.get("stringData") or {}).items():
        data[key] = base64.b64encode(str(value).encode()).decode()
    obj = {key: value for key, value in obj.items() if key != "stringData"}
    if data:
        obj["data"] = data
    obj.setdefault("type", "Opaque")
    return obj


def event(obj: Object) -> Object:
    """An event as stored."""
    return {
        **obj,
        "source": obj.get("source") or {},
        "firstTimestamp": obj.get("firstTimestamp"),
        "lastTimestamp": obj.get("lastTimestamp"),
        "eventTime": obj.get("eventTime"),
        "reportingComponent": obj.get("reportingComponent", ""),
        "reportingInstance": obj.get("reportingInstance", ""),
    }


def budget(obj: Object) -> Object:
    """A disruption budget as stored, before its controller counts."""
    return {
        **obj,
        "status": {"disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": 0, "expectedPods": 0},
    }


def node(obj: Object) -> Object:
    """A node as stored."""
    info = dict.fromkeys(
        (
            "machineID",
            "systemUUID",
            "bootID",
            "kernelVersion",
            "osImage",
            "containerRuntimeVersion",
            "kubeletVersion",
            "kubeProxyVersion",
            "operatingSystem",
            "architecture",
        ),
        "",
    )
    status = {"daemonEndpoints": {"kubeletEndpoint": {"Port": 0}}, **(obj.get("status") or {})}
    status["nodeInfo"] = {**info, **(status.get("nodeInfo") or {})}
    return {**obj, "spec": obj.get("spec") or {}, "status": status}


def namespace(obj: Object) -> Object:
    """A namespace as stored."""
    name = obj["metadata"]["name"]
    labels = {**(obj["metadata"].get("labels") or {}), "kubernetes.io/metadata.name": name}
    return {
        **obj,
        "metadata": {**obj["metadata"], "labels": labels},
        "spec": {"finalizers": ["kubernetes"]},
        "status": {"phase": "Active"},
    }


def definition(obj: Object) -> Object:
    """A CustomResourceDefinition as stored, not yet established."""
    spec = dict(obj["spec"])
    names = dict(spec["names"])
    names.setdefault("singular", names["kind"].lower())
    names.setdefault("listKind", names["kind"] + "List")
    spec["names"] = names
    spec["versions"] = [{k: v for k, v in one.items() if v or k in {"served", "storage"}} for one in spec["versions"]]
    spec.setdefault("conversion", {"strategy": "None"})
    stored = [one["name"] for one in spec["versions"] if one.get("storage")]
    status: Object = {"conditions": None, "acceptedNames": {"plural": "", "kind": ""}, "storedVersions": stored}
    return {**obj, "spec": spec, "status": status}


def tidied(obj: Object) -> Object:
    """Without what the API server does not store: empty collections in metadata, and nulls of typed status."""
    metadata = {
        key: value
        for key, value in obj["metadata"].items()
        if value is not None and not (key in _EMPTY and not value) and key != "managedFields"
    }
    return {**obj, "metadata": metadata}


_EMPTY = {"labels", "annotations", "finalizers", "ownerReferences"}


def typed_status(status: Object) -> Object:
    """A pod's or node's status as a typed object prints it: conditions with the fields that are always there."""
    status = without_nulls(status)
    if isinstance(status.get("conditions"), list):
        status["conditions"] = [
            one if "lastHeartbeatTime" in one else {"lastProbeTime": None, "lastTransitionTime": None, **one}
            for one in status["conditions"]
        ]
    for key in ("containerStatuses", "initContainerStatuses"):
        if isinstance(status.get(key), list):
            more: Object = {"lastState": {}, "ready": False, "restartCount": 0, "image": "", "imageID": ""}
            status[key] = [{**more, **one} for one in status[key]]
    return status


def without_nulls(value: Any) -> Any:
    """A value without the fields that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    return value


def drawn_uid(draw: random.Random) -> str:
    """A random uuid of version 4."""
    digits = "".join(draw.choice(string.hexdigits[:16]) for _ in range(32))
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"

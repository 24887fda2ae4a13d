"""The API server's rules for names, labels and pods, in its words."""

from __future__ import annotations

import json
import re
from typing import Any

from dlrover_backends.fake_k8s import answers
from dlrover_backends.fake_k8s.answers import Refused, not_allowed, required, unsupported, wrong
from dlrover_backends.fake_k8s.kinds import Kind
from dlrover_backends.fake_k8s.quantities import amount

Object = dict[str, Any]

_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_SUBDOMAIN_WORDS = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    f"end with an alphanumeric character (e.g. 'example.com', regex used for validation is '{_SUBDOMAIN}')"
)
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_LABEL_WORDS = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with "
    f"an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '{_LABEL}')"
)
_SERVICE = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_SERVICE_WORDS = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, "
    "and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is "
    f"'{_SERVICE}')"
)
_QUALIFIED = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_QUALIFIED_WORDS = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    f"character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '{_QUALIFIED}')"
)
_VALUE = r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?"
_VALUE_WORDS = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    f"'{_VALUE}')"
)
UPDATABLE = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)

_POD_SPEC_FIELDS = """
activeDeadlineSeconds affinity automountServiceAccountToken containers dnsConfig dnsPolicy enableServiceLinks
ephemeralContainers hostAliases hostIPC hostNetwork hostPID hostUsers hostname hostnameOverride imagePullSecrets
initContainers nodeName nodeSelector os overhead preemptionPolicy priority priorityClassName readinessGates
resourceClaims resources restartPolicy runtimeClassName schedulerName schedulingGates schedulingGroup securityContext
serviceAccount serviceAccountName setHostnameAsFQDN shareProcessNamespace subdomain terminationGracePeriodSeconds
tolerations topologySpreadConstraints volumes workloadRef
"""
_CONTAINER_FIELDS = """
args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports readinessProbe resizePolicy resources
restartPolicy restartPolicyRules securityContext startupProbe stdin stdinOnce terminationMessagePath
terminationMessagePolicy tty volumeDevices volumeMounts workingDir
"""
_POD_SPEC = frozenset(_POD_SPEC_FIELDS.split())
_CONTAINER = frozenset(_CONTAINER_FIELDS.split())


def shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def name_causes(kind: Kind, name: str) -> list[Object]:
    """What is wrong with a name."""
    if not name:
        return [required("metadata.name", "name or generateName is required")]
    if kind.key == ("", "services"):
        form, words, most = _SERVICE, _SERVICE_WORDS, 63
    elif kind.key == ("", "namespaces"):
        form, words, most = _LABEL, _LABEL_WORDS, 63
    elif kind.group == "rbac.authorization.k8s.io":
        return []
    else:
        form, words, most = _SUBDOMAIN, _SUBDOMAIN_WORDS, 253
    if len(name) > most:
        return [wrong("metadata.name", shown(name), f"must be no more than {most} characters")]
    if not re.fullmatch(form, name):
        return [wrong("metadata.name", shown(name), words)]
    return []


def label_causes(labels: Object | None, field: str) -> list[Object]:
    """What is wrong with labels."""
    causes = []
    for key, value in (labels or {}).items():
        prefix, slash, last = str(key).rpartition("/")
        if not re.fullmatch(_QUALIFIED, last):
            causes.append(wrong(field, shown(key), _QUALIFIED_WORDS))
        elif len(last) > 63:
            causes.append(wrong(field, shown(key), "name part must be no more than 63 characters"))
        elif slash and not re.fullmatch(_SUBDOMAIN, prefix):
            causes.append(wrong(field, shown(key), f"prefix part {_SUBDOMAIN_WORDS}"))
        if len(str(value)) > 63:
            causes.append(wrong(field, shown(value), "must be no more than 63 characters"))
        elif not re.fullmatch(_VALUE, str(value)):
            causes.append(wrong(field, shown(value), _VALUE_WORDS))
    return causes


def unknown_fields(kind: Kind, obj: Object) -> list[str]:
    """Fields of a pod that the API does not know, as paths."""
    if kind.key != ("", "pods"):
        return []
    spec = obj.get("spec") or {}
    found = [f"spec.{key}" for key in spec if key not in _POD_SPEC]
    for place in ("initContainers", "containers"):
        for index, one in enumerate(spec.get(place) or []):
            found += [f"spec.{place}[{index}].{key}" for key in one if key not in _CONTAINER]
    return found


def drop(obj: Object, path: str) -> None:
    """Remove a field that is not known, in place."""
    at: Any = obj
    *steps, last = re.findall(r"\w+", path)
    for step in steps:
        at = at[int(step)] if step.isdigit() else at[step]
    del at[last]


def quantities(obj: Object) -> None:
    """Refuse requests and limits that are no quantities, as the decoder does."""
    spec = obj.get("spec") or {}
    for one in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        resources = one.get("resources") or {}
        for side in ("requests", "limits"):
            for value in (resources.get(side) or {}).values():
                try:
                    amount(value)
                except (ValueError, ArithmeticError):
                    words = (
                        'Pod in version "v1" cannot be handled as a Pod: quantities must match the regular expression '
                        "'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
                    )
                    raise answers.bad_request(words) from None


def pod_causes(obj: Object) -> list[Object]:
    """What is wrong with a pod's spec."""
    spec = obj["spec"]
    causes = spec_causes(spec, "spec")
    if spec.get("nodeName") and spec.get("schedulingGates"):
        causes.append(not_allowed("spec.nodeName", "cannot be set until all schedulingGates have been cleared"))
    return causes


def spec_causes(spec: Object, at: str) -> list[Object]:
    """What is wrong with a pod's spec, or a template's."""
    causes: list[Object] = []
    volumes = {one.get("name") for one in spec.get("volumes") or []}
    if not spec.get("containers"):
        causes.append(required(f"{at}.containers"))
    seen: set[str] = set()
    for place in ("initContainers", "containers"):
        for index, one in enumerate(spec.get(place) or []):
            causes += _container_causes(one, f"{at}.{place}[{index}]", seen, volumes)
    if spec.get("restartPolicy") not in {"Always", "OnFailure", "Never"}:
        causes.append(
            unsupported(f"{at}.restartPolicy", shown(spec.get("restartPolicy")), ("Always", "OnFailure", "Never"))
        )
    if int(spec.get("terminationGracePeriodSeconds") or 0) < 0:
        value = shown(spec["terminationGracePeriodSeconds"])
        causes.append(wrong(f"{at}.terminationGracePeriodSeconds", value, "must be greater than or equal to 0"))
    causes += label_causes(spec.get("nodeSelector"), f"{at}.nodeSelector")
    return causes


def _container_causes(one: Object, at: str, seen: set[str], volumes: set[Any]) -> list[Object]:
    causes: list[Object] = []
    name = one.get("name") or ""
    if not name:
        causes.append(required(f"{at}.name"))
    elif not re.fullmatch(_LABEL, name) or len(name) > 63:
        causes.append(wrong(f"{at}.name", shown(name), _LABEL_WORDS))
    elif name in seen:
        causes.append(answers.cause("FieldValueDuplicate", f"Duplicate value: {shown(name)}", f"{at}.name"))
    seen.add(name)
    if not one.get("image"):
        causes.append(required(f"{at}.image"))
    for index, env in enumerate(one.get("env") or []):
        if not env.get("name"):
            causes.append(required(f"{at}.env[{index}].name"))
    for index, mount in enumerate(one.get("volumeMounts") or []):
        if mount.get("name") not in volumes:
            field = f"{at}.volumeMounts[{index}].name"
            causes.append(answers.cause("FieldValueNotFound", f"Not found: {shown(mount.get('name'))}", field))
    resources = one.get("resources") or {}
    limits = resources.get("limits") or {}
    for what, value in (resources.get("requests") or {}).items():
        if "." in what and limits.get(what) is None:
            causes.append(required(f"{at}.resources.limits", "Limit must be set for non overcommitable resources"))
        if what in limits and amount(value) > amount(limits[what]):
            words = f"must be less than or equal to {what} limit of {limits[what]}"
            causes.append(wrong(f"{at}.resources.requests", shown(value), words))
    return causes


def pod_update_causes(old: Object, new: Object) -> list[Object]:
    """What a write to an existing pod's spec may not change."""

    def compared(spec: Object) -> Object:
        spec = {
            key: value
            for key, value in spec.items()
            if key not in {"activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds", "schedulingGates"}
        }
        for place in ("containers", "initContainers"):
            if place in spec:
                spec[place] = [{key: value for key, value in one.items() if key != "image"} for one in spec[place]]
        return spec

    was, now = old["spec"], new["spec"]
    gates = [one["name"] for one in was.get("schedulingGates") or []]
    added = [one["name"] for one in now.get("schedulingGates") or [] if one["name"] not in gates]
    if added:
        words = "only deletion is allowed, but found new scheduling gate"
        return [not_allowed("spec.schedulingGates", f"{words} '{added[0]}'")]
    kept = all(one in (now.get("tolerations") or []) for one in was.get("tolerations") or [])
    changed = compared(was) != compared(now)
    if gates:  # a gated pod's selector may still be narrowed
        loose = {"nodeSelector", "affinity"}
        changed = {k: v for k, v in compared(was).items() if k not in loose} != {
            k: v for k, v in compared(now).items() if k not in loose
        }
    if changed or not kept or was.get("terminationGracePeriodSeconds") != now.get("terminationGracePeriodSeconds"):
        return [not_allowed("spec", UPDATABLE)]
    return []


def container_transitions(old: Object, new: Object) -> list[Object]:
    """A container that ended for good cannot run again."""
    if old["spec"].get("restartPolicy") == "Always":
        return []
    before = {one["name"]: one for one in (old.get("status") or {}).get("containerStatuses") or []}
    causes = []
    for index, one in enumerate((new.get("status") or {}).get("containerStatuses") or []):
        ended = ((before.get(one["name"]) or {}).get("state") or {}).get("terminated")
        if ended is None or (old["spec"].get("restartPolicy") == "OnFailure" and ended.get("exitCode") != 0):
            continue
        if "terminated" not in (one.get("state") or {}):
            field = f"status.containerStatuses[{index}].state"
            causes.append(not_allowed(field, "may not be transitioned to non-terminated state"))
    return causes


def metadata_update_causes(old: Object, new: Object) -> list[Object]:
    """What a write to existing metadata may not change; the server lists these twice."""
    was, now = old["metadata"], new["metadata"]
    causes = []
    if now.get("uid") not in {None, was["uid"]}:
        causes.append(wrong("metadata.uid", shown(now["uid"]), "field is immutable"))
    if was.get("deletionTimestamp"):
        added = [one for one in now.get("finalizers") or [] if one not in (was.get("finalizers") or [])]
        if added:
            listed = ", ".join(f'"{one}"' for one in added)
            words = "no new finalizers can be added if the object is being deleted, found new finalizers"
            causes.append(not_allowed("metadata.finalizers", f"{words} []string{{{listed}}}"))
    return causes * 2


def check(kind: Kind, name: str, causes: list[Object]) -> None:
    """Refuse if there is a cause.

    Raises:
        Refused: 422 with the causes.
    """
    if causes:
        raise answers.invalid(kind, name, causes)


__all__ = ["Refused", "check", "container_transitions", "label_causes", "name_causes", "pod_causes"]

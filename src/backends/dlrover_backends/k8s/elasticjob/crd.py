"""The definition of the ElasticJob: its schema, its status and scale subresources, and what ``kubectl get`` prints. Pure."""

from __future__ import annotations

from typing import Any

from dlrover_backends.k8s import names
from dlrover_backends.k8s.api import Json
from dlrover_backends.k8s.elasticjob.translate import GROUP, KIND, NODES_MAX, OLD_GROUP, PLURAL, VERSION

_ANYTHING: Json = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def definition(group: str = GROUP) -> Json:
    """The CustomResourceDefinition. That of the older group warns whoever writes to it."""
    version: Json = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicaSpecs.worker.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            _column("Phase", "string", ".status.phase", "how the job stands"),
            _column("Ready", "string", ".status.ready", "nodes that run, of those that should"),
            _column("Step", "integer", ".status.step", "the newest step"),
            _column("Goodput", "string", ".status.goodput", "share of the time in which new steps were made"),
            _column("Last incident", "string", ".status.lastIncident", "cause and action of the newest incident"),
            _column("Age", "date", ".metadata.creationTimestamp", ""),
        ],
    }
    if group == OLD_GROUP:
        version |= {
            "deprecated": True,
            "deprecationWarning": f"{OLD_GROUP}/{VERSION} ElasticJob is old: write {GROUP}/{VERSION}, groups in lower case",
        }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{group}", "labels": {names.LABEL_BY: names.BY}},
        "spec": {
            "group": group,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                **({"shortNames": ["ej"]} if group == GROUP else {}),
            },
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def schema() -> Json:
    """Types and bounds. What the schema cannot say is told by the condition ``Accepted``."""
    return {
        "type": "object",
        "description": "A training job that goes on when its nodes fail.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _spec(),
            "status": _status(),
        },
    }


def _column(name: str, kind: str, path: str, text: str) -> Json:
    return {"name": name, "type": kind, "jsonPath": path, **({"description": text} if text else {})}


def _text(text: str, **more: Any) -> Json:
    return {"type": "string", "description": text, **more}


def _any(text: str) -> Json:
    return {"x-kubernetes-preserve-unknown-fields": True, "description": text}


def _flag(text: str) -> Json:
    return {"type": "boolean", "description": text}


def _number(text: str, least: int, most: int | None = None) -> Json:
    return {"type": "integer", "description": text, "minimum": least, **({"maximum": most} if most is not None else {})}


def _spec() -> Json:
    return {
        "type": "object",
        "required": ["replicaSpecs"],
        "properties": {
            "distributionStrategy": _text(
                "AllreduceStrategy (default): one world; ParameterServerStrategy: groups by themselves"
            ),
            "replicaSpecs": {
                "type": "object",
                "description": "the groups of nodes, by name: worker, ps, chief, evaluator",
                "additionalProperties": _replica(),
            },
            "managedBy": _text(
                "whose the job is: dlrover-core/operator (default); one that is another controller's is left to it",
                maxLength=63,
            ),
            "suspend": _flag("the job pauses, and gives its nodes back"),
            "envs": {
                "type": "object",
                "description": "variables of all containers, by name: a text, or what a container's env has",
                "additionalProperties": {"x-kubernetes-preserve-unknown-fields": True},
            },
            "optimizeMode": _text("accepted, and does nothing"),
            "brainService": _text("accepted, and does nothing"),
            "enableDynamicSharding": _flag("accepted, and does nothing"),
            "enableElasticScheduling": _flag("accepted, and does nothing"),
            "dynamicSharding": _any("accepted, and does nothing"),
            "elasticScheduling": _any("accepted, and does nothing"),
            "resourceLimits": {
                "type": "object",
                "description": "accepted, and does nothing: quotas bound what a job takes",
                "additionalProperties": {"x-kubernetes-int-or-string": True},
            },
        },
    }


def _replica() -> Json:
    return {
        "type": "object",
        "required": ["template"],
        "properties": {
            "replicas": _number("most nodes to run; 1 unless said; 0: the job has no such group", 0, NODES_MAX),
            "minReplicas": _number("fewest nodes to work with; else the MIN of --nnodes, else 1", 0, NODES_MAX),
            "maxReplicas": _number("the same as replicas", 0, NODES_MAX),
            "standby": _number("pods kept warm, which take the places of dead nodes; 0 unless said", 0, NODES_MAX),
            "restartCount": _number("relaunches of one node before it is given up", 0),
            "restartTimeout": _number("accepted, and does nothing", 0),
            "restartPolicy": _text("accepted, and does nothing"),
            "autoScale": _flag("accepted, and does nothing"),
            "priority": _text("the PriorityClass of the nodes' pods"),
            "BatchScheduler": _text(
                "the scheduler of the nodes' pods; native, volcano and coscheduling start MIN nodes together"
            ),
            "template": {**_ANYTHING, "description": "the pod of a node, with metadata and spec"},
        },
    }


def _status() -> Json:
    count = {"type": "integer"}
    return {
        "type": "object",
        "properties": {
            "phase": _text(
                "Pending, Running, Suspended, Succeeded or Failed; Rejected: the condition Accepted says why"
            ),
            "observedGeneration": {"type": "integer", "description": "generation of the spec that this status is of"},
            "operator": _text("who keeps this status"),
            "run": _text("the run's name"),
            "replicas": {"type": "integer", "description": "nodes of the group worker that there are"},
            "selector": _text("the labels of the nodes' pods"),
            "ready": _text("nodes that run, of those that should"),
            "step": {"type": "integer", "description": "the newest step"},
            "goodput": _text("share of the time in which new steps were made"),
            "lastIncident": _text("cause and action of the newest incident"),
            "incidents": {"type": "integer", "description": "how many incidents there were"},
            "masters": _text("where the masters are reached, HOST:PORT"),
            "status": {**_ANYTHING, "description": "DLRover's own operator's"},
            "scalePlan": _text("DLRover's own operator's"),
            "startTime": _text("when the masters were first seen to lead", format="date-time"),
            "completionTime": _text("when the job ended", format="date-time"),
            "replicaStatuses": {
                "type": "object",
                "description": "pods of each group, as DLRover counts them",
                "additionalProperties": {
                    "type": "object",
                    "properties": dict.fromkeys(("initial", "pending", "active", "failed", "succeeded"), count),
                },
            },
            "conditions": {
                "type": "array",
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
                "items": {
                    "type": "object",
                    "required": ["type", "status", "lastTransitionTime", "reason", "message"],
                    "properties": {
                        "type": {"type": "string", "maxLength": 316},
                        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                        "observedGeneration": {"type": "integer", "minimum": 0},
                        "lastTransitionTime": {"type": "string", "format": "date-time"},
                        "reason": {"type": "string", "maxLength": 1024},
                        "message": {"type": "string", "maxLength": 32768},
                    },
                },
            },
        },
    }

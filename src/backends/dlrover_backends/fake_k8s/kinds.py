"""What the fake API server serves: kinds by group, version and plural name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Kind:
    """One kind of object at one version of its group.

    Attributes:
        group: API group; empty for the core group.
        version: version of the group, `v1`.
        plural: name in paths, `pods`.
        kind: name in bodies, `Pod`.
        namespaced: whether objects live in namespaces.
        singular: what people type, `pod`.
        short: short names for kubectl.
        custom: comes from a CustomResourceDefinition.
        generation: objects count changes of their spec in metadata.generation.
        status: has a status subresource, so that status is not written through the main path.
        returns: DELETE answers with the object, not with a Status.
        schema: OpenAPI schema of a custom kind.
        scale: paths of a custom kind's scale subresource.
        columns: additional printer columns of a custom kind.
    """

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    singular: str = ""
    short: tuple[str, ...] = ()
    custom: bool = False
    generation: bool = False
    status: bool = False
    returns: bool = False
    schema: dict[str, Any] | None = field(default=None, compare=False, hash=False)
    scale: dict[str, str] | None = field(default=None, compare=False, hash=False)
    columns: tuple[dict[str, Any], ...] = field(default=(), compare=False, hash=False)

    @property
    def key(self) -> tuple[str, str]:
        """Where objects are stored: all versions of a kind are one store."""
        return self.group, self.plural

    @property
    def api_version(self) -> str:
        """The apiVersion of bodies: `v1`, `batch/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """The name in messages: `pods`, `leases.coordination.k8s.io`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def singular_qualified(self) -> str:
        """The name in messages about fields: `Pod`, `ElasticJob.elastic.iml.github.io`."""
        return f"{self.kind}.{self.group}" if self.group else self.kind


def _core(plural: str, kind: str, **more: Any) -> Kind:
    return Kind("", "v1", plural, kind, singular=kind.lower(), **more)


def _of(group: str, version: str, plural: str, kind: str, **more: Any) -> Kind:
    return Kind(group, version, plural, kind, singular=kind.lower(), **more)


BUILT_IN = (
    _core("configmaps", "ConfigMap", short=("cm",)),
    _core("endpoints", "Endpoints", short=("ep",)),
    _core("events", "Event", short=("ev",)),
    _core("limitranges", "LimitRange", short=("limits",)),
    _core("namespaces", "Namespace", namespaced=False, short=("ns",), status=True, returns=True),
    _core("nodes", "Node", namespaced=False, short=("no",), status=True),
    _core("persistentvolumeclaims", "PersistentVolumeClaim", short=("pvc",), status=True, returns=True),
    _core("persistentvolumes", "PersistentVolume", namespaced=False, short=("pv",), status=True, returns=True),
    _core("pods", "Pod", short=("po",), generation=True, status=True, returns=True),
    _core("resourcequotas", "ResourceQuota", short=("quota",), status=True, returns=True),
    _core("secrets", "Secret"),
    _core("serviceaccounts", "ServiceAccount", short=("sa",), returns=True),
    _core("services", "Service", short=("svc",), status=True, returns=True),
    _of("apps", "v1", "deployments", "Deployment", short=("deploy",), generation=True, status=True),
    _of("apps", "v1", "statefulsets", "StatefulSet", short=("sts",), generation=True, status=True),
    _of("apps", "v1", "replicasets", "ReplicaSet", short=("rs",), generation=True, status=True),
    _of("batch", "v1", "jobs", "Job", generation=True, status=True),
    _of("batch", "v1", "cronjobs", "CronJob", short=("cj",), generation=True, status=True),
    _of("coordination.k8s.io", "v1", "leases", "Lease"),
    _of("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice", generation=True),
    _of("events.k8s.io", "v1", "events", "Event", short=("ev",)),
    _of("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", short=("netpol",), generation=True),
    _of("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", short=("pdb",), generation=True, status=True),
    _of("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    _of("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    _of("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", namespaced=False),
    _of("rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False),
    _of("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim", status=True),
    _of("resource.k8s.io", "v1", "resourceclaimtemplates", "ResourceClaimTemplate"),
    _of(
        "scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False, short=("pc",), generation=True
    ),
    _of(
        "apiextensions.k8s.io",
        "v1",
        "customresourcedefinitions",
        "CustomResourceDefinition",
        namespaced=False,
        short=("crd",),
        generation=True,
        status=True,
        returns=True,
    ),
)


def served_without_definition() -> tuple[Kind, ...]:
    """Custom kinds that tests may serve without their definitions: queues, gangs and other people's jobs."""

    def custom(group: str, version: str, plural: str, kind: str, **more: Any) -> Kind:
        return _of(group, version, plural, kind, custom=True, generation=True, status=True, **more)

    return (
        custom("kueue.x-k8s.io", "v1beta2", "workloads", "Workload", short=("wl",)),
        custom("kueue.x-k8s.io", "v1beta2", "localqueues", "LocalQueue"),
        custom("kueue.x-k8s.io", "v1beta2", "clusterqueues", "ClusterQueue", namespaced=False),
        custom("kueue.x-k8s.io", "v1beta2", "resourceflavors", "ResourceFlavor", namespaced=False),
        custom("scheduling.k8s.io", "v1alpha2", "podgroups", "PodGroup"),
        custom("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup"),
        custom("scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup"),
        custom("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet"),
        custom("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob"),
    )

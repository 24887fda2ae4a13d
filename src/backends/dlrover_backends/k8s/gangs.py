"""Gangs: the nodes of a coupling set start when MIN of them can, or none does, so that no job holds hosts in vain.

A PodGroup says how many that are, and every pod of the set names it: the scheduler starts any MIN of them together, and the
others when there is room. A replacement of a dead node joins a group that runs, and starts alone. Three schedulers have such
groups, each in a kind of its own: Kubernetes itself (1.36 on), Volcano, and coscheduling of the scheduler plugins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import structlog

from dlrover_backends.k8s import names, owning
from dlrover_backends.k8s.api import Ask, Json
from dlrover_backends.k8s.errors import Conflict, Forbidden, Invalid, NotFound
from dlrover_backends.k8s.refusals import missing_right
from dlrover_backends.k8s.settings import COSCHEDULING, NATIVE, VOLCANO, Settings
from dlrover_core.errors import LaunchRefused, SpecError
from dlrover_core.runtime.backend import ENDS, GroupSize, Wanted
from dlrover_core.runtime.backends import BackendContext

PLURAL, KIND = "podgroups", "PodGroup"
VOLCANO_GROUP = "scheduling.k8s.io/group-name"
COSCHEDULING_GROUP = "scheduling.x-k8s.io/pod-group"


log = structlog.get_logger("dlrover.backend")


class Kind(NamedTuple):
    """A scheduler that has gangs.

    group:     API group of its PodGroup
    versions:  which of it we can write, the preferred first
    scheduler: the scheduler's usual name; empty: the cluster's default one
    needs:     what a cluster needs that does not serve it
    """

    group: str
    versions: tuple[str, ...]
    scheduler: str
    needs: str


KINDS: Mapping[str, Kind] = {
    NATIVE: Kind(
        "scheduling.k8s.io",
        ("v1beta1", "v1alpha3", "v1alpha2"),
        "",
        "Kubernetes 1.36 or newer with the feature gates GenericWorkload and GangScheduling, and this API version switched on",
    ),
    VOLCANO: Kind("scheduling.volcano.sh", ("v1beta1",), "volcano", "Volcano, see volcano.sh"),
    COSCHEDULING: Kind(
        "scheduling.x-k8s.io",
        ("v1alpha1",),
        "scheduler-plugins-scheduler",
        "the scheduler plugins of sigs.k8s.io/scheduler-plugins, with Coscheduling",
    ),
}


# ---- the objects


def least(groups: tuple[GroupSize, ...]) -> dict[str, int]:
    """How many nodes of each coupling set must start together. Nodes that train by themselves are in none."""
    found: dict[str, int] = {}
    for one in groups:
        if one.set:
            found[one.set] = found.get(one.set, 0) + one.nodes_min
    return found


def pod_group(here: BackendContext, told: Settings, version: str, set_: str, nodes: int, owner: Json) -> Json:
    """The PodGroup of a coupling set whose ``nodes`` start together."""
    spec: Json = {"schedulingPolicy": {"gang": {"minCount": nodes}}} if told.gang == NATIVE else {"minMember": nodes}
    if told.gang == VOLCANO and told.queue:
        spec["queue"] = told.queue
    return {
        "apiVersion": f"{KINDS[told.gang].group}/{version}",
        "kind": KIND,
        "metadata": {
            "name": names.gang_name(here.job, here.run, set_),
            "labels": names.labels(here.job, here.run),
            "annotations": {names.NOTE_JOB: here.job},
            "ownerReferences": [owning.reference(owner)],
        },
        "spec": spec,
    }


def join(here: BackendContext, told: Settings, pod: Json, set_: str, nodes: int) -> None:
    """Let a pod be one of its set's gang. A scheduler that the template names stays."""
    name, metadata, spec = names.gang_name(here.job, here.run, set_), pod["metadata"], pod["spec"]
    metadata["annotations"][names.NOTE_GANG] = f"{told.gang}:{nodes}"
    if told.gang == NATIVE:
        spec["schedulingGroup"] = {"podGroupName": name}
    elif told.gang == VOLCANO:
        metadata["annotations"][VOLCANO_GROUP] = name
    else:
        metadata["labels"][COSCHEDULING_GROUP] = name
    if KINDS[told.gang].scheduler:
        spec.setdefault("schedulerName", KINDS[told.gang].scheduler)


def before(
    here: BackendContext, told: Settings, of: list[str], pods: list[Json], groups: tuple[GroupSize, ...], owner: Json
) -> list[Json]:
    """The PodGroups of a job, in the version that is preferred, before its pods, which are let join. ``of``: each pod's group."""
    sets, sizes = {one.name: one.set for one in groups}, least(groups)
    for group, pod in zip(of, pods, strict=True):
        if sets.get(group):
            join(here, told, pod, sets[group], sizes[sets[group]])
    version = KINDS[told.gang].versions[0]
    return [*(pod_group(here, told, version, set_, nodes, owner) for set_, nodes in sizes.items()), *pods]


def rules(gang: str) -> list[dict[str, list[str]]]:
    """What a Role must grant for gangs of this scheduler, one of `settings.GANGS` or none, beside what pods need."""
    if gang not in KINDS:
        return []
    verbs = ["create", "delete", "get", "patch"]
    return [{"apiGroups": [KINDS[gang].group], "resources": [PLURAL], "verbs": verbs}]


# ---- in a cluster


class Gangs:
    """The PodGroups of a run. ``ask``: sends a request, as `Api.ask`; ``where``: the namespace, once it is known."""

    def __init__(self, here: BackendContext, told: Settings, ask: Ask, where: Callable[[], str]) -> None:
        self._here, self._told, self._ask, self._where = here, told, ask, where
        self._version = ""
        self._sets: dict[str, str] = {}
        self._least: dict[str, int] | None = None
        self._wrong = ""

    async def check(self) -> None:
        """Raises `SpecError` where the cluster does not serve the kind, in words that say what it needs; and `ApiError`."""
        kind = KINDS[self._told.gang]
        self._version = await self._served(kind)
        if self._version:
            return
        others = [name for name, one in KINDS.items() if one != kind and await self._served(one)]
        instead = " or ".join(f"gang={one}" for one in others)
        do = f"say {instead}, which it serves, or leave gang out" if others else "leave gang out"
        raise SpecError(
            "gang",
            f"{self._told.gang!r} needs {KIND} of {kind.group}/{' or '.join(kind.versions)}, which this cluster does not serve: "
            f"install {kind.needs}; or {do}",
        )

    async def _served(self, kind: Kind) -> str:
        """The version of it that the cluster serves; empty: none that we can write."""
        for version in kind.versions:
            try:
                found = await self._ask("GET", f"/apis/{kind.group}/{version}")
            except NotFound:
                continue
            if any(one.get("name") == PLURAL for one in found.get("resources") or ()):
                return version
        return ""

    async def sized(self, wanted: Wanted, owner: Json) -> None:
        """Let the PodGroups have these sizes. Raises `ApiError` for what may mend itself; the rest is told by `admit`."""
        sets = least(wanted.groups)
        self._sets = {one.name: one.set for one in wanted.groups}
        try:
            if not self._version:
                await self.check()
            for set_, nodes in sets.items():
                if wanted.state in ENDS:
                    await self._remove(set_, owner)
                else:
                    await self._level(set_, nodes, owner)
        except SpecError as error:
            self._wrong = str(error)
        except Forbidden as error:
            self._wrong = missing_right(error)
        except Invalid as error:
            self._wrong = f"the API server does not take the {KIND}: {error.message}"
        else:
            self._wrong = ""
        self._least = sets

    async def _level(self, set_: str, nodes: int, owner: Json) -> None:
        wanted = pod_group(self._here, self._told, self._version, set_, nodes, owner)
        path = self._path(set_)
        found = await self._found(set_, owner)
        if found is None:
            with contextlib.suppress(Conflict):  # another master's, or one that is being deleted: it is looked at again
                await self._ask("POST", self._path(), wanted)
            return
        if found.get("spec", {}).get("minMember", _min_count(found)) == nodes:
            return
        try:
            await self._ask("PATCH", path, {"spec": wanted["spec"]})
        except Invalid as error:  # v1alpha2 keeps it for ever
            log.warning("the gang keeps its size", gang=wanted["metadata"]["name"], wanted=nodes, error=error.message)

    async def _found(self, set_: str, owner: Json) -> Json | None:
        try:
            found = await self._ask("GET", self._path(set_))
        except NotFound:
            return None
        owners = found["metadata"].get("ownerReferences") or ()
        if not any(one.get("uid") == owner["metadata"].get("uid") for one in owners):
            name = found["metadata"]["name"]
            raise SpecError(
                "gang", f"{KIND} {name} in namespace {self._where()} is not of this run: delete it, or rename the job"
            )
        return found

    async def _remove(self, set_: str, owner: Json) -> None:
        found = await self._found(set_, owner)
        if found is not None and "deletionTimestamp" not in found["metadata"]:
            with contextlib.suppress(NotFound, Conflict):
                await self._ask("DELETE", self._path(set_))

    def admit(self, group: str, pod: Json) -> None:
        """Let the pod of a node of this group be one of its gang. Raises `LaunchRefused` where the gang cannot be."""
        if self._wrong:
            raise LaunchRefused(self._wrong, permanent=True)
        if self._least is None:
            raise LaunchRefused("the sizes of the job's gangs are not known yet", permanent=False)
        set_ = self._sets.get(group, "")
        if set_:
            join(self._here, self._told, pod, set_, self._least[set_])

    def _path(self, set_: str = "") -> str:
        name = f"/{names.gang_name(self._here.job, self._here.run, set_)}" if set_ else ""
        return f"/apis/{KINDS[self._told.gang].group}/{self._version}/namespaces/{self._where()}/{PLURAL}{name}"


def _min_count(found: Json) -> object:
    return ((found.get("spec", {}).get("schedulingPolicy") or {}).get("gang") or {}).get("minCount")

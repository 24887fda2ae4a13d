"""Every object that a job would have made in a cluster, from the functions that make them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dlrover_backends.k8s import budgets, gangs, guards, pods, settings, standbys, yaml_text
from dlrover_backends.k8s.api import Json
from dlrover_core.errors import LaunchRefused, SpecError
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backend import GroupSize
from dlrover_core.runtime.backends import BackendContext

UID = "set-by-the-api-server"


def objects(here: BackendContext, nodes: Sequence[NodeLaunch], groups: tuple[GroupSize, ...] = ()) -> list[Json]:
    """The owner of the run, what guards its nodes, its gangs, and the pod of each node.

    Raises `SpecError` where a pod would be refused.
    """
    told = settings.read(here)
    owner = pods.owner_object(here)
    guarding = guards.objects(
        here, {**owner, "metadata": {**owner["metadata"], "uid": UID}}, budgets.nodes_kept(groups)
    )
    for one in (owner, *guarding):
        if told.namespace:
            one["metadata"]["namespace"] = told.namespace
    return [owner, *guarding, *pods_of(here, nodes, owner, told.namespace, groups)]


def pods_of(
    here: BackendContext,
    nodes: Sequence[NodeLaunch],
    owner: Json,
    namespace: str,
    groups: tuple[GroupSize, ...] = (),
) -> list[Json]:
    """The gangs of these groups, the pod of each node, and standbys, of this owner.

    Raises `SpecError` where a pod would be refused.
    """
    told = settings.read(here)
    named = {**owner, "metadata": {**owner["metadata"], "uid": UID}}
    try:
        template = template_of(here, told)
        made = [pods.manifest(here, told, node, named, template) for node in nodes]
    except LaunchRefused as refused:
        raise SpecError("backend", refused.reason) from refused
    made += [] if told.gang or told.queue else _standbys(here, told, named, template, groups)
    if told.gang:
        made = gangs.before(here, told, [node.group for node in nodes], made, groups, named)
    for one in made:
        if namespace:
            one["metadata"]["namespace"] = namespace
    return made


def _standbys(
    here: BackendContext,
    told: settings.Settings,
    owner: Json,
    template: Json | None,
    groups: tuple[GroupSize, ...],
) -> list[Json]:
    """The pods that wait warm for the places of dead nodes."""
    return [
        standbys.manifest(here, told, standbys.node_of(one), owner, template, number=number)
        for one in groups
        for number in range(one.standby)
    ]


def text(here: BackendContext, nodes: Sequence[NodeLaunch], groups: tuple[GroupSize, ...] = ()) -> str:
    """The same as YAML. Raises `SpecError`."""
    return yaml_text.written(objects(here, nodes, groups))


def template_of(here: BackendContext, told: settings.Settings) -> Json | None:
    """The user's template, read now; a relative path begins where the command was typed. Raises `LaunchRefused`, `SpecError`."""
    if not told.template:
        return None
    return pods.template_of(yaml_text.read_file(str(Path(here.cwd, told.template)), "backend"), told.template)

"""The template of a group's nodes, as it is now: a file of the launcher's host, or a ConfigMap where masters are pods."""

from __future__ import annotations

import json

from dlrover_backends.k8s import masters, pods, render
from dlrover_backends.k8s.api import Ask, Json
from dlrover_backends.k8s.errors import NotFound
from dlrover_backends.k8s.settings import Settings
from dlrover_core.errors import LaunchRefused
from dlrover_core.runtime.backends import BackendContext


async def of_group(here: BackendContext, told: Settings, group: str, ask: Ask, configmaps: str) -> Json | None:
    """The template; None: there is none.

    group:      the group of the nodes
    ask:        sends a request
    configmaps: path of the namespace's ConfigMaps

    Raises `LaunchRefused`, `SpecError`, `ApiError`.
    """
    kind, colon, name = told.template.partition(":")
    if f"{kind}{colon}" != masters.CONFIGMAP:
        return render.template_of(here, told)
    try:
        found = (await ask("GET", f"{configmaps}/{name}")).get("data") or {}
    except NotFound as error:
        raise LaunchRefused(
            f"Template: there is no ConfigMap {name}, which holds the template of the nodes: put it back, or start the job anew",
            permanent=False,
        ) from error
    text = found.get(group, found.get(masters.DEFAULT_KEY))
    try:
        return None if text is None else pods.template_of(json.loads(text), told.template)
    except ValueError as error:
        raise LaunchRefused(f"{told.template}, group {group}: {error}", permanent=True) from error

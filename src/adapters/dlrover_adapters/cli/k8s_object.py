"""`dlrover k8s render job.yaml`: every object that an ElasticJob begins with, as the operator and the masters would make them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dlrover_adapters.cli import k8s_lines
from dlrover_core.errors import LaunchRefused, SpecError

if TYPE_CHECKING:
    from dlrover_core.job.orders import NodeLaunch
    from dlrover_core.spec import JobSpec

IMAGE, TOKEN = "THE-OPERATORS-IMAGE", "THE-TOKEN-OF-THE-JOB"
SUFFIXES = (".yaml", ".yml")


def file_of(words: Sequence[str]) -> str:
    """The file of an ElasticJob that a line of `render` names; empty: it is a line of `dlrover-run`."""
    told = list(words)
    if len(told) == 3 and told[0] == "--image":
        told = told[2:]
    return told[0] if len(told) == 1 and told[0].endswith(SUFFIXES) else ""


def text(words: Sequence[str], nodes: Callable[[JobSpec], list[NodeLaunch]]) -> str:
    """The objects of all ElasticJobs of the file, as YAML. ``nodes``: those that a job begins with. Raises `SpecError`."""
    from dlrover_backends.k8s import yaml_text
    from dlrover_backends.k8s.elasticjob import translate

    path = file_of(words)
    found = yaml_text.read_all(path, "FILE")
    jobs = [one for one in found if isinstance(one, dict) and one.get("kind") == translate.KIND]
    if not jobs:
        raise SpecError("FILE", f"{path!r} holds no {translate.KIND}; for a line of dlrover-run end it with its script")
    image = words[1] if len(words) == 3 else IMAGE
    return yaml_text.written([each for one in jobs for each in _objects(one, image, nodes)])


def _objects(
    thing: dict[str, Any], image: str, nodes: Callable[[JobSpec], list[NodeLaunch]]
) -> Iterator[dict[str, Any]]:
    """What the operator makes of one, then the nodes' pods and standbys."""
    from dlrover_backends.k8s import gangs, masters, pods, settings, standbys
    from dlrover_backends.k8s.elasticjob import reconcile, translate
    from dlrover_core.runtime.backend import sizes_of
    from dlrover_core.runtime.backends import BackendContext

    metadata = thing.get("metadata") or {}
    if not metadata.get("name"):
        raise SpecError("metadata.name", "missing: write the job's name")
    thing = {**thing, "metadata": {"namespace": "default", **metadata, "uid": masters.UID}}
    lines = k8s_lines.Lines()
    job = translate.read(thing, lines)
    for note in job.notes:
        print(f"dlrover k8s render: {note}", file=sys.stderr)
    plan = reconcile.plan_of(thing, job, reconcile.Settings(image, lines=lines))
    masters.check(plan)
    yield from (one.object for one in reconcile.made(job, plan))
    spec = k8s_lines.spec_of(job.words, f"{translate.JOB_MOUNT}/{translate.JOB_FILE}", job.job_file)
    here = BackendContext(
        job.name,
        masters.UID,
        (f"{plan.called}.{plan.namespace}.svc:{masters.PORT}",),
        TOKEN,
        args=masters.backend_of(plan).partition(":")[2],
        stop_grace_s=spec.stop_grace_s,
    )
    told = settings.read(here)
    try:
        made = [pods.manifest(here, told, one, thing, job.templates[one.group]) for one in nodes(spec)]
        if told.gang:
            made = gangs.before(here, told, [one.group for one in nodes(spec)], made, sizes_of(spec), thing)
        for size in sizes_of(spec):
            node, template = standbys.node_of(size), job.templates[size.name]
            made += [
                standbys.manifest(here, told, node, thing, template, number=number) for number in range(size.standby)
            ]
    except LaunchRefused as refused:
        raise SpecError("spec.replicaSpecs", refused.reason) from refused
    for pod in made:
        pod["metadata"]["namespace"] = plan.namespace
        yield pod

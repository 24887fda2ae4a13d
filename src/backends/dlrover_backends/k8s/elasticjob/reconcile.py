"""What is to be written for one ElasticJob, from what was observed. Pure: the operator observes and writes.

The masters act by themselves when something fails. The operator makes them, tells them sizes and pauses that the object asks for,
writes down how the job stands, and removes everything when the object is deleted. So it may be away for any time.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dlrover_backends.k8s import endings, kueue, masters, names, owning
from dlrover_backends.k8s.api import Json
from dlrover_backends.k8s.elasticjob import standing, translate
from dlrover_backends.k8s.elasticjob.launchers import Lines
from dlrover_backends.k8s.elasticjob.telling import Told
from dlrover_backends.k8s.paths import path_of
from dlrover_core.errors import SpecError

FINALIZER = MANAGER = "dlrover-core/operator"
NOTE_TAKE, NOTE_TEMPLATES, NOTE_KEPT = "dlrover-core/operator", "dlrover-core/templates", "dlrover-core/nodes-kept"
NOTE_FILES, NOTE_PAUSES = "dlrover-core/log-files", "dlrover-core/suspends"
NOTE_KEEP_LOG = "dlrover-core/keep-log"
"""Of a job whose log is in etcd: it stays there when the job is deleted, unless the annotation is missing or one of `NO`."""
NO = {"false", "no", "off", "0"}
NOTE_LOGS = "dlrover-core/log-of"
"""The uid of the object whose masters were made, with their log in etcd. Another object's, of a copied manifest, says nothing."""
CLAIM_SIZE = "1Gi"


class Settings(NamedTuple):
    """What the operator gives every job.

    image:      of the masters
    etcd:       URL of the logs of all jobs; empty: each job has a claim of its own
    storage:    StorageClass of those claims; empty: the cluster's default
    annotated:  are only jobs taken that say so?
    lines:      reads jobs' command lines; None: they are what they look like
    etcd_files: files that the URL names, in the folder `masters.FILES_PATH` of masters' pods: contents by name
    rack:       the label of hosts that names their rack; empty: nodes' domains are the zones of their pods
    """

    image: str
    etcd: str = ""
    storage: str = ""
    annotated: bool = False
    lines: Lines | None = None
    etcd_files: Mapping[str, str] = MappingProxyType({})
    rack: str = ""


class Observed(NamedTuple):
    """One job, as it was seen.

    job:     the object
    masters: the masters' Job; None: there is none
    pods:    of the job: masters' and nodes'
    told:    what its masters say; None: they did not answer, or were not asked
    refused: why they refused what they were asked last; empty: they did not
    left:    are there objects of the job, while it is deleted, beside pods and the Job?
    now:     the time, as the API writes it
    unheard: why the masters could not be asked; empty: they did not answer
    """

    job: Json
    masters: Json | None = None
    pods: tuple[Json, ...] = ()
    told: Told | None = None
    refused: str = ""
    left: bool = False
    now: str = "1970-01-01T00:00:00Z"
    unheard: str = ""


class Make(NamedTuple):
    """Create this, unless it is there. ``secret``: a token is to be put into it."""

    object: Json
    secret: bool = False


class Patch(NamedTuple):
    """Merge this into the object at the path.

    as_read: write it only into what was read just before: a patch of an operator that is dead may still be on its way, and is
             refused once its successor's has been written
    """

    path: str
    body: Json
    as_read: bool = False


class Remove(NamedTuple):
    """Delete the object at the path, if the job owns it."""

    path: str


class Ask(NamedTuple):
    """Have the masters do something."""

    command: Json


class Erase(NamedTuple):
    """Remove what an etcd has of the job, if its log began with this run."""

    namespace: str
    job: str
    run: str


Write = Make | Patch | Remove | Ask | Erase


class Outcome(NamedTuple):
    """What is to be written, and said.

    writes: in order; after one that fails, none
    status: of the object, from now on; None: it is as it was
    events: (type, reason, message) for ``kubectl describe``
    """

    writes: tuple[Write, ...] = ()
    status: Json | None = None
    events: tuple[tuple[str, str, str], ...] = ()


def is_ours(job: Json, settings: Settings) -> bool:
    """Does this operator take the job?

    Where DLRover's own operator lives, and of a job that has that one's status already, only one that is annotated. A job that
    is another controller's, by ``managedBy``, is left to it, unless it was ours before: what was made for it must go.
    """
    spec = job.get("spec") or {}
    if spec.get("managedBy") not in (None, "", MANAGER) and FINALIZER not in (job["metadata"].get("finalizers") or ()):
        return False
    annotation = (job["metadata"].get("annotations") or {}).get(NOTE_TAKE)
    if annotation is not None:
        return bool(annotation == names.BY)
    if FINALIZER in (job["metadata"].get("finalizers") or ()):
        return True
    status = job.get("status") or {}
    return not settings.annotated and (not status.get("phase") or status.get("operator") == names.BY)


def reconcile(seen: Observed, settings: Settings) -> Outcome:
    """What is to be written now."""
    if seen.job["metadata"].get("deletionTimestamp"):
        return _removing(seen, settings)
    try:
        job = translate.read(seen.job, settings.lines)
        plan = plan_of(seen.job, job, settings)
        masters.check(plan)
    except SpecError as error:
        return _rejected(seen, str(error))
    except Exception as error:  # noqa: BLE001  # whatever an object holds that nobody has thought of, its user is told
        return _rejected(
            seen, f"spec: it is not understood ({type(error).__name__}: {error}); compare it with docs/kubernetes.md"
        )
    return _keeping(seen, job, plan)


# ---- a job that is wanted


def _keeping(seen: Observed, job: translate.Job, plan: masters.MasterPlan) -> Outcome:
    writes: list[Write] = []
    finalizers = list(seen.job["metadata"].get("finalizers") or ())
    if FINALIZER not in finalizers:
        writes.append(_finalizers(seen.job, [*finalizers, FINALIZER]))
    if seen.masters is None and not standing.is_over(seen.job) and not job.suspended:
        *needed, last = made(job, plan)
        writes += [*needed, *_marked(seen.job, plan), last]
    elif seen.masters is not None and not standing.ended(seen.masters):
        writes += _templates(seen.masters, plan)
        writes += _files(seen.masters, plan)
        writes += _budget(seen, plan)
        asked = [Ask(one) for one in _asked(seen, job)]
        writes += [*_pauses(seen, job, asked), *asked]
    writes += _leftovers(seen)
    status, events = standing.status(facts(seen), job, plan)
    return Outcome(tuple(writes), status if status != seen.job.get("status") else None, events)


def _marked(thing: Json, plan: masters.MasterPlan) -> Iterator[Write]:
    """What is written once the object has a Secret of its own, and before its masters can write a log."""
    notes, uid = thing["metadata"].get("annotations") or {}, thing["metadata"]["uid"]
    if plan.etcd and notes.get(NOTE_LOGS) != uid:
        yield Patch(path_of(thing), {"metadata": {"annotations": {NOTE_LOGS: uid}}})


def facts(seen: Observed) -> standing.Facts:
    """What the status is made from."""
    return standing.Facts(seen.job, seen.masters, seen.pods, seen.told, seen.refused, seen.now, seen.unheard)


def _leftovers(seen: Observed) -> Iterator[Write]:
    """Nodes and standbys whose masters are over: nobody else would end them. Pods that have ended stay, for their logs."""
    over = standing.ended(seen.masters) if seen.masters is not None else standing.is_over(seen.job)
    for one in seen.pods if over else ():
        if not standing.is_master(one) and standing.lives(one) and not one["metadata"].get("deletionTimestamp"):
            yield Remove(path_of(one))


def made(job: translate.Job, plan: masters.MasterPlan) -> Iterator[Make]:
    """Everything that a job begins with, beside its nodes, in the order of creation."""
    yield Make(_owned(plan, "v1", "ConfigMap", translate.file_name(job.name), data={translate.JOB_FILE: job.job_file}))
    if plan.claim:
        spec: Json = {"accessModes": ["ReadWriteOncePod"], "resources": {"requests": {"storage": CLAIM_SIZE}}}
        if storage := plan.annotations.get("storage"):
            spec["storageClassName"] = storage
        yield Make(_owned(plan, "v1", "PersistentVolumeClaim", plan.claim, spec=spec))
    for one in masters.objects(plan):
        if one["kind"] == "Job":
            _mount(one, job.name)
            one["metadata"]["annotations"][NOTE_TEMPLATES] = digest(plan.templates)
            if plan.etcd_files:
                one["metadata"]["annotations"][NOTE_FILES] = digest(plan.etcd_files)
        yield Make(one, secret=one["kind"] == "Secret")


def _mount(made: Json, job: str) -> None:
    """Put the job file where the masters' words say that it lies."""
    pod = made["spec"]["template"]["spec"]
    pod["volumes"] = [*pod["volumes"], translate.volume(job)]
    (container,) = pod["containers"]
    mount = {"name": translate.JOB_VOLUME, "mountPath": translate.JOB_MOUNT, "readOnly": True}
    container["volumeMounts"] = [*container["volumeMounts"], mount]


def _templates(made: Json, plan: masters.MasterPlan) -> Iterator[Write]:
    """A changed template holds for nodes that are launched from now on."""
    now = digest(plan.templates)
    if (made["metadata"].get("annotations") or {}).get(NOTE_TEMPLATES) != now:
        config = masters.config(plan)
        yield Patch(path_of(config), {"data": config["data"]}, as_read=True)
        yield Patch(path_of(made), {"metadata": {"annotations": {NOTE_TEMPLATES: now}}})


def _files(made: Json, plan: masters.MasterPlan) -> Iterator[Write]:
    """Renewed certificates of the log are for masters that start from now on. Which log it is stays: the history lies there."""
    before, now = (made["metadata"].get("annotations") or {}).get(NOTE_FILES), digest(plan.etcd_files)
    if before is not None and plan.etcd_files and before != now:
        data = {name: base64.b64encode(text.encode()).decode() for name, text in plan.etcd_files.items()}
        yield Patch(path_of(masters.secret(plan)), {"data": data}, as_read=True)
        yield Patch(path_of(made), {"metadata": {"annotations": {NOTE_FILES: now}}})


def _budget(seen: Observed, plan: masters.MasterPlan) -> Iterator[Write]:
    """A drain may take one node at a time, of those that there are now: with one node, that one."""
    assert seen.masters is not None
    if seen.told is None:
        return
    kept = str(max(0, sum(one.running for one in seen.told.groups.values()) - 1))
    if (seen.masters["metadata"].get("annotations") or {}).get(NOTE_KEPT) != kept:
        budget = next(one for one in masters.objects(plan) if one["kind"] == "PodDisruptionBudget")
        yield Make(budget)  # somebody may have deleted it
        yield Patch(path_of(budget), {"spec": {"minAvailable": int(kept)}})
        yield Patch(path_of(seen.masters), {"metadata": {"annotations": {NOTE_KEPT: kept}}})


def digest(what: Mapping[str, Any] | None) -> str:
    """Of what an annotation says that it was written."""
    return hashlib.sha256(json.dumps(None if what is None else dict(what), sort_keys=True).encode()).hexdigest()[:16]


def _asked(seen: Observed, job: translate.Job) -> Iterator[Json]:
    """What the masters are to do so that the job is as the object says."""
    told = seen.told
    if told is None or seen.refused:
        return
    why = f"ElasticJob {job.name}, generation {seen.job['metadata'].get('generation', 0)}"
    if told.state in {"created", "running"}:
        if job.suspended and not told.pausing:
            yield {"command": "suspend", "keep_nodes": False, "lose": False, "reason": why}
            return
        if told.pausing and not job.suspended and _paused(seen):  # once it has begun, all nodes are gone
            yield {"command": "resume", "reason": why}
            return
        for group in job.groups:
            now = told.groups.get(group.name)
            if now is not None and (now.nodes_min, now.nodes_max) != (group.nodes_min, group.nodes_max):
                sizes = {"nodes_min": group.nodes_min, "nodes_max": group.nodes_max}
                yield {"command": "scale", "group": group.name, **sizes, "reason": why}
    elif told.state == "suspended" and not job.suspended and (standing.holds(seen.job, "Suspended") or _paused(seen)):
        # A person's pause is a person's to end.
        yield {"command": "resume", "reason": why}


def _paused(seen: Observed) -> bool:
    """Was it the object that asked for the pause? The status may not say so yet: an operator died between the two."""
    return seen.masters is not None and NOTE_PAUSES in (seen.masters["metadata"].get("annotations") or {})


def _pauses(seen: Observed, job: translate.Job, asked: list[Ask]) -> Iterator[Write]:
    """Note on the masters' Job, before they are told, that the object asks for the pause; and that it no longer does."""
    assert seen.masters is not None
    suspends = any(one.command["command"] == "suspend" for one in asked)
    told = seen.told
    runs = told is not None and told.state == "running" and not told.pausing and not job.suspended
    if suspends != _paused(seen) and (suspends or runs):
        note = "true" if suspends else None
        yield Patch(path_of(seen.masters), {"metadata": {"annotations": {NOTE_PAUSES: note}}})


def _rejected(seen: Observed, why: str) -> Outcome:
    """The object cannot be a job: what runs of it goes on as it was, to its end."""
    status, events = standing.rejected(facts(seen), why)
    return Outcome(tuple(_leftovers(seen)), status if status != seen.job.get("status") else None, events)


# ---- a job that is deleted


def _removing(seen: Observed, settings: Settings) -> Outcome:
    """The masters go first, who would make pods, and are waited for; then pods; then the rest; then the object may go, too.

    What an etcd has of it goes last: until then nobody else takes the name. An object that never had masters has nothing there:
    what bears its name is another's.
    """
    finalizers = list(seen.job["metadata"].get("finalizers") or ())
    if FINALIZER not in finalizers:
        return Outcome()
    if seen.masters is not None:
        return Outcome((Remove(path_of(seen.masters)),))
    if pods := staying(seen.pods, seen.now):
        first = [one for one in pods if standing.is_master(one) and standing.lives(one)] or pods
        return Outcome(tuple(Remove(path_of(one)) for one in first if not one["metadata"].get("deletionTimestamp")))
    if seen.left:
        return Outcome(tuple(Remove(one) for one in belongings(seen.job)))
    metadata = seen.job["metadata"]
    uid = metadata["uid"]
    goes = settings.etcd and (metadata.get("annotations") or {}).get(NOTE_LOGS) == uid and not keeps_log(seen.job)
    log = (Erase(metadata["namespace"], metadata["name"], uid),) if goes else ()
    kept = [one for one in finalizers if one != FINALIZER]
    return Outcome((*log, _finalizers(seen.job, kept)))


def keeps_log(job: Json) -> bool:
    """Is the log to stay in the etcd when the object is deleted? Whatever is not a plain no keeps it."""
    said = (job["metadata"].get("annotations") or {}).get(NOTE_KEEP_LOG)
    return said is not None and str(said).strip().lower() not in NO


def staying(pods: tuple[Json, ...], now: str) -> list[Json]:
    """The pods that a deleted job waits for: not those which only a lost host could end. They have no masters any more."""
    return [one for one in pods if not endings.is_stranded(one, now)]


def _finalizers(job: Json, kept: list[str]) -> Patch:
    """Set all finalizers. The version is that which was read: others' that came since must not be lost."""
    metadata = {"finalizers": kept or None, "resourceVersion": job["metadata"]["resourceVersion"]}
    return Patch(path_of(job), {"metadata": metadata})


def belongings(job: Json) -> list[str]:
    """Paths of all that may have been made for a job, beside its pods."""
    name = masters.name_of(str(job["metadata"]["name"]))
    plan = masters.MasterPlan(
        str(job["metadata"]["namespace"]),
        name,
        "any",
        (),
        token="any",  # noqa: S106
        owner=owner_of(job),
        claim=claim_of(name),
        templates={},
        standby=True,
        nodes_kept=1,
    )
    made = [*masters.objects(plan), _owned(plan, "v1", "PersistentVolumeClaim", plan.claim)]
    made.append(_owned(plan, "v1", "ConfigMap", translate.file_name(str(job["metadata"]["name"]))))
    return [path_of(one) for one in made]


# ---- what a job is made from


def plan_of(thing: Mapping[str, Any], job: translate.Job, settings: Settings) -> masters.MasterPlan:
    """The masters of a job. The Secret's token is filled in when it is made."""
    metadata = thing["metadata"]
    name = masters.name_of(job.name)
    kept = sum(one.nodes_max for one in job.groups) - 1
    queue = str((metadata.get("labels") or {}).get(kueue.QUEUE_LABEL) or "")
    backend = {
        "image": "",
        "command": "template",
        "gpu": job.gpu,
        "gang": job.gang,
        "queue": queue,
        "rack": settings.rack,
    }
    return masters.MasterPlan(
        namespace=str(metadata["namespace"]),
        name=name,
        image=settings.image,
        argv=job.words,
        token="made-by-the-operator",  # noqa: S106  # replaced before it is sent
        owner=owner_of(thing),
        job=job.name,
        etcd=settings.etcd,
        etcd_files=settings.etcd_files,
        claim="" if settings.etcd else claim_of(name),
        annotations={"storage": settings.storage} if settings.storage else {},
        templates=job.templates,
        backend=backend,
        standby=any(one.standby for one in job.groups),
        nodes_kept=kept,
    )


def claim_of(name: str) -> str:
    """The claim with a job's log."""
    return f"{name}-log"


def owner_of(thing: Mapping[str, Any]) -> masters.Owner:
    """The object as an owner."""
    metadata = thing["metadata"]
    return masters.Owner(thing["apiVersion"], translate.KIND, translate.PLURAL, metadata["name"], metadata["uid"])


def _owned(plan: masters.MasterPlan, version: str, kind: str, name: str, **content: Any) -> Json:
    owner = plan.owner
    assert owner is not None
    metadata = {
        "name": name,
        "namespace": plan.namespace,
        "labels": masters.labels(plan),
        "ownerReferences": [owning.of(owner.api_version, owner.kind, owner.name, owner.uid)],
    }
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}

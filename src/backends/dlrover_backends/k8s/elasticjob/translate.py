"""An ElasticJob as a job of ours: DLRover's YAML in; sizes, pod templates and the masters' words out. Pure.

What is wrong is told with its path in the object, its value, and what to write. What is understood and does nothing is a note.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dlrover_backends.k8s import kueue, names, paths, pods, quantities
from dlrover_backends.k8s.api import Json
from dlrover_backends.k8s.elasticjob import launchers, shapes
from dlrover_backends.k8s.elasticjob.launchers import Command
from dlrover_backends.k8s.quantities import shown
from dlrover_backends.k8s.settings import COSCHEDULING, NATIVE, VOLCANO
from dlrover_core.errors import SpecError

GROUP, OLD_GROUP, VERSION = "elastic.iml.github.io", "elastic.ml.github.io", "v1alpha1"
KIND = "ElasticJob"
PLURAL = paths.PLURALS[KIND]
GANG_SCHEDULERS: Mapping[str, str] = {
    NATIVE: NATIVE,
    VOLCANO: VOLCANO,
    COSCHEDULING: COSCHEDULING,
    "scheduler-plugins-scheduler": COSCHEDULING,
}
"""What `BatchScheduler` names, and whose PodGroup that scheduler heeds."""
WORKER, MASTER, PS, PARAMETER_SERVER = "worker", "dlrover-master", "ps", "ParameterServerStrategy"
EVALUATOR, TENSORFLOW, CLUSTER = "evaluator", "dlrover_adapters.plain.tf_config", "DLROVER_TF_CLUSTER"
"""A task that is in no cluster; what tells TensorFlow's programs of each other, and the variable that it reads."""
STRATEGIES = ("AllreduceStrategy", PARAMETER_SERVER, "CustomStrategy", "Local")
JOB_FILE, JOB_MOUNT, JOB_VOLUME = "job.toml", "/etc/dlrover", "dlrover-job"
NODES_MAX = 16384
GPUS = ("nvidia.com/gpu", "amd.com/gpu", "huawei.com/Ascend910", "mthreads.com/gpu", "metax-tech.com/gpu")
"""Resources that are a node's devices, as far as DLRover knows them."""

_GROUP_NAME = re.compile(r"[a-z][a-z0-9]*")
_CLASS = re.compile(r"[a-z]([a-z0-9.-]*[a-z0-9])?")
_SPEC = {
    "optimizeMode": "sizes are those of replicas and of kubectl scale",
    "brainService": "there is no such service here",
    "resourceLimits": "the namespace's quota bounds what a job takes",
    **dict.fromkeys(("enableElasticScheduling", "elasticScheduling"), "nodes come and go in every job"),
    **dict.fromkeys(
        ("enableDynamicSharding", "dynamicSharding"),
        "every sample counts once in every job that reads through ElasticDataset",
    ),
}
"""Fields of the spec that do nothing, and why."""
_REPLICA = {
    "restartTimeout": "a node that waits for its platform is waited for",
    "autoScale": "sizes are those of replicas and of kubectl scale",
    "restartPolicy": "a pod is one incarnation of its node, and is followed by the next one's",
}
_KNOWN = {
    *_SPEC,
    *("distributionStrategy", "envs", "managedBy", "suspend", "replicaSpecs"),
}
_KNOWN_OF_A_GROUP = {
    *_REPLICA,
    *("replicas", "minReplicas", "maxReplicas", "standby", "restartCount", "priority", "BatchScheduler", "template"),
}


class Group(NamedTuple):
    """Nodes of one role.

    name:       the group's
    nodes_min:  fewest nodes to work with
    nodes_max:  most nodes to run
    nproc:      workers per node
    template:   the pod of a node, with ``metadata`` and ``spec``
    gpu:        the resource that its GPUs are
    standby:    pods that are kept warm
    """

    name: str
    nodes_min: int
    nodes_max: int
    nproc: int
    template: Json
    gpu: str
    standby: int = 0


class Job(NamedTuple):
    """An ElasticJob, understood.

    name:      the object's
    groups:    in the order of the object
    words:     of the masters' `dlrover-run`, without the backend
    job_file:  the job file that the words name
    suspended: is the job to pause?
    gpu:       the resource that nodes' GPUs are
    notes:     what is understood and does nothing, a line each
    gang:      whose PodGroup lets MIN nodes start together, one of `settings.GANGS`; empty: each pod is scheduled by itself
    """

    name: str
    groups: tuple[Group, ...]
    words: tuple[str, ...]
    job_file: str
    suspended: bool
    gpu: str
    notes: tuple[str, ...]
    gang: str = ""

    @property
    def templates(self) -> dict[str, Json]:
        """The pods of nodes, by group."""
        return {one.name: one.template for one in self.groups}


def read(thing: Mapping[str, Any], lines: launchers.Lines | None = None) -> Job:
    """The job that an object of the API describes. ``lines``: reads its command lines. Raises `SpecError`."""
    lines = lines or launchers.Unread()
    name = str((thing.get("metadata") or {}).get("name") or "")
    if len(name) > names.LENGTH_MAX:
        raise SpecError(
            "metadata.name",
            f"{name!r} has {len(name)} characters, and a job's name {names.LENGTH_MAX} at most: delete the object, and apply it "
            "under a shorter name",
        )
    spec = _mapping(thing.get("spec"), "spec")
    notes = list(_notes(thing, spec))
    old = str(thing.get("apiVersion", "")).startswith(f"{OLD_GROUP}/")
    specs = {
        (key.lower() if old else key): _mapping(one, f"spec.replicaSpecs.{key}")
        for key, one in _mapping(spec.get("replicaSpecs"), "spec.replicaSpecs").items()
    }
    if MASTER in specs:
        notes.append(
            f"spec.replicaSpecs.{MASTER}: the masters' image is the operator's: DLRover's own cannot lead this job"
        )
        del specs[MASTER]
    if not specs:
        raise SpecError(
            "spec.replicaSpecs", "missing: write worker: with replicas and a template with the nodes' container"
        )
    wanted = {key: one for key, one in specs.items() if str(one.get("replicas")) != "0"}
    if wanted:  # else the first one is told as wrong
        notes += [
            f"spec.replicaSpecs.{key}: its replicas are 0: the job has no such group"
            for key in specs
            if key not in wanted
        ]
        specs = wanted
    strategy = _strategy(spec)
    made = [_Reader(name, key, one, spec, strategy, specs, lines).read() for key, one in specs.items()]
    for one in made:
        notes += one.notes
    gang = _gang(specs)
    _check_standbys(thing, made, gang)
    first = next((one for one in made if one.group.name == WORKER), made[0])
    job = Job(
        name,
        tuple(one.group for one in made),
        (f"--job={JOB_MOUNT}/{JOB_FILE}", f"--job-id={name}", *first.words),
        "".join(_tables(made)),
        _flag(spec.get("suspend", False), "spec.suspend"),
        first.group.gpu,
        tuple(notes),
        gang,
    )
    try:
        lines.job(job.words, f"{JOB_MOUNT}/{JOB_FILE}", job.job_file)
    except SpecError as error:
        raise SpecError("spec.replicaSpecs", f"masters would not take it: {error}") from error
    return job


def _gang(specs: Mapping[str, Mapping[str, Any]]) -> str:
    """The gangs of the job's scheduler. Raises `SpecError` where groups name several."""
    named = {key: GANG_SCHEDULERS.get(str(one.get("BatchScheduler") or ""), "") for key, one in specs.items()}
    found = sorted(set(filter(None, named.values())))
    if len(found) > 1:
        where = ", ".join(f"{key}: {specs[key]['BatchScheduler']}" for key, gang in named.items() if gang)
        raise SpecError(
            "spec.replicaSpecs", f"BatchScheduler of {where}: one scheduler starts a job's nodes together; name one"
        )
    return found[0] if found else ""


def _check_standbys(thing: Mapping[str, Any], made: list[_Read], gang: str) -> None:
    """Raises `SpecError` where a gang or warm pods are beside a queue, or both."""
    queue = ((thing.get("metadata") or {}).get("labels") or {}).get(kueue.QUEUE_LABEL)
    if queue and gang:
        raise SpecError(
            "spec.replicaSpecs",
            f"BatchScheduler {gang}, with the label {kueue.QUEUE_LABEL}: {queue}: Kueue admits MIN nodes as a whole; leave "
            "one of them out",
        )
    for one in made:
        if gang and one.group.standby:
            raise SpecError(
                f"spec.replicaSpecs.{one.group.name}.standby",
                f"{one.group.standby}, with BatchScheduler {gang}: a standby is no part of a gang; leave one of them out",
            )
        if queue and one.group.standby:
            raise SpecError(
                f"spec.replicaSpecs.{one.group.name}.standby",
                f"{one.group.standby}, with the label {kueue.QUEUE_LABEL}: {queue}: a standby would be taken from the quota of "
                "MIN; leave one of them out",
            )


def _tables(made: list[_Read]) -> Iterator[str]:
    """The groups' tables. Where all are TensorFlow's tasks, their programs are told how many of each there are."""
    sizes = [f"{one.group.name}={one.group.nodes_min}" for one in made if one.group.name != EVALUATOR]
    if not sizes or not all(one.task for one in made):
        yield from (one.table for one in made)
        return
    for one in made:
        yield one.task + _toml(f"groups.{one.group.name}.env", {CLUSTER: ",".join(sizes)})


def _notes(thing: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[str]:
    if str(thing.get("apiVersion", "")).startswith(f"{OLD_GROUP}/"):
        yield f"apiVersion {thing['apiVersion']} is old: write {GROUP}/{VERSION}, with groups in lower case"
    for field, why in _SPEC.items():
        if spec.get(field):
            yield f"spec.{field} does nothing here: {why}"
    for field in sorted(set(spec) - _KNOWN):
        yield f"spec.{field} does nothing here: this field is not known"


def _strategy(spec: Mapping[str, Any]) -> str:
    found = spec.get("distributionStrategy", STRATEGIES[0])
    if found in ("parameter_server", "allreduce"):  # as the first versions of DLRover wrote it
        return PARAMETER_SERVER if found == "parameter_server" else STRATEGIES[0]
    if found not in STRATEGIES:
        raise SpecError("spec.distributionStrategy", f"{shown(found)}: write {STRATEGIES[0]} or {PARAMETER_SERVER}")
    return str(found)


class _Read(NamedTuple):
    """One group, its part of the job file, the same as TensorFlow's task if it may be one, its launcher's job flags, notes."""

    group: Group
    table: str
    task: str
    words: tuple[str, ...]
    notes: tuple[str, ...]


class _Reader:
    """Reads one entry of ``replicaSpecs``."""

    def __init__(
        self,
        job: str,
        name: str,
        replica: Mapping[str, Any],
        spec: Mapping[str, Any],
        strategy: str,
        groups: Mapping[str, Any],
        lines: launchers.Lines,
    ) -> None:
        self._job, self._name, self._replica, self._spec = job, name, replica, spec
        self._serves = strategy == PARAMETER_SERVER
        self._groups, self._lines = groups, lines
        self._at = f"spec.replicaSpecs.{name}"

    def read(self) -> _Read:
        """The group. Raises `SpecError`."""
        if not _GROUP_NAME.fullmatch(self._name):
            raise SpecError(
                self._at, f"{self._name!r} is no group's name: write lower-case letters and digits, as in worker"
            )
        template = self._template()
        container = pods.main_of(template["spec"]["containers"], template["metadata"])
        where = f"{self._at}.template.spec.containers[{template['spec']['containers'].index(container)}]"
        asked = self._asked()
        self._add_variables(template["spec"]["containers"], container, asked or 1)
        known = {one["name"]: str(one["value"]) for one in container["env"] if one.get("value") is not None}
        command = launchers.read(container, known, where, self._lines)
        if not command.words:
            raise SpecError(f"{where}.command", f'missing: write ["{launchers.OURS}", "train.py"]')
        resources = self._resources(container, where)
        fewest, most = self._nodes(command, asked, where)
        if not asked and most > 1:
            self._add_variables(template["spec"]["containers"], container, most)
        nproc = self._nproc(command, resources, where, known)
        self._run(command, container, template["spec"])
        group = Group(self._name, fewest, most, nproc, template, resources.gpu, self._standby(command))
        return _Read(
            group,
            self._table(group, command, resources),
            self._table(group, command, resources, task=True)
            if self._serves and not (command.launcher or command.hidden)
            else "",
            self._words(command, fewest),
            tuple(self._notes(command)),
        )

    # ---- the pod

    def _template(self) -> Json:
        found = copy.deepcopy(_mapping(self._replica.get("template"), f"{self._at}.template"))
        spec = _mapping(found.get("spec"), f"{self._at}.template.spec")
        containers = spec.get("containers")
        if not isinstance(containers, list) or not containers or not all(isinstance(one, dict) for one in containers):
            raise SpecError(
                f"{self._at}.template.spec.containers",
                "missing: write a list with the nodes' container, its image and command",
            )
        metadata = _mapping(found.get("metadata") or {}, f"{self._at}.template.metadata")
        shapes.pod({"metadata": metadata, "spec": spec}, f"{self._at}.template")
        made = dict(spec)
        priority, scheduler = self._replica.get("priority"), self._replica.get("BatchScheduler")
        if isinstance(priority, str) and _CLASS.fullmatch(priority):
            made.setdefault("priorityClassName", priority)
        if scheduler not in (None, "", "default", NATIVE, COSCHEDULING):
            made.setdefault("schedulerName", str(scheduler))
        return {"metadata": metadata, "spec": made}

    def _add_variables(self, containers: list[Json], main: Json, nodes: int) -> None:
        """``envs`` of the job, and what DLRover tells a node's container."""
        told = list(self._envs())
        for one in containers:
            own = {each.get("name") for each in one.get("env") or []}
            one["env"] = [*(one.get("env") or []), *(each for each in told if each["name"] not in own)]
        index = {"valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{names.LABEL_INDEX}']"}}}
        ours: list[Json] = [
            {"name": "NODE_NUM", "value": str(nodes)},
            {"name": "WORKER_NUM", "value": str(nodes)},
            {"name": "NODE_TYPE", "value": self._name},
            {"name": "WORKER_TYPE", "value": self._name},
            {"name": "ELASTIC_JOB_NAME", "value": self._job},
            *({"name": name, **index} for name in ("NODE_RANK", "NODE_ID", "WORKER_RANK", "WORKER_ID")),
        ]
        known = {one["name"] for one in ours}
        main["env"] = [*ours, *(one for one in main["env"] if one["name"] not in known)]

    def _envs(self) -> Iterator[Json]:
        for name, one in _mapping(self._spec.get("envs") or {}, "spec.envs").items():
            if isinstance(one, (str, int, float)):
                yield {"name": name, "value": str(one)}
            elif isinstance(one, dict) and ("value" in one or "valueFrom" in one):
                yield {
                    "name": str(one.get("name") or name),
                    **{key: one[key] for key in ("value", "valueFrom") if key in one},
                }
            else:
                raise SpecError(f"spec.envs.{name}", f"{shown(one)}: write {{name: {name}, value: TEXT}}")

    def _run(self, command: Command, container: Json, spec: Json) -> None:
        """Let the container run the node's agent."""
        container.pop("args", None)
        if command.launcher is not None or command.hidden:
            container["command"] = list(command.words)
            return
        container["command"] = [launchers.OURS, "--job", f"{JOB_MOUNT}/{JOB_FILE}"]
        mount = {"name": JOB_VOLUME, "mountPath": JOB_MOUNT, "readOnly": True}
        container["volumeMounts"] = [*(container.get("volumeMounts") or []), mount]
        spec["volumes"] = [*(spec.get("volumes") or []), volume(self._job)]

    # ---- sizes

    def _asked(self) -> int:
        """How many nodes the object asks for; 0: it does not say."""
        for field in ("replicas", "maxReplicas"):
            if self._replica.get(field) is not None:
                return _count(self._replica[field], f"{self._at}.{field}", least=1)
        return 0

    def _nodes(self, command: Command, asked: int, where: str) -> tuple[int, int]:
        """Fewest and most nodes: of the object, else of the launcher's line; who names no fewest takes one."""
        told = command.launcher.last("nnodes") if command.launcher is not None else None
        low, high = _range(told, f"{where}.command") if told is not None else (0, 0)
        most = asked or high or 1
        fewest = self._replica.get("minReplicas")
        if fewest is not None:
            low = _count(fewest, f"{self._at}.minReplicas", least=1)
        elif not low and command.launcher is not None and command.launcher.last("auto-config") is not None:
            low = most
        if low > most:
            if fewest is None and not asked:
                raise SpecError(
                    f"{self._at}.replicas", f"missing, and --nnodes={told} needs {low}: write replicas: {low}, or more"
                )
            if fewest is None:
                raise SpecError(
                    f"{where}.command",
                    f"--nnodes={told}: its fewest, {low}, is more than replicas, {asked}; change one of them",
                )
            raise SpecError(f"{self._at}.minReplicas", f"{low} is more than the most, {most}; change one of them")
        return (low or 1) if not self._serves else (low or most), most

    def _nproc(self, command: Command, resources: _Resources, where: str, env: Mapping[str, str]) -> int:
        if command.launcher is None:
            return resources.gpus or 1 if command.hidden else 1
        told = command.launcher.last("nproc-per-node")
        if told is None:
            auto = command.launcher.last("auto-config") is not None
            told = env.get("PET_NPROC_PER_NODE") or ("auto" if auto else "1")
        if re.fullmatch(r"[0-9]{1,4}", told) and int(told):
            return int(told)
        if resources.gpus:
            return resources.gpus
        if told in {"auto", "cpu"} and resources.cpu_m:
            return max(1, resources.cpu_m // 1000)
        raise SpecError(
            f"{where}.command",
            f"--nproc-per-node={told}: only the node could tell; write a number, or resources.limits with {GPUS[0]}",
        )

    def _resources(self, container: Json, where: str) -> _Resources:
        found = _mapping(container.get("resources") or {}, f"{where}.resources")
        requests = _mapping(found.get("requests") or {}, f"{where}.resources.requests")
        limits = _mapping(found.get("limits") or {}, f"{where}.resources.limits")
        all_of_it = {**requests, **limits}
        gpu = next((one for one in all_of_it if one in GPUS), GPUS[0])
        field = f"{where}.resources"
        return _Resources(
            quantities.mib(all_of_it.get("memory", 0), f"{field}.memory"),
            quantities.thousandths(requests.get("cpu", limits.get("cpu", 0)), f"{field}.cpu"),
            int(quantities.amount(all_of_it.get(gpu, 0), f"{field}.{gpu}")),
            gpu,
        )

    # ---- what the masters are told

    def _table(self, group: Group, command: Command, resources: _Resources, *, task: bool = False) -> str:
        """The group's table in the job file. Of a program that its pods' launcher runs, masters need no more than its name."""
        launcher = command.launcher
        told: dict[str, Any] = {
            "nodes": f"{group.nodes_min}:{group.nodes_max}",
            "processes": group.nproc,
            "command": [launcher.program] if launcher is not None else list(command.words),
        }
        if group.standby:
            told["standby"] = group.standby
        if self._replica.get("restartCount") is not None:
            told["relaunches"] = _count(self._replica["restartCount"], f"{self._at}.restartCount", least=0)
        if launcher is not None:
            unit = launcher.last("node-unit")
            if unit is not None:
                told["unit"] = _count(unit, f"{self._at}: --node_unit", least=1)
            if launcher.last("role"):
                told["role"] = launcher.last("role")
            if launcher.last("relaunch-max") is not None:
                told["relaunches"] = _count(launcher.last("relaunch-max"), f"{self._at}: --relaunch-max", least=0)
        elif not command.hidden:
            told |= {"framework": TENSORFLOW, "store": False} if task else {"framework": "none"}
        if self._serves:
            others = [one for one in self._groups if one != self._name]
            tasks = [one for one in self._groups if one != EVALUATOR]
            told |= {"coupling": "each", "uses": tasks if task else others}
            told |= {"ends": False} if self._name == PS else {}
        return _toml(f"groups.{self._name}", told) + self._needs(resources)

    def _standby(self, command: Command) -> int:
        """Pods that are kept warm. Raises `SpecError`."""
        found = self._replica.get("standby")
        field = f"{self._at}.standby"
        if found is None and command.launcher is not None and command.launcher.last("standby") is not None:
            found, field = command.launcher.last("standby"), f"{self._at}: --standby"
        return _count(found, field, least=0) if found is not None else 0

    def _needs(self, resources: _Resources) -> str:
        needs = {"memory": f"{resources.memory_mib}Mi", "cpu": f"{resources.cpu_m}m", "gpu": resources.gpus}
        there = {key: value for key, value in needs.items() if value not in {0, "0Mi", "0m"}}
        return _toml(f"groups.{self._name}.resources", there) if there else ""

    def _words(self, command: Command, fewest: int) -> tuple[str, ...]:
        if command.launcher is None:
            return ()
        words = command.launcher.job_words()
        configured = command.launcher.last("auto-config") is not None and fewest >= 4
        checked = command.launcher.last("precheck") is not None
        return tuple([*words, "--precheck=full"] if configured and not checked else words)

    def _notes(self, command: Command) -> Iterator[str]:
        for field, why in _REPLICA.items():
            if self._replica.get(field):
                yield f"{self._at}.{field} does nothing here: {why}"
        for field in sorted(set(self._replica) - _KNOWN_OF_A_GROUP):
            yield f"{self._at}.{field} does nothing here: this field is not known"
        priority = self._replica.get("priority")
        if priority and not _CLASS.fullmatch(str(priority)):
            yield f"{self._at}.priority {priority!r} does nothing here: all nodes of a group have one PriorityClass"
        scheduler = self._replica.get("BatchScheduler")
        if scheduler not in (None, "", "default") and str(scheduler) not in GANG_SCHEDULERS:
            yield (
                f"{self._at}.BatchScheduler: pods name this scheduler, and no PodGroup is made: MIN nodes are a gang with "
                f"{', '.join(GANG_SCHEDULERS)}"
            )
        if command.hidden and command.launcher is None:
            yield f"{self._at}: the command runs a shell script, which must run {launchers.OURS} itself"
        for name, why in launchers.ELSEWHERE.items():
            if command.launcher is not None and command.launcher.last(name) is not None:
                yield f"{self._at}: --{name} does nothing here: {why}"


class _Resources(NamedTuple):
    """What one node asks for; 0: nothing."""

    memory_mib: int
    cpu_m: int
    gpus: int
    gpu: str


def volume(job: str) -> Json:
    """The volume with the job file."""
    return {"name": JOB_VOLUME, "configMap": {"name": file_name(job)}}


def file_name(job: str) -> str:
    """The ConfigMap with the job file."""
    return f"{job}-job"


def _mapping(value: object, field: str) -> dict[str, Any]:
    if value is None:
        raise SpecError(field, "missing: an ElasticJob has it")
    if not isinstance(value, dict):
        raise SpecError(field, f"{shown(value)} is no mapping of names to values")
    return value


def _flag(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise SpecError(field, f"{shown(value)}: write true or false")
    return value


def _count(value: object, field: str, *, least: int) -> int:
    text = str(value)
    whole = not isinstance(value, bool) and re.fullmatch(r"[0-9]{1,9}", text)
    if not whole or not least <= int(text) <= NODES_MAX:
        raise SpecError(field, f"{shown(value)}: write a whole number from {least} to {NODES_MAX}")
    return int(text)


def _range(text: str, field: str) -> tuple[int, int]:
    """``N`` or ``MIN:MAX`` of ``--nnodes``; 0 for a part that only the pod's shell knows."""
    low, colon, high = text.partition(":")
    found = [
        0 if "$" in one else _count(one, f"{field}: --nnodes", least=1)
        for one in ((low, high) if colon else (low, low))
    ]
    return found[0], found[1]


def _toml(name: str, fields: Mapping[str, Any]) -> str:
    return f"[{name}]\n" + "".join(f"{key} = {_value(one)}\n" for key, one in fields.items())


def _value(one: object) -> str:
    if isinstance(one, bool):
        return str(one).lower()
    if isinstance(one, int):
        return str(one)
    if isinstance(one, (list, tuple)):
        return f"[{', '.join(_value(each) for each in one)}]"
    escaped = "".join(
        f"\\{each}" if each in '"\\' else f"\\u{ord(each):04x}" if ord(each) < 0x20 or ord(each) == 0x7F else each
        for each in str(one)
    )
    return f'"{escaped}"'

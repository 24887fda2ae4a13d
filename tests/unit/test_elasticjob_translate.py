"""DLRover's YAML, as its users write it, is a job of ours; what is wrong with it is named with its path, value, and remedy."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrover_adapters.cli import groups
from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.plain import tf_config
from dlrover_backends.k8s import masters, quantities
from dlrover_backends.k8s.elasticjob import crd, launchers, reconcile, shell, translate
from dlrover_core.errors import SpecError
from dlrover_core.spec import EACH, JobSpec

Json = dict[str, Any]

JOBS: dict[str, Json] = {
    one["metadata"]["name"]: one
    for one in yaml.safe_load_all((Path(__file__).parent / "elasticjobs.yaml").read_text(encoding="utf-8"))
}

SETTINGS, IN_CLUSTER = reconcile.Settings("registry/dlrover-core:1"), {"namespace": "ml", "uid": "u-1"}


def job(name: str, **spec: Any) -> Json:
    """A job of the file, with other fields in its spec."""
    found = copy.deepcopy(JOBS[name])
    found["spec"] |= spec
    return found


def lines(name: str, line: str, **replica: Any) -> Json:
    """A job whose worker runs a line in bash."""
    found = job(name)
    worker = found["spec"]["replicaSpecs"]["worker"]
    worker |= replica
    container = worker["template"]["spec"]["containers"][0]
    container.pop("args", None)
    container["command"] = ["bash", "-c", line]
    return found


def spec_of(made: translate.Job, folder: Path) -> JobSpec:
    """The spec that the masters make of it, with the command line's own parser."""
    path = folder / translate.JOB_FILE
    path.write_text(made.job_file, encoding="utf-8")
    words = [one.replace(f"{translate.JOB_MOUNT}/{translate.JOB_FILE}", str(path)) for one in made.words]
    options = cli_options.parse(["--backend", "k8s:command=template", *words])
    options.argv = tuple(words)
    groups.taken_in(options)
    cli_options.check(options)
    return groups.spec(options, cli_options.job_name(options), groups.plans(options))


def sizes(spec: JobSpec) -> dict[str, tuple[int, int, int]]:
    """Fewest, most, and workers of each group."""
    return {one.name: (one.nodes_min, one.nodes_max, one.nproc) for one in spec.groups}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mnist", {"worker": (3, 4, 2)}),
        ("chaos", {"worker": (3, 4, 2)}),
        ("nanogpt", {"worker": (2, 2, 8)}),
        ("small", {"worker": (1, 1, 1)}),
        ("automatic", {"worker": (8, 8, 8)}),
        ("swift", {"worker": (1, 1, 1)}),
        ("deepfm", {"ps": (2, 2, 1), "worker": (3, 3, 1)}),
        ("iris", {"ps": (1, 1, 1), "worker": (1, 1, 1)}),
    ],
)
def test_what_users_write_is_a_job(name: str, expected: dict[str, tuple[int, int, int]], tmp_path: Path) -> None:
    """The masters' own parser takes what is made of each job, and the sizes are those that its author meant."""
    spec = spec_of(translate.read(JOBS[name]), tmp_path)
    assert spec.job == name
    assert sizes(spec) == expected


def test_job_flags_of_a_pods_line_reach_the_job(tmp_path: Path) -> None:
    """Checks, restarts, relaunches and units are the job's, though they stand in the pod's command."""
    spec = spec_of(translate.read(JOBS["chaos"]), tmp_path)
    assert (spec.precheck, spec.check_slow, spec.groups[0].relaunch_max) == ("full", "replace", 1)
    spec = spec_of(translate.read(JOBS["automatic"]), tmp_path)
    assert (spec.groups[0].unit, spec.precheck) == (2, "full")


def test_pods_that_are_kept_warm(tmp_path: Path) -> None:
    """A group's ``standby``, or the flag of its launcher, reaches the masters, who get the rights for it; a queue has none."""
    field, flag = (
        lines("nanogpt", "dlrover-run train.py", standby=2),
        lines("nanogpt", "dlrover-run --standby 1 t.py"),
    )
    for thing, count in ((field, 2), (flag, 1), (lines("nanogpt", "dlrover-run t.py"), 0)):
        made = translate.read(thing)
        assert spec_of(made, tmp_path).groups[0].standby == count
        thing["metadata"] |= IN_CLUSTER
        rights = masters.rules(reconcile.plan_of(thing, made, SETTINGS))
        assert bool(count) == any(one["resources"] == ["configmaps"] and one["verbs"] == ["create"] for one in rights)
    field["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    with pytest.raises(
        SpecError, match=r"spec.replicaSpecs.worker.standby: 2, with the label .*: research: a standby would"
    ):
        translate.read(field)


def test_what_a_node_needs_is_the_groups(tmp_path: Path) -> None:
    """Memory, CPUs and GPUs of the container are the group's, so that a relaunch after OOM can ask for more."""
    mnist, gpt = (spec_of(translate.read(JOBS[one]), tmp_path).groups[0] for one in ("mnist", "nanogpt"))
    assert (mnist.memory_mib, mnist.cpu_m, mnist.gpus) == (2048, 1000, 0)
    assert (gpt.memory_mib, gpt.cpu_m, gpt.gpus) == (16384, 8000, 8)


def test_parameter_servers_are_sets_of_their_own(tmp_path: Path) -> None:
    """Each server and each worker comes back alone, they know of each other, and the job does not wait for servers to end."""
    ps, worker = spec_of(translate.read(JOBS["deepfm"]), tmp_path).groups
    assert (ps.coupling, ps.ends, ps.uses) == (EACH, False, ("ps", "worker"))
    assert (worker.coupling, worker.ends, worker.uses) == (EACH, True, ("ps", "worker"))


def test_a_group_of_no_nodes_is_left_out(tmp_path: Path) -> None:
    """Templates of DLRover's users keep a group at 0 replicas: the others run, and are told of no such group."""
    found = job("deepfm")
    found["spec"]["replicaSpecs"]["ps"] |= {"replicas": 0, "minReplicas": 0}
    made = translate.read(found)
    (worker,) = spec_of(made, tmp_path).groups
    assert (worker.name, worker.uses) == ("worker", ("worker",))
    assert "spec.replicaSpecs.ps: its replicas are 0: the job has no such group" in made.notes
    fields = crd.schema()["properties"]["spec"]["properties"]["replicaSpecs"]["additionalProperties"]["properties"]
    assert [fields[one]["minimum"] for one in ("replicas", "minReplicas", "maxReplicas")] == [0, 0, 0]


def test_tasks_of_tensorflow_are_told_of_each_other() -> None:
    """Programs without a launcher have TF_CONFIG if all are such; an evaluator is not in the cluster."""
    found = job("deepfm")
    replicas = found["spec"]["replicaSpecs"]
    replicas["evaluator"] = {**copy.deepcopy(replicas["worker"]), "replicas": 1}
    file = translate.read(found).job_file
    assert file.count(f'framework = "{tf_config.__name__}"') == 3
    assert file.count('uses = ["ps", "worker"]') == file.count("store = false") == 3
    assert file.count(f'{tf_config.CLUSTER} = "ps=2,worker=3"') == 3
    replicas["worker"] = copy.deepcopy(replicas["worker"])
    container = replicas["worker"]["template"]["spec"]["containers"][0]
    container["command"], container["args"] = ["dlrover-run", "train.py"], []
    file = translate.read(found).job_file
    assert tf_config.CLUSTER not in file  # a launcher's ranks are no tasks
    assert file.count('framework = "none"') == 2


def container_of(name: str, group: str = "worker") -> Json:
    """The container of a node's pod."""
    found = translate.read(JOBS[name]).templates[group]["spec"]["containers"][0]
    assert isinstance(found, dict)
    return found


def test_a_pod_runs_its_own_command() -> None:
    """All of a line stays, and another launcher's name gives way to ours."""
    assert "dlrover-run --nnodes=$WORKER_NUM --nproc_per_node=gpu train.py" in container_of("nanogpt")["command"][2]
    assert container_of("nanogpt")["command"][2].endswith("| tee /tmp/log")
    assert container_of("chaos")["command"][2].startswith("(bash start_chaos.sh cpu-overload &) && dlrover-run --net")
    assert "args" not in container_of("chaos")
    assert container_of("small")["command"] == ["dlrover-run", "train.py"]
    assert container_of("swift")["command"] == ["/bin/bash", "-c", "sh start.sh"]


def test_a_program_without_a_launcher_is_run_by_ours() -> None:
    """Its pod runs the agent with the job file, in which the program stands."""
    made = translate.read(JOBS["deepfm"])
    for group in ("ps", "worker"):
        container = container_of("deepfm", group)
        assert container["command"] == ["dlrover-run", "--job", "/etc/dlrover/job.toml"]
        assert container["volumeMounts"][-1]["mountPath"] == "/etc/dlrover"
        volumes = made.templates[group]["spec"]["volumes"]
        assert volumes == [{"name": "dlrover-job", "configMap": {"name": "deepfm-job"}}]
    assert '"cd /home/model && python -m dlrover' in made.job_file


def test_variables_that_dlrover_tells() -> None:
    """A node's container finds what DLRover's operator would tell it; the job's ``envs`` do not hide the container's own."""
    found = {one["name"]: one for one in container_of("nanogpt")["env"]}
    assert (found["NODE_NUM"]["value"], found["WORKER_NUM"]["value"], found["NCCL_DEBUG"]["value"]) == (
        "2",
        "2",
        "INFO",
    )
    assert found["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['dlrover-core/index']"
    own = job("nanogpt")
    own["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]["env"] = [
        {"name": "NCCL_DEBUG", "value": "W"}
    ]
    made = translate.read(own).templates["worker"]["spec"]["containers"][0]["env"]
    assert [one["value"] for one in made if one["name"] == "NCCL_DEBUG"] == ["W"]


def test_what_does_nothing_is_told() -> None:
    """Each field without an effect is named with its reason."""
    told = "\n".join(translate.read(JOBS["deepfm"]).notes)
    assert "spec.resourceLimits does nothing here: the namespace's quota" in told
    assert "spec.optimizeMode does nothing here" in told
    assert "apiVersion elastic.ml.github.io/v1alpha1 is old" in translate.read(JOBS["iris"]).notes[0]
    assert any(
        "dlrover-master: the masters' image is the operator's" in one for one in translate.read(JOBS["chaos"]).notes
    )
    assert any("runs a shell script, which must run dlrover-run" in one for one in translate.read(JOBS["swift"]).notes)
    typo = job("mnist", replicaSpec={})
    assert "spec.replicaSpec does nothing here: this field is not known" in translate.read(typo).notes
    assert translate.read(JOBS["mnist"]).notes == (
        "spec.optimizeMode does nothing here: sizes are those of replicas and of kubectl scale",
    )


def test_a_name_that_is_too_long_is_refused() -> None:
    """The API server takes longer names than a job can have: the field, its length and the remedy are told."""
    found = job("mnist")
    found["metadata"]["name"] = "a" * 63
    assert translate.read(found).name == "a" * 63
    found["metadata"]["name"] = "a" * 64
    with pytest.raises(SpecError, match=r"metadata.name.*64 characters.*63 at most.*shorter name"):
        translate.read(found)


def test_suspending_and_scheduling_are_passed_on() -> None:
    """``suspend``, ``priority`` and ``BatchScheduler`` say what they say."""
    assert translate.read(JOBS["automatic"]).suspended
    assert translate.read(JOBS["nanogpt"]).templates["worker"]["spec"]["priorityClassName"] == "high"
    own = job("mnist")
    own["spec"]["replicaSpecs"]["worker"] |= {"BatchScheduler": "volcano", "priority": "0.5"}
    made = translate.read(own)
    assert made.templates["worker"]["spec"]["schedulerName"] == "volcano"
    assert "priorityClassName" not in made.templates["worker"]["spec"]
    assert any("priority '0.5' does nothing" in one for one in made.notes)
    assert not any("PodGroup" in one for one in made.notes)
    own["spec"]["replicaSpecs"]["worker"]["BatchScheduler"] = "yunikorn"
    assert translate.read(own).gang == ""
    assert any("no PodGroup is made" in one for one in translate.read(own).notes)


@pytest.mark.parametrize(
    ("word", "gang", "scheduler"),
    [
        ("native", "native", None),
        ("volcano", "volcano", "volcano"),
        ("coscheduling", "coscheduling", None),
        ("scheduler-plugins-scheduler", "coscheduling", "scheduler-plugins-scheduler"),
    ],
)
def test_a_batch_scheduler_starts_a_gang(word: str, gang: str, scheduler: str | None) -> None:
    """The job's MIN nodes are one; where the gang's scheduler has its usual name, pods get it when they are made."""
    own = job("mnist")
    own["spec"]["replicaSpecs"]["worker"]["BatchScheduler"] = word
    made = translate.read(own)
    assert made.gang == gang
    assert made.templates["worker"]["spec"].get("schedulerName") == scheduler
    own["spec"]["replicaSpecs"]["worker"]["standby"] = 1
    with pytest.raises(SpecError, match="standby: 1, with BatchScheduler"):
        translate.read(own)
    del own["spec"]["replicaSpecs"]["worker"]["standby"]
    own["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "q"}
    with pytest.raises(SpecError, match="Kueue admits MIN nodes as a whole"):
        translate.read(own)


def test_one_scheduler_starts_a_job() -> None:
    """Two of them cannot."""
    own = job("mnist")
    own["spec"]["replicaSpecs"]["worker"]["BatchScheduler"] = "volcano"
    own["spec"]["replicaSpecs"]["other"] = {**own["spec"]["replicaSpecs"]["worker"], "BatchScheduler": "native"}
    with pytest.raises(SpecError, match="worker: volcano, other: native"):
        translate.read(own)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("spec.replicaSpecs", {}, "spec.replicaSpecs: missing: write worker:"),
        ("spec.replicaSpecs", [], "spec.replicaSpecs: \\[\\] is no mapping"),
        ("spec.distributionStrategy", "Ring", "spec.distributionStrategy: 'Ring': write AllreduceStrategy or"),
        ("spec.suspend", "yes", "spec.suspend: 'yes': write true or false"),
        ("spec.envs", {"A": []}, "spec.envs.A: \\[\\]: write \\{name: A"),
        ("spec.replicaSpecs.worker.replicas", 0, "replicas: 0: write a whole number from 1"),
        ("spec.replicaSpecs.worker.replicas", "many", "replicas: 'many': write a whole number"),
        ("spec.replicaSpecs.worker.replicas", 2, "--nnodes=3:2: its fewest, 3, is more than replicas, 2"),
        ("spec.replicaSpecs.worker.minReplicas", 5, "minReplicas: 5 is more than the most, 4"),
        ("spec.replicaSpecs.worker.restartCount", -1, "restartCount: -1: write a whole number from 0"),
        ("spec.replicaSpecs.worker.template", None, "spec.replicaSpecs.worker.template: missing"),
        ("spec.replicaSpecs.worker.template.spec.containers", [], "spec.containers: missing: write a list"),
        ("spec.replicaSpecs.worker.template.spec.containers", [{"name": "a"}], "containers\\[0\\].image: missing"),
        (
            "spec.replicaSpecs.worker.template.spec.containers",
            [{"image": "a"}],
            "containers\\[0\\].command: missing: write",
        ),
        (
            "spec.replicaSpecs.worker.template.spec.containers",
            [{"image": "a", "command": "dlrover-run x.py"}],
            "command: 'dlrover-run x.py' is no list of texts",
        ),
        (
            "spec.replicaSpecs.worker.template.spec.containers",
            [{"image": "a", "command": ["a"], "resources": {"limits": {"memory": "2 GB"}}}],
            "resources.memory: '2 GB' is no quantity: write a number",
        ),
        (
            "spec.replicaSpecs.worker.template.spec.containers",
            [{"image": "a", "command": ["a"], "resources": {"limits": {"memory": "1e9999999"}}}],
            "resources.memory: '1e9999999' is no quantity: write a number",
        ),
        (
            "spec.replicaSpecs.worker.template.spec.containers",
            [{"image": "a", "command": ["a"], "resources": {"limits": {"memory": "1e99"}}}],
            "resources.memory: '1e99' is more than any host has",
        ),
        (
            "spec.replicaSpecs.worker.template.spec.containers",
            [{"image": "a", "command": ["a"], "env": [{"value": "x"}]}],
            "containers\\[0\\].env\\[0\\].name: \\{'value': 'x'\\} has no name: write \\{name: A, value: b\\}",
        ),
        (
            "spec.replicaSpecs.worker.template.spec.containers",
            [{"image": "a", "command": ["a"], "env": ["A"]}],
            "containers\\[0\\].env: \\['A'\\] is no list of mappings: write a list of \\{name: A, value: b\\}",
        ),
        (
            "spec.replicaSpecs.worker.template.spec.containers",
            [{"image": "a", "command": ["a"], "env": {"A": "b"}}],
            "containers\\[0\\].env: \\{'A': 'b'\\} is no list of mappings",
        ),
        (
            "spec.replicaSpecs.worker.template.spec.containers",
            [{"image": "a", "command": ["a"], "env": [{"name": "A", "value": 1}]}],
            "containers\\[0\\].env\\[0\\].value: 1 of A is no text: write value: '1'",
        ),
        (
            "spec.replicaSpecs.worker.template.metadata",
            {"annotations": {"a": True}},
            "template.metadata.annotations.a: True is no text: write it in quotes",
        ),
    ],
)
def test_what_is_wrong_is_named(path: str, value: object, said: str) -> None:
    """The path in the object, the value, and what to write."""
    wrong = job("mnist")
    *way, last = path.split(".")
    place = wrong
    for step in way:
        place = place[step]
    place[last] = value
    with pytest.raises(SpecError, match=said):
        translate.read(wrong)


ODD: tuple[Any, ...] = (
    *(None, True, -1, 1.5, float("nan"), "", "1e9999999", "9" * 5000, "\x00\ud800"),
    *([], ["A"], [{"value": "x"}], [{"name": ["x"]}], {"a": 1}, {"name": {}}, [None], [[1]]),
)


def places(thing: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part of a value."""
    yield way
    parts = thing.items() if isinstance(thing, dict) else enumerate(thing) if isinstance(thing, list) else ()
    for key, one in parts:
        yield from places(one, (*way, key))


def test_nothing_that_is_written_is_a_traceback() -> None:
    """Whatever stands anywhere in an object is a job, or is told with its field and what to write."""
    full = job("nanogpt", envs={"A": "b"}, suspend=False)
    worker = full["spec"]["replicaSpecs"]["worker"]
    worker |= {"minReplicas": 1, "maxReplicas": 2, "restartCount": 1, "priority": "high", "BatchScheduler": "a"}
    spec = worker["template"]["spec"]
    spec |= {"volumes": [{"name": "a", "emptyDir": {}}], "tolerations": [{"key": "a"}], "nodeSelector": {"a": "b"}}
    spec["containers"][0] |= {"env": [{"name": "A", "value": "b"}], "volumeMounts": [{"name": "a", "mountPath": "/a"}]}
    worker["template"]["metadata"] = {"labels": {"a": "b"}, "annotations": {"a": "b"}}
    for way in list(places(full["spec"]))[1:]:
        for odd in ODD:
            wrong = copy.deepcopy(full)
            place = wrong["spec"]
            for step in way[:-1]:
                place = place[step]
            place[way[-1]] = odd
            with contextlib.suppress(SpecError):
                made = translate.read(wrong)
                plan = reconcile.plan_of({**wrong, "metadata": {**wrong["metadata"], **IN_CLUSTER}}, made, SETTINGS)
                json.dumps([made.job_file, masters.objects(plan)])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("dlrover-run --nproc_per_node=$HOW_MANY train.py", "--nproc-per-node=\\$HOW_MANY: only the node could tell"),
        ("dlrover-run --nproc_per_node=auto_ train.py", "only the node could tell; write a number"),
        ("dlrover-run --max_restarts $(cat n) train.py", "--max-restarts \\$\\(cat n\\): only the pod's shell knows"),
        ("dlrover-run --max_restarts", "--max-restarts: the command ends where its value should be"),
        ("dlrover-run --standalone", "is given no script"),
        ("dlrover-run --nnodes=x train.py", "--nnodes: 'x': write a whole number"),
    ],
)
def test_lines_that_are_wrong(line: str, said: str) -> None:
    """A flag is named as it stands on the line."""
    with pytest.raises(SpecError, match=said):
        translate.read(lines("small", line))


def test_sizes_without_numbers() -> None:
    """Who says no MIN takes one node; a range that needs more than there are is told."""
    made = translate.read(lines("small", "dlrover-run train.py", replicas=5)).groups[0]
    assert (made.nodes_min, made.nodes_max) == (1, 5)
    made = translate.read(lines("small", "dlrover-run --nnodes=2:$UNKNOWN train.py", replicas=5)).groups[0]
    assert (made.nodes_min, made.nodes_max) == (2, 5)
    made = translate.read(lines("small", "dlrover-run --nnodes=2:6 train.py")).groups[0]
    assert (made.nodes_min, made.nodes_max) == (2, 6)
    with pytest.raises(SpecError, match="replicas: missing, and --nnodes=3:1 needs 3"):
        translate.read(lines("small", "dlrover-run --nnodes=3:$NODE_NUM train.py"))


def test_flags_without_a_value_are_those_of_the_parser() -> None:
    """The translation cuts a line into flags and program exactly as the command does."""
    theirs = {
        option.lstrip("-").replace("_", "-")
        for action in cli_options.parser()._actions
        for option in action.option_strings
        if action.nargs == 0 and "=" not in option
    }
    assert theirs == launchers.SWITCHES
    known = {one.lstrip("-").replace("_", "-") for one in cli_options.parser()._option_string_actions}
    assert {*launchers.JOB_FLAGS, *launchers.ELSEWHERE} <= known


def test_words_of_a_shell() -> None:
    """Quotes, escapes, variables with defaults and comments, each with its place in the text."""
    line = 'A=1 run \\\n \'$X\' "$X ${Y:-d e}" pre"f"ix \\$X a\\ b # no\n$Z; (`x` $((1+1)) 3$)'
    first, second, third = shell.commands(line, {"X": "x"})
    assert [one.text for one in first] == ["A=1", "run", "$X", "x d e", "prefix", "$X", "a b"]
    assert not any(one.open for one in first)
    assert (second[0].text, second[0].open) == ("$Z", True)
    assert [(one.text, one.open) for one in third] == [("`x`", True), ("$((1+1))", True), ("3$", False)]
    assert line[first[3].start : first[3].end] == '"$X ${Y:-d e}"'


@pytest.mark.parametrize(
    ("text", "mib", "thousandths"),
    [
        ("1Gi", 1024, 1024**3 * 1000),
        ("500m", 1, 500),
        ("1.5", 1, 1500),
        ("1e3", 1, 1000000),
        ("1M", 1, 10**9),
        ("1E", 953674316407, 10**21),
        ("250000u", 1, 250),
        ("1e-3", 1, 1),
        ("1Ei", 2**40, 2**60 * 1000),
    ],
)
def test_quantities(text: str, mib: int, thousandths: int) -> None:
    """Kubernetes' numbers, rounded up."""
    assert (quantities.mib(text, "f"), quantities.thousandths(text, "f")) == (mib, thousandths)


def test_job_files_are_toml() -> None:
    """Whatever a command holds stands in the file as it was."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    odd = "python -c \"print('a\\tb')\" \u00e9 \x07\n"
    found = lines("small", odd)
    assert tomllib.loads(translate.read(found).job_file)["groups"]["worker"]["command"] == ["bash", "-c", odd]

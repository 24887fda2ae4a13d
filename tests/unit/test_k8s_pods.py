"""Pods as nodes: names, manifests, and what recorded pods say of how they ended, why they wait, and what comes."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import json
import re
from typing import Any

import pytest
from k8s_scripted import recorded_pods, recorded_refusals

from dlrover_backends.k8s import endings, names, pods, refusals, settings
from dlrover_backends.k8s.errors import Request, of_answer
from dlrover_backends.k8s.stuck import STUCK_S, Patience
from dlrover_core import AVOIDED, BackendContext, LaunchRefused, NodeLaunch, Observation
from dlrover_core.diagnosis import signatures
from dlrover_core.diagnosis.classify import of_platform
from dlrover_core.errors import SpecError
from dlrover_core.runtime.backend import PRINTED

HERE = BackendContext(
    "Big Job", "r1", ("10.0.0.1:29400",), "a-secret", arguments=("train.py", "--lr", "0.1"), env={"PET_X": "1"}
)
NODE = NodeLaunch("Big Job-worker-1-0", "worker-1-0", "worker", 1, 0, 4, ())
OWNER = {**pods.owner_object(HERE), "metadata": {**pods.owner_object(HERE)["metadata"], "uid": "u-1"}}
IMAGE = settings.Settings(image="trainer:1")
DNS = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
TABLE = signatures.table()


def made(node: NodeLaunch = NODE, told: settings.Settings = IMAGE, template: Any = None, **here: Any) -> dict[str, Any]:
    """The pod of a node."""
    return pods.manifest(dataclasses.replace(HERE, **here), told, node, OWNER, template, token=7)


# ---- names


@pytest.mark.parametrize(
    "name", ["a-worker-0-0", "訓練-ß-worker-0-0", f"{'j' * 200}-worker-0-0", "9-w-0-0", "A_b.C-w-1-2", ""]
)
def test_any_name_is_a_dns_label_of_its_own(name: str) -> None:
    """Every name of ours has one name in the cluster: valid, the same each time, and another in another run."""
    found = names.pod_name(name, "r1")
    assert DNS.fullmatch(found)
    assert found == names.pod_name(name, "r1") != names.pod_name(name, "r2")
    assert found != names.pod_name(f"{name}x", "r1")


def test_people_recognise_a_name() -> None:
    """The job and the node's place are to be read in it, in long ones too."""
    assert names.pod_name("pretrain-worker-12-3", "r").startswith("pretrain-worker-12-3-")
    assert "-worker-12-3-" in names.pod_name(f"{'p' * 240}-worker-12-3", "r")


@pytest.mark.parametrize("text", ["r1", "Big Job", "x" * 80, "-a", "ü", ""])
def test_label_values_are_valid(text: str) -> None:
    """Any text has a label value, and texts that are values are their own."""
    assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", names.label_value(text))
    assert names.label_value("r1") == "r1"


# ---- manifests


def restricted(pod: dict[str, Any]) -> list[str]:
    """What the Pod Security Standard *restricted* has against a pod."""
    spec, wrong = pod["spec"], []
    of_pod = spec.get("securityContext", {})
    wrong += ["runAsNonRoot"] if of_pod.get("runAsNonRoot") is not True or of_pod.get("runAsUser") == 0 else []
    wrong += ["seccomp"] if of_pod.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"} else []
    for one in spec["containers"]:
        own = one.get("securityContext", {})
        wrong += ["escalation"] if own.get("allowPrivilegeEscalation") is not False else []
        wrong += ["capabilities"] if own.get("capabilities", {}).get("drop") != ["ALL"] else []
    wrong += ["host"] if any(spec.get(one) for one in ("hostNetwork", "hostPID", "hostIPC")) else []
    wrong += ["volume"] if any("hostPath" in one for one in spec.get("volumes", [])) else []
    return wrong


def test_a_pod_from_no_template() -> None:
    """Everything that makes a pod a node is there, and a namespace with the restricted standard takes it."""
    pod = made()
    spec, main = pod["spec"], pod["spec"]["containers"][0]
    assert restricted(pod) == []
    assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("Never", False)
    assert spec["terminationGracePeriodSeconds"] == 40
    assert (main["image"], main["command"], main["args"]) == ("trainer:1", ["dlrover-run"], ["train.py", "--lr", "0.1"])
    env = {one["name"]: one.get("value", one.get("valueFrom")) for one in main["env"]}
    assert (env["DLROVER_NODE"], env["DLROVER_MASTERS"], env["DLROVER_NPROC"]) == ("worker-1-0", "10.0.0.1:29400", "4")
    assert (env["DLROVER_RUN"], env["DLROVER_JOB"], env["PET_X"]) == ("r1", "Big Job", "1")
    assert env["DLROVER_HOST"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert env["DLROVER_ADDRESS"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert env["DLROVER_TOKEN"]["secretKeyRef"]["name"] == OWNER["metadata"]["name"]
    assert "a-secret" not in json.dumps(pod)
    mount = next(one for one in main["volumeMounts"] if one["mountPath"] == "/dev/shm")
    assert {"name": mount["name"], "emptyDir": {"medium": "Memory"}} in spec["volumes"]
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    assert endings.true_name(pod) == NODE.name


def test_whatever_the_template_says() -> None:
    """What must hold overrides the template; all else of it is kept, and it is not changed itself."""
    template = {
        "metadata": {"labels": {"team": "nlp", names.LABEL_RUN: "forged"}, "annotations": {"a": "b"}},
        "spec": {
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": True,
            "priorityClassName": "high",
            "tolerations": [{"key": "gpu"}],
            "resourceClaims": [{"name": "nic"}],
            "containers": [
                {"name": "proxy", "image": "proxy:2"},
                {
                    "name": "node",
                    "image": "mine:3",
                    "env": [{"name": "A", "value": "1"}, {"name": "DLROVER_NODE", "value": "x"}],
                },
            ],
        },
    }
    before = json.dumps(template)
    pod = made(told=settings.Settings(), template=template)
    spec, (proxy, main) = pod["spec"], pod["spec"]["containers"]
    assert json.dumps(template) == before
    assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("Never", 40)
    assert spec["automountServiceAccountToken"] is False
    assert (spec["priorityClassName"], spec["tolerations"], spec["resourceClaims"][0]["name"]) == (
        "high",
        [{"key": "gpu"}],
        "nic",
    )
    assert proxy == {"name": "proxy", "image": "proxy:2"}
    assert main["image"] == "mine:3"
    assert [one for one in main["env"] if one["name"] == "DLROVER_NODE"] == [
        {"name": "DLROVER_NODE", "value": "worker-1-0"}
    ]
    assert pod["metadata"]["labels"]["team"] == "nlp"
    assert pod["metadata"]["labels"][names.LABEL_RUN] == "r1"
    assert pod["metadata"]["annotations"]["a"] == "b"


@pytest.mark.parametrize(("seconds", "said"), [(0, 1), (0.2, 1), (1, 1), (30, 30), (30.5, 31)])
def test_no_grace_is_zero(seconds: float, said: int) -> None:
    """A grace of 0 would force: the name free at once, and two incarnations living."""
    assert pods.grace(seconds) == said


def test_hosts_to_avoid_and_resources() -> None:
    """Avoided hosts are left out of every term of the template's affinity, and what the job asks for replaces the template's."""
    terms = [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {}]
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    template = {
        "spec": {
            "affinity": {"nodeAffinity": {key: {"nodeSelectorTerms": terms}}},
            "containers": [{"resources": {"limits": {"memory": "1Gi", "cpu": "1"}, "requests": {"x.y/nic": "1"}}}],
        }
    }
    node = NODE._replace(avoid=("h1", "h2"), memory_mib=2048, cpu_m=500, gpus=8)
    spec = made(node, template=template)["spec"]
    for term in spec["affinity"]["nodeAffinity"][key]["nodeSelectorTerms"]:
        assert [one["values"] for one in term["matchFields"]] == [["h1"], ["h2"]]
    assert spec["affinity"]["nodeAffinity"][key]["nodeSelectorTerms"][0]["matchExpressions"]
    assert spec["containers"][0]["resources"] == {
        "requests": {"x.y/nic": "1", "memory": "2048Mi", "cpu": "500m"},
        "limits": {"memory": "2048Mi", "cpu": "1", "nvidia.com/gpu": "8"},
    }


@pytest.mark.parametrize(
    ("requests", "limits", "asked", "found"),
    [
        # what the job asks for is the template's own: it stays, word by word
        (["1", "200Mi"], ["2", "400Mi"], (1000, 400), (["1", "200Mi"], ["2", "400Mi"])),
        ([], ["2", "0.5Gi"], (2000, 512), ([], ["2", "0.5Gi"])),
        (["1", "200Mi"], [], (1000, 200), (["1", "200Mi"], [])),
        # more memory after an end for want of it
        (["1", "200Mi"], ["2", "400Mi"], (1000, 800), (["1", "800Mi"], ["2", "800Mi"])),
        (["2", "1Gi"], ["2", "1Gi"], (2000, 2048), (["2", "2048Mi"], ["2", "2048Mi"])),
        # the job asks for more CPUs than the template's limit, and for fewer
        (["1", "1Gi"], ["2", "1Gi"], (4000, 1024), (["4000m", "1Gi"], ["4000m", "1Gi"])),
        (["1", "1Gi"], ["2", "1Gi"], (500, 1024), (["500m", "1Gi"], ["2", "1Gi"])),
        (["1", "1Gi"], ["two", "1Gi"], (500, 1024), (["500m", "1Gi"], ["two", "1Gi"])),
    ],
)
def test_limits_stay_as_they_are_written(
    requests: list[str], limits: list[str], asked: tuple[int, int], found: tuple[list[str], list[str]]
) -> None:
    """A pod keeps its quality-of-service class: nothing is raised that the job does not ask for, and no limit is lost."""
    kinds = ("cpu", "memory")
    given = {"requests": dict(zip(kinds, requests, strict=False)), "limits": dict(zip(kinds, limits, strict=False))}
    pod = made(
        NODE._replace(cpu_m=asked[0], memory_mib=asked[1]),
        template={"spec": {"containers": [{"resources": {key: one for key, one in given.items() if one}}]}},
    )
    resources = pod["spec"]["containers"][0]["resources"]
    assert tuple(list(resources.get(key, {}).values()) for key in ("requests", "limits")) == found


def test_no_image_is_refused_for_good() -> None:
    """A node without an image can never be, and what to type is said."""
    with pytest.raises(LaunchRefused, match="--image") as refused:
        made(told=settings.Settings())
    assert refused.value.permanent


@pytest.mark.parametrize("raw", [None, [], {"kind": "Pod"}, {"spec": {"containers": "x"}}])
def test_templates_that_are_none(raw: Any) -> None:
    """A file that holds no pod is refused by its name."""
    with pytest.raises(LaunchRefused, match=r"template='t\.yaml'"):
        pods.template_of(raw, "t.yaml")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("namespace=My_NS", "namespace='My_NS'"),
        ("pull=Sometimes", "pull='Sometimes': write Always"),
        ("image=a b", "image='a b'"),
        ("user=root", "user='root'"),
        ("grace_s=-1", "grace_s='-1'"),
        ("colour=red", "there is no 'colour'"),
    ],
)
def test_wrong_arguments(args: str, said: str) -> None:
    """A wrong argument is told with its value and what to write."""
    with pytest.raises(SpecError, match=re.escape(said)):
        settings.read(dataclasses.replace(HERE, args=args))


def test_arguments() -> None:
    """What is not given has its default."""
    told = settings.read(dataclasses.replace(HERE, args="image=reg:5000/a/b:1,namespace=ml,user=7"))
    assert told == settings.Settings(image="reg:5000/a/b:1", namespace="ml", user=7)


# ---- endings, as recorded (the name of a recorded pod says what befell it)

ENDED = {
    "ok-0": ("succeeded", 0, "exit code 0"),
    "err-0": ("failed", 1, "exit code 1; printed last"),
    "oom-0": ("failed", 137, "OOMKilled"),
    "kill-0": ("failed", 137, "exit code 137"),
    "segv-0": ("failed", 139, "exit code 139"),
    "evict-0": ("failed", 137, "Evicted"),
    "shut-0": ("failed", 143, "TerminationByKubelet"),
    "adm-0": ("failed", 1, "UnexpectedAdmissionError"),
    "oof-0": ("failed", 1, "OutOfcpu"),
    "dead-0": ("failed", 143, "DeadlineExceeded"),
}


def shown(name: str, phase: str, *, deleted: bool = False) -> list[dict[str, Any]]:
    """Recorded pods of that name in that phase, in order."""
    found = [one for one in recorded_pods() if one["metadata"]["name"] == name]
    return [
        one
        for one in found
        if one["status"].get("phase") == phase and deleted == bool(one["metadata"].get("deletionTimestamp"))
    ]


@pytest.mark.parametrize("name", ENDED)
def test_how_a_pod_ended(name: str) -> None:
    """The platform's own word comes before the exit status."""
    phase, code, word = ENDED[name]
    last = shown(name, "Succeeded" if phase == "succeeded" else "Failed")[-1]
    seen = endings.observation(last)
    assert (seen.phase, seen.exit_code, seen.reason.partition(":")[0]) == (phase, code, word), seen


@pytest.mark.parametrize(
    ("name", "known"),
    [("oom-0", "OOMKilled"), ("evict-0", "Evicted"), ("shut-0", "TerminationByKubelet")],
)
def test_diagnosis_knows_the_word(name: str, known: str) -> None:
    """What a pod is said to have ended of is what the table of signatures knows by that word."""
    seen = endings.observation(shown(name, "Failed")[-1])
    wanted = next(one.id for one in TABLE.by_id.values() if f"reason:{known}" in one.codes)
    assert of_platform(TABLE, seen.phase, seen.exit_code, seen.reason).signature == wanted


def test_a_wanted_end_is_no_failure() -> None:
    """A pod that was deleted ends with 143 and phase Failed: it is gone, and has not failed."""
    pod = shown("err-0", "Weird", deleted=True)[0]
    pod["status"] |= {"phase": "Failed"}
    assert endings.observation(pod).phase == "gone"


def test_preemption_is_a_notice_then_an_end() -> None:
    """A pre-empted pod is told in advance, with its grace once it is deleted; its end has the scheduler's word."""
    told, deleted = shown("low-0", "Running")[-1], shown("low-0", "Running", deleted=True)[-1]
    first, then = endings.observation(told), endings.observation(deleted)
    assert (first.phase, first.notice.partition(":")[0], first.notice_us) == ("running", "PreemptionByScheduler", 0)
    assert then.notice_us == deleted["metadata"]["deletionGracePeriodSeconds"] * 1_000_000
    ended = endings.observation(shown("low-0", "Failed", deleted=True)[-1])
    assert (ended.phase, ended.reason.partition(":")[0]) == ("failed", "PreemptionByScheduler")


def test_a_lost_host() -> None:
    """A silent host shows in Ready alone; its pods run on, are marked, and are failed by the collector at last."""
    running = shown("long-0", "Running")
    assert [endings.observation(one).phase for one in running] == ["running", "lost"]
    ended = endings.observation(shown("long-0", "Failed")[-1])
    assert (ended.phase, ended.exit_code, ended.reason.partition(":")[0]) == ("failed", 1, "DeletionByPodGC")
    marked = endings.observation(shown("short-0", "Running", deleted=True)[-1])
    assert (marked.phase, marked.notice.partition(":")[0]) == ("lost", "DeletionByTaintManager")


@pytest.mark.parametrize(
    ("late_s", "host", "phase"), [(61.0, "h1", "lost"), (59.0, "h1", "pending"), (61.0, "", "pending")]
)
def test_a_host_lost_before_the_node_began(late_s: float, host: str, phase: str) -> None:
    """A pod that waits for its image, and should have been gone a minute ago: only its host could end it."""
    pod = copy.deepcopy(shown("img-0", "Pending")[-1])
    pod["metadata"] |= {"deletionTimestamp": "2026-11-20T12:00:00Z", "deletionGracePeriodSeconds": 40}
    pod["spec"]["nodeName"] = host
    end_s = dt.datetime(2026, 11, 20, 12, tzinfo=dt.timezone.utc).timestamp()
    seen = endings.observation(pod, end_s + late_s)
    assert (seen.phase, seen.host) == (phase, host)
    assert endings.is_stranded(pod, "2026-11-20T12:01:01Z")
    pod["status"]["conditions"].append(
        {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    )
    if phase == "lost":
        assert endings.observation(pod, end_s + late_s).reason == "DeletionByTaintManager"


def test_a_probe_that_fails_is_no_lost_host() -> None:
    """A container that is not ready says so itself."""
    pod = shown("long-0", "Running")[-1]
    pod["status"]["containerStatuses"][0]["ready"] = False
    assert endings.observation(pod).phase == "running"


def test_what_a_pending_pod_waits_for() -> None:
    """No room, a gate and an image are waits in the platform's words; a container that is being made waits for nothing."""
    waits = {name: endings.observation(shown(name, "Pending")[-1]) for name in ("low-1", "sel-0", "img-0")}
    assert {one.phase for one in waits.values()} == {"pending"}
    assert waits["sel-0"].waits.startswith("Unschedulable: 0/")
    assert waits["img-0"].waits.startswith("ImagePullBackOff: Back-off")
    assert endings.observation(shown("gate-0", "Pending")[0]).waits.startswith("SchedulingGated")
    assert [endings.observation(one).waits for one in shown("ok-0", "Pending")] == ["", "", ""]


def test_avoided_hosts_are_told() -> None:
    """Where hosts that a pod avoids may be what it waits for it says so, in the port's word, whatever its template selects."""
    pod = shown("sel-0", "Pending")[-1]
    assert pod["spec"]["nodeSelector"]
    assert endings.observation(pod).waits.startswith("Unschedulable")
    pod["metadata"].setdefault("annotations", {})[names.NOTE_AVOID] = "h1"
    assert endings.observation(pod).waits.startswith(f"{AVOIDED}: h1")
    required = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "In", "values": ["h100"]}]}]}
    pod["spec"] |= {
        "nodeSelector": {},
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
    }
    assert endings.observation(pod).waits.startswith(f"{AVOIDED}: h1")
    pod["status"]["conditions"] = [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/2 nodes: 2 Insufficient cpu.",
        }
    ]
    assert endings.observation(pod).waits.startswith("Unschedulable")


@pytest.mark.parametrize(
    ("reason", "message", "phase"),
    [
        ("InvalidImageName", "couldn't parse image name", "failed"),
        ("CreateContainerConfigError", 'secret "token" not found', "failed"),
        ("ErrImagePull", "rpc error: code = NotFound desc = failed to resolve reference", "failed"),
        ("ErrImagePull", "dial tcp: i/o timeout", "pending"),
        ("ImagePullBackOff", "Back-off pulling image", "pending"),
        ("CreateContainerConfigError", "failed to sync secret cache: timed out waiting for the condition", "pending"),
        ("CreateContainerError", "context deadline exceeded", "pending"),
        ("CreateContainerError", 'failed to reserve container name "node_x": name is reserved for "a1"', "pending"),
        ("CreateContainerError", "rpc error: code = Unavailable desc = connection error", "pending"),
        ("CreateContainerError", "no command specified", "failed"),
    ],
)
def test_what_waiting_does_not_mend(reason: str, message: str, phase: str) -> None:
    """A name that is no image, or an image that is not there, fails at once; a registry that does not answer is waited for."""
    pod = shown("img-0", "Pending")[-1]
    pod["status"]["containerStatuses"][0]["state"]["waiting"] = {"reason": reason, "message": message}
    seen = endings.observation(pod)
    assert (seen.phase, (seen.reason or seen.waits).partition(":")[0]) == (phase, reason)


def test_what_is_to_pass_is_not_waited_for_for_ever() -> None:
    """A kubelet that is slow for ten minutes without an end has failed the node: by its host, not by its configuration."""
    clock = [0.0]
    patience = Patience(lambda: clock[0])
    pod = shown("img-0", "Pending")[-1]
    waiting = pod["status"]["containerStatuses"][0]["state"]["waiting"] = {"reason": "CreateContainerError"}

    def seen(message: str) -> Observation:
        waiting["message"] = message
        return patience.judged(pod, endings.observation(pod))

    assert seen("context deadline exceeded").phase == "pending"
    clock[0] = STUCK_S - 1
    assert seen("rpc error: code = Unavailable").phase == "pending"
    clock[0] = STUCK_S
    told = seen("context deadline exceeded")
    assert (told.phase, told.waits) == ("failed", "")
    assert re.match(r"KubeletStuck: for 10 min the kubelet of .* has not started it: context deadline", told.reason)
    assert of_platform(TABLE, told.phase, told.exit_code, told.reason).signature == "node.failed"
    waiting["reason"] = "ContainerCreating"  # it has passed, and a new one is waited for anew
    assert seen("").phase == "pending"
    waiting["reason"] = "CreateContainerError"
    assert seen("context deadline exceeded").phase == "pending"


def test_a_start_that_timed_out_says_nothing_of_the_configuration() -> None:
    """Not every container that did not start never will: where the runtime was too slow, the node is launched again."""
    pod = shown("err-0", "Failed")[-1]
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    ended |= {"exitCode": 128, "reason": "StartError", "message": "failed to create task: context deadline exceeded"}
    assert endings.observation(pod).reason == f"exit code 128{PRINTED}{ended['message']}"
    ended["message"] = "exec: no such file or directory"
    assert endings.observation(pod).reason == f"StartError: {ended['message']}"


def test_a_script_that_the_image_does_not_have() -> None:
    """The launcher's own words reach diagnosis from where they begin, however long they are."""
    pod = shown("err-0", "Failed")[-1]
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    words = f"dlrover-run: error: script: '{'x' * 400}.py' is not a file"
    ended |= {"exitCode": 2, "reason": "Error", "message": f"Warning: a\n{words}"}
    seen = endings.observation(pod)
    assert seen.reason == f"exit code 2{PRINTED}{words[: endings.TEXT_MAX]}"
    assert of_platform(TABLE, seen.phase, seen.exit_code, seen.reason).signature == "launcher.usage"


def test_a_failed_init_container_is_the_end() -> None:
    """Where the node's own container never ran, its end is that of the init container that failed."""
    pod = shown("err-0", "Failed")[-1]
    status = pod["status"]
    status["containerStatuses"][0]["state"] = {"waiting": {"reason": "PodInitializing"}}
    ended: dict[str, Any] = {"exitCode": 137, "reason": "OOMKilled", "message": "too much"}
    status["initContainerStatuses"] = [
        {"name": "fetch", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}},
        {"name": "unpack", "state": {"terminated": ended}},
    ]
    seen = endings.observation(pod)
    assert (seen.phase, seen.exit_code, seen.reason) == ("failed", 137, "OOMKilled: init container unpack: too much")
    ended |= {"exitCode": 3, "reason": "Error", "message": "no disk"}
    seen = endings.observation(pod)
    assert (seen.exit_code, seen.reason) == (3, f"exit code 3 of init container unpack{PRINTED}no disk")
    status["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 1, "reason": "Error"}}
    assert endings.observation(pod).reason == "exit code 1"


def test_a_sidecar_does_not_hide_an_end() -> None:
    """The node has ended when its container has, though another one keeps the pod's phase at Running."""
    pod = shown("err-0", "Weird")[0]
    pod["status"]["phase"] = "Running"
    assert endings.observation(pod)[:3] == ("err-0", "failed", 1)


def test_the_age_of_an_ending() -> None:
    """An ending that was found later has its age, and none is ever of the future."""
    pod = shown("kill-0", "Failed")[-1]
    end_s = endings._seconds(pod["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"])
    assert end_s is not None
    assert endings.observation(pod, end_s + 90).age_us == 90_000_000
    assert endings.observation(pod, end_s - 5).age_us == 0


# ---- refusals


def test_recorded_refusals_of_a_create() -> None:
    """A quota is a wait; what can never be says which field; a missing right says the verb, the resource and the command."""
    found = {}
    for line in recorded_refusals():
        if line["method"] == "POST" and line["status"] not in {409, 429, 504}:
            error = of_answer(Request("POST", line["path"]), line["status"], line["body"], line["headers"])
            refused = refusals.of_launch(error)
            assert refused is not None, line
            found[line["note"].partition(":")[0]] = refused
    assert [one.reason for one in found.values() if not one.permanent] == [found["over quota"].reason]
    assert found["over quota"].reason.startswith("QuotaExceeded: ")
    assert "spec.containers[0].resources.requests: Invalid value" in found["request above limit"].reason
    right = found["authenticated, not authorised"].reason
    assert "verb create, resource pods" in right
    assert "kubectl -n train create role dlrover-pods --verb=create,get,list,watch,delete" in right
    assert 'namespaces "nowhere" not found' in found["missing namespace"].reason


@pytest.mark.parametrize(
    ("method", "path", "command"),
    [
        (
            "GET",
            "/apis/kueue.x-k8s.io/v1beta2/resourceflavors/a",
            (
                "kubectl create clusterrole dlrover-resourceflavors --verb=get --resource=resourceflavors.kueue.x-k8s.io, and "
                "bind it with kubectl create clusterrolebinding"
            ),
        ),
        (
            "PATCH",
            "/apis/kueue.x-k8s.io/v1beta2/namespaces/ml/workloads/w/status?a=b",
            (
                "kubectl -n ml create role dlrover-workloads-status --verb=patch --resource=workloads.kueue.x-k8s.io/status, and "
                "bind it with kubectl create rolebinding"
            ),
        ),
        (
            "POST",
            "/apis/scheduling.volcano.sh/v1beta1/namespaces/ml/podgroups",
            (
                "kubectl -n ml create role dlrover-podgroups --verb=create,get,patch,delete "
                "--resource=podgroups.scheduling.volcano.sh,"
            ),
        ),
        ("GET", "/api/v1/nodes/h1", "kubectl create clusterrole dlrover-nodes --verb=get --resource=nodes,"),
        ("GET", "/api/v1/pods", "kubectl create clusterrole dlrover-pods --verb=create,get,list,watch,delete "),
        (
            "POST",
            "/api/v1/namespaces/ml/pods/p/proxy/x/y",
            "kubectl -n ml create role dlrover-pods-proxy --verb=create,get --resource=pods/proxy,",
        ),
    ],
)
def test_a_missing_right_is_granted_where_it_is_missing(method: str, path: str, command: str) -> None:
    """The command names API group and subresource, and makes a ClusterRole for what lies in no namespace."""
    assert f"grant it: {command}" in refusals.missing_right(of_answer(Request(method, path), 403, {}, {}))


@pytest.mark.parametrize("status", [409, 429, 500, 503, 504])
def test_what_is_no_refusal(status: int) -> None:
    """What may be asked again refuses nothing."""
    assert refusals.of_launch(of_answer(Request("POST", "/api/v1/namespaces/a/pods"), status, "", {})) is None

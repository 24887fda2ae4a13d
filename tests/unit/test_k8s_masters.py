"""Masters as pods: which objects a plan makes, who owns them, what they may do, and what the Job does at each exit status."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dlrover_backends.k8s import masters
from dlrover_core.errors import SpecError

PLAN = masters.MasterPlan(
    "ml", "digits", "trainer:1", ("--nnodes", "2", "train.py"), "a-secret", claim="logs", uid="u-1"
)
OWNER = masters.Owner("elastic.iml.github.io/v1alpha1", "ElasticJob", "elasticjobs", "digits", "u-9")
ETCD = dataclasses.replace(PLAN, claim="", etcd="etcd://me:pw@e1:2379/logs?cacert=/ca.pem")


def made(plan: masters.MasterPlan = PLAN) -> dict[str, Any]:
    """Objects by kind; of several the last."""
    return {one["kind"]: one for one in masters.objects(plan)}


def pod_of(plan: masters.MasterPlan = PLAN) -> dict[str, Any]:
    """The spec of a masters' pod."""
    found: dict[str, Any] = made(plan)["Job"]["spec"]["template"]["spec"]
    return found


def env_of(plan: masters.MasterPlan = PLAN) -> dict[str, Any]:
    """Variables of the masters' container."""
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in pod_of(plan)["containers"][0]["env"]}


def test_the_secret_owns_all_but_the_job() -> None:
    """Without an owner all hangs on the Secret, by no controller's reference: the Job must not take nodes for its own pods."""
    found = masters.objects(PLAN)
    assert found[0]["kind"] == "Secret"
    assert found[-1]["kind"] == "Job"
    for one in found[1:-1]:
        (reference,) = one["metadata"]["ownerReferences"]
        assert (reference["kind"], reference["uid"], reference["controller"]) == ("Secret", "u-1", False)
    assert "ownerReferences" not in found[0]["metadata"]
    assert "ownerReferences" not in found[-1]["metadata"]
    assert env_of()[masters.RUN] == "u-1"
    assert "owner=v1/secrets/digits-masters" in env_of()[masters.BACKEND]


def test_an_owner_owns_all_and_names_the_run() -> None:
    """With an owner everything is its own, nodes' pods too, and its uid is the run's name."""
    plan = dataclasses.replace(PLAN, owner=OWNER)
    assert {one["metadata"]["ownerReferences"][0]["uid"] for one in masters.objects(plan)} == {"u-9"}
    assert env_of(plan)[masters.RUN] == "u-9"
    assert f"owner={OWNER.api_version}/elasticjobs/digits" in env_of(plan)[masters.BACKEND]
    rule = next(one for one in masters.rules(plan) if one["resources"] == ["elasticjobs"])
    assert rule == {
        "apiGroups": ["elastic.iml.github.io"],
        "resources": ["elasticjobs"],
        "verbs": ["get"],
        "resourceNames": ["digits"],
    }


@pytest.mark.parametrize(
    ("code", "action"), [(1, "FailJob"), (2, "FailJob"), (78, "FailJob"), (93, "FailJob"), (75, "Ignore"), (137, None)]
)
def test_what_an_exit_status_does(code: int, action: str | None) -> None:
    """Who would only fail again fails the Job; who handed over is followed without counting; the rest counts."""
    rules = made()["Job"]["spec"]["podFailurePolicy"]["rules"]
    found = [one["action"] for one in rules if code in one.get("onExitCodes", {}).get("values", ())]
    assert found == ([action] if action else [])
    assert any(one.get("onPodConditions", [{}])[0].get("type") == "DisruptionTarget" for one in rules)


@pytest.mark.parametrize("plan", [PLAN, ETCD, dataclasses.replace(PLAN, pod={"securityContext": {"runAsUser": 7}})])
def test_masters_are_restricted(plan: masters.MasterPlan) -> None:
    """The masters' pods pass the Pod Security Standard *restricted*."""
    spec = pod_of(plan)
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert all(set(one) & {"emptyDir", "persistentVolumeClaim"} for one in spec["volumes"])
    assert spec["restartPolicy"] == "Never"


def test_a_log_in_etcd_has_two_masters() -> None:
    """They are never on one host, either one's end is the Job's, and the log's URL, with its password, is in the Secret alone."""
    job = made(ETCD)["Job"]
    assert (job["spec"]["completions"], job["spec"]["completionMode"]) == (2, "Indexed")
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    (term,) = pod_of(ETCD)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert made(ETCD)["Secret"]["stringData"]["log"] == "etcd://me:pw@e1:2379/logs/ml?cacert=/ca.pem"
    assert "pw" not in json.dumps(job)
    assert masters.by_namespace("etcd://e1", "ml") == "etcd://e1/dlrover/ml"


def test_a_log_on_a_claim_has_one_master() -> None:
    """It mounts the claim, in a folder of the job's own."""
    assert made()["Job"]["spec"]["completions"] == 1
    assert "affinity" not in pod_of()
    assert pod_of()["volumes"] == [{"name": "state", "persistentVolumeClaim": {"claimName": "logs"}}]
    assert pod_of()["containers"][0]["volumeMounts"][0]["subPath"] == "digits-masters"


def test_masters_have_no_right_too_many() -> None:
    """They make pods, keep failed ones, read what they print, and see what owns these; no secrets, and nothing of others."""
    granted = {
        (one["resources"][0], verb): one.get("resourceNames") for one in masters.rules(PLAN) for verb in one["verbs"]
    }
    assert {verb for kind, verb in granted if kind == "pods"} == {"create", "delete", "get", "list", "patch", "watch"}
    assert {key: value for key, value in granted.items() if key[0] == "secrets"} == {
        ("secrets", "get"): ["digits-masters"]
    }
    assert made()["ServiceAccount"]["automountServiceAccountToken"] is False
    with_template = dataclasses.replace(PLAN, templates={"": {"spec": {}}, "ps": {"spec": {"x": 1}}})
    assert set(made(with_template)["ConfigMap"]["data"]) == {"default", "ps"}
    assert "template=configmap:digits-masters" in env_of(with_template)[masters.BACKEND]


def test_what_guards_a_job() -> None:
    """Nodes are reached from their own job alone; a budget is made where it is asked for, as a number that bare pods may have."""
    nodes = next(one for one in masters.objects(PLAN) if one["metadata"]["name"] == "digits-nodes")
    assert nodes["spec"]["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": nodes["spec"]["podSelector"]["matchLabels"]}}]}
    ]
    assert "PodDisruptionBudget" not in made()
    assert made(dataclasses.replace(PLAN, nodes_kept=3))["PodDisruptionBudget"]["spec"]["minAvailable"] == 3
    assert "NetworkPolicy" not in made(dataclasses.replace(PLAN, guard=False))
    assert "Secret" not in made(dataclasses.replace(PLAN, token=""))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"claim": ""}, "say --backend k8s:claim=NAME"),
        ({"etcd": "etcd://e"}, "either in etcd or on a claim"),
        ({"claim": "", "etcd": "sqlite:///x"}, "sqlite: is no log that masters in pods share"),
        ({"image": ""}, "say --image IMG"),
        ({"name": "Big Job"}, "'Big Job' names no object"),
        ({"name": "x" * 41}, "40 at most"),
        ({"backend": {"account": "a,b"}}, "account='a,b' has a comma"),
    ],
)
def test_plans_that_make_no_masters(change: dict[str, Any], said: str) -> None:
    """What cannot be is told with its value and what to write."""
    with pytest.raises(SpecError, match=said):
        masters.objects(dataclasses.replace(PLAN, **change))


@pytest.mark.parametrize("name", ["digits", "Big Job", "x" * 100, "訓練", "9", ""])
def test_any_job_has_a_name(name: str) -> None:
    """Every job's name makes one that a plan takes, and two names make two."""
    found = masters.name_of(name)
    masters.check(dataclasses.replace(PLAN, name=found))
    assert found != masters.name_of(f"{name}Y")

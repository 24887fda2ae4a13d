"""What a platform team applies: files as they are generated, a definition that takes what users write, rights that suffice."""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_k8s_pods import restricted
from tools import deploy as writing

from dlrover_backends.fake_k8s import schemas
from dlrover_backends.k8s import masters
from dlrover_backends.k8s.elasticjob import crd, deploy, translate
from dlrover_backends.k8s.settings import GANGS

Json = dict[str, Any]

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
REMOVED = {
    kind
    for words in re.findall(
        r"delete (\S+) -l app.kubernetes.io/name=dlrover-operator", PAGE.read_text(encoding="utf-8")
    )
    for kind in words.split(",")
}

JOBS: list[Json] = list(yaml.safe_load_all((Path(__file__).parent / "elasticjobs.yaml").read_text(encoding="utf-8")))


def test_deploy_is_what_is_generated() -> None:
    """Each file under deploy/ is as its function says (else: python -m tools.deploy), and there is no other."""
    texts = writing.texts()
    assert {path: path.read_text(encoding="utf-8") for path in texts} == texts
    there = {one for one in writing.FOLDER.rglob("*") if one.is_file()}
    assert there - set(texts) == {writing.FOLDER / "Dockerfile"}


@pytest.mark.parametrize("group", [translate.GROUP, translate.OLD_GROUP])
def test_the_definition_is_one(group: str) -> None:
    """The schema is structural, and the paths of the subresources and the columns lie in it."""
    made = crd.definition(group)
    (version,) = made["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    assert schemas.definition_causes(schema) == []
    scale = version["subresources"]["scale"]
    columns = [one["jsonPath"] for one in version["additionalPrinterColumns"]]
    for path in (scale["statusReplicasPath"], scale["labelSelectorPath"], *columns[:-1]):
        place = schema
        for step in path.strip(".").split("."):
            place = place["properties"][step]
    assert ("deprecationWarning" in version) == (group == translate.OLD_GROUP)


@pytest.mark.parametrize("job", JOBS, ids=lambda one: str(one["metadata"]["name"]))
def test_the_schema_takes_what_users_write(job: Json) -> None:
    """Nothing of it is wrong, and nothing is dropped."""
    schema = crd.schema()
    assert schemas.causes(schema, job) == []
    kept, dropped = schemas.pruned(schema, job)
    assert dropped == []
    assert kept == job


def test_the_schema_takes_all_that_dlrover_has() -> None:
    """Each field of its definition stays, of the spec and of its operator's status; what does nothing is told."""
    job = copy.deepcopy(JOBS[0])
    job["spec"] |= {"dynamicSharding": True, "elasticScheduling": {"enabled": True}, "enableDynamicSharding": True}
    theirs = {"conditions": [{"type": "Created", "status": "True", "lastUpdateTime": "x"}], "replicaStatuses": {}}
    job["status"] = {"phase": "Created", "scalePlan": "p", "status": theirs}
    assert schemas.causes(crd.schema(), job) == []
    assert schemas.pruned(crd.schema(), job) == (job, [])
    told = "\n".join(translate.read(job).notes)
    assert all(f"spec.{one} does nothing here: " in told for one in ("dynamicSharding", "elasticScheduling"))


@pytest.mark.parametrize(
    ("overlay", "rest"), [("beside-dlrover", "../../base"), ("beside-dlrover-cluster-wide", "../cluster-wide")]
)
def test_dlrovers_own_definition_can_stay(overlay: str, rest: str) -> None:
    """The overlays for clusters with DLRover's operator leave out the definition of that name alone, and take annotated jobs."""
    (made,) = deploy.files()[f"overlays/{overlay}/kustomization.yaml"]
    assert made["resources"] == [rest]
    argument, left_out = (one["patch"] for one in made["patches"])
    assert "--annotated-only" in argument
    definition = crd.definition()
    metadata = {"name": definition["metadata"]["name"]}
    assert yaml.safe_load(left_out) == {
        "$patch": "delete", "apiVersion": definition["apiVersion"], "kind": definition["kind"], "metadata": metadata
    }  # fmt: skip


def test_what_removes_the_operator_alone_finds_all_of_it() -> None:
    """The label that the page names is on each object of ours but the namespace and the definitions."""
    for name, objects in deploy.files().items():
        for one in objects:
            if one["kind"] not in {"Kustomization", "Namespace", "CustomResourceDefinition"}:
                assert one["metadata"]["labels"]["app.kubernetes.io/name"] == deploy.NAME, (name, one["kind"])
                assert one["kind"].lower() in REMOVED, (name, one["kind"])


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("spec.replicaSpecs", None, "spec.replicaSpecs"),
        ("spec.replicaSpecs.worker.replicas", -1, "greater than or equal to 0"),
        ("spec.replicaSpecs.worker.replicas", "4", "must be of type integer"),
        ("spec.suspend", "yes", "must be of type boolean"),
        ("spec.replicaSpecs.worker.template", "pod", "must be of type object"),
        ("spec.replicaSpecs.worker.restartCount", -1, "greater than or equal to 0"),
    ],
)
def test_the_schema_refuses_what_is_no_value(path: str, value: object, said: str) -> None:
    """The API server itself tells wrong types and numbers, with the field."""
    wrong = copy.deepcopy(JOBS[0])
    *way, last = path.split(".")
    place = wrong
    for step in way:
        place = place[step]
    place[last] = value
    causes = schemas.causes(crd.schema(), wrong)
    assert any(said in one["message"] or said == one["field"] for one in causes), causes


def test_the_operator_is_restricted() -> None:
    """Its pods pass the Pod Security Standard *restricted*."""
    template = deploy.deployment()["spec"]["template"]
    assert restricted(template) == []


def granted(group: str, resource: str) -> set[str]:
    """The verbs that the operator's role has on a resource."""
    return {
        verb
        for one in deploy.rules()
        if group in one["apiGroups"] and resource in one["resources"]
        for verb in one["verbs"]
    }


def test_the_operator_may_give_what_masters_need() -> None:
    """A role can be given by those alone who have what it grants; and each object of a job can be made and deleted."""
    owner = masters.Owner(f"{translate.GROUP}/{translate.VERSION}", translate.KIND, translate.PLURAL, "a", "u")
    plan = masters.MasterPlan("ml", "a", "i", (), token="t", owner=owner, claim="c", templates={}, nodes_kept=1)
    gangs = [rule for gang in GANGS for rule in masters.rules(dataclasses.replace(plan, backend={"gang": gang}))]
    for rule in (*masters.rules(plan), *gangs):
        assert set(rule["verbs"]) <= granted(rule["apiGroups"][0], rule["resources"][0]), rule
    for made in masters.objects(plan):
        group, _, _ = made["apiVersion"].rpartition("/")
        kind = made["kind"].lower()
        plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
        assert {"create", "delete", "get"} <= granted(group, plural), made["kind"]


def test_rights_name_verbs_and_nothing_beyond_the_namespace() -> None:
    """No rule has a wildcard, and the base has no right beyond its namespace."""
    for one in deploy.rules():
        assert "*" not in {*one["apiGroups"], *one["resources"], *one["verbs"]}
    kinds = [one["kind"] for name, objects in deploy.files().items() if name.startswith("base/") for one in objects]
    assert not [one for one in kinds if one.startswith("Cluster")]


def test_who_reads_hosts_reads_them_alone() -> None:
    """The overlay lets the masters of the operator's namespace get hosts, and nothing more."""
    role, binding = deploy.files()["overlays/node-reader/rights.yaml"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [one["name"] for one in binding["subjects"]] == [f"system:serviceaccounts:{deploy.NAMESPACE}"]

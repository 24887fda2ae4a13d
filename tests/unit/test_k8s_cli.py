"""``--image``, `dlrover k8s render`, and what the launcher does when a job in Kubernetes is over."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import re
from collections import deque
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s_inside import Inside
from k8s_scripted import Server, failed

from dlrover_adapters.cli import apart, backend_flags, backends, kubernetes
from dlrover_adapters.cli import main as dlrover
from dlrover_adapters.cli import options as cli_options
from dlrover_backends.k8s import names, pods, settings
from dlrover_backends.k8s.client import KubernetesBackend
from dlrover_backends.k8s.paths import collection
from dlrover_core import BackendContext
from dlrover_core.errors import SpecError
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing.backend_stand import make_launch


def named(*line: str) -> str | None:
    """The backend that a command line names."""
    return backend_flags.named(cli_options.parse([*line, "train.py"]))


def test_an_image_is_an_argument_of_the_backend() -> None:
    """``--image`` says what ``k8s:image=`` says, beside other arguments."""
    assert named("--backend", "k8s", "--image", "r:5000/a:1") == "k8s:image=r:5000/a:1"
    assert named("--backend", "k8s:namespace=ml", "--image", "a") == "k8s:namespace=ml,image=a"
    assert named("--backend", "k8s:namespace=ml") == "k8s:namespace=ml"
    assert named() is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--image", "a:1"), "'a:1' is for --backend k8s, and the backend is local"),
        (("--backend", "slurm", "--image", "a:1"), "the backend is slurm"),
        (("--backend", "k8s", "--image", "a,b"), "'a,b' is no image: write NAME:TAG"),
        (("--backend", "k8s", "--image", " "), "' ' is no image"),
    ],
)
def test_images_that_are_none(line: tuple[str, ...], said: str) -> None:
    """An image without Kubernetes, and what is no image, are told with the value."""
    with pytest.raises(SpecError, match=said):
        named(*line)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--backend", "a.b:C", "--standby", "1"), r"1, but the nodes of --backend a.b:C have none: .*; leave it out"),
        (
            ("--backend", "k8s", "--queue", "q", "--standby", "2"),
            r"2, with queue q: a standby would be taken from the quota",
        ),
        (("--backend", "k8s", "--gang", "native", "--standby", "1"), r"1, with gang native: .* no part of its gang"),
        (("--backend", "k8s", "--standby", "-1"), "cannot be negative, got -1"),
    ],
)
def test_standbys_that_cannot_be(line: tuple[str, ...], said: str) -> None:
    """Standbys of a backend that has none, and beside a queue or a gang, are told with their number."""
    options = cli_options.parse([*line, "train.py"])

    def looked_at() -> None:
        cli_options.check(options)
        backends.chosen(options)

    with pytest.raises(SpecError, match=said) as wrong:
        looked_at()
    assert wrong.value.field == "standby"


def test_rendering_shows_standbys() -> None:
    """A standby's pod is printed behind the nodes': without a node's name, with its group and its seat."""
    made = rendered("--image", "t:1", "--nnodes", "2", "--standby", "1", "train.py")
    *nodes, one = [each for each in made if each["kind"] == "Pod"]
    assert len(nodes) == 2
    assert one["metadata"]["labels"][names.LABEL_STANDBY] == "worker"
    assert {names.NOTE_NAME, names.NOTE_NODE}.isdisjoint(one["metadata"]["annotations"])
    env = {each["name"]: each for each in one["spec"]["containers"][0]["env"]}
    assert "DLROVER_NODE" not in env
    assert env["DLROVER_STANDBY"]["value"] == "worker"
    assert env["DLROVER_SEAT"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.uid"
    assert (
        env["DLROVER_TOKEN"]
        == {each["name"]: each for each in nodes[0]["spec"]["containers"][0]["env"]}["DLROVER_TOKEN"]
    )


def rendered(*line: str) -> list[dict[str, Any]]:
    """What `dlrover k8s render` prints."""
    with redirect_stdout(io.StringIO()) as out:
        assert dlrover.main(["k8s", "render", *line]) == 0
    return list(yaml.safe_load_all(out.getvalue()))


def test_rendering_shows_what_would_be_made() -> None:
    """Every object, in the order of making, equal to what the backend makes of the same context."""
    line = ("--job-id", "pre", "--image", "a:1", "--nnodes", "2:3", "--nproc-per-node", "4", "train.py", "--lr", "1")
    secret, policy, budget, *made = rendered(*line)
    assert (secret["kind"], [one["kind"] for one in made]) == ("Secret", ["Pod"] * 3)
    assert (policy["kind"], budget["kind"], budget["spec"]["minAvailable"]) == (
        "NetworkPolicy",
        "PodDisruptionBudget",
        2,
    )
    here = BackendContext(
        "pre",
        kubernetes.RUN,
        (kubernetes.PLACE,),
        kubernetes.TOKEN,
        arguments=line,
        args="image=a:1",
        env=backends.passed({}),
    )
    spec = JobSpec(job="pre", groups=(GroupSpec(nodes_min=2, nodes_max=3, nproc=4),))
    owner = {**secret, "metadata": {**secret["metadata"], "uid": made[0]["metadata"]["ownerReferences"][0]["uid"]}}
    told = settings.read(here)
    assert made == [pods.manifest(here, told, node, owner) for node in kubernetes.launches(spec)]


def test_rendering_in_a_namespace_with_masters() -> None:
    """What is told of the cluster and the masters is in the objects."""
    secret, policy, budget, pod = rendered(
        "--backend", "k8s:image=a:1,namespace=ml", "--masters", "m1:29400", "--nnodes", "1", "train.py"
    )
    assert {one["metadata"]["namespace"] for one in (secret, policy, budget, pod)} == {"ml"}
    env = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
    assert env["DLROVER_MASTERS"] == "m1:29400"


def test_rendering_an_elasticjob(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the operator makes of it, in its order, then the pods of nodes and standbys, as its masters would make them."""
    job = next(yaml.safe_load_all((Path(__file__).parent / "elasticjobs.yaml").read_text(encoding="utf-8")))
    worker = job["spec"]["replicaSpecs"]["worker"]
    worker |= {"standby": 1, "replicas": 3}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump_all([{"kind": "ConfigMap"}, job]), encoding="utf-8")
    made = rendered("--image", "reg/core:1", str(tmp_path / "job.yaml"))
    kinds = [one["kind"] for one in made]
    assert kinds[:3] == ["ConfigMap", "PersistentVolumeClaim", "Secret"]
    assert kinds[-5:] == ["Job", *["Pod"] * 4]
    masters_job, *nodes, standby = made[-5:]
    assert masters_job["spec"]["template"]["spec"]["containers"][0]["image"] == "reg/core:1"
    assert [one["metadata"]["labels"]["dlrover-core/index"] for one in nodes] == ["0", "1", "2"]
    assert standby["metadata"]["labels"][names.LABEL_STANDBY] == "worker"
    image = worker["template"]["spec"]["containers"][0]["image"]
    for one in made:
        assert one["metadata"]["namespace"] == "dlrover"
        assert one["metadata"]["ownerReferences"][0]["kind"] == "ElasticJob"
        assert one["kind"] != "Pod" or one["spec"]["containers"][0]["image"] == image
    env = {one["name"]: one for one in nodes[0]["spec"]["containers"][0]["env"]}
    assert env["DLROVER_MASTERS"]["value"] == f"{job['metadata']['name']}-masters.dlrover.svc:29400"
    assert env["DLROVER_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == f"{job['metadata']['name']}-masters"
    assert "dlrover k8s render: spec." in capsys.readouterr().err, "what does nothing is told"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "is no YAML"),
        ("kind: Pod", "holds no ElasticJob"),
        ("kind: ElasticJob", r"metadata\.name: missing"),
        ("{kind: ElasticJob, metadata: {name: a}, spec: {}}", r"spec\.replicaSpecs: missing"),
    ],
)
def test_an_elasticjob_that_cannot_be_rendered(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The field is named, as the operator would."""
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    assert dlrover.main(["k8s", "render", str(tmp_path / "job.yaml")]) == 2
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ((), "name the script"),
        (("job.yaml",), r"job\.yaml' cannot be read"),
        (("train.py",), "no image: say --image IMG"),
        (("--backend", "local", "train.py"), "'local' makes nothing in a cluster"),
        (("--backend", "k8s:template=none.yaml,image=a", "train.py"), r"none\.yaml' cannot be read"),
        (("--backend", "k8s:colour=red", "train.py"), "there is no 'colour'"),
    ],
)
def test_what_cannot_be_rendered(line: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong line is wrong usage, with what to write."""
    assert dlrover.main(["k8s", "render", *line]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dlrover k8s: ")
    assert re.search(said, error), error


class Launcher:
    """What `apart` needs of settings."""

    class job:  # noqa: N801  # as the settings have it
        """The job."""

        job = "conformance"


def test_the_launcher_clears_and_says_what_it_could_not(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """When the job is over the run's objects are removed; where that fails the job's status stands, and it is said."""
    server = Server()
    here = BackendContext(
        "conformance", "r1", ("m:1",), "t", arguments=("x.py",), args="image=i:1,namespace=ml", directory=str(tmp_path)
    )
    backend = KubernetesBackend(here, server)
    monkeypatch.setattr(backends, "made", lambda *_: backend)

    async def story() -> None:
        await backend.launch(make_launch(), 1)
        await apart.cleared(Launcher, "t")  # type: ignore[arg-type]
        assert server.objects == {}
        server.objects[f"/api/v1/namespaces/ml/secrets/{names.owner_name('conformance', 'r1')}"] = {"metadata": {}}
        await apart.cleared(Launcher, "t")  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(story(), 20))
    assert (
        "job conformance: what its backend has made may be left behind: LaunchRefused: secret"
        in capsys.readouterr().err
    )


def test_the_launcher_asks_the_cluster_first(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    """Without credentials or a right the command ends before anything starts; a server that is away is told and waited for."""
    server = Server()
    context = BackendContext(
        "conformance", "r1", ("m:1",), "t", arguments=("x.py",), args="image=i:1,namespace=ml", directory=str(tmp_path)
    )

    def asked(backend: KubernetesBackend) -> None:
        monkeypatch.setattr(backends, "made", lambda *_: backend)
        asyncio.run(asyncio.wait_for(apart._check(Launcher, "t"), 20))  # type: ignore[arg-type]

    asked(KubernetesBackend(context, server))
    assert capsys.readouterr().err == ""
    server.faults["GET"] = deque([failed(0, "away"), failed(403, 'User "u" cannot list resource "pods"')])
    asked(KubernetesBackend(context, server))
    assert "its backend cannot be used now, and is waited for: " in capsys.readouterr().err
    with pytest.raises(SpecError, match="kubectl -n ml create role dlrover-pods"):
        asked(KubernetesBackend(context, server))
    nowhere = dataclasses.replace(context, args=f"image=i:1,kubeconfig={tmp_path}/none")
    with pytest.raises(SpecError, match="none' is not there"):
        asked(KubernetesBackend(nowhere))
    assert [path for _, path, _ in server.asked] == ["/api/v1/namespaces/ml/pods?limit=1"] * 3


def test_the_example_of_an_indexed_job_is_valid() -> None:
    """The API server takes it as it stands, beside its Service."""
    path = Path(__file__).parents[2] / "examples/kubernetes/indexed-job.yaml"

    async def story() -> None:
        server = Inside()
        for one in yaml.safe_load_all(path.read_text()):
            one["metadata"]["namespace"] = "ml"
            made = await server.ask("POST", collection(one), body=one)
            assert made["metadata"]["uid"]

    asyncio.run(asyncio.wait_for(story(), 20))

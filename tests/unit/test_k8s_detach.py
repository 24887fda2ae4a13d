"""``--detach`` with Kubernetes: what is made or refused, what a masters' pod makes of its environment, and how a job is named."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
from collections import deque
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s_inside import Inside
from k8s_scripted import Server, failed

from dlrover_adapters.cli import backends, groups, in_pod, k8s_detach, k8s_log, k8s_reach, kubectl
from dlrover_adapters.cli import main as dlrover
from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.cli import run as launcher
from dlrover_adapters.http.client import Unanswered
from dlrover_backends.k8s import jobs, masters, names
from dlrover_backends.k8s.client import KubernetesBackend
from dlrover_core import BackendContext, LaunchRefused
from dlrover_core.errors import ConnectionLost, Refused, SpecError, TokenRefused
from dlrover_core.runtime.backend import GroupSize, Wanted
from dlrover_core.testing.backend_stand import make_launch

PLAN = masters.MasterPlan("ml", "digits", "trainer:1", ("train.py",), "a-secret", claim="logs")
JOB = "/apis/batch/v1/namespaces/ml/jobs/digits-masters"
SECRET = "/api/v1/namespaces/ml/secrets/digits-masters"


# ---- finding


def test_what_a_job_that_does_not_run_says() -> None:
    """Its end is the Job's condition; a master that does not start says why in the platform's words."""
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}}, "name": "masters"}
    pod = {"metadata": {"name": "m-1"}, "status": {"phase": "Pending", "containerStatuses": [waiting]}}
    job = {
        "metadata": {"name": "j"},
        "status": {"conditions": [{"type": "Failed", "status": "True", "message": "because"}]},
    }
    found = jobs.Found("ml", "digits", job, (pod,))
    assert (found.over, found.why, found.running) == ("Failed", "because", ())
    assert found.waits == "pod m-1: ImagePullBackOff: Back-off"


def test_the_token_is_in_the_secret() -> None:
    """It is read with the kubeconfig; a Secret without one is told."""
    server = Server()
    found = jobs.Found("ml", "digits", {"metadata": {"name": "digits-masters"}}, ())
    server.objects[SECRET] = {"metadata": {}, "data": {"token": base64.b64encode(b"a-secret").decode()}}
    assert asyncio.run(jobs.token(server, found)) == "a-secret"
    server.objects[SECRET] = {"metadata": {}}
    with pytest.raises(SpecError, match="secret digits-masters in namespace ml holds no token"):
        asyncio.run(jobs.token(server, found))
    server.faults["GET"] = deque([failed(403, "no right")])
    with pytest.raises(SpecError, match="verb list, resource pods"):
        asyncio.run(jobs.token(server, found))


# ---- stopping


class Reached:
    """What a command reaches a cluster with: it runs coroutines here."""

    def __init__(self, server: Server) -> None:
        self.api = server

    def call(self, work: Any, _timeout_s: float | None = None) -> Any:
        """Run it."""
        return asyncio.run(asyncio.wait_for(work, 20))


class Stopping:
    """A job in a cluster, and `dlrover stop` of it. ``answers``: what the masters do when they are asked, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.server, self.answers, self.asked = Server(), deque(answers), 0
        for path, kind in ((JOB, "Job"), (SECRET, "Secret")):
            meta = {"name": "digits-masters", "uid": f"uid-{kind}", "annotations": {names.NOTE_JOB: "digits"}}
            self.server.objects[path] = {"kind": kind, "metadata": meta}
        self.server.objects[SECRET]["metadata"]["ownerReferences"] = [{"kind": "Job", "uid": "uid-Job"}]
        monkeypatch.setattr(k8s_reach, "_through", self._through)
        monkeypatch.setattr(jobs, "LOOK_S", 0.0)

    def _through(self, *_: Any) -> int:
        self.asked += 1
        answer = self.answers.popleft()
        if isinstance(answer, BaseException):
            raise answer
        self.ends(answer)
        return 0

    def ends(self, condition: str) -> None:
        """The Job is over, unless the condition is empty."""
        self.server.objects[JOB]["status"] = {
            "conditions": [{"type": condition, "status": "True"}] if condition else []
        }

    def stop(self, *words: str) -> int:
        """`dlrover stop`; its exit status."""
        args = dlrover.build_parser().parse_args(["stop", "k8s:ml/digits", *words])
        reach = Reached(self.server)
        found = reach.call(jobs.find(self.server, "ml", "digits"))
        return k8s_reach._stop(args, reach, found)  # type: ignore[arg-type]


AWAY = ConnectionLost("no master of job 'digits' runs")


def test_stopping_asks_until_a_master_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between two masters it waits for the next one; the job is removed when its masters have ended, and not before."""
    job = Stopping(monkeypatch, AWAY, failed(503, "busy"), Unanswered("cut"), Refused("it has stopped"), "")
    there = list[bool]()
    real = jobs.await_over

    async def await_over(api: Any, found: Any, timeout_s: float) -> Any:
        there.append(JOB in job.server.objects)
        job.ends("Failed")
        return await real(api, found, timeout_s)

    monkeypatch.setattr(jobs, "await_over", await_over)
    assert job.stop() == 0
    assert (job.asked, there, job.server.objects) == (4, [True], {})
    assert "job digits: stopped, and all that was made for it is removed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "error",
    [SpecError("kubeconfig", "verb create, resource pods/proxy"), TokenRefused("the token is another one")],
)
def test_a_refusal_removes_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing right, or a token that is not the job's, ends the command; the job goes on."""
    job = Stopping(monkeypatch, error)
    with pytest.raises(type(error)):
        job.stop()
    assert set(job.server.objects) == {JOB, SECRET}


def test_masters_that_never_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """After the time-out nothing is removed, and the message says what removes it; that flag does."""
    job = Stopping(monkeypatch, *[AWAY] * 2)
    with pytest.raises(ConnectionLost, match=r"cannot be asked, and nothing was removed: no master .*--force removes"):
        job.stop("--timeout", "0")
    assert set(job.server.objects) == {JOB, SECRET}
    assert job.stop("--force") == 0
    assert not job.server.objects
    assert "job digits: removed without asking its masters" in capsys.readouterr().out
    assert dlrover.main(["stop", "digits", "--force"]) == 2
    assert "force: it is for jobs in Kubernetes" in capsys.readouterr().err


def test_an_elastic_job_is_not_removed_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """What owns the masters removes them."""
    job = Stopping(monkeypatch, AWAY)
    job.server.objects[JOB]["metadata"]["ownerReferences"] = [{"kind": "ElasticJob", "name": "digits", "uid": "u"}]
    with pytest.raises(ConnectionLost, match="nothing was removed"):
        job.stop("--force", "--timeout", "0")
    assert set(job.server.objects) == {JOB, SECRET}


@pytest.mark.parametrize(
    ("condition", "said"), [("Complete", "had ended well before"), ("Failed", "had failed before")]
)
@pytest.mark.parametrize("asked", [False, True])
def test_a_job_that_had_ended_was_not_stopped(
    condition: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, asked: bool
) -> None:
    """It is removed and told for what it is, also where its end was learnt by asking."""
    job = Stopping(monkeypatch, *([AWAY] if asked else []))
    if asked:
        real = jobs.find

        async def find(*words: Any) -> Any:
            if job.asked:
                job.ends(condition)
            return await real(*words)

        monkeypatch.setattr(jobs, "find", find)
    else:
        job.ends(condition)
    assert job.stop() == 0
    assert (job.asked, job.server.objects) == (int(asked), {})
    assert f"job digits: {said}, and all that was made" in capsys.readouterr().out


def test_masters_that_do_not_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They have been asked, and it takes them too long: status 7, and nothing is removed."""
    job = Stopping(monkeypatch, "")
    assert job.stop("--timeout", "0") == 7
    assert "have not ended within 0 s" in capsys.readouterr().err
    assert set(job.server.objects) == {JOB, SECRET}


def test_another_job_of_the_name_stays() -> None:
    """What is removed is what was looked at: a job that was made under its name since then is not touched."""
    server = Server()
    found = jobs.Found("ml", "digits", {"metadata": {"name": "digits-masters", "uid": "old"}}, ())
    for path in (JOB, SECRET):
        meta = {"name": "digits-masters", "uid": "new", "ownerReferences": [{"uid": "new"}]}
        server.objects[path] = {"metadata": meta}
    assert asyncio.run(jobs.remove(server, found, 0)) == 0
    assert set(server.objects) == {JOB, SECRET}


# ---- the backend of masters in pods


def test_the_owner_is_somebody_else_s() -> None:
    """Pods hang on the object that is named, with its uid as the run; they get the token from the job's Secret."""
    server = Server()
    here = BackendContext(
        "digits",
        "u-1",
        ("m:1",),
        "t",
        arguments=("x.py",),
        args="image=i,namespace=ml,owner=v1/secrets/own,secret=told",
    )

    async def story() -> None:
        backend = KubernetesBackend(here, server)
        with pytest.raises(LaunchRefused, match="secret own, which owns the job's pods, was deleted"):
            await backend.launch(make_launch(job="digits"), 1)
        path = "/api/v1/namespaces/ml/secrets/own"
        server.objects[path] = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "own", "uid": "u-2"}}
        with pytest.raises(LaunchRefused, match="was deleted"):  # another one of that name
            await KubernetesBackend(here, server).launch(make_launch(job="digits"), 1)
        server.objects[path]["metadata"]["uid"] = "u-1"
        backend = KubernetesBackend(here, server)
        await backend.launch(make_launch(job="digits"), 1)
        (pod,) = server.pods()
        assert pod["metadata"]["ownerReferences"][0]["uid"] == "u-1"
        env = {one["name"]: one for one in pod["spec"]["containers"][0]["env"]}
        assert env["DLROVER_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "told"
        await backend.clear()
        assert list(server.objects) == [path]

    asyncio.run(asyncio.wait_for(story(), 20))


def test_templates_are_read_at_each_launch() -> None:
    """A node that is launched after a change of the ConfigMap has what it says then, each group its own."""
    server = Server()
    here = BackendContext(
        "digits", "u-1", ("m:1",), "t", arguments=("x.py",), args="image=i,namespace=ml,template=configmap:tmpl"
    )
    path = "/api/v1/namespaces/ml/configmaps/tmpl"

    async def story() -> None:
        backend = KubernetesBackend(here, server)
        for index, text in enumerate(('{"spec": {"priority": 7}}', '{"spec": {"priority": 9}}')):
            server.objects[path] = {"metadata": {}, "data": {"default": text, "ps": '{"spec": {"priority": 1}}'}}
            await backend.launch(make_launch(index=index, job="digits"), 1)
        server.objects[path]["data"]["default"] = "{"
        with pytest.raises(LaunchRefused, match="configmap:tmpl, group worker: "):
            await backend.launch(make_launch(index=2, job="digits"), 1)
        assert [one["spec"]["priority"] for one in server.pods()] == [7, 9]

    asyncio.run(asyncio.wait_for(story(), 20))


# ---- the command lines


def test_a_pod_s_environment_places_what_was_typed() -> None:
    """Options that named places where they were typed are the pod's own; the rest of the line stays."""
    plan = dataclasses.replace(PLAN, uid="u-1", claim="", etcd="etcd://e")
    env = masters.objects(plan)[-1]["spec"]["template"]["spec"]["containers"][0]["env"]
    environ = {one["name"]: one.get("value", "from elsewhere") for one in env}
    options = cli_options.parse(["--detach", "--log", "etcd://x", "--token-file", "t", "--nnodes", "3", "train.py"])
    assert in_pod.taken_in(options, environ)
    assert in_pod.is_pod(options)
    assert (options.detach, options.token_file, options.owner) == (False, None, "u-1")
    assert options.backend.startswith("k8s:image=trainer:1,")
    assert options.masters == "digits-masters.ml.svc:29400"
    assert (options.nnodes.most, options.job_id) == (3, "digits")
    assert options.log == "from elsewhere"
    assert in_pod.place(options) == "k8s:ml/digits"
    assert set(environ) == {"DLROVER_TOKEN", "DLROVER_ADDRESS"}
    environ = {one["name"]: "x" for one in env} | {in_pod.BIND: "fd00::7:29400"}
    assert in_pod.taken_in(options, environ)
    assert options.bind == "[fd00::7]:29400"
    plain = cli_options.parse(["train.py"])
    assert not in_pod.taken_in(plain, {})
    assert not in_pod.is_pod(plain)
    assert in_pod.place(plain) == ""
    with pytest.raises(SpecError, match=in_pod.BIND):
        in_pod.taken_in(plain, {in_pod.BACKEND: "k8s"})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ((), "say --backend k8s:claim=NAME"),
        (("--log", "sqlite:///x/log.db"), "sqlite: is no log that masters in pods share"),
        (("--backend", "k8s:claim=logs", "--log", "etcd://e"), "either in etcd or on a claim"),
        (("--backend", "k8s:claim=logs", "--bind", "0.0.0.0:1"), "bind: '0.0.0.0:1': masters in pods listen"),
        (("--backend", "k8s:claim=logs", "--run", "r"), "run: 'r': a job in pods is named by the uid"),
        (("--backend", "k8s:claim=logs", "--state-dir", "/s"), "state-dir: '/s': masters in pods keep"),
        (("--backend", "k8s:claim=logs,template=no.yaml"), "no.yaml' cannot be read"),
    ],
)
def test_what_cannot_be_detached(
    line: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is wrong usage, told before any cluster is asked, with what to write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    backend = () if "--backend" in line else ("--backend", "k8s")
    assert launcher.main([*backend, *line, "--image", "a:1", "--detach", "train.py"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "said"),
    [("cert", "a certificate of masters in pods"), ("key", "show no certificate"), ("ca", "show no certificate")],
)
def test_certificates_of_masters_in_pods_are_refused(flag: str, said: str) -> None:
    """They would have to name addresses that nobody knows yet; with a CA alone, agents would wait for TLS for ever."""
    options = cli_options.parse([f"--tls-{flag}", "c.pem", "train.py"])
    with pytest.raises(SpecError, match=rf"tls-{flag}: 'c\.pem': .*{said}"):
        k8s_detach._check(options)


def test_rendering_a_detached_job() -> None:
    """Masters' objects and nodes' pods are printed, which point at each other."""
    line = ("--detach", "--backend", "k8s:claim=logs,namespace=ml", "--image", "a:1", "--job-id", "digits", "x.py")
    with redirect_stdout(io.StringIO()) as out:
        assert dlrover.main(["k8s", "render", *line]) == 0
    made = list(yaml.safe_load_all(out.getvalue()))
    assert [one["kind"] for one in made].count("Pod") == 1
    job = next(one for one in made if one["kind"] == "Job")
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == list(line)
    env = {one["name"]: one for one in made[-1]["spec"]["containers"][0]["env"]}
    assert env["DLROVER_MASTERS"]["value"] == "digits-masters.ml.svc:29400"
    assert env["DLROVER_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == made[0]["metadata"]["name"]


@pytest.mark.parametrize(("size", "kept"), [("4", 3), ("2:4", 3), ("1", 0)])
def test_budgets_keep_all_nodes_but_one(size: str, kept: int) -> None:
    """A drain takes one at a time, also of those above MIN. Masters may change the budget."""
    options = cli_options.parse(["--backend", "k8s:claim=l", "--image", "a", "--nnodes", size, "train.py"])
    options.argv = ()
    choice = backends.chosen(options)
    assert choice is not None
    spec = groups.spec(options, "j", groups.plans(options))
    here = k8s_detach.context(options, choice, spec, "t" * 8)
    made = {one["kind"]: one for one in masters.objects(k8s_detach.plan(options, here, spec, "ml"))}
    assert made["PodDisruptionBudget"]["spec"]["minAvailable"] == kept
    env = {one["name"]: one for one in made["Job"]["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert ",budget=j-nodes" in env[masters.BACKEND]["value"]
    right = next(one for one in made["Role"]["rules"] if one["resources"] == ["poddisruptionbudgets"])
    assert (right["verbs"], right["resourceNames"]) == (["get", "patch"], ["j-nodes"])


def test_a_budget_follows_the_size() -> None:
    """A job that got smaller keeps fewer nodes, else no drain would end; what is so already is not written again."""
    server = Inside()
    where = "/apis/policy/v1/namespaces/ml/poddisruptionbudgets"
    told = "image=i,namespace=ml,budget=j-nodes,owner=v1/secrets/own"
    here = BackendContext("j", "u-1", ("m:1",), "t", arguments=("x.py",), args=told)
    size = GroupSize("worker", "worker", 4, 4)

    async def story() -> None:
        await server.ask(
            "POST", where, body={"metadata": {"name": "j-nodes"}, "spec": {"minAvailable": 3, "selector": {}}}
        )
        backend = KubernetesBackend(here, server)
        for fewest, most, kept in ((4, 4, 3), (2, 2, 1), (2, 5, 1), (1, 1, 0)):
            await backend.sized(Wanted((size._replace(nodes_min=fewest, nodes_max=most),)), 1)
            assert (await server.ask("GET", f"{where}/j-nodes"))["spec"]["minAvailable"] == kept
        writes = [one for one in server.asked if one[0] == "PATCH"]
        assert len(writes) == 2  # of a job that has become larger, more count once they run
        await backend.sized(Wanted((size,), "succeeded"), 1)
        await server.ask("DELETE", f"{where}/j-nodes")
        await backend.sized(Wanted((size,)), 1)  # somebody wants none
        assert len([one for one in server.asked if one[0] == "PATCH"]) == 2

    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_password_of_the_environment_reaches_the_masters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Etcd's password is in the Secret, wherever the command found it; a URL without a user has none."""
    monkeypatch.setenv("DLROVER_ETCD_PASSWORD", "p w")
    (tmp_path / "word").write_text("of/file\n")
    for typed, told in (
        ("etcd://me@e1:2379/x", "etcd://me:p%20w@e1:2379/x"),
        ("etcd://me:own@e1,e2/x?ttl=3", "etcd://me:own@e1:2379,e2:2379/x?ttl=3"),
        (f"etcd://me@e1/x?password_file={tmp_path}/word", "etcd://me:of%2Ffile@e1:2379/x"),
        ("etcd://e1?archive=s3://b/c%3Fd", "etcd://e1:2379/dlrover?archive=s3%3A//b/c%3Fd"),
        ("", ""),
        ("sqlite:///x", "sqlite:///x"),
    ):
        found = k8s_log.read(typed, "/etc/dlrover/log")
        assert found == (told, {})
        assert k8s_log.read(found.url, "/etc/dlrover/log") == found
    monkeypatch.delenv("DLROVER_ETCD_PASSWORD")
    for typed, said in (
        ("etcd://me@e1", "user 'me' needs a password: set DLROVER_ETCD_PASSWORD"),
        ("etcds://e1", r"say etcd://HOST:2379\?cacert=FILE"),
        ("etcd://e1?cacert=/no/ca.pem", "cacert=/no/ca.pem cannot be read"),
        ("etcd://e1?cert=/no/ca.pem", "a client certificate needs both"),
    ):
        with pytest.raises(SpecError, match=said):
            k8s_log.read(typed, "/etc/dlrover/log")


def test_etcd_s_files_travel_in_the_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are read where the command is typed, and masters' pods have them where the URL says; nodes' pods do not.

    Rendering has a word for the key.
    """
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(f"pem of {name}")
    url = f"etcd://e1/x?cacert={tmp_path}/ca&cert={tmp_path}/cert&key={tmp_path}/key&ttl=4"
    line = ("--detach", "--log", url, "--image", "a:1", "--job-id", "digits", "x.py")
    assert dlrover.main(["k8s", "render", *line]) == 0
    said = capsys.readouterr()
    assert "key etcd-client-key.pem, stands for the client's key" in said.err
    secret, *others = yaml.safe_load_all(said.out)
    files = {name: text for name, text in secret["stringData"].items() if name.endswith(".pem")}
    assert files == {
        "etcd-ca.pem": "pem of ca",
        "etcd-client.pem": "pem of cert",
        "etcd-client-key.pem": "THE-KEY-FOR-ETCD",
    }
    pod = next(one for one in others if one["kind"] == "Job")["spec"]["template"]["spec"]
    mount = next(one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "log-files")
    (volume,) = [one for one in pod["volumes"] if one["name"] == "log-files"]
    assert {one["path"] for one in volume["secret"]["items"]} == set(files)
    named = dict(one.split("=") for one in secret["stringData"]["log"].partition("?")[2].split("&"))
    assert named.pop("ttl") == "4"
    assert {f"{mount['mountPath']}/{name}" for name in files} == set(named.values())
    assert "log-files" not in str(others[-1])
    found = k8s_log.read(url, "/f")
    assert found.files["etcd-client-key.pem"] == "pem of key"


@pytest.mark.parametrize("url", ["etcd://me@e1:2379/x?ttl=5", "etcd://me:s3cret@e1:2379/x?ttl=5"])
@pytest.mark.parametrize("typed", [("--log", "{}"), ("--log={}",), ("--log", "etcd://me:s3cret@old", "--log", "{}")])
def test_a_password_is_neither_printed_nor_an_argument(
    url: str, typed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rendering has a word for it and says what fills it in; pods' arguments have no log, and the script keeps its own words."""
    monkeypatch.setenv("DLROVER_ETCD_PASSWORD", "s3cret")
    words = [one.format(url) for one in typed]
    line = [*words, "--backend", "k8s:namespace=ml", "--image", "a:1", "--job-id", "digits", "x.py", "--log", "mine"]
    assert dlrover.main(["k8s", "render", "--detach", *line]) == 0
    said = capsys.readouterr()
    assert "s3cret" not in said.out
    assert "in Secret digits-masters, key log, stands for etcd's password" in said.err
    made = list(yaml.safe_load_all(said.out))
    assert made[0]["stringData"]["log"] == "etcd://me:THE-PASSWORD-OF-ETCD@e1:2379/x/ml?ttl=5"
    job = next(one for one in made if one["kind"] == "Job")
    told = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert told == ["--detach", *line[len(words) :]]
    assert made[-1]["spec"]["containers"][0]["args"] == told
    options = cli_options.parse(["--detach", *line])
    options.argv = ("--detach", *line)
    choice = backends.chosen(options)
    assert choice is not None
    spec = groups.spec(options, "digits", groups.plans(options))
    here = k8s_detach.context(options, choice, spec, "t" * 8)
    plan = k8s_detach.plan(options, here, spec, "ml")
    assert plan.etcd == "etcd://me:s3cret@e1:2379/x?ttl=5"
    secret, *others = masters.objects(plan)
    assert "s3cret" in secret["stringData"]["log"]
    assert "s3cret" not in str(others)


def test_attached_nodes_get_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --detach too: the log is the masters' alone."""
    line = ("--log", "etcd://me:s3cret@e1/x", "--backend", "k8s", "--image", "a:1", "x.py")
    assert dlrover.main(["k8s", "render", *line]) == 0
    said = capsys.readouterr().out
    assert "s3cret" not in said
    pod = list(yaml.safe_load_all(said))[-1]
    assert pod["spec"]["containers"][0]["args"] == list(line[2:])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("k8s:ml/digits", ("ml", "digits")),
        ("k8s:digits", ("", "digits")),
        ("k8s:ml/a/b", ("ml", "a/b")),
        ("k8s:Big Job", ("", "Big Job")),
    ],
)
def test_names_of_jobs_in_a_cluster(text: str, place: tuple[str, str]) -> None:
    """A namespace and a job, or a job of the kubeconfig's namespace."""
    assert k8s_reach.read(text) == place


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("attach", "k8s:digits"), "none' is not there, and this is no pod"),
        (("status", "k8s:"), "'k8s:' names no job in Kubernetes"),
        (("status", "k8s:digits", "--log", "etcd://e"), "names the log already"),
        (("status", "k8s:digits"), "none' is not there, and this is no pod"),
    ],
)
def test_jobs_in_a_cluster_that_cannot_be_reached(
    line: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is wrong usage, with what to write."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert dlrover.main(list(line)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "job"),
    [
        (("status", "digits", "-n", "ml"), "k8s:ml/digits"),
        (("--namespace", "ml", "stop", "digits", "--no-wait"), "k8s:ml/digits"),
        (("explain", "digits"), "k8s:digits"),
        (("explain", "k8s:a/b", "-n", "ml"), "k8s:a/b"),
        (("attach", "digits", "-n", "ml"), "k8s:ml/digits"),
        (("events", "digits", "--log", "etcd://e"), "digits"),
    ],
)
def test_kubectl_s_plug_in(line: tuple[str, ...], job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kubectl dlrover` says `dlrover`'s words with kubectl's options."""
    seen: list[Any] = []
    monkeypatch.setattr(dlrover, "guarded", lambda args: seen.append(args) or 0)
    assert kubectl.main(line) == 0
    assert seen[0].job == job


def test_kubectl_s_plug_in_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command it prints help; without a job it asks for one."""
    assert kubectl.main(["--help"]) == 0
    assert "-n, --namespace" in capsys.readouterr().out
    assert kubectl.main([]) == 2
    with pytest.raises(SystemExit):
        kubectl.main(["status", "-n", "ml"])
    assert "name the job" in capsys.readouterr().err

"""``--detach`` with Ray: what masters in the cluster are told, what is refused, and how ``ray:JOB`` is read."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from dlrover_adapters.cli import backends, groups, in_pod, ray_detach, ray_flags, ray_reach
from dlrover_adapters.cli import main as dlrover
from dlrover_adapters.cli import options as cli_options
from dlrover_backends.ray import masters_keeper, mastery, names, runtime_env, settings
from dlrover_backends.ray.mastery import Plan
from dlrover_core.errors import SpecError

LINE = ("--backend", "ray", "--detach", "--job-id", "digits", "--nnodes", "2")


def plan_of(*line: str, env: dict[str, Any] | None = None) -> Plan:
    """What masters a command line makes, with this runtime environment in the cluster."""
    words = (*LINE, *line, "train.py")
    options = cli_options.parse(list(words))
    options.argv = words
    choice = backends.chosen(options)
    assert choice is not None
    found = groups.plans(options)
    here = ray_detach.context(options, choice, groups.spec(options, "digits", found), "a-secret", "run-1")
    return ray_detach.plan(options, here, settings.read(here)._replace(address="h:6379"), env or {})


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


def test_a_log_on_one_host_pins_its_masters() -> None:
    """SQLite stays with the host of the head; a log in etcd has masters on two hosts."""
    one, two = plan_of("--state-dir", "/s"), plan_of("--log", "etcd://e:2379")
    assert (one.keepers, one.pinned, one.log, one.state_dir) == (1, mastery.HEAD, "", "/s")
    assert (two.keepers, two.pinned, two.log) == (2, "", "etcd://e:2379")
    assert mastery.of_map(one.to_map()) == one
    assert "a-secret" not in repr(one)


def test_masters_in_the_cluster_have_the_environment_of_the_nodes(tmp_path: Path) -> None:
    """It reaches masters on another host with the addresses of what was sent to the cluster, and however large it is.

    What may be secret in it is in no variable and no word of a command.
    """
    lines = [f"package-{number} --hash=sha256:{'0' * 64}" for number in range(3000)]
    env = {"working_dir": "gcs://_ray_pkg_1.zip", "pip": lines, "env_vars": {"A": "1,2", "PASSWORD": "swordfish"}}
    plan = plan_of("--resources", "CPU=1,GPU=2", env=env)
    assert len(json.dumps(env)) > 128 * 1024
    assert "swordfish" not in masters_keeper.backend_of(plan) + repr(plan)
    told = settings.read(ray_detach.context(options_of(plan), choice_of(plan), spec_of(plan), "t", "r"))
    assert (told.address, told.resources) == ("h:6379", "CPU=1,GPU=2")
    assert runtime_env.read(told.runtime_env, str(tmp_path)) == env
    assert (plan.cwd, plan_of().cwd) == ("", str(tmp_path))


def options_of(plan: Plan) -> Any:
    """The options of masters in the cluster: the same words, placed by the environment."""
    options = cli_options.parse(list(plan.argv))
    options.argv = plan.argv
    environ: MutableMapping[str, str] = {
        in_pod.BACKEND: masters_keeper.backend_of(plan),
        in_pod.BIND: "0.0.0.0:4000",
        in_pod.MASTERS: "10.0.0.1:4000",
        in_pod.JOB: plan.job,
        in_pod.STATE_DIR: "/state",
        in_pod.RUN: plan.run,
    }
    assert in_pod.taken_in(options, environ)
    return options


def choice_of(plan: Plan) -> Any:
    """The backend of masters in the cluster; a script that lies in what was sent need not be here."""
    Path("train.py").unlink()
    choice = backends.chosen(options_of(plan))
    Path("train.py").touch()
    return choice


def spec_of(plan: Plan) -> Any:
    """The job's spec, as masters in the cluster read it."""
    options = options_of(plan)
    assert ray_flags.has_files(options)
    assert (options.job_id, options.owner, options.detach) == ("digits", "run-1", False)
    return groups.spec(options, "digits", groups.plans(options))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--bind", "1.2.3.4"), "bind: '1.2.3.4': masters in the cluster listen at a free port"),
        (("--masters", "a:1"), "masters: 'a:1': masters in the cluster are found"),
        (("--log", "http://a/b"), "http: is no log that masters in the cluster share"),
    ],
)
def test_what_a_keeper_says_is_not_said_twice(line: tuple[str, ...], said: str) -> None:
    """Each option that says where masters are is refused, with what to do."""
    with pytest.raises(SpecError, match=re.escape(said)):
        ray_detach._check(cli_options.parse([*LINE, *line, "train.py"]))


def test_what_ray_job_submit_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that `ray job submit` has sent is the nodes' too, below what --runtime-env says."""
    told = {"runtime_env": {"working_dir": "gcs://a.zip", "env_vars": {"A": "1", "B": "1"}, "_ray_commit": "x"}}
    environ = {runtime_env.SUBMITTED: json.dumps(told)}
    outer = runtime_env.submitted(environ)
    assert outer == {"working_dir": "gcs://a.zip", "env_vars": {"A": "1", "B": "1"}}
    found = runtime_env.joined(outer, {"env_vars": {"B": "2"}, "pip": ["x"]})
    assert found == {"working_dir": "gcs://a.zip", "env_vars": {"A": "1", "B": "2"}, "pip": ["x"]}
    assert [
        runtime_env.submitted({runtime_env.SUBMITTED: wrong}) for wrong in ("", "{", "[]", '{"runtime_env": 1}')
    ] == [{}] * 4
    monkeypatch.setenv(runtime_env.SUBMITTED, environ[runtime_env.SUBMITTED])
    assert ray_flags.has_files(cli_options.parse(["--backend", "ray", "x.py"]))


def test_what_is_sent_once() -> None:
    """Folders are sent to the cluster, addresses are not; one runtime environment has one name."""
    env = {"working_dir": "/a", "py_modules": ["/b", "gcs://c.zip", "s3://d.zip"]}
    assert names.folders(env) == ["/a", "/b"]
    assert names.packages(env) == ["gcs://c.zip"]
    assert names.digest(env) == names.digest(dict(reversed(env.items()))) != names.digest({})


def test_the_record_of_a_job() -> None:
    """The last claim counts, an end counts for its own run alone, and the driver's masters are asked first."""
    parts = {
        mastery.claimed(9): json.dumps({"run": "r1", "token": "t"}).encode(),
        mastery.claimed(10): json.dumps({"run": "r2", "token": "t", "driver": "d:1", "since": 5}).encode(),
        mastery.claimed(11): b"",
        mastery.at("r2", 1): b"b:2",
        mastery.at("r2", 0): b"a:2",
        mastery.at("r1", 2): b"c:2",
        mastery.end("r1"): json.dumps({"status": 0}).encode(),
    }
    found = mastery.record_of("j", parts)
    assert found is not None
    assert (found.run, found.over, found.masters) == ("r2", None, ["d:1", "a:2", "b:2"])
    assert (found.claim, found.since) == (10, 5)
    parts[mastery.end("r2")] = json.dumps({"status": 1, "words": "so"}).encode()
    found = mastery.record_of("j", parts)
    assert found is not None
    assert (found.over, found.words, mastery.told(1)) == (1, "so", "failed")
    assert mastery.record_of("j", {mastery.at("r2", 0): b"a:2"}) is None


def test_names_of_any_text() -> None:
    """A job's name may hold anything: keys and actors keep it apart from others'."""
    job = "a/b#1 ü"
    assert mastery.run_of(mastery.called(job, "a/b#2", 1)) == (job, "a/b#2")
    assert unquote(mastery.key(job).removeprefix(mastery.PREFIX).rstrip("/")) == job


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("status", "ray:"), "'ray:' names no job in a Ray cluster; say ray:JOB"),
        (("status", "ray:a", "--log", "sqlite:///x"), "names the log already"),
        (("attach", "ray:a"), "'dlrover attach' is for jobs of this host"),
    ],
)
def test_addresses_that_are_wrong(line: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage ends with 2, before a cluster is looked for."""
    assert dlrover.main(list(line)) == 2
    assert said in capsys.readouterr().err


def test_masters_that_encrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked over TLS, with the CA that is named; a CA that is missing, or of no use, is told before anybody is asked."""
    asked: list[str] = []

    async def answering(_: mastery.Record, ca: str) -> str:
        asked.append(ca)
        return "h:1"

    def place(**more: str) -> argparse.Namespace:
        def seen(args: argparse.Namespace) -> int:
            asked.extend((args.log, args.tls_ca))
            return 0

        return argparse.Namespace(job="ray:j", log=None, state_dir=None, token_file=None, run=seen, **more)

    monkeypatch.setattr(ray_reach, "_answering", answering)
    monkeypatch.setenv("DLROVER_TOKEN", "a-secret")
    encrypts = mastery.Record("j", "r", "a-secret", "h:1", encrypts=True)
    with pytest.raises(SpecError, match="tls-ca: missing: the masters of ray:j encrypt; say --tls-ca FILE"):
        ray_reach._through(place(), encrypts)
    with pytest.raises(SpecError, match="the masters of ray:j do not encrypt; leave it out"):
        ray_reach._through(place(tls_ca="ca.pem"), dataclasses.replace(encrypts, encrypts=False))
    assert not asked
    assert ray_reach._through(place(tls_ca="ca.pem"), encrypts) == 0
    assert asked == ["ca.pem", "https://h:1/j?cacert=ca.pem", "ca.pem"]


def test_a_job_that_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody answers for it: what its masters said last is told, and the command's status is the job's."""
    assert ray_reach._say_over(mastery.Record("j", "r", "t", over=93, words="no steps")) == 1
    assert "job j has failed: it made no progress, and its masters are gone\nno steps" in capsys.readouterr().out
    assert ray_reach._say_over(mastery.Record("j", "r", "t", over=0)) == 0

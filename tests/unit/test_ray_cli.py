"""The options of ``--backend ray``, `dlrover ray`, and what they answer to what cannot be."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from dlrover_adapters.cli import backend_flags, ray_attached, ray_flags, ray_reach
from dlrover_adapters.cli import main as dlrover
from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.http import client as http_client
from dlrover_adapters.http.client import Unanswered
from dlrover_adapters.http.tls import Untrusted
from dlrover_backends.ray import client, mastery, runtime_env, settings
from dlrover_backends.ray.client import RayBackend
from dlrover_backends.ray.settings import Settings
from dlrover_core import BackendContext
from dlrover_core.errors import ConnectionLost, CoreError, LaunchRefused, Refused, SpecError
from dlrover_core.testing.backend_stand import make_launch


def named(*line: str) -> str | None:
    """The backend that a command line names."""
    return backend_flags.named(cli_options.parse([*line, "train.py"]))


def test_options_are_arguments_of_the_backend() -> None:
    """What the options say the backend reads, beside arguments of its own."""
    text = named("--backend", "ray", "--resources", "CPU=8,GPU=2", "--label", "zone=in(a,b)", "--label", "tier=!spot")
    assert text is not None
    name, _, args = text.partition(":")
    told = settings.read(BackendContext("j", "r", ("m:1",), "t", args=args))
    assert (name, told) == ("ray", Settings(resources="CPU=8,GPU=2", label="zone=in(a,b);tier=!spot"))
    assert named("--backend", "ray:resources=CPU%3D1", "--ray-address", "h:1") == "ray:resources=CPU%3D1,address=h:1"
    assert named("--backend", "ray") == "ray"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--ray-address", "h:1"), "'h:1' is for --backend ray, and the backend is local"),
        (("--backend", "k8s", "--resources", "CPU=1"), "the backend is k8s"),
        (("--backend", "ray", "--resources", "CPU"), "'CPU' is not NAME=AMOUNT"),
        (("--backend", "ray", "--label", "zone"), "'zone' is not KEY=SELECTOR"),
        (("--backend", "ray", "--ray-address", "ray://h:10001"), "ray job submit"),
    ],
)
def test_options_that_are_wrong(line: tuple[str, ...], said: str) -> None:
    """Each is told with its value and what to write."""
    with pytest.raises(SpecError, match=re.escape(said)):
        named(*line)


def test_a_script_that_is_not_in_the_runtime_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script is looked for where nodes will find it: in the folder that Ray sends to them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "env.yaml").write_text("working_dir: code", encoding="utf-8")
    options = cli_options.parse(["--backend", "ray", "--runtime-env", "env.yaml", "train.py"])
    assert backend_flags.in_images(options)
    with pytest.raises(SpecError, match=r"'train\.py' is not in .*/code, the working_dir of env\.yaml"):
        ray_flags.check(options)
    by_argument = cli_options.parse(["--backend", "ray:runtime_env=env.yaml", "train.py"])
    with pytest.raises(SpecError, match=r"'train\.py' is not in .*/code, the working_dir of env\.yaml"):
        ray_flags.check(by_argument)
    # A whole path is looked for on each host; one that is not even here is a mistake.
    with pytest.raises(SpecError, match=r"'/no/train\.py' is not here: name it as it is called in .*/code"):
        ray_flags.check(cli_options.parse(["--backend", "ray", "--runtime-env", "env.yaml", "/no/train.py"]))
    (tmp_path / "code" / "train.py").touch()
    ray_flags.check(options)
    ray_flags.check(by_argument)


def test_a_script_that_nothing_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the runtime environment brings no files, nodes find what is here: a name that is nobody's is told at once."""
    monkeypatch.chdir(tmp_path)
    for text, elsewhere in (("env_vars: {A: '1'}", False), ("pip: [a]", True), ("image_uri: a", True)):
        (tmp_path / "env.yaml").write_text(text, encoding="utf-8")
        options = cli_options.parse(["--backend", "ray", "--runtime-env", "env.yaml", "train.py"])
        assert backend_flags.in_images(options) is elsewhere
        if "image_uri" not in text:
            with pytest.raises(SpecError, match=r"'train\.py' is not here, and env\.yaml brings no files"):
                ray_flags.check(options)
    ray_flags.check(options)
    # An archive is not looked into.
    (tmp_path / "code.zip").touch()
    (tmp_path / "env.yaml").write_text("working_dir: code.zip", encoding="utf-8")
    ray_flags.check(cli_options.parse(["--backend", "ray", "--runtime-env", "env.yaml", "train.py"]))


def test_a_script_that_was_not_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `ray job submit` nodes get the folder that Ray has unpacked here: a script that is not in it is told at once."""
    monkeypatch.chdir(tmp_path)
    options = cli_options.parse(["--backend", "ray", "train.py"])
    monkeypatch.setenv(runtime_env.SUBMITTED, '{"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}')
    with pytest.raises(SpecError, match=r"'train\.py' is not in the folder that ray job submit has sent"):
        ray_flags.check(options)
    ray_flags.check(cli_options.parse(["--backend", "ray", "-m", "train"]))
    # The command may have gone to a folder in there; Python's path has the whole of it.
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "train.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "sent")
    ray_flags.check(options)
    monkeypatch.setenv(
        runtime_env.SUBMITTED, '{"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip", "image_uri": "a"}}'
    )
    ray_flags.check(cli_options.parse(["--backend", "ray", "other.py"]))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("rm",), "say which job's leftovers"),
        (("rm", "a", "--all"), "say which job's leftovers"),
        (("ls", "a"), "ls lists all jobs"),
        (("ls", "--force"), "nor --force"),
        (("ls", "--ray-address", "h"), "is not HOST:PORT"),
        (("ls", "--ray-address", "127.0.0.1:1"), "no Ray cluster answers at 127.0.0.1:1 (Connection refused)"),
    ],
)
def test_dlrover_ray_that_is_wrong(line: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage ends with 2 and says what to type."""
    assert dlrover.main(["ray", *line]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("line", [("status", "ray:a"), ("ray", "ls")])
def test_a_variable_that_names_no_cluster(
    line: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that joins the cluster names it, and does not wait."""
    cluster_of(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    assert dlrover.main([*line]) == 2
    assert "RAY_ADDRESS='http://127.0.0.1:8265' is the address of Ray's job server" in capsys.readouterr().err


def cluster_of(monkeypatch: pytest.MonkeyPatch, **methods: Any) -> None:
    """A cluster with one run of job ``a``, without Ray."""
    monkeypatch.setenv(settings.EVENTS, "0")
    masters = ModuleType("dlrover_backends.ray.masters")
    vars(masters).update(
        jobs=list,
        kept=set,
        release=methods.pop("release", lambda *_: None),
        led_outside=methods.pop("led_outside", lambda *_: ""),
    )
    monkeypatch.setitem(sys.modules, masters.__name__, masters)
    monkeypatch.delattr("dlrover_backends.ray.masters", raising=False)
    fake = ModuleType("dlrover_backends.ray.cluster")
    attributes = {"__init__": lambda self, run: setattr(self, "run", run), "connect": lambda *_: None, **methods}
    attributes["fence"] = SimpleNamespace(bar=methods.pop("bar", lambda: None))
    vars(fake).update(Cluster=type("Cluster", (), attributes), runs=lambda: {"dlrover:a:1": []})
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.delattr("dlrover_backends.ray.cluster", raising=False)


def test_rays_library_ends_the_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What Ray's library ends the process for is told as any other reason."""

    def ends(*_: object) -> None:
        raise SystemExit("Could not find any running Ray instance")

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    cluster_of(monkeypatch, connect=ends)
    assert dlrover.main(["ray", "ls"]) == 2
    assert "start one with ray start --head" in capsys.readouterr().err


def test_words_of_other_jobs_are_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's library prints its autoscaler's words about the whole cluster; desks and commands of ours do not want them."""
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    cluster_of(monkeypatch)
    monkeypatch.setenv(settings.EVENTS, "1")  # what a person has set stays
    assert dlrover.main(["ray", "ls"]) == 0
    assert os.environ[settings.EVENTS] == "1"
    monkeypatch.delenv(settings.EVENTS)
    backend = RayBackend(BackendContext("j", "r", ("m:1",), "t", directory=str(tmp_path)))
    monkeypatch.setattr(
        client,
        "_DESK",
        f"import os, pathlib; pathlib.Path('{tmp_path}/env').write_text(os.environ['{settings.EVENTS}'])",
    )
    assert backend._start()["text"] == "the desk has ended at once"
    assert backend._desk is not None
    backend._desk.wait()
    assert (tmp_path / "env").read_text() == "0"
    assert dlrover.main(["ray", "ls"]) == 0
    assert os.environ[settings.EVENTS] == "0"


@pytest.mark.parametrize(("persistent", "late"), [(True, False), (False, False), (False, True)])
def test_the_cluster_of_an_attached_job_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, persistent: bool, late: bool
) -> None:
    """The one that was joined, once the name is claimed there: at the start, or later where the cluster was away."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_attached, "KEEP_AFTER_S", 0.0)
    backend = RayBackend(BackendContext("digits", "r", ("m:1",), "t", directory=str(tmp_path)))
    orders: list[object] = []

    def desk_joins() -> None:
        (tmp_path / f"{client.SOCKET}.lock").write_text("10.0.0.7:6379")

    async def call(_: RayBackend, *order: object) -> object:
        orders.append(order[0])
        if orders == ["claim"] and late:
            raise ConnectionLost("away")
        desk_joins()
        return ("", persistent) if order[0] == "claim" else ("10.0.0.7:6379", {})

    monkeypatch.setattr(RayBackend, "_call", call)
    job: Any = SimpleNamespace(job=SimpleNamespace(job="digits"), masters=("m:1",), tls_cert="")

    async def start() -> bool:
        claimed = await ray_attached._claimed(backend, job)
        if late:
            assert "10.0.0.7" not in capsys.readouterr().err
            await ray_attached._keep(backend, mastery.Plan("digits", "r", (), "t"), job)
        return claimed

    assert asyncio.run(start()) is not late
    assert orders == (["claim", "claim", "send", "keep"] if late else ["claim"])
    say = "dlrover-run: job digits: "
    expected = [
        f"{say}its nodes are actors of the Ray cluster at 10.0.0.7:6379",
        *([] if persistent else [say + ray_attached.MEMORY]),
    ]
    assert capsys.readouterr().err.splitlines() == expected


@pytest.mark.parametrize("in_use", [False, True])
def test_masters_are_kept_though_the_desk_dies_meanwhile(monkeypatch: pytest.MonkeyPatch, *, in_use: bool) -> None:
    """Asked again until they are; the name is claimed once. Where the name is another job's, nobody asks any more."""
    monkeypatch.setattr(ray_attached, "KEEP_AFTER_S", 0.0)
    monkeypatch.setattr(ray_attached, "KEEP_AGAIN_S", 0.0)
    orders: list[str] = []

    class Cluster:
        cluster = "h:1"

        async def claim(self, *_: object, **__: object) -> bool:
            orders.append("claim")
            if in_use and len(orders) > 2:
                raise SpecError("job", "is in use")
            if len(orders) < 3:
                raise ConnectionLost("away")
            return True

        async def keep(self, _: object) -> None:
            orders.append("keep")
            if orders.count("keep") < 3:
                raise ConnectionLost("the other end is gone")

    job: Any = SimpleNamespace(job=SimpleNamespace(job="digits"), masters=("m:1",), tls_cert="")
    plan = mastery.Plan("digits", "r", (), "t")
    asyncio.run(asyncio.wait_for(ray_attached._keep(cast(Any, Cluster()), plan, job), 60))
    assert orders == (["claim"] * 3 if in_use else [*["claim"] * 3, *["keep"] * 3])


def test_what_cannot_be_removed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Never said to be removed."""

    def clear(*_: object) -> None:
        raise CoreError("actors have not ended: worker-0-0")

    cluster_of(monkeypatch, clear=clear)
    assert dlrover.main(["ray", "rm", "a"]) == 1
    said = capsys.readouterr()
    assert (said.out, "worker-0-0" in said.err) == ("", True)


def test_a_job_that_a_command_leads_stays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """That command's masters cannot be ended from here: nothing is removed unless it is forced, and what ends it is said."""
    done: list[str] = []
    cluster_of(
        monkeypatch,
        clear=lambda *_: done.append("clear"),
        release=lambda *_: done.append("release"),
        bar=lambda: done.append("bar"),
        led_outside=lambda job, run: f"h:{run}" if job == "a" else "",
    )
    for line in (("rm", "a"), ("rm", "--all")):
        assert dlrover.main(["ray", *line]) == 1
        said = capsys.readouterr()
        assert (said.out, done) == ("", [])
        assert "job 'a' is led by the dlrover-run at h:1" in said.err
        assert "dlrover stop ray:a, or Ctrl-C there" in said.err
    assert dlrover.main(["ray", "rm", "a", "--force"]) == 0
    assert done == ["bar", "release", "clear"], "its launches are refused before anything ends"


def test_nodes_of_masters_that_live_stay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Masters that cannot be ended would launch them again: nothing of the run is removed, and the command says so."""
    cleared: list[object] = []

    def release(*run: object) -> None:
        raise CoreError(f"masters of {run} are still kept")

    cluster_of(monkeypatch, clear=lambda *_: cleared.append(1), release=release)
    assert dlrover.main(["ray", "rm", "a"]) == 1
    said = capsys.readouterr()
    assert (said.out, cleared) == ("", [])
    assert "masters of ('a', '1') are still kept" in said.err


def test_a_job_that_has_just_ended_is_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its masters stay for some seconds and refuse to stop it: they are waited for, and what the cluster keeps is removed."""
    done: list[str] = []

    def refuses(*_: object) -> int:
        raise Refused("the job is succeeded")

    record = mastery.Record("a", "1", "t", addresses={0: "h:1"})
    cluster_of(monkeypatch, clear=lambda *_: done.append("clear"), release=lambda *_: done.append("release"))
    vars(sys.modules["dlrover_backends.ray.masters"]).update(
        find=lambda _: SimpleNamespace(record=record), await_over=lambda *_: done.append("over") or record
    )
    vars(sys.modules["dlrover_backends.ray.cluster"]).update(CLEAR_S=1.0)
    monkeypatch.setattr(ray_reach, "connect", lambda *_: None)
    monkeypatch.setattr(ray_reach, "_through", refuses)
    assert dlrover.main(["stop", "ray:a"]) == 0
    assert done == ["over", "clear", "release"]
    assert "job a: had ended before, and all that was made for it is removed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tries", "over", "keepers", "how"),
    [(3, False, True, "stopped"), (3, True, True, "had ended before"), (1, False, False, "")],
    ids=["others lead soon", "they have just ended", "nobody keeps any"],
)
def test_masters_that_do_not_answer_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tries: int,
    over: bool,
    keepers: bool,
    how: str,
) -> None:
    """Between two leaders, and between the end of masters and the word of it, nobody answers; they are asked again."""
    asked: list[int] = []
    record = mastery.Record("a", "1", "t", addresses={0: "h:1"})

    def through(*_: object) -> int:
        asked.append(1)
        if len(asked) < 3:
            raise ConnectionLost("no master answers")
        return 0

    def find(_: str) -> object:
        ended = over and len(asked) == 2
        return SimpleNamespace(record=replace(record, over=0) if ended else record, keepers=(1,) * keepers)

    cluster_of(monkeypatch, clear=lambda *_: None, release=lambda *_: None)
    vars(sys.modules["dlrover_backends.ray.masters"]).update(find=find, await_over=lambda *_: record)
    vars(sys.modules["dlrover_backends.ray.cluster"]).update(CLEAR_S=1.0)
    monkeypatch.setattr(ray_reach, "connect", lambda *_: None)
    monkeypatch.setattr(ray_reach, "_through", through)
    monkeypatch.setattr(ray_reach, "LOOK_S", 0.0)
    status = dlrover.main(["stop", "ray:a"])
    said = capsys.readouterr()
    assert len(asked) == (2 if over else tries)
    assert (status == 0) is bool(how)
    assert (
        f"job a: {how}, and all that was made for it is removed" in said.out if how else "dlrover ray rm a" in said.err
    )


@pytest.mark.parametrize(
    ("lost", "line", "slept_s"),
    [
        (Unanswered("no answer"), (), 0.0),
        (Untrusted("a stranger's certificate"), (), 0.0),
        (ConnectionLost("nobody answers"), ("--timeout", "3"), 3.0),
        (ConnectionLost("nobody answers"), (), ray_reach.MASTERS_S),
    ],
    ids=["it may have been done", "not trusted", "as long as was said", "as long as masters may take"],
)
def test_how_long_masters_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lost: ConnectionLost,
    line: tuple[str, ...],
    slept_s: float,
) -> None:
    """At most as long as ``--timeout`` says, and not at all where waiting is of no use, or the job may have been stopped."""
    slept: list[float] = []
    record = mastery.Record("a", "1", "t", addresses={0: "h:1"})

    def through(*_: object) -> int:
        raise lost

    cluster_of(monkeypatch)
    found = SimpleNamespace(record=record, keepers=(1,))
    vars(sys.modules["dlrover_backends.ray.masters"]).update(find=lambda _: found)
    monkeypatch.setattr(ray_reach, "connect", lambda *_: None)
    monkeypatch.setattr(ray_reach, "_through", through)
    monkeypatch.setattr(ray_reach, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    assert dlrover.main(["stop", "ray:a", *line]) != 0
    assert str(lost) in capsys.readouterr().err
    assert slept_s <= sum(slept) <= (slept_s + ray_reach.LOOK_S if slept_s else 0)


def test_a_certificate_that_is_not_trusted_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no master that does not answer: no other one is waited for."""
    import asyncio

    async def asked(*_: object, **__: object) -> None:
        raise Untrusted("a stranger's certificate")

    monkeypatch.setattr(http_client, "fetch_status", asked)
    with pytest.raises(Untrusted, match="a stranger's certificate"):
        asyncio.run(ray_reach._answering(mastery.Record("a", "1", "t", addresses={0: "h:1"}), ""))


def test_a_name_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started, with what ends those that have it."""
    import asyncio

    async def called(_: RayBackend, order: str, *__: object) -> object:
        return {"others": (("run-1", 2),), "check": ""}[order]

    monkeypatch.setattr(RayBackend, "_call", called)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    backend = RayBackend(BackendContext("j", "r", ("m:1",), "t", cwd=str(tmp_path), directory=str(tmp_path)))
    with pytest.raises(SpecError, match=r"job-id.*2 nodes of its run run-1 .* dlrover ray rm j"):
        asyncio.run(backend.check())


def order(tmp_path: Path, args: str = "", **more: int) -> dict[str, object]:
    """What the desk is told of a node of four workers."""
    here = BackendContext("j", "r", ("m:1",), "secret", arguments=("train.py",), cwd=str(tmp_path), args=args)
    return RayBackend(here)._order(make_launch()._replace(nproc=4, **more))


def test_what_a_node_gets(tmp_path: Path) -> None:
    """Nothing said: a CPU for each worker, and GPUs if there are any. Said once: that, and what a group of the job asks for."""
    assert (order(tmp_path)["wants"], order(tmp_path)["gpus_if_any"]) == ({"CPU": 4.0}, 4)
    told = order(tmp_path, "resources=GPU%3D2%2Cfast%3D1")
    assert (told["wants"], told["gpus_if_any"]) == ({"CPU": 4.0, "GPU": 2.0, "fast": 1.0}, 0)
    told = order(tmp_path, cpu_m=1500, memory_mib=64, gpus=1)
    assert (told["wants"], told["gpus_if_any"]) == ({"CPU": 1.5, "GPU": 1.0, "memory": float(64 << 20)}, 0)


def test_what_the_keeper_is_told(tmp_path: Path) -> None:
    """The agent's variables and its token; those that the runtime environment sets stay, and its folder is the working one."""
    plan = order(tmp_path)["plan"]
    assert isinstance(plan, dict)
    assert (plan["cwd"], plan["env"]["DLROVER_NODE"], plan["env"]["DLROVER_TOKEN"]) == (
        str(tmp_path),
        "worker-0-0",
        "secret",
    )
    (tmp_path / "env.yaml").write_text("working_dir: .\nenv_vars: {OMP_NUM_THREADS: '3', DLROVER_NPROC: '9'}")
    plan = order(tmp_path, "runtime_env=env.yaml")["plan"]
    assert isinstance(plan, dict)
    assert (plan["cwd"], plan["kept"]) == ("", ("OMP_NUM_THREADS", "DLROVER_NPROC"))
    assert "DLROVER_NPROC" not in plan["env"]


def test_a_command_that_is_missing(tmp_path: Path) -> None:
    """`dlrover master` without a script has nothing that a node could run: the node is refused for good."""
    import asyncio

    backend = RayBackend(BackendContext("j", "r", ("m:1",), "t", cwd=str(tmp_path)))
    with pytest.raises(LaunchRefused, match="name the script") as refused:
        asyncio.run(backend.launch(make_launch(), 1))
    assert refused.value.permanent


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    """An address at which nobody listens is told before anything is started."""
    import asyncio

    args = "address=127.0.0.1:1"
    here = BackendContext("j", "r", ("m:1",), "t", cwd=str(tmp_path), directory=str(tmp_path), args=args)
    with pytest.raises(SpecError, match=r"no Ray cluster answers at 127\.0\.0\.1:1 .* ray start --head"):
        asyncio.run(RayBackend(here).check())


def test_a_desk_that_stands_still(tmp_path: Path) -> None:
    """Its queue of connections is full: it is there, and whoever asks for it goes on at once."""
    path = tmp_path / "desk.sock"
    assert not client._answers(path)
    answers: list[bool] = []
    with socket.socket(socket.AF_UNIX) as desk, contextlib.ExitStack() as held:
        desk.bind(str(path))
        assert not client._answers(path)
        desk.listen(1)
        with contextlib.suppress(BlockingIOError):
            while True:
                one = held.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                one.connect(str(path))
        asking = threading.Thread(target=lambda: answers.append(client._answers(path)), daemon=True)
        asking.start()
        asking.join(10.0)
        assert answers == [True]

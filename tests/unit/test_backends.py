"""Whose scheduler starts the nodes: how ``--backend`` is read, what does not fit is named, and what a backend is made from."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dlrover_adapters.cli import backends as cli_backends
from dlrover_adapters.cli import main as dlrover
from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.cli import run
from dlrover_adapters.cli.settings import Settings
from dlrover_core import BackendContext, Changed, Listed, NodeLaunch
from dlrover_core.errors import SpecError
from dlrover_core.runtime import backends
from dlrover_core.spec import GroupSpec, JobSpec

NODE = NodeLaunch("j-worker-1-0", "worker-1-0", "worker", 1, 0, nproc=4, avoid=())


class Good:
    """A backend that does nothing, and fits."""

    def __init__(self, here: BackendContext) -> None:
        self.here, self.told = here, here.options(queue="all", hosts="")

    async def launch(self, node: NodeLaunch, token: int) -> None:
        """Nothing."""

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        """Nothing."""

    async def observe(self) -> AsyncIterator[Listed | Changed]:
        """Nothing is there."""
        yield Listed(())

    async def room(self, group: str) -> int | None:
        """Nobody knows."""
        return None


def context(**fields: Any) -> BackendContext:
    """One of a job of two masters."""
    return BackendContext("j", "r1", ("m1:1", "m2:2"), "a-secret-token", **fields)


@pytest.mark.parametrize(
    ("text", "name", "path", "args"),
    [
        ("k8s", "k8s", "", ""),
        ("k8s:namespace=ml,queue=a:b", "k8s", "", "namespace=ml,queue=a:b"),
        ("slurm:Slurm", "slurm", "", "Slurm"),
        ("my.slurm:Slurm", "", "my.slurm:Slurm", ""),
        ("my.slurm:Slurm:part=gpu:x", "", "my.slurm:Slurm", "part=gpu:x"),
        ("my.slurm:Places.Slurm", "", "my.slurm:Places.Slurm", ""),
        ("slurm.py:Slurm", "", "/here/slurm.py:Slurm", ""),
        ("./a/slurm.py:Slurm:x", "", "/here/a/slurm.py:Slurm", "x"),
        ("/opt/slurm.py:Slurm", "", "/opt/slurm.py:Slurm", ""),
    ],
)
def test_a_name_or_a_path_and_arguments(text: str, name: str, path: str, args: str) -> None:
    """What stands before the first colon decides: with a dot or a slash it is a path, else a name; read again, it is the same."""
    choice = backends.read(text, "/here")
    assert choice == (name, path, args)
    assert backends.read(choice.text, "/elsewhere") == choice


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not NAME"),
        ("my slurm", "is not NAME"),
        ("my.slurm", "names no class in 'my.slurm'; say my.slurm:CLASS"),
        ("my.slurm:x=1", "names no class"),
        ("./slurm:Slurm", "must end with .py"),
    ],
)
def test_what_is_neither(text: str, said: str) -> None:
    """A text that names nothing is refused, with what to type."""
    with pytest.raises(SpecError, match=said):
        backends.read(text)


def test_unknown_names_list_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that nobody has installed is told with those that are, the nearest first, and how one's own is named."""
    there = [importlib.metadata.EntryPoint("slurm", "x:Y", backends.GROUP)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: there if group == backends.GROUP else [])
    with pytest.raises(
        SpecError,
        match=r"'slrum' is installed \(did you mean slurm\?\); there are: k8s, local, ray, slurm.*mypackage.slurm:Slurm",
    ):
        backends.find(backends.read("slrum"), cli_backends.OURS)


def test_an_installed_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is looked up among the entry points; one that cannot be loaded says what it names, and why."""
    there = [
        importlib.metadata.EntryPoint("good", f"{__name__}:Good", backends.GROUP),
        importlib.metadata.EntryPoint("torn", "no_such_module:Thing", backends.GROUP),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: there)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    assert backends.find(backends.read("good"), {}).__name__ == "Good"
    with pytest.raises(SpecError, match=r"'torn' \(no_such_module:Thing\) cannot be loaded: ModuleNotFoundError"):
        backends.find(backends.read("torn"), {})


def misfit(tmp_path: Path, body: str) -> Callable[[], object]:
    """A file with a class like `Good`, changed by ``body``, which is found and made."""
    file = tmp_path / "mine.py"
    parts = {
        "make": "def __init__(self, here): pass",
        "launch": "async def launch(self, node, token): ...",
        "delete": "async def delete(self, name, token, grace_s): ...",
        "observe": "async def observe(self): yield",
        "room": "async def room(self, group): ...",
    }
    name, _, code = body.partition(" ")
    parts[name] = code or "pass"
    file.write_text("class Mine:\n" + textwrap.indent("\n".join(parts.values()), "    "))
    choice = backends.read(f"{file}:Mine")
    return lambda: backends.make(backends.find(choice, {}), context(), choice.text)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("launch", r"has no method launch\(node, token\), which a Backend must have"),
        ("delete", r"has no method delete\(name, token, grace_s\)"),
        ("observe", r"has no method observe\(\)"),
        ("room", r"has no method room\(group\)"),
        (
            "launch async def launch(self, node): ...",
            r"has a launch\(self, node\); a Backend's is launch\(node, token\)",
        ),
        ("observe async def observe(self): ...", r"has an observe\(\) that returns once"),
        ("make def __init__(self): pass", r"must be made from one argument, a BackendContext, and takes \(\)"),
        ("make def __init__(self, here): raise OSError('no cluster')", r"cannot be made: OSError: no cluster"),
        ("make def __init__(self, here): here.options(a='1')['b']", r"cannot be made: KeyError"),
    ],
)
def test_a_class_that_does_not_fit(tmp_path: Path, body: str, said: str) -> None:
    """The method that is missing, or takes other arguments, is named; so is a constructor that is none of ours."""
    with pytest.raises(SpecError, match=said):
        misfit(tmp_path, body)()


def test_a_function_that_makes_one() -> None:
    """A function will do in place of a class; what it returns must fit all the same."""
    assert isinstance(backends.make(Good, context(), "good"), Good)
    with pytest.raises(SpecError, match=r"has no method launch"):
        backends.make(lambda here: object(), context(), "thing")


def test_a_file_does_not_take_the_name_of_a_module(tmp_path: Path) -> None:
    """A backend in json.py is found, and `json` stays what it is for everybody else."""
    (tmp_path / "json.py").write_text("class Mine: pass")
    import json

    with pytest.raises(SpecError, match="has no method launch"):
        backends.find(backends.read("json.py:Mine", str(tmp_path)), {})
    assert sys.modules["json"] is json


def test_what_a_backend_is_made_from() -> None:
    """A node's variables say whose agent it is, and never the token, which shows in nothing that is printed either."""
    here = context(env={"PET_X": "1"}, args="queue=a")
    assert here.environment(NODE) == {
        "PET_X": "1",
        "DLROVER_JOB": "j",
        "DLROVER_RUN": "r1",
        "DLROVER_MASTERS": "m1:1,m2:2",
        "DLROVER_NODE": "worker-1-0",
        "DLROVER_NPROC": "4",
    }
    assert "secret" not in repr(here)
    assert here.options(queue="", hosts="x") == {"queue": "a", "hosts": "x"}
    with pytest.raises(SpecError, match="there is no 'queue' among the backend's arguments; there are: host="):
        here.options(host="")
    with pytest.raises(SpecError, match="'queue' is not KEY=VALUE"):
        context(args="queue").options(queue="")


def test_a_master_makes_the_backend_of_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher wrote down makes the same backend in every master; local goes through the same door."""
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(f"""
        import sys
        Good = sys.modules[{__name__!r}].Good
    """)
    )
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("DLROVER_RUN_MARK", "x")
    spec = JobSpec("j", (GroupSpec("worker", 2, 2),)).to_json()
    settings = Settings(spec, "r1", "memory:", str(tmp_path), (), 1, "script", node_host="/n.sock", masters=("m:1",))
    choice = backends.read("./mine.py:Good:queue=q", str(tmp_path))
    apart = cli_backends.settled(choice, ("--nnodes", "2", "train.py"))
    made = cli_backends.made(Settings(**{**_fields(settings), **apart._asdict()}), "a-secret-token")
    assert type(made).__name__ == "Good"
    here: BackendContext = made.here  # type: ignore[attr-defined]
    assert (here.job, here.run, here.masters, here.token) == ("j", "r1", ("m:1",), "a-secret-token")
    assert here.command[0] == sys.executable
    assert here.command[-3:] == here.arguments == ("--nnodes", "2", "train.py")
    assert here.env["PET_NNODES"] == "2"
    assert "DLROVER_RUN_MARK" not in here.env
    assert Path(here.directory).is_dir()
    assert type(cli_backends.made(settings, "a-secret-token")).__name__ == "LocalBackend"


def _fields(settings: Settings) -> dict[str, Any]:
    import dataclasses

    return {one.name: getattr(settings, one.name) for one in dataclasses.fields(settings)}


@pytest.mark.slow_loop(reason="a command that ends at once may import what it needs")
def test_a_wrong_backend_ends_the_command_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 within a second, in one line that names the method: nothing was started, and nothing is left."""
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def __init__(self, here): pass\n    async def launch(self, node, token): ...\n"
    )
    (tmp_path / "train.py").touch()
    began = time.monotonic()
    given = ("--state-dir", str(tmp_path / "state"), "--backend", f"{tmp_path}/mine.py:Mine")
    assert run.main([*given, "--nnodes", "2", str(tmp_path / "train.py")]) == 2
    assert dlrover.main(["master", *given, "--nnodes", "2", "--job-id", "j"]) == 2
    assert time.monotonic() - began < 2.0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all("has no method delete(name, token, grace_s), which a Backend must have" in line for line in said), said
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "local:x"], "local takes no arguments"),
        (["--local-nodes", "2"], "local-nodes: not with --backend"),
        (["--master", "m"], "master: not with --backend"),
        (["--standalone"], "standalone: not with --backend"),
        (["--standby", "1"], "standby: 1, but the nodes of --backend .*:Good have none"),
    ],
)
def test_what_does_not_go_with_a_backend(words: list[str], said: str) -> None:
    """Options that say where nodes are contradict a backend that starts them."""
    options = cli_options.parse(["--backend", f"{__file__}:Good", *words, "train.py"])
    with pytest.raises(SpecError, match=said):
        cli_backends.chosen(options)


def test_local_by_its_name() -> None:
    """``--backend local --nnodes 3`` are three nodes on this host."""
    options = cli_options.parse(["--backend", "local", "--nnodes", "3", "train.py"])
    assert cli_backends.chosen(options) is None
    assert options.local_nodes == 3
    assert not cli_options.meeting(options).joining


def test_a_launched_job_of_several_nodes_needs_no_place_to_meet() -> None:
    """With a scheduler ``--nnodes 2`` asks for no rendezvous."""
    options = cli_options.parse(["--backend", f"{__file__}:Good", "--nnodes", "2:4", "train.py"])
    assert not cli_options.meeting(options).joining
    assert cli_options.spec(options, "j", 1).joining is False
    assert cli_backends.masters(options, "h:1") == ("h:1",)
    options.masters = "a, b:7"
    assert cli_backends.masters(options, "h:1") == ("h:1", "a:29400", "b:7")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "local"], "nodes are another scheduler's"),
        (["--masters", "a"], "masters: 'a'"),
        (["train.py"], "ARGUMENTS: 'train.py'"),
        (["--backend", f"{__file__}:Good", "--nnodes", "2"], "name the job, the same on every host"),
    ],
)
def test_masters_alone(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`dlrover master` refuses what it could not do, and a job without a name that all hosts share."""
    assert dlrover.main(["master", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_master_that_ends_closes_its_backend() -> None:
    """A backend without `close` needs none; an error of somebody's own code keeps no master from its end."""
    asked: list[str] = []

    class Closes(Good):
        async def close(self) -> None:
            """Fails."""
            asked.append("close")
            raise RuntimeError("somebody's own")

    async def all_of_them() -> None:
        for one in (None, Good(context()), Closes(context())):
            await cli_backends.closed(one)

    asyncio.run(all_of_them())
    assert asked == ["close"]

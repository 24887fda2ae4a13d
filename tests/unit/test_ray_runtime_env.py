"""A job's runtime environment on Ray: read once where the command is typed, with what its files say, and the same ever after."""

from __future__ import annotations

import asyncio
import json
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest
from ray_store import Store

from dlrover_adapters.cli import backends, ray_flags
from dlrover_adapters.cli import options as cli_options
from dlrover_backends.ray import mastery, names, private, requirements, runtime_env, settings
from dlrover_backends.ray.client import RayBackend
from dlrover_backends.ray.names import Run
from dlrover_core import BackendContext
from dlrover_core.errors import SpecError
from dlrover_core.runtime.backend import GroupSize, Wanted
from dlrover_core.testing.backend_stand import make_launch

PINNED = """\ufeff--index-url https://example.org/simple  # ours
# what follows is locked
numpy==2.1 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via torch
torch==2.9 ; python_version >= "3.10"

pkg @ https://example.org/a.whl#sha256=1
"""
PINNED_LINES = [
    "--index-url https://example.org/simple",
    "numpy==2.1     --hash=sha256:aa     --hash=sha256:bb",
    'torch==2.9 ; python_version >= "3.10"',
    "pkg @ https://example.org/a.whl#sha256=1",
]
HOST = "-r ${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}/on-the-host.txt"


@pytest.fixture(name="folder")
def made_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with requirements files, one of which names others, and with a file of conda's; commands are typed elsewhere."""
    here = tmp_path / "typed"
    for one in (here, tmp_path / "more"):
        one.mkdir()
    (here / "pinned.txt").write_text(PINNED, encoding="utf-8")
    (here / "nested.txt").write_text(f"-r ../more/a.txt\n--requirement=pinned.txt\n{HOST}\nlast\n", encoding="utf-8")
    (tmp_path / "more" / "a.txt").write_text("-r 'b c.txt'\n-rb\\ c.txt\none\n", encoding="utf-8")
    (tmp_path / "more" / "b c.txt").write_text("-r a.txt\ntwo\n", encoding="utf-8")
    (tmp_path / "more" / "env.yml").write_text(
        "name: x\ndependencies:\n- python=3.11\n- pip:\n  - -r a.txt\n", encoding="utf-8"
    )
    monkeypatch.chdir(here)
    monkeypatch.delenv(runtime_env.SUBMITTED, raising=False)
    return here


def read(folder: Path, **env: object) -> dict[str, Any]:
    """What a file of it says, with what its files say."""
    (folder / "env.json").write_text(json.dumps(env), encoding="utf-8")
    return runtime_env.read("env.json", str(folder))


@pytest.mark.parametrize("by", ["pip", "uv"])
def test_lines_of_requirements_files_stand_in_their_place(folder: Path, by: str) -> None:
    """Comments go and continued lines are joined, as by pip; files that a file names are relative to it, and count once."""
    assert read(folder, **{by: "pinned.txt"}) == {by: PINNED_LINES}
    nested = ["two", "one", *PINNED_LINES, HOST, "last"]
    assert read(folder, **{by: f"{folder}/nested.txt"}) == {by: nested}
    assert read(folder, **{by: {"packages": "nested.txt", f"{by}_check": True}}) == {
        by: {"packages": nested, f"{by}_check": True}
    }
    assert read(folder, **{by: ["first", "-r ../more/a.txt", HOST]}) == {by: ["first", "two", "one", HOST]}
    given = {by: ["--require-hashes", "-e /shared/pkg", "a>=1  # why", f"-c {requirements.SENT}/c.txt"]}
    assert read(folder, **given) == given


def test_what_a_file_of_conda_says_stands_in_its_place(folder: Path) -> None:
    """A requirements file in there is relative to it. A name, and a folder, are of environments that hosts have."""
    whole = {"name": "x", "dependencies": ["python=3.11", {"pip": ["two", "one"]}]}
    assert read(folder, conda="../more/env.yml") == {"conda": whole}
    inline = {"dependencies": [{"pip": ["-r ../more/a.txt"]}]}
    assert read(folder, conda=inline) == {"conda": {"dependencies": [{"pip": ["two", "one"]}]}}
    assert read(folder, conda="base") == {"conda": "base"}
    assert read(folder, conda="/opt/envs/a") == {"conda": "/opt/envs/a"}


def test_what_was_read_is_read_again_as_it_is(folder: Path) -> None:
    """Masters elsewhere read what the launcher has read, and get the same; a text of JSON has its files, too."""
    env = {"pip": "nested.txt", "conda": "../more/env.yml", "working_dir": ".", "py_modules": ["../more", "s3://a.zip"]}
    first = read(folder, **env)
    assert first["py_modules"] == [str(folder.parent / "more"), "s3://a.zip"]
    assert runtime_env.read(json.dumps(env), str(folder)) == first
    assert runtime_env.read(json.dumps(first), "/nowhere") == first
    assert runtime_env.read(runtime_env.held(first), "/nowhere") == first


BIG = "x" * runtime_env.BYTES_MAX


@pytest.mark.parametrize(
    ("env", "word"),
    [
        (
            {"pip": "none.txt"},
            r"/typed/none\.txt, which pip of .* cannot be read: No such file.*; name it from the folder",
        ),
        ({"uv": {"packages": "none.txt"}}, r"/typed/none\.txt, which uv of"),
        ({"pip": ["a", "-r none.txt"]}, r"/typed/none\.txt, which pip of"),
        ({"pip": "."}, "cannot be read: Is a directory"),
        ({"conda": "none.yaml"}, r"/typed/none\.yaml, which conda of .* cannot be read"),
        ({"conda": "list.yaml"}, r"list\.yaml, which conda of .* holds no mapping"),
        (
            {"pip": ["-c limits.txt"]},
            r"'-c limits\.txt' in pip .*is -c \$\{RAY_RUNTIME_ENV_CREATE_WORKING_DIR\}/limits",
        ),
        ({"uv": ["--constraint=limits.txt"]}, "Write its versions into the requirements"),
        ({"pip": ["-r https://example.org/r.txt"]}, "Ray reads no address there"),
        ({"pip": "big.txt"}, r"has more than 1024 KiB; put it into working_dir"),
        ({"pip": [BIG]}, r"has 512 KiB with the files .*write pip: \['-r \$\{RAY_RUNTIME"),
        ({"env_vars": {"A": BIG[: 100 * 1024]}}, r"env_vars have 100 KiB, and Ray takes 96"),
    ],
)
def test_what_cannot_be_carried(folder: Path, env: dict[str, object], word: str) -> None:
    """It is told before anything is started, with the file and what to do."""
    (folder / "big.txt").write_text(f"{BIG}\n{BIG}\n", encoding="utf-8")
    (folder / "list.yaml").write_text("- a\n", encoding="utf-8")
    with pytest.raises(SpecError, match=word):
        read(folder, **env)


def test_a_value_that_is_no_text(folder: Path) -> None:
    """YAML makes a date of what looks like one, which Ray would refuse at the first launch."""
    (folder / "env.yaml").write_text("env_vars: {A: 2024-01-01}", encoding="utf-8")
    with pytest.raises(SpecError, match=r"'env\.yaml'.* date .*; write that value in quotes"):
        runtime_env.read("env.yaml", str(folder))


def test_what_hosts_read(folder: Path) -> None:
    """What Ray gives to the tool as it is needs no file here: constraints by a whole path, and what lies at an address."""
    for env in (
        {"pip": ["-c /image/limits.txt", "-c https://example.org/c.txt"]},
        {"uv": ["-r https://example.org/r.txt"]},
    ):
        assert read(folder, **env) == env


def test_what_ray_has_read_is_left_as_it_is(folder: Path) -> None:
    """The environment of ``ray job submit`` names nothing of this host."""
    outer = {"pip": ["-r /image/requirements.txt", "-c limits.txt"], "env_vars": {"A": "1"}}
    assert runtime_env.read("", str(folder), outer) == outer
    assert runtime_env.read('{"env_vars": {"B": "2"}}', str(folder), outer)["pip"] == outer["pip"]


def test_a_broken_file_is_told_without_its_words(folder: Path) -> None:
    """They may be secrets."""
    (folder / "env.yaml").write_text("env_vars:\n  PASSWORD: sword: fish\n", encoding="utf-8")
    with pytest.raises(SpecError, match=r"mapping values are not allowed here, line 2, column 18") as raised:
        runtime_env.read("env.yaml", str(folder))
    assert "fish" not in str(raised.value)


@pytest.mark.parametrize("form", [("--backend", "ray", "--runtime-env"), ("--backend",)])
def test_the_launcher_alone_reads_the_files(folder: Path, form: tuple[str, ...]) -> None:
    """Whatever becomes of them, each master that is started hours later has what they said; no word of it is in an argument."""
    (folder / "train.py").touch()
    (folder / "env.yaml").write_text("pip: pinned.txt\nenv_vars: {PASSWORD: swordfish}", encoding="utf-8")
    last = "env.yaml" if len(form) == 3 else "ray:runtime_env=env.yaml,resources=CPU%3D1"
    options = cli_options.parse([*form, last, "train.py"])
    choice = backends.chosen(options)
    assert choice is not None
    for name in ("env.yaml", "pinned.txt"):
        (folder / name).unlink()
    assert "swordfish" not in f"{choice.text}{options}"
    env = {"pip": PINNED_LINES, "env_vars": {"PASSWORD": "swordfish"}}
    for cwd in (str(folder), "/"):
        assert order_of(choice.args, cwd)["runtime_env"] == env
    told = settings.read(BackendContext("j", "r", ("m:1",), "t", args=choice.args))
    assert not stat.S_IMODE(Path(told.runtime_env).parent.stat().st_mode) & 0o077, "others may look in"
    assert ray_flags.carried(choice).args != choice.args  # a launcher's masters read its own memory


def test_a_backend_reads_its_file_once(folder: Path) -> None:
    """Orders that come later are those of the beginning, though the file is another one by then, or gone."""
    (folder / "env.yaml").write_text("env_vars: {A: '1'}", encoding="utf-8")
    backend = RayBackend(context("runtime_env=env.yaml", str(folder)))
    for change in (lambda: (folder / "env.yaml").write_text("env_vars: {A: '2'}"), (folder / "env.yaml").unlink):
        cast("Callable[[], object]", change)()
        assert backend._order(make_launch())["runtime_env"] == {"env_vars": {"A": "1"}}


# ---- what standbys fit


def context(args: str, cwd: str) -> BackendContext:
    """A run, as a master in this folder knows it."""
    return BackendContext("j", "r", ("m:1",), "t", command=(cwd, "-u"), arguments=("train.py",), cwd=cwd, args=args)


def order_of(args: str, cwd: str) -> Mapping[str, Any]:
    """What such a master orders."""
    return RayBackend(context(args, cwd))._order(make_launch(0, 1))


def over_the_socket(*words: object) -> tuple[Any, ...]:
    """What a master says, as the desk hears it."""
    return tuple(msgpack.unpackb(cast(bytes, msgpack.packb(words)), use_list=False))


def test_lists_reach_ray_as_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray takes no tuples, of which the desk's socket makes all lists; of modules the folders are sent."""
    cluster = pytest.importorskip("dlrover_backends.ray.cluster").Cluster(Run("j", "r"))
    store, uploaded = Store(), list[Mapping[str, Any]]()
    monkeypatch.setattr(private, "get", store.get)
    monkeypatch.setattr(private, "put", store.put)
    monkeypatch.setattr(private, "uploaded", lambda env: uploaded.append(env) or {**env, "py_modules": ["gcs://b.zip"]})
    [env] = over_the_socket({"pip": ["a"], "uv": {"packages": ["b"]}, "py_modules": ["/code"]})
    assert env["pip"] == ("a",)
    sent = cluster.sent(env)
    assert uploaded == [{"pip": ["a"], "uv": {"packages": ["b"]}, "py_modules": ["/code"]}]
    assert sent == {**uploaded[0], "py_modules": ["gcs://b.zip"]}
    [plan] = over_the_socket(mastery.Plan("j", "r", ("train.py",), "t", runtime_env=sent).to_map())
    assert mastery.of_map(plan).runtime_env == sent


def test_standbys_fit_the_nodes_of_masters_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters beside the command name folders, those in the cluster addresses: both mean the same standbys.

    Other variables in the environment, and a folder that had to be sent anew, make other nodes.
    """
    desk = pytest.importorskip("dlrover_backends.ray.desk")
    cluster = pytest.importorskip("dlrover_backends.ray.cluster").Cluster(Run("j", "r"))
    store, version = Store(), ["1"]
    monkeypatch.setattr(private, "get", store.get)
    monkeypatch.setattr(private, "put", store.put)
    monkeypatch.setattr(private, "is_there", lambda _: version == ["1"])
    monkeypatch.setattr(
        private, "uploaded", lambda env: {**env, "working_dir": f"gcs://{version[0]}.zip"} | {"excludes": None}
    )

    def shapes(env: Mapping[str, Any], cwd: str) -> set[str]:
        """As the desk knows those of a node and of the standbys that a master wants."""
        backend = RayBackend(context(f"resources=CPU%3D1,runtime_env={runtime_env.held(env)}", cwd))
        backend._warm.sized(Wanted((GroupSize("worker", "", 2, 4, standby=1),)), 1)
        order = backend._order(make_launch(0, 1))
        fit = backend._warm.fit(make_launch(0, 1), order)
        served = desk.Desk.__new__(desk.Desk)
        kept, asked = list[Any](), list[str]()

        class Standbys:
            async def level(self, groups: list[Any]) -> None:
                kept.extend(groups)

            def fitting(self, _: str, shape: str, *__: object) -> list[str]:
                asked.append(shape)
                return []

        class Lookout:
            async def look(self, *, anew: bool) -> None:
                pass

            def wake(self) -> None:
                pass

        async def told() -> None:
            served._ordering = asyncio.Lock()
            served._cluster, served._standbys, served._lookout = cluster, Standbys(), Lookout()
            await served._answer(over_the_socket("reserve", 1, backend._warm.reserves()))
            await served._answer(over_the_socket("launch", 1, order, fit))

        monkeypatch.setattr(cluster, "admit", lambda _: None)
        monkeypatch.setattr(cluster.deletions, "names", tuple)
        made = pytest.importorskip("dlrover_backends.ray.cluster").Made(new=True)
        monkeypatch.setattr(cluster, "create", lambda *_, **__: made)
        asyncio.run(told())
        return {*(one.shape for one in kept), *asked}

    here = {"working_dir": str(folder), "env_vars": {"A": "1", "B": "2"}, "pip": ["a"]}
    [shape] = shapes(here, str(folder))
    sent = cluster.sent(here)
    assert not names.folders(sent)
    assert shapes(json.loads(json.dumps(sent)), "/elsewhere") == {shape}
    assert shapes({**here, "env_vars": {"A": "2", "B": "2"}}, str(folder)) != {shape}
    version[0] = "2"
    assert shapes(here, str(folder)) == {shape}, "what is there is not asked every two seconds"
    assert cluster.sent(here)["working_dir"] == "gcs://2.zip"
    assert shapes(here, str(folder)) != {shape}


def test_a_name_of_a_text_hides_it() -> None:
    """A runtime environment that was typed as JSON may have secrets: no error repeats it."""
    with pytest.raises(SpecError, match="the text is not JSON") as refused:
        runtime_env.read('{"env_vars": {"A": "swordfish"', "/")
    assert not re.search("swordfish", str(refused.value))

"""`dlrover-run` with ``DLROVER_NODE``: what the environment says, what is missing, and where files may be made."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from dlrover_adapters.cli import node, run
from dlrover_adapters.cli import options as cli_options
from dlrover_core.errors import SpecError
from dlrover_core.spec import JobSpec

TOLD = {
    "DLROVER_NODE": "trainer-3-1",
    "DLROVER_MASTERS": "m1, m2:7",
    "DLROVER_JOB": "pretrain",
    "DLROVER_TOKEN": "a-secret-token",
}


def test_the_node_is_taken_out_of_the_environment() -> None:
    """Workers do not inherit what makes a command an agent; a `dlrover-run` in a script is a launcher again."""
    environ = {**TOLD, "DLROVER_RUN": "r1", "DLROVER_HOST": "gpu-7", "PATH": "/bin"}
    told = node._told(environ)
    assert (told["DLROVER_NODE"], told["DLROVER_RUN"], told["DLROVER_HOST"]) == ("trainer-3-1", "r1", "gpu-7")
    assert environ == {"DLROVER_TOKEN": "a-secret-token", "DLROVER_HOST": "gpu-7", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"DLROVER_MASTERS": ""},
            "DLROVER_MASTERS: missing, and with DLROVER_NODE=trainer-3-1 this command is that node's agent",
        ),
        ({"DLROVER_JOB": " "}, "DLROVER_JOB: missing"),
        ({"DLROVER_TOKEN": ""}, "DLROVER_TOKEN: missing"),
        ({"DLROVER_NPROC": "many"}, "DLROVER_NPROC: 'many' is not a number of workers"),
        ({"DLROVER_NPROC": "0"}, "DLROVER_NPROC: '0'"),
        ({"DLROVER_MASTERS": "m:x"}, "DLROVER_MASTERS: the port of 'm:x'"),
        ({"DLROVER_TOKEN_FILE": "/no/such/file"}, "/no/such/file cannot be read"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, str],
    said: str,
) -> None:
    """Each ends the command with 2, in a line that names the variable; nothing is started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(node.signal, "signal", lambda *_: None)
    for name, value in {**TOLD, **change}.items():
        monkeypatch.setenv(name, value)
    assert run.main(["train.py"]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_what_launchers_alone_need_is_left_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's own command line serves: its log, sizes, backend and token file need not be there on the node."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    words = [
        "--backend",
        "nobody:x",
        "--nnodes",
        "2:4",
        "--log",
        "etcd://nowhere/x",
        "--token-file",
        "/not/here",
        "--bind",
        "x",
    ]
    options = cli_options.parse([*words, "--nproc-per-node", "8", "--set", "launch_s=7", "train.py", "--lr", "1"])
    settings = node._settings(
        options, node._told({**TOLD, "DLROVER_NPROC": "2", "DLROVER_RUN": "r1", "DLROVER_ADDRESS": "10.0.0.7"})
    )
    assert (settings.group, settings.nproc, settings.run) == ("trainer", 2, "r1")
    assert settings.masters == ("m1:29400", "m2:7")
    assert settings.address == "10.0.0.7"
    assert settings.argv == ("train.py", "--lr", "1")
    assert (settings.log, settings.joining) == ("", False)
    assert JobSpec.from_json(settings.spec).launch_s == 7


def test_a_node_of_no_group_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a job file the node's group must be one of its groups."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    options = cli_options.parse(["--role-groups", "rollout:2,judge:1", "train.py"])
    with pytest.raises(SpecError, match=r"'trainer-3-1' is of group 'trainer', and the job has: rollout, judge"):
        node._settings(options, node._told(dict(TOLD)))


def test_a_standby_has_a_group_and_a_seat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a node's name it is set up as any node of its group, and says its seat; half of that is told."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    told = {key: value for key, value in TOLD.items() if key != "DLROVER_NODE"} | {"DLROVER_STANDBY": "trainer"}
    settings = node._settings(
        cli_options.parse(["--standby", "1", "train.py"]), node._told({**told, "DLROVER_SEAT": "u7"})
    )
    assert (settings.group, settings.seat) == ("trainer", "standby:u7")
    with pytest.raises(SpecError, match=r"DLROVER_SEAT: missing, and with DLROVER_STANDBY=trainer"):
        node._told(dict(told))
    with pytest.raises(SpecError, match=r"beside DLROVER_NODE=trainer-3-1: leave one of them out"):
        node._told({**TOLD, "DLROVER_STANDBY": "trainer", "DLROVER_SEAT": "u7"})


def test_a_token_in_a_file(tmp_path: Path) -> None:
    """A mounted secret will do in place of a variable."""
    (tmp_path / "token").write_text("of-a-secret\n")
    assert node._token({**TOLD, "DLROVER_TOKEN_FILE": str(tmp_path / "token")}) == "of-a-secret"


@pytest.fixture
def rootless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system with a user whom nobody knows, and no usual place for files."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    def nowhere() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(node.pwd, "getpwuid", unknown)
    monkeypatch.setattr(node.tempfile, "gettempdir", nowhere)
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)


def test_homes_of_an_unknown_user(rootless: None) -> None:
    """Libraries find a name, a home and a place for files where the system has none."""
    environ = {"HOME": "/nonexistent"}
    node._find_homes(environ)
    uid = str(os.getuid())
    assert environ == {"USER": uid, "LOGNAME": uid, "TMPDIR": "/dev/shm", "HOME": "/dev/shm"}


def test_no_place_for_files(rootless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing takes files, that is said, with what to mount."""
    monkeypatch.setattr(node.os, "access", lambda *_: False)
    with pytest.raises(SpecError, match="no directory takes files: neither TMPDIR, nor /tmp, nor /dev/shm; mount one"):
        node._find_homes({})


def test_every_variable_is_documented() -> None:
    """docs/backends.md names each variable that an agent reads."""
    page = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
    assert [name for name in node.VARIABLES if f"`{name}`" not in page] == []

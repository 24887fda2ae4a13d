"""Wrong command lines: each is answered before any process starts, in one line that names what is wrong, with 2."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlrover_adapters.cli import ahead, before, programs, run, usage
from dlrover_adapters.torch import devices

from . import wrong_lines

LINES = tuple(wrong_lines.lines())
OURS = ("PET_", "DLROVER_", "TORCH_ELASTIC_")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory with all that the lines name; nothing can be started from it."""
    wrong_lines.lay(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in [one for one in os.environ if one.startswith(OURS)]:
        monkeypatch.delenv(name)

    def started(*_: object) -> None:
        raise AssertionError("an agent was started")

    monkeypatch.setattr(ahead, "started", started)
    monkeypatch.setattr(devices, "count", lambda _kind: 0)
    return tmp_path


def code_of(arguments: tuple[str, ...]) -> int:
    """The exit status of the command in this process."""
    try:
        return run.main(list(arguments))
    except SystemExit as end:  # argparse's
        return int(end.code or 0)


def test_there_are_two_hundred() -> None:
    """And of many kinds."""
    assert len({(one.arguments, one.env) for one in LINES}) >= 200
    assert len({one.kind for one in LINES}) >= 40


@pytest.mark.parametrize("kind", dict.fromkeys(one.kind for one in LINES))
def test_a_wrong_line_ends_with_2_and_one_line(
    folder: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what is wrong and shows the value."""
    for wrong in (one for one in LINES if one.kind == kind):
        with monkeypatch.context() as context:
            for name, value in wrong.env:
                context.setenv(name, value)
            began = time.thread_time()
            code = code_of(wrong.arguments)
            took_s = time.thread_time() - began
        said = capsys.readouterr()
        assert code == usage.EX_USAGE, wrong
        assert said.out == "", wrong
        assert said.err.startswith("dlrover-run: error: "), wrong
        assert said.err.count("\n") == 1, wrong
        assert said.err.endswith("\n"), wrong
        assert wrong.names in said.err, wrong
        assert len(said.err) < usage.LINE_CHARS_MAX + 100, wrong
        assert took_s < 1.0, wrong


@pytest.mark.parametrize(
    "arguments",
    [
        ("--nproc-per-node", "99999999", "ok.py"),
        ("-m", "no.such.mod"),
        ("--nproc-per-node", "gpu", "ok.py"),
        ("--rdzv-conf", "nope=1", "ok.py"),
        ("--log", "etcd://h:99999", "ok.py"),
    ],
)
def test_it_takes_less_than_a_second(folder: Path, arguments: tuple[str, ...]) -> None:
    """As a process of its own. Counted is what it computes: the machine that tests run on is busy with others."""
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = "import sys; from dlrover_adapters.cli.run import main; sys.exit(main())"
    line = [sys.executable, "-c", command, *arguments]
    told = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    after_s = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (told.returncode, told.stdout, told.stderr.count("\n")) == (2, "", 1), told.stderr
    assert (after_s.ru_utime + after_s.ru_stime) - (before_s.ru_utime + before_s.ru_stime) < 1.0


# ---- what is right stays right


@pytest.mark.parametrize(
    "name",
    [
        "json",
        "json.tool",
        "xml.etree.ElementTree",
        "sys",
        "zipimport",
        "package",
        "package.inner",
        "namespace.there",
        "dynamic.whatever",
        "namespace",
        "os.path",
        "dlrover_adapters.cli.run",
    ],
)
def test_modules_that_are_there_are_found(folder: Path, name: str) -> None:
    """Also those of folders without __init__, built-in ones, and what a package's own code may bring."""
    (folder / "dynamic").mkdir()
    (folder / "dynamic" / "__init__.py").write_text("__path__ = ['/elsewhere']\n")
    assert programs.missing(name, str(folder)) == ""


def test_packages_are_not_imported_to_look_for_their_modules(folder: Path) -> None:
    """What a package does when it is imported, it does in workers."""
    (folder / "package" / "__init__.py").write_text("raise SystemExit('imported')\n")
    assert "no module 'package.nosuch'" in programs.missing("package.nosuch", str(folder))
    assert programs.missing("package.inner", str(folder)) == ""


def test_programs_that_are_there_are_taken(folder: Path) -> None:
    """A script, a folder and an archive with a __main__, a module with a hyphen, a program of the PATH and one by its path."""
    import zipfile

    from dlrover_adapters.agent.config import Mode

    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").touch()
    (folder / "my-script.py").touch()
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    with zipfile.ZipFile(folder / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "")
    for mode, program in (
        (Mode.SCRIPT, "ok.py"),
        (Mode.SCRIPT, "app"),
        (Mode.SCRIPT, "app.pyz"),
        (Mode.RUN_PATH, "app"),
        (Mode.MODULE, "my-script"),
        (Mode.MODULE, "app"),
        (Mode.MODULE, "json.tool"),
        (Mode.COMMAND, "true"),
        (Mode.COMMAND, "./run.sh"),
    ):
        programs.check(mode, (program,), ("json", "os.path"))


def test_torchruns_word_for_any_port_is_taken(folder: Path) -> None:
    """``--rdzv-endpoint=localhost:0`` is how torchrun runs several jobs on one host."""
    line = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-conf", "rank=0"]
    assert run.main(["--show-config", *line, "ok.py"]) == 0


def test_more_workers_than_cpus_are_worth_a_word(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not refused; what memory cannot hold is."""
    monkeypatch.setattr(before, "_cpus", lambda: 2)
    with pytest.raises(AssertionError, match="an agent was started"):
        run.main(["--nproc-per-node", "3", "ok.py"])
    assert capsys.readouterr().err == "dlrover-run: 3 workers share 2 CPUs: they will wait for one another\n"
    monkeypatch.setattr(before, "_memory_bytes", lambda: 2**30)
    assert run.main(["--nproc-per-node", "64", "ok.py"]) == 2
    assert "64 workers and 1 agents take at least 2.1 GiB, and this host has 1.0 GiB" in capsys.readouterr().err


def test_a_file_that_may_not_be_read_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every worker fails for it. Root may read everything, so the answer of the kernel is told."""
    from dlrover_core.errors import SpecError

    monkeypatch.setattr(os, "access", lambda *_args, **_words: False)
    with pytest.raises(SpecError, match="cannot be read by this user"):
        programs._check_script("ok.py")


@pytest.mark.parametrize("call", ["pidfd_open", "memfd_create"])
def test_a_kernel_that_lacks_what_we_need_is_told(
    folder: Path, call: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old kernel, or a sandbox: with the call's name, before anything starts; the command line is right."""

    def refused(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, call, refused)
    assert run.main(["ok.py"]) == run.EX_SOFTWARE
    said = capsys.readouterr().err
    assert f"no process can be kept here: {call}: Function not implemented; it needs Linux" in said
    assert "dlrover doctor" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "line", [("good.py",), ("-m", "pdb"), ("--no-python", "true")], ids=["script", "module", "program"]
)
def test_a_current_folder_that_was_removed(
    folder: Path, line: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said before anything starts, and what to do."""
    gone = folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert code_of(line) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith(
        "dlrover-run: error: cwd: the current folder was removed; cd to one that is there"
    )


def test_a_misspelt_command_is_answered_with_the_one_that_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where argparse lists all commands."""
    parser = usage.Parser(prog="dlrover")
    parser.add_subparsers(metavar="COMMAND").add_parser("status")
    with pytest.raises(SystemExit):
        parser.parse_args(["statsu"])
    assert "(did you mean status?)" in capsys.readouterr().err

"""`dlrover simulate`, as people call it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover_adapters.cli import main
from dlrover_adapters.cli.places import FAILED, INTERRUPTED, OK, USAGE

SMALL = ("simulate", "--nodes", "8", "--days", "2", "--set", "rate=100", "--no-range")


def simulate(*words: str) -> int:
    """The exit code."""
    return main.main(["simulate", *words])


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has goodput of ours and of both peers with ranges, time by class, causes, phases, and marked constants."""
    assert simulate("--nodes", "64", "--days", "2", "--set", "rate=10", "--seed", "4") == OK
    told = capsys.readouterr()
    for words in (
        "default", "restart-all", "restart-async", "goodput", "3 seeds", "doubled, halved",
        "where the time went", "training", "what struck", "faulty GPU",
        "mean time to recover", "replay", "assumed", "measured", "arXiv 2407.21783",
    ):  # fmt: skip
        assert words in told.out
    assert "Traceback" not in told.err


def test_json_says_the_same_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """For programs: one object, the same for the same seed, with nothing in it of the machine or the time of day."""
    texts = []
    for _ in range(2):
        assert main.main([*SMALL, "--json"]) == OK
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    told = json.loads(texts[0])
    assert [one["policy"] for one in told["policies"]] == ["default", "restart-all", "restart-async"]
    for one in told["policies"]:
        assert sum(one["by_class_s"].values()) == pytest.approx(one["virtual_s"], rel=1e-6)
    assert told["set"] == {"rate": "100"}


def test_ranges_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """The range over seeds holds the goodput that is told, and so does that over the assumed constants; both can be left out."""
    words = ("--nodes", "8", "--days", "2", "--set", "rate=100", "--seeds", "4", "--json")
    assert simulate(*words) == OK
    for one in json.loads(capsys.readouterr().out)["policies"]:
        assert one["seeds_range"]["low"] < one["seeds_range"]["high"]
        for between in (one["range"], one["seeds_range"]):
            assert between["low"] <= one["goodput"] <= between["high"]
    assert simulate(*words, "--no-range") == OK
    told = json.loads(capsys.readouterr().out)["policies"]
    assert {(one["range"], one["seeds_range"]) for one in told} == {(None, None)}


def test_policies_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of settings is a policy of its own, beside the others, and its settings are told."""
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"checkpoint_every_s": 7200.0, "restart_pause_s": 5.0}))
    assert main.main([*SMALL, "--policy", "default", "--policy", str(mine), "--json"]) == OK
    told = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in told["policies"]] == ["default", "mine", "restart-all", "restart-async"]
    assert told["policies_set"] == {"mine": {"checkpoint_every_s": 7200.0, "restart_pause_s": 5.0}}
    assert told["policies"][1]["lost_s"] > told["policies"][0]["lost_s"]


def test_policies_of_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that are called the same, or as a policy of ours, are told by their paths: none hides another's settings."""
    files = [tmp_path / one for one in ("a/mine.json", "b/mine.json", "default.json", "alone.json")]
    for number, file in enumerate(files):
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"boot_s": 10.0 + number}))
    words = [word for file in files for word in ("--policy", str(file))]
    assert main.main([*SMALL, "--policy", "default", *words, "--json"]) == OK
    told = json.loads(capsys.readouterr().out)
    names = [*map(str, files[:3]), "alone"]
    assert [one["policy"] for one in told["policies"]] == ["default", *names, "restart-all", "restart-async"]
    assert told["policies_set"] == {name: {"boot_s": 10.0 + number} for number, name in enumerate(names)}


def test_a_wrong_policy_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong in a file is told with its name."""
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"boot_s": "soon"}))
    assert simulate("--policy", str(mine)) == USAGE
    assert f"{mine}: boot_s: a number is needed" in capsys.readouterr().err


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older Pythons cannot read TOML")
def test_a_policy_in_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A TOML file does, too."""
    mine = tmp_path / "mine.toml"
    mine.write_text("checkpoint_every_s = 300.0  # seconds\n")
    assert main.main([*SMALL, "--policy", str(mine)]) == OK
    assert "mine" in capsys.readouterr().out


def test_a_trace_is_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--trace leaves every event, a line of JSON each, in order."""
    assert main.main([*SMALL, "--trace", str(tmp_path / "run.jsonl")]) == OK
    events = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [one["seq"] for one in events] == list(range(1, len(events) + 1))
    assert events[0]["event"] == "JobCreated"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--nodes", "0"), "nodes: a whole number from 1 to 16384"),
        (("--days", "-1"), "days: a number above 0"),
        (("--days", "nan"), "days: a number above 0"),
        (("--spares", "1.5"), "spares: a number of hosts, or a share"),
        (("--failures", "llama"), "invalid choice"),
        (("--set", "boot_s"), "no KEY=VALUE"),
    ],
)
def test_wrong_options(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that cannot be is told with what could be, and exit code 2."""
    with pytest.raises(SystemExit) as left:
        simulate(*words)
    assert left.value.code == USAGE
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--set", "boot_z=3"), "did you mean boot_s"),
        (("--set", "qqqq=3"), "nothing is called 'qqqq'. There are "),
        (("--set", "boot_s=soon"), "boot_s: a number is needed"),
        (("--set", "rate=often"), "rate: failures per 1000 node-days"),
        (("--set", "silence_s=0.1"), "no such job: silence_s"),
        (("--policy", "restart-al"), "did you mean restart-all"),
        (("--policy", "/nowhere/mine.json"), "No such file"),
        (("--trace", "/nowhere/run.jsonl"), "No such file"),
        (("--set", "rate=1000000"), "lower rate"),
    ],
)
def test_wrong_settings(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """So is a setting, a policy or a file that is not there."""
    assert simulate("--nodes", "64", *words) == USAGE
    assert says in capsys.readouterr().err


def test_a_job_that_does_not_get_through(capsys: pytest.CaptureFixture[str]) -> None:
    """A job whose budget is spent has failed: the table is there, and the exit code is 1."""
    assert main.main([*SMALL, "--set", "max_restarts=0"]) == FAILED
    assert "failed" in capsys.readouterr().out


def test_ctrl_c() -> None:
    """Ctrl-C ends it at once, with 130 and without a traceback; until then progress is on stderr."""
    words = [sys.executable, "-m", "dlrover_adapters.cli.main", "simulate", "--nodes", "256", "--days", "365"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as process:
        assert process.stderr is not None
        assert b"default: day" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == INTERRUPTED
    assert out == b""
    assert b"Traceback" not in err

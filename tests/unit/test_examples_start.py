"""The examples that only the night runs as jobs start: each trains a little, alone and in this process."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from dlrover_adapters.cli import groups
from dlrover_adapters.cli import options as cli_options

pytest.importorskip("torch")

TORCH = Path(__file__).parents[2] / "examples" / "torch"


@pytest.fixture
def only_rank(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun tells the one rank of a world; the port is any free one."""
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)


def run(name: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """An example, as its program."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(TORCH / name), run_name="__main__")


@pytest.mark.usefixtures("only_rank")
def test_the_tiny_transformer_trains_saves_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A second start goes on where the first one ended."""
    for steps in ("1", "2"):
        place = ("--checkpoint", str(tmp_path / "tiny"), "--batch", "2", "--save-every", "1")
        run("fsdp2_tiny_transformer.py", monkeypatch, *place, "--steps", steps)
    said = capfd.readouterr().out
    assert re.fullmatch(r"step 1: loss [\d.]+\nresumed after step 1 with 1 ranks\nstep 2: loss [\d.]+\n", said), said


@pytest.mark.usefixtures("only_rank")
def test_elastic_data_counts_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of one epoch."""
    run("elastic_data.py", monkeypatch, "--folder", str(tmp_path / "data"), "--epochs", "1", "--loaders", "0")
    said = capfd.readouterr().out
    assert said.startswith("begins anew, 1 workers\n"), said
    assert said.endswith("each sample counts once in each epoch\n"), said


def test_the_job_file_of_trainers_and_rollouts_is_one() -> None:
    """It is read as `dlrover-run --job` reads it, and its programs are beside it."""
    options = groups.taken_in(cli_options.parse(["--job", str(TORCH / "trainers_and_rollouts.toml")]))
    spec = groups.spec(options, cli_options.job_name(options), groups.plans(options))
    assert [one.name for one in spec.groups] == ["trainer", "rollout", "evaluator"]


def test_each_kind_of_trainers_and_rollouts_plays_the_game() -> None:
    """The policy that rollout workers and the evaluator play with needs neither torch nor a job."""
    names = runpy.run_path(str(TORCH / "trainers_and_rollouts.py"), run_name="example")
    policy = [[0.0] * len(names["features"]([1.0] * names["SIGNS"])) for _ in range(names["ARMS"])]
    seen, arm, reward = names["play"](policy, greedy=True)
    assert (len(seen), arm, reward in (0.0, 1.0)) == (len(policy[0]), 0, True)

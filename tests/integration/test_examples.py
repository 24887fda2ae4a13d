"""The examples do what they say, under the launchers they name."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from running import BIN, Job, eventually

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCH, CHAOS = EXAMPLES / "torch", EXAMPLES / "chaos"
BOUND_S = 90.0


def torchrun(folder: Path, *words: str) -> str:
    """What two workers print under torchrun, to their end."""
    line = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", *words]
    return told(line, folder)


def told(line: Sequence[str], folder: Path, bound_s: float = BOUND_S) -> str:
    """What a command that succeeds prints."""
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=bound_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def succeeds(folder: Path, *words: str, job: str = "example") -> str:
    """What a job that succeeds prints under dlrover-run."""
    with Job(folder, *words, job=job) as one:
        assert one.ended(BOUND_S) == 0, one.said()
        assert one.left() == []
        return one.out.read_text()


@pytest.mark.nightly(
    reason="test_dlrover_run_demo.py, which learns the digits, and test_parity.py stand for it in make test"
)
@pytest.mark.timeout(280)
def test_ddp_digits_learns_the_same_under_both_launchers(tmp_path: Path) -> None:
    """The same script, losses and accuracy under dlrover-run and torchrun, bit for bit."""
    said = []
    for name in ("ours", "theirs"):
        words = [
            str(TORCH / "ddp_digits.py"),
            "--steps",
            "100",
            "--checkpoint",
            f"{name}.pt",
            "--curve",
            f"{name}.curve",
        ]
        if name == "ours":
            said.append(succeeds(tmp_path, "--nproc-per-node", "2", "--preload", "sklearn.datasets", *words))
        else:
            said.append(torchrun(tmp_path, *words))
    accuracy = re.search(r"accuracy on 360 held-out digits: ([0-9.]+) after 100 steps", said[0])
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9
    assert said[0] == said[1]
    curve = (tmp_path / "ours.curve").read_text()
    assert len(curve.splitlines()) == 100
    assert curve == (tmp_path / "theirs.curve").read_text()


@pytest.mark.nightly(
    reason="test_flash_checkpoint_loses_almost_nothing, which goes on from a checkpoint, stands for it in make test"
)
def test_ddp_digits_goes_on(tmp_path: Path) -> None:
    """Run again it goes on, not anew."""
    words = ["--nproc-per-node", "2", str(TORCH / "ddp_digits.py"), "--checkpoint", "ours.pt", "--curve"]
    succeeds(tmp_path, *words, "first.curve", "--steps", "100", job="first")
    succeeds(tmp_path, *words, "more.curve", "--steps", "110", job="again")
    assert [line.split()[0] for line in (tmp_path / "more.curve").read_text().splitlines()] == [
        str(n) for n in range(101, 111)
    ]


def test_flash_checkpoint_loses_almost_nothing(tmp_path: Path) -> None:
    """A worker that kills itself costs at most two saves' steps: memory is restored; every step made twice has one loss."""
    words = [str(TORCH / "flash_checkpoint.py"), "--checkpoint", "ckpts", "--steps", "80", "--die-at", "51"]
    said = succeeds(tmp_path, "--nproc-per-node", "2", *words, "--curve", "curve", job="flash")
    found = re.search(
        r"^begins anew\nbegins after step (\d+), restored from memory\naccuracy .* after 80 steps$", said, re.MULTILINE
    )
    assert found is not None, said
    assert 46 <= int(found[1]) <= 50
    curve = [line.split() for line in (tmp_path / "curve").read_text().splitlines()]
    assert {int(step) for step, _ in curve} == set(range(1, 81))
    assert len({tuple(one) for one in curve}) == 80


@pytest.mark.nightly(reason="test_elastic_data.py, with a killed worker and a resize, stands for it in make test")
def test_elastic_data_counts_each_sample_once(tmp_path: Path) -> None:
    """A worker that kills itself changes nothing: each sample is once in each epoch of what all ranks wrote down."""
    words = (str(TORCH / "elastic_data.py"), "--folder", "data", "--die-at", "25")
    said = succeeds(tmp_path, "--nproc-per-node", "2", *words)
    found = re.search(
        r"^begins anew, 2 workers\nbegins after step (\d+), with (\d+) samples trained, 2 workers\n(?:epoch \d: loss .*\n){2}"
        r"600 samples, 2 epochs, 76 steps, of which \d+ were made again: each sample counts once in each epoch$",
        said, re.MULTILINE,
    )  # fmt: skip
    assert found is not None, said
    assert 16 * int(found[1]) == int(found[2]) <= 400


def test_evaluate_uses_every_sample(tmp_path: Path) -> None:
    """A worker that kills itself costs a few samples that are used again; in the end each worker finds the results of all.

    An earlier run's results in the same folder are none of this one's.
    """
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "results-earlier-0-1").write_text('{"2000": 0.5}\n')
    words = (str(TORCH / "evaluate.py"), "--folder", "results", "--die-at", "10")
    said = succeeds(tmp_path, "--nproc-per-node", "2", *words)
    found = re.findall(r"^rank \d: (\d+) samples were mine, 2000 of 2000 are there$", said, re.MULTILINE)
    assert len(found) == 2, said
    assert len(list((tmp_path / "results").glob("died-*"))) == 1


def losses(said: str) -> dict[int, float]:
    """The loss of each step."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss ([0-9.]+)$", said, re.MULTILINE)}


@pytest.mark.nightly(
    reason="FSDP2 ranks whose states another world restores, test_restore_ranks.py, stand for it in make test"
)
def test_fsdp2_learns_a_text_and_any_world_size_goes_on(tmp_path: Path) -> None:
    """Two ranks learn Python's own manual; one rank goes on where two stopped, with their loss."""
    script, place = str(TORCH / "fsdp2_tiny_transformer.py"), ("--checkpoint", "tiny", "--batch", "8")
    first = losses(succeeds(tmp_path, "--nproc-per-node", "2", script, *place, "--steps", "30", "--save-every", "15"))
    assert sorted(first) == list(range(1, 31))
    assert first[1] > 4.0
    assert sum(first[step] for step in range(26, 31)) / 5 < 3.4, first
    assert [one.name for one in sorted((tmp_path / "tiny").iterdir())] == ["step-15", "step-30"]
    said = succeeds(tmp_path, script, *place, "--steps", "35", job="alone")
    assert said.startswith("resumed after step 30 with 1 ranks\n")
    second = losses(said)
    assert sorted(second) == list(range(31, 36))
    assert abs(second[31] - first[30]) < 0.6, (first, second)


@pytest.mark.nightly(
    reason="FSDP2 ranks whose states another world restores, test_restore_ranks.py, stand for it in make test"
)
def test_fsdp2_learns_any_text(tmp_path: Path) -> None:
    """A text given by path is another one than that which it has anyway."""
    script, place = str(TORCH / "fsdp2_tiny_transformer.py"), ("--batch", "8", "--steps", "3")
    licence = ("--checkpoint", "licence", "--text", str(EXAMPLES.parent / "LICENSE"))
    found = losses(succeeds(tmp_path, script, *place, *licence, job="licence"))
    usual = losses(succeeds(tmp_path, script, *place, "--checkpoint", "tiny", job="usual"))
    assert sorted(found) == sorted(usual) == [1, 2, 3]
    assert found[3] < found[1] != usual[1]


@pytest.mark.nightly(reason="test_operate.py::test_a_whole_life_by_hand, which is scaled, stands for it in make test")
def test_a_node_joins_and_the_curve_goes_on(tmp_path: Path) -> None:
    """A job of one node is scaled to two while it trains: the world grows at the checkpoint, rows are shared unevenly, and the

    loss it ends with is that of a run that was alone all the time: neither batch, rate nor gradient depends on the world size.
    """
    words = [str(TORCH / "elastic_join.py"), "--steps", "60", "--save-every", "2"]
    with Job(tmp_path, *words, "--checkpoint", "elastic.pt", "--until-joined", "2", job="elastic") as job:
        eventually((tmp_path / "elastic.pt").exists, "a checkpoint")
        job.dlrover("scale", "worker=2")
        assert job.ended(BOUND_S) == 0
        said = job.out.read_text()
        assert job.left() == []
    worlds = re.findall(r"^world of (\d) from step (\d+): 65 rows a step, (\d+) on this rank$", said, re.MULTILINE)
    assert [(size, rows) for size, _, rows in worlds] == [("1", "65"), ("2", "33")]
    assert int(worlds[1][1]) > 1, "it resumed from its checkpoint"
    step, loss = ended(said, 2)
    words[2] = str(step)
    _, alone = ended(told([str(BIN / "torchrun"), *words, "--checkpoint", "alone.pt", "--pause", "0"], tmp_path), 1)
    assert abs(loss - alone) <= 0.05 * alone + 0.001, (loss, alone)


def ended(said: str, world: int) -> tuple[int, float]:
    """After which step, and with which loss."""
    done = re.search(
        rf"^done after step (\d+) in a world of {world}: loss on 2000 other points ([0-9.]+)$", said, re.MULTILINE
    )
    assert done is not None, said
    return int(done[1]), float(done[2])


@pytest.mark.nightly(
    reason="test_dlrover_run_demo.py kills three of the five, test_kills.py and test_zygote.py the others, in make test"
)
@pytest.mark.timeout(280)
def test_it_survives_everything(tmp_path: Path) -> None:
    """Worker, agent, master, zygote and keeper are killed, and the curve is the undisturbed one, bit for bit."""
    said = told([sys.executable, str(CHAOS / "survive_everything.py"), "--steps", "100"], tmp_path, 250.0)
    assert len(re.findall(r"^>>> step \d+: SIGKILL to the ", said, re.MULTILINE)) == 5
    assert "0 losses differ; exit codes [0, 0]; left behind: []" in said
    assert said.endswith("Survived everything: the same curve, bit for bit\n")


@pytest.mark.nightly(
    reason="groups that find each other, test_addresses.py and test_job_groups.py, stand for it in make test"
)
def test_trainers_and_rollouts_learn_together(tmp_path: Path) -> None:
    """The job file as it is, with fewer steps: rollout workers find the trainers, which learn the rule from what they send."""
    text = (TORCH / "trainers_and_rollouts.toml").read_text()
    program = f'program = "{TORCH / "trainers_and_rollouts.py"}"\nargs = ["--steps", "60"]'
    file = tmp_path / "job.toml"
    file.write_text(text.replace('program = "trainers_and_rollouts.py"', program))
    said = succeeds(tmp_path, "--job", str(file))
    begun = re.findall(r"^((?:trainer|rollout) \d .*)$", said, re.MULTILINE)
    needed = ["rollout 0 begins", "rollout 1 begins", "trainer 0 begins", "trainer 1 begins"]
    # The third rollout worker is one more than the job needs: it may come too late.
    assert sorted({*begun} - {"rollout 2 begins"}) == needed, said
    assert len(begun) == len({*begun}), said
    right = re.search(r"^trained 60 steps: right in (\d+) % of 1000 games$", said, re.MULTILINE)
    assert right is not None, said
    assert int(right[1]) > 80


def test_the_story_runs_as_tests(tmp_path: Path) -> None:
    """The story in virtual time is a test file that can be copied."""
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(CHAOS)]
    assert "3 passed" in told([*line, str(CHAOS / "story_of_a_killed_node.py")], tmp_path)


@pytest.mark.parametrize("script", sorted(TORCH.glob("*.py")), ids=lambda path: path.name)
def test_each_says_how_to_run_it(script: Path) -> None:
    """The docstring of a torch example has a line for dlrover-run and one for torchrun, each with this very file."""
    words = script.read_text().split('"""')[1]
    if script.with_suffix(".toml").exists():  # several programs: torchrun has no counterpart
        assert f"    dlrover-run --job examples/torch/{script.stem}.toml" in words
        return
    leased = 'assign="lease"' in script.read_text()  # samples are handed out by agents, which torchrun has not
    for launcher in ("dlrover-run",) if leased else ("dlrover-run", "torchrun"):
        assert re.search(rf"^    {launcher} [^\n]*(\n +)?[^\n]*examples/torch/{script.name}", words, re.MULTILINE), (
            launcher
        )

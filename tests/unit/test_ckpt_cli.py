import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.stored import sharded, state, whole

from dlrover_adapters.checkpoint.parts import write_part
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.seal import seal
from dlrover_adapters.cli import ckpt
from dlrover_adapters.cli.main import main


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A URL under which lie two complete steps and an incomplete one."""
    place = Place(f"file://{tmp_path}/run")
    for step in (100, 110):
        write_part(whole(state(), step=step).view(), place, run="r")
        seal(place, step, [0])
    write_part(sharded(state(), 2, step=120)[0].view(), place, run="r")
    return place.url


def test_ls_shows_what_there_is(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each step: complete or not, size, age, and why it is not complete."""
    assert main(["ckpt", "ls", run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["step", "state", "size", "age"]
    assert [line.split()[:2] for line in lines[1:]] == [["100", "complete"], ["110", "complete"], ["120", "incomplete"]]
    assert "1 parts, not sealed" in lines[3]
    assert main(["ckpt", "ls", run, "--json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)] == [100, 110, 120]


def test_verify_ends_with_0_for_whole_and_1_for_damaged(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every byte of the newest complete step is compared; damage is exit code 1 and names the file and the place."""
    assert main(["ckpt", "verify", run]) == 0
    assert "step 110: fine" in capsys.readouterr().out
    assert main(["ckpt", "verify", run, "--all"]) == 1
    assert "step 120: incomplete" in capsys.readouterr().out
    file = tmp_path / "run" / "step-0000000110" / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[1234] ^= 1
    file.write_bytes(raw)
    assert main(["ckpt", "verify", run]) == 1
    out = capsys.readouterr().out
    assert "step 110: DAMAGED" in out
    assert "__0_0.distcp: at byte 0" in out
    assert main(["ckpt", "verify", f"{run}/step-0000000100", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["step"], told["fine"]) == (100, True)
    assert main(["ckpt", "export", run, str(tmp_path / "x.safetensors")]) == 1
    assert "not as they were written" in capsys.readouterr().err


def test_export_writes_what_others_read(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The target's ending or --format says what is written; what the format does not take is named."""
    pytest.importorskip("safetensors")
    target = tmp_path / "out" / "model.safetensors"
    assert main(["ckpt", "export", run, str(target), "--only", "model"]) == 0
    assert "4 tensors" in capsys.readouterr().out
    assert target.exists()
    assert main(["ckpt", "export", run, str(tmp_path / "s.pt"), "--step", "100", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["format"], told["tensors"]) == (100, "torch", 6)
    assert torch.load(tmp_path / "s.pt", weights_only=True)["extra"] == {"epoch": 3}
    assert main(["ckpt", "export", run, str(tmp_path / "all.safetensors")]) == 0
    assert "left out, as safetensors does not take them: optimizer.param_groups, extra" in capsys.readouterr().err


def test_rm_removes_what_was_named_and_guards_the_newest(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps go by number or all but the newest; the newest complete one only by force."""
    assert main(["ckpt", "rm", run, "--step", "110"]) == 5
    assert "--force" in capsys.readouterr().err
    assert main(["ckpt", "rm", run, "--keep", "1"]) == 0
    assert "removed: 100" in capsys.readouterr().out
    assert main(["ckpt", "rm", run, "--step", "110", "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": [110]}
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["step-0000000120"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["ls", "{empty}"], 3, "there is no checkpoint; URL is what FlashCheckpoint was given"),
        (["verify", "{run}", "--step", "7"], 3, "there is no step 7; there is 100, 110, 120"),
        (["export", "{run}", "{empty}/x.pt", "--only", "wrong"], 2, "there is extra, model, optimizer"),
        (["ls", "nosuch://x"], 2, "fsspec knows no 'nosuch'"),
        (["rm", "{run}"], 2, "give --step N, or --keep N"),
        (["rm", "{run}", "--keep", "0"], 2, "at least 1"),
        (["export", "{run}", "/proc/nowhere/x.pt"], 4, "/proc/nowhere"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: Any, code: Any, told: Any
) -> None:
    """Wrong usage, nothing there, and storage that cannot be written each have their exit code and one sentence."""
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["ckpt", *(word.format(run=run, empty=empty) for word in words)]) == code
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1


def test_what_takes_long_says_how_far_it_is(
    run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two seconds a command says on stderr how much it has done."""
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(ckpt.time, "monotonic", lambda: next(clock))
    assert main(["ckpt", "verify", run]) == 0
    assert "dlrover ckpt: step 110: 1" in capsys.readouterr().err


def test_help_has_examples_for_every_verb(capsys: Any) -> None:
    """--help of each verb shows how it is used."""
    for verb in ("ls", "verify", "export", "rm"):
        with pytest.raises(SystemExit):
            main(["ckpt", verb, "--help"])
        assert f"dlrover ckpt {verb} " in capsys.readouterr().out.partition("examples:")[2]

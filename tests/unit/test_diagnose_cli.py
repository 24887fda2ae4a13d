"""`dlrover diagnose` and `dlrover signatures`, as people call them."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlrover_adapters.cli import main, options
from dlrover_adapters.cli.places import NOT_FOUND, OK, UNREADABLE, USAGE
from dlrover_core.diagnosis.answers import MEASURED
from dlrover_core.diagnosis.procedure import SURE
from dlrover_core.diagnosis.signatures import table

LOG = """\
2026-01-04 10:20:01,000 INFO [rank0] step 100 loss 2.1
[rank1]: Traceback (most recent call last):
[rank3]: Traceback (most recent call last):
[rank3]:   File "/home/a/run_81/proj/train.py", line 88, in <module>
[rank1]:   File "/home/a/run_81/proj/train.py", line 91, in <module>
[rank3]:     main()
[rank3]:   File "/home/a/run_81/proj/data.py", line 7, in collate
[rank3]:     return batch["x"]
[rank1]:     sync()
[rank3]: KeyError: 'x'
[rank1]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.4.0.21]:9013
2026-01-04 10:20:09,000 INFO the rest is silence
"""
OWN = """
[[signature]]
id = "plant.flux"
title = "the flux capacitor is empty"
class = "HW"
action = "isolate"
sources = ["log"]
patterns = ['flux capacitor \\w+ empty']
"""


def diagnose(*words: str) -> int:
    """The exit code."""
    return main.main(["diagnose", *words])


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    """What it says to programs."""
    diagnose(*words, "--json")
    return dict(json.loads(capsys.readouterr().out))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """One launcher's log."""
    path = tmp_path / "train.log"
    path.write_text(LOG)
    return path


def test_one_log_of_all_ranks(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The root, whose it was, where in the program, what suffices, and what is only a consequence."""
    assert diagnose(str(log)) == OK
    out = capsys.readouterr().out
    for words in (
        "signature exception.KeyError, class USER", "rank 3", f"{log}:10: ", "KeyError at proj/data.py:7 in collate",
        "suffices", "restart the processes", "not it    gloo.peer",
    ):  # fmt: skip
        assert words in out


def test_for_programs(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object, with the root among everything that was seen."""
    found = told(capsys, str(log))
    assert (found["signature"], found["class"], found["rank"], found["action"]) == (
        "exception.KeyError",
        "USER",
        3,
        "proc",
    )
    assert found["place"] == "KeyError at proj/data.py:7 in collate"
    assert isinstance(found["seen"], list)
    assert [(one["signature"], one["line"], one["rank"], "not_it" in one) for one in found["seen"]] == [
        ("exception.KeyError", 10, 3, False),
        ("gloo.peer", 11, 1, True),
    ]


def test_a_file_per_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without words before a line, the file's name says whose it is; what came first is told by the lines' own times."""
    for rank in range(3):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        words = (
            "NCCL communicator was aborted on rank 0."
            if rank != 1
            else "CUDA error: uncorrectable ECC error encountered"
        )
        (folder / "stderr.log").write_text(f"2026-01-04 10:20:0{rank} x\nRuntimeError: {words}\n")
    found = told(capsys, *map(str, sorted(tmp_path.rglob("stderr.log"))))
    assert (found["signature"], found["rank"], found["action"]) == ("cuda.ecc", 1, "reset")


KERNEL_LINES = {
    "since boot": "[ 4021.884213] NVRM: Xid (PCI:0000:3b:00): 79, pid=1207, name=python, GPU has fallen off the bus.\n",
    "dated": "[Mon Jan  5 10:20:07 2026] NVRM: Xid (PCI:0000:3b:00): 79, pid=1207, GPU has fallen off the bus.\n",
    "syslog": "Jan  5 10:20:07 gpu-7 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1207, GPU has fallen off the bus.\n",
}


STAMP = "2026-03-01 07:00:00,123 "


@pytest.mark.parametrize(
    ("kernel", "stamp"), [("since boot", ""), ("since boot", STAMP), ("dated", ""), ("syslog", "")]
)
def test_files_by_different_clocks(tmp_path: Path, capsys: pytest.CaptureFixture[str], kernel: str, stamp: str) -> None:
    """A kernel's log and a rank's output without times, or by another clock, are one failure, in either order."""
    (tmp_path / "k.log").write_text(KERNEL_LINES[kernel])
    (tmp_path / "tr.log").write_text(
        f"{stamp}[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.4.0.21]:9013\n"
        "[rank2]: RuntimeError: CUDA error: unspecified launch failure\n"
    )
    files = [str(tmp_path / "k.log"), str(tmp_path / "tr.log")]
    for order in (files, files[::-1]):
        assert main.main(["diagnose", *order]) == OK
        told = capsys.readouterr()
        assert "(signature xid.fallen_off" in told.out
        assert "no times to compare in" in told.err


def test_pipes_and_compressed_files(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe and a gzip file say what the plain file says, compressed pipes too."""
    packed = tmp_path / "old.gz"
    packed.write_bytes(gzip.compress(LOG.encode()))
    wanted = told(capsys, str(log))["signature"]
    assert told(capsys, str(packed))["signature"] == wanted
    for data in (LOG.encode(), gzip.compress(LOG.encode())):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(data))))
        assert told(capsys, "-")["signature"] == wanted


def test_a_long_file_is_read_in_pieces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A failure is found wherever it lies, its number is the line's in the file, and its traceback may cross pieces."""
    filler = "2026-01-04 10:20:01 INFO step 5 loss 2.1\n" * 25_570
    path = tmp_path / "long.log"
    path.write_text(filler + LOG + filler)
    found = told(capsys, str(path))
    assert found["place"] == "KeyError at proj/data.py:7 in collate"
    assert isinstance(found["root"], dict)
    assert found["root"]["line"] == 25_580


def test_a_healthy_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing known in it is an exit code of its own, so that scripts can tell; advice is no failure."""
    path = tmp_path / "fine.log"
    path.write_text("step 1 loss 2.0\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nno errors\n")
    assert diagnose(str(path)) == NOT_FOUND
    assert "nothing in it is known as a failure" in capsys.readouterr().out
    assert told(capsys, str(path)) == {"files": 1, "signature": None, "seen": []}


def test_files_that_cannot_be_read(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is told with its reason, the others are judged, and the exit code says that one was missing."""
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04\0\0\0")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(LOG.encode())[:-20])
    missing, binary, cut = (str(tmp_path / name) for name in ("none.log", "model.pt", "cut.gz"))
    assert diagnose(missing, binary, cut, str(tmp_path), str(log)) == UNREADABLE
    said = capsys.readouterr()
    assert f"{missing}: No such file" in said.err
    assert f"{binary}: not a text" in said.err
    assert cut in said.err
    assert "Is a directory" in said.err
    assert "exception.KeyError" in said.out
    assert "Traceback" not in said.err


def test_ones_own_signatures(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of one's own is heeded by both commands, and a wrong one is told by file, id and reason."""
    mine = tmp_path / "mine.toml"
    mine.write_text(OWN)
    log.write_text("the flux capacitor is empty\n")
    assert diagnose(str(log)) == NOT_FOUND
    capsys.readouterr()
    assert told(capsys, str(log), "--signatures", str(mine))["signature"] == "plant.flux"
    assert main.main(["signatures", "plant.flux", "--signatures", str(mine)]) == OK
    assert "the flux capacitor is empty" in capsys.readouterr().out
    mine.write_text(OWN.replace("HW", "HARD"))
    for command in (["signatures"], ["diagnose", str(log)]):
        assert main.main([*command, "--signatures", str(mine)]) == USAGE
        assert f"{mine}: plant.flux: there is no class 'HARD'" in capsys.readouterr().err
    assert main.main(["signatures", "--signatures", str(tmp_path / "none.toml")]) == USAGE
    assert "No such file" in capsys.readouterr().err


def test_a_job_takes_them_along(tmp_path: Path) -> None:
    """`dlrover-run --signatures` puts them into the job's spec, checked."""
    mine = tmp_path / "mine.toml"
    mine.write_text(OWN)
    given = options.parse(["--signatures", str(mine), "train.py"])
    spec = options.spec(given, "job", 1)
    assert "plant.flux" in table(spec.signatures).by_id
    assert "plant.flux" not in table(options.spec(options.parse(["train.py"]), "job", 1).signatures).by_id


def test_the_list_of_signatures(capsys: pytest.CaptureFixture[str]) -> None:
    """All, some by how they begin, one with everything that is known of it, and near ones for a slip of the pen."""
    assert main.main(["signatures"]) == OK
    assert len(capsys.readouterr().out.splitlines()) == len(table().by_id)
    assert main.main(["signatures", "xid"]) == OK
    assert all(line.startswith("xid.") for line in capsys.readouterr().out.splitlines())
    assert main.main(["signatures", "cuda.ecc"]) == OK
    one = capsys.readouterr().out
    assert "HW: hardware; 95% sure" in one
    assert "uncorrectable ECC error encountered" in one
    assert main.main(["signatures", "cuda.ecc", "--json"]) == OK
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["id"], row["class"], row["action"]) == ("cuda.ecc", "HW", "reset")
    assert main.main(["signatures", "cudda.ecc"]) == NOT_FOUND
    assert "there is cuda.ecc" in capsys.readouterr().err


def test_the_schema_of_its_json(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/diagnose.schema.json names every field that `--json` has, and no other, and what must be there is."""
    schema = json.loads((Path(__file__).resolve().parents[2] / "docs" / "diagnose.schema.json").read_text())
    found = told(capsys, str(log))
    assert set(found) == set(schema["properties"])
    rows = found["seen"]
    assert isinstance(rows, list)
    assert all(
        set(schema["$defs"]["seen"]["required"]) <= set(row) <= set(schema["$defs"]["seen"]["properties"])
        for row in rows
    )
    causes = found["causes"]
    assert isinstance(causes, list)
    assert all(set(cause) == set(schema["properties"]["causes"]["items"]["required"]) for cause in causes)
    assert all(set(spot) <= set(schema["$defs"]["spot"]["properties"]) for cause in causes for spot in cause["lines"])
    fine = tmp_path / "fine.log"
    fine.write_text("step 1\n")
    assert set(told(capsys, str(fine))) == set(schema["required"])


def test_every_line_that_was_considered(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--explain` quotes each line that is not the cause by its file and number, and says why."""
    assert diagnose(str(log), "--explain") == OK
    assert f"not it    {log}:11: gloo.peer: a consequence" in capsys.readouterr().out


def test_an_unsure_answer_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Below 50 % the answer is unknown, with the likeliest and what to look at next."""
    path = tmp_path / "only.log"
    path.write_text("loading weights\nAborted (core dumped)\n")
    assert diagnose(str(path)) == OK
    out = capsys.readouterr().out
    assert out.startswith("unknown: ")
    assert "look at   the lines before it" in out


def test_consequences_alone_are_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where every line speaks of another rank, that is known well, and the answer says that the cause stands elsewhere."""
    path = tmp_path / "only.log"
    path.write_text("[rank0]: RuntimeError: [gloo/pair.cc:534] Connection closed by peer [10.4.0.21]:9013\n")
    assert diagnose(str(path)) == OK
    out = capsys.readouterr().out
    assert out.startswith("consequences alone: ")
    assert "look at   the peer" in out
    found = told(capsys, str(path))
    assert (found["unknown"], found["confidence"], found["class"]) == (False, MEASURED, "CASC")


@pytest.mark.parametrize(
    ("end", "signature", "measured"),
    [
        ("exitcode: -9", "exit.sigkill", True),
        ("exitcode: -11", "exit.sigsegv", True),
        ("exitcode: -6", "exit.sigabrt", False),
        ("exitcode: 1", "exit.silent", False),
    ],
)
def test_ends_that_were_measured_to_be_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, signature: str, measured: bool
) -> None:
    """A kill and a fault are as sure as they were right on logs of other sources. An abort and a bare exit stay unsure."""
    path = tmp_path / "end.log"
    path.write_text(
        "step 10 | loss 2.1\n"
        f"ERROR:torch.distributed.elastic.multiprocessing.api:failed ({end}) local_rank: 0 (pid: 4711) of binary: python\n"
    )
    said = told(capsys, str(path))
    assert (said["signature"], said["confidence"] == MEASURED) == (signature, measured)
    assert measured or float(str(said["confidence"])) < SURE


def test_a_signature_is_learnt_from_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log that is not known gives a draft, which knows that log and its like again, and says what else it would match."""
    path, other, mine = tmp_path / "train.log", tmp_path / "other.log", tmp_path / "mine.toml"
    path.write_text("step 3 loss 2.1\n[rank3]: coolant pump P-17 of rack /dc/4 has failed: 12 l/min\n")
    other.write_text("step 4 loss 2.1\ncoolant pump P-2 of rack /dc/9 has failed: 3 l/min\n")
    assert diagnose(str(path)) == NOT_FOUND
    assert "--learn" in capsys.readouterr().out
    assert main.main(["signatures", "--learn", str(path), "--as", "plant.pump", "--against", str(other)]) == OK
    told_ = capsys.readouterr()
    mine.write_text(told_.out)
    assert f"matches {other}:2: coolant pump P-2" in told_.err
    for log_ in (path, other):
        assert told(capsys, str(log_), "--signatures", str(mine))["signature"] == "plant.pump"


def test_a_level_alone_says_that_a_line_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in docs/diagnosis.md: no other word of the line does."""
    path = tmp_path / "train.log"
    path.write_text("ERROR: coolant flow below 12 % in rack r7\nINFO: saved\n")
    assert main.main(["signatures", "--learn", str(path), "--as", "plant.cooling"]) == OK
    assert "coolant" in capsys.readouterr().out


def test_what_cannot_be_learnt(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log without a telling line, a missing id and a wrong one are told, and what is known already is named."""
    fine = tmp_path / "fine.log"
    fine.write_text("step 3 loss 2.1\n")
    assert main.main(["signatures", "--learn", str(fine), "--as", "plant.pump"]) == NOT_FOUND
    assert main.main(["signatures", "--learn", str(fine)]) == USAGE
    assert main.main(["signatures", "--learn", str(log), "--as", "no id"]) == USAGE
    capsys.readouterr()
    (tmp_path / "oom.log").write_text("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    assert main.main(["signatures", "--learn", str(tmp_path / "oom.log"), "--as", "plant.oom"]) == OK
    assert "it is known already, as cuda.oom" in capsys.readouterr().err

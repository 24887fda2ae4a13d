"""The outside witness of the campaign `rough`: it is fed folders in which one thing is not as promised, and must find it."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tools import rough_witness as witness

STEPS = 40
APART_S = 0.25
BEGAN_S = 1000.0
COMMAND = """
    import json, sys
    from pathlib import Path
    folder = Path(sys.argv[1])
    said = json.loads((folder / "commands.json").read_text())
    words = sys.argv[2:]
    name = " ".join(words[:2]) if words[0] == "ckpt" else words[0]
    if name == "events":
        for row in (folder / "log.jsonl").read_text().splitlines():
            print(row)
    sys.exit(said.get(name, 0))
"""


class Folder:
    """What a job of two ranks leaves that went as promised: a worker was killed at step 20. Tests spoil it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("control", "tmp", "stored/step-20"):
            (path / name).mkdir(parents=True)
        (path / "stored/step-20/manifest.json").touch()
        for rank in (0, 1):
            self.life(path / "control", rank, 7, 0, range(1, STEPS + 16))
            self.life(path, rank, 11, 0, range(1, 21))
            self.life(path, rank, 12, 20, range(21, STEPS + 1), later_s=0.5)
        self.killed_at = BEGAN_S + 20 * APART_S + 0.1
        self.diary({"id": 1, "start": self.killed_at, "kind": "kill", "target": "worker", "lasts": False})
        self.events = [
            self.event("JobCreated"),
            self.event("NodePlanned", node="worker-0-0", incarnation=0),
            self.event("WorldFormed", generation=1, reason="all expected nodes are there"),
            self.event("WorldFormed", generation=2, reason="incident 1", seen=self.killed_at + 0.2),
            self.event("JobSucceeded", seen=BEGAN_S + 20),
        ]
        (path / "exit.json").write_text(json.dumps([{"what": "dlrover-run", "status": 0}]))
        (path / "err").write_text("dlrover-run: job rough\n")
        self.commands: dict[str, int] = {}
        (path / "dlrover.py").write_text(textwrap.dedent(COMMAND))

    def life(self, folder: Path, rank: int, pid: int, restored: int, steps: range, later_s: float = 0.0) -> Path:
        """Write down a life of a rank."""
        path = folder / f"curve-{rank}-{pid}-{pid}"
        began = int((BEGAN_S + restored * APART_S + later_s) * 1e9)
        lines = [f"begin {restored} memory {restored} {began}"]
        for step in steps:
            at = int((BEGAN_S + step * APART_S + later_s) * 1e9)
            lines.append(f"{step} {(step / 7 + rank).hex()} {rank * 1000 + step} {step:04x} {at}")
        path.write_text("\n".join(lines) + "\n")
        return path

    def event(self, kind: str, seen: float = BEGAN_S, **fields: Any) -> dict[str, Any]:
        """One that a follower was told."""
        return {"seen": seen, "event": {"event": kind, "fields": fields}}

    def diary(self, *more: dict[str, Any]) -> None:
        """Write down strikes."""
        with (self.path / "diary.jsonl").open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in more)

    def verdict(self, **about: Any) -> dict[str, Any]:
        """What the witness says, asked as a process of its own."""
        for number, one in enumerate(self.events, start=1):
            one["event"]["seq"] = number
        (self.path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in self.events))
        log = self.path / "log.jsonl"
        if not log.exists():
            log.write_text("".join(json.dumps(one["event"]) + "\n" for one in self.events))
        (self.path / "commands.json").write_text(json.dumps(self.commands))
        world = {
            "job": "rough", "status": 0, "marks": [f"FOLDER={self.path}"], "log": [], "stored": str(self.path / "stored"),
            "said": ["err", "state/jobs/*/control.log"],
            "dlrover": [sys.executable, "-I", "-S", str(self.path / "dlrover.py"), str(self.path)],
        }  # fmt: skip
        (self.path / "world.json").write_text(json.dumps(world | about))
        script = str(Path(witness.__file__))
        done = subprocess.run(
            [sys.executable, "-I", "-S", script, str(self.path)], capture_output=True, text=True, check=False
        )
        assert done.stdout, done.stderr
        found = dict(json.loads(done.stdout))
        assert done.returncode == bool(found["broken"])
        return found

    def broken(self, **about: Any) -> str:
        """The one promise that is broken."""
        found = self.verdict(**about)["broken"]
        assert len(found) == 1, found
        return str(found[0])


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """One in which all is as promised."""
    return Folder(tmp_path)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is left at once."""
    monkeypatch.setattr(witness, "LEFT_S", 0.1)


def test_it_imports_nothing_of_ours() -> None:
    """It needs the standard library alone."""
    tree = ast.parse(Path(witness.__file__).read_text())
    names = {one.module or "" for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
    names |= {each.name for one in ast.walk(tree) if isinstance(one, ast.Import) for each in one.names}
    assert {one.partition(".")[0] for one in names} <= sys.stdlib_module_names
    assert all(not one.level for one in ast.walk(tree) if isinstance(one, ast.ImportFrom))


def test_a_good_job_is_called_good(folder: Folder) -> None:
    """A killed worker, one restart, both explained; the figures count them."""
    found = folder.verdict()
    assert found["broken"] == []
    figures = found["figures"]
    assert (figures["restarts"], figures["needless_restarts"], figures["last_step"]) == (1, 0, STEPS)
    assert figures["struck"] == {"kill worker": 1}


def test_one_bit_of_one_loss(folder: Folder) -> None:
    """The last bit of one loss of one rank differs."""
    path = next(folder.path.glob("curve-1-12-*"))
    value = (30 / 7 + 1).hex()
    mantissa = value.partition("p")[0]
    other = value.replace(mantissa, mantissa[:-1] + ("0" if mantissa[-1] != "0" else "1"))
    path.write_text(path.read_text().replace(value, other))
    found = folder.broken()
    assert "step 30 has" in found
    assert other in found


def test_a_sampler_that_stands_elsewhere(folder: Folder) -> None:
    """A position is part of what is compared."""
    path = next(folder.path.glob("curve-0-12-*"))
    path.write_text(path.read_text().replace(f" {25} 0019 ", " 26 0019 "))
    assert "step 25 has" in folder.broken()


def test_a_step_left_out_and_a_beginning_anew(folder: Folder) -> None:
    """Both are flaws, as is a job without any step."""
    path = next(folder.path.glob("curve-0-12-*"))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:5], *lines[6:]]) + "\n")
    assert "steps are missing" in folder.broken()
    path.write_text("begin 0 nothing 20 5\n")
    assert any("began anew, though storage had step 20" in one for one in folder.verdict()["broken"])
    for one in folder.path.glob("curve-*"):
        one.unlink()
    assert "no rank made a step" in folder.verdict()["broken"]


def test_a_restart_that_nothing_explains(folder: Folder) -> None:
    """A killed worker explains one new world: a second one is needless. So is one long after, and one before the strike."""
    folder.events.insert(4, folder.event("WorldFormed", generation=3, reason="incident 2", seen=folder.killed_at + 3.0))
    found = folder.broken()
    assert "needless restart, event 5: generation 3 (incident 2)" in found
    folder.events[4]["event"]["fields"]["reason"] = "late"
    assert witness.needless([restart(folder.killed_at - 5.0)], [strike("kill", "worker", folder.killed_at)])
    assert witness.needless([restart(1100.0)], [strike("kill", "worker", 1000.0)])
    assert not witness.needless([restart(1010.0)], [strike("kill", "worker", 1000.0)])


def test_a_store_that_died_before_its_world_had_formed(folder: Folder) -> None:
    """Only then a keeper's end explains a new world: ranks have met before, and need it no more."""
    keeper, worker = strike("kill", "dlrover-keeper", 1000.0), strike("kill", "worker", 1000.0)._replace(number=2)
    assert witness.needless([restart(1001.0)], [keeper])
    assert not witness.needless([restart(1001.0)._replace(storeless=True)], [keeper])
    assert witness.needless([restart(1010.0)._replace(storeless=True)], [keeper])
    both = [restart(1001.0), restart(1002.0)._replace(storeless=True)]
    assert not witness.needless(both, [keeper, worker])
    died = {
        "generation": 2,
        "step": -1,
        "error": "the store 127.0.0.1:9 died before the world had formed; workers were killed",
    }
    rows = [
        folder.event("WorkerExited", seen=1.0, **died),
        folder.event("WorldFormed", seen=2.0, generation=3, reason="x"),
        folder.event("WorkerExited", seen=3.0, **{**died, "generation": 3, "step": 7}),
        folder.event("WorldFormed", seen=4.0, generation=4, reason="x"),
    ]
    for number, row in enumerate(rows):
        row["event"]["seq"] = number
    assert [one.storeless for one in witness.restarts(rows)] == [True, False]


def test_a_relaunch_that_nothing_explains(folder: Folder) -> None:
    """A killed worker explains no new node; a killed agent does."""
    folder.events.insert(4, folder.event("NodePlanned", node="worker-0-1", incarnation=1, seen=folder.killed_at + 1.0))
    assert "relaunch as worker-0-1" in folder.broken()
    folder.diary({"id": 2, "start": folder.killed_at + 0.5, "kind": "kill", "target": "dlrover-agent", "lasts": False})
    assert folder.verdict()["broken"] == []


def restart(seen: float) -> witness.Restart:
    """A new world."""
    return witness.Restart("generation 2", 5, seen, is_world=True)


def strike(kind: str, target: str, start: float, lasted_s: float = 0.0) -> witness.Strike:
    """One that was done."""
    return witness.Strike(1, kind, target, start, start + lasted_s)


@pytest.mark.parametrize(
    "harmless",
    [
        strike("kill", "dlrover-master", 1000.0),
        strike("stop", "dlrover-master", 1000.0, 20.0),
        strike("stop", "worker", 1000.0, 20.0),
        strike("stop", "dlrover-agent", 1000.0, 3.0),
        strike("kill", "dlrover-saver", 1000.0),
        strike("kill", "dlrover-zygote", 1000.0),
        strike("clock", "", 1000.0, 10.0),
        strike("disk-full", "state", 1000.0, 10.0),
        strike("disk-stall", "state", 1000.0, 20.0),
        strike("strangers", "", 1000.0, 10.0),
        strike("hostile", "", 1000.0, 4.0),
        strike("files", "dlrover-saver", 1000.0, 8.0),
        strike("loss", "", 1000.0, 20.0),
        strike("cut", "a", 1000.0, 5.0),
        strike("etcd-kill", "", 1000.0, 10.0),
    ],
    ids=str,
)
def test_strikes_that_excuse_no_restart(harmless: witness.Strike) -> None:
    """Whatever training does not need may be struck, and no worker is started anew."""
    assert witness.needless([restart(1002.0)], [harmless])


def test_a_pause_that_nothing_explains(folder: Folder) -> None:
    """No rank made a step for ten seconds, and nobody was struck but a master."""
    for path in folder.path.glob("curve-*-12-*"):
        path.unlink()
    for rank in (0, 1):
        folder.life(folder.path, rank, 12, 20, range(21, 31), later_s=0.5)
        folder.life(folder.path, rank, 13, 30, range(31, STEPS + 1), later_s=30.0)
    folder.diary(
        {"id": 2, "start": BEGAN_S + 31 * APART_S + 14.0, "kind": "kill", "target": "dlrover-master", "lasts": False}
    )
    found = folder.verdict()
    assert len(found["broken"]) == 1
    assert "no step for 29.8 s, " in found["broken"][0]
    assert found["figures"]["outage"]["longest_s"] == pytest.approx(29.75)


def test_what_explains_a_pause() -> None:
    """A stop of a worker explains its own length; another strike may lengthen a recovery, and begins none."""
    assert witness.uncovered_s(1000.0, 1020.0, [strike("stop", "worker", 1000.0, 20.0)]) == 0
    assert witness.uncovered_s(1000.0, 1030.0, [strike("stop", "worker", 1000.0, 20.0)]) == pytest.approx(8.0)
    killed = strike("kill", "worker", 1000.0)
    assert witness.uncovered_s(1000.0, 1025.0, [killed]) == pytest.approx(15.0)
    assert witness.uncovered_s(1000.0, 1025.0, [killed, strike("disk-stall", "state", 1002.0, 10.0)]) == 0
    assert witness.uncovered_s(1000.0, 1025.0, [strike("disk-stall", "state", 1002.0, 10.0)]) > 20.0


TRACED = """[worker-0] Traceback (most recent call last):
[worker-0]   File "/x/dlrover_adapters/agent/agent.py", line 3, in run
[worker-0]     raise ValueError("no")
[worker-0] ValueError: no
"""
SCRIPTS = """Traceback (most recent call last):
  File "/x/torch/distributed.py", line 3, in all_reduce
    raise RuntimeError("no")
RuntimeError: no

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/stormy.py", line 3, in made
    dist.all_reduce(grad)
RuntimeError: peer is gone
"""


def test_a_traceback_of_ours(folder: Folder) -> None:
    """Wherever we print one. One that names the script is the script's."""
    (folder.path / "err").write_text(f"before\n{SCRIPTS}after\n")
    found = folder.verdict()
    assert found["broken"] == []
    assert found["figures"]["tracebacks_of_the_script"] == 1
    control_log = folder.path / "state/jobs/rough/control.log"
    control_log.parent.mkdir(parents=True)
    control_log.write_text(f"event=x\n{TRACED}event=y\n")
    assert "traceback in state/jobs/rough/control.log" in folder.broken()


def test_statuses(folder: Folder) -> None:
    """The launcher's exit status, and those of our commands."""
    (folder.path / "exit.json").write_text(json.dumps([{"what": "dlrover-run", "status": 70}]))
    assert folder.broken() == "dlrover-run ended with 70, not 0"
    (folder.path / "exit.json").write_text(json.dumps([{"what": "dlrover-run", "status": 0}]))
    folder.commands = {"replay": 1}
    assert "dlrover replay ended with 1" in folder.broken()
    folder.commands = {"ckpt verify": 1}
    assert "ckpt verify: 1" in folder.broken()
    folder.commands = {"events": 4}
    assert "dlrover events ended with 4" in folder.broken()


def test_a_log_that_is_not_whole(folder: Folder) -> None:
    """A record that is missing, one that a follower was not told, and a job that has not said that it succeeded."""
    folder.verdict()
    log = folder.path / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:2], *lines[3:]]))
    assert "the log's records are not numbered one after the other" in folder.verdict()["broken"]
    log.write_text("".join(lines))
    last = folder.events.pop()
    assert "a follower was told 4 events" in folder.broken()
    folder.events.append(last)
    last["event"]["event"] = "JobFailed"
    log.unlink()
    assert "does not say once that the job succeeded" in folder.broken()


def test_no_step_on_storage(folder: Folder) -> None:
    """A job of so many steps has one there."""
    (folder.path / "stored/step-20/manifest.json").unlink()
    assert folder.broken() == "no step is on storage"


@pytest.mark.usefixtures("_impatient")
def test_a_process_that_is_left(folder: Folder) -> None:
    """It has the job's mark in its environment. One of the harness is nobody's leaving."""
    folder.verdict()
    env = {**os.environ, "FOLDER": str(folder.path)}
    with subprocess.Popen(["/bin/sleep", "60"], env=env) as sleeper:
        world = json.loads((folder.path / "world.json").read_text())
        assert witness.left(folder.path, world) == [f"left behind: process sleep({sleeper.pid})"]
        assert witness.left(folder.path, world | {"harness": [sleeper.pid]}) == []
        sleeper.kill()
    assert witness.left(folder.path, world) == []


@pytest.mark.usefixtures("_impatient")
def test_files_sockets_and_groups_that_are_left(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each of them is named; empty files of Python's library, and torch's cache, are not."""
    groups = tmp_path_factory.mktemp("groups")
    (groups / "job").mkdir()
    (folder.path / "tmp/dlrover-abc").mkdir()
    (folder.path / "tmp/torchinductor_root").mkdir()
    (folder.path / "tmp/tmpabcdef").touch()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(folder.path / "s"))
        found = witness.left(folder.path, {"groups": [str(groups)]})
    assert found == [
        f"left behind: control group {groups}/job",
        "left behind: socket s",
        "left behind: temporary dlrover-abc",
    ]


@pytest.mark.usefixtures("_impatient")
def test_shared_memory_that_is_left(folder: Folder) -> None:
    """Where the job has a /dev/shm of its own, everything that is new there was left."""
    present = os.listdir("/dev/shm")  # noqa: PTH208
    name = f"psm_{os.getpid()}"
    segment = Path("/dev/shm") / name
    segment.touch()
    try:
        found = witness.left(folder.path, {"shared": [*present, "one at least"]})
        assert f"left behind: /dev/shm/{name}" in found
    finally:
        segment.unlink()


def test_a_strike_that_was_never_taken_back_lasts(folder: Folder) -> None:
    """A row without its end counts until now, as a campaign that was killed leaves it."""
    folder.diary({"id": 2, "start": 1.0, "kind": "stop", "target": "worker", "lasts": True})
    folder.diary({"id": 3, "start": 2.0, "kind": "stop", "target": "worker", "lasts": True}, {"id": 3, "end": 4.5})
    found = {one.number: one for one in witness.diary(folder.path)}
    assert found[2].end > 1000.0 or found[2].end > found[2].start
    assert found[3].end == 4.5

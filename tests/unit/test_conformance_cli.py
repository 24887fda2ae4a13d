"""`dlrover conformance`: anybody's backend or log against its contract, from the shell."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrover_adapters.cli import main
from dlrover_core.errors import SpecError
from dlrover_core.runtime import objects
from dlrover_core.testing import conformance
from dlrover_core.testing.platform_stories import PlatformStories

SOURCES = [str(Path(__file__).parents[2] / one) for one in ("src", "src/adapters", "src/backends")]
MODULE = """
import asyncio, contextlib, threading
import pytest
from dlrover_core.runtime.backend import Changed, Listed, Observation
from dlrover_core.testing import BackendConformance, Stand
from dlrover_core.logs.memory import MemoryLog

class Mine:
    '''A backend in memory that keeps what it promises.'''
    def __init__(self):
        self.nodes, self.used, self.queues, self.token, self.closed = {}, set(), [], 0, False
    def fence(self, token):
        if token < self.token:
            raise PermissionError(token)
        self.token = token
    def change(self, seen):
        self.nodes[seen.name] = seen
        if seen.phase == "gone":
            del self.nodes[seen.name]
        for queue in self.queues:
            queue.put_nowait(Changed(seen))
    async def launch(self, node, token):
        self.fence(token)
        if node.name not in self.used:
            self.used.add(node.name)
            self.change(Observation(node.name, "running"))
    async def delete(self, name, token, grace_s):
        self.fence(token)
        if name in self.nodes:
            self.change(Observation(name, "gone"))
    async def observe(self):
        queue = asyncio.Queue()
        self.queues.append(queue)
        yield Listed(tuple(self.nodes.values()))
        while True:
            yield await queue.get()
    async def room(self, group):
        return None

class Killable(Mine):
    async def kill(self, name):
        self.change(Observation(name, "failed", -9))

class Forgetful(Killable):
    async def launch(self, node, token):
        self.used.clear()
        await super().launch(node, token)
    async def delete(self, name, token, grace_s):
        self.token = 0
        await super().delete(name, token, grace_s)

class Mute(Killable):
    async def launch(self, node, token):
        pass

class Rude(Killable):
    async def room(self, group):
        raise RuntimeError("no room for rooms")

class Stuck(Mine):
    async def room(self, group):
        print("in the room", flush=True)
        threading.Event().wait()

class Endless(Mine):
    async def room(self, group):
        try:
            print("in the room", flush=True)
            await asyncio.get_running_loop().create_future()
        finally:
            print("left the room", flush=True)

class Roomless(Mine):
    room = None

class Needy(Mine):
    def __init__(self, cluster, region):
        super().__init__()

class Broken(Mine):
    def __init__(self):
        raise ConnectionError("nobody is at home")

@contextlib.asynccontextmanager
async def stand():
    backend = Killable()
    yield Stand(backend, backend.kill)
    print("torn down")

async def awaited():
    return Killable()

def number():
    return 7

def log(codec):
    return MemoryLog(codec)

class Urls(MemoryLog):
    opened = {}
    def __init__(self, codec, url):
        super().__init__(codec)
    @classmethod
    async def open_url(cls, url, codec):
        return cls.opened.setdefault(url, None) or cls.opened.setdefault(url + "!", cls(codec, url))
    async def close(self):
        pass

class Kit(BackendConformance):
    fences = False
    def make_backend(self):
        return stand()

class Fixtures(Kit):
    @pytest.fixture(autouse=True)
    def place(self):
        pass

mine = Mine()
"""

Conform = Callable[..., tuple[int, str, str]]


@pytest.fixture
def conform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Conform:
    """The command, in a folder that holds MODULE as ``theirs.py``: its code, what it prints, what it complains of."""
    (tmp_path / "theirs.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(conformance, "ENDING_S", 0.2)

    def ran(*words: str) -> tuple[int, str, str]:
        monkeypatch.delitem(sys.modules, "theirs", raising=False)
        code = main.main(["conformance", *words])
        out, complaint = capsys.readouterr()
        return code, out, complaint

    return ran


PLATFORM = {name.removeprefix("test_") for name in vars(PlatformStories) if name.startswith("test_")}


def verdicts(out: str) -> dict[str, str]:
    """The outcome of each promise."""
    return {one["name"]: one["outcome"] for one in json.loads(out)["promises"]}


@pytest.mark.parametrize(
    ("ours", "untried"),
    [
        ("dlrover_backends.local:LocalBackend", PLATFORM - {"a_running_node_has_a_host"}),
        ("dlrover_core.testing.cluster:MemoryBackend", {"nonsense_is_told"}),
        ("dlrover_core.logs.memory:MemoryLog", set()),
        ("dlrover_core.logs.sqlite:SqliteLog", set()),
    ],
)
def test_ours(conform: Conform, ours: str, untried: set[str]) -> None:
    """Our own backends and logs keep every promise; what is left untried is what they have no notion of."""
    code, out, _ = conform(ours, "--json")
    assert code == 0, out
    told = verdicts(out)
    assert {name for name, outcome in told.items() if outcome == "skipped"} == untried
    assert set(told.values()) <= {"ok", "skipped"}


def test_a_bare_class(conform: Conform) -> None:
    """A class says what its methods can; what nobody can know of it is skipped with a reason, and breaks nothing."""
    code, out, _ = conform("theirs:Mine")
    assert code == 0, out
    assert "ok       a_launched_node_runs (" in out
    assert "skipped  a_death_is_seen: nobody knows how to kill a node from outside: give a `Stand`" in out
    assert "theirs:Mine: 8 of 23 promises kept, 0 broken, 15 not tried" in out


@pytest.mark.parametrize("given", ["Killable", "stand", "awaited", "Kit"])
def test_every_form(conform: Conform, given: str) -> None:
    """A class with `kill`, a function that yields a `Stand` or returns a backend, a kit: nonsense and platforms are left."""
    code, out, _ = conform(f"theirs:{given}", "--json")
    skipped = {name for name, outcome in verdicts(out[out.index("{") :]).items() if outcome == "skipped"}
    assert (code, skipped) == (
        0,
        PLATFORM | {"nonsense_is_told"} | ({"a_deposed_master_orders_nothing"} if given == "Kit" else set()),
    )


def test_by_file(conform: Conform) -> None:
    """A file is as good as a module."""
    code, out, _ = conform("theirs.py:Killable", "-k", "room")
    assert code == 0
    assert out.endswith("theirs.py:Killable: 1 of 1 promises kept, 0 broken, 0 not tried\n")


def test_a_broken_promise_says_where_and_why(tmp_path: Path) -> None:
    """A broken promise tells what was promised, the step at which it broke and the values there; the code is 1."""
    (tmp_path / "theirs.py").write_text(MODULE)
    # In a process of its own: where pytest is, it may rewrite the kits' asserts and word them itself.
    done = subprocess.run(
        [sys.executable, "-m", "dlrover_adapters.cli.main", "conformance", "theirs:Forgetful"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    code, out = done.returncode, done.stdout
    assert code == 1, done.stderr
    failed = out[out.index("FAILED   a_name_is_never_used_again") :]
    assert "promised: A late or repeated order does not bring back what died" in failed
    assert (
        "found: `assert fresh.nodes[dead.name].phase == 'failed'` where fresh.nodes[dead.name].phase = 'running'"
        in failed
    )
    assert "again: dlrover conformance theirs:Forgetful -k a_name_is_never_used_again" in failed


def test_what_never_comes_is_told(conform: Conform) -> None:
    """A story that waits in vain is ended at its bound, and says what it waited for and what there was instead."""
    code, out, _ = conform("theirs:Mute", "--timeout", "0.1", "-k", "a_launched_node_runs")
    assert code == 1
    assert "found: not done within 0.1 s: `seen = await watch.running(node.name)` where watch = no nodes" in out


def test_an_error_of_theirs_is_told_with_its_place(conform: Conform) -> None:
    """An error in the code under test is told in its own words, with the line it comes from."""
    code, out, _ = conform("theirs:Rude", "-k", "room")
    assert code == 1
    assert "found: RuntimeError: no room for rooms; `room = await stand.backend.room(DEFAULT_GROUP)`" in out
    assert re.search(r"at theirs\.py:\d+, in room", out)


def test_what_blocks_is_cut_off(conform: Conform) -> None:
    """Code that blocks the event loop for ever fails its promise, and the next one is tried."""
    code, out, _ = conform("theirs:Stuck", "--timeout", "0.1", "-k", "room", "-k", "deposed")
    assert code == 1
    assert "FAILED   room" in out
    assert "it blocks its event loop" in out
    assert "ok       a_deposed_master_orders_nothing" in out


def test_list_and_filter(conform: Conform) -> None:
    """`--list` tells the promises and tries none, `-k` chooses by name, and a word that is nowhere is an error that lists all."""
    code, out, _ = conform("theirs:Broken", "--list", "-k", "room", "-k", "fence", "-k", "two")
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, ["two_observe", "room"])
    assert json.loads(conform("theirs:Mine", "--list", "-k", "room", "--json")[1]) == [
        {"name": "room", "text": "Room is a number of nodes, or None where it is unknown."}
    ]
    code, _, complaint = conform("theirs:Mine", "-k", "no such")
    assert code == 2
    assert "launch_is_idempotent" in complaint


def test_logs(conform: Conform) -> None:
    """A log's class or function is given the codec; how to depose it, only a kit knows."""
    code, out, _ = conform("theirs:log")
    assert code == 0, out
    assert "skipped  tokens_rise" not in out
    assert "skipped  half_written_snapshot_is_ignored: nobody knows how half a snapshot looks here" in out
    assert conform("theirs:MemoryLog", "-k", "append_lands")[0] == 0


def test_log_by_url(conform: Conform) -> None:
    """A log that opens URLs is opened anew at a place of its own for each promise, and a second time for a second client."""
    code, out, _ = conform("theirs:Urls", "--url", "mine://{new}/x", "-k", "lead", "-k", "tokens")
    assert code == 0, out
    code, _, complaint = conform("theirs:Urls", "--url", "mine://x")
    assert code == 2
    assert "write {new}" in complaint
    code, _, complaint = conform("theirs:Urls")
    assert code == 2
    assert "cannot be made without codec, url" in complaint
    assert "--url 'SCHEME:...{new}...'" in complaint


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("theirs", "write module:name"),
        ("nowhere:Mine", "there is no module 'nowhere'; looked in the current directory"),
        ("nowhere.py:Mine", "there is no file nowhere.py"),
        ("torn:Mine", "importing torn failed: No module named 'not_installed'"),
        ("theirs:Mnie", "theirs has no 'Mnie'; there is Mine"),
        ("theirs:mine", "is a Mine; every promise begins anew, so give the class, or a function:"),
        ("theirs:Roomless", "Roomless is no backend: it has no room; the port is launch, delete, observe, room"),
        ("theirs:Needy", "cannot be made without cluster, region. Give a function or a kit instead:"),
        ("theirs:Broken", "could not be made: ConnectionError: nobody is at home; at theirs.py:"),
        ("theirs:number", "a int is neither a backend (launch, delete, observe, room) nor an event log"),
        ("theirs:Fixtures", "needs pytest for its fixtures (place): run pytest on it"),
        ("json:JSONDecoder", "JSONDecoder is neither a backend"),
    ],
)
def test_what_cannot_be_tried(conform: Conform, tmp_path: Path, given: str, told: str) -> None:
    """What cannot be tried is told once, with what to give instead, and the code is 2."""
    (tmp_path / "torn.py").write_text("import not_installed")
    code, out, complaint = conform(given)
    assert (code, out) == (2, "")
    assert told in complaint


def test_the_kits_work_without_pytest(tmp_path: Path) -> None:
    """Neither the kits nor the command need pytest."""
    code = "import sys; sys.modules['pytest'] = None; from dlrover_adapters.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "conformance", "dlrover_core.logs.memory:MemoryLog"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "26 of 26 promises kept" in done.stdout


@pytest.mark.parametrize("backend", ["Endless", "Stuck"])
def test_ctrl_c(tmp_path: Path, backend: str) -> None:
    """Ctrl-C ends what was started, one that blocks too, tells what is known so far, and leaves with 130."""
    (tmp_path / "theirs.py").write_text(MODULE)
    code = "import sys; from dlrover_adapters.cli.main import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, "conformance", f"theirs:{backend}", "-k", "room", "-k", "two", "-k", "deposed"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)},
    ) as run:
        assert run.stdout is not None
        while "in the room" not in run.stdout.readline():
            pass
        run.send_signal(signal.SIGINT)
        out, complaint = run.communicate(timeout=30)
    assert (run.returncode, complaint) == (130, "")
    assert ("left the room" in out) is (backend == "Endless")
    assert "0 of 3 promises kept, 0 broken, 1 not tried; interrupted with 2 left" in out


def test_a_user_of_the_runner(tmp_path: Path) -> None:
    """The runner is there for other tools too: what is given becomes a kit, and each verdict is told at once."""
    from dlrover_core.logs.memory import MemoryLog

    kind, kit = conformance.kit_of(MemoryLog, "mine")
    heard: list[conformance.Verdict] = []
    conformance.try_all(kit, conformance.promises(kit, ["append_lands", "fenced"]), tell=heard.append)
    assert kind == "log"
    assert [(one.promise.name, one.outcome) for one in heard] == [
        ("append_lands", "ok"),
        ("append_by_an_older_leader_is_fenced", "skipped"),
        ("append_after_resigning_is_fenced", "ok"),
    ]
    with pytest.raises(SpecError, match="no module"):
        objects.find("no.such.thing:at_all")

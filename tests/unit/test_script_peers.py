"""`dlrover_adapters.peers`: what a script reads of the groups that its group uses, waits for, and where it listens."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlrover_adapters import peers
from dlrover_adapters.agent.addresses import PeersFile
from dlrover_adapters.peers import Peers
from dlrover_core.errors import MalformedMessage, SpecError

LONG_S = 60.0
TRAINERS = {"trainer": {"0": ["10.0.0.1:2000", "10.0.0.1:2001"], "10": ["a:1"], "2": ["b:1"]}, "ps": {}}
Say = Callable[..., None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An agent's folder, of which the environment tells."""
    monkeypatch.setenv("DLROVER_PEERS", str(tmp_path / "run" / "peers.json"))
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def say(folder: Path) -> Say:
    """Writes a version as agents do."""
    file = PeersFile()
    file.open(str(folder))

    def write(version: int, groups: dict[str, Any]) -> None:
        file.write(version, groups)

    return write


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when somebody has looked in vain and waits for a change."""
    event, really = threading.Event(), peers._Changes.wait

    def wait(changes: peers._Changes, left_s: float | None) -> None:
        event.set()
        really(changes, left_s)

    monkeypatch.setattr(peers._Changes, "wait", wait)
    return event


def meanwhile(waited: threading.Event, does: Callable[[], None], **asked: Any) -> tuple[Peers, float]:
    """What `wait` returns, and after how long, if this is done while it waits."""

    def act() -> None:
        assert waited.wait(LONG_S)
        does()

    thread = threading.Thread(target=act)
    thread.start()
    began = time.monotonic()
    try:
        return peers.wait(timeout_s=LONG_S, **asked), time.monotonic() - began
    finally:
        thread.join()


# ---- what there is


def test_the_newest_version_by_group_and_place(say: Say) -> None:
    """Places are numbers, each with an address for each worker; `of` has all of a group in their order."""
    say(7, TRAINERS)
    told = peers.peers()
    assert told.version == 7
    assert told.groups == {"trainer": {0: ("10.0.0.1:2000", "10.0.0.1:2001"), 10: ("a:1",), 2: ("b:1",)}, "ps": {}}
    assert told.of("trainer") == ("10.0.0.1:2000", "10.0.0.1:2001", "b:1", "a:1")
    assert told.of("ps") == ()


def test_a_group_that_is_not_used_is_an_error_that_says_what_to_write(say: Say) -> None:
    """Else a script waits for ever for addresses that nobody tells it."""
    say(7, TRAINERS)
    with pytest.raises(SpecError, match=r"'rollout' is not .* told here \(trainer, ps\): add it to `uses`"):
        peers.peers().of("rollout")
    with pytest.raises(SpecError, match="'rollout' is not"):
        peers.wait(group="rollout")


def test_outside_of_such_a_worker_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what to say in the job file."""
    for name in ("DLROVER_PEERS", "DLROVER_LISTEN"):
        monkeypatch.delenv(name, raising=False)
    for ask in (peers.peers, peers.wait):
        with pytest.raises(SpecError, match=r"^DLROVER_PEERS: is not set: .*say `uses`"):
            ask()
    with pytest.raises(SpecError, match=r"^DLROVER_LISTEN: is not set: nobody calls this worker"):
        peers.listen()
    monkeypatch.setenv("DLROVER_LISTEN", "here")
    with pytest.raises(SpecError, match=r"^DLROVER_LISTEN: 'here' is no HOST:PORT"):
        peers.listen()


def test_no_file_yet_is_version_0(folder: Path) -> None:
    """Nobody can be called, of whatever group."""
    assert peers.peers() == Peers(0, {})
    assert peers.peers().of("trainer") == ()


@pytest.mark.parametrize(
    "text", ["", '{"version": 3, "gro', "[]", '{"version": 3}', '{"version": 3, "groups": {"a": 1}}']
)
def test_a_file_that_is_not_whole_is_named(folder: Path, text: str) -> None:
    """`peers` says so; `wait` looks again, and says at the end what it saw."""
    (folder / "peers.json").write_text(text)
    with pytest.raises(MalformedMessage, match=r"peers\.json is not whole"):
        peers.peers()
    with pytest.raises(TimeoutError, match=r"peers\.json is not whole"):
        peers.wait(timeout_s=0)


def test_a_file_of_a_newer_release_is_refused(folder: Path) -> None:
    """At once: waiting would not help. One that says no format is of the first."""
    (folder / "peers.json").write_text('{"format": 2, "hosts": []}')
    for ask in (peers.peers, peers.wait):
        with pytest.raises(MalformedMessage, match="has format 2, which a newer dlrover-core wrote; this one reads 1"):
            ask()
    (folder / "peers.json").write_text('{"version": 3, "groups": {"a": {"0": ["h:1"]}}, "more": 1}')
    assert peers.peers() == Peers(3, {"a": {0: ("h:1",)}})


# ---- waiting


def test_what_is_there_already_is_not_waited_for(say: Say) -> None:
    """By version, by group, by number."""
    say(7, TRAINERS)
    for asked in ({}, {"newer_than": 6}, {"group": "trainer", "at_least": 4}, {"group": "ps", "at_least": 0}):
        assert peers.wait(timeout_s=0, **asked).version == 7


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"newer_than": 7}, "no addresses in a version above 7 within 0 s: the newest is version 7$"),
        ({"group": "trainer", "at_least": 5}, "no 5 workers of group 'trainer' .*is version 7, with 4 of them"),
        ({"group": "ps"}, "no 1 workers of group 'ps' in a version above 0 .*with 0 of them"),
    ],
)
def test_what_does_not_come_is_said(say: Say, asked: dict[str, Any], why: str) -> None:
    """What was wanted, and what there is."""
    say(7, TRAINERS)
    with pytest.raises(TimeoutError, match=why):
        peers.wait(timeout_s=0, **asked)


def test_a_file_that_never_comes_is_said(folder: Path) -> None:
    """The agent has none to write, or its folder is gone."""
    with pytest.raises(TimeoutError, match="there is no file yet"):
        peers.wait(timeout_s=0.01)


def test_a_change_wakes_whoever_waits(say: Say, waited: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """By inotify: nobody has to look again by the clock."""
    monkeypatch.setattr(peers, "SURE_S", LONG_S)
    say(7, TRAINERS)
    told, took_s = meanwhile(waited, lambda: say(8, {"trainer": {"0": ["c:1"]}}), newer_than=7, group="trainer")
    assert told == Peers(8, {"trainer": {0: ("c:1",)}})
    assert took_s < LONG_S / 2


def test_without_inotify_the_file_is_looked_at(
    say: Say, waited: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's instances of it may be used up."""
    made: list[peers._Changes] = []

    class Blind(peers._Changes):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.close()
            made.append(self)

    monkeypatch.setattr(peers, "_Changes", Blind)
    say(7, TRAINERS)
    assert meanwhile(waited, lambda: say(8, TRAINERS), newer_than=7)[0].version == 8
    assert [one._fd for one in made] == [-1]


def test_a_folder_that_is_made_anew_is_found(
    folder: Path, say: Say, waited: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cleaner removed it, the agent writes it again: whoever waits meanwhile hears of what comes then, too."""
    monkeypatch.setattr(peers, "SURE_S", 0.01)
    say(7, TRAINERS)

    def clean() -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        say(8, TRAINERS)

    assert meanwhile(waited, clean, newer_than=7)[0].version == 8


def test_replacing_is_never_seen_half(say: Say) -> None:
    """While an agent writes version after version, every look finds a whole one."""
    say(1, TRAINERS)
    over = threading.Event()

    def write() -> None:
        for version in range(2, 200):
            say(version, TRAINERS)
        over.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = [0]
    while not over.is_set():
        seen.append(peers.peers().version)
    thread.join()
    assert 0 not in seen[1:]
    assert seen == sorted(seen)


def test_nothing_stays_open(say: Say) -> None:
    """Whoever waits again and again runs out of no descriptors."""
    say(7, TRAINERS)
    peers.wait()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        peers.wait()
        with pytest.raises(TimeoutError):
            peers.wait(newer_than=7, timeout_s=0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# ---- listening


def test_a_worker_listens_where_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the agent's own socket of that port."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(("127.0.0.1", 0))
        address = kept.getsockname()
        monkeypatch.setenv("DLROVER_LISTEN", f"127.0.0.1:{address[1]}")
        with peers.listen() as server, socket.create_connection(address) as caller:
            assert server.getsockname() == address
            with server.accept()[0] as called:
                assert called.getpeername() == caller.getsockname()


def test_importing_it_costs_little() -> None:
    """No torch, no event loop, no third party."""
    code = "import sys; import dlrover_adapters.peers; print(*sorted({one.partition('.')[0] for one in sys.modules}))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, env=_paths())
    loaded = set(done.stdout.split())
    assert loaded & {"torch", "asyncio", "ctypes", "msgpack", "structlog", "multiprocessing"} == set()


def _paths() -> dict[str, str]:
    source = Path(__file__).parents[2] / "src"
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(source / "adapters")])}

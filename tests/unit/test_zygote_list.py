"""What a list of imports may leave behind in a process from which workers are forked."""

from __future__ import annotations

import errno
import importlib
import select
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_adapters.agent import wire
from dlrover_adapters.agent import zygote as module
from dlrover_adapters.agent.zygote import Unfit, Zygote


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    """One that has imported nothing yet."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Zygote(ours, 0, "bare", 5.0)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def origins(site: Path, *names: str) -> tuple[str, ...]:
    """The files of these modules."""
    return tuple(str(site / f"{name}.py") for name in names)


def test_another_file_than_the_script_had_ends_the_list(zygote: Zygote, site: Path) -> None:
    """A script that puts other packages first must get these, in every run."""
    for name in ("as_it_was", "elsewhere"):
        site.joinpath(f"{name}.py").write_text("")
    importlib.invalidate_caches()
    listed = ("as_it_was", "elsewhere")
    for _ in range(2):  # imported by the list, and before it
        with pytest.raises(Unfit, match=r"elsewhere: it is .*/elsewhere.py here, and /other/elsewhere.py") as caught:
            zygote._import_each(listed, (*origins(site, "as_it_was"), "/other/elsewhere.py"))
        assert caught.value.kept == 1
    zygote._import_each(listed, origins(site, *listed))


def test_modules_that_look_at_argv_see_the_script_s(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent sends it before the zygote is executed."""
    monkeypatch.setattr(sys, "argv", ["zygote", "--fd", "3"])
    zygote._answer(wire.Frame({"op": "argv", "argv": ["train.py", "--flag", "\udcff"]}, ()))
    assert sys.argv == ["train.py", "--flag", "\udcff"]


@pytest.mark.parametrize(
    ("text", "what", "close"),
    [
        ("import socket\nkept = socket.socketpair()", "socket:", "[one.close() for one in kept]"),
        ("import select\nkept = select.epoll()", "anon_inode:[eventpoll]", "kept.close()"),
        ("kept = open('/dev/full', 'wb')", "/dev/full", "kept.close()"),
        (
            "import subprocess\nkept = subprocess.Popen(['sleep', '60'])",
            "process ",
            "kept.kill(), kept.wait()",
        ),
    ],
)
def test_what_workers_would_share_ends_the_list(zygote: Zygote, site: Path, text: str, what: str, close: str) -> None:
    """Modules before it are kept. A poller and a device that were open before hide no second one."""
    site.joinpath("plain_one.py").write_text("kept = open('/dev/null'), open(__file__)")
    site.joinpath("leaves_it.py").write_text(text)
    importlib.invalidate_caches()
    before = select.epoll(), Path("/dev/full").open("wb")  # noqa: SIM115  # closed below
    try:
        with pytest.raises(Unfit, match=r"leaves_it: it leaves .* behind, which all workers would share") as caught:
            zygote._import_each(("plain_one", "leaves_it"), origins(site, "plain_one", "leaves_it"))
        assert what in caught.value.reason
        assert caught.value.kept == 1
    finally:
        exec(close, vars(sys.modules["leaves_it"]))  # noqa: S102  # its own name for what it keeps
        for one in (*sys.modules["plain_one"].kept, *before):
            one.close()


def test_servants_of_multiprocessing_are_forgotten_by_workers(zygote: Zygote, site: Path) -> None:
    """They are no reason to import less."""
    site.joinpath("tracked.py").write_text(
        "from multiprocessing import resource_tracker as kept\nkept.ensure_running()"
    )
    importlib.invalidate_caches()
    try:
        zygote._import_each(("tracked",), origins(site, "tracked"))
    finally:
        sys.modules["tracked"].kept._resource_tracker._stop()


def test_an_agent_that_died_with_our_words_unread_ends_a_zygote_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel then says that the connection was reset, not that the pipe is broken."""
    ours, theirs = wire.pair()
    zygote, ended = Zygote(ours, 0, "bare", 5.0), []

    def no_fork() -> int:
        theirs.close()  # with "ready" unread
        raise BlockingIOError(errno.EAGAIN, "no processes")

    monkeypatch.setattr(zygote, "_warm", lambda _: None)
    monkeypatch.setattr(module, "_fork", no_fork)
    monkeypatch.setattr(module, "outlive_parent", lambda: None)
    monkeypatch.setattr(module.gc, "freeze", lambda: None)
    monkeypatch.setattr(module, "end_sessions", lambda *told: ended.append(told))
    with ours, Path("/dev/null").open() as file:
        wire.send(theirs, {"op": "fork", "role": "worker", "key": 1}, (file.fileno(),))
        assert zygote.serve(()) is None
    assert ended

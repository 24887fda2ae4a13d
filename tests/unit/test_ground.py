"""Folders and sockets that stay: locked against cleaners, and made anew where somebody removed them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from dlrover_adapters.agent import ground, run_folders
from dlrover_adapters.agent.doorbell import Doorbell
from dlrover_adapters.agent.ground import Ground, Watch
from dlrover_adapters.cli import scratch
from dlrover_core.errors import SpecError


def cleanable(folder: Path) -> bool:
    """Would systemd-tmpfiles look into the folder? It asks for an exclusive lock, and passes by where it gets none."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def test_a_folder_in_use_is_passed_by_by_cleaners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is locked as tmpfiles.d(5) says, and all in it is touched, for cleaners that know of no locks."""
    monkeypatch.setattr(ground, "TOUCH_S", 0.0)
    (tmp_path / "below").mkdir()
    old = tmp_path / "below" / "file"
    old.write_text("")
    held = Ground(tmp_path)
    assert not held.hold()
    assert not cleanable(tmp_path)
    os.utime(old, (1, 1))
    held.hold()
    assert old.stat().st_mtime > 1e9
    held.release()
    assert cleanable(tmp_path)


def test_a_folder_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    """Private again, locked again, and told of once; a link of somebody's in its place is not followed."""
    folder = tmp_path / "above" / "run"
    held = Ground(folder)
    assert not held.hold()
    shutil.rmtree(folder.parent)
    assert held.hold()
    assert not held.hold()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not cleanable(folder)
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        held.hold()
    held.release()


def call(path: str) -> socket.socket:
    """A connection to it."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.connect(path)
    return made


def test_sockets_that_were_removed_listen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is connected stays so; whoever starts after `look` finds the socket; people are told once what went."""
    folder, said = tmp_path / "run", list[str]()

    def refused(path: Path) -> None:
        raise OSError(28, os.strerror(28), str(path))

    async def test() -> None:
        folder.mkdir(0o700)
        rung: asyncio.Queue[int] = asyncio.Queue()
        bell = Doorbell(str(folder / "agent.sock"), lambda *rings: rung.put_nowait(rings[2]))
        bell.open()
        watch = Watch(str(folder), [bell], said.append)
        await watch.begin()
        ring = b"\x84\xaageneration\x01\xa4rank\x00\xa4step%c\xa4told\xc3"
        with call(bell.path) as before, call(bell.path) as waiting:
            before.send(ring % 1)
            assert await asyncio.wait_for(rung.get(), 10) == 1
            shutil.rmtree(folder)
            with monkeypatch.context() as full:
                full.setattr(ground, "make_dirs", refused)
                await watch.look()
                await watch.look()
            assert len(said) == 1
            assert "No space left on device" in said[0]
            await watch.look()
            assert "was made anew" in said[1]
            await watch.look()
            assert len(said) == 2
            with call(bell.path) as after:
                for number, line in enumerate((before, waiting, after), 2):
                    line.send(ring % number)
                    assert await asyncio.wait_for(rung.get(), 10) == number
            os.remove(bell.path)  # noqa: PTH107
            await watch.look()
            call(bell.path).close()
        shutil.rmtree(folder)
        await watch.end()
        bell.close()  # with nothing left to remove

    asyncio.run(test())


def test_a_long_temporary_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets need a short path: the run's folder is made where there is one; where there is none, that is said."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(long))
    with scratch.folder("of-a-test") as folder:
        assert len(str(folder)) < 60
    short = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", short)
    assert scratch.roofs() == ["/tmp", short, "/dev/shm"]
    made = tempfile.mkdtemp

    def unless_tmp(suffix: str | None = None, prefix: str | None = None, dir: str | None = None) -> str:  # noqa: A002
        if dir == "/tmp":
            raise PermissionError(13, os.strerror(13))
        return made(suffix, prefix, dir)

    with monkeypatch.context() as closed:
        closed.setattr(tempfile, "mkdtemp", unless_tmp)
        with scratch.folder("of-a-test") as folder:
            assert folder.parent == Path(short)
    os.rmdir(short)  # noqa: PTH106
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert scratch.roofs() == ["/tmp", "/dev/shm"]
    monkeypatch.setattr(scratch, "roofs", lambda: [str(tmp_path / "none")])
    with pytest.raises(SpecError, match="set TMPDIR to a folder of yours"), scratch.folder("of-a-test"):
        pass


IN_A_FOLDER = """
import os, sys
from pathlib import Path
from dlrover_adapters.cli import scratch
with scratch.folder("abc") as folder:
    Path(sys.argv[1]).write_text(str(folder))
    os.kill(os.getpid(), 9)
"""


def test_a_sweeper_outlives_the_burial_of_its_node(tmp_path: Path) -> None:
    """Whoever buries a node that was killed (a keeper on Ray) leaves the sweeper of its folder alone, which removes it."""
    from dlrover_backends.shared import process
    from dlrover_core.host.procfs import processes

    said = tmp_path / "said"
    # With the run's mark, as nodes have it: where another test has made us adopt orphans, one without any is killed for one.
    line = (sys.executable, "-c", IN_A_FOLDER, str(said))
    node = process.Started(process.LocalCommand(line, {scratch.MARK: "abc"}))
    assert select.select([node.pidfd], [], [], 60.0)[0]
    folder = Path(said.read_text())
    # It may be done by now. Where it is not, it is held, so that the burial comes first.
    for one in processes():
        with contextlib.suppress(OSError):
            if str(folder).encode() in Path(f"/proc/{one.pid}/cmdline").read_bytes().split(b"\0"):
                os.kill(one.pid, signal.SIGSTOP)
                pidfd = os.pidfd_open(one.pid)
                node.bury(5.0)
                os.kill(one.pid, signal.SIGCONT)
                assert select.select([pidfd], [], [], 30.0)[0]
                os.close(pidfd)
    node.end()
    assert not folder.exists()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EDQUOT])
def test_a_node_that_is_replaced_needs_no_room_in_the_run_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Its own folder lies elsewhere then, which is said; where there is no room at all, that is an error."""
    wanted, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    made, lock, why = run_folders.private_folder(str(wanted))
    assert (Path(made).parent, lock, why) == (wanted, -1, "")
    mkdtemp, broken = tempfile.mkdtemp, {str(wanted), "/tmp"}

    def making(prefix: str, dir: str) -> str:  # noqa: A002  # as the standard library names it
        if dir in broken:
            raise OSError(number, os.strerror(number), dir)
        return mkdtemp(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "mkdtemp", making)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(other))
    made, lock, why = run_folders.private_folder(str(wanted))
    assert Path(made).parent == other
    assert scratch.locks(lock, Path(made))
    os.close(lock)
    assert Path(made).stat().st_mode & 0o777 == 0o700
    assert why == f"{wanted} takes no files ({os.strerror(number)}): this node's sockets and output lie in {made}"
    broken.update((str(other), "/dev/shm"))
    with pytest.raises(OSError, match=r"run") as told:
        run_folders.private_folder(str(wanted))
    assert told.value.errno == number
    monkeypatch.delenv("XDG_RUNTIME_DIR")


def test_a_folder_elsewhere_of_a_node_that_was_killed_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its run's end, SIGKILL included, or by the next run; not while the node lives, and nobody else's."""
    broken = tmp_path / "file"
    broken.touch()
    monkeypatch.setattr(run_folders, "elsewhere", lambda: [str(tmp_path)])
    monkeypatch.setattr(scratch, "roofs", list)
    monkeypatch.setenv(scratch.MARK, "abc")
    made = run_folders.private_folder(str(broken / "run"))
    folder = Path(made.path)
    assert folder.name.startswith("dlrover-run-abc-")
    scratch.sweep()
    assert folder.exists()
    assert scratch.elsewhere("abc") == [folder]
    assert scratch.elsewhere("ab") == scratch.elsewhere("") == scratch.elsewhere("*") == []
    os.close(made.lock)  # as a death does
    scratch.sweep()
    assert not folder.exists()
    # The run's own sweeper, whose launcher was killed.
    made = run_folders.private_folder(str(broken / "run"))
    other = tmp_path / "dlrover-run-abcd-1"
    other.mkdir()
    with Path(os.devnull).open("rb") as nobody:
        assert scratch._sweeper(tmp_path / "gone", f"{scratch.MARK}=abc", "", nobody.fileno()).wait() == 0
    os.close(made.lock)
    assert not Path(made.path).exists()
    assert other.exists()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EDQUOT])
def test_a_folder_that_cannot_be_made_anew_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whatever the disk's reason: no exception leaves the look, and it is said again once all is there."""
    said = list[str]()

    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    class Socket:
        def restore(self) -> bool:
            refused()
            return True

    async def test() -> None:
        watch = Watch(str(tmp_path / "run"), [Socket()], said.append)
        await watch.look()
        await watch.look()
        assert len(said) == 1
        assert os.strerror(number) in said[0]
        with monkeypatch.context() as patch:
            patch.setattr(os, "utime", refused)
            patch.setattr(ground, "TOUCH_S", 0.0)
            held = Ground(tmp_path)
            held.hold()
            held.hold()
            held.release()
        await watch.end()

    asyncio.run(test())

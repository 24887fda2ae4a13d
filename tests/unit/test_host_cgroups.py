"""Control groups for what workers start: found, made where that is permitted, killed to the last process, removed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_core.host import cgroups
from dlrover_core.host.cgroups import Group

HYBRID = (
    "30 1 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 30 0:28 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)
INSIDE = "50 1 0:26 /kubepods/pod-1 /sys/fs/cgroup\\040here ro,nosuid shared:1 - cgroup2 cgroup rw\n"


@pytest.mark.parametrize(
    ("mountinfo", "membership", "folder"),
    [
        (HYBRID, "4:memory:/a\n0::/\n", "/sys/fs/cgroup/unified"),
        (HYBRID, "0::/user.slice/run-1.scope\n", "/sys/fs/cgroup/unified/user.slice/run-1.scope"),
        (INSIDE, "0::/kubepods/pod-1\n", "/sys/fs/cgroup here"),
        (INSIDE, "0::/kubepods/pod-1/below\n", "/sys/fs/cgroup here/below"),
        (INSIDE, "0::/kubepods/pod-12\n", ""),
        (HYBRID, "4:memory:/a\n", ""),
        ("", "0::/\n", ""),
    ],
)
def test_own_group(mountinfo: str, membership: str, folder: str) -> None:
    """Found wherever it is mounted, a part of the hierarchy or all of it, beside version 1 or alone."""
    assert cgroups.own(mountinfo, membership) == folder


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name says run and node; there is none where somebody forbids it, or where the words are not of our making."""
    monkeypatch.delenv(cgroups.SWITCH, raising=False)
    assert cgroups.name_of("0123abcd", "cdef4567") == "dlrover-0123abcd-cdef4567"
    assert cgroups.name_of("", "cdef4567") == cgroups.name_of("0123abcd", "../../x") == ""
    monkeypatch.setenv(cgroups.SWITCH, "off")
    assert cgroups.name_of("0123abcd", "cdef4567") == ""


def test_where_none_may_be_made(tmp_path: Path) -> None:
    """A folder that is not our group is refused; ending the groups of a run leaves others alone."""
    (tmp_path / "cgroup.procs").write_text("1\n")
    with pytest.raises(OSError, match="is not the control group that this process is in"):
        Group.made("dlrover-0123-4567", str(tmp_path))
    with pytest.raises(OSError, match=r"cgroup\.procs"):
        Group.made("dlrover-0123-4567", "")
    for name in ("dlrover-0123-4567", "dlrover-0123-89ab", "dlrover-4567-0123", "other"):
        (tmp_path / name).mkdir()
    assert cgroups.end_all(str(tmp_path), 1.0)
    assert cgroups.end_all(str(tmp_path), 1.0, run="*")
    assert cgroups.end_all("", 1.0, run="0123")
    assert cgroups.end_all(str(tmp_path / "none"), 1.0, run="0123")
    assert len(list(tmp_path.iterdir())) == 5
    assert cgroups.end_all(str(tmp_path), 1.0, node="89ab")
    assert cgroups.end_all(str(tmp_path), 1.0, run="0123")
    assert sorted(one.name for one in tmp_path.iterdir() if one.is_dir()) == ["dlrover-4567-0123", "other"]


@pytest.fixture
def group() -> Iterator[Group]:
    """A real one."""
    try:
        made = Group.made(f"dlrover-test{os.getpid()}-0000", cgroups.own())
    except OSError as error:
        pytest.skip(f"no control group of version 2 can be made here: {error}")
    yield made
    made.end(5.0)


DAEMON = """
import os, sys, time
os.setsid()
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
os.execve("/bin/sleep", ["sleep", "600"], {})
"""


def start() -> subprocess.Popen[bytes]:
    """A process that becomes a daemon without environment when it is told to."""
    line = [sys.executable, "-I", "-S", "-c", f"import sys; sys.stdin.read(1)\n{DAEMON}"]
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_a_daemon_does_not_leave_its_group(group: Group, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a member, in a group of its own below too, and is killed with it, by kernels without cgroup.kill as well."""
    if kernel == "old":
        write = cgroups._write

        def without(path: str, text: str) -> None:
            if path.endswith("cgroup.kill"):
                raise FileNotFoundError(2, os.strerror(2), path)
            write(path, text)

        monkeypatch.setattr(cgroups, "_write", without)
    with start() as first, start() as second:
        daemons = []
        for one in (first, second):
            group.take(one.pid)
            assert one.stdin is not None
            assert one.stdout is not None
            one.stdin.write(b"x")
            one.stdin.flush()
            daemons.append(int(one.stdout.readline()))
            one.wait()  # it may end after its daemon has said who that is
        below = Path(group.folder, "below")
        below.mkdir()
        Group(str(below)).take(daemons[1])
        assert sorted(group.members()) == sorted(daemons)
        assert group.end(10.0)
        assert not Path(group.folder).exists()
        assert group.members() == []
        group.kill()  # nothing, for one that is gone
        with pytest.raises(OSError, match=r"cgroup\.procs"):
            group.take(os.getpid())

"""OOM kills of our memory group: counted, told from the host's shortage, and brought together with deaths."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrover_adapters.agent.cgroup import DEATH_S, Killed, Kills, Memory, MemoryGroup, found

SECOND = 1_000_000


def machine(root: Path, version: int, *, inside: str = "/pod/us", limit: str = "1000000", here: bool = True) -> Path:
    """A machine whose process is in the group ``inside``; not ``here``: only the container's own root is mounted."""
    lines = {2: f"0::{inside}", 1: f"5:cpu:/x\n4:memory:{inside}\n0::/"}
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"{lines[version]}\n")
    base = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    for folder in (base, *((base / "pod", base / "pod/us") if here else ())):
        folder.mkdir(parents=True, exist_ok=True)
        bound = limit if folder.name == "us" or not here else ("max" if version == 2 else str(2**63 - 4096))
        (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(f"{bound}\n")
        counted(folder, version, 0, 0)
    return base / "pod/us" if here else base


def counted(folder: Path, version: int, kills: int, pressed: int) -> None:
    """The kernel's counters."""
    if version == 2:
        (folder / "memory.events").write_text(
            f"low 0\nhigh 0\nmax 9\noom {pressed}\noom_kill {kills}\noom_group_kill 0\n"
        )
    else:
        (folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        (folder / "memory.failcnt").write_text(f"{pressed}\n")


@pytest.mark.parametrize("here", [True, False], ids=["host", "container"])
@pytest.mark.parametrize("version", [1, 2])
def test_our_group_is_found_and_read(tmp_path: Path, version: int, here: bool) -> None:
    """Both versions, and a container that does not see its own path: the group's own counters are read."""
    folder = machine(tmp_path, version, here=here)
    group = found(tmp_path)
    assert group is not None
    assert (group.version, group.limited, group.name) == (version, True, "/pod/us" if here else "")
    counted(folder, version, 3, 7)
    assert group.look() == Memory(3, 7)


def test_a_machine_without_groups_has_none(tmp_path: Path) -> None:
    """Nothing mounted, nothing found, and no error."""
    assert found(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    assert found(tmp_path) is None


@pytest.mark.parametrize("version", [1, 2])
def test_without_a_limit_it_was_the_host(tmp_path: Path, version: int) -> None:
    """A kill in a group where no limit can be seen, or none was reached, is the host's shortage."""
    folder = machine(tmp_path, version, limit="max" if version == 2 else str(2**63 - 4096))
    group = found(tmp_path)
    assert isinstance(group, MemoryGroup)
    assert not group.limited
    kills = Kills()
    kills.counted(group.look(), 0)
    counted(folder, version, 1, 1)
    kills.counted(group.look(), SECOND)
    assert kills.died(1, 3, SECOND) == [Killed(1, 3, 1, limit=False)]


def test_a_kill_and_a_death_belong_together_whichever_is_heard_first() -> None:
    """A rise of the counter and a death by SIGKILL within two seconds are one thing, and name the rank."""
    kills = Kills()
    assert kills.counted(Memory(5, 9), 0) == []  # before us
    assert kills.counted(Memory(6, 10), SECOND) == []
    assert kills.died(1, 2, 2 * SECOND) == [Killed(1, 2, 1, limit=True)]
    assert kills.died(1, 3, 3 * SECOND) == []
    assert kills.counted(Memory(7, 10), 4 * SECOND) == [Killed(1, 3, 1, limit=True)]
    assert kills.due(100 * SECOND) == []


def test_a_death_long_before_is_no_oom() -> None:
    """Somebody's SIGKILL an hour ago is not explained by a kill of now; that one was of a process that is no worker."""
    kills = Kills()
    kills.counted(Memory(0, 0), 0)
    assert kills.died(1, 0, SECOND) == []
    assert kills.counted(Memory(2, 1), 60 * SECOND) == []
    assert kills.due(61 * SECOND) == []
    assert kills.due(60 * SECOND + int(DEATH_S * SECOND)) == [Killed(0, -1, 2, limit=True)]
    assert kills.due(100 * SECOND) == []

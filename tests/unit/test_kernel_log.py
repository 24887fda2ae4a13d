"""Records of the kernel's log: parsed, timed, and told from what is not about us."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlrover_adapters.agent.kernel_log import KernelLog, Ours, parsed

SECOND = 1_000_000
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4321, name=python3, GPU has fallen off the bus."
CHOSEN = "oom-kill:constraint={},nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg={},task_memcg={},task=python3,pid=77,uid=0"
KILLED = "Killed process 77 (python3) total-vm:72536kB, anon-rss:58276kB"


def record(text: str, at_us: int = 5, priority: int = 6) -> bytes:
    """One record as the kernel prints it."""
    return f"{priority},1234,{at_us},-;{text}\n".encode()


def test_a_record_is_parsed() -> None:
    """Priority, number, time and flags stand before the text; a newer kernel may say more there."""
    assert parsed(record(XID, 5_678_901).rstrip()) == (XID, 5_678_901)
    assert parsed(b"4,1,2,c,caller=T1;a; b") == ("a; b", 2)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" SUBSYSTEM=pci",
        b"no record",
        b"6,x,1,-;text",
        b"30,1,2,-;a program wrote this",
        pytest.param(b"6,1," + b"9" * 5000 + b",-;text", id="endless"),
    ],
)
def test_what_is_not_the_kernels_word_is_left_out(raw: bytes) -> None:
    """Details of devices, garbage, and what programs wrote into the log are nobody's evidence."""
    assert parsed(raw) is None


@pytest.fixture
def fifo(tmp_path: Path) -> tuple[KernelLog, int]:
    """A log, and where the kernel writes it."""
    os.mkfifo(tmp_path / "kmsg")
    log = KernelLog(str(tmp_path / "kmsg"))
    return log, os.open(tmp_path / "kmsg", os.O_WRONLY)


def test_records_are_read_as_they_come(fifo: tuple[KernelLog, int]) -> None:
    """New records come with their times, details are skipped, and an empty log is no end."""
    log, kernel = fifo
    assert log.read(9 * SECOND) == []
    os.write(
        kernel,
        record(XID, 9 * SECOND + 1) + b" SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n" + b"6,1235,9000002,-;half a",
    )
    assert log.read(10 * SECOND) == [(XID, 9 * SECOND + 1)]
    os.write(kernel, b" line\n")
    os.close(kernel)
    assert [one.text for one in log.read(11 * SECOND)] == ["half a line"]
    assert log.read(12 * SECOND) == []
    log.close()


def test_the_kernels_clock_may_be_off(fifo: tuple[KernelLog, int]) -> None:
    """Stamps drift over months: what is new was written since the last look, whatever its stamp says."""
    log, kernel = fifo
    log.read(100 * SECOND)
    os.write(kernel, record("early", 3 * SECOND) + record("late", 300 * SECOND) + record("right", 101 * SECOND))
    assert [one.at_us // SECOND for one in log.read(102 * SECOND)] == [100, 102, 101]
    os.close(kernel)
    log.close()


def test_what_was_there_before_is_not_read(tmp_path: Path) -> None:
    """The boot's messages and last week's Xids explain nothing of this job."""
    path = tmp_path / "kmsg"
    path.write_bytes(record("old"))
    log = KernelLog(str(path))
    assert log.read(1) == []
    with path.open("ab") as file:
        file.write(record("new"))
    assert [one.text for one in log.read(2)] == ["new"]
    log.close()


def test_an_overrun_costs_what_was_overwritten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel's ring may lap its reader: it says so once, and reading goes on with what is there."""
    (tmp_path / "kmsg").touch()
    log, answers = KernelLog(str(tmp_path / "kmsg")), [BrokenPipeError(32, "overrun"), record(XID), BlockingIOError()]

    def read(_fd: int, _size: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr("dlrover_adapters.agent.kernel_log.os.read", read)
    assert [one.text for one in log.read(1)] == [XID]
    assert log.lost == 1
    log.close()


def test_the_rank_is_that_of_the_named_process() -> None:
    """A line that names one of our workers' pids is about its rank; where pids are not the kernel's own, none is known."""
    ranks = {4321: 3, 77: 1}
    assert Ours().rank(XID, ranks) == 3
    assert Ours().rank("python3[77]: segfault at 0 ip 00 sp 00 error 4 in libnccl.so.2", ranks) == 1
    assert Ours().rank(XID, {}) == -1
    assert Ours(numbers=False).rank(XID, ranks) == -1


@pytest.mark.parametrize(
    ("lines", "ranks", "kept"),
    [
        (
            [CHOSEN.format("CONSTRAINT_MEMCG", "/pod/other", "/pod/other"), f"Memory cgroup out of memory: {KILLED}"],
            {},
            0,
        ),
        ([CHOSEN.format("CONSTRAINT_MEMCG", "/pod", "/pod/us"), f"Memory cgroup out of memory: {KILLED}"], {}, 1),
        ([CHOSEN.format("CONSTRAINT_MEMCG", "/pod/us", "/pod/us/in"), f"Memory cgroup out of memory: {KILLED}"], {}, 1),
        ([CHOSEN.format("CONSTRAINT_MEMCG", "/pod", "/pod/usual"), f"Memory cgroup out of memory: {KILLED}"], {}, 0),
        ([f"Memory cgroup out of memory: {KILLED}"], {}, 0),
        ([f"Memory cgroup out of memory: {KILLED}"], {77: 0}, 1),
        ([CHOSEN.format("CONSTRAINT_NONE", "/", "/pod/other"), f"Out of memory: {KILLED}"], {}, 1),
        (["python3 invoked oom-killer: gfp_mask=0xcc0", f"Out of memory: {KILLED}"], {}, 1),
        ([XID], {}, 1),
    ],
)
def test_another_containers_shortage_is_not_ours(lines: list[str], ranks: dict[int, int], kept: int) -> None:
    """The log is the whole machine's: a memory group's kill counts where its victim was ours, the host's shortage always."""
    ours = Ours("/pod/us")
    assert sum(ours.keeps(one, ranks) for one in lines) == kept


def test_numbers_without_end_are_nobodys() -> None:
    """A line with thousands of digits names no process of ours, and costs nothing."""
    ours = Ours()
    assert [
        ours.rank(text, {77: 3}) for text in (f"pid={'7' * 5000}", f"python3[{'7' * 5000}]: segfault", "pid=77,")
    ] == [-1, -1, 3]

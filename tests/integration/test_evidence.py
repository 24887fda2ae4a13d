"""What an agent sees of a failure is in the event log, from a real `dlrover-run`: output, the kernel's log, OOM kills."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Job, eventually

from dlrover_adapters.agent import cgroup
from dlrover_adapters.agent.last_words import LastWords
from dlrover_adapters.agent.log_watch import Known, Output

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python3, GPU has fallen off the bus."
Make = Callable[..., Any]

SCRIPT = f"""
import os, sys, time
FOLDER, RANK = os.environ["FOLDER"], os.environ["RANK"]
if RANK == "1":
    print("{ECC}")
    for number in range(2000):
        print("noise that fills the tail", number)
    sys.stdout.flush()
while not os.path.exists(FOLDER + "/finish"):
    time.sleep(0.02)
sys.exit(1 if RANK == "1" else 0)
"""


def seen(job: Job, source: str) -> list[dict[str, object]]:
    """The fields of what was seen by this source."""
    return [one["fields"] for one in job.events("EvidenceSeen") if one["fields"]["source"] == source]


def test_lines_of_workers_and_of_the_kernel_are_evidence(tmp_path: Path) -> None:
    """A known line, long out of the tail when its worker dies, and a kernel's record are in the log with rank and text."""
    (tmp_path / "train.py").write_text(SCRIPT)
    kernel = tmp_path / "kmsg"
    kernel.touch()
    arguments = ("--nproc-per-node", "2", "--max-restarts", "0", "train.py")
    with Job(tmp_path, *arguments, env={"DLROVER_KERNEL_LOG": str(kernel)}) as job:
        (found,) = eventually(lambda: seen(job, "log") or None, "the worker's line")
        assert (found["signature"], found["rank"], found["generation"]) == ("cuda.ecc", 1, 1)
        assert str(found["text"]).startswith(ECC)
        with kernel.open("a") as file:
            file.write(f"3,1,1,-;{XID}\n")
        (told,) = eventually(lambda: seen(job, "kernel") or None, "the kernel's line")
        assert (told["signature"], told["text"]) == ("xid.fallen_off", XID)
        assert "3b:00" in str(told["subject"])
        assert told["host"]
        job.finish()
        assert job.ended() == 1
        assert job.left() == []


@pytest.mark.nightly(reason="test_slow_ranks.py::test_detectors_can_be_off stands for it in make test")
def test_with_detectors_off_nothing_is_looked_for(tmp_path: Path) -> None:
    """`--detect off` leaves output alone: the log has no evidence but the deaths themselves."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with Job(tmp_path, "--nproc-per-node", "2", "--max-restarts", "0", "--detect", "off", "train.py") as job:
        job.finish()
        assert job.ended() == 1
        assert job.events("WorkerExited")
        assert job.events("EvidenceSeen") == []


@contextlib.contextmanager
def limited_group(limit_bytes: int) -> Iterator[None]:
    """Whatever this thread starts lives in a memory group of its own. Skips where that cannot be made."""
    ours = cgroup.found()
    if ours is None or ours.version != 1:
        pytest.skip("needs a memory control group of version 1")
    group, tid = ours.folders[0] / "dlrover-test", str(threading.get_native_id())
    try:
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        (group / "tasks").write_text(tid)
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    try:
        yield
    finally:
        (ours.folders[0] / "tasks").write_text(tid)
        eventually(lambda: not (group / "tasks").read_text(), "the end of everything in the group")
        group.rmdir()


def test_an_oom_kill_is_evidence(tmp_path: Path) -> None:
    """A worker that eats its memory group's limit dies of SIGKILL; the log says that it was the OOM killer, and which rank."""
    (tmp_path / "eats.py").write_text("eaten = []\nwhile True:\n    eaten.append(bytearray(8_000_000))\n")
    with limited_group(1536 * 2**20), Job(tmp_path, "--max-restarts", "0", "eats.py") as job:
        assert job.ended() == 1
        (found,) = seen(job, "cgroup")
        assert (found["signature"], found["rank"], found["generation"]) == ("cgroup.oom", 0, 1)
        assert job.events("WorkerExited")[0]["fields"]["exit_code"] == -9


class Watch:
    """Notes down what a launcher tells of outputs."""

    def __init__(self) -> None:
        self.followed: list[Output] = []
        self.finished: list[str] = []

    def follow(self, output: Output) -> None:
        """A worker writes."""
        self.followed.append(output)

    def finish(self, path: str) -> None:
        """It is dead."""
        self.finished.append(path)

    def known(self, exit_code: int, words: LastWords) -> Known:
        """By everything that a death leaves behind."""
        return Known(f"code{exit_code}", words.tail.strip())


async def _watched(rig: Make) -> None:
    async with rig("sys.stderr.write(f'rank {RANK} said this')\nsys.exit(3)", nproc=2) as node:
        watch = node.launcher._watch = Watch()
        ends = await node.run()
        assert [(one.signature, one.place) for one in ends] == [
            ("code3", "rank 0 said this"),
            ("code3", "rank 1 said this"),
        ]
        assert [(one.rank, one.generation) for one in watch.followed] == [(0, 1), (0, 1), (1, 1), (1, 1)]
        assert sorted(watch.finished) == sorted(one.path for one in watch.followed)
        assert len({one.pid for one in watch.followed}) == 2


def test_who_watches_hears_of_every_output_and_knows_every_death(rig: Make) -> None:
    """Both streams of every worker are followed and finished, and exits bear what they are known by."""
    asyncio.run(_watched(rig))

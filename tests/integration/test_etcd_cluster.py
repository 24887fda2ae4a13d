"""The etcd that tests start: real, gone with whoever started it, and honest about whether its members hold the same."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from running import eventually
from tools.etcd_cluster import Cluster, EtcdError

ROOT = Path(__file__).parents[2]


def test_nothing_outlives_its_owner(gone: Callable[[int], Awaitable[None]], tmp_path: Path) -> None:
    """Members and their data are gone soon after the process that started them is killed."""
    command = [sys.executable, "-m", "tools.etcd_cluster", "--members", "3"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as owner:
        assert owner.stdout is not None
        said = [owner.stdout.readline() for _ in range(4)]
        owner.send_signal(signal.SIGKILL)
    pids = [int(one) for line in said for one in re.findall(r"pid (\d+)", line)]
    assert len(pids) == 3, said

    async def all_gone() -> None:
        for pid in pids:
            await gone(pid)

    asyncio.run(asyncio.wait_for(all_gone(), 10))
    eventually(lambda: not list(tmp_path.iterdir()), "their data are gone")


def test_members_come_and_go() -> None:
    """A killed leader is succeeded, a restarted member finds its data and ports again, and then all hold the same."""
    with Cluster(3) as etcd:
        etcd.put("key", "value")
        endpoints, first = etcd.endpoints, etcd.leader()
        etcd.kill(first)
        with pytest.raises(EtcdError, match="does not run"):
            etcd.pause(first)
        assert etcd.leader() != first
        etcd.put("key", "other")
        etcd.start(first)
        etcd.wait_healthy()
        assert etcd.endpoints == endpoints
        assert etcd.members_agree()
        before = etcd.hash_kv()
        etcd.put("key", "third")
        assert etcd.hash_kv() != before
        assert etcd.members_agree()
        assert etcd.folder.is_dir()
    assert not etcd.folder.exists()


def fill(etcd: Cluster) -> None:
    """More than four megabytes, of which each but the first may be one too many."""
    for number in range(8):
        etcd.put(f"junk{number}", "x" * 1_000_000)


def test_full_and_emptied() -> None:
    """A member that ran full says so until there is room again."""
    with Cluster(quota_bytes=4_000_000) as etcd:
        with pytest.raises(OSError, match="space exceeded"):
            fill(etcd)
        assert etcd.alarms() == ["NOSPACE"]
        etcd.delete("junk")
        etcd.make_room()
        assert etcd.alarms() == []
        etcd.put("key", "value")


def test_a_member_that_cannot_start_says_why() -> None:
    """What etcd complains of is in the error."""
    with pytest.raises(EtcdError, match=r"member 0 ended with .*no-such-flag"), Cluster(extra=["--no-such-flag"]):
        pass

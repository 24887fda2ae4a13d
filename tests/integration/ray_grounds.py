"""Ray clusters for tests: real raylets on this machine, in a process of their own, of which nothing is left at the end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from dlrover_backends.shared import process

SCRIPT = Path(__file__).with_name("scripts") / "ray_ground.py"
START_S, ORDER_S = 90.0, 60.0
TEST_MARK = "DLROVER_TEST_MARK"  # in the environment of all that a test starts


class RayGround:
    """A running cluster. ``address``: of its state service; ``hosts``: ids of its raylets; ``folder``: where its files are."""

    def __init__(self, orders: TextIO, answers: TextIO, folder: Path) -> None:
        self._orders, self._answers, self.folder = orders, answers, folder
        told = self._heard(START_S)
        self.pid, self.address, self.hosts = int(told["pid"]), str(told["address"]), list(told["hosts"])

    def order(self, order: str, **told: Any) -> Any:
        """Have something done to the cluster; what came of it."""
        self._orders.write(json.dumps({"order": order, **told}) + "\n")
        self._orders.flush()
        return self._heard(ORDER_S)

    def add(self, **told: Any) -> str:
        """One more raylet; its id."""
        self.hosts.append(self.order("add", **told))
        return self.hosts[-1]

    def _heard(self, bound_s: float) -> Any:
        assert select.select([self._answers], [], [], bound_s)[0], f"the cluster said nothing for {bound_s:g} s"
        line = self._answers.readline()
        assert line, "the cluster's process has ended"
        return json.loads(line)


@contextmanager
def ray_ground(*hosts: dict[str, Any], env: Mapping[str, str] = MappingProxyType({})) -> Iterator[RayGround]:
    """A cluster with a raylet for each of ``hosts``, whose arguments they are (``num_cpus``, ``labels``, ``node_name``).

    ``env``: further variables, such as ``RAY_gcs_storage``
    """
    mark = os.urandom(16).hex()
    # Not tmp_path: the address of a socket has 107 bytes.
    folder = tempfile.mkdtemp(prefix="rt-", dir="/tmp")
    words = [sys.executable, str(SCRIPT), folder, *map(json.dumps, hosts)]
    with Path(folder, "ground.log").open("w", encoding="utf-8") as said:
        # Nobody's child: Ray keeps idle workers from test to test, and what a test starts must end with it.
        environ = {name: value for name, value in os.environ.items() if name != TEST_MARK}
        child = subprocess.Popen(
            [shutil.which("setsid") or "setsid", "--fork", *words],
            env={**environ, **env, process.MARK: mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
    assert child.stdin is not None
    assert child.stdout is not None
    pid = 0
    try:
        child.wait()
        ground = RayGround(child.stdin, child.stdout, Path(folder))
        pid = ground.pid
        yield ground
    finally:
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Raylets, their workers and all that these have started bear the mark, or belong to the session.
        left = process.kill_all(mark, pid or child.pid, 10.0)
        child.stdin.close()
        child.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)
    assert left == 0, "processes of Ray cannot be killed"


def processes_of(run: str, node: str = "", with_env: str = "") -> list[int]:
    """Processes that belong to a run: agents and what they have started; of one node, or with ``NAME=VALUE``, if named."""
    more = [f"DLROVER_NODE={node}"] if node else []
    wanted = {one.encode() for one in (f"DLROVER_RUN={run}", *more, *filter(None, [with_env]))}
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def parent_of(pid: int) -> int:
    """The process that started this one: an agent's keeper."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def keeper_of(run: str, node: str) -> int:
    """The process of a node's actor: the parent of its agent, which is nobody's child of the node."""
    found = processes_of(run, node)
    [keeper] = {parent_of(pid) for pid in found} - set(found)
    return keeper


def desk_of(folder: Path) -> int:
    """The desk whose socket lies somewhere below there."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_text().split("\0") if entry.name.isdigit() else []
            if any(word.startswith(f"{folder}/") and word.endswith("ray-desk.sock") for word in words):
                return int(entry.name)
    raise AssertionError("no desk serves there")

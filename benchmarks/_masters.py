"""Two masters of one job, each with its launcher as on a host of its own, and a host that trains; the log in etcd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _bench import HERE, say
from _etcd import NotMeasurable
from _hosts import kill_tree, parents
from _jobs import MARK, marked

from dlrover_adapters.http.client import fetch_status, send_command
from dlrover_core import CoreError
from dlrover_core.errors import Refused
from dlrover_core.kernel.events import Record
from dlrover_core.logs import open_log

JOB, WORKERS = "bench", 2
SCRIPT = HERE / "scripts" / "even_step.py"
START_LIMIT_S = 60.0
ASK_S = 2.0
PROGRAMS = Path(sys.executable).parent


class Side:
    """One host that runs masters: its launcher, its port, its state directory."""

    def __init__(self, name: str, folder: Path, log: str, env: Mapping[str, str]) -> None:
        self.name, self.folder, self.env = name, folder, env
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.token = env["DLROVER_TOKEN"]
        launch = ["--job-id", JOB, "--nnodes", "1", "--nproc-per-node", str(WORKERS), "--bind", self.address]
        self.command = [str(PROGRAMS / "dlrover"), "master", *launch, "--log", log, "--state-dir", str(folder / name)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the launcher of this side."""
        self.process = spawn(self.command, self.folder / f"{self.name}.out", self.env)

    def kill(self) -> float:
        """SIGKILL its launcher and its master, as a host dies; when that was."""
        assert self.process is not None
        at = kill_tree(self.process.pid)
        self.process.wait()
        return at

    def kill_master(self) -> float:
        """SIGKILL its master alone: the launcher lives, and starts another one; when that was."""
        assert self.process is not None
        above = parents()
        masters = [
            pid for pid, parent in above.items() if parent == self.process.pid and named(pid) == "dlrover-master"
        ]
        at = time.monotonic()
        for pid in masters:
            os.kill(pid, signal.SIGKILL)
        if not masters:
            raise NotMeasurable(f"{self.name} has no master; it said: {self.said()}")
        return at

    def hand_over(self) -> float:
        """SIGTERM its launcher; when that was."""
        assert self.process is not None
        at = time.monotonic()
        self.process.terminate()
        return at

    async def status(self) -> Mapping[str, Any]:
        """What its master says of itself; empty: nothing."""
        try:
            return await fetch_status(self.address, self.token, timeout_s=ASK_S)
        except CoreError:
            return {}

    async def decides(self) -> bool:
        """Ask for something that is refused, and recorded, by whoever leads; has that become durable here?"""
        asked = {"command": "drain", "node": "nobody", "reason": "asked by a benchmark", "job": JOB}
        try:
            await send_command(self.address, self.token, asked, timeout_s=ASK_S)
        except Refused:
            return True
        except CoreError:
            return False
        raise NotMeasurable("a node that is not there was drained")

    def said(self) -> str:
        """The end of what it printed."""
        out = self.folder / f"{self.name}.out"
        return out.read_text(errors="replace")[-1500:] if out.exists() else ""


class Pair:
    """Both sides and the host that trains. Use `pair`."""

    def __init__(self, folder: Path, log: str, workers: Sequence[str] = ()) -> None:
        self.folder, self.log, self.mark = folder, log, secrets.token_hex(8)
        strange = ("DLROVER", "PET_")
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(strange)}
        self.env |= {"TMPDIR": str(folder), "DLROVER_TOKEN": secrets.token_hex(16), MARK: self.mark}
        self.sides = [Side(name, folder, log, self.env) for name in ("a", "b")]
        self.diary = folder / "diary"
        self.diary.mkdir()
        masters = ",".join(side.address for side in self.sides)
        launch = [
            "--master",
            masters,
            "--rdzv-id",
            JOB,
            "--nnodes",
            "1",
            "--nproc-per-node",
            str(WORKERS),
            "--preload",
            "none",
        ]
        self.command = [str(PROGRAMS / "dlrover-run"), *launch, "--state-dir", str(folder / "host")]
        self.command += [str(SCRIPT), str(self.diary)]
        self.host: subprocess.Popen[bytes] | None = None

    def train(self) -> None:
        """Start the host with the workers."""
        self.host = spawn(self.command, self.folder / "host.out", self.env)

    async def settled(self) -> tuple[Side, Side, Mapping[str, Any]]:
        """Who leads, who stands by, what the leader says; once the standby has all of it and the workers step."""
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            told = [await side.status() for side in self.sides]
            roles = [one.get("role", "") for one in told]
            if sorted(roles) == ["leader", "standby"]:
                at = roles.index("leader")
                leader, standby = told[at], told[1 - at]
                stepping = leader["agents"] == 1 and leader["step"] > 0 and len(self.workers()) == WORKERS
                if stepping and standby["seq"] >= leader["seq"]:
                    return self.sides[at], self.sides[1 - at], leader
            if time.monotonic() > deadline:
                said = "\n".join(f"{side.name}: {side.said()}" for side in self.sides)
                host = (self.folder / "host.out").read_text(errors="replace")[-1500:]
                raise NotMeasurable(f"no leader, warm standby and agent: {told}\n{said}\nhost: {host}")
            await asyncio.sleep(0.05)

    async def records(self, after: int) -> list[Record]:
        """What was decided since."""
        async with open_log(self.log) as log:
            return [record async for record in log.read(JOB, after)]

    def workers(self) -> dict[str, int]:
        """When each rank last began, in nanoseconds: it changes when one is started anew."""
        return {one.name: one.stat().st_mtime_ns for one in self.diary.iterdir()}

    def end(self) -> None:
        """Kill both sides and the host that trains."""
        for process in (*(side.process for side in self.sides), self.host):
            if process is not None and process.poll() is None:
                kill_tree(process.pid)
                process.wait()
        deadline = time.monotonic() + 5.0
        while left := marked(self.mark):
            if time.monotonic() > deadline:
                say(f"{len(left)} processes were left behind; killed")
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.02)


@contextlib.contextmanager
def pair(log: str) -> Iterator[Pair]:
    """Two masters and a host, in a folder that is removed."""
    folder = Path(tempfile.mkdtemp(prefix="dlb-"))
    made = Pair(folder, log)
    try:
        for side in made.sides:
            side.start()
        made.train()
        yield made
    finally:
        made.end()
        shutil.rmtree(folder, ignore_errors=True)


def named(pid: int) -> str:
    """A process's short name; empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def spawn(command: Sequence[str], output: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process in a session of its own."""
    with output.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )

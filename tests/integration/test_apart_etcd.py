"""Masters of two hosts for one launched job: a scheduler's nodes are levelled by whoever leads."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from running import BIN, SCRIPTS, TOKEN, WITHOUT_TORCH, eventually
from tools.etcd_cluster import Cluster

from dlrover_adapters.http.client import fetch_status
from dlrover_core.errors import CoreError

EXAMPLE = Path(__file__).parents[2] / "examples" / "backends" / "ssh_like.py"
ENV = {**os.environ, **WITHOUT_TORCH, "DLROVER_TOKEN": TOKEN}


@contextlib.contextmanager
def masters(folder: Path, name: str, etcd: str, ports: dict[str, int]) -> Iterator[subprocess.Popen[bytes]]:
    """`dlrover master` on the host ``name``, which knows the other; its nodes are the processes of a folder that hosts share."""
    everywhere = ",".join(f"127.0.0.1:{port}" for port in ports.values())
    line = (
        *("master", "--state-dir", str(folder / name), "--job-id", "apart", "--log", etcd, "--nnodes", "2"),
        *("--bind", f"127.0.0.1:{ports[name]}", "--masters", everywhere, "--set", "stop_grace_s=5"),
        *("--backend", f"{EXAMPLE}:SshLike:root={folder / 'nodes'}", str(SCRIPTS / "light_steps.py"), str(folder)),
    )
    with (folder / f"said-{name}").open("wb") as said:
        process = subprocess.Popen(
            [str(BIN / "dlrover"), *line],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=ENV,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def free() -> int:
    """A port that nobody has, for masters that are told of each other before either listens."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as port:
        return int(port.getsockname()[1])


def dlrover(etcd: str, command: str) -> str:
    """What is said of the job by its log."""
    return commands.dlrover([command, "apart", "--log", etcd, "--json"], ENV).stdout


def step(port: int) -> int | None:
    """The step that the job is at, as the master at this port says while it leads; None: it does not."""
    import asyncio

    with contextlib.suppress(CoreError, OSError):
        status = asyncio.run(fetch_status(f"127.0.0.1:{port}", TOKEN, timeout_s=2.0))
        return int(status["step"]) if status["role"] == "leader" and status["generation"] == 1 else None
    return None


def beyond(port: int, number: int, what: str) -> int:
    """Wait until a leader has seen a step after that one."""
    return eventually(lambda: now if (now := step(port)) is not None and now > number else None, what)


@pytest.mark.timeout(240)
def test_the_standby_of_another_host_levels_the_same_nodes(tmp_path: Path) -> None:
    """The host with the leading masters is lost: the other's lead, find both nodes, and neither restart nor launch anything."""
    ports = {"one": free(), "two": free()}
    (tmp_path / "finish").unlink(missing_ok=True)
    with Cluster() as cluster, contextlib.ExitStack() as stack:
        etcd = cluster.url("t", ttl="2")
        stack.callback(_end_nodes, tmp_path / "nodes")
        first = stack.enter_context(masters(tmp_path, "one", etcd, ports))
        reached = beyond(ports["one"], 3, "training")
        second = stack.enter_context(masters(tmp_path, "two", etcd, ports))
        eventually(lambda: "stands by" in (tmp_path / "said-two").read_text() or _stands_by(ports["two"]), "a standby")
        first.kill()
        first.wait()
        beyond(ports["two"], reached, "the standby's lead")
        (tmp_path / "finish").touch()
        assert second.wait(60) == 0, (tmp_path / "said-two").read_text()
        events = dlrover(etcd, "events")
        assert events.count('"NodePlanned"') == events.count('"WorkersStarted"') == 2
        assert '"IncidentOpened"' not in events
    assert [(tmp_path / f"told-{rank}").read_text().count("born") for rank in (0, 1)] == [1, 1]


def _stands_by(port: int) -> bool:
    import asyncio

    with contextlib.suppress(CoreError, OSError):
        return bool(asyncio.run(fetch_status(f"127.0.0.1:{port}", TOKEN, timeout_s=2.0))["role"] == "standby")
    return False


def _end_nodes(root: Path) -> None:
    for one in root.rglob("pid"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(one.read_text().split()[0]), signal.SIGKILL)

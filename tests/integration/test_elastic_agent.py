"""What torch's own tests ask of its elastic agent, with our rendezvous below it.

Torch ships none of those tests. These cases ask the same questions: each names what must hold, the agents are torch's, and
``dlrover`` stands where torch's tests have ``c10d``. What differs is in docs/torchs-own-tests.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import SCRIPTS

pytestmark = [
    pytest.mark.nightly(reason="test_torchrun_handler and test_torchrun_plugin stand for them in make test"),
    pytest.mark.alone(
        reason="torch's queues keep semaphores in shared memory, which other tests would find left behind"
    ),
    pytest.mark.timeout(900),  # each agent imports torch, and each worker
]
BOUND_S = 600.0
FOREVER_S = 3600
OFF = ("TORCHELASTIC_TIMER_FILE", "TORCHELASTIC_HEALTH_CHECK_PORT")
NODE = [sys.executable, str(SCRIPTS / "elastic_node.py")]


class Agents:
    """Agents of one run, each a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.run = folder, f"run-{uuid.uuid4().hex[:8]}"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        self._all: list[subprocess.Popen[str]] = []

    def start(
        self, entry: str, *args: object, env: dict[str, str] | None = None, **told: object
    ) -> subprocess.Popen[str]:
        """One more agent."""
        order = {
            "backend": "dlrover",
            "endpoint": self._endpoint,
            "run": self.run,
            "entry": entry,
            "args": args,
            **told,
        }
        environ = {**os.environ, "XDG_STATE_HOME": str(self._folder / "state"), "OMP_NUM_THREADS": "1", **(env or {})}
        process = subprocess.Popen(
            [*NODE, json.dumps(order)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._all.append(process)
        return process

    def alone(self, entry: str, *args: object, **told: Any) -> dict[str, Any]:
        """The result of a single agent."""
        return result(self.start(entry, *args, **told))

    def end(self) -> None:
        """Leave nothing behind."""
        for process in self._all:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                for one in (*parent.children(recursive=True), parent):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            process.communicate()


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the agent said at its end."""
    said, _ = process.communicate(timeout=BOUND_S)
    lines = [line for line in said.splitlines() if line.startswith("result ")]
    assert lines, f"exit code {process.returncode}:\n{said}"
    return dict(json.loads(lines[-1].removeprefix("result ")))


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """None yet."""
    made = Agents(tmp_path)
    try:
        yield made
    finally:
        made.end()


def succeeded(found: dict[str, Any]) -> dict[str, Any]:
    """What the workers returned, of an agent whose workers all ended well."""
    assert (found["state"], found["over"]) == ("SUCCEEDED", True), found
    return dict(found["returned"])


# ---- one agent


def test_a_failed_result_ends_at_once(agents: Agents) -> None:
    """Every worker fails: the result names them and what they raised, and `shutdown` after it waits for no time-out."""
    found = agents.alone("fails", nproc=2)
    assert found["state"] == "FAILED"
    assert {code for code, _ in found["failures"].values()} <= {1, -signal.SIGTERM}
    assert any(code == 1 for code, _ in found["failures"].values())
    assert any("told to fail" in str(message) for _, message in found["failures"].values())
    assert (found["over"], found["heard"]) == (True, True)


def test_workers_that_return_nothing(agents: Agents) -> None:
    """Each rank has an entry all the same."""
    assert succeeded(agents.alone("nothing", nproc=2)) == {"0": None, "1": None}


def test_workers_return_values(agents: Agents) -> None:
    """By rank."""
    assert succeeded(agents.alone("echo", "word", nproc=2)) == {"0": "word", "1": "word"}


def test_the_environment_of_workers(agents: Agents) -> None:
    """Everything torch promises is set; its own timer and health check are off, as nobody has switched them on."""
    names = [
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
        "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", *OFF,
    ]  # fmt: skip
    found = succeeded(agents.alone("environment", *names, restarts=2))["0"]
    assert all(found[name] for name in names if name not in OFF), found
    assert [found[name] for name in OFF] == [None, None]
    assert (found["TORCHELASTIC_RUN_ID"], found["TORCHELASTIC_MAX_RESTARTS"]) == (agents.run, "2")
    assert (found["TORCHELASTIC_USE_AGENT_STORE"], found["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("True", "1")


def test_what_somebody_sets_goes_before(agents: Agents, tmp_path: Path) -> None:
    """Master address and port of the spec, an environment variable of torch's, the timer's file, the health check's port."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", *OFF)
    timer = str(tmp_path / "timer")
    env = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
        "TORCHELASTIC_TIMER_FILE": timer,
        "TORCHELASTIC_HEALTH_CHECK_PORT": "1234",
    }
    found = succeeded(agents.alone("environment", *names, master=["some-host", 42], env=env))["0"]
    assert tuple(found.values()) == ("some-host", "42", "0", timer, "1234")


@pytest.mark.parametrize("shared", [True, False], ids=["our store", "rank 0's own store"])
def test_a_sum_over_the_ranks_of_one_node(agents: Agents, shared: bool) -> None:
    """Through the generation's store, or, as somebody may want it, one that rank 0 serves."""
    env = {} if shared else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert succeeded(agents.alone("total", nproc=2, env=env)) == {"0": 2, "1": 2}


def test_one_rank_fails(agents: Agents) -> None:
    """Then so has the result, with that rank as a failure; the other one is stopped."""
    found = agents.alone("odd_fails", FOREVER_S, nproc=2)
    assert found["state"] == "FAILED"
    assert found["failures"]["1"][0] == 1
    assert found["heard"]


def test_a_rank_that_fails_once(agents: Agents) -> None:
    """All start again, and that is counted."""
    found = agents.alone("fails_at_first", nproc=2, restarts=1)
    assert succeeded(found) == {"0": "attempt 1", "1": "attempt 1"}


def test_restarts_end(agents: Agents) -> None:
    """One restart of a script that always fails."""
    found = agents.alone("fails", restarts=1)
    assert found["state"] == "FAILED"
    assert found["heard"]


def test_a_last_barrier_that_fails_fails_nothing(agents: Agents) -> None:
    """The workers have ended well."""
    found = agents.alone("nothing", breaks_barrier=True)
    assert found["state"] == "SUCCEEDED"
    assert found["heard"]


# ---- several agents


def pair(agents: Agents, entry: str, *args: object, **told: Any) -> list[subprocess.Popen[str]]:
    """Two agents of one run; the first one has the masters."""
    return [agents.start(entry, *args, **{"nodes": [2, 2], **told}) for _ in range(2)]


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)], ids=["alike", "different"])
def test_a_sum_over_two_nodes(agents: Agents, sizes: tuple[int, int]) -> None:
    """All ranks of both are one world."""
    nodes = [agents.start("total", nproc=nproc, nodes=[2, 2]) for nproc in sizes]
    found = [succeeded(result(one)) for one in nodes]
    assert {rank: size for one in found for rank, size in one.items()} == dict.fromkeys("0123", 4)


def test_nodes_of_different_sizes_and_roles(agents: Agents) -> None:
    """Ranks of a node are one block, those of a role are counted through, and all know the sizes of both."""
    sizes = [("master", 2), ("trainer", 1), ("trainer", 2)]
    nodes = [agents.start("roles", role=role, nproc=nproc, nodes=[3, 3]) for role, nproc in sizes]
    found = [(role, list(succeeded(result(one)).values())) for (role, _), one in zip(sizes, nodes, strict=True)]
    assert sorted(one["RANK"] for _, ranks in found for one in ranks) == list(range(5))
    assert {one["WORLD_SIZE"] for _, ranks in found for one in ranks} == {5}
    for role, size in (("master", 2), ("trainer", 3)):
        ranks = [one for named, those in found if named == role for one in those]
        assert sorted(one["ROLE_RANK"] for one in ranks) == list(range(size))
        assert {one["ROLE_WORLD_SIZE"] for one in ranks} == {size}
    for _, unsorted in found:
        ranks = sorted(unsorted, key=lambda one: one["RANK"])
        for name in ("RANK", "ROLE_RANK"):
            assert [one[name] - ranks[0][name] for one in ranks] == list(range(len(ranks)))


def test_remote_calls_between_two_nodes(agents: Agents) -> None:
    """Torch's RPC finds the other rank through the store."""
    found = [succeeded(result(one)) for one in pair(agents, "asks", "word")]
    assert {rank: said for one in found for rank, said in one.items()} == {"0": "word", "1": ""}


def test_nodes_that_end_at_different_times(agents: Agents) -> None:
    """The quick one waits at the last barrier, and both succeed."""
    found = [succeeded(result(one)) for one in pair(agents, "sleeps_by_rank", 3)]
    assert {rank: said for one in found for rank, said in one.items()} == {"0": 0, "1": 1}


def test_nodes_that_end_too_far_apart(agents: Agents) -> None:
    """A last barrier that times out fails nobody."""
    found = [result(one) for one in pair(agents, "sleeps_by_rank", 4, barrier_s=0)]
    assert [one["state"] for one in found] == ["SUCCEEDED", "SUCCEEDED"]


def test_nobody_waits_at_the_last_barrier_after_a_failure(agents: Agents) -> None:
    """Both agents end, and neither waits for the other's workers or for the barrier: both would last longer than this test."""
    nodes = pair(agents, "odd_fails", FOREVER_S, nproc=2, barrier_s=FOREVER_S)
    found = [result(one) for one in nodes]
    assert [one["state"] for one in found] == ["FAILED", "FAILED"]


class Pipes:
    """Two pipes by name: in one the ranks say which world they are in, in the other they are told to go on."""

    def __init__(self, folder: Path) -> None:
        self.names = [str(folder / name) for name in ("arrived", "go")]
        for name in self.names:
            os.mkfifo(name)
        # Open at both ends: nobody waits for anybody to open the other one.
        self._arrived, self._go = (os.open(name, os.O_RDWR | os.O_NONBLOCK) for name in self.names)
        self._said = ""

    def await_world(self, size: int) -> None:
        """Until every rank of a world of this size has arrived."""
        until, missing = time.monotonic() + BOUND_S, {f"{size}/{rank}" for rank in range(size)}
        while missing:
            assert select.select([self._arrived], [], [], until - time.monotonic())[0], f"{missing} did not arrive"
            self._said += os.read(self._arrived, 4096).decode()
            *lines, self._said = self._said.split("\n")
            missing -= set(lines)

    def let_go(self) -> None:
        """Every rank, also those of worlds that are not yet."""
        os.write(self._go, bytes(64))

    def close(self) -> None:
        """Their ends here."""
        os.close(self._arrived)
        os.close(self._go)


@pytest.fixture
def pipes(tmp_path: Path) -> Iterator[Pipes]:
    """Two new ones."""
    made = Pipes(tmp_path)
    try:
        yield made
    finally:
        made.close()


def kill(agent: subprocess.Popen[str]) -> None:
    """The agent alone, as torch's tests do, and then its workers, which would live on without it.

    Its resource tracker ends by itself after the last of them, and takes the semaphores of torch's queues away.
    """
    family = psutil.Process(agent.pid).children(recursive=True)
    agent.kill()
    assert agent.wait() == -signal.SIGKILL
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in word for word in one.cmdline()):
                one.kill()
    _, alive = psutil.wait_procs(family, timeout=BOUND_S)
    assert not alive


def test_an_agent_killed_before_it_has_joined(agents: Agents) -> None:
    """The first one waits for its successor, and both train to the end."""
    told: dict[str, Any] = {"restarts": 2, "nodes": [2, 2]}
    host = agents.start("total", **told)
    kill(agents.start("total", **told, conf={"is_host": "false"}))
    again = agents.start("total", **told, conf={"is_host": "false"})
    assert [set(succeeded(result(one)).values()) for one in (host, again)] == [{2}, {2}]


def test_a_killed_agent_that_is_started_again(agents: Agents, pipes: Pipes) -> None:
    """The other one, whose workers were in one world with those of the dead one, waits for it; both train to the end."""
    told: dict[str, Any] = {"restarts": 2, "nodes": [2, 2]}
    host = agents.start("holds", *pipes.names, **told)
    other = agents.start("holds", *pipes.names, **told, conf={"is_host": "false"})
    pipes.await_world(2)
    kill(other)
    again = agents.start("holds", *pipes.names, **told, conf={"is_host": "false"})
    pipes.await_world(2)
    pipes.let_go()
    assert [set(succeeded(result(one)).values()) for one in (host, again)] == [{2}, {2}]


def test_a_killed_agent_that_stays_away(agents: Agents, pipes: Pipes) -> None:
    """With MIN:MAX the other one goes on alone."""
    told: dict[str, Any] = {"restarts": 2, "nodes": [1, 2]}
    host = agents.start("holds", *pipes.names, **told)
    other = agents.start("holds", *pipes.names, **told, conf={"is_host": "false"})
    pipes.await_world(2)
    kill(other)
    pipes.await_world(1)
    pipes.let_go()
    assert set(succeeded(result(host)).values()) == {1}


def test_an_agent_that_comes_later(agents: Agents, pipes: Pipes) -> None:
    """With MIN:MAX the workers of the first one are started again, in a world with those of the second."""
    told: dict[str, Any] = {"nodes": [1, 2]}
    host = agents.start("holds", *pipes.names, **told)
    pipes.await_world(1)
    other = agents.start("holds", *pipes.names, **told, conf={"is_host": "false"})
    pipes.await_world(2)
    pipes.let_go()
    assert [set(succeeded(result(one)).values()) for one in (host, other)] == [{2}, {2}]

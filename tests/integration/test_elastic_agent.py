"""What torch's own tests ask of its elastic agent, with our rendezvous below it.

Torch ships none of those tests. These cases ask the same questions: each names what must hold, the agents are torch's, and
``dlrover`` stands where torch's tests have ``c10d``. What differs is in docs/from-torchrun.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import SCRIPTS

pytestmark = pytest.mark.timeout(260)  # each worker imports torch, and each agent
BOUND_S = 200.0
NODE = [sys.executable, str(SCRIPTS / "elastic_node.py")]
nightly = pytest.mark.nightly(reason="test_a_failed_result_ends_at_once stands for them in make test")


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
    """Every worker fails: the result names both, and `shutdown` after it takes no longer than after a success."""
    found = agents.alone("fails", nproc=2)
    assert found["state"] == "FAILED"
    assert {code for code, _ in found["failures"].values()} <= {1, -signal.SIGTERM}
    assert any(code == 1 for code, _ in found["failures"].values())
    assert found["over"]
    assert found["shutdown_s"] < 10


@nightly
def test_workers_that_return_nothing(agents: Agents) -> None:
    """Each rank has an entry all the same."""
    assert succeeded(agents.alone("nothing", nproc=2)) == {"0": None, "1": None}


@nightly
def test_workers_return_values(agents: Agents) -> None:
    """By rank."""
    assert succeeded(agents.alone("echo", "word", nproc=2)) == {"0": "word", "1": "word"}


@nightly
def test_the_environment_of_workers(agents: Agents) -> None:
    """Everything torch promises is set, and its own timer and health check are switched on as ever."""
    names = [
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
        "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_TIMER_FILE",
    ]  # fmt: skip
    found = succeeded(agents.alone("environment", *names, restarts=2))["0"]
    assert all(found[name] for name in names[:-1]), found
    assert found["TORCHELASTIC_TIMER_FILE"] is None
    assert (found["TORCHELASTIC_RUN_ID"], found["TORCHELASTIC_MAX_RESTARTS"]) == (agents.run, "2")
    assert (found["TORCHELASTIC_USE_AGENT_STORE"], found["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("True", "1")


@nightly
def test_what_somebody_sets_goes_before(agents: Agents, tmp_path: Path) -> None:
    """Master address and port of the spec, an environment variable of torch's, and the timer's file."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_TIMER_FILE")
    timer = str(tmp_path / "timer")
    env = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
        "TORCHELASTIC_TIMER_FILE": timer,
    }
    found = succeeded(agents.alone("environment", *names, master=["some-host", 42], env=env))["0"]
    assert tuple(found.values()) == ("some-host", "42", "0", timer)


@nightly
@pytest.mark.parametrize("shared", [True, False], ids=["our store", "rank 0's own store"])
def test_a_sum_over_the_ranks_of_one_node(agents: Agents, shared: bool) -> None:
    """Through the generation's store, or, as somebody may want it, one that rank 0 serves."""
    env = {} if shared else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert succeeded(agents.alone("total", nproc=2, env=env)) == {"0": 2, "1": 2}


@nightly
def test_one_rank_fails(agents: Agents) -> None:
    """Then so has the result, with that rank as a failure; the other one is stopped."""
    found = agents.alone("odd_fails", 60, nproc=2)
    assert found["state"] == "FAILED"
    assert found["failures"]["1"][0] == 1
    assert found["shutdown_s"] < 10


@nightly
def test_a_rank_that_fails_once(agents: Agents) -> None:
    """All start again, and that is counted."""
    found = agents.alone("fails_at_first", nproc=2, restarts=1)
    assert succeeded(found) == {"0": "attempt 1", "1": "attempt 1"}


@nightly
def test_restarts_end(agents: Agents) -> None:
    """One restart of a script that always fails."""
    found = agents.alone("fails", restarts=1)
    assert found["state"] == "FAILED"
    assert found["shutdown_s"] < 10


@nightly
def test_a_last_barrier_that_fails_fails_nothing(agents: Agents) -> None:
    """The workers have ended well."""
    found = agents.alone("nothing", breaks_barrier=True)
    assert found["state"] == "SUCCEEDED"
    assert found["shutdown_s"] < 10


# ---- several agents


def pair(agents: Agents, entry: str, *args: object, **told: Any) -> list[subprocess.Popen[str]]:
    """Two agents of one run; the first one has the masters."""
    return [agents.start(entry, *args, **{"nodes": [2, 2], **told}) for _ in range(2)]


@nightly
def test_a_sum_over_two_nodes(agents: Agents) -> None:
    """Two ranks each."""
    found = [succeeded(result(one)) for one in pair(agents, "total", nproc=2)]
    assert {rank: size for one in found for rank, size in one.items()} == dict.fromkeys("0123", 4)


@nightly
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
    for _, ranks in found:
        for name in ("RANK", "ROLE_RANK"):
            assert [one[name] - ranks[0][name] for one in ranks] == list(range(len(ranks)))


@nightly
def test_remote_calls_between_two_nodes(agents: Agents) -> None:
    """Torch's RPC finds the other rank through the store."""
    found = [succeeded(result(one)) for one in pair(agents, "asks", "word")]
    assert {rank: said for one in found for rank, said in one.items()} == {"0": "word", "1": ""}


@nightly
def test_nodes_that_end_at_different_times(agents: Agents) -> None:
    """The quick one waits at the last barrier, and both succeed."""
    found = [succeeded(result(one)) for one in pair(agents, "sleeps_by_rank", 3)]
    assert {rank: said for one in found for rank, said in one.items()} == {"0": 0, "1": 1}


@nightly
def test_nodes_that_end_too_far_apart(agents: Agents) -> None:
    """A last barrier that times out fails nobody."""
    found = [result(one) for one in pair(agents, "sleeps_by_rank", 4, barrier_s=0)]
    assert [one["state"] for one in found] == ["SUCCEEDED", "SUCCEEDED"]


@nightly
def test_nobody_waits_at_the_last_barrier_after_a_failure(agents: Agents) -> None:
    """Both agents end together, and neither waits for the other's workers or the barrier's 60 s."""
    nodes = pair(agents, "odd_fails", 80, nproc=2)
    found = [result(one) for one in nodes]
    assert [one["state"] for one in found] == ["FAILED", "FAILED"]


@nightly
def test_a_killed_agent_that_is_started_again(agents: Agents) -> None:
    """The other one waits for it, and both train to the end."""
    told = {"nproc": 1, "restarts": 2, "nodes": [2, 2]}
    host = agents.start("total", 2, **told)
    other = agents.start("total", 2, **told, conf={"is_host": "false"})
    other.kill()
    again = agents.start("total", 2, **told, conf={"is_host": "false"})
    assert [set(succeeded(result(one)).values()) for one in (host, again)] == [{2}, {2}]


@nightly
def test_a_killed_agent_that_stays_away(agents: Agents) -> None:
    """With MIN:MAX the other one goes on alone."""
    told = {"nproc": 1, "restarts": 2, "nodes": [1, 2]}
    host = agents.start("total", 2, **told)
    other = agents.start("total", 2, **told, conf={"is_host": "false"})
    other.kill()
    assert other.wait() == -signal.SIGKILL
    assert set(succeeded(result(host)).values()) <= {1, 2}

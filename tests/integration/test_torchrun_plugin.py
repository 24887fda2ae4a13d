"""``torchrun --rdzv-backend dlrover``: torch's stock launcher and elastic agent, real processes, our master."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlrover_adapters.http.client import fetch_status
from dlrover_core.errors import CoreError
from dlrover_core.job.state import fold
from dlrover_core.kernel.events import Record
from dlrover_core.logs import open_log

BOUND_S = 40.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

# A worker that tells the test who it is, and then does what it is told: no import of torch, so that it is there at once.
PROBE = """
import json, os, signal, socket, sys
def on_term(number, frame):
    line.sendall(b'"term"\\n')
    os._exit(143)
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
signal.signal(signal.SIGTERM, on_term)
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"
line.sendall(json.dumps({"pid": os.getpid(), "run": os.environ["TORCHELASTIC_RUN_ID"], "node": sys.argv[2],
                         **{one.lower(): os.environ[one] for one in names}}).encode() + b"\\n")
for word in line.makefile():
    if word == "ping\\n":
        line.sendall(b'"pong"\\n')
    elif word == "raise\\n":
        raise RuntimeError("the probe was told to fail")
    else:
        os._exit(int(word))
os._exit(9)  # the test is gone
"""


class Worker:
    """One worker that has reported."""

    def __init__(self, line: socket.socket) -> None:
        line.settimeout(BOUND_S)
        self._line, self._words = line, line.makefile("r")
        told = json.loads(self._words.readline())
        self.rank, self.pid, self.node = int(told["rank"]), int(told["pid"]), str(told["node"])
        self.size, self.restarts = int(told["world_size"]), int(told["torchelastic_restart_count"])
        self.store = f"{told['master_addr']}:{told['master_port']}"
        self.told = told
        self._pidfd = os.pidfd_open(self.pid)

    def tell(self, word: object) -> None:
        """Order it: an exit code, ``ping`` or ``raise``."""
        self._line.sendall(f"{word}\n".encode())

    def alive(self) -> bool:
        """Does it answer?"""
        self.tell("ping")
        return self.next() == "pong"

    def next(self) -> Any:
        """Its next word; None at its end."""
        try:
            line = self._words.readline()
        except ConnectionError:
            line = ""
        return json.loads(line) if line else None

    def gone(self) -> None:
        """Wait for its end."""
        dead = select.poll()
        dead.register(self._pidfd, select.POLLIN)
        assert dead.poll(BOUND_S * 1000)

    def close(self) -> None:
        """Hear no more."""
        self._words.close()
        self._line.close()
        os.close(self._pidfd)


class Stage:
    """Torchruns on one host as if on several, and their workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        (folder / "probe.py").write_text(PROBE)
        self._ear = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._ear.settimeout(BOUND_S)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.runs: list[subprocess.Popen[str]] = []
        self.workers: list[Worker] = []

    def run(
        self, node: str, *, nnodes: str = "2", nproc: int = 1, restarts: int = 3, conf: str = "", script: str = "",
        endpoint: str = "127.0.0.1", job: str = "probe", **env: str,
    ) -> subprocess.Popen[str]:  # fmt: skip
        """One torchrun."""
        settings = ",".join(["last_call_timeout=0.5", "join_timeout=60", *([conf] if conf else [])])
        command = [
            *TORCHRUN, "--rdzv-backend", "dlrover", "--rdzv-endpoint", f"{endpoint}:{self.port}", "--rdzv-id", job,
            "--rdzv-conf", settings, "--nnodes", nnodes, "--nproc-per-node", str(nproc), "--max-restarts", str(restarts),
            "--log-dir", str(self.folder / f"logs-{node}"), "--monitor-interval", "0.05",
        ]  # fmt: skip
        arguments = (
            [script, str(self.folder)]
            if script
            else [str(self.folder / "probe.py"), str(self._ear.getsockname()[1]), node]
        )
        out = (self.folder / f"{node}.out").open("a")
        environment = {**os.environ, "XDG_STATE_HOME": str(self.state), "OMP_NUM_THREADS": "1", **env}
        with out:
            process = subprocess.Popen(
                [*command, *arguments],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.runs.append(process)
        return process

    def pair(self) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
        """Two nodes, the first of which is HOST."""
        host, other = self.run("host"), self.run("other", conf="is_host=false")
        return host, other

    def world(self, count: int) -> dict[int, Worker]:
        """The next ``count`` workers that report, by rank: one world."""
        found: dict[int, Worker] = {}
        while len(found) < count:
            line, _ = self._ear.accept()
            worker = Worker(line)
            self.workers.append(worker)
            assert worker.size == count, f"{worker.told} in a world of {count}"
            found[worker.rank] = worker
        assert sorted(found) == list(range(count))
        assert len({worker.store for worker in found.values()}) == 1
        return dict(sorted(found.items()))

    def listens(self) -> None:
        """Wait until the master at the endpoint does."""
        limit = time.monotonic() + BOUND_S
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert time.monotonic() < limit, "no master listens"
            time.sleep(0.02)  # a process that begins to listen rings no bell here

    def nobody_came(self) -> bool:
        """Has no further worker reported?"""
        self._ear.setblocking(False)
        try:
            self._ear.accept()[0].close()
        except BlockingIOError:
            return True
        finally:
            self._ear.settimeout(BOUND_S)
        return False

    def said(self, node: str) -> str:
        """What that torchrun has printed."""
        return (self.folder / f"{node}.out").read_text()

    def records(self, job: str = "probe") -> list[Record]:
        """The job's log."""

        async def read() -> list[Record]:
            async with open_log(f"sqlite://{self.state}/dlrover/log.db") as log:
                return [record async for record in log.read(job)]

        return asyncio.run(read())

    def status(self, job: str = "probe") -> dict[str, Any]:
        """What the leading master says."""
        token = (self.state / "dlrover" / "jobs" / job / "loopback.token").read_text().strip()
        return dict(asyncio.run(fetch_status(f"127.0.0.1:{self.port}", token)))

    def leader(self) -> int:
        """The pid of the leading master."""
        return int(self.status()["leader"].split("/")[1])

    def end(self) -> None:
        """Leave nothing behind."""
        for process in self.runs:
            with contextlib.suppress(ProcessLookupError):
                kill_tree(process.pid)
            process.wait(BOUND_S)
        for worker in self.workers:
            worker.close()
        self._ear.close()


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all that it started, as the end of its host would."""
    try:
        parent = psutil.Process(pid)
        tree = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for one in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(tree[1:], timeout=BOUND_S)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A stage, and what was said on it if the play fails."""
    made = Stage(tmp_path)
    try:
        yield made
    except BaseException:
        sys.stdout.writelines(f"---- {one.name}\n{one.read_text()}\n" for one in sorted(tmp_path.glob("*.out")))
        raise
    finally:
        made.end()


def finish(stage: Stage, world: dict[int, Worker], *runs: subprocess.Popen[str]) -> None:
    """Let all workers end well, and all torchruns with them."""
    for worker in world.values():
        worker.tell(0)
    for run in runs:
        assert run.wait(BOUND_S) == 0
    assert fold(stage.records()).job.state == "succeeded"


def test_two_nodes_train_through_the_store(stage: Stage) -> None:
    """A script that knows nothing of us: `init_process_group` and a sum over both nodes, with masters that speak TLS."""
    script = stage.folder / "sum.py"
    script.write_text(
        textwrap.dedent("""
            import os, pathlib, sys, torch
            import torch.distributed as dist
            dist.init_process_group("gloo")
            total = torch.ones(1)
            dist.all_reduce(total)
            assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
            pathlib.Path(sys.argv[1], f"sum-{dist.get_rank()}").write_text(f"{int(total)} {os.environ['GROUP_RANK']}")
            dist.destroy_process_group()
        """)
    )
    runs = [stage.run("a", script=str(script), conf=f"tls_cert={MASTER},tls_ca={CA}")]
    stage.listens()
    runs.append(stage.run("b", script=str(script), conf=f"is_host=false,tls_ca={CA}"))
    assert [run.wait(BOUND_S) for run in runs] == [0, 0]
    assert [(stage.folder / f"sum-{rank}").read_text() for rank in (0, 1)] == ["2 0", "2 1"]
    assert fold(stage.records()).job.state == "succeeded"
    assert "Traceback" not in stage.said("a") + stage.said("b")


@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--rdzv-backend", "dlrover", "--nproc-per-node", "2"],
        pytest.param(
            ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--rdzv_backend", "dlrover"],
            marks=pytest.mark.nightly(reason="torchrun stands for it in make test"),
        ),
    ],
    ids=["torchrun", "accelerate"],
)
def test_one_node_needs_no_endpoint(tmp_path: Path, launcher: list[str]) -> None:
    """As `accelerate launch` starts torchrun on one host: no endpoint is named, nor a token; each job has its own name."""
    script = tmp_path / "ranks.py"
    script.write_text("import os, pathlib, sys\npathlib.Path(sys.argv[1], os.environ['RANK']).write_text('here')\n")
    if "accelerate" in launcher[0]:
        launcher = [*launcher, "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    environ = {name: value for name, value in os.environ.items() if name != "DLROVER_TOKEN"}
    environ |= {"XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    told = subprocess.run(
        [sys.executable, "-m", *launcher, str(script), str(tmp_path)],
        env=environ, capture_output=True, text=True, timeout=BOUND_S * 2, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert {(tmp_path / rank).read_text() for rank in "01"} == {"here"}
    (job,) = (tmp_path / "state" / "dlrover" / "jobs").iterdir()
    assert job.name.startswith("torchrun-")


def test_a_killed_worker_restarts_all_until_its_budget_is_spent(stage: Stage) -> None:
    """Torch's own ``--max-restarts`` counts: one is spent where the worker died, none elsewhere; the next death ends the job."""
    runs = {node: stage.run(node, nproc=2, restarts=1, conf="linger_s=0.5") for node in "ab"}
    first = stage.world(4)
    victim = first[3]
    other = next(worker for worker in first.values() if worker.node != victim.node)
    os.kill(victim.pid, signal.SIGKILL)
    second = stage.world(4)
    assert {worker.node: worker.restarts for worker in second.values()} == {victim.node: 1, other.node: 0}
    assert second[0].store != first[0].store, "a fresh store for every generation"
    assert [worker.node for worker in second.values()] == [worker.node for worker in first.values()]
    again = next(worker for worker in second.values() if worker.node == victim.node)
    again.tell("raise")
    assert runs[victim.node].wait(BOUND_S) == 1
    assert runs[other.node].wait(BOUND_S) == 1
    assert "ChildFailedError" in stage.said(victim.node)
    assert re.search(rf"RendezvousClosedError: job 'probe' failed: rank {again.rank} .*exit", stage.said(other.node))
    records = stage.records()
    exits = [record.event for record in records if type(record.event).__name__ == "WorkerExited"]
    assert (exits[0].rank, exits[0].exit_code) == (3, -9), exits  # type: ignore[attr-defined]
    assert fold(records).job.state == "failed"


@pytest.mark.nightly(reason="test_hosts.py::test_a_host_that_dies_whole stands for it in make test")
def test_a_killed_node_comes_back(stage: Stage) -> None:
    """A whole torchrun tree dies; the others wait, and train again with the one that takes its place."""
    host, other = stage.pair()
    first = stage.world(2)
    kill_tree(other.pid)
    again = stage.run("again")
    second = stage.world(2)
    assert {worker.node for worker in second.values()} == {"host", "again"}
    for worker in first.values():
        worker.gone()
    finish(stage, second, host, again)


@pytest.mark.nightly(reason="hosts that come late to dlrover-run stand for it in make test")
def test_nodes_join_late_and_leave_gracefully(stage: Stage) -> None:
    """MIN:MAX: one begins alone, takes a second in, and goes on alone when that gets SIGTERM."""
    a = stage.run("a", nnodes="1:2")
    alone = stage.world(1)
    b = stage.run("b", nnodes="1:2")
    both = stage.world(2)
    assert alone[0].next() == "term", "torch stops its workers with SIGTERM"
    assert both[0].node == "a", "ranks stay where they were"
    assert [worker.restarts for worker in both.values()] == [0, 0]
    os.kill(b.pid, signal.SIGTERM)
    left = stage.world(1)
    assert b.wait(BOUND_S) == 1
    assert "SignalException" in stage.said("b")
    finish(stage, left, a)
    reasons = [getattr(record.event, "reason", "") for record in stage.records()]
    assert "its agent left, unasked" in reasons
    assert not any(type(record.event).__name__ == "WorkerExited" for record in stage.records())


def test_a_dead_master_harms_nobody(stage: Stage) -> None:
    """The leading master is killed: its reserve leads, nobody restarts, and the next failure is dealt with."""
    a, b = stage.run("a"), stage.run("b")
    first = stage.world(2)
    leader = stage.leader()
    os.kill(leader, signal.SIGKILL)
    _until(lambda: stage.leader() != leader and stage.status()["agents"] == 2)
    assert all(worker.alive() for worker in first.values())
    assert stage.nobody_came()
    first[1].tell(7)
    second = stage.world(2)
    finish(stage, second, a, b)


def _until(true: Any) -> None:
    """Ask until it is so; what is asked takes its time by itself."""
    until = time.monotonic() + BOUND_S
    while True:
        with contextlib.suppress(CoreError, OSError):
            if true():
                return
        assert time.monotonic() < until


@pytest.mark.nightly(
    reason="the last death in test_a_killed_worker_restarts_all_until_its_budget_is_spent stands for it in make test"
)
def test_a_failing_script_ends_all_with_torchs_own_summary(stage: Stage) -> None:
    """No restarts: the others have a moment to fail by themselves, as workers in a collective do."""
    runs = {node: stage.run(node, restarts=0) for node in "ab"}
    world = stage.world(2)
    world[1].tell("raise")
    _until(lambda: stage.status()["incidents"] == 1)
    world[0].tell(5)
    for node, run in runs.items():
        assert run.wait(BOUND_S) == 1
        assert "ChildFailedError" in stage.said(node)
        assert "Root Cause (first observed failure)" in stage.said(node)
    # The master is told that both are gone, and writes it down; torchrun does not wait for that.
    _until(lambda: fold(stage.records()).job.state != "running")
    records = stage.records()
    state = fold(records)
    assert (state.job.state, state.incidents.restarts) == ("failed", 0), [record.event for record in records]
    assert "rank 1" in state.job.root


@pytest.mark.nightly(reason="that of dlrover-run stands for it in make test")
def test_who_has_finished_does_not_begin_again(stage: Stage) -> None:
    """Torch's elastic agent starts nothing after its workers ended well: the others are not left waiting for it for ever."""
    host, other = stage.pair()
    first = {worker.node: worker for worker in stage.world(2).values()}
    first["other"].tell(0)
    _until(lambda: "WorkersFinished" in [type(record.event).__name__ for record in stage.records()])
    first["host"].tell(3)
    assert other.wait(BOUND_S) == 0
    late = stage.run("late")
    second = stage.world(2)
    assert {worker.node for worker in second.values()} == {"host", "late"}
    finish(stage, second, host, late)


@pytest.mark.nightly(reason="test_hosts.py::test_who_is_not_of_this_job_is_told stands for it in make test")
def test_a_wrong_token_is_said(stage: Stage) -> None:
    """And it ends that torchrun alone. Then the other one gets Ctrl-C, and nothing is left of it."""
    a = stage.run("a", nnodes="1:2", DLROVER_TOKEN="the-right-token")
    world = stage.world(1)
    b = stage.run("b", nnodes="1:2", DLROVER_TOKEN="the-wrong-token")
    assert b.wait(BOUND_S) == 1
    assert "RendezvousConnectionError: the master at" in stage.said("b")
    assert "DLROVER_TOKEN" in stage.said("b")
    assert world[0].alive()
    os.kill(a.pid, signal.SIGINT)
    assert a.wait(BOUND_S) == 1
    assert "SignalException" in stage.said("a")


@pytest.mark.nightly(reason="test_hosts.py::test_the_host_of_the_masters_comes_back stands for it in make test")
def test_host_is_killed_and_comes_back(stage: Stage) -> None:
    """HOST's torchrun dies with its masters and workers; the others train on, until another one continues the run there."""
    host, other = stage.pair()
    first = stage.world(2)
    kill_tree(host.pid)
    survivor = next(worker for worker in first.values() if worker.node == "other")
    assert survivor.alive()
    again = stage.run("again")
    second = stage.world(2)
    assert {worker.node for worker in second.values()} == {"other", "again"}
    finish(stage, second, other, again)
    runs = [record.event for record in stage.records() if type(record.event).__name__ == "JobCreated"]
    assert len(runs) == 1, "one run, as if nothing had happened"


def test_masters_end_with_torchrun(stage: Stage) -> None:
    """SIGKILL of torchrun alone: the masters go with it; its workers are torch's business."""
    run = stage.run("a", nnodes="1")
    world = stage.world(1)
    masters = [
        child
        for child in psutil.Process(run.pid).children(recursive=True)
        if "dlrover_adapters" in " ".join(child.cmdline())
    ]
    assert len(masters) >= 2
    os.kill(run.pid, signal.SIGKILL)
    run.wait(BOUND_S)
    _, alive = psutil.wait_procs(masters, timeout=BOUND_S)
    assert not alive
    os.kill(world[0].pid, signal.SIGKILL)
    world[0].gone()


# ---- encryption


DATA = Path(__file__).parent / "data"
CA, OTHER, MASTER = (str(DATA / f"{name}.pem") for name in ("ca", "other", "master"))


@pytest.mark.nightly(reason="two nodes that train over TLS, and test_tls.py, stand for it in make test")
def test_masters_that_speak_tls(stage: Stage) -> None:
    """By files in ``--rdzv-conf`` HOST's masters encrypt and torchruns check them; who names none or another CA is told so."""
    a = stage.run("a", nnodes="1:4", conf=f"tls_cert={MASTER},tls_ca={CA},last_call_timeout=20")
    stage.listens()
    plain = stage.run("plain", nnodes="1:4", conf="is_host=false,join_timeout=3")
    other = stage.run("other", nnodes="1:4", conf=f"is_host=false,join_timeout=3,tls_ca={OTHER}")
    assert (plain.wait(BOUND_S), other.wait(BOUND_S)) == (1, 1)
    assert "speaks only TLS; name the CA of its certificate" in stage.said("plain")
    assert "its certificate is not of the CA" in stage.said("other")
    token = (stage.state / "dlrover" / "jobs" / "probe" / "loopback.token").read_text().strip()
    with pytest.raises(CoreError, match="speaks only TLS"):
        asyncio.run(fetch_status(f"127.0.0.1:{stage.port}", token))
    b = stage.run("b", nnodes="1:4", conf=f"is_host=false,tls_ca={CA}")
    finish(stage, stage.world(2), a, b)


WRONG = pytest.mark.nightly(reason="a certificate that would not be taken stands for them in make test")


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        pytest.param(f"tls_cert={MASTER}", "tls_ca is missing", marks=WRONG),
        pytest.param(f"tls_ca={CA}", "tls_cert is missing", marks=WRONG),
        pytest.param(f"tls_ca={CA},tls_key={MASTER}", "tls_key belongs to a tls_cert", marks=WRONG),
        (f"tls_ca={OTHER},tls_cert={MASTER}", "would not be taken"),
        pytest.param("tls_ca=/nowhere.pem", "/nowhere.pem cannot be read", marks=WRONG),
    ],
)
def test_files_that_cannot_be_right(stage: Stage, conf: str, words: str) -> None:
    """They are refused before anything is started."""
    assert stage.run("a", nnodes="1", conf=conf).wait(BOUND_S) != 0
    assert words in stage.said("a")
    assert stage.nobody_came()

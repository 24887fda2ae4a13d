"""What torch's own tests ask of its launcher: the same command lines under `dlrover-run`, and `elastic_launch` over our handler.

Torch ships none of those tests. Here each case says what must hold; what differs is in docs/torchs-own-tests.md.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from running import BIN

pytestmark = [
    pytest.mark.nightly(reason="test_dlrover_run and test_parity have the commonest of them in make test"),
    pytest.mark.timeout(900),
]
BOUND_S = 600.0

TOUCH = """
import os, pathlib, sys
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SENTINEL"):
    assert os.environ[name], name
if "--fail" in sys.argv:
    raise RuntimeError("told to fail")
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
"""
TOUCH_SHELL = """#!/bin/sh
echo "creating $1/$RANK"
touch "$1/$RANK"
"""
LAUNCHED = """
import sys, torch.distributed as dist
sys.stdout.write(f"launched {dist.is_torchelastic_launched()}\\n")
"""
INIT = """
import os, sys, torch, torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=size)
total = torch.tensor(rank)
dist.all_reduce(total)
assert int(total) == sum(range(size))
"""


class Bench:
    """A folder of scripts, and one in which ranks leave their marks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.marks = folder, folder / "marks"
        self.marks.mkdir()
        for name, text in (
            ("touch.py", TOUCH),
            ("touch.sh", TOUCH_SHELL),
            ("launched.py", LAUNCHED),
            ("init.py", INIT),
        ):
            (folder / name).write_text(text)
        (folder / "touch.sh").chmod(0o755)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])

    def start(self, *arguments: object, **env: str) -> subprocess.Popen[str]:
        """`dlrover-run`."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith("PET_") and name != "DLROVER_TOKEN"
        }
        environ = {**kept, "SENTINEL": "1", "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(self.folder / "state"), **env}
        line = [str(BIN / "dlrover-run"), *(str(one) for one in arguments)]
        return subprocess.Popen(
            line, cwd=self.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *arguments: object, status: int = 0, **env: str) -> tuple[str, str]:
        """To its end, which has this exit status."""
        process = self.start(*arguments, **env)
        try:
            out, err = process.communicate(timeout=BOUND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        assert process.returncode == status, err
        return out, err

    def ran(self, size: int) -> bool:
        """Have all ranks of the world left their mark?"""
        found = {one.name for one in self.marks.iterdir()}
        assert found == {str(rank) for rank in range(size)}, found
        return True


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A new one."""
    return Bench(tmp_path)


FLAGS = ("--monitor-interval=1", "--start-method=spawn")


def test_a_script(bench: Bench) -> None:
    """With an id, and the flags of torch's agent that do nothing here."""
    bench.run("--nnodes=1", "--nproc-per-node=2", "--rdzv-id=4711", *FLAGS, "touch.py", bench.marks)
    assert bench.ran(2)


def test_a_script_by_master_address_and_port(bench: Bench) -> None:
    """As before there was torchrun."""
    where = ("--master-addr=localhost", f"--master-port={bench.port}", "--node-rank=0")
    bench.run("--nnodes=1", "--nproc-per-node=2", *FLAGS, *where, "touch.py", bench.marks)
    assert bench.ran(2)


def test_a_program(bench: Bench) -> None:
    """Which cannot be a module as well; one process by default."""
    told = ("--nnodes=1", "--rdzv-id=1", *FLAGS, "--no-python")
    _, err = bench.run(*told, "--module", "./touch.sh", bench.marks, status=2)
    assert "exclude one another" in err
    bench.run(*told, "./touch.sh", bench.marks)
    assert bench.ran(1)


def test_settings_from_the_environment(bench: Bench) -> None:
    """Each flag by its variable, also one that is switched off."""
    told = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_RDZV_ID": "1", "PET_MONITOR_INTERVAL": "1"}
    told |= {"PET_START_METHOD": "spawn", "PET_NO_PYTHON": "1"}
    bench.run("./touch.sh", bench.marks, status=2, **told, PET_MODULE="1")
    bench.run("./touch.sh", bench.marks, **told, PET_MODULE="0")
    assert bench.ran(2)


def test_as_many_processes_as_cpus(bench: Bench) -> None:
    """``auto`` without an accelerator; a word that is no number is refused."""
    bench.run("--nproc-per-node=unknown", "--no-python", "./touch.sh", bench.marks, status=2)
    bench.run("--nproc-per-node=auto", "--no-python", "./touch.sh", bench.marks, CUDA_VISIBLE_DEVICES="")
    assert bench.ran(len(os.sched_getaffinity(0)))


# Torch's own tests have quotation marks around these, which no shell takes off: torch reads none of them, and here they are
# refused. Without them ``join_timeout`` counts: it is long enough for a busy machine.
ELASTIC = ("--rdzv-conf=join_timeout=120,last_call_timeout=1,timeout=5", "--rdzv-backend=c10d", "--nproc-per-node=2")


def test_fewer_nodes_than_the_most(bench: Bench) -> None:
    """One of at most two, behind a loopback endpoint and without a token."""
    bench.run("--nnodes=1:2", *ELASTIC, f"--rdzv-endpoint=localhost:{bench.port}", "touch.py", bench.marks)
    assert bench.ran(2)


def test_a_script_that_fails(bench: Bench) -> None:
    """Exit status 1, and its error is told."""
    at = f"--rdzv-endpoint=localhost:{bench.port}"
    _, err = bench.run("--nnodes=1:2", *ELASTIC, at, "--max-restarts=0", "touch.py", bench.marks, "--fail", status=1)
    assert "told to fail" in err


def test_two_launchers_on_one_host(bench: Bench) -> None:
    """Both behind a loopback endpoint, with nothing said but where: one world."""
    told = ("--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{bench.port}")
    told += ("--rdzv_conf=timeout=5", "--rdzv-id=many")
    other = bench.start(*told, "touch.py", bench.marks)
    bench.run(*told, "touch.py", bench.marks)
    other.communicate(timeout=BOUND_S)
    assert other.returncode == 0
    assert bench.ran(4)


@pytest.mark.parametrize("flag", ["--standalone", "--run-path"])
def test_other_ways_to_start(bench: Bench, flag: str) -> None:
    """All ranks run."""
    bench.run(flag, "--nnodes=1", "--nproc-per-node=2", *FLAGS, "touch.py", bench.marks)
    assert bench.ran(2)


def test_a_script_knows_that_it_was_launched(bench: Bench) -> None:
    """`torch.distributed.is_torchelastic_launched`, also with the default logs specs; others are refused."""
    told = ("--run-path", "--nnodes=1", "--nproc-per-node=1", "--monitor-interval=1")
    for more in ((), ("--logs_specs=default",)):
        out, _ = bench.run(*told, *more, "launched.py")
        assert "launched True" in out
    bench.run(*told, "--logs_specs=DOESNOT_EXIST", "launched.py", status=2)
    alone = subprocess.run(
        [sys.executable, "launched.py"], cwd=bench.folder, capture_output=True, text=True, check=True
    )
    assert "launched False" in alone.stdout


@pytest.mark.parametrize("method", ["tcp://localhost:{}", "env://"])
def test_ways_to_meet(bench: Bench, method: str) -> None:
    """By number, and by the environment."""
    told = ("--run-path", "--nproc-per-node=2", "--master-addr=localhost", f"--master-port={bench.port}")
    bench.run(*told, "init.py", method.format(bench.port))


def test_lines_bear_the_prefix_that_was_asked_for(bench: Bench) -> None:
    """Of every rank."""
    told = ("--nproc-per-node=2", "--rdzv-id=1", "--redirects=3", "--tee=3", "--no-python", "./touch.sh", bench.marks)
    out, _ = bench.run(*told, TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[rank${rank}]: ")
    for rank in (0, 1):
        assert f"[rank{rank}]: creating " in out


# ---- torch's launcher as a library, over our rendezvous

LAUNCH = """
import os, sys, time
from unittest import mock
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def scaled():
    return 10 + int(os.environ["RANK"])

def config(endpoint="", nodes=(1, 1)):
    return LaunchConfig(*nodes, 2, run_id="api", rdzv_backend="dlrover", rdzv_endpoint=endpoint, monitor_interval=0.1,
                        rdzv_configs={"last_call_timeout": 1}, start_method="spawn", max_restarts=0)

def function():
    assert elastic_launch(config(), scaled)() == {0: 10, 1: 11}

def script():
    elastic_launch(config(), sys.executable)("-u", "touch.py", sys.argv[2])

def shell():
    elastic_launch(config(), "./touch.sh")(sys.argv[2])

def elastic():
    elastic_launch(config(sys.argv[3], (1, 2)), sys.executable)("-u", "touch.py", sys.argv[2])

def fails():
    try:
        elastic_launch(config(sys.argv[3], (1, 2)), sys.executable)("-u", "touch.py", sys.argv[2], "--fail")
    except ChildFailedError as error:
        assert "touch.py FAILED" in str(error)
    else:
        raise AssertionError("nothing was raised")

def agent_fails():
    from dlrover_adapters.torch import rendezvous

    rendezvous.MASTERS_S = 100.0
    began = time.monotonic()
    with mock.patch("torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent.run",
                    side_effect=ZeroDivisionError("its own")):
        try:
            elastic_launch(config(sys.argv[3], (1, 2)), scaled)()
        except ZeroDivisionError:
            assert time.monotonic() - began < rendezvous.MASTERS_S, "its masters were waited for"
        else:
            raise AssertionError("nothing was raised")

if __name__ == "__main__":
    globals()[sys.argv[1]]()
"""


def launched(bench: Bench, case: str) -> subprocess.Popen[str]:
    """A program that launches through torch's API."""
    (bench.folder / "launch.py").write_text(textwrap.dedent(LAUNCH))
    environ = {**os.environ, "SENTINEL": "1", "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(bench.folder / "state")}
    line = [sys.executable, "launch.py", case, str(bench.marks), f"localhost:{bench.port}"]
    return subprocess.Popen(
        line, cwd=bench.folder, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.alone(reason="torch's queues keep semaphores in shared memory, which other tests would find left behind")
@pytest.mark.parametrize(
    ("case", "size"), [("function", 0), ("script", 2), ("shell", 2), ("elastic", 2), ("fails", 0), ("agent_fails", 0)]
)
def test_elastic_launch(bench: Bench, case: str, size: int) -> None:
    """A function, a script, a program; an error of a worker and of the agent itself are raised as torch raises them."""
    process = launched(bench, case)
    _, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == 0, err
    assert bench.ran(size)


def test_elastic_launch_from_two_programs(bench: Bench) -> None:
    """Two nodes, at most; both are taken in, at once or by a restart that costs nothing."""
    both = [launched(bench, "elastic") for _ in range(2)]
    said = [one.communicate(timeout=BOUND_S)[1] for one in both]
    assert [one.returncode for one in both] == [0, 0], said

"""A master's process that is started before its launcher knows what to tell it, and what both import until they lead."""

from __future__ import annotations

import array
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_supervisor import settings_of

from dlrover_adapters.cli import ahead_master
from dlrover_adapters.cli.ahead_master import Descriptors
from dlrover_adapters.cli.settings import EX_OVER
from dlrover_adapters.cli.supervisor import NoNodes, Supervisor

HEAVY = ("aiohttp", "google.protobuf", "grpc", "kubernetes_asyncio", "numpy", "ray", "rich", "torch", "yaml")
"""Each of these takes longer to import than a pod's launcher does for all it needs."""

LAUNCHER = """
import contextlib, os, sys
from dlrover_adapters.cli import ahead_master, run

class First:
    def tell(self, *_):
        print(*sys.modules, sep="\\n", file=sys.stdout, flush=True)
        os._exit(75)

ahead_master.started = lambda *_: contextlib.nullcontext(First())
run.main(sys.argv[1:])
"""


def test_the_words_of_a_master_that_was_started_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told what stands on others' command lines, with its own numbers of the descriptors, and the environment."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pipes = [os.pipe() for _ in Descriptors._fields]
    with ours:
        said = json.dumps({"words": ["--job", "j"], "env": {"DLROVER_TOKEN": "t"}}).encode()
        sent = array.array("i", [writing for _, writing in pipes])
        ours.sendmsg([said], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
        words = ahead_master.told(theirs.detach(), ["no_such_module"])
    found = dict(zip(words[::2], words[1::2], strict=True))
    assert found.pop("--job") == "j"
    assert os.environ["DLROVER_TOKEN"] == "t"
    numbers = [found["--fd"], found["--config"].rpartition("/")[2], found["--stop"], found["--asked"]]
    for (reading, writing), number in zip(pipes, map(int, numbers), strict=True):
        os.write(number, b"x")
        assert os.read(reading, 1) == b"x"
        assert not os.get_inheritable(number)
        for one in (reading, writing, number):
            os.close(one)


def test_a_launcher_that_ends_without_a_word_ends_the_master() -> None:
    """Its socket is at its end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    assert ahead_master.told(theirs.detach(), []) == []


def test_one_that_is_not_needed_is_killed_and_one_that_is_dead_takes_no_words() -> None:
    """The supervisor starts another one then, and nothing is left behind."""
    with ahead_master.started("j", [], os.environ) as made:
        assert made is not None
        made.kill()
        assert asyncio.run(made.wait()) == -signal.SIGKILL
        with Path(os.devnull).open("rb") as nothing:
            assert not made.tell([], {}, Descriptors(*[nothing.fileno()] * 4))
    with ahead_master.started("j", [], os.environ) as other:
        assert other is not None
        assert other.returncode is None
    assert other.returncode == -signal.SIGKILL


class First:
    """A process that was started ahead, and takes its words or is dead."""

    def __init__(self, alive: bool) -> None:
        self.alive, self.words, self.pid, self.returncode = alive, list[str](), 100, EX_OVER

    def tell(self, words: Any, _env: Any, _own: Any) -> bool:
        """Note the words."""
        self.words = words
        return self.alive

    async def wait(self) -> int:
        """At once."""
        return EX_OVER

    def kill(self) -> None:
        """It is over."""


@pytest.mark.parametrize("alive", [True, False])
def test_the_first_master_is_the_one_started_ahead_unless_it_is_dead(
    monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    """It is used once: whoever follows a master is started when that one has ended."""
    executed = list[tuple[str, ...]]()

    async def execute(*words: str, **_: Any) -> Any:
        executed.append(words)
        return First(True)

    async def run(first: Any) -> None:
        with socket.socket() as port:
            await Supervisor(settings_of(), "t", port, NoNodes(), first=first).run()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", execute)
    first = First(alive)
    asyncio.run(run(first))
    assert "--number" in first.words
    assert len(executed) == (0 if alive else 1)


def test_a_pods_launcher_loads_nothing_heavy_until_its_master_runs(tmp_path: Path) -> None:
    """Until then nobody decides: no HTTP client, no client of Kubernetes, no YAML, no rules, no reports."""
    job = tmp_path / "state" / "jobs" / "j"
    job.mkdir(parents=True)
    (job / "settings.json").write_text("{}")  # a master was here before
    (tmp_path / "train.py").touch()
    told = {
        "DLROVER_MASTER_BACKEND": "k8s:image=i:1,namespace=ml,secret=j-masters,owner=v1/secrets/j-masters,template=configmap:j",
        "DLROVER_MASTER_BIND": f"127.{os.getpid() >> 8 & 127}.{os.getpid() & 255}.77:29400",
        "DLROVER_MASTER_AT": "j-masters.ml.svc:29400",
        "DLROVER_MASTER_JOB": "j",
        "DLROVER_MASTER_STATE": str(tmp_path / "state"),
        "DLROVER_RUN": "uid-1",
        "DLROVER_TOKEN": "t" * 32,
    }
    words = ["--nnodes", "2", "--nproc-per-node", "1", str(tmp_path / "train.py")]
    ended = subprocess.run(
        [sys.executable, "-c", LAUNCHER, *words],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 75, ended.stderr
    loaded = set(ended.stdout.split())
    assert "dlrover_core.logs.sqlite" in loaded
    not_ours = {"dlrover_core.history", "dlrover_core.rules.model", "dlrover_core.diagnosis.signatures"}
    assert not loaded & {*HEAVY, *not_ours}


def test_a_master_loads_no_client_of_kubernetes_until_it_leads() -> None:
    """The lists of pods come after the first decision."""
    modules = ["dlrover_adapters.cli.master", *ahead_master.modules("k8s:image=i:1", "")]
    code = f"import sys, {', '.join(modules)}\nprint(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & ({*HEAVY, "dlrover_core.history"} - {"aiohttp"})


def test_what_is_loaded_ahead_is_what_backend_and_log_need() -> None:
    """By the names that `--backend` and `--log` begin with; somebody's own backend is loaded when it is made."""
    assert ahead_master.modules("k8s:namespace=ml", "") == ("dlrover_backends.k8s.client", "dlrover_core.logs.sqlite")
    assert ahead_master.modules("x.py:Backend", "etcd://e:2379/p") == ("dlrover_adapters.etcd.log",)

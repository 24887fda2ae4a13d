"""`dlrover doctor` for real: on this machine, with real processes, and what it leaves behind, which is nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from running import BIN, WITHOUT_TORCH, eventually, processes

from dlrover_adapters.cli import doctor_workers
from dlrover_adapters.cli.doctor_workers import own_process
from dlrover_adapters.cli.scratch import MARK
from dlrover_adapters.http.server import HttpListener, bind

BOUND_S = 110.0  # torch is imported from a cold disk, and trained with


def doctor(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """The exit status of ``dlrover doctor`` and what it told as JSON."""
    line = [str(BIN / "dlrover"), "doctor", "--json", "--state-dir", str(folder / "state"), *arguments]
    told = subprocess.run(
        line,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
        env={**os.environ, **(env or {})},
    )
    assert told.stdout, told.stderr
    return told.returncode, json.loads(told.stdout)


def of(told: dict[str, Any], name: str) -> dict[str, Any]:
    """One check."""
    return next(dict(one) for one in told["checks"] if one["name"] == name)


def asked(folder: Path, token: str, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """What the doctor told who had this ``token`` and the endpoint of a master with another or the same one."""

    async def accept(_: object) -> None:
        raise AssertionError("no agent was to come")

    async def ask() -> tuple[int, dict[str, Any]]:
        listener = HttpListener(bind(), "the-right-token")
        await listener.serve(accept, lambda: {"job": "digits", "state": "running"})
        try:
            line = ("--endpoint", listener.address, *arguments)
            return await asyncio.to_thread(doctor, folder, *line, env={**(env or {}), "DLROVER_TOKEN": token})
        finally:
            await listener.close()

    return asyncio.run(ask())


def test_this_machine_is_fit(tmp_path: Path) -> None:
    """Where these tests run, workers can be forked, owned and trained: nothing FAILs, or hangs, and nothing is left.

    An endpoint with a master: its clock agrees, the right token is taken.
    """
    code, told = asked(tmp_path, "the-right-token", "--preload", "json")
    failed = [one for one in told["checks"] if one["verdict"] == "FAIL"]
    assert (code, failed) == (0, [])
    assert of(told, "processes")["values"]["fork_s"] > 0
    warm = of(told, "preload")
    assert "torch + json imported once" in warm["found"]
    ranks = warm["values"]["ranks"]
    assert [ranks[rank]["threads"] for rank in ("0", "1")] == [1, 1]
    assert all(one["took_s"] < 90 for one in told["checks"])
    assert list(tmp_path.iterdir()) == []
    right = of(told, "endpoint")
    assert (right["verdict"], "job digits is running" in right["found"]) == ("OK", True)
    assert abs(right["values"]["skew_s"]) < 2


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='poller').start()",
            "'poller'",
        ),
        pytest.param(
            "import nothing_like_it",
            "No module named 'nothing_like_it'",
            marks=pytest.mark.nightly(reason="a module with a thread stands for it in make test"),
        ),
    ],
)
def test_a_preload_that_is_unfit_is_named(tmp_path: Path, module: str, words: str) -> None:
    """A module that starts threads when imported, or cannot be imported, FAILs with its name, the reason and a way out."""
    (tmp_path / "unfit.py").write_text(module)
    code, told = doctor(tmp_path, "--preload", "unfit,json", env=WITHOUT_TORCH)
    assert code == 1
    warm = of(told, "preload")
    assert warm["verdict"] == "FAIL"
    assert "unfit" in warm["found"]
    assert words in warm["found"]
    assert "--preload json" in warm["advice"]


def test_workers_that_cannot_meet(tmp_path: Path) -> None:
    """An interface that does not exist fails its own check and, with gloo's own words, that of two real workers."""
    code, told = doctor(tmp_path, env={"GLOO_SOCKET_IFNAME": "nosuch0"})
    assert code == 1
    assert "no interface nosuch0" in of(told, "interface")["found"]
    assert "nosuch0" in of(told, "preload")["found"]


def test_without_a_gpu_and_with_a_wrong_token_it_says_so(tmp_path: Path) -> None:
    """`--gpu` where no device is visible FAILs, and says why none is. So does a master that does not take our token."""
    code, told = asked(tmp_path, "another-token", "--gpu", env={"CUDA_VISIBLE_DEVICES": ""})
    assert code == 1
    gpu = of(told, "gpu")
    assert gpu["found"].startswith("torch sees no CUDA device (")
    assert gpu["advice"]
    assert of(told, "preload")["verdict"] != "FAIL"
    wrong = of(told, "endpoint")
    assert (wrong["verdict"], "does not take our token" in wrong["found"]) == ("FAIL", True)


def test_a_kernel_that_forbids_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where prctl is forbidden (seccomp), or an orphan is not adopted, the process check FAILs with what does not work."""

    def told(patch: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(f"from dlrover_adapters.agent import process\n{patch}\n")
        with monkeypatch.context() as born:
            born.setenv("PYTHONPATH", str(folder))
            found = asyncio.run(doctor_workers.fork())
        assert found.verdict.value == "FAIL"
        assert "seccomp" in found.advice
        return found.found

    forbid = "def forbid(*words): raise PermissionError(1, 'Operation not permitted')\nprocess._prctl = forbid"
    assert "Operation not permitted" in told(forbid)
    assert "orphan" in told("process.become_subreaper = lambda: None")
    assert "outlived its parent" in told("process.die_with_parent = lambda parent: True")
    monkeypatch.setattr(doctor_workers, "FORK_S", 0.01)
    assert "did not end within 0.01 s" in asyncio.run(doctor_workers.fork()).found


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.nightly(reason="SIGINT stands for it in make test")),
        signal.SIGKILL,
    ],
)
def test_it_can_be_stopped(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, SIGTERM and even SIGKILL in the middle of an endless import leave no process and no folder."""
    (tmp_path / "endless.py").write_text("import pathlib, signal\npathlib.Path('begun').touch()\nsignal.pause()\n")
    line = [str(BIN / "dlrover"), "doctor", "--preload", "endless", "--state-dir", str(tmp_path)]
    env = {**os.environ, **WITHOUT_TORCH}
    with subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env) as one:
        try:
            eventually((tmp_path / "begun").exists, "the import")
            mark = _mark(one.pid)
            one.send_signal(number)
            code = one.wait(BOUND_S)
        finally:
            one.kill()
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    eventually(lambda: not processes(mark), "the end of all it started")


def _mark(pid: int) -> str:
    """What everything that this doctor started has in its environment."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    marks = {
        word.decode()
        for child in children
        for word in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if word.startswith(f"{MARK}=".encode())
    }
    assert len(marks) == 1
    return marks.pop()


def test_the_probe_counts_devices() -> None:
    """The probe says what torch sees, in a process that is gone afterwards."""
    told = asyncio.run(own_process("dlrover_adapters.torch.probe", BOUND_S, "devices"))
    assert set(told) == {"devices", "torch", "cuda", "driver"}
    broken = asyncio.run(own_process("dlrover_adapters.torch.probe", BOUND_S, "no-such-kind"))
    assert "ended with 1" in broken["fault"]

"""What `dlrover doctor` makes of what its workers tell: warm fork, gloo, GPUs. Real workers: tests/integration/test_doctor.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dlrover_adapters.cli import doctor_workers as workers
from dlrover_adapters.cli.doctor_check import Finding
from dlrover_adapters.cli.doctor_workers import Run
from dlrover_core.errors import LaunchFailed
from dlrover_core.runtime.launcher import WorkerExit

CPU = {"began": 100.02, "threads": 1, "product_s": 0.001, "group_s": 0.01}
CUDA = {**CPU, "cuda_s": 0.4, "name": "H200", "to_device_gb_s": 50.0, "to_host_gb_s": 48.0}
SEEN = {"devices": 1, "torch": "2.13.0", "cuda": "13.0", "driver": True}


def run(*ranks: dict[str, Any], **fields: Any) -> Run:
    """A run in which all went well, but for ``fields``."""
    exits = [WorkerExit(1, n, n, 0, asked=False, died_us=n) for n in range(len(ranks))]
    made = Run(2.0, 100.0, dict(enumerate(ranks)), exits, {}, forked=True)
    return made._replace(**fields)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the machine tells: ``run`` or an error, ``seen`` of devices; ``asked`` are the arguments of the probe."""
    table: dict[str, Any] = {"run": run(CPU, CPU), "seen": SEEN, "asked": []}

    async def run_probe(*arguments: object) -> Run:
        table["asked"].append(arguments)
        if isinstance(table["run"], Exception):
            raise table["run"]
        found: Run = table["run"]
        return found

    async def own_process(*_: object) -> dict[str, Any]:
        return dict(table["seen"])

    monkeypatch.setattr(workers, "run_probe", run_probe)
    monkeypatch.setattr(workers, "own_process", own_process)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return table


def preload(modules: tuple[str, ...] | None = ("json",)) -> Finding:
    """The check."""
    return asyncio.run(workers.preload(modules))


def gpu() -> Finding:
    """The check."""
    return asyncio.run(workers.gpu(()))


def says(finding: Finding, verdict: str, *words: str) -> None:
    """This verdict, these words."""
    assert finding.verdict.value == verdict, finding
    for word in words:
        assert word in f"{finding.found} -> {finding.advice}"


def test_warm(told: dict[str, Any]) -> None:
    """All well: what was imported, in what time, and how fast a forked worker runs its first line."""
    says(preload(), "OK", "torch + json imported once in 2.0 s", "first line after 20 ms", "1 thread each")


@pytest.mark.parametrize(
    ("result", "verdict", "words"),
    [
        (LaunchFailed("No module named 'torch'"), "FAIL", "pip install 'dlrover-core[torch]'"),
        (run(CPU, CPU, refused={"json": "it initialises CUDA"}), "FAIL", "json: it initialises CUDA"),
        (run(CPU, {**CPU, "threads": 3}), "FAIL", "bug of ours"),
        (run(CPU, {**CPU, "began": 101.0}), "WARN", "forking is slow"),
        (run(CPU, CPU, forked=False), "FAIL", "cannot be forked from"),
        (
            run(CPU, exits=[WorkerExit(1, 1, 1, -9, asked=False, died_us=1, tail="a\nlast line\n\n")]),
            "FAIL",
            "rank 1 ended with SIGKILL: last line",
        ),
        (run(exits=[WorkerExit(1, 0, 0, 0, asked=False, died_us=1)]), "FAIL", "exit code 0: without a word"),
    ],
)
def test_unfit(told: dict[str, Any], result: Run | Exception, verdict: str, words: str) -> None:
    """Everything that can be wrong with workers has its own words and its own advice."""
    told["run"] = result
    says(preload(), verdict, words)


def test_not_forked_on_request(told: dict[str, Any]) -> None:
    """`--preload none` works, and is told what it costs."""
    told["run"] = run({**CPU, "began": 101.5}, forked=False)
    says(preload(None), "WARN", "1.50 s after the order")


@pytest.mark.parametrize(("devices", "ranks"), [(1, 1), (2, 2), (8, 2)])
def test_gpus(told: dict[str, Any], devices: int, ranks: int) -> None:
    """NCCL runs two ranks where there are two devices; two on one it refuses, so one device has one."""
    told.update(seen={**SEEN, "devices": devices}, run=run(*[CUDA] * ranks))
    says(gpu(), "OK", f"{devices} device", "H200", f"all-reduce of {ranks} rank", "48.0 GB/s at the slowest")
    assert told["asked"] == [("cuda", ranks, ())]


@pytest.mark.parametrize(
    ("seen", "environment", "words"),
    [
        ({"cuda": ""}, None, ("built without CUDA", "install a CUDA build")),
        ({"driver": False}, None, ("driver not there", "nvidia-smi must work first")),
        ({}, "", ("CUDA_VISIBLE_DEVICES='' hides them", "must not hide them")),
        ({}, None, ("for CUDA 13.0, driver there", "new enough")),
        ({"fault": "ended with 1: ModuleNotFoundError"}, None, ("ModuleNotFoundError", "pip install")),
    ],
)
def test_no_gpu(
    told: dict[str, Any],
    seen: dict[str, Any],
    environment: str | None,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No device: why, and what to do, each reason with its own."""
    told["seen"] = {**SEEN, "devices": 0, **seen}
    if environment is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", environment)
    says(gpu(), "FAIL", *words)
    assert told["asked"] == []


def test_a_gpu_with_a_fault(told: dict[str, Any]) -> None:
    """A slow link warns, with both directions looked at; NCCL's error fails, with how to learn more."""
    told["run"] = run({**CUDA, "to_host_gb_s": 1.5})
    says(gpu(), "WARN", "1.5 GB/s at the slowest", "PCIe")
    told["run"] = run(exits=[WorkerExit(1, 0, 0, 1, asked=False, died_us=1, error="DistBackendError: NCCL error")])
    says(gpu(), "FAIL", "NCCL error", "NCCL_DEBUG=INFO")
    told["run"] = LaunchFailed("no zygote")
    says(gpu(), "FAIL", "no worker can be started: no zygote")

"""Checks that run processes: can this machine fork workers from a warm one, and what do they see when they are born?

The launcher is the real one, so that what is found is what a job would find.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dlrover_adapters.agent.config import LaunchConfig, Mode, Streams
from dlrover_adapters.agent.launcher import LinuxLauncher
from dlrover_adapters.agent.spawn import module_command
from dlrover_adapters.cli import scratch
from dlrover_adapters.cli.doctor_check import Finding, fail, ok, warn
from dlrover_core.errors import LaunchFailed
from dlrover_core.runtime.launcher import Notice, StoreReady, WorkerExit, WorkersLaunch
from dlrover_core.runtime.within import within

FORK_S = 20.0
COUNT_S = 40.0
GRACE_S, KILL_S = 0.0, 5.0
SLOW_FORK_S = 0.25
PINNED_GB_S_MIN = 6.0  # PCIe 3.0 x8, less its overhead; a card in its proper slot has twice that and more
NO_TORCH = "pip install 'dlrover-core[torch]' into this environment, or activate the one that has torch"


# ---- the kernel


async def fork() -> Finding:
    """Linux lets us own processes: orphans are adopted, deaths ring a pidfd, children die with their parent. Done, not read."""
    told = await own_process("dlrover_adapters.cli.doctor_fork", FORK_S)
    fault = told.get("fault")
    if fault:
        return fail(
            str(fault),
            "workers cannot be owned here: Linux 5.4 or newer is needed, with pidfd_open, waitid and prctl allowed by the "
            "container's seccomp profile, and /proc mounted",
        )
    return ok(
        f"orphans are adopted, a death rings its pidfd, a child dies with its parent; fork takes {told['fork_s'] * 1e3:.1f} ms",
        fork_s=told["fork_s"],
    )


async def own_process(module: str, bound_s: float, *arguments: str) -> dict[str, Any]:
    """What a module of ours prints as JSON, run as a session of its own of which nothing is left; ``fault`` if it cannot."""
    one = await asyncio.create_subprocess_exec(
        *module_command(module),
        *arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await within(bound_s, one.communicate())
    except asyncio.TimeoutError:
        return {"fault": f"{module} did not end within {bound_s:g} s"}
    finally:
        _end_group(one)
        await one.wait()
    try:
        return dict(json.loads(out))
    except ValueError:
        words = (err or out).decode(errors="replace").strip().splitlines()
        return {"fault": f"{module} ended with {one.returncode}: {words[-1] if words else 'without a word'}"}


def _end_group(leader: asyncio.subprocess.Process) -> None:
    """SIGKILL a session leader and its process group.

    Members keep the group's number from everybody else, also when their leader is reaped. A process that has the number after
    that is a stranger, whose group has no member of ours.
    """
    if leader.returncode is not None and Path(f"/proc/{leader.pid}").exists():
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)


# ---- workers


class Run(NamedTuple):
    """One generation of probes: seconds to get warm, seconds to each rank's first line, what ranks told, how they ended."""

    warm_s: float
    started_at: float
    told: dict[int, dict[str, Any]]
    exits: list[WorkerExit]
    refused: Mapping[str, str]
    forked: bool

    @property
    def first_line_s(self) -> float:
        """From the order to start until the last rank ran its first line."""
        return max((one["began"] - self.started_at for one in self.told.values()), default=0.0)

    @property
    def fault(self) -> str:
        """What the first rank that failed died of; empty if none did."""
        first = next((one for one in self.exits if one.exit_code or one.rank not in self.told), None)
        if first is None:
            return ""
        how = f"exit code {first.exit_code}" if first.exit_code >= 0 else signal.Signals(-first.exit_code).name
        last = [line for line in first.tail.splitlines() if line.strip()]
        return f"rank {first.rank} ended with {how}: {first.error or (last[-1] if last else 'without a word')}"


@contextlib.asynccontextmanager
async def _opened(config: LaunchConfig) -> AsyncIterator[LinuxLauncher]:
    launcher = LinuxLauncher(config)
    await launcher.open()
    try:
        yield launcher
    finally:
        await launcher.close()


async def run_probe(device: str, count: int, preload: tuple[str, ...] | None) -> Run:
    """Start ``count`` probes as workers and hear how they fare. Raises `LaunchFailed`."""
    run = f"doctor-{secrets.token_hex(6)}"
    # A run's own folder, for its sweeper: should we be killed, it removes the folder and whoever bears the mark.
    with scratch.folder(run) as made:
        folder = str(made)
        config = LaunchConfig(
            argv=("dlrover_adapters.torch.probe", device, folder),
            nproc=count,
            mode=Mode.MODULE,
            job="doctor",
            node="doctor",
            preload=preload,
            env={scratch.MARK: run},
            run_dir=folder,
            log_dir=os.path.join(folder, "logs"),
            redirects=(Streams.ALL,) * count,
        )
        began = time.monotonic()
        async with _opened(config) as launcher:
            warm_s, forked = time.monotonic() - began, bool(launcher.pids["zygote"])
            notices = launcher.notices()
            store = await _first_store(notices)
            started_at = time.monotonic()
            await launcher.start(WorkersLaunch("doctor", 1, 0, count, count, 0, 1, store, 0, 0))
            exits = await _exits(notices, launcher, count)
            told = {rank: one for rank in range(count) if (one := _told(folder, rank))}
            return Run(warm_s, started_at, told, exits, launcher.refused, forked)


async def _first_store(notices: AsyncIterator[Notice]) -> str:
    while True:
        notice = await anext(notices)
        if isinstance(notice, StoreReady):
            return notice.address


async def _exits(notices: AsyncIterator[Notice], launcher: LinuxLauncher, count: int) -> list[WorkerExit]:
    """All exits, in the order of the deaths."""
    exits: list[WorkerExit] = []
    while len(exits) < count:
        notice = await anext(notices)
        if isinstance(notice, WorkerExit):
            exits.append(notice)
            if notice.exit_code:  # the others wait for it in a collective, and would until torch's time-out
                await launcher.stop(GRACE_S, KILL_S)
    return exits


def _told(folder: str, rank: int) -> dict[str, Any]:
    try:
        return dict(json.loads(Path(folder, f"rank-{rank}.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


async def preload(modules: tuple[str, ...] | None) -> Finding:
    """Two workers on this machine, as `dlrover-run --preload MODULES` starts them: imports, fork, matrix product, all-reduce."""
    try:
        run = await run_probe("cpu", 2, modules)
    except LaunchFailed as error:
        return fail(f"no worker can be started: {error}", NO_TORCH if "No module named" in str(error) else "see above")
    values = {"warm_s": run.warm_s, "first_line_s": run.first_line_s, "refused": dict(run.refused), "ranks": run.told}
    if run.refused:
        listed = "; ".join(f"{name}: {reason}" for name, reason in run.refused.items())
        names = ",".join(one for one in modules or () if one not in run.refused)
        left = f"say --preload {names}" if names else "leave --preload away"
        return fail(
            f"refused: {listed}",
            f"{left}; a job goes on without a refused module and imports it at each restart",
            **values,
        )
    if run.fault:
        return fail(
            f"two workers cannot train here: {run.fault}", "see hostname and interface above, and the error", **values
        )
    if modules is None:
        return warn(
            f"--preload none: a worker's first line comes {run.first_line_s:.2f} s after the order, not forked",
            "without --preload none it is a few hundredths of a second",
            **values,
        )
    if not run.forked:
        return fail(
            "the warm process cannot be forked from, so workers are executed, which costs their imports at each restart",
            "look for what starts threads or CUDA when Python starts (sitecustomize, .pth files, PYTHONSTARTUP)",
            **values,
        )
    return _warmth(modules, run, values)


def _warmth(modules: tuple[str, ...], run: Run, values: Mapping[str, Any]) -> Finding:
    names = " + ".join(("torch", *modules))
    threads = max(one["threads"] for one in run.told.values())
    group_s = max(one["group_s"] for one in run.told.values())
    words = (
        f"{names} imported once in {run.warm_s:.1f} s; two forked workers: first line after {run.first_line_s * 1e3:.0f} ms, "
        f"{threads} thread each, matrix product right, gloo group and all-reduce in {group_s * 1e3:.0f} ms"
    )
    if threads != 1:
        return fail(words, "a forked worker must begin with one thread; please report this as a bug of ours", **values)
    if run.first_line_s > SLOW_FORK_S:
        return warn(words, "forking is slow: a busy machine, or little memory left? Compare with an idle one", **values)
    return ok(words, **values)


# ---- GPU


async def gpu(modules: tuple[str, ...] | None) -> Finding:
    """Warm fork, CUDA in the child, NCCL among up to two devices, bandwidth of pinned host memory."""
    seen = await own_process("dlrover_adapters.torch.probe", COUNT_S, "devices")
    if seen.get("fault"):
        return fail(f"torch cannot be asked: {seen['fault']}", NO_TORCH)
    if not seen["devices"]:
        return fail(f"torch sees no CUDA device ({_why_none(seen)})", _advice_for_none(seen), **seen)
    count = min(2, seen["devices"])
    try:
        run = await run_probe("cuda", count, modules)
    except LaunchFailed as error:
        return fail(f"no worker can be started: {error}", NO_TORCH if "No module named" in str(error) else "see above")
    values = {**seen, "warm_s": run.warm_s, "first_line_s": run.first_line_s, "ranks": run.told}
    if run.fault:
        return fail(
            run.fault,
            "NCCL_DEBUG=INFO dlrover doctor --gpu says more; look at nvidia-smi, the driver's version and dmesg (Xid)",
            **values,
        )
    return _bandwidths(count, seen["devices"], run, values)


def _bandwidths(count: int, devices: int, run: Run, values: Mapping[str, Any]) -> Finding:
    ranks = list(run.told.values())
    slowest = min(min(one["to_device_gb_s"], one["to_host_gb_s"]) for one in ranks)
    words = (
        f"{devices} device{'s' * (devices != 1)}, {ranks[0]['name']}; CUDA in a forked worker after "
        f"{max(one['cuda_s'] for one in ranks):.1f} s; NCCL all-reduce of {count} rank{'s' * (count != 1)} right, group in "
        f"{max(one['group_s'] for one in ranks):.1f} s; pinned host memory {slowest:.1f} GB/s at the slowest"
    )
    if slowest < PINNED_GB_S_MIN:
        return warn(
            words,
            f"less than {PINNED_GB_S_MIN:g} GB/s: a narrow PCIe slot, a link that trained down (lspci -vv: LnkSta) or the wrong "
            "NUMA node; checkpoints and data loading will feel it",
            **values,
        )
    return ok(words, **values)


def _why_none(seen: Mapping[str, Any]) -> str:
    if not seen["cuda"]:
        return f"torch {seen['torch']} is built without CUDA"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides them"
    return f"torch {seen['torch']} for CUDA {seen['cuda']}, driver {'there' if seen['driver'] else 'not there'}"


def _advice_for_none(seen: Mapping[str, Any]) -> str:
    if not seen["cuda"]:
        return "install a CUDA build of torch (https://pytorch.org/get-started), or leave --gpu away on CPU machines"
    if not seen["driver"]:
        return "no NVIDIA driver is loaded: nvidia-smi must work first; in a container, run it with the GPUs passed in"
    return "nvidia-smi must list devices, and CUDA_VISIBLE_DEVICES must not hide them; is the driver new enough for this CUDA?"

"""The environment of one rank, variable for variable as torchrun gives it (torch 2.13: `LocalElasticAgent._start_workers`)."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from dlrover_core.data.poison import VARIABLE
from dlrover_core.runtime.launcher import WorkersLaunch

FLIGHT_RECORDER_ENTRIES = "2000"
NON_TEMPORAL = "glibc.cpu.x86_non_temporal_threshold"
NON_TEMPORAL_BYTES = 16 * 1024 * 1024


def birth(env: dict[str, str], nproc: int, signals: Sequence[int]) -> None:
    """Put in what is the same for all ranks. OMP_NUM_THREADS, TORCH* and PYTORCH_* are read when libraries load."""
    if nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # torchrun's rule
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # torchrun's default
    # What a hang is explained by, for some microseconds a collective; the other is its older name.
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in env:
        env.setdefault("TORCH_FR_BUFFER_SIZE", FLIGHT_RECORDER_ENTRIES)
    # glibc copies past the caches only from 3/4 of the shared one on, often hundreds of MiB; copies of states, made in pieces of
    # 16 MiB and more, are to evict nothing of training's. Less than that would slow whoever copies a few MiB and reads them next,
    # as data loaders do (docs/checkpoint.md). Read when the process is executed.
    tunables = [one for one in env.get("GLIBC_TUNABLES", "").split(":") if one]
    if not any(one.startswith(f"{NON_TEMPORAL}=") for one in tunables):
        env["GLIBC_TUNABLES"] = ":".join([*tunables, f"{NON_TEMPORAL}={NON_TEMPORAL_BYTES:#x}"])
    # torch asks for the name of every address that it connects to. A question that is lost on its way is asked again after 1 s
    # instead of glibc's 5, and four times instead of once.
    env.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
    env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(signal.Signals(one).name for one in signals)
    # torch.cuda.is_available() must not initialise CUDA in the zygote: a CUDA context does not survive a fork.
    env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def rank_environment(launch: WorkersLaunch, local_rank: int, role: str, error_file: str) -> dict[str, str]:
    """What differs by rank and generation. What does not is in the environment the process was born with."""
    rank = launch.first_rank + local_rank
    host, _, port = launch.store.rpartition(":")
    # A world without a store: whoever needs none must not find the place of another one.
    store = {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port} if launch.store else {}
    left_out = {VARIABLE: launch.left_out} if launch.left_out else {}
    return {
        **store,
        **left_out,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_WORLD_SIZE": str(launch.nproc),
        "GROUP_RANK": str(launch.node_rank),
        "GROUP_WORLD_SIZE": str(launch.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(launch.world_size),
        "ROLE_NAME": role,
        "TORCHELASTIC_RESTART_COUNT": str(launch.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(launch.max_restarts),
        "TORCHELASTIC_RUN_ID": launch.run,
        # The store is the keeper's: every rank is a client of it, rank 0 too.
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "TORCHELASTIC_ERROR_FILE": error_file,
    }

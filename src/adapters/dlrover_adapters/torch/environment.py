"""The environment of one rank, variable for variable as torchrun gives it (torch 2.13: `LocalElasticAgent._start_workers`)."""

from __future__ import annotations

from dlrover_core.runtime.launcher import WorkersLaunch


def rank_environment(launch: WorkersLaunch, local_rank: int, role: str, error_file: str) -> dict[str, str]:
    """What differs by rank and generation. What does not is in the environment the process was born with."""
    rank = launch.first_rank + local_rank
    host, _, port = launch.store.rpartition(":")
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_WORLD_SIZE": str(launch.nproc),
        "GROUP_RANK": str(launch.node_rank),
        "GROUP_WORLD_SIZE": str(launch.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(launch.world_size),
        "ROLE_NAME": role,
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(launch.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(launch.max_restarts),
        "TORCHELASTIC_RUN_ID": launch.run,
        # The store is the keeper's: every rank is a client of it, rank 0 too.
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "TORCHELASTIC_ERROR_FILE": error_file,
    }

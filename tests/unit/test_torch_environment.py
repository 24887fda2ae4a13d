"""The environment of one rank."""

from __future__ import annotations

import inspect
import re

from dlrover_adapters.torch.environment import rank_environment
from dlrover_core.runtime.launcher import WorkersLaunch

LAUNCH = WorkersLaunch(
    run="run-1", generation=5, first_rank=4, nproc=4, world_size=8, node_rank=1, nodes=2, store="10.0.0.1:41233",
    restart_count=4, max_restarts=7,
)  # fmt: skip


def test_every_variable_of_torchrun_is_there() -> None:
    """Whatever the installed torchrun sets for a rank, we set; what does not differ by rank is set at birth."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    source = inspect.getsource(LocalElasticAgent._start_workers)
    theirs = set(re.findall(r'^\s+"([A-Z_]+)":', source, re.MULTILINE)) | {"LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"}
    born = {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    assert theirs - born == set(rank_environment(LAUNCH, 2, "default", "/tmp/error.json"))


def test_ranks_are_global_and_the_store_is_the_keepers() -> None:
    """Local rank 2 of the second node is rank 6 of 8, and connects to the generation's own store as a client."""
    env = rank_environment(LAUNCH, 2, "default", "/tmp/error.json")
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("6", "2", "8", "4")
    assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"], env["ROLE_RANK"]) == ("1", "2", "6")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "41233")
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert (env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("4", "7")
    assert (env["TORCHELASTIC_RUN_ID"], env["TORCHELASTIC_ERROR_FILE"]) == ("run-1", "/tmp/error.json")


def test_ipv6_stores() -> None:
    """An IPv6 store's address loses its brackets."""
    env = rank_environment(LAUNCH._replace(store="[::1]:5"), 0, "default", "")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("::1", "5")

"""One node of torch's own elastic agent, without torchrun: ``elastic_node.py JSON`` prints the agent's result as JSON.

The JSON names the rendezvous (``backend``, ``endpoint``, ``run``, ``nodes``, ``conf``) and the workers (``entry``, ``args``,
``nproc``, ``role``, ``restarts``, ``barrier_s``, ``master``). As a library it is what workers run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

UNHEARD_S = 120.0


def nothing() -> None:
    """A worker that returns nothing."""


def echo(word: str) -> str:
    """A worker that returns its argument."""
    return word


def environment(*names: str) -> dict[str, str | None]:
    """What a worker finds in its environment."""
    return {name: os.environ.get(name) for name in names}


def roles() -> dict[str, int]:
    """All numbers that a worker is given."""
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "LOCAL_RANK")
    return {name: int(os.environ[name]) for name in names}


def total() -> int:
    """The sum of all ranks, by gloo."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    summed = torch.tensor(dist.get_rank())
    dist.all_reduce(summed)
    size = dist.get_world_size()
    dist.destroy_process_group()
    assert int(summed) == sum(range(size))
    return size


def holds(arrived: str, go: str) -> int:
    """Say in one pipe which world this rank is in, wait for a byte from another, and then sum up."""
    with Path(arrived).open("w", encoding="ascii") as file:
        file.write(f"{os.environ['WORLD_SIZE']}/{os.environ['RANK']}\n")
    with Path(go).open("rb", buffering=0) as file:
        file.read(1)
    return total()


def fails() -> None:
    """Every worker fails."""
    raise RuntimeError("told to fail")


def odd_fails(wait_s: float = 0.0) -> int:
    """Odd ranks fail, the others take their time."""
    rank = int(os.environ["RANK"])
    if rank % 2:
        raise RuntimeError("odd ranks fail")
    time.sleep(wait_s)
    return rank


def fails_at_first() -> str:
    """Rank 1 fails in the first attempt."""
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if count == "0" and os.environ["RANK"] == "1":
        os._exit(7)
    return f"attempt {count}"


def sleeps_by_rank(seconds: float) -> int:
    """Rank r takes r times so long."""
    rank = int(os.environ["RANK"])
    time.sleep(rank * seconds)
    return rank


def asks(word: str) -> str:
    """Torch's RPC: rank 0 asks rank 1."""
    from torch.distributed import rpc

    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker-{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    answer = rpc.rpc_sync("worker-1", echo, args=(word,)) if rank == 0 else ""
    rpc.shutdown()
    return answer


def run(told: dict[str, Any]) -> dict[str, Any]:
    """Run the agent to its end, and then shut its rendezvous down outside of any exception, as torch's own tests do."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    from dlrover_adapters.torch import rendezvous

    # What ends because somebody was heard of ends far sooner than what ends because nobody was, however busy the machine is.
    rendezvous.OVER_S = rendezvous.LEAVE_S = rendezvous.MASTERS_S = UNHEARD_S
    conf = {"last_call_timeout": "2", "join_timeout": "180", **told.get("conf", {})}
    fewest, most = told.get("nodes", [1, 1])
    host, port = told.get("master", [None, None])
    handler = get_rendezvous_handler(
        RendezvousParameters(told["backend"], told["endpoint"], told["run"], fewest, most, **conf)
    )
    spec = WorkerSpec(
        role=told.get("role", "worker"),
        local_world_size=told.get("nproc", 1),
        entrypoint=globals()[told["entry"]],
        args=tuple(told.get("args", ())),
        rdzv_handler=handler,
        max_restarts=told.get("restarts", 0),
        monitor_interval=0.1,
        master_addr=host,
        master_port=port,
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(), "spawn", exit_barrier_timeout=told.get("barrier_s", 60))
    result = agent.run()
    began = time.monotonic()
    over = handler.shutdown()
    return {
        "state": result.state.name,
        "returned": {str(rank): value for rank, value in result.return_values.items()},
        "failures": {str(rank): [one.exitcode, one.message] for rank, one in result.failures.items()},
        "over": over,
        "heard": time.monotonic() - began < UNHEARD_S,
    }


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    broken = mock.patch("torch.distributed.elastic.utils.store.barrier", side_effect=RuntimeError("the barrier fails"))
    if order.get("breaks_barrier"):
        broken.start()
    sys.stdout.write(f"result {json.dumps(run(order))}\n")

"""No library at all as the launcher's framework: for groups of which no process imports torch.

Implements `dlrover_adapters.agent.framework.Framework`. Workers get their rank, and nothing that is particular to torch.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterable, Sequence

from dlrover_core.runtime.launcher import WorkersLaunch

CPUS = CHECK = ""
STEPS = False
ERROR_FILE = "DLROVER_ERROR_FILE"


def birth(env: dict[str, str], nproc: int, signals: Sequence[int]) -> None:
    """Nothing: the environment is the user's."""


def serve_store(host: str, port: int, fd: int) -> object:
    """There is none: groups with this framework form their worlds without."""
    os.close(fd)
    raise RuntimeError('framework "none" has no store: say store = false for the group')


def import_core() -> None:
    """What `begin` needs, and what scripts of groups that use others import: 30 ms of each start."""
    import dlrover_adapters.peers
    import dlrover_adapters.torch.errors
    import dlrover_adapters.torch.steps  # noqa: F401 - for its side effect: it is imported


def import_rest() -> None:
    """Nothing: preloads come after."""


def refusal_in_zygote() -> str:
    """What a preload leaves running is looked for elsewhere."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it initialises CUDA, which is unusable after a fork"
    return ""


def refusal_in_child() -> str:
    """A child that answers is one that can run."""
    return ""


def environment(launch: WorkersLaunch, local_rank: int, role: str, error_file: str) -> dict[str, str]:
    """The rank, under the names that launchers have for it."""
    rank = launch.first_rank + local_rank
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
        "DLROVER_RUN_ID": launch.run,
        "DLROVER_RESTART_COUNT": str(launch.restart_count),
        ERROR_FILE: error_file,
    }


def reseed() -> None:
    """New entropy for the generators that a preload has made."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def quietly() -> contextlib.AbstractContextManager[None]:
    """Nobody has to be kept quiet."""
    return contextlib.nullcontext()


def excused() -> frozenset[str]:
    """No module reads the rank."""
    return frozenset()


def found() -> tuple[str, ...]:
    """Nothing is found out about the host."""
    return ()


def find(known: Iterable[str]) -> None:
    """As above."""


def begin(launch: WorkersLaunch, rank: int, agent_socket: str, slot_fd: int, stepped: Callable[[], int]) -> None:
    """Signal the steps that the program tells (`dlrover_adapters.plain.step`)."""
    from dlrover_adapters.torch import steps  # the part of it that needs no torch

    steps.begin_told(launch.generation, rank, agent_socket, slot_fd, stepped)


def has_peers() -> bool:
    """Whom the program talks to is not known; nobody waits in a collective for it."""
    return False


def record_error(error: BaseException) -> None:
    """Leave the exception for the agent."""
    from dlrover_adapters.torch import errors  # as above

    errors.record(os.environ.get(ERROR_FILE, ""), error)

"""Torch as the launcher's framework: what to import ahead, what makes a fork unfit, and how a worker begins.

Implements `dlrover_adapters.agent.framework.Framework`. Nothing of torch is imported before a function needs it: commands
that are not Python get their environment from here too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from dlrover_core.runtime.launcher import WorkersLaunch

from . import environment as variables

CPUS, CHECK, STEPS = "dlrover_adapters.torch.affinity", "dlrover_adapters.torch.check", True

WARM = "DLROVER_WARM"
"""``core``, instead of ``all``: the zygote imports torch alone. For scripts without optimizers: 2 s of CPU and 100 MiB less on
each node's start.
"""
RANK_READERS = {
    "lightning_utilities.core.rank_zero": "RANK",
    "torchmetrics.utilities.prints": "LOCAL_RANK",
}
"""Modules whose ``rank_zero_only.rank`` is this variable, as it was when they were imported."""

WARM_POOL = "TORCH_WARM_POOL"
"""``0``: torch's compiler starts the processes in which it compiles when it needs them, not when it is imported."""

VECTORS = "torch._inductor.cpu_vec_isa"
"""Here inductor keeps which vector instructions this host, its compiler and torch have. Each process that compiles for the CPU
finds it out anew, with subprocesses of 0.6 s.
"""

PROBE_SIZE = 256  # large enough that a product is shared out to the OpenMP team


def birth(env: dict[str, str], nproc: int, signals: Sequence[int]) -> None:
    """Torchrun's variables that are the same for all ranks, and what torch reads when it is loaded."""
    variables.birth(env, nproc, signals)


def serve_store(host: str, port: int, fd: int) -> object:
    """A TCPStore. It is given its socket: torch itself would listen on every interface, and its stores are unauthenticated."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def import_core() -> None:
    """Torch and its stores."""
    import torch
    import torch.distributed  # noqa: F401 - for its side effect: it is imported


def import_rest() -> None:
    """What scripts pull in at their first optimizer (`_dynamo`, 0.7 to 2 s), checkpoint (0.15 s), dataset, wrapper or error."""
    warm = os.environ.get(WARM, "all")
    if warm not in {"all", "core"}:
        raise ValueError(f"{WARM} is 'all' or 'core', got {warm!r}")
    if warm == "core":
        return
    import msgpack  # noqa: F401 - as below
    import torch._dynamo
    import torch.distributed.algorithms.join
    import torch.distributed.elastic.multiprocessing.errors
    import torch.nn.parallel
    import torch.utils.data  # noqa: F401 - for their side effect: they are imported

    try:
        for name in ("checkpoint.flash", "checkpoint.restore", "data.batch"):
            importlib.import_module(f"dlrover_adapters.torch.{name}")
    except Exception as error:  # noqa: BLE001  # no xxhash, an older torch, an fsspec that is configured wrongly
        import logging  # not earlier: agents import this module first of all

        # Scripts that want it meet the same error; others are forked all the same.
        logging.getLogger("dlrover.torch").warning(
            "FlashCheckpoint cannot be imported: %s: %s", type(error).__name__, error
        )


def refusal_in_zygote() -> str:
    """CUDA must not be initialised before a fork."""
    import torch

    initialized: Callable[[], bool] = torch.cuda.is_initialized  # torch leaves it untyped
    if initialized():
        return "it initialises CUDA, which is unusable after a fork"
    return ""


def refusal_in_child() -> str:
    """Torch's own opinion, and the proof that this child can compute."""
    import torch

    if torch.cuda._is_in_bad_fork():
        return "it initialises CUDA, which is unusable after a fork"
    ones = torch.ones(PROBE_SIZE, PROBE_SIZE)
    if float((ones @ ones)[0, 0]) != PROBE_SIZE:
        return "a forked child gets a matrix product wrong"
    return ""


def environment(launch: WorkersLaunch, local_rank: int, role: str, error_file: str) -> dict[str, str]:
    """Torchrun's variables."""
    return variables.rank_environment(launch, local_rank, role, error_file)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep inductor from starting its pool of processes, and the threads that serve it."""
    stated = os.environ.get(WARM_POOL)
    os.environ[WARM_POOL] = "0"
    try:
        yield
    finally:
        if stated is None:
            del os.environ[WARM_POOL]
        else:
            os.environ[WARM_POOL] = stated


def excused() -> frozenset[str]:
    """Those of `RANK_READERS`, and who reads the rank for them."""
    return frozenset({*RANK_READERS, "lightning.fabric.utilities.rank_zero", "lightning_fabric.utilities.rank_zero"})


def _know_rank() -> None:
    """Tell modules that were imported before this process had a rank."""
    for name, variable in RANK_READERS.items():
        only = getattr(sys.modules.get(name), "rank_zero_only", None)
        if only is not None and hasattr(only, "rank") and variable in os.environ:
            only.rank = int(os.environ[variable])


def reseed() -> None:
    """New entropy for every generator that a fresh process seeds for itself. CUDA's are made, and seeded, at its first use.

    And the rank, for modules that asked for it before the fork.
    """
    _know_rank()
    random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def found() -> tuple[str, ...]:
    """The vector instructions that inductor has found, if it has looked for them."""
    module = sys.modules.get(VECTORS)
    look = getattr(module, "valid_vec_isa_list", None)
    if look is None or not hasattr(look, "cache_info") or not look.cache_info().currsize:
        return ()
    return (f"{VECTORS}: {', '.join(map(str, look()))}",)


def find(known: Iterable[str]) -> None:
    """Have inductor hash torch's sources, which its caches go by, and look for vector instructions, if workers did.

    Vector instructions other than those in ``known`` are forgotten: a limit that was reached just now may be the reason. Inductor
    sets variables meanwhile, such as its folder's: they are as before afterwards.
    """
    with contextlib.suppress(Exception):
        sys.modules["torch._inductor.codecache"].torch_key()
    module, before = sys.modules.get(VECTORS), dict(os.environ)
    look, isa = getattr(module, "valid_vec_isa_list", None), getattr(module, "VecISA", None)
    if not any(one.startswith(f"{VECTORS}: ") for one in known) or look is None or isa is None:
        return
    with contextlib.suppress(Exception):
        look()
    if not set(found()) & set(known):
        for one in (look, *vars(isa).values()):
            if hasattr(one, "cache_clear"):
                one.cache_clear()
    for variable in set(os.environ) - set(before):
        del os.environ[variable]
    os.environ.update(before)


def begin(launch: WorkersLaunch, rank: int, agent_socket: str, slot_fd: int, stepped: Callable[[], int]) -> None:
    """Signal steps from here on, and be ready to show where this process is."""
    from . import steps

    steps.begin(launch.generation, rank, agent_socket, slot_fd, stepped)


def has_peers() -> bool:
    """Whether a process group of several ranks was initialised: its store and its other ranks know this process by now."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return bool(distributed.get_world_size() > 1)


def record_error(error: BaseException) -> None:
    """Write torch's error file, for scripts without torch's ``@record``; what ``@record`` wrote stays."""
    from . import errors

    errors.record(os.environ.get("TORCHELASTIC_ERROR_FILE", ""), error)

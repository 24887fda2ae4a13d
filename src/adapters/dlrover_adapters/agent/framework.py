"""The `Framework` port: what the launcher must know of the library that trains, without importing it.

A framework is a module named in `LaunchConfig.framework` that has these names. Agents import the module, too, first of all, and
must not pay for the library: the module imports nothing of it before a function that needs it is called.
`dlrover_adapters.torch.worker` is torch; `dlrover_adapters.plain.worker` is no library at all.
"""

from __future__ import annotations

import importlib
import string
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, cast

from dlrover_core.runtime.launcher import WorkersLaunch


class Framework(Protocol):
    """In agents: `CPUS`, `CHECK`, `STEPS`, `birth`. In the keeper: `serve_store`. The rest in zygotes and workers, in this order:
    `import_core`, `import_rest`, (probes), then in each worker `environment`, `reseed`, `begin`.
    """

    CPUS: str
    """The module that says to which CPUs each local rank is bound (``--numa-binding``); empty: the library has no opinion."""

    CHECK: str
    """The module whose processes try out whether nodes can compute (``--precheck full``); empty: there is nothing to compute."""

    STEPS: bool
    """Does every program of this library make steps? Else a program that has told of none is not taken for hanging."""

    def birth(self, env: dict[str, str], nproc: int, signals: Sequence[int]) -> None:
        """Put in what ``nproc`` workers of a node are born with beside, where nobody has set it. ``signals`` stop a job."""

    def serve_store(self, host: str, port: int, fd: int) -> object:
        """A store that serves at the listening socket ``fd`` as long as the object lives.

        Raises `OSError` and `RuntimeError`.
        """

    def import_core(self) -> None:
        """Import what the keeper needs; runs in the zygote before anything else."""

    def import_rest(self) -> None:
        """Import what training scripts pull in lazily, so that recovery does not pay for it."""

    def refusal_in_zygote(self) -> str:
        """Why this process must not be forked any more; empty if it may."""

    def refusal_in_child(self) -> str:
        """Why a process forked from the zygote cannot train; empty if it can. Computes; a hang is an answer too."""

    def environment(self, launch: WorkersLaunch, local_rank: int, role: str, error_file: str) -> dict[str, str]:
        """The variables of one rank, as the framework's own launcher sets them."""

    def reseed(self) -> None:
        """Draw new entropy, as a fresh process has: forked ones would all draw the same numbers. The rank is known by then."""

    def quietly(self) -> AbstractContextManager[None]:
        """While modules are imported in the zygote: keep those of the framework from starting threads and processes."""

    def excused(self) -> frozenset[str]:
        """Modules that read the rank while they are imported, and that `reseed` puts right in a forked worker."""

    def found(self) -> tuple[str, ...]:
        """Facts about this host that were costly to find out, as words. Without `find` each process finds them out anew."""

    def find(self, known: Iterable[str]) -> None:
        """Find the same facts out in the zygote, for all workers. A fact that is not in ``known`` is not kept."""

    def begin(
        self, launch: WorkersLaunch, rank: int, agent_socket: str, slot_fd: int, stepped: Callable[[], int]
    ) -> None:
        """Connect to the agent and count steps from here on, also in ``slot_fd``, which is open only during this call.

        ``stepped`` is called once, at the first step: it returns the microseconds that imports took until then.
        """

    def has_peers(self) -> bool:
        """Whether this process has joined other ranks. If it began its script again, they would wait for it in vain."""

    def record_error(self, error: BaseException) -> None:
        """Write the framework's error file for an exception that nobody caught, unless there is one already."""


def load(name: str) -> Framework:
    """The framework in module ``name``."""
    return cast(Framework, importlib.import_module(name))


def substituted(argv: tuple[str, ...], local_rank: int) -> tuple[str, ...]:
    """``argv`` with torchrun's macro (``${local_rank}``) replaced, by the rule it has there."""
    return tuple(string.Template(one).safe_substitute(local_rank=str(local_rank)) for one in argv)

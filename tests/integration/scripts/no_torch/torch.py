"""Stands for torch in jobs whose scripts need none (`running.warmth`): what of it our own processes call, and nothing more.

Torch's import is 1.5 s of CPU for each node that starts, and what is forked from a process that has it costs more to fork and to
end. Launchers, agents, zygotes, keepers and workers are the real ones; jobs whose scripts import torch have the real one too.
"""

from __future__ import annotations

import socket
import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class TCPStore:
    """Listens, and knows nothing: no rank of such a script asks."""

    def __init__(self, host: str, port: int, *, is_master: bool, wait_for_workers: bool, master_listen_fd: int) -> None:
        self._listener = socket.socket(fileno=master_listen_fd)


class Ones:
    """A matrix of ones, good for one product: the proof that a forked child can compute."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns

    def __matmul__(self, other: Ones) -> dict[tuple[int, int], float]:
        return {(0, 0): float(sum(1 for _ in range(self.columns)))}


def _module(name: str, **names: Any) -> ModuleType:
    made = sys.modules[f"{__name__}.{name}"] = ModuleType(f"{__name__}.{name}")
    made.__dict__.update(names)
    return made


ones = Ones
default_generator = SimpleNamespace(seed=lambda: 0)
cuda = _module("cuda", _initialized=False, is_initialized=lambda: False, _is_in_bad_fork=lambda: False)
distributed = _module("distributed", is_available=lambda: False)
_C = _module("_C", _distributed_c10d=_module("_C._distributed_c10d", TCPStore=TCPStore))
optim = _module("optim", optimizer=_module("optim.optimizer", register_optimizer_step_post_hook=lambda hook: None))

"""What a process has in work of a dataset, noted for the agent; and the words that an exception in a fetch leaves with."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

from torch.utils.data import get_worker_info

from dlrover_adapters.torch import steps
from dlrover_core.data.in_work import InWork, Notes

_log = logging.getLogger("dlrover.torch")


def notes() -> Notes | None:
    """Where this process notes what it has in work; None: no agent watches it."""
    found, loader = steps.notes(), get_worker_info()
    return found if found is None or loader is None else found.of_loader(loader.id, os.getpid())


class Fetching(NamedTuple):
    """One micro-batch that is being fetched. ``most``: as in `InWork`; ``notes``: None where no agent watches."""

    dataset: str
    epoch: int
    most: int
    notes: Notes | None

    def begin(self, first: int, to: int, index: int = -1) -> None:
        """These positions are fetched from now on; ``index``: of the sample, if it is one."""
        if self.notes is not None:
            self.notes.fetch(InWork(self.dataset, self.epoch, first, to, index, self.most, True))

    def end(self) -> None:
        """All of it is there."""
        if self.notes is not None:
            self.notes.fetched()

    def failed(self, first: int, to: int, index: int, error: Exception) -> None:
        """Have the exception, and the agent, name the sample. The exception keeps its type, so that it is handled as ever."""
        if self.notes is not None:
            self.notes.failed()
        if index >= 0:
            what = f"index {index} of dataset {self.dataset!r} (epoch {self.epoch}, position {first})"
        else:
            what = f"positions {first} to {to} exclusive of dataset {self.dataset!r} (epoch {self.epoch})"
        words = f"fetching {what} raised {type(error).__name__}: {error}"
        add_note = getattr(error, "add_note", None)  # from Python 3.11 on
        if add_note is not None:
            add_note(words)
        else:
            _log.error("%s", words)

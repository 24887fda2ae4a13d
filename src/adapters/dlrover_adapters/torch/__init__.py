"""What runs inside torch workers. A training script needs none of it; it may call `step`.

``step(number)`` tells the agent that training step ``number`` is done: for loops whose steps are not optimizer calls, and so
that reports count lost steps in the script's own numbers. Cheap (about a microsecond), never blocks, does nothing outside a
worker. ``step(number, of=1000)`` also says how many steps there are to be: ``dlrover status`` then tells the time left. A script
that imports ``step`` is believed to call it: its optimizer calls are counted only when it does not.

``with phase("evaluation"):`` (or ``"checkpoint"``, or any other name) announces that no steps are made for a while: such a pause
has a budget of its own before it counts as a hang, and how long one took is learnt.

``report_loss(value)``, a number or a tensor, on every rank: a loss that is no number any more is answered with a restart, and a
jump is told. ``report_tokens(count, squares)`` says how much work the step in the making is, ``with compute():`` marks what this
rank computes without waiting for another one: by these a slow machine is told from long sequences. A tensor on a GPU is never
waited for.

``FlashCheckpoint(url, model=..., optimizer=...)`` saves the state of training into the agent's memory and to storage, and
restores it; its ``step`` tells the step too.

``ElasticDataset(name, size=..., fetch=...)`` gives each rank its own samples of one total order, and its position is saved with
the state. ``ElasticBatch(model, optimizer, global_batch=..., micro_batch=...)`` makes the same global steps at every world size.
``ElasticStream("kafka://host:9092/topic")`` is such a dataset of a stream's messages.
``ElasticLoader(data)`` iterates over one epoch at a time, for trainers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint.flash import FlashCheckpoint
    from .data.batch import ElasticBatch
    from .data.dataset import ElasticDataset
    from .data.loader import ElasticLoader
    from .data.stream import ElasticStream
    from .loss import report_loss
    from .meter import compute, report_tokens
    from .steps import phase
    from .steps import tell as step

__all__ = [
    "ElasticBatch",
    "ElasticDataset",
    "ElasticLoader",
    "ElasticStream",
    "FlashCheckpoint",
    "compute",
    "phase",
    "report_loss",
    "report_tokens",
    "step",
]
_HERE = {
    "ElasticBatch": ("data.batch", "ElasticBatch"),
    "ElasticDataset": ("data.dataset", "ElasticDataset"),
    "ElasticStream": ("data.stream", "ElasticStream"),
    "ElasticLoader": ("data.loader", "ElasticLoader"),
    "FlashCheckpoint": ("checkpoint.flash", "FlashCheckpoint"),
    "compute": ("meter", "compute"),
    "phase": ("steps", "phase"),
    "report_loss": ("loss", "report_loss"),
    "report_tokens": ("meter", "report_tokens"),
}


def __getattr__(name: str) -> Any:
    """`step`, when it is first asked for: that is how we know that the script will tell; and the others."""
    if name in _HERE:
        module, its_name = _HERE[name]
        return getattr(importlib.import_module(f"{__name__}.{module}"), its_name)
    if name != "step":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .steps import expect, tell

    expect()
    return tell

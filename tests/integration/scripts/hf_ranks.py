"""Hugging Face's Trainer on an `ElasticDataset` under real agents: STEPS, KILLED (RANK:STEP).

The rank KILLED dies by SIGKILL in the first generation, once it has made that step. `told_steps` says what is
written down.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import small_huggingface as small

RANK, LIFE = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
STEPS, KILLED, FOLDER = int(sys.argv[1]), sys.argv[2], Path(os.environ["FOLDER"])


def tell(**words: Any) -> None:
    """One line."""
    with (FOLDER / f"told-{RANK}").open("a") as told:
        told.write(json.dumps({"life": LIFE, **words}) + "\n")


class Telling(small.TrainerCallback):  # type: ignore[misc]
    """Writes down what entered a step when the step is made."""

    trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Before the first step it is known what was restored."""
        if not self.trainer.entered:
            tell(restored=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """A step is made."""
        tell(step=state.global_step, samples=self.trainer.entered[state.global_step])
        if LIFE == "0" and f"{RANK}:{state.global_step}" == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


class Told(small.Writing):
    """With the callback."""

    def __init__(self, *, callbacks: Any, **more: Any) -> None:
        telling = Telling()
        super().__init__(callbacks=[*callbacks, telling], **more)
        telling.trainer = self


if __name__ == "__main__":
    small.elastic(FOLDER, STEPS, kind=Told, ddp_backend="gloo", dataloader_num_workers=1, dataloader_prefetch_factor=2)

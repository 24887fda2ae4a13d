"""Trains on an `ElasticDataset` under FlashCheckpoint: STEPS, URL, KILLED ("-" or RANK:STEP).

The rank KILLED dies by SIGKILL in the first generation, once it has made that step and asked for its save.
`told_steps` tells the steps. A step takes ``PACE_S`` seconds more.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from told_steps import Training

from dlrover_adapters.torch import ElasticDataset

SIZE, BATCH, MICRO = 61, 8, 2


def sample(index: int) -> torch.Tensor:
    """One of them."""
    return torch.full((4,), float(index))


def main(steps: str, url: str, killed: str) -> None:
    """Train, die, train on."""
    training = Training(4, 1e-6, batch=BATCH, micro=MICRO)
    data = ElasticDataset("train", size=SIZE, fetch=sample, epochs=0, seed=3)
    pace_s, again = float(os.environ.get("PACE_S", "0")), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def die(step: int) -> None:
        if not again and killed == f"{training.rank}:{step}":
            os.kill(os.getpid(), signal.SIGKILL)

    training.train(data, url, saves=(2, 6), steps=int(steps), made=lambda _: time.sleep(pace_s), saved=die)


if __name__ == "__main__":
    main(*sys.argv[1:])

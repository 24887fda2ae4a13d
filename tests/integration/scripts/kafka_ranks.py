"""Trains on a topic under FlashCheckpoint: STEPS, URL of checkpoints, URL of the topic, whose messages are numbers.

`told_steps` tells the messages of every step. A step takes ``PACE_S`` seconds more.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from told_steps import Training

from dlrover_adapters.torch import ElasticStream

BATCH, MICRO = 8, 3


def main(steps: str, url: str, topic: str) -> None:
    """Train, die, train on."""
    training, pace_s = Training(1, 1e-9, batch=BATCH, micro=MICRO), float(os.environ["PACE_S"])

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return training.model(x.float().unsqueeze(1)).square().mean()

    training.train(
        ElasticStream(topic, parse=int),
        url,
        saves=(2, 6),
        steps=int(steps),
        drawn=lambda x: x.tolist(),
        loss_of=loss_of,
        made=lambda _: time.sleep(pace_s),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

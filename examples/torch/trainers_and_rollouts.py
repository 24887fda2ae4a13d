"""Reinforcement learning with three kinds of nodes: trainers, rollout workers that serve them, and an evaluator.

Run it with the job file beside it, which says what each group runs and what may happen to whom::

    dlrover-run --job examples/torch/trainers_and_rollouts.toml

The task is a bandit: of four arms the right one depends on eight signs, by a rule that nobody is told. Rollout workers play with
the newest policy that they have and send what came of it to a trainer. Trainers (DDP, gloo) improve the policy, and answer each
batch with the newest one. The evaluator plays greedily, now and again.

Kill any of them. A rollout worker comes back alone, and the trainers do not lose a step. With a trainer, the trainers' world
starts again from its last step, and the rollout workers, which go on, call it again: at the address that `dlrover_adapters.peers`
says then, which is another one where the trainer has moved. Rollout workers and the evaluator import no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import queue
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlrover_adapters import peers

SIGNS, ARMS, BATCH = 8, 4, 32
Policy = list[list[float]]
Plays = list[tuple[list[float], int, float]]
"""What was seen, which arm was pulled, and the reward."""


def right_arm(signs: list[float]) -> int:
    """The rule that is to be learnt."""
    return 2 * (signs[0] * signs[1] > 0) + (signs[2] > 0)


def features(signs: list[float]) -> list[float]:
    """What the policy sees of the signs: they, a constant, and products of neighbours."""
    return [*signs, 1.0, *(one * other for one, other in itertools.pairwise(signs))]


def play(policy: Policy, *, greedy: bool) -> tuple[list[float], int, float]:
    """One game."""
    signs = [random.choice((-1.0, 1.0)) for _ in range(SIGNS)]
    seen = features(signs)
    scores = [sum(weight * one for weight, one in zip(row, seen, strict=True)) for row in policy]
    chances = [math.exp(score - max(scores)) for score in scores]
    arm = scores.index(max(scores)) if greedy else random.choices(range(ARMS), chances)[0]
    return seen, arm, float(arm == right_arm(signs))


# ---- trainers and those who talk to them


class Line:
    """A connection on which each side says one JSON value after the other."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rw", encoding="utf-8")

    def say(self, value: Any) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()

    def hear(self) -> Any:
        text = self._file.readline()
        if not text.endswith("\n"):
            raise ConnectionResetError("the other side is gone")
        return json.loads(text)


class Desk:
    """A trainer's door: every caller sends batches of plays, and gets the newest policy for each."""

    def __init__(self) -> None:
        self._server = peers.listen()
        self.batches: queue.Queue[Plays] = queue.Queue(maxsize=4)
        self.policy: Policy = []
        self.step = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            caller, _ = self._server.accept()
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        with contextlib.suppress(OSError), caller:
            line = Line(caller)
            while True:
                plays = line.hear()
                if plays:
                    self.batches.put(plays)
                line.say([self.step, self.policy])


@contextlib.contextmanager
def trainer_at(place: int) -> Iterator[Line]:
    """A line to a trainer. Waits while none is told of at this place, or none listens there yet."""
    told = peers.peers()
    while True:
        try:
            host, _, port = told.groups["trainer"][place][0].rpartition(":")
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=30)
            break
        except (LookupError, OSError):
            with contextlib.suppress(TimeoutError):
                told = peers.wait(newer_than=told.version, timeout_s=0.05)
    with connection:
        yield Line(connection)


def train(folder: Path, steps: int) -> None:
    """Be a trainer."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from dlrover_adapters.torch import FlashCheckpoint

    dist.init_process_group("gloo")
    torch.manual_seed(7)
    width = len(features([1.0] * SIGNS))
    model = torch.nn.Linear(width, ARMS, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    ckpt = FlashCheckpoint(f"file://{folder}", model=model, optimizer=optimizer, every=1, store_every=100)
    step = ckpt.restore()
    begun = f"goes on after step {step}" if step else "begins"
    print(f"trainer {dist.get_rank()} {begun}", flush=True)
    parallel, desk = DistributedDataParallel(model), Desk()
    while True:
        desk.policy, desk.step = model.weight.detach().tolist(), step
        if step >= steps:
            break
        seen, arms, rewards = zip(*desk.batches.get(), strict=True)
        chances = torch.log_softmax(parallel(torch.tensor(seen)), dim=1)
        taken = chances.gather(1, torch.tensor(arms).unsqueeze(1)).squeeze(1)
        gain = torch.tensor(rewards) - 1 / ARMS
        optimizer.zero_grad()
        (-(taken * gain).mean()).backward()
        optimizer.step()
        step += 1
        ckpt.step(step)
    ckpt.close()
    if dist.get_rank() == 0:
        right = sum(play(desk.policy, greedy=True)[2] for _ in range(1000)) / 1000
        print(f"trained {step} steps: right in {100 * right:.0f} % of 1000 games", flush=True)


def roll_out(trainers: int) -> None:
    """Be a rollout worker, until the job is over."""
    from dlrover_adapters.plain import step

    place, played = int(os.environ["DLROVER_PLACE"]), 0
    print(f"rollout {place} begins", flush=True)
    while True:
        # A trainer that is gone comes back; what was on its way to it is lost, and played again.
        with trainer_at(place % trainers) as line, contextlib.suppress(OSError):
            line.say([])
            while True:
                _, policy = line.hear()
                line.say([play(policy, greedy=False) for _ in range(BATCH)] if policy else [])
                played += 1
                step(played)


def evaluate(steps: int) -> None:
    """Be the evaluator: look at the policy now and again."""
    told = -1
    while told < steps:
        with trainer_at(0) as line, contextlib.suppress(OSError):
            while told < steps:
                line.say([])
                step, policy = line.hear()
                if policy and step // 50 > told // 50:
                    told = step
                    right = sum(play(policy, greedy=True)[2] for _ in range(200)) / 200
                    print(f"step {step}: right in {100 * right:.0f} %", flush=True)
                time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=Path("rollouts"), help="folder of the trainers' checkpoints")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--trainers", type=int, default=2)
    options = parser.parse_args()
    match os.environ["DLROVER_GROUP"]:
        case "trainer":
            train(options.checkpoint.absolute(), options.steps)
        case "rollout":
            roll_out(options.trainers)
        case "evaluator":
            evaluate(options.steps)


if __name__ == "__main__":
    main()

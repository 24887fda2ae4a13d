"""One training loop for `dlrover-run --backend ray` and for Ray Train, and a line in a diary for all that it does.

Under our launcher it is the script that runs; with ``--trainer`` it is the driver, which hands the same loop to Ray Train's
`TorchTrainer`, with its preemption watcher and unlimited failures. DDP over gloo; the state is kept in each launcher's own way:
`FlashCheckpoint` here, `ray.train.report` there, every ``--every`` steps, and at a notice of pre-emption as its documentation has
it. It writes the same lines as `ddp_step.py`; in lines before ``ready`` the step's field holds the size of the world.
"""

from __future__ import annotations

import os
import time

BEGAN = time.monotonic_ns()

import argparse  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from diary import Diary  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

IMPORTED = time.monotonic_ns()


class Flash:
    """The state as our users keep it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> None:
        from dlrover_adapters.torch import FlashCheckpoint

        self._kept = FlashCheckpoint("", model=model, optimizer=optimizer, every=every)

    def restore(self) -> int:
        """The step that it is at."""
        return int(self._kept.restore())

    def step(self, step: int) -> None:
        """After each step."""
        self._kept.step(step)


class Report:
    """The state as Ray Train's users keep it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> None:
        self._model, self._optimizer, self._every = model, optimizer, every
        self._noticed = False

    def restore(self) -> int:
        """The step that it is at."""
        import ray.train

        found = ray.train.get_checkpoint()
        if found is None:
            return 0
        with found.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def step(self, step: int) -> None:
        """After each step: whether a node is about to go is asked every time, as its documentation has it."""
        import ray.train

        info = ray.train.get_preemption_info()
        if step % self._every == 0 or (info is not None and not self._noticed):
            self._noticed = info is not None
            self._save(step)

    def _save(self, step: int) -> None:
        import ray.train

        if ray.train.get_context().get_world_rank() != 0:
            ray.train.report({"step": step})
            return
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict(), "step": step}
            torch.save(state, Path(folder, "state.pt"))
            ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def train(told: dict[str, Any]) -> None:
    """One rank's life."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    diary = Diary(told["diary"], rank)
    diary.note("begin", world, BEGAN)
    diary.note("imported", world, IMPORTED)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    diary.note("grouped", world)
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3)
    kept = (Report if told["trainer"] else Flash)(inner, optimizer, told["every"])
    start = kept.restore()
    diary.note("ready", start)
    for step in range(start + 1, told["steps"] + 1):
        chance = torch.Generator().manual_seed(step * world + rank)
        loss = model(torch.randn(64, 64, generator=chance)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        diary.note("step", step)
        kept.step(step)
        time.sleep(told["pause"])


def fit(told: dict[str, Any], nodes: tuple[int, int], folder: Path, resize_s: float) -> None:
    """Hand the loop to Ray Train, which looks for room every ``resize_s``."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # Workers find this file, and what Ray Train needs besides, where this process does.
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": paths}}, log_to_driver=False)
    import ray_step

    trainer = TorchTrainer(
        ray_step.train,
        train_loop_config=told,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=nodes if nodes[0] != nodes[1] else nodes[0], elastic_resize_monitor_interval_s=resize_s
        ),
        run_config=RunConfig(name="bench", storage_path=str(folder), failure_config=FailureConfig(max_failures=-1)),
    )
    trainer.fit()


def main() -> None:
    """Train, or have it trained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--diary", required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds added to every step")
    parser.add_argument("--trainer", metavar="MIN:MAX", help="be the driver of Ray Train")
    parser.add_argument(
        "--resize", type=float, default=60.0, help="seconds between two looks for room; Ray Train's own"
    )
    options = parser.parse_args()
    told = {name: getattr(options, name) for name in ("diary", "steps", "every", "pause")}
    told["trainer"] = bool(options.trainer)
    if options.trainer:
        least, _, most = options.trainer.partition(":")
        fit(told, (int(least), int(most or least)), options.checkpoint.parent, options.resize)
    else:
        train(told)


if __name__ == "__main__":
    sys.exit(main())

"""Trains with one way of saving checkpoints, and says what that costs: ``--engine NAME --mib N --out FILE``. One process.

The state is an AdamW's over linear layers, `--mib` in all; only the first layer learns, as the rest would take longer to step
on a CPU than on the devices that this is about. What is computed beside it fills a step up to `--step-s`. After some steps to get
warm, windows of steps without and with one save follow each other; of each pair the difference is what a save costs.
The file holds seconds: of every save the *stall* (training stood in calls of the engine, its optimizer hooks included), what the
pair of windows differs by, in time and in CPU time, and minor faults; of the first save its stall and duration.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import resource
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH = 2048
WARM, WINDOW = 4, 4
LIMIT_S = 120.0


def faults() -> int:
    """Minor page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Training:
    """A model, its optimizer, and steps that take about ``step_s``."""

    def __init__(self, mib: int, step_s: float, *, fresh: bool = False) -> None:
        """``fresh``: nothing is initialized, and the optimizer has no state yet, as before a restore."""
        torch.manual_seed(0)
        width = WIDTH if mib >= 256 else 512
        layers = max(2, round(mib * 2**20 / 12 / (width * width + width)))
        self.model = nn.Sequential(*(nn.utils.skip_init(nn.Linear, width, width) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.size = sum(3 * one.numel() * one.element_size() for one in self.model.parameters())
        self._batch = torch.randn(64, width)
        self._other = torch.randn(512, 512)
        self.times = 0
        self._step_s = step_s
        if not fresh:
            self.first()

    def first(self) -> None:
        """Values, and the optimizer's first step, by which all its state is there. From then on the first layer learns alone."""
        with torch.no_grad():
            for one in self.model.parameters():
                one.uniform_(-0.02, 0.02)
                one.grad = torch.zeros_like(one)
        self.optimizer.step()
        for one in list(self.model.parameters())[2:]:
            one.grad = None

    def calibrate(self) -> None:
        """Find out how much work fills a step."""
        for _ in range(2):
            self._once(8)
        began = time.perf_counter()
        self._once(0)
        floor = time.perf_counter() - began
        began = time.perf_counter()
        self._once(20)
        each = (time.perf_counter() - began - floor) / 20
        self.times = max(1, round((self._step_s - floor) / each))

    def _once(self, times: int) -> None:
        first = self.model[0]
        loss = first(self._batch).square().mean()
        # Kept, as a gradient that is made anew costs faults, which are counted here.
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        found = self._other
        for _ in range(times):
            found = torch.tanh(found @ self._other)
        self.optimizer.step()

    def step(self) -> None:
        """One step; every optimizer hook runs in it."""
        self._once(self.times)

    def state(self) -> dict[str, Any]:
        """As people save it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Engine:
    """A way to save. `save` is called after the optimizer's step; ``hooks_s`` is what it stalled elsewhere since then."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.hooks_s = 0.0

    def save(self, step: int) -> None:
        """Save, or begin to."""

    def tick(self, step: int) -> None:
        """A step that is not saved."""

    def ready(self) -> bool:
        """Is what it makes ahead there?"""
        return True

    def wait(self) -> None:
        """Until what was begun is there."""

    def close(self) -> None:
        """The end."""

    def details(self) -> dict[str, Any]:
        """What the engine says of itself."""
        return {}


class Nothing(Engine):
    """No checkpoints: what two windows differ by at any rate."""


class Memcpy(Engine):
    """The bytes into warm memory that was made ahead, by one thread, while training stands: the floor of a blocking save."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self._memory = mmap.mmap(-1, training.size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._pieces: list[tuple[int, torch.Tensor]] = []

    def save(self, step: int) -> None:
        """Copy."""
        at = 0
        for one in self.training.model.parameters():
            state = self.training.optimizer.state[one]
            for tensor in (one.detach(), state["exp_avg"], state["exp_avg_sq"]):
                size = tensor.numel() * tensor.element_size()
                ctypes.memmove(self._address + at, tensor.data_ptr(), size)
                at += size


class Beside(Memcpy):
    """The same bytes by a thread beside training, which nothing waits for: the least that a copy beside training can cost.

    In pieces as large as ours, without the interpreter's lock. It is no checkpoint: nobody looks whether it is torn.
    """

    PIECE = 64 * 1024 * 1024

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self._thread: threading.Thread | None = None
        ctypes.memset(self._address, 0, training.size)

    def save(self, step: int) -> None:
        """Begin."""
        self.wait()
        self._thread = threading.Thread(target=self._copy)
        self._thread.start()

    def _copy(self) -> None:
        at = 0
        for one in self.training.model.parameters():
            state = self.training.optimizer.state[one]
            for tensor in (one.detach(), state["exp_avg"], state["exp_avg_sq"]):
                size = tensor.numel() * tensor.element_size()
                for begin in range(0, size, self.PIECE):
                    piece = min(self.PIECE, size - begin)
                    ctypes.memmove(self._address + at + begin, tensor.data_ptr() + begin, piece)
                at += size

    def wait(self) -> None:
        """Until it is there."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class TorchSave(Engine):
    """``torch.save`` to a file, as most do it."""

    def save(self, step: int) -> None:
        """Write."""
        torch.save(self.training.state(), self.folder / "state.pt")


class Dcp(Engine):
    """``torch.distributed.checkpoint.async_save``."""

    kind = "THREAD"

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        import torch.distributed as dist

        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", store=dist.TCPStore("127.0.0.1", 0, 1, is_master=True), rank=0, world_size=1
            )
        self._pending: Any = None
        self._stager: Any = None

    def save(self, step: int) -> None:
        """Stage, and leave the rest to the background. The one before must be there."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.wait()
        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        found = dcp.async_save(
            self.training.state(),
            checkpoint_id=str(self.folder / "dcp"),
            async_checkpointer_type=AsyncCheckpointerType[self.kind],
            async_stager=self._stager,
        )
        self._pending = getattr(found, "upload_completion", found)

    def wait(self) -> None:
        """Until it is written."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """The group too."""
        import torch.distributed as dist

        self.wait()
        dist.destroy_process_group()


class DcpThread(Dcp):
    """With its thread, into the CPU copy that its stager keeps from save to save."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)


class DcpProcess(Dcp):
    """With its process, through shared memory that its stager keeps from save to save."""

    kind = "PROCESS"

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)


class DLRover(Engine):
    """dlrover 0.6.1's engine, into memory; outside of its agent it starts the saver's process by itself."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        self._to = StorageType.MEMORY
        self._engine = DdpCheckpointer(str(folder / "dlrover"))

    def save(self, step: int) -> None:
        """The call blocks until it is in shared memory."""
        self._engine.save_checkpoint(
            step, self.training.state(), str(self.folder / f"{step}.pt"), storage_type=self._to
        )

    def close(self) -> None:
        """Its process goes with ours."""
        saver = self._engine._engine.saver_proc
        self._engine._engine.close()
        if saver is not None:
            saver.kill()


class Ours(Engine):
    """`FlashCheckpoint` under our agent, through its public calls; in memory only."""

    options: dict[str, Any] = {}  # noqa: RUF012  # read only

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        from dlrover_adapters.torch import FlashCheckpoint

        # Never due by itself: `save` is by hand, so that all engines save at the same steps.
        self.checkpoint = FlashCheckpoint(
            "", model=training.model, optimizer=training.optimizer, every=1_000_000, **self.options
        )
        self.checkpoint.restore()

    def save(self, step: int) -> None:
        """Begin; the hook of the optimizer waits for what is left."""
        self.checkpoint.save(step, to_storage=False)

    def tick(self, step: int) -> None:
        """What users call after each step."""
        self.checkpoint.step(step)

    def ready(self) -> bool:
        """All pages of its memory are; until then it leaves saves out by itself."""
        return self.checkpoint.stats.populated

    def close(self) -> None:
        """What is in flight lands."""
        self.checkpoint.close()

    def details(self) -> dict[str, Any]:
        """Its own account of the newest save."""
        stats = self.checkpoint.stats
        return {name: getattr(stats, name) for name in stats.__dataclass_fields__}


class OursBlocking(Ours):
    """The same, while training stands."""

    options: dict[str, Any] = {"mode": "blocking"}  # noqa: RUF012  # read only


ENGINES: dict[str, type[Engine]] = {
    "none": Nothing, "memcpy": Memcpy, "beside": Beside, "torch_save": TorchSave, "dcp_thread": DcpThread,
    "dcp_process": DcpProcess, "dlrover": DLRover, "ours": Ours, "ours_blocking": OursBlocking,
}  # fmt: skip


def stalls_of(optimizer: torch.optim.Optimizer, spent: list[float]) -> None:
    """Have all that hooks take before a step counted in ``spent``: ours runs first and last."""
    began = [0.0]
    first = optimizer.register_step_pre_hook(lambda *_: began.__setitem__(0, time.perf_counter()))
    optimizer._optimizer_step_pre_hooks.move_to_end(first.id, last=False)
    optimizer.register_step_pre_hook(lambda *_: spent.__setitem__(0, spent[0] + time.perf_counter() - began[0]))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """First save, warm saves, and steps with and without."""
    torch.set_num_threads(options.threads)
    training = Training(options.mib, options.step_s)
    training.calibrate()
    made = time.perf_counter()
    engine = ENGINES[options.engine](training, options.folder)
    spent = [0.0]
    for _ in range(WARM):
        training.step()
    stalls_of(training.optimizer, spent)
    found: dict[str, Any] = {"size": training.size, "saves": [], "step_s": []}
    step = WARM
    began = time.perf_counter()
    while not engine.ready():
        training.step()
        step += 1
        engine.tick(step)
        if time.perf_counter() - began > LIMIT_S:
            raise SystemExit(f"no memory after {LIMIT_S:g} s")
    found["ready_s"] = time.perf_counter() - made

    def window(saving: bool) -> tuple[float, float, int, float]:
        nonlocal step
        stall, spent[0], missed, began, worked = 0.0, 0.0, 0, time.perf_counter(), time.process_time()
        for at in range(options.window):
            training.step()
            step += 1
            called, before = time.perf_counter(), faults()
            if saving and at == 0:
                engine.save(step)
            else:
                engine.tick(step)
            stall += time.perf_counter() - called
            missed += faults() - before
        if saving:
            engine.wait()
        return time.perf_counter() - began, stall + spent[0], missed, time.process_time() - worked

    took, stall, missed, _ = window(saving=True)
    plain = window(saving=False)[0]
    found["first"] = {"stall_s": stall, "added_s": took - plain, "faults": missed}
    for number in range(options.trials):
        pair = [window(saving=number % 2 == 1), window(saving=number % 2 == 0)]
        without, saved = pair if number % 2 == 0 else pair[::-1]
        found["step_s"].append(without[0] / options.window)
        found["saves"].append(
            {
                "stall_s": saved[1] - without[1],
                "added_s": saved[0] - without[0],
                "cpu_s": saved[3] - without[3],
                "faults": saved[2],
                "other_faults": without[2],
            }
        )
    found["details"] = engine.details()
    engine.close()
    return found


def persisting(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of steps while a state is written to storage, and of those before, by trials."""
    from dlrover_adapters.torch import FlashCheckpoint

    torch.set_num_threads(options.threads)
    training = Training(options.mib, options.step_s)
    training.calibrate()
    url = options.folder / "stored"
    checkpoint = FlashCheckpoint(
        f"file://{url}", model=training.model, optimizer=training.optimizer, every=1_000_000, store_every=0, keep=1
    )
    checkpoint.restore()
    found: dict[str, Any] = {"size": training.size, "plain_s": [], "writing_s": [], "took_s": []}
    step = 0

    def one(into: list[float] | None) -> None:
        nonlocal step
        began = time.perf_counter()
        training.step()
        step += 1
        checkpoint.step(step)
        if into is not None:
            into.append(time.perf_counter() - began)

    for _ in range(WARM):
        one(None)
    for _ in range(options.trials):
        plain: list[float] = []
        writing: list[float] = []
        for _ in range(options.window):
            one(plain)
        began = time.perf_counter()
        checkpoint.save(step, to_storage=True)
        wanted = url / f"step-{step:010d}" / "manifest.json"
        one(None)  # the copy into memory is beside this one
        while not wanted.exists():
            one(writing)
            if time.perf_counter() - began > LIMIT_S:
                raise SystemExit(f"step {step} is not on storage after {LIMIT_S:g} s")
        found["took_s"].append(time.perf_counter() - began)
        found["plain_s"].append(plain)
        found["writing_s"].append(writing)
    checkpoint.close()
    return found


def whole_run(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of stretches of steps, with a save into memory in every tenth and without any, in turn."""
    from dlrover_adapters.torch import FlashCheckpoint

    torch.set_num_threads(options.threads)
    training = Training(options.mib, options.step_s)
    training.calibrate()
    checkpoint = FlashCheckpoint("", model=training.model, optimizer=training.optimizer, every=10)
    checkpoint.restore()
    found: dict[str, Any] = {"size": training.size, "with_s": [], "without_s": []}
    step = 0
    for number in range(2 * options.trials + 2):
        saving = number % 2 == 0
        began = time.perf_counter()
        for _ in range(options.window * 10):
            training.step()
            step += 1
            if saving:
                checkpoint.step(step)
        if number > 1:
            found["with_s" if saving else "without_s"].append(time.perf_counter() - began)
        if saving:
            checkpoint.wait()
    found["details"] = {"saves": checkpoint.stats.saves, "skipped": checkpoint.stats.skipped}
    checkpoint.close()
    return found


WHAT = {"saving": measure, "persisting": persisting, "whole_run": whole_run}


def main() -> None:
    """Measure, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=sorted(WHAT), default="saving")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="none")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = WHAT[options.what](options)
    if "details" in found:
        found["details"] = {key: one for key, one in found["details"].items() if isinstance(one, (int, float, str))}
    part = options.out.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(options.out)
    sys.stdout.flush()


if __name__ == "__main__":
    main()

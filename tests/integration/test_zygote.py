"""Workers forked from a zygote that has imported torch: entropy, preloads, DataLoaders, stores, steps, errors."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from dlrover_core.runtime.launcher import StoreGone, StoreReady, WorkerExit, WorkerStep

Make = Callable[..., Any]


def run(test: Coroutine[Any, Any, None]) -> None:
    """On a loop of its own, within its bound."""
    asyncio.run(asyncio.wait_for(test, 100))


def test_unseeded_ranks_draw_different_numbers(rig: Make) -> None:
    """Torch, numpy and random differ between ranks and between attempts, as in fresh processes."""
    script = """
    import random, numpy, torch, multiprocessing
    tell(torch.initial_seed(), torch.rand(1).item(), numpy.random.rand(), random.random(),
         multiprocessing.current_process().authkey.hex())
    """

    async def test() -> None:
        async with rig(script, torch=True, nproc=2) as one:
            drawn = []
            for _ in range(2):
                await one.start()
                drawn += list((await one.all_told()).values())
                await one.exits(2)
            for column in zip(*drawn, strict=True):
                assert len(set(column)) == 4

    run(test())


def test_omp_num_threads_acts_as_under_torchrun(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several workers torch itself, not only its environment, computes on one thread."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    async def test() -> None:
        async with rig(
            "import torch; tell(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])", torch=True, nproc=2
        ) as one:
            await one.start()
            assert await one.all_told() == {0: [1, "1"], 1: [1, "1"]}
            await one.exits(2)

    run(test())


def test_imports_are_not_on_the_recovery_path(rig: Make) -> None:
    """What torch pulls in lazily is there before the script begins, and so is what was asked to be preloaded."""
    ours = [f"dlrover_adapters.torch.checkpoint.{name}" for name in ("flash", "restore")]
    names = ["torch", "torch._dynamo", "torch.distributed", *ours, "statistics"]
    script = f"tell(*[name in sys.modules for name in {names}])"

    async def test() -> None:
        async with rig(script, torch=True, preload=("statistics",)) as one:
            await one.run()
            assert await one.told() == [0, *[True] * len(names)]
            assert one.launcher.refused == {}

    run(test())


def test_no_more_than_torch_is_imported_if_so_asked(rig: Make) -> None:
    """``DLROVER_WARM=core`` leaves out what only optimizers and checkpoints need."""
    script = "tell('torch' in sys.modules, 'torch._dynamo' in sys.modules)"

    async def test() -> None:
        async with rig(script, torch=True, env={"DLROVER_WARM": "core"}) as one:
            await one.run()
            assert await one.told() == [0, True, False]

    run(test())


HANGS = """
import os, torch
parent, old = os.getpid(), torch.ones
def ones(*sizes):
    while os.getpid() != parent: pass
    return old(*sizes)
torch.ones = ones
"""

PRELOADS = {
    "multiplies": ("import torch\nones = torch.ones(512, 512)\nones @ ones", "threads"),
    "threads": ("import threading, signal\nthreading.Thread(target=signal.pause, name='poller').start()", "'poller'"),
    "cuda": ("import torch\ntorch.cuda.is_initialized = lambda: True", "CUDA"),
    "bad_fork": ("import torch\ntorch.cuda._is_in_bad_fork = lambda: True", "CUDA"),
    "hangs": (HANGS, "did not finish"),
    "missing": (None, "ModuleNotFoundError"),
    "raises": ("1 / 0", "ZeroDivisionError"),
    "exits": ("import sys\nsys.exit(3)", "SystemExit"),
    "crashes": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "exit code -11"),
}  # fmt: skip


OTHERS = pytest.mark.nightly(reason="preloads that are unfit in other ways stand for it in make test")
LIGHT = ("threads", "missing", "raises", "exits", "crashes")  # that they are refused is not about torch
NIGHTLY = ("multiplies", "cuda", "bad_fork", "missing", "raises", "exits", "crashes")


@pytest.mark.parametrize("name", [pytest.param(one, marks=OTHERS) if one in NIGHTLY else one for one in PRELOADS])
def test_an_unfit_preload_is_refused_by_name(rig: Make, tmp_path: Path, name: str) -> None:
    """A preload after which forked workers could not train is named, with the reason; the others are loaded, all goes on."""
    text, reason = PRELOADS[name]
    if text is not None:
        (tmp_path / f"preload_{name}.py").write_text(text)
    (tmp_path / "good.py").write_text("")
    preload = ("statistics", f"preload_{name}", "good")
    script = f"""
    import torch
    ones = torch.ones(300, 300)
    tell(float((ones @ ones)[0, 0]), "good" in sys.modules, "preload_{name}" in sys.modules)
    """

    async def test() -> None:
        what = {"preload": preload, "probe_s": 2.0, "env": {"OMP_NUM_THREADS": "2"}}
        async with rig(script, torch=True, light=name in LIGHT, **what) as one:
            assert list(one.launcher.refused) == [f"preload_{name}"]
            assert reason in one.launcher.refused[f"preload_{name}"]
            (end,) = await one.run()
            assert end.exit_code == 0
            assert await one.told() == [0, 300.0, True, False]
            assert len(one.stores) == 1, "one keeper, whatever became of the first zygote"

    run(test())


LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self): return 16
    def __getitem__(self, i): return torch.tensor([float(i * i)])

if __name__ == "__main__":
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1])
    tell(sum(batch.sum().item() for batch in loader))
"""


SPAWN = pytest.mark.nightly(reason="forkserver stands for it in make test")


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=SPAWN), "forkserver"])
def test_data_loader_workers(rig: Make, tmp_path: Path, method: str) -> None:
    """DataLoader workers start by every method inside forked workers, with a dataset class of the script's own."""

    async def test() -> None:
        argv = (str(tmp_path / "script.py"), method)
        async with rig(LOADER, torch=True, argv=argv) as one:
            (end,) = await one.run()
            assert (end.exit_code, await one.told()) == (0, [0, float(sum(i * i for i in range(16)))]), end.tail

    run(test())


TRAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(os.environ["STEPS"])):
    optimizer.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optimizer.step()
if os.environ.get("END") == "wait":
    tell("trained")
    forever()
del model  # one that outlives its group may hang in that (torch 2.13, gloo)
dist.destroy_process_group()
"""


def test_generations_train_on_stores_of_their_own(rig: Make) -> None:
    """Killed in the middle, a world trains again on the next store; the exact last step of the dead is known."""

    async def test() -> None:
        async with rig(TRAIN, torch=True, nproc=2, env={"STEPS": "7", "END": "wait"}) as one:
            used: list[str] = []
            for generation in range(1, 4):
                while len(one.stores) < generation:
                    await one.next()
                used.append(one.stores[generation - 1])
                await one.start(store=used[-1])
                assert [(await one.told())[1] for _ in range(2)] == ["trained"] * 2
                os.kill(one.launcher.pids["rank 1"], signal.SIGKILL)
                (first,) = await one.exits(1)
                assert await one.launcher.stop(0, 10)
                (second,) = await one.exits(1)
                assert [(end.rank, end.exit_code, end.asked, end.step) for end in (first, second)] == [
                    (1, -9, False, 7),
                    (0, -9, True, 7),
                ]
            assert len(set(used)) == 3
            steps = [notice for notice in one.notices if isinstance(notice, WorkerStep)]
            assert sorted((step.generation, step.rank) for step in steps if step.first) == [
                (generation, rank) for generation in range(1, 4) for rank in range(2)
            ]
            assert all(step.step == 1 for step in steps if step.first)

    run(test())


def test_steps_are_counted_or_told(rig: Make) -> None:
    """Steps are optimizer calls counted from one, unless the script tells its own numbers."""
    script = TRAIN + "from dlrover_adapters.torch import step\nif RANK == 1:\n    step(1000); optimizer.step()\n"

    async def test() -> None:
        async with rig(script, torch=True, nproc=2, env={"STEPS": "3"}) as one:
            await one.until(lambda notice: isinstance(notice, StoreReady))
            ends = await one.run(store=one.stores[0], resume_step=60)
            assert [end.step for end in ends] == [3, 1000]
            steps = [notice for notice in one.notices if isinstance(notice, WorkerStep)]
            assert [(step.step, step.told) for step in steps if step.first] == [(1, False)] * 2

    run(test())


def test_the_keeper_may_die(rig: Make) -> None:
    """A killed keeper is replaced and a new store offered; a world that has formed trains on without the old one. So is one that

    is stopped, after ``hung_s``: its stores answer nobody.
    """

    async def test() -> None:
        async with rig(TRAIN, torch=True, nproc=2, env={"STEPS": "5", "END": "wait"}, hung_s=1.0) as one:
            await one.until(lambda notice: isinstance(notice, StoreReady))
            await one.start(store=one.stores[0])
            await one.all_told()
            await one.until(lambda notice: isinstance(notice, StoreReady))
            os.kill(one.launcher.pids["keeper"], signal.SIGKILL)
            gone = await one.until(lambda notice: isinstance(notice, StoreGone))
            assert gone == StoreGone(one.stores[1]), "the unused one must not be named any more"
            await one.until(lambda notice: isinstance(notice, StoreReady))
            assert not [notice for notice in one.notices if isinstance(notice, WorkerExit)]
            assert await one.launcher.stop(0, 10)
            await one.exits(2)
            await one.start(store=one.stores[-1])
            await one.all_told()
            await one.until(lambda notice: isinstance(notice, StoreReady))
            os.kill(one.launcher.pids["keeper"], signal.SIGSTOP)
            gone = await one.until(lambda notice: isinstance(notice, StoreGone))
            assert gone == StoreGone(one.stores[-1])
            await one.until(lambda notice: isinstance(notice, StoreReady))

    run(test())


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_world_whose_store_died_ends_at_once(rig: Make, when: str) -> None:
    """Workers never wait for a store that is no more, whether it died before they started or while they form their world."""
    script = TRAIN if when == "before" else "tell(); forever()"

    async def test() -> None:
        async with rig(script, torch=True, light=when == "while", nproc=2, env={"STEPS": "5"}) as one:
            await one.until(lambda notice: isinstance(notice, StoreReady))
            if when == "before":
                os.kill(one.launcher.pids["keeper"], signal.SIGKILL)
                await one.until(lambda notice: isinstance(notice, StoreGone))
            await one.start(store=one.stores[0])
            if when == "while":
                await one.all_told()
                os.kill(one.launcher.pids["keeper"], signal.SIGKILL)
            for end in await one.exits(2):
                assert (end.exit_code, end.asked) == (-9, False)
                assert "died before the world had formed" in end.error

    run(test())


def test_a_store_named_by_a_world_that_never_starts(rig: Make) -> None:
    """A store is offered once; when a superseded world has spent it, the next is offered."""

    async def test() -> None:
        async with rig("", light=True) as one:
            await one.until(lambda notice: isinstance(notice, StoreReady))
            one.launcher.spend_store(one.stores[0])
            one.launcher.spend_store(one.stores[0])
            await one.until(lambda notice: isinstance(notice, StoreReady))
            assert len(set(one.stores)) == 2

    run(test())


@pytest.mark.parametrize(
    ("preload", "recorded"),
    [
        pytest.param((), True, id="forked, with @record"),
        pytest.param((), False, id="forked, without"),
        pytest.param(None, False, id="executed, without"),
        pytest.param(
            None,
            True,
            id="executed, with @record",
            marks=pytest.mark.nightly(
                reason="torch's decorator in forked ones, and ours in executed ones, stand for it"
            ),
        ),
    ],
)
def test_the_root_cause_is_known(rig: Make, recorded: bool, preload: tuple[str, ...] | None) -> None:
    """An exception that nobody caught is in the exit, with or without torch's decorator, and printed as if run afresh."""
    script = """
    def main():
        raise ValueError(f"bad batch on {RANK}")
    if sys.argv[1:]:
        from torch.distributed.elastic.multiprocessing.errors import record
        main = record(main)
    if __name__ == "__main__":
        main()
    """

    async def test() -> None:
        async with rig(script, torch=True, light=not recorded, preload=preload) as one:
            one.launcher._config = one.launcher._config._replace(
                argv=(*one.launcher._config.argv, *(["x"] if recorded else []))
            )
            (end,) = await one.run()
            assert (end.exit_code, end.error) == (1, "ValueError: bad batch on 0")
            assert 0 <= end.died_us - end.error_at_us < 5_000_000
            assert end.tail.startswith("Traceback (most recent call last):\n")
            assert "dlrover_adapters/agent" not in end.tail
            assert end.tail.rstrip().endswith("ValueError: bad batch on 0")

    run(test())


def test_compiled_optimizers_are_left_alone(rig: Make) -> None:
    """A compiled optimizer computes what it did without our hook, and its steps are counted or not, never miscounted."""
    script = """
    import torch
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    @torch.compile(backend="eager")
    def step():
        optimizer.step()
    weight.grad = torch.ones(4)
    for _ in range(3): step()
    tell(weight.sum().item())
    """

    async def test() -> None:
        async with rig(textwrap.dedent(script), torch=True) as one:
            (end,) = await one.run()
            assert end.exit_code == 0, end.tail
            assert (await one.told())[1] == pytest.approx(2.8)
            assert end.step in {-1, 3}

    run(test())


def test_forked_children_do_not_ring(rig: Make) -> None:
    """Optimizer steps in a forked child of a worker are not the worker's steps."""
    script = """
    import torch
    def train(n):
        weight = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.grad = torch.ones(4)
        for _ in range(n): optimizer.step()
    train(2)
    pid = os.fork()
    if pid == 0:
        train(50)
        os._exit(0)
    os.waitpid(pid, 0)
    """

    async def test() -> None:
        async with rig(script, torch=True) as one:
            (end,) = await one.run()
            assert (end.exit_code, end.step) == (0, 2), end.tail

    run(test())

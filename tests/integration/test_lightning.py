"""Lightning's own Trainer with our checkpoint plug-in, installed as it is."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from running import SCRIPTS, Job

BOUND_S = 90.0
# Third parties': Lightning and torch warn of each other's deprecations, of missing loggers and of the number of loader workers.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.xdist_group("lightning"),  # what they import is imported by one process
]


@pytest.fixture(scope="module")
def small() -> ModuleType:
    """What is trained here. It takes seconds to import, so that it is done once a test is run, not when all are collected."""
    pytest.importorskip("lightning")
    import small_lightning

    return small_lightning


def same(one: Any, other: Any) -> bool:
    """Deep equality, tensors bit for bit."""
    import torch

    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def test_files_are_lightnings_own(small: ModuleType, tmp_path: Path) -> None:
    """A fit with our plug-in leaves the files that one without leaves: same paths, same content; they load without us."""
    fitted = []
    for name, plugin in (("ours", small.FlashCheckpointIO()), ("theirs", None)):
        model = small.Small()
        small.trainer(tmp_path / name, plugin, 12).fit(model, small.data())
        fitted.append(model.losses)
    assert fitted[0] == fitted[1]
    names = sorted(one.name for one in (tmp_path / "theirs").glob("*.ckpt"))
    assert len(names) == 4
    assert sorted(one.name for one in (tmp_path / "ours").iterdir()) == names
    for name in names:
        ours, theirs = (small.torch.load(tmp_path / one / name, weights_only=False) for one in ("ours", "theirs"))
        for one in (ours, theirs):
            one.pop("callbacks")  # paths and times
        assert same(ours, theirs), name
        assert type(ours["state_dict"]) is type(theirs["state_dict"])


def test_a_fit_goes_on_where_it_was_saved(small: ModuleType, tmp_path: Path) -> None:
    """Resumed by our plug-in from our file, and by Lightning alone, training makes the undisturbed run's losses, bit for bit."""
    whole = small.Small()
    small.trainer(tmp_path / "whole", None, 16).fit(whole, small.data())
    small.trainer(tmp_path / "cut", small.FlashCheckpointIO(), 8).fit(small.Small(), small.data())
    for plugin in (small.FlashCheckpointIO(), None):
        resumed = small.Small()
        small.trainer(tmp_path / f"more{plugin is None}", plugin, 16).fit(
            resumed, small.data(), ckpt_path=str(next((tmp_path / "cut").glob("*step=8.ckpt"))), weights_only=False
        )
        assert resumed.losses == whole.losses[8:]


def test_more_saves_than_slots_are_all_written(small: ModuleType, tmp_path: Path) -> None:
    """Saving faster than files are written waits for a slot; every file is there and whole in the end, and removal removes."""
    plugin = small.FlashCheckpointIO()
    for number in range(8):
        plugin.save_checkpoint(
            {
                "global_step": number,
                "state_dict": {"w": small.torch.full((1000, 100), number)},
                "note": [number, (number, "x")],
            },
            tmp_path / f"{number}.ckpt",
        )
    plugin.remove_checkpoint(tmp_path / "7.ckpt")
    plugin.teardown()
    for number in range(7):
        found = small.torch.load(tmp_path / f"{number}.ckpt", weights_only=True)
        assert found["state_dict"]["w"].eq(number).all()
        assert found["note"] == [number, (number, "x")]
    assert not (tmp_path / "7.ckpt").exists()


def test_a_file_that_cannot_be_written_is_told(small: ModuleType, tmp_path: Path) -> None:
    """An error of the storage is raised at the next save or at the end, and not swallowed."""
    plugin = small.FlashCheckpointIO()
    (tmp_path / "file").write_text("no folder")
    plugin.save_checkpoint({"global_step": 1, "state_dict": {"w": small.torch.ones(3)}}, tmp_path / "file" / "1.ckpt")
    with pytest.raises(OSError, match=r"1\.ckpt"):
        plugin.teardown()


def test_without_an_agent_memory_holds_nothing(small: ModuleType) -> None:
    """Outside of a job of ours there is nothing to go on from but files."""
    plugin = small.FlashCheckpointIO()
    assert plugin.newest() is None
    plugin.teardown()


KILLED = """
import os, pathlib, signal, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import torch
from lightning.pytorch import Callback
from small_lightning import Small, data, trainer
from dlrover_adapters.torch.lightning import FlashCheckpointIO

class Dies(Callback):
    def on_train_batch_start(self, fitting, module, batch, number):
        if fitting.global_step == 8 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            for one in pathlib.Path("ckpts").glob("*.ckpt"):
                one.unlink()  # as if storage had not been as fast
            os.kill(os.getpid(), signal.SIGKILL)

plugin, model = FlashCheckpointIO(), Small()
newest = plugin.newest()
fitting = trainer(pathlib.Path("ckpts"), plugin, 16)
fitting.callbacks.append(Dies())
fitting.fit(model, data(), ckpt_path=newest, weights_only=False)
print(newest and pathlib.Path(newest).name, *(one.hex() for one in model.losses), flush=True)
"""


@pytest.mark.nightly(
    reason="a fit that goes on where it was saved, and test_flash_ddp.py, whose rank is killed, stand for it in make test"
)
def test_a_killed_worker_goes_on_from_memory(small: ModuleType, tmp_path: Path) -> None:
    """A worker is killed and no file is there: its successor goes on from the agent's memory, with the undisturbed losses."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with Job(tmp_path, "--nproc-per-node", "1", str(script), str(SCRIPTS), job="lightning") as job:
        assert job.ended(BOUND_S) == 0, job.said()
        said = job.out.read_text().split()
        assert job.left() == []
    whole = small.Small()
    small.trainer(tmp_path / "whole", None, 16).fit(whole, small.data())
    found = next(number for number, one in enumerate(said) if one in {"epoch=0-step=8.ckpt", "last.ckpt"})
    assert said[found + 1 :] == [one.hex() for one in whole.losses[8:]]


# An ElasticDataset.


def elastic(small: ModuleType, folder: Path, steps: int, *, newest: str | None = None, **more: Any) -> tuple[Any, Any]:
    """Five steps an epoch, each of four micro-batches of two, saved every three; the model, and the data."""
    from dlrover_adapters.torch import ElasticDataset
    from dlrover_adapters.torch.data.loader import ElasticLoader

    torch = small.torch

    class Writing(small.Small):  # type: ignore[name-defined,misc]
        entered: dict[int, list[int]]

        def training_step(self, batch: Any, index: int) -> Any:
            self.entered.setdefault(self.trainer.global_step + 1, []).extend(batch[2].tolist())
            return super().training_step(batch, index)

    def sample(number: int) -> Any:
        return torch.linspace(0, 1, 8) * number / 40, torch.tensor([number / 40]), number

    data = ElasticDataset(
        "train", size=40, fetch=sample, epochs=3, seed=3, **{"global_batch": 8, "micro_batch": 2} | more
    )
    model = Writing()
    model.entered = {}
    fitting = small.trainer(folder, small.FlashCheckpointIO(), steps, every=3, callbacks=[small.FlashData(data)])
    plain = torch.utils.data.DataLoader(data, batch_size=None)  # of unknown length: Lightning draws one batch ahead
    loader = plain if more.get("ahead") else ElasticLoader(data, num_workers=1, multiprocessing_context="fork")
    fitting.fit(model, loader, ckpt_path=newest, weights_only=False if newest else None)
    return model, data


@pytest.mark.parametrize("ahead", [False, True])
def test_each_sample_enters_one_step_though_the_fetcher_draws_ahead(
    small: ModuleType, tmp_path: Path, ahead: bool
) -> None:
    """A fit that ended within the second epoch goes on: each step has the next samples of the order, and the losses are those

    of an undisturbed fit. What was trained after the last save is trained again, as the model has it not.
    """
    from dlrover_core.data.permutation import Order

    more = {"ahead": 2} if ahead else {}
    every = [one for epoch in range(3) for one in Order(40, 3, epoch).indices(0, 40)]
    wanted = {step + 1: every[8 * step : 8 * step + 8] for step in range(12)}
    whole, _ = elastic(small, tmp_path / "a", 12, **more)
    first, data = elastic(small, tmp_path / "b", 7, **more)
    assert data.place[1:3] == (1, 16)
    (newest,) = (tmp_path / "b").glob("*step=6.ckpt")
    second, again = elastic(small, tmp_path / "b", 12, newest=str(newest), **more)
    assert (again.place[1:3], sorted(second.entered)) == ((2, 16), list(range(7, 13)))
    assert first.entered | second.entered == whole.entered == wanted
    assert first.losses[: 6 * 4] + second.losses == whole.losses


KILLED_IN_A_STEP = """
import os, pathlib, signal, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import torch
from small_lightning import FlashCheckpointIO, FlashData, Small, trainer
from dlrover_adapters.torch import ElasticDataset, ElasticLoader

life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
made = open(f"entered-{life}", "w", buffering=1)

class Writing(Small):
    def training_step(self, batch, index):
        made.write(f"{self.trainer.global_step + 1} {' '.join(map(str, batch[2].tolist()))}\\n")
        if not life and self.trainer.global_step == 7 and index % 4 == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, index)

def sample(number):
    return torch.linspace(0, 1, 8) * number / 40, torch.tensor([number / 40]), number

plugin = FlashCheckpointIO()
data = ElasticDataset("train", size=40, fetch=sample, epochs=3, seed=3, global_batch=8, micro_batch=2)
fitting = trainer(pathlib.Path("ckpts"), plugin, 12, every=3, callbacks=[FlashData(data)])
loader = ElasticLoader(data, num_workers=1, multiprocessing_context="fork")
fitting.fit(Writing(), loader, ckpt_path=plugin.newest(), weights_only=False)
"""


@pytest.mark.nightly(
    reason="a killed worker that goes on from memory, and slots of one step in test_shelf.py, stand for it"
)
def test_each_sample_enters_one_step_though_a_worker_is_killed(small: ModuleType, tmp_path: Path) -> None:
    """By SIGKILL in mid-step: its successor goes on with the sample that follows the newest save, whatever was drawn ahead."""
    from dlrover_core.data.permutation import Order

    assert small
    script = tmp_path / "killed.py"
    script.write_text(KILLED_IN_A_STEP)
    with Job(tmp_path, "--nproc-per-node", "1", str(script), str(SCRIPTS), job="lightning") as job:
        assert job.ended(BOUND_S) == 0, job.said()
    lives: list[dict[int, list[int]]] = [{}, {}]
    for life, made in enumerate(lives):
        for line in (tmp_path / f"entered-{life}").read_text().splitlines():
            step, *samples = map(int, line.split())
            made.setdefault(step, []).extend(samples)
    every = [one for epoch in range(3) for one in Order(40, 3, epoch).indices(0, 40)]
    first, second = lives
    assert (max(first), sorted(second)) == (8, list(range(7, 13)))
    assert {**first, **second} == {step + 1: every[8 * step : 8 * step + 8] for step in range(12)}


def test_counting_says_what_is_not_right(small: ModuleType, tmp_path: Path) -> None:
    """Steps that are none of the dataset's, and checkpoints without a position."""
    from dlrover_adapters.torch import ElasticDataset
    from dlrover_core.errors import CoreError, SpecError

    data = ElasticDataset("train", size=40, fetch=float, global_batch=8, micro_batch=2)
    counts = small.FlashData(data)
    fitting = small.trainer(tmp_path, None, 4, every=3, callbacks=[counts])
    counts.on_fit_start(fitting, None)
    counts.on_train_start(fitting, None)
    assert fitting.accumulate_grad_batches == 4
    for _ in range(3):
        counts.on_train_batch_end(fitting, None, None, None, 0)
    with pytest.raises(
        CoreError, match="4 batches entered no step of Lightning's, and a global batch of dataset 'train' has 4"
    ):
        counts.on_train_batch_end(fitting, None, None, None, 0)
    with pytest.raises(SpecError, match=r"the checkpoint has no position of dataset 'train'.*data\.begin"):
        counts.on_load_checkpoint(fitting, None, {"callbacks": {}})
    with pytest.raises(SpecError, match="global_batch: None of dataset 'more': give"):
        small.FlashData(ElasticDataset("more", size=40, fetch=float))


def test_a_step_that_lightnings_scaler_skips_is_consumed(
    small: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told by the scale, which falls; the samples count."""
    from dlrover_adapters.torch import ElasticDataset

    class Scaler:
        scale = 8.0

        def get_scale(self) -> float:
            return self.scale

    class Fitting:
        global_step = 0

        class precision_plugin:  # noqa: N801  # their name
            scaler = Scaler()

    data = ElasticDataset("train", size=40, fetch=float, global_batch=8)
    counts, fitting = small.FlashData(data), Fitting()
    counts.on_train_start(fitting, None)
    for scale in (8.0, 4.0, 4.0):
        Fitting.precision_plugin.scaler.scale = scale
        fitting.global_step += 1
        counts.on_train_batch_end(fitting, None, None, None, 0)
    assert (data.place.position, counts.skipped) == (24, 1)
    assert "positions [8, 16) of epoch 0 of dataset 'train' count as consumed" in caplog.text

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

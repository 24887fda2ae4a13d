"""A small model, its data and a Trainer, for the tests of Lightning's plug-in and for their workers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Lightning imports is not ours to mend
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from dlrover_adapters.torch.lightning import FlashCheckpointIO, FlashData

__all__ = ["FlashCheckpointIO", "FlashData", "Small", "data", "trainer"]
torch.set_num_threads(1)  # threads that spin are of no use to a model as small as this


class Small(LightningModule):
    """Two layers with batch norm and dropout, so that buffers and random numbers count; it remembers its losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        """The loss."""
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        """Adam and a scheduler, which have states of their own."""
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def data() -> DataLoader[Any]:
    """Eight batches, always in the same order."""
    drawn = torch.Generator().manual_seed(1)
    return DataLoader(
        TensorDataset(torch.randn(64, 8, generator=drawn), torch.randn(64, 1, generator=drawn)), batch_size=8
    )


def trainer(folder: Path, plugin: Any, steps: int, every: int = 4, callbacks: Sequence[Any] = ()) -> Trainer:
    """Saves every four steps, keeps all."""
    saves = ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1, save_last=True)
    return Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        callbacks=[*callbacks, saves],
        plugins=[plugin] if plugin is not None else None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )

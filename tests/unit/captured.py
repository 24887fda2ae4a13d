"""Small models that were trained a step, for the capture of their state."""

from __future__ import annotations

import torch
from torch import nn

from dlrover_adapters.torch.checkpoint.capture import Capture
from dlrover_adapters.torch.checkpoint.chunks import Chunk


def trained(*layers: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose optimizer has a state."""
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def by_name(capture: Capture) -> dict[str, Chunk]:
    """Its chunks."""
    return {one.name: one for one in capture.chunks()}

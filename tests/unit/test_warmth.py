"""What the zygote imports ahead for torch's workers."""

from __future__ import annotations

import sys

import pytest

from dlrover_adapters.torch import worker


def test_an_unknown_warmth_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error is told, and not taken for the default."""
    monkeypatch.setenv(worker.WARM, "Core")
    with pytest.raises(ValueError, match="DLROVER_WARM is 'all' or 'core', got 'Core'"):
        worker.import_rest()


def test_jobs_are_forked_where_checkpoints_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that only `FlashCheckpoint` needs is missing: the rest is imported, and nobody else hears of it."""
    monkeypatch.setitem(sys.modules, "dlrover_adapters.torch.checkpoint.flash", None)
    worker.import_rest()
    assert "torch._dynamo" in sys.modules

"""What the zygote imports ahead for torch's workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dlrover_adapters.cli import run
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


def test_the_launcher_refuses_it_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where nothing is warm yet nobody would hear it from the zygote."""
    monkeypatch.setenv(worker.WARM, "cold")
    (tmp_path / "x.py").touch()
    assert run.main(["--state-dir", str(tmp_path / "s"), str(tmp_path / "x.py")]) == 2
    assert "DLROVER_WARM: is 'all' or 'core', got 'cold'" in capsys.readouterr().err
    assert not (tmp_path / "s" / "jobs").exists()

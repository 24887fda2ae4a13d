"""What the zygote imports ahead for torch's workers."""

from __future__ import annotations

import sys
import types
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


def test_modules_that_asked_for_the_rank_before_the_fork_are_told_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's and torchmetrics' ``rank_zero_only``, where they are imported and have asked: each by its own variable."""
    only = {name: types.SimpleNamespace(rank=0) for name in worker.RANK_READERS}
    for name, function in only.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(rank_zero_only=function))  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    worker.reseed()
    assert {name: function.rank for name, function in only.items()} == {
        "lightning_utilities.core.rank_zero": 5,
        "torchmetrics.utilities.prints": 1,
    }
    assert set(only) <= worker.excused()


@pytest.mark.parametrize("missing", ["module", "function", "attribute", "variable"])
def test_modules_that_have_not_asked_are_left_alone(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Another version of the library, one that is not imported, a worker without a rank."""
    name, variable = "lightning_utilities.core.rank_zero", "RANK"
    only = types.SimpleNamespace(**({} if missing == "attribute" else {"rank": 0}))
    module = types.SimpleNamespace(**({} if missing == "function" else {"rank_zero_only": only}))
    monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    if missing == "module":
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv(variable, "5")
    if missing == "variable":
        monkeypatch.delenv(variable)
    worker.reseed()
    assert getattr(only, "rank", 0) == 0

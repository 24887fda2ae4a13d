"""What FlashCheckpoint writes is read without us: torch's own calls, and our exports, on checkpoints that a training left."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flashing import Training, same
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dlrover_adapters.cli.main import main
from dlrover_adapters.torch.checkpoint.flash import FlashCheckpoint
from dlrover_adapters.torch.checkpoint.sources import LARGE_BYTES

pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),  # torch's, in one process
]
Run = tuple[str, Path, dict[str, Any]]


class Sampler:
    """A position, and tensors large enough to lie beside it, one of them in a list."""

    def __init__(self) -> None:
        many = LARGE_BYTES // 4
        self.state = {"seen": 7, "weights": torch.rand(many), "rows": [torch.rand(2), torch.rand(many)]}

    def state_dict(self) -> dict[str, Any]:
        """As it is."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As it was."""
        self.state = state


def everything() -> dict[str, Any]:
    """Buffers, tied weights, a scheduler, an average, a sampler, a state of the script's own."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 1))
    model[3].weight = model[0].weight
    averaged = AveragedModel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {"epoch": 2, "sums": {"loss": torch.zeros(3)}, "last": [torch.zeros(2), torch.ones(1)]}

    def step(batch: torch.Tensor, _number: int) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        scheduler.step()
        averaged.update_parameters(model)
        state["sums"]["loss"] += 1

    return {
        "model": {"net": model, "averaged": averaged},
        "optimizer": optimizer,
        "scheduler": scheduler,
        "extra": Sampler(),
        "state": state,
        "step": step,
    }


def one_model() -> dict[str, Any]:
    """As most scripts have it."""
    parts = everything()
    parts["model"] = parts["model"]["net"]
    return parts


def trained(build: Callable[[], dict[str, Any]], folder: Path, format_: str) -> Run:
    """The URL, the newest step's folder, and what was saved there."""
    run = Training(build)
    with FlashCheckpoint(f"file://{folder}", **run.parts, every=2, store_every=4, format=format_) as ckpt:
        assert ckpt.restore() == 0
        for _ in run.train(1, 4, ckpt.step):
            pass
    return f"file://{folder}", folder / "step-0000000004", run.parts


def check(found: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """A nested state has what the parts have, where their names say."""
    models = parts["model"] if isinstance(parts["model"], dict) else {"": parts["model"]}
    for key, model in models.items():
        assert same(found["model"][key] if key else found["model"], dict(model.state_dict()))
    optimizer = parts["optimizer"]
    prefix = "net." if isinstance(parts["model"], dict) else ""
    names = {one: f"{prefix}{name}" for name, one in models["net" if prefix else ""].named_parameters()}
    states = {names[one]: dict(state) for one, state in optimizer.state.items()}
    assert states
    assert same(found["optimizer"]["state"], states)
    assert found["optimizer"]["param_groups"][0]["params"] == [
        names[one] for one in optimizer.param_groups[0]["params"]
    ]
    sampler = parts["extra"].state
    assert same(found["extra"]["weights"], sampler["weights"])
    assert same(found["extra"]["rows"]["1"], sampler["rows"][1])
    assert found["extra"]["__objects__"]["seen"] == 7
    assert same(found["state"], parts["state"])


@pytest.fixture(params=[one_model, everything], ids=lambda build: build.__name__)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """An ordinary training, saved as by default."""
    return trained(request.param, tmp_path / "run", "dcp")


def test_exported_to_one_file(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`dlrover ckpt verify` finds it whole; `export` makes of it the nested state, for torch.load(weights_only=True)."""
    url, _, parts = run
    assert main(["ckpt", "verify", url]) == 0
    assert "step 4: fine" in capsys.readouterr().out
    assert main(["ckpt", "export", url, str(tmp_path / "all.pt"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    check(found, parts)
    assert told["tensors"] > 10
    assert main(["ckpt", "export", url, str(tmp_path / "model.pt"), "--only", "model"]) == 0
    assert same(torch.load(tmp_path / "model.pt", weights_only=True), found["model"])


def test_exported_to_safetensors(run: Run, tmp_path: Path) -> None:
    """`--only model` gives a file whose names are those of the model, so that it loads there; strictly."""
    safetensors = pytest.importorskip("safetensors.torch")
    url, _, parts = run
    below = "model.net" if isinstance(parts["model"], dict) else "model"
    target = tmp_path / "model.safetensors"
    assert main(["ckpt", "export", url, str(target), "--only", below]) == 0
    model = parts["model"]["net"] if isinstance(parts["model"], dict) else parts["model"]
    found = safetensors.load_file(target)
    assert same(found, dict(model.state_dict()))
    model.load_state_dict(found)


def test_exported_as_torchs_own_and_read_there(run: Run, tmp_path: Path) -> None:
    """What is exported without our manifests is the same nested state to torch."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    url, _, parts = run
    assert main(["ckpt", "export", url, str(tmp_path / "theirs"), "--format", "dcp"]) == 0
    dcp_to_torch_save(tmp_path / "theirs", tmp_path / "theirs.pt")
    check(torch.load(tmp_path / "theirs.pt", weights_only=False), parts)


def test_torchs_own_conversion(run: Run, tmp_path: Path) -> None:
    """`dcp_to_torch_save` on the folder gives the nested state."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    _, folder, parts = run
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    check(torch.load(tmp_path / "whole.pt", weights_only=False), parts)


def test_torchs_own_load_into_nested_dicts(run: Run) -> None:
    """`dcp.load` of the folder fills the states that torch's own functions make of a model and an optimizer."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict

    _, folder, parts = run
    if isinstance(parts["model"], dict):
        state = {"model": {key: dict(one.state_dict()) for key, one in everything()["model"].items()}}
        dcp.load(state, checkpoint_id=str(folder), no_dist=True)
        assert same(state["model"], {key: dict(one.state_dict()) for key, one in parts["model"].items()})
        return
    other = one_model()
    model, optimizer = other["model"], other["optimizer"]
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert same(model.state_dict(), parts["model"].state_dict())
    ours, theirs = optimizer.state_dict(), parts["optimizer"].state_dict()
    assert same(ours["state"], theirs["state"])
    for one, wanted in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert {key: one[key] for key in wanted if key != "params"} == {
            key: wanted[key] for key in wanted if key != "params"
        }


@pytest.mark.parametrize("build", [one_model, everything], ids=lambda build: build.__name__)
def test_one_file_of_torch(build: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    """With format="torch" the file is the nested state; its model loads where it came from, and the command verifies it."""
    url, folder, parts = trained(build, tmp_path / "run", "torch")
    found = torch.load(folder / "checkpoint.pt", weights_only=True)
    check(found, parts)
    if not isinstance(parts["model"], dict):
        parts["model"].load_state_dict(found["model"])
    assert main(["ckpt", "verify", url]) == 0
    assert main(["ckpt", "export", url, str(tmp_path / "again.pt")]) == 0
    assert same(torch.load(tmp_path / "again.pt", weights_only=True)["model"], found["model"])


def test_no_path_leads_through_anothers_end() -> None:
    """A state that is one large tensor itself is a place of its own beside what is no tensor; lists have no gaps."""
    from dlrover_adapters.torch.checkpoint.layout import _apart

    paths = {"extra": ("extra",), "extra.__objects__": ("extra", "__objects__"), "model.w": ("model", "w")}
    assert _apart(paths) == {**paths, "extra": ("extra", "__itself__")}
    listed = {"s.0.a": ("s", 0, "a"), "s.1": ("s", 1), "t.1": ("t", 1)}
    assert _apart(listed) == {**listed, "t.1": ("t", "1")}

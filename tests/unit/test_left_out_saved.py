"""A script's own checkpoint says which samples were left out: a later run, which no agent tells, leaves them out, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from tests.unit.test_stream_left import Two  # noqa: E402
from torch.distributed.checkpoint import DefaultLoadPlanner  # noqa: E402

from dlrover_adapters.torch import ElasticDataset, ElasticStream  # noqa: E402
from dlrover_core.data.poison import VARIABLE, Spot, told  # noqa: E402
from dlrover_core.errors import SpecError  # noqa: E402


def dataset() -> ElasticDataset:
    """Eight samples an epoch, in the order of the file; two epochs."""
    return ElasticDataset(
        "toy", size=8, fetch=torch.tensor, epochs=2, order="file", global_batch=4, micro_batch=4, last="drop"
    )


def stream() -> ElasticStream:
    """Two partitions of ten messages: 0 to 9, and 100 to 109."""
    return ElasticStream(Two(), name="toy", global_batch=4)


def by_hand(state: dict[str, Any], into: ElasticDataset, tmp_path: Path) -> dict[str, Any]:
    """As JSON, which has text alone for keys."""
    found: dict[str, Any] = json.loads(json.dumps(state))
    return found


def by_dcp(state: dict[str, Any], into: ElasticDataset, tmp_path: Path) -> dict[str, Any]:
    """torch.distributed.checkpoint fills the entries that the new dataset's own state has, and no others."""
    dcp.save({"data": state}, checkpoint_id=tmp_path / "saved")
    found = {"data": into.state_dict()}
    dcp.load(found, checkpoint_id=tmp_path / "saved")
    return found["data"]


def by_lightning(state: dict[str, Any], into: ElasticDataset, tmp_path: Path) -> dict[str, Any]:
    """The callback saves what the dataset says."""
    pytest.importorskip("lightning.pytorch")
    from dlrover_adapters.torch.lightning import FlashData

    saved = by_hand(state, into, tmp_path)
    FlashData(into).load_state_dict(saved)
    return FlashData(into).state_dict()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", [by_hand, by_dcp, by_lightning])
@pytest.mark.parametrize(
    ("make", "spots", "first", "second"),
    [
        (dataset, (Spot("toy", 1, 1), Spot("toy", 1, 2)), [0, 3], [[4, 5, 6, 7], [0, 3]]),
        (stream, (Spot("toy/1", 1, 1), Spot("toy/1", 1, 0)), [0, 1], [[2, 3, 102, 103], [4, 5, 104, 105]]),
    ],
)
def test_what_was_left_out_stays_so_in_a_later_run(
    way: Callable[[dict[str, Any], ElasticDataset, Path], dict[str, Any]],
    make: Callable[[], ElasticDataset],
    spots: tuple[Spot, ...],
    first: list[int],
    second: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The position, the offsets and the number of times go on, however the script saves them."""
    monkeypatch.setenv(VARIABLE, told(spots, 1))
    data = make()
    assert next(iter(data)).tolist() == first
    data.step()
    monkeypatch.delenv(VARIABLE)
    later = make()
    assert not later.left.any
    later.load_state_dict(way(data.state_dict(), later, tmp_path))
    assert later.places == data.places
    assert sum("/quarantined/" in one.dataset for one in later.places) == 2
    batches = iter(later)
    for wanted in second:
        assert next(batches).tolist() == wanted
        later.step()


def test_a_state_of_before_has_nothing_left_out() -> None:
    """An entry that is absent, or empty, is none; another text is refused and changes nothing."""
    data = dataset()
    state = data.state_dict()
    assert state["left_out"] == ""
    del state["left_out"]
    data.load_state_dict(state | {"position": 4})
    assert (data.samples, data.left_out) == (4, ())
    for wrong in ("[1]", "{", '{"toy/quarantined/1": null}', 7):
        with pytest.raises(SpecError, match="is no position of dataset 'toy'"):
            data.load_state_dict(state | {"left_out": wrong})
    assert data.samples == 4


def test_a_stream_goes_on_from_a_state_of_before() -> None:
    """Its offsets were a mapping in checkpoints of older versions."""
    data, later = stream(), stream()
    next(iter(data))
    data.step()
    state = data.state_dict()
    later.load_state_dict(state | {"offsets": json.loads(state["offsets"])})
    assert (later.samples, later.offsets) == (data.samples, data.offsets)
    assert later.offsets
    with pytest.raises(SpecError, match="is no position of stream 'toy'"):
        later.load_state_dict(state | {"offsets": 7})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_of_before(tmp_path: Path) -> None:
    """It has no counts, and torch.distributed.checkpoint asks for all entries of the state to be filled unless some may lack."""
    data, later = dataset(), dataset()
    next(iter(data))
    data.step()
    old = {name: value for name, value in data.state_dict().items() if name != "left_out"}
    dcp.save({"data": old}, checkpoint_id=tmp_path / "saved")
    found = {"data": later.state_dict()}
    dcp.load(found, checkpoint_id=tmp_path / "saved", planner=DefaultLoadPlanner(allow_partial_load=True))
    later.load_state_dict(found["data"])
    assert (later.samples, later.left_out) == (data.samples, ()) == (4, ())

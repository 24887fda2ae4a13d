"""Lightning's plug-in under an agent: what is in memory, what waits for files, and that none of it is taken for a hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.shelving import Agent, phases, running
from torch.distributed import HashStore

from dlrover_adapters.torch.checkpoint.meeting import Meeting
from dlrover_adapters.torch.checkpoint.shelf import SLOTS

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")]
BOUND_S = 30.0


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """This process runs under it."""
    with running(monkeypatch) as one:
        yield one


@pytest.fixture
def used() -> Any:
    """The plug-in's module, imported once a test is run: it takes seconds."""
    pytest.importorskip("lightning")
    from dlrover_adapters.torch import lightning

    return lightning


def test_lightnings_newest_is_in_memory_though_its_file_is_not(agent: Agent, tmp_path: Path, used: Any) -> None:
    """A worker that died before a file was written: `newest` writes it from memory and names it; loading takes memory."""
    path = tmp_path / "epoch=0-step=7.ckpt"
    plugin = used.FlashCheckpointIO()
    plugin.save_checkpoint({"global_step": 7, "state_dict": {"w": torch.full((9,), 7.0)}, "hyper": {"a": (1, 2)}}, path)
    plugin.teardown()
    path.unlink()
    agent.hash()
    successor = used.FlashCheckpointIO()
    assert successor.newest() == str(path)
    assert torch.load(path, weights_only=True)["hyper"] == {"a": (1, 2)}
    path.write_bytes(b"nobody reads this")
    found = successor.load_checkpoint(path)
    assert found["state_dict"]["w"].eq(7).all()
    assert found["hyper"] == {"a": (1, 2)}
    successor.teardown()


def test_checkpoints_of_two_kinds_in_turn_are_all_written(
    agent: Agent, tmp_path: Path, used: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full checkpoints and those of weights alone, saved in turn while storage stands still: no slot is overwritten before its
    file is there, saving waits when all are in use, and everything is on storage in the end.
    """
    gate, write, first = threading.Event(), used._write_file, used.FlashCheckpointIO._first
    waited = []

    def writing(*what: Any) -> None:
        assert gate.wait(BOUND_S)
        write(*what)

    def waiting(plugin: Any, *how: Any) -> bool:
        waited.append(True)
        gate.set()
        return bool(first(plugin, *how))

    monkeypatch.setattr(used, "_write_file", writing)
    monkeypatch.setattr(used.FlashCheckpointIO, "_first", waiting)
    plugin = used.FlashCheckpointIO()
    for step in range(4 * SLOTS):
        state = {"w": torch.full((100,), step)} | ({"m": torch.full((300,), step)} if step % 2 else {})
        plugin.save_checkpoint({"global_step": step, "state_dict": state}, tmp_path / f"{step}.ckpt")
        assert bool(waited) == (step >= 2 * SLOTS)
    plugin.teardown()
    for step in range(4 * SLOTS):
        found = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)["state_dict"]
        assert all(one.eq(step).all() for one in found.values()), step


def test_what_training_waits_for_is_no_hang(
    agent: Agent, tmp_path: Path, used: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving, removing and the end wait for files: announced as a checkpoint, and anew whenever a file is done."""
    told, gate, write = phases(monkeypatch), threading.Event(), used._write_file

    def writing(*what: Any) -> None:
        assert gate.wait(BOUND_S)
        write(*what)

    def released(*those: Any, **how: Any) -> Any:
        inside.append(told.count("checkpoint") > told.count(""))
        gate.set()
        return wait(*those, **how)

    inside: list[bool] = []
    wait = used.wait
    monkeypatch.setattr(used, "_write_file", writing)
    monkeypatch.setattr(used, "wait", released)
    plugin = used.FlashCheckpointIO()
    for step in range(SLOTS):
        plugin.save_checkpoint({"global_step": step, "state_dict": {"w": torch.ones(9)}}, tmp_path / f"{step}.ckpt")
    assert told == ["checkpoint", ""] * SLOTS
    plugin.remove_checkpoint(tmp_path / "1.ckpt")
    assert not (tmp_path / "1.ckpt").exists()
    plugin.teardown()
    assert inside
    assert all(inside)
    assert told.count("checkpoint") == told.count("")


def pair(plugins: list[Any], limit_s: float, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `newest` gives on two ranks, or how it fails."""
    store, mine = HashStore(), threading.local()
    monkeypatch.setattr(
        Meeting, "of_environment", classmethod(lambda cls, **_: cls(store, mine.rank, 2, limit_s=limit_s))
    )

    def one(rank: int) -> Any:
        mine.rank = rank
        try:
            return plugins[rank].newest()
        except Exception as error:  # noqa: BLE001  # compared
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_others_wait_while_a_file_is_rescued(used: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing a file that was in memory only takes longer than ranks usually wait for each other: they wait for that, all."""
    plugins, gone = [used.FlashCheckpointIO() for _ in range(2)], threading.Event()

    def rescued() -> str:
        gone.wait(0.5)  # in vain: five times as long as usual
        return "/ckpts/last.ckpt"

    newest = plugins[1].newest

    def impatient() -> Any:
        try:
            return newest()
        finally:
            gone.set()

    plugins[0]._rescued, plugins[1].newest = rescued, impatient
    assert pair(plugins, 0.05, monkeypatch) == ["/ckpts/last.ckpt"] * 2


def test_all_are_told_why_nothing_was_rescued(used: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that fails on rank 0 is told to all at once, who would wait for it otherwise."""
    plugins = [used.FlashCheckpointIO() for _ in range(2)]

    def rescued() -> str:
        raise OSError("no space left")

    plugins[0]._rescued = rescued
    own, others = pair(plugins, BOUND_S, monkeypatch)
    assert isinstance(own, OSError)
    assert "no space left" in str(others)

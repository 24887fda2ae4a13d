"""How the saver writes the parts of one node."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.unit.stored import sharded, state, whole  # noqa: E402

from dlrover_adapters.agent.checkpoints import orders, storing  # noqa: E402
from dlrover_adapters.checkpoint import parts  # noqa: E402
from dlrover_adapters.checkpoint.places import Place  # noqa: E402
from dlrover_adapters.checkpoint.reader import StepReader  # noqa: E402
from dlrover_adapters.checkpoint.torchfile import no_crc  # noqa: E402

LIMIT_S = 20.0


def order(url: object, form: str = "dcp") -> storing.Order:
    """Where to, and how."""
    return storing.Order(str(url), "run", form, 0)


def test_ranks_are_written_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts at a time at least, by threads in which the agent sees that the saver moves."""
    both, real = threading.Barrier(2), parts.write_part
    names: set[str] = set()

    def write(*args: Any, **more: Any) -> Any:
        both.wait(LIMIT_S)
        names.add(threading.current_thread().name)
        assert threading.get_native_id() in {one[0] for one in orders.moved()}
        return real(*args, **more)

    monkeypatch.setattr(parts, "write_part", write)
    arenas = sharded(state(), 4)
    progress = storing.Progress()
    count, size = storing.write([one.view() for one in arenas], order(tmp_path), progress)
    assert count == 4
    assert all(one.startswith(storing.THREAD_NAME) for one in names)
    assert len(names) >= 2
    files = [one for one in tmp_path.rglob("*") if one.suffix == ".distcp"]
    assert size == sum(one.stat().st_size for one in files)
    assert progress.written == sum(one.stat().st_size for one in tmp_path.rglob("*") if one.is_file())
    storing.seal(order(tmp_path), 120)
    reader = StepReader(Place(str(tmp_path)), 120)
    assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in state().items())


def test_the_first_error_is_told_and_nothing_more_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is under way is finished, and recognised when the step is tried again."""
    begun: list[int] = []
    failing, real = threading.Event(), parts.write_part

    def write(view: Any, *args: Any, **more: Any) -> Any:
        begun.append(view.table.rank)
        if view.table.rank == 1:
            failing.set()
            raise OSError("the disk is full")
        assert failing.wait(LIMIT_S)
        return real(view, *args, **more)

    monkeypatch.setattr(parts, "write_part", write)
    monkeypatch.setattr(storing.os, "sched_getaffinity", lambda _: {0, 1})
    arenas = sharded(state(rows=40), 8)
    with pytest.raises(OSError, match="the disk is full"):
        storing.write([one.view() for one in arenas], order(tmp_path))
    assert set(begun) <= {0, 1, 2}
    monkeypatch.setattr(parts, "write_part", real)
    assert storing.write([one.view() for one in arenas], order(tmp_path))[0] == 8


def test_one_file_is_written_by_one_thread(tmp_path: Path) -> None:
    """The first rank writes what all ranks of the node hold together."""
    arenas = sharded(state(), 2)
    assert storing.write([one.view() for one in arenas], order(tmp_path, "torch"))[0] == 1
    found = torch.load(next(tmp_path.rglob("checkpoint.pt")), weights_only=True)
    assert torch.equal(found["model"]["weight"], state()["model.weight"])


def test_one_rank_needs_no_thread(tmp_path: Path) -> None:
    """Nor does none."""
    assert storing.write([whole(state()).view()], order(tmp_path))[0] == 1
    assert storing.write([], order(tmp_path)) == (0, 0)


def test_checksums_are_on_again_when_the_last_writer_is_done() -> None:
    """The option is the process's, and writers come and go in any order."""
    before = torch.serialization.get_crc32_options()
    first, second = no_crc(), no_crc()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.serialization.get_crc32_options()
    second.__exit__(None, None, None)
    assert torch.serialization.get_crc32_options() == before


def test_progress_adds_up() -> None:
    """Whoever writes beside whom."""
    progress = storing.Progress()
    progress.begins(4000)
    threads = [threading.Thread(target=lambda: [progress.wrote(1) for _ in range(1000)]) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert (progress.written, progress.size) == (4000, 4000)

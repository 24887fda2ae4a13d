"""`ElasticDataset.of`: the samples of files, mixtures and packed rows, at any world size and from any position."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from dlrover_adapters.data import FolderStream, Followed, lines, mixed_of, packed  # noqa: E402
from dlrover_adapters.torch import ElasticDataset, worker  # noqa: E402
from dlrover_adapters.torch.data.plan import division  # noqa: E402
from dlrover_core.data.permutation import Order  # noqa: E402
from dlrover_core.errors import SpecError  # noqa: E402

BATCH = 6


def drawn(source: Any, world: int = 1, *, skip: int = 0, **more: Any) -> list[Any]:
    """All samples from step ``skip`` on, in the order of steps and ranks."""
    steps: dict[int, list[Any]] = {}
    for rank in range(world):
        data = ElasticDataset.of("train", source, collate=list, ahead=1000, **more)
        data.divide(division(BATCH, BATCH, world, rank))
        for _ in range(skip):
            data.step()
        data = pickle.loads(pickle.dumps(data))  # noqa: S301  # as a loader process that is spawned gets it
        loader = DataLoader(data, batch_size=None)
        for number, (step, content) in enumerate(zip(data.steps(), loader, strict=True)):
            steps.setdefault(number, []).extend(content if step.micros[0].counts else [])
    return [one for number in sorted(steps) for one in steps[number]]


def test_lines(tmp_path: Path) -> None:
    """Lines of a file in the order of the seed, in the file's own runs, and the same at every world size."""
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {one}\n" for one in range(40)))
    source = lines(path)
    source.chunk = 8
    wanted = [f"line {one}" for epoch in (0, 1) for one in Order(40, 3, epoch, chunk=8).indices(0, 40)]
    for world in (1, 2, 4):
        assert drawn(source, world, seed=3, epochs=2) == wanted
    assert drawn(source, 3, skip=2, seed=3, epochs=2) == wanted[2 * BATCH :]
    assert drawn(source, seed=3, chunk=1) == [f"line {one}" for one in Order(40, 3).indices(0, 40)]


def test_a_mixture() -> None:
    """A mixture comes in its own order, and goes on in the next epoch where it was, also for who begins there."""
    source = mixed_of([[f"a{one}" for one in range(15)], [f"b{one}" for one in range(5)]], [0.5, 0.5], size=24, seed=5)
    wanted = [source.of_epoch(epoch)[at] for epoch in range(3) for at in range(24)]
    assert drawn(source, 2, epochs=3) == wanted
    assert drawn(source, 3, epochs=3, skip=5) == wanted[5 * BATCH :]
    with pytest.raises(SpecError, match="order: 'shuffled' of dataset 'train': a mixture has its own order"):
        ElasticDataset.of("train", source, order="shuffled")


def test_packed_rows() -> None:
    """Rows are samples: each comes once in an epoch."""
    source = packed([[one] * (1 + one % 5) for one in range(50)], 8)
    found = drawn(source, 2, seed=1)
    assert sorted(sample[0] for row in found for sample in row) == list(range(50))
    assert len(found) == len(source)


def test_a_position_in_other_data_is_refused(tmp_path: Path) -> None:
    """The source's fingerprint is in the position."""
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\nthree\n")
    state = ElasticDataset.of("train", lines(path)).state_dict()
    ElasticDataset.of("train", lines(path)).load_state_dict(state)
    path.write_text("one\ntwo\nother\n")
    os.utime(path, ns=(1, 1))
    with pytest.raises(SpecError, match="positions are of other samples"):
        ElasticDataset.of("train", lines(path)).load_state_dict(state)


def test_a_source_that_grows() -> None:
    """The epoch in flight ends with the samples that it began with, through restarts in it; later epochs have all."""
    found: list[tuple[int, int]] = []
    state: dict[str, Any] | None = None
    for size, world in ((10, 1), (16, 2), (16, 3), (20, 1), (20, 2), (20, 1), (20, 2), (20, 3)):
        source = list(range(size))
        for rank in range(world):
            data = ElasticDataset.of("train", source, collate=list, ahead=99, epochs=3, seed=2, grown="append")
            if state is not None:
                strict = ElasticDataset.of("train", source, epochs=3, seed=2)
                if state["fingerprint"] != strict.place.fingerprint:
                    with pytest.raises(SpecError, match='samples were added at the end: give grown="append"'):
                        strict.load_state_dict(state)
                data.load_state_dict(state)
            data.divide(division(3, 3, world, rank))
            loaded = pickle.loads(pickle.dumps(data))  # noqa: S301
            taken = list(itertools.islice(zip(data.steps(), DataLoader(loaded, batch_size=None), strict=True), 3))
            for step, content in taken:
                found += [(step.batch.epoch, one) for one in content] if step.micros[0].counts else []
                data.step()
        state = data.state_dict()
    for epoch, size in enumerate((10, 16, 20)):
        assert sorted(one for of, one in found if of == epoch) == list(range(size)), epoch
    assert data.ended
    for grown in ("append", "yes"):
        with pytest.raises(SpecError, match=f"grown: '{grown}' of dataset 'train': give"):
            ElasticDataset("train", size=3, fetch=len, grown=grown)


def test_a_folder_that_grows(tmp_path: Path) -> None:
    """A source without end is read in its own order, by all ranks, and a restart goes on in it."""
    state: dict[str, Any] | None = None
    found: list[int] = []
    for number in range(3):
        (tmp_path / f"{9 - number}.jsonl").write_text("".join(f"{7 * number + one}\n" for one in range(7)))
        for rank in range(2):
            data = ElasticDataset.of("clicks", Followed(FolderStream(tmp_path)), collate=list)
            data._check_even(division(6, 6, 1, 0))  # no epoch ends, so no step is short
            if state is not None:
                data.load_state_dict(state)
            data.divide(division(6, 6, 2, rank))
            found += next(iter(DataLoader(data, batch_size=None)))
            data.step()
        state = data.state_dict()
    assert found == list(range(18))


def test_what_the_source_says_is_not_said_again() -> None:
    """A size beside the source's would be believed by nobody."""
    for more in ({"size": 3}, {"fetch": len}, {"fingerprint": "x"}):
        with pytest.raises(SpecError, match="leave it out, the source says it"):
            ElasticDataset.of("train", [1, 2], **more)
    with pytest.raises(SpecError, match="source: int has no length"):
        ElasticDataset.of("train", 5)
    assert [one.tolist() for one in DataLoader(ElasticDataset.of("train", [7], global_batch=1), batch_size=None)] == [
        [7]
    ]


# Constructors.


def all_of(data: ElasticDataset) -> list[Any]:
    """The samples of all epochs, in order."""
    data.divide(division(BATCH, BATCH, 1, 0))
    return [one for content in DataLoader(data, batch_size=None) for one in content]


def test_files_in_one_call(tmp_path: Path) -> None:
    """What `of` makes of a source, a constructor makes of paths; the name is the one that a script without a name means."""
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number} {one}\n" for one in range(10)))
        (tmp_path / f"{number}.jsonl").write_text("".join(f"[{number}, {one}]\n" for one in range(10)))
    data = ElasticDataset.lines(f"file://{tmp_path}/*.txt", cache=tmp_path / "cache", seed=4, collate=list, ahead=99)
    same = ElasticDataset.of("train", lines(str(tmp_path / "*.txt")), seed=4, collate=list, ahead=99)
    assert (data.name, data.place, data.size) == ("train", same.place, 20)
    assert all_of(data) == all_of(same)
    rows = ElasticDataset.jsonl([tmp_path / "1.jsonl"], name="rows", order="file", collate=list, ahead=99)
    assert (rows.name, all_of(rows)[3]) == ("rows", [1, 3])
    with pytest.raises(SpecError, match=r"path: 's3://bucket/a' is not on this machine: copy it here, or mount"):
        ElasticDataset.lines("s3://bucket/a")
    with pytest.raises(SpecError, match=r"path: .* names no file"):
        ElasticDataset.tar(tmp_path / "none.tar")
    with pytest.raises(SpecError, match="leave it out, the source says it"):
        ElasticDataset.lines(tmp_path / "0.txt", size=3)


def test_rows_of_parquet_in_one_call(tmp_path: Path) -> None:
    """Columns and window are the source's."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"a": range(6), "b": range(6)}), tmp_path / "a.parquet", row_group_size=3)
    data = ElasticDataset.parquet(tmp_path / "*.parquet", columns=["b"], window=2, order="file", collate=list)
    assert (all_of(data)[4], data.window) == ({"b": 4}, 2)
    with pytest.raises(SpecError, match=r"columns: .* has no column 'c': it has a, b"):
        ElasticDataset.parquet(tmp_path / "a.parquet", columns=["c"])


def test_a_mixture_of_datasets_in_one_call() -> None:
    """Datasets stand for their samples; seed and order are the mixture's."""
    a = ElasticDataset.of("a", [f"a{one}" for one in range(14)], epochs=9)
    b = ElasticDataset("b", size=6, fetch=lambda index: f"b{index}", seed=3, fingerprint="v1")
    data = ElasticDataset.mixed({a: 0.7, b: 0.3}, samples=20, seed=5, collate=list, ahead=99)
    source = mixed_of([a.as_source(), b.as_source()], [0.7, 0.3], size=20, seed=5)
    assert all_of(data) == [source[at] for at in range(20)]
    assert sorted(all_of(data)) == sorted([f"a{one}" for one in range(14)] + [f"b{one}" for one in range(6)])
    assert ElasticDataset.mixed({a: 0.5, b: 0.5}).place != data.place
    other = ElasticDataset("b", size=6, fetch=str, fingerprint="v2")
    assert ElasticDataset.mixed({a: 0.7, other: 0.3}, samples=20, seed=5).place != data.place, "another content"
    with pytest.raises(SpecError, match=r"weights: 0.7 \+ 0.2 is 0.9: give weights that sum to 1, such as 0.7778"):
        ElasticDataset.mixed({a: 0.7, b: 0.2})
    with pytest.raises(SpecError, match="weights: a dict from sources to their weights, got list"):
        ElasticDataset.mixed([a, b])  # type: ignore[arg-type]


def test_packed_rows_of_a_dataset_in_one_call() -> None:
    """A row has an index of its own, whatever its samples come from."""
    data = ElasticDataset("texts", size=8, fetch=lambda index: [index] * (1 + index % 2))
    rows = ElasticDataset.packed(data, 3, name="rows", collate=list, ahead=99)
    found = all_of(rows)
    assert (rows.name, rows.size, len(found)) == ("rows", 4, 4)
    assert sorted(one for row in found for sample in row for one in sample) == [0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7]
    joined = ElasticDataset.packed(
        data, 3, join=lambda row: [one for sample in row for one in sample], long="split", order="file", collate=list
    )
    assert all_of(joined)[0] == [0, 1, 1]
    with pytest.raises(SpecError, match="length: 2 tokens of sample 1 are more than 1"):
        ElasticDataset.packed(data, 1)
    with pytest.raises(SpecError, match="length: 0: give 1 or more tokens"):
        ElasticDataset.packed(data, 0)


def test_a_worker_imports_little_for_a_dataset() -> None:
    """A worker without a warm process does not pay for the leader's events and rules."""
    code = "import sys; import dlrover_adapters.data; print([one for one in sys.modules if one.startswith('dlrover_core.job')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_worker_that_begins_anew_has_the_modules_of_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are imported before the fork."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", sys.modules.get("torch._dynamo") or ModuleType("torch._dynamo"))
    monkeypatch.delenv(worker.WARM, raising=False)
    asked: list[str] = []
    monkeypatch.setattr(worker, "importlib", SimpleNamespace(import_module=asked.append))
    worker.import_rest()
    assert asked == [
        f"dlrover_adapters.torch.{one}" for one in ("checkpoint.flash", "checkpoint.restore", "data.batch")
    ]

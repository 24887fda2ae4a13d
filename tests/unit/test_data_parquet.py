"""Parquet: every row is a sample; row groups are read, kept as many as are mixed, and known by their footers."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from dlrover_adapters.data import Reader, fingerprint_of, parquet, resumed_size
from dlrover_core.data.cut import Place
from dlrover_core.errors import SpecError


@pytest.fixture
def arrow() -> Any:
    """The library, or the test is left out."""
    return pytest.importorskip("pyarrow")


def write(path: Path, first: int, rows: int, group: int = 10) -> None:
    """Rows ``first`` and on, in groups."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    values = list(range(first, first + rows))
    table = pyarrow.table({"n": pyarrow.array(values, pyarrow.int64()), "text": [f"row {one}" for one in values]})
    files.write_table(table, path, row_group_size=group)


def test_rows(arrow: Any, tmp_path: Path) -> None:
    """Rows of several files, in any order, with all columns or some, here and in other processes."""
    write(tmp_path / "a.parquet", 0, 35)
    write(tmp_path / "b.parquet", 35, 0)
    write(tmp_path / "c.parquet", 35, 10)
    source = parquet(tmp_path / "*.parquet", window=1)
    assert len(source) == 45
    assert source.chunk == 10
    for at in (*range(45), 44, 3, 31, 7):
        assert source[at] == {"n": at, "text": f"row {at}"}
        assert len(source._kept) <= 2
        assert len(source._files) <= 2
    assert source.place(32) == f"{tmp_path}/a.parquet:3:2"
    some = parquet([tmp_path / "a.parquet"], columns=["n"])
    assert some[34] == {"n": 34}
    assert pickle.loads(pickle.dumps(source))[40] == source[40]  # noqa: S301
    found = [one["n"] for one in Reader(source, seed=3).samples(0, 0, 45)]
    assert sorted(found) == list(range(45))
    with pytest.raises(IndexError, match="sample 45: there are 0 to 44"):
        source[45]


def test_changed_files(arrow: Any, tmp_path: Path) -> None:
    """Other rows are other data, new files are additions."""
    a, b = tmp_path / "a.parquet", tmp_path / "b.parquet"
    write(a, 0, 35)
    source = parquet(a)
    place = Place("train", 0, 5, fingerprint_of(source))
    assert fingerprint_of(parquet(a, columns=["n"])) != place.fingerprint
    write(b, 35, 40, group=40)
    assert parquet([a, b]).chunk == source.chunk
    write(b, 35, 10)
    assert resumed_size(place, parquet([a, b]), grown="append") == 35
    with pytest.raises(SpecError, match='10 samples were added at the end: give grown="append"'):
        resumed_size(place, parquet([a, b]))
    write(a, 1, 35)
    with pytest.raises(SpecError, match="fingerprint: dataset 'train' is"):
        resumed_size(place, parquet(a), grown="append")
    write(a, 0, 45)
    with pytest.raises(SpecError, match="fingerprint: dataset 'train' is"):
        resumed_size(place, parquet(a), grown="append")


def test_bad_files(arrow: Any, tmp_path: Path) -> None:
    """Each is refused with field, value and remedy."""
    write(tmp_path / "a.parquet", 0, 3)
    write(tmp_path / "none.parquet", 0, 0)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    for made, told in (
        (
            lambda: parquet(tmp_path / "a.parquet", columns=["m"]),
            "columns: .*a.parquet has no column 'm': it has n, text",
        ),
        (lambda: parquet(tmp_path / "none.parquet"), "size: 0 rows in .*none.parquet"),
        (lambda: parquet(tmp_path / "broken.parquet"), "path: .*broken.parquet is no Parquet file, or is damaged"),
        (lambda: parquet(tmp_path / "x.parquet"), "path: .* names no file"),
        (lambda: parquet(tmp_path / "a.parquet", window=0), "window: 0: give 1 or more row groups"),
    ):
        with pytest.raises(SpecError, match=told):
            made()


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pyarrow is missing the error says what to install."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(SpecError, match=r"Parquet needs pyarrow.*: pip install 'dlrover-core\[parquet\]'"):
        parquet(tmp_path / "a.parquet")

"""Sources of files: every sample is read as it is in the file, and an index that is not right is made anew."""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_adapters.data import jsonl, lines, tar
from dlrover_adapters.data.index_file import BLOCK, SUFFIX, IndexFile, Scan, index_path
from dlrover_adapters.data.source import Source, fingerprint_of, resumed_size
from dlrover_adapters.data.text import JsonLines, Lines, _scan_jsonl, _scan_lines
from dlrover_core.data.cut import Place
from dlrover_core.errors import SpecError

TEXT = b"first\nsecond\r\n\nf\xc3\xbcnf\nlast without an end"
SAMPLES = ["first", "second", "", "fünf", "last without an end"]


def pieces(data: bytes, size: int) -> list[bytes]:
    """``data`` in blocks of ``size``."""
    return [data[at : at + size] for at in range(0, len(data), size)]


@given(
    st.lists(st.binary(max_size=6).map(lambda one: one.replace(b"\n", b" ")), max_size=9),
    st.booleans(),
    st.integers(1, 9),
)
def test_lines_are_found(parts: list[bytes], ended: bool, size: int) -> None:
    """However the file comes in blocks, the lines are those that Python finds; JSONL leaves the blank ones out."""
    data = b"\n".join(parts) + b"\n" * ended
    expected = data.removesuffix(b"\n").split(b"\n") if data else []
    offsets = _scan_lines("", iter(pieces(data, size))).offsets.tolist()
    assert [data[a:b].removesuffix(b"\n") for a, b in itertools.pairwise(offsets)] == expected
    offsets = _scan_jsonl("", iter(pieces(data, size))).offsets.tolist()
    found = [data[a:b].strip() for a, b in itertools.pairwise(offsets)]
    assert found == [one.strip() for one in expected if one.strip()]


def test_lines(tmp_path: Path) -> None:
    """Lines of several files, one file after the other; a pattern names files in the order of their names."""
    (tmp_path / "b.txt").write_bytes(TEXT)
    (tmp_path / "a.txt").write_bytes(b"zero\n")
    (tmp_path / "empty.txt").write_bytes(b"")
    source = lines(tmp_path / "*.txt")
    assert [source[at] for at in range(len(source))] == ["zero", *SAMPLES]
    assert source.place(3) == f"{tmp_path}/b.txt:3"
    assert isinstance(source, Source)
    again = lines([f"file://{tmp_path}/a.txt", tmp_path / "b.txt"])
    assert fingerprint_of(again) == fingerprint_of(lines(tmp_path / "[ab].txt"))
    for wrong in (-1, 6):
        with pytest.raises(IndexError, match=f"sample {wrong}: there are 0 to 5"):
            source[wrong]


def test_jsonl(tmp_path: Path) -> None:
    """Each line that is not blank is a sample."""
    path = tmp_path / "a.jsonl"
    rows: list[Any] = [{"a": 1}, [2, "drei"], None, 4.5]
    path.write_text("\n" + "\n\n  \n".join(json.dumps(one) for one in rows) + "\n\n")
    source = jsonl(path)
    assert [source[at] for at in range(len(source))] == rows
    path.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(SpecError, match=r"sample: .*a.jsonl:2 is no JSON: .*; mend the line"):
        jsonl(path)[1]


def archive(path: Path, members: dict[str, bytes]) -> None:
    """A tar file of a folder and ``members``."""
    with tarfile.open(path, "w") as made:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        made.addfile(folder)
        for name, data in members.items():
            one = tarfile.TarInfo(name)
            one.size = len(data)
            made.addfile(one, io.BytesIO(data))


def test_tar(tmp_path: Path) -> None:
    """Each regular file is a sample, or neighbours of one stem are."""
    members = {"f.x/1.jpg": b"one", "f.x/1.seg.png": b"", "f.x/2.jpg": b"two" * 500, f"{'long' * 60}.txt": b"long"}
    archive(tmp_path / "a.tar", members)
    archive(tmp_path / "b.tar", {"3.cls": b"7"})
    source = tar(tmp_path / "*.tar")
    assert [source[at] for at in range(len(source))] == [*members.items(), ("3.cls", b"7")]
    groups = tar([tmp_path / "a.tar", tmp_path / "b.tar"], grouped=True)
    assert [groups[at] for at in range(len(groups))] == [
        {"__key__": "f.x/1", "jpg": b"one", "seg.png": b""},
        {"__key__": "f.x/2", "jpg": b"two" * 500},
        {"__key__": "long" * 60, "txt": b"long"},
        {"__key__": "3", "cls": b"7"},
    ]
    assert pickle.loads(pickle.dumps(groups))[1] == groups[1]  # noqa: S301


def changed(path: Path, data: bytes) -> None:
    """Write, with a time of the last change that no clock's steps can hide."""
    before = path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def test_an_index_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the file or in the cache folder; used again as long as the file is the same; nothing else is left behind."""
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_bytes(TEXT)
    assert len(lines(path)) == 5
    assert len(lines(path, cache=cache)) == 5
    names = sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*") if one.is_file())
    assert names[0] == f".a.txt.lines{SUFFIX}"
    assert names[1] == "a.txt"
    assert names[2].startswith("cache/a.txt.")
    assert len(names) == 3
    monkeypatch.setattr(Lines, "scanner", Lines.scanner._replace(scan=lambda *_: pytest.fail("scanned again")))
    assert lines(path, cache=cache)[3] == lines(path)[3] == "fünf"
    monkeypatch.undo()
    changed(path, b"one\ntwo\n")
    assert [lines(path)[at] for at in range(2)] == ["one", "two"]


DAMAGE = {
    "cut off": lambda data: data[:-3],
    "cut to nothing": lambda _: b"",
    "a header alone": lambda data: data[:84],
    "another version": lambda data: data[:8] + b"\x09" + data[9:],
    "another kind": lambda data: data.replace(b"lines", b"nines"),
    "an offset": lambda data: data[:90] + bytes([data[90] ^ 1]) + data[91:],
    "the count": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "a checksum": lambda data: data[:-6] + bytes([data[-6] ^ 1]) + data[-5:],
    "noise": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_is_made_anew(damage: str, tmp_path: Path) -> None:
    """No damaged index is used, and none is an error."""
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)
    lines(path)
    index = Path(index_path(str(path), "lines", ""))
    good = index.read_bytes()
    index.write_bytes(DAMAGE[damage](good))
    source = lines(path)
    assert [source[at] for at in range(len(source))] == SAMPLES
    assert index.read_bytes() == good


def test_any_flipped_byte_of_an_index(tmp_path: Path) -> None:
    """Whichever byte is another one, samples are read right."""
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)
    lines(path)
    index = Path(index_path(str(path), "lines", ""))
    good = index.read_bytes()
    for at in range(len(good)):
        index.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        source = lines(path)
        assert [source[one] for one in range(len(source))] == SAMPLES


def test_damage_that_is_met_later(tmp_path: Path) -> None:
    """A block is looked at when it is used first. When it has gone bad, the index is made anew, and the sample is read."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join(b"%d\n" % one for one in range(20_000)))
    lines(path)
    index = Path(index_path(str(path), "lines", ""))
    assert index.stat().st_size > 2 * BLOCK
    data = bytearray(index.read_bytes())
    data[BLOCK + 1000] ^= 1
    index.write_bytes(data)
    source = lines(path)
    assert [source[at] for at in (0, 8300, 19_999)] == ["0", "8300", "19999"]
    assert index.read_bytes() != bytes(data)


def test_who_comes_later_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While one process makes the index, another one waits for it, says so, and uses it."""
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found: list[int] = []
        other = threading.Thread(target=lambda: found.append(len(lines(path))))
        other.start()
        while "another process makes it; waiting" not in capsys.readouterr().err:
            assert other.is_alive()
        assert not Path(index_path(str(path), "lines", "")).exists()
        fcntl.flock(held, fcntl.LOCK_UN)
        other.join(30)
    assert found == [5]


def test_a_killed_maker_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    """A process that dies in the middle of its work leaves no index, and the next one makes it."""
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)
    code = f"""
import os
from dlrover_adapters.data import index_file, lines
os.fsync = lambda _: os.kill(os.getpid(), 9)
lines({str(path)!r})
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60, check=False).returncode == -9
    assert not Path(index_path(str(path), "lines", "")).exists()
    assert len(lines(path)) == 5
    assert sorted(one.name for one in tmp_path.iterdir()) == [f".a.txt.lines{SUFFIX}", "a.txt"]


def _read(source: Lines, at: int, answer: Any) -> None:
    answer.put(source[at])


@pytest.mark.filterwarnings(
    "ignore:.*multi-threaded.*fork:DeprecationWarning"
)  # Python 3.12 and later, in a test runner
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_other_processes_read(how: str, tmp_path: Path) -> None:
    """A source that is read here is read in a loader's child, too."""
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)
    source = lines(path)
    assert source[0] == "first"
    if how == "spawn":
        # What spawn does, without its process.
        assert pickle.loads(pickle.dumps(source))[3] == "fünf"  # noqa: S301
        return
    context = multiprocessing.get_context(how)
    answer = context.SimpleQueue()
    child = context.Process(target=_read, args=(source, 3, answer))
    child.start()
    assert answer.get() == "fünf"
    child.join(30)
    assert source[4] == "last without an end"


def test_changed_files_are_refused(tmp_path: Path) -> None:
    """A position is of the data of then: changed ones are refused by name, grown ones are taken where that is asked for."""
    path, more = tmp_path / "a.txt", tmp_path / "b.txt"
    path.write_bytes(b"one\ntwo\n")
    then = fingerprint_of(lines(path))
    place = Place("train", 1, 1, then)
    assert resumed_size(place, lines(path)) == 2
    assert then.startswith("lines:2:")
    changed(path, b"one\ntwa\n")
    with pytest.raises(
        SpecError, match=r"fingerprint: dataset 'train' is 'lines:2:.* now, and was 'lines:2:.*data of then"
    ):
        resumed_size(place, lines(path), grown="append")
    changed(path, b"one\n")
    with pytest.raises(SpecError, match="1 samples are missing: give the data of then"):
        resumed_size(place, lines(path), grown="append")
    changed(path, b"one\ntwo\nthree\n")
    with pytest.raises(SpecError, match='1 samples were added at the end: give grown="append" to take them'):
        resumed_size(place, lines(path))
    assert resumed_size(place, lines(path), grown="append") == 2
    assert resumed_size(place._replace(epoch=2, position=0), lines(path), grown="append") == 3
    changed(path, b"one\ntwo\n")
    more.write_bytes(b"three\n")
    assert resumed_size(place, lines([path, more]), grown="append") == 2
    with pytest.raises(SpecError, match="fingerprint"):
        resumed_size(place, lines([more, path]), grown="append")
    with pytest.raises(SpecError, match="grown: 'yes': give"):
        resumed_size(place, lines(path), grown="yes")
    assert resumed_size(place._replace(fingerprint=""), lines(path)) == 2
    with pytest.raises(SpecError, match=r"position: 5 \(dataset 'train'\): the epoch has 2 samples"):
        resumed_size(place._replace(position=5), lines(path))


def test_files_that_cannot_be_read_by_offset(tmp_path: Path) -> None:
    """Each is refused with field, value and remedy."""
    packed, broken, none = tmp_path / "a.gz", tmp_path / "a.tar", tmp_path / "none.txt"
    packed.write_bytes(b"\x1f\x8b123")
    broken.write_bytes(b"x" * 2000)
    none.write_bytes(b"")
    text = tmp_path / "latin.txt"
    text.write_bytes(b"gut\nf\xfcnf\n")
    for made, words in (
        (lambda: lines(packed), r"path: .*a.gz is compressed \(gzip\).*: unpack it first"),
        (lambda: tar(packed), r"compressed \(gzip\)"),
        (lambda: tar(broken), r"path: .*a.tar is no tar file, or is damaged.*give an uncompressed tar"),
        (lambda: lines(none), r"size: 0 samples in .*none.txt"),
        (lambda: lines([]), "path: there are none"),
        (lambda: lines(tmp_path / "*.nothing"), r"path: '.*\*.nothing' names no file"),
        (lambda: lines(tmp_path), "names no file: give paths of files, or a pattern such as"),
        (lambda: lines("s3://bucket/a.txt"), "path: 's3://bucket/a.txt' is not on this machine: copy it here"),
        (lambda: lines(text)[1], r"encoding: .*latin.txt:2 is not utf-8: .*; give encoding="),
        (lambda: lines(text, cache=none / "x")[1], r"cache: .* cannot be written to \(Not a directory\): give cache="),
    ):
        with pytest.raises(SpecError, match=words):
            made()
    assert lines(text, encoding="latin-1")[1] == "fünf"


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    """A sample that is no longer there is told, and not read as less."""
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)
    source = lines(path)
    os.truncate(path, 8)
    with pytest.raises(SpecError, match="has become shorter"):
        source[3]


def test_a_file_that_changes_while_it_is_indexed(tmp_path: Path) -> None:
    """No index of half a file: who writes and trains at once is told."""
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)

    def scan(name: str, blocks: Any) -> Scan:
        found = _scan_lines(name, blocks)
        changed(path, TEXT + b"\nmore")
        return found

    with pytest.raises(SpecError, match="changed while it was indexed: wait until nothing writes to it"):
        IndexFile(str(path), JsonLines.scanner._replace(scan=scan))
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]


def test_long_work_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What takes long says how far it is."""
    monkeypatch.setattr("dlrover_adapters.data.index_file.PROGRESS_S", 0.0)
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT)
    lines(path)
    assert f"index of {path}: 100 %" in capsys.readouterr().err

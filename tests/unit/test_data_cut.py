"""The cut: what is packed is unpacked as it was, and whoever holds another one is told in which field."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.data.cut import DATASETS_MAX, Place, cut_of, differences, nests, pack, same_source, unpack
from dlrover_core.data.poison import QUARANTINED_MAX
from dlrover_core.errors import SpecError

TRAIN = Place("train", 2, 512, "lines:1000:00ff")
OTHER = Place("other", 0, 10**10, "")


def test_packed_and_unpacked() -> None:
    """Places in any order are one cut, whose bytes give it back; an ordinary one is far below 1 KiB."""
    cut = cut_of([TRAIN, OTHER])
    assert cut == (OTHER, TRAIN)
    assert pack((TRAIN, OTHER)) == pack(cut)
    assert unpack(pack(cut)) == cut
    assert unpack(pack(())) == ()
    ordinary = cut_of(Place(f"dataset-{one}", 3, 10**10 - one, "parquet:10000000000:" + "0f" * 8) for one in range(8))
    assert len(pack(ordinary)) <= 1024


def test_its_bytes_are_pinned() -> None:
    """A checkpoint of today is read tomorrow."""
    packed = bytes.fromhex("920192" + "94a56f746865720acf00000002540be400a0".replace("0acf", "00cf"))
    packed += bytes.fromhex("94a5747261696e02cd0200af") + b"lines:1000:00ff"
    assert pack((OTHER, TRAIN)) == packed


_places = st.builds(
    Place, st.sampled_from(["a", "b", "train"]), st.integers(0, 3), st.integers(0, 9), st.sampled_from(["", "x"])
)
_cuts = st.lists(_places, max_size=3, unique_by=lambda one: one.dataset).map(cut_of)


@given(_cuts, _cuts)
def test_nests(earlier: tuple[Place, ...], later: tuple[Place, ...]) -> None:
    """A cut nests in another exactly where the samples consumed by it were consumed by the other, too."""
    size = 10

    def consumed(cut: tuple[Place, ...]) -> set[tuple[str, int]]:
        return {(one.dataset, at) for one in cut for at in range(-1, one.epoch * size + one.position)}

    assert nests(earlier, later) == (consumed(earlier) <= consumed(later))
    assert (differences(earlier, later) == []) == (earlier == later)


def test_the_source_that_a_position_is_of() -> None:
    """Equal, unknown, or one that has only grown: the words say so. All else is another source."""
    then = "size=10 seed=7 order=shuffled source=lines:10:0f"
    for now, same in (
        (then, True),
        ("size=12 seed=7 order=shuffled source=lines:12:a0", True),
        ("size=8 seed=7 order=shuffled source=lines:8:a0", False),
        ("size=10 seed=7 order=shuffled source=lines:10:a0", False),
        ("size=12 seed=8 order=shuffled source=lines:12:a0", False),
        ("size=12 seed=7 order=shuffled", False),
        ("size=12 seed=7 order=shuffled chunk=4 source=lines:12:a0", False),
        ("size=\u0663\u0663 seed=7 order=shuffled source=x", False),
        ("lines:12:a0", False),
        ("", False),
    ):
        assert same_source(then, now) == same, now
    assert same_source("", then)
    assert not same_source("size=10 seed=7", "size=12 seed=7")


def test_differences_are_told() -> None:
    """Each field that differs, with both values; and datasets that one side alone knows."""
    mine = cut_of([TRAIN, OTHER])
    others = cut_of([TRAIN._replace(position=480, fingerprint="x"), Place("third", 0, 0)])
    assert differences(mine, others) == [
        "dataset 'other': here, not there",
        "dataset 'third': there, not here",
        "dataset 'train': position is 512 here, 480 there",
        "dataset 'train': fingerprint is 'lines:1000:00ff' here, 'x' there",
    ]
    assert differences(mine, mine) == []


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([TRAIN, TRAIN._replace(epoch=1)], "dataset: 'train' is there twice: give each dataset a name of its own"),
        ([Place("", 0, 0)], "dataset: '' is no name"),
        ([Place("x" * 129, 0, 0)], "is no name"),
        ([Place("a\nb", 0, 0)], "is no name"),
        ([Place("a", -1, 0)], r"epoch: -1 \(dataset 'a'\): give 0 to"),
        ([Place("a", 0, -1)], r"position: -1 \(dataset 'a'\): give 0 to"),
        ([Place("a", 0, 2**62 + 1)], "position: "),
        ([Place("a", 0, 0, "\x1b[1m")], "fingerprint: "),
        ([Place(str(one), 0, 0) for one in range(DATASETS_MAX + 1)], f"datasets: {DATASETS_MAX + 1} datasets"),
        ([Place(f"{one:0>128}".replace("0", "ü"), 0, 0, "ü" * 128) for one in range(1, 65)], "cut: .* bytes"),
    ],
)
def test_bad_places(places: list[Place], words: str) -> None:
    """What is no cut is refused, with field, value and remedy."""
    with pytest.raises(SpecError, match=words):
        pack(tuple(places))


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (b"", "damaged"),
        (pack((TRAIN,))[:-1], "damaged"),
        (pack((TRAIN,)) + b"\x00", "damaged"),
        (b"\xc1", "damaged"),
        (b"\x91" * 30_000, "damaged"),
        (bytes(40_000), "40000 bytes are no cut"),
        (msgpack.packb([2, []]), "format 2 is unknown here, 1 is known: upgrade"),
        (msgpack.packb([True, []]), "no version"),
        (msgpack.packb([1, [["a", 0, 0]]]), "name, epoch, position, fingerprint"),
        (msgpack.packb([1, [["a", 0, 0, "", 5]]]), "name, epoch, position, fingerprint"),
        (msgpack.packb([1, [["a", True, 0, ""]]]), "name, epoch, position, fingerprint"),
        (msgpack.packb([1, [["b", 0, 0, ""], ["a", 0, 0, ""]]]), "not in order"),
        (msgpack.packb([1, [["b", 0, -5, ""]]]), "position: -5"),
        (msgpack.packb([1, [["b", 0, 0, ""]] * (DATASETS_MAX + 1)]), "no list of datasets"),
        (msgpack.packb([1, [[b"b", 0, 0, ""]]]), "name, epoch, position, fingerprint"),
        (msgpack.packb({1: 2}), "damaged"),
    ],
)
def test_damage_is_refused(packed: bytes, words: str) -> None:
    """Bytes that are no cut of this version are refused in words, never read as another place."""
    with pytest.raises(SpecError, match=words):
        unpack(packed)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_cut_or_refused(packed: bytes) -> None:
    """No bytes end in another error."""
    try:
        cut = unpack(packed)
    except SpecError:
        return
    assert unpack(pack(cut)) == cut


def test_a_stream_and_quarantined_samples_fit_together() -> None:
    """The widest stream, another dataset, and all samples that may be quarantined, with the longest names."""
    places = [
        Place(f"{number:03}".ljust(128, "x"), 2**31, 2**62, "f" * 40) for number in range(62 + 1 + QUARANTINED_MAX)
    ]
    assert unpack(pack(cut_of(places))) == tuple(places)

"""Torch's flight recorder across ranks: who lags, who is missing, who called something else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dlrover_core.diagnosis import flight
from dlrover_core.diagnosis.flight import Newest, Parted


def entry(
    seq: int, op: str = "all_reduce", *, over: bool = False, group: str = "0", size: int = 10, p2p: bool = False
) -> Any:
    """As Gloo's recorder writes it (torch 2.13)."""
    return {
        "collective_seq_id": seq, "p2p_seq_id": 0, "is_p2p": p2p, "process_group": [group, "default_pg"],
        "profiling_name": f"gloo:{op}", "input_sizes": [[size]], "state": "scheduled", "retired": over,
    }  # fmt: skip


def dump(*entries: Any) -> str:
    """A rank's dump."""
    return json.dumps({"version": "2.10", "entries": list(entries)})


def read(**ranks: tuple[Any, ...]) -> dict[int, tuple[Newest, ...]]:
    """What each rank's dump says, by ``r0``, ``r1`` and so on."""
    return {int(name[1:]): flight.newest(dump(*entries)) for name, entries in ranks.items()}


def test_the_newest_of_each_group() -> None:
    """Of a whole ring only what a hang is judged by."""
    told = flight.newest(dump(entry(1, over=True), entry(2), entry(7, "broadcast", group="3", over=True)))
    assert told == (Newest("0", 2, "all_reduce", "[[10]]", True), Newest("3", 7, "broadcast", "[[10]]", False))


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{", '{"entries": 3}', '{"entries": [{}]}', '{"entries": [3]}', b"\xff\xfe"]
)
def test_no_dump_says_nothing(text: str | bytes) -> None:
    """An empty, cut or foreign dump is no evidence."""
    assert flight.newest(text) == ()


def test_the_lagging_rank() -> None:
    """Who has not called what all others wait in."""
    ranks = read(r0=(entry(9),), r1=(entry(8, over=True),), r2=(entry(9),))
    assert flight.parted(ranks) == Parted("lag", "0", (1,), 9, "all_reduce")


def test_who_waits_elsewhere_does_not_lag() -> None:
    """Rank 1 lags in the world because it waits for rank 2 in a smaller group, which rank 2 has not reached."""
    ranks = read(
        r0=(entry(9),),
        r1=(entry(8, over=True), entry(4, "broadcast", group="1")),
        r2=(entry(8, over=True), entry(3, "broadcast", group="1", over=True)),
    )
    found = flight.parted(ranks)
    assert found is not None
    assert (found.how, found.ranks) == ("lag", (2,))


def test_who_waits_for_a_message_lags() -> None:
    """A receive that nobody answers is no excuse: it is what the rank hangs in."""
    ranks = read(r0=(entry(9),), r1=(entry(8, over=True), entry(8, "recv 1<-2", p2p=True)), r2=(entry(9),))
    assert ranks[1] == (Newest("0", 8, "all_reduce", "[[10]]", False, "recv"),)
    found = flight.parted(ranks)
    assert found is not None
    assert found.ranks == (1,)


def test_the_missing_rank() -> None:
    """Who has called nothing while all others wait."""
    assert flight.parted(read(r0=(entry(1),), r1=(), r2=(entry(1),))) == Parted("missing", "0", (1,), 1, "all_reduce")


def test_the_mismatched_operation() -> None:
    """Under the same number most call one thing and one another."""
    ranks = read(r0=(entry(9),), r1=(entry(9, "barrier"),), r2=(entry(9),))
    assert flight.parted(ranks) == Parted("mismatch", "0", (1,), 9, "barrier", "all_reduce")


def test_the_mismatched_size() -> None:
    """The same operation over another number of elements."""
    ranks = read(r0=(entry(9),), r1=(entry(9),), r2=(entry(9, size=11),))
    found = flight.parted(ranks)
    assert found is not None
    assert (found.how, found.ranks, found.op) == ("mismatch", (2,), "all_reduce of [[11]]")


def test_two_ranks_that_disagree_are_both_told() -> None:
    """Of two nobody is in the majority."""
    found = flight.parted(read(r0=(entry(9),), r1=(entry(9, "barrier"),)))
    assert found is not None
    assert (found.ranks, found.op) == ((0, 1), "all_reduce and barrier")


@pytest.mark.parametrize("over", [True, False])
def test_ranks_that_are_together_do_not_part(over: bool) -> None:
    """All in the same collective, or all out of it."""
    assert flight.parted(read(r0=(entry(9, over=over),), r1=(entry(9, over=over),))) is None
    assert flight.parted({}) is None
    assert flight.parted(read(r0=(), r1=())) is None

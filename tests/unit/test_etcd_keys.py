"""Where things lie in etcd: any job's name makes keys of its own, and keys sort as their numbers do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_adapters.etcd.keys import Head, Keys, Leader, end_of, job_of, jobs_prefix, names_prefix
from dlrover_core.errors import LogError

NAMES = ["a", "a/b", "a%2Fb", "a%b", "a b", "ä/日本", "../x", ".", "a\n", "leader", "a/leader", "A"]


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_names_come_back(job: str) -> None:
    """A job's name is read back from its key, whatever it is made of, and stays one step of the path."""
    keys = Keys("p/q", job)
    assert job_of("p/q", keys.name) == job
    assert keys.base.isascii()
    assert keys.base.removeprefix(jobs_prefix("p/q")).count("/") == 1


def test_jobs_do_not_share_keys() -> None:
    """No job's keys begin with another's."""
    bases = [Keys("p", name).base for name in NAMES]
    assert len(set(bases)) == len(NAMES)
    assert not [(one, other) for one in bases for other in bases if one != other and other.startswith(one)]


def test_names_lie_apart_from_jobs() -> None:
    """Listing the jobs does not walk through their logs."""
    assert not Keys("p", "a").name.startswith(jobs_prefix("p"))
    assert not Keys("p", "a").head.startswith(names_prefix("p"))


@given(st.integers(1, 10**19), st.integers(1, 10**19))
def test_batches_sort_by_number(one: int, other: int) -> None:
    """Keys sort as sequence numbers do, and all lie within the log's range."""
    keys = Keys("p", "a")
    assert (keys.batch(one) < keys.batch(other)) == (one < other)
    assert keys.log <= keys.batch(one) < end_of(keys.log)


def test_a_snapshots_manifest_lies_behind_its_parts() -> None:
    """A snapshot's keys lie together."""
    keys = Keys("p", "a")
    assert keys.part(7, 0) < keys.part(7, 9999) < keys.manifest(7) < keys.part(8, 0) < end_of(keys.snap)


@pytest.mark.parametrize("prefix", ["a/", "jobs/x", "a/log/"])
def test_end_of_a_prefix(prefix: str) -> None:
    """The end of a prefix lies behind whatever begins with it, and before the next name."""
    assert prefix < prefix + "\U0010ffff" < end_of(prefix)
    assert len(end_of(prefix)) == len(prefix)


def test_values_come_back() -> None:
    """Head and leader are read as they were written."""
    head, leader = Head(2**40, 2**60, 12), Leader("höst-1:77", "10.0.0.1:7000")
    assert Head.unpacked(head.packed()) == head
    assert Leader.unpacked(leader.packed()) == leader


@pytest.mark.parametrize(
    "raw", [b"", b"\xc1", b"x", Leader("a").packed(), Head().packed() + b"\0", Head().packed()[:-1], b"\x93\xa2h1\1\2"]
)
def test_foreign_values(raw: bytes) -> None:
    """Bytes that are no head are refused as such."""
    with pytest.raises(LogError, match="in etcd is not ours"):
        Head.unpacked(raw)

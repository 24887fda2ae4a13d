"""What etcd's words mean: who must be asked again, and who must be told."""

from __future__ import annotations

import pytest

from dlrover_adapters.etcd.errors import Denied, LeaseGone, TokenOver, Unsupported, of_words
from dlrover_core.errors import LogFull, LogUnavailable

# As etcd 3.4 to 3.6 say them.
MEANT = [
    ("etcdserver: mvcc: database space exceeded", LogFull),
    ("etcdserver: corrupt cluster", LogUnavailable),
    ("etcdserver: rpc not supported for learner", LogUnavailable),
    ("etcdserver: mvcc: required revision is a future revision", LogUnavailable),
    ("etcdserver: requested lease not found", LeaseGone),
    ("etcdserver: invalid auth token", TokenOver),
    ("etcdserver: permission denied", Denied),
    ("unknown service etcdserverpb.KV", Unsupported),
]


@pytest.mark.parametrize(("said", "meant"), MEANT)
def test_words_are_told_apart(said: str, meant: type[Exception]) -> None:
    """What passes, or holds for one member only, is waited out; the rest has a name of its own."""
    assert type(of_words("e1:2379", said)) is meant


def test_what_is_nobodys_word_is_left_to_its_code() -> None:
    """Other words say nothing by themselves."""
    assert of_words("e1:2379", "etcdserver: request timed out") is None

"""Why a batch did not land in etcd, decided from what one transaction read: leader, head, and the batch's key."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_adapters.etcd.election import Won
from dlrover_adapters.etcd.keys import Head, Keys
from dlrover_adapters.etcd.leadership import EtcdLeadership
from dlrover_core.kernel.log import AlreadyAppended, Conflict, Fenced, Outcome
from dlrover_core.testing.log_conformance import CODEC, make_batch

TOKEN = 7
SENT = make_batch(TOKEN, 3, 9)
"""The batch that did not land: the third of leader 7, of event 9 alone."""


class _Etcd:
    """Nobody is asked."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: name


def why(leader: int, head: Head, stored: bytes = b"") -> tuple[Outcome | None, EtcdLeadership]:
    """What the leader of token 7 makes of this, and the leader."""

    async def story() -> tuple[Outcome | None, EtcdLeadership]:
        log: Any = SimpleNamespace(etcd=_Etcd(), codec=CODEC, parted=lambda _: None)
        now = asyncio.get_running_loop().time()
        lead = EtcdLeadership(log, Keys("/", "j"), "m", Won(TOKEN, 1, 8.0, now, Head(8, TOKEN, 2), 50))
        leaders = [SimpleNamespace(create_revision=leader)] if leader else []
        batches = [SimpleNamespace(value=stored)] if stored else []
        heads = [SimpleNamespace(value=head.packed(), mod_revision=60)]
        return lead._explain(SENT, [leaders, heads, batches]), lead

    return asyncio.run(story())


@pytest.mark.parametrize("leader", [TOKEN, 0, 12])
def test_a_batch_that_is_the_head_has_landed(leader: int) -> None:
    """Whoever leads by now, and where the batch's own key is gone or was not read: the head names it."""
    found, lead = why(leader, Head(9, TOKEN, 3))
    assert found == AlreadyAppended(9)
    assert lead.head == Head(9, TOKEN, 3)


@pytest.mark.parametrize(
    "head", [Head(9, TOKEN, 2), Head(9, 6, 3), Head(10, TOKEN, 4)], ids=["counter", "token", "sequence number"]
)
def test_a_head_that_differs_in_anything_is_another_batch(head: Head) -> None:
    """Its place is taken: that is a conflict, never taken for its own success."""
    found, lead = why(TOKEN, head)
    assert found == Conflict(8, head.seq)
    assert lead.head == head


def test_a_batch_under_its_key_has_landed() -> None:
    """Others followed it: the head is theirs, the key is still its own; a key of somebody else's batch is not."""
    assert why(12, Head(11, 12, 2), SENT.payload)[0] == AlreadyAppended(9)
    assert why(12, Head(11, 12, 2), make_batch(12, 1, 9).payload)[0] == Fenced(TOKEN, 12)
    assert why(12, Head(11, 12, 2), b"of a newer version")[0] == Fenced(TOKEN, 12)


def test_who_does_not_lead_is_fenced() -> None:
    """By the token of whoever leads; where nobody does, by the newest that is known."""
    assert why(12, Head(8, TOKEN, 2))[0] == Fenced(TOKEN, 12)
    assert why(0, Head(8, 11, 2))[0] == Fenced(TOKEN, 11)
    assert why(0, Head(8, 5, 2))[0] == Fenced(TOKEN, TOKEN)


def test_a_batch_that_would_land_now_is_sent_again() -> None:
    """An attempt of another process, cut short, moved nothing: the head is where the batch begins."""
    assert why(TOKEN, Head(8, TOKEN, 2))[0] is None

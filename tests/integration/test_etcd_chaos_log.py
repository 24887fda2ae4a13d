"""The etcd log under chaos, with a real etcd of three members: the stories of `tests/chaos/etcd_stories.py`, one fixed seed each.

Of stories of a kind one is told in ``make test``, and the others in ``make nightly``.
``python -m tools.campaign etcd_log`` tells them again and again with other seeds.
"""

from __future__ import annotations

import asyncio
import sys

import pytest
from tests.chaos.etcd_stories import STORIES, insist_on
from tools.etcd_cluster import Cluster

from dlrover_adapters.etcd.address import parse
from dlrover_adapters.etcd.client import Etcd
from dlrover_core.errors import LogUnavailable
from dlrover_core.testing import Proxy

SEED = 1
ALIKE = {
    "leader_killed": ("leader_stopped", "follower_killed", "follower_stopped", "two_killed", "all_restarted"),
    "partition_down": ("partition", "partition_up"),
    "zombie_before_the_first_word": ("zombie", "zombie_unheard", "zombie_deaf"),
}
"""Stories that stand in ``make test`` for others of the same kind."""


STANDING = {name: one for one, others in ALIKE.items() for name in others}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly(reason=f"{STANDING[name]} stands for it in make test"))
        if name in STANDING
        else name
        for name in STORIES
    ],
)
def test_story(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing acknowledged is lost, nothing is doubled, tokens never fall, followers are given exactly the log."""
    voids: list[str] = []
    try:
        told = insist_on(name, SEED, voids)
    finally:
        # etcd's own fault does not fail us; that it happened is said, and twice in succession it is time to look.
        with capsys.disabled():
            sys.stdout.writelines(f"\nvoid: {one}\n" for one in voids)
    assert told["batches"] > 0


def test_a_member_from_the_past_is_not_believed() -> None:
    """A member that was restored from an old copy answers well, and wrongly: it is found out by its raft term and left alone."""
    with Cluster() as etcd:
        etcd.put("key", "old")
        past = etcd.double()
        for _ in range(3):  # every start of the only member is an election
            etcd.kill(0)
            etcd.start(0)
            etcd.wait_healthy()
        etcd.put("key", "new")

        async def story() -> None:
            async with Proxy(past) as door:
                door.refuse()
                client = Etcd(parse(etcd.url(endpoints=[*etcd.endpoints, door.address])))
                try:
                    assert await _value(client) == b"new"
                    door.heal()
                    await asyncio.to_thread(etcd.kill, 0)
                    with pytest.raises(LogUnavailable):
                        await _value(client)
                    assert door.bytes_up > 0, "it was not even asked"
                    await asyncio.to_thread(etcd.start, 0)
                    await asyncio.to_thread(etcd.wait_healthy)
                    assert await _value(client) == b"new"
                    asked = door.bytes_up
                    for _ in range(50):
                        assert await _value(client) == b"new"
                    assert door.bytes_up == asked, "it is asked while there is a better one"
                finally:
                    await client.close()

        asyncio.run(asyncio.wait_for(story(), 60))


async def _value(client: Etcd) -> bytes:
    reply = await client.call("Range", client.range("key"), timeout_s=3.0)
    return bytes(reply.kvs[0].value)

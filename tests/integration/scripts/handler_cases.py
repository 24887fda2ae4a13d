"""A rendezvous handler in somebody's own hands: ``handler_cases.py CASE`` plays one case in this process, and ends with 0 if it

holds. Each handler is one node, in a thread of its own where it has to wait. No elastic agent takes part.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistStoreError, PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from dlrover_adapters.torch import rendezvous

UNHEARD_S, QUICK_S = 60.0, 50.0
"""What must not wait for a time-out of ours takes less than the shortest of these, which are long enough for a busy machine."""
WAIT_S = 180
"""For what comes as soon as a busy machine gets to it."""


class Nodes:
    """Handlers of one job."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        self._pool = ThreadPoolExecutor(8)
        self.made: list[Any] = []

    def handler(self, fewest: int = 2, most: int = 2, **conf: str) -> Any:
        """One more; the first has the masters."""
        conf = {"last_call_timeout": "1", "join_timeout": str(WAIT_S), "is_host": str(not self.made).lower(), **conf}
        local = conf.pop("local_addr", None)
        self.made.append(
            get_rendezvous_handler(
                RendezvousParameters("dlrover", self._endpoint, "by-hand", fewest, most, local_addr=local, **conf)
            )
        )
        return self.made[-1]

    def come(self, handler: Any) -> Future[Any]:
        """Have it wait for the next rendezvous."""
        return self._pool.submit(handler.next_rendezvous)

    def meet(self, *handlers: Any) -> list[Any]:
        """All of them at once."""
        return [one.result(WAIT_S) for one in [self.come(handler) for handler in handlers]]

    def end(self) -> None:
        """Shut all down."""
        for handler in reversed(self.made):
            handler.shutdown()
        self._pool.shutdown()


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Nothing is waited for."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < QUICK_S, f"it took {took:.1f} s"


def until(true: Callable[[], bool]) -> None:
    """Ask until it is so."""
    limit = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < limit, f"not so within {WAIT_S} s"
        time.sleep(0.05)


def meets(nodes: Nodes) -> None:
    """Both join, with different ranks and one store, which does what torch's stores do; asked four times in a row."""
    one, other = nodes.handler(local_addr="127.0.0.2"), nodes.handler(local_addr="127.0.0.3")
    assert (one.get_backend(), one.get_run_id()) == ("dlrover", "by-hand")
    assert one.use_agent_store
    found = nodes.meet(one, other)
    assert sorted(one.rank for one in found) == [0, 1]
    assert {one.world_size for one in found} == {2}
    first, second = (one.bootstrap_store_info for one in found)
    assert first == second
    assert first.master_addr == {0: "127.0.0.2", 1: "127.0.0.3"}[found[0].rank if found[0].rank == 0 else 1]
    here, there = (one.store for one in found)
    here.set("key", "value")
    assert there.get("key") == b"value"
    assert there.multi_get(["key", "key"]) == [b"value", b"value"]
    assert (here.add("count", 2), there.add("count", 3)) == (2, 5)
    assert there.compare_set("key", "value", "new") == b"new"
    assert here.delete_key("key")
    assert not there.check(["key"])
    PrefixStore("mine", here).set("key", "other")
    assert PrefixStore("mine", there.clone()).get("key") == b"other"
    with pytest.raises(DistStoreError):
        here.wait(["nobody"], timedelta(seconds=0.2))


def meets_again(nodes: Nodes) -> None:
    """Each comes for the next round as often as it likes; the other one sees that it waits, and joins it."""
    one, other = nodes.handler(), nodes.handler()
    nodes.meet(one, other)
    stores = set()
    for _ in range(3):
        assert other.num_nodes_waiting() == 0
        coming = nodes.come(one)
        until(lambda: other.num_nodes_waiting() > 0)
        found = [*nodes.meet(other), coming.result(WAIT_S)]
        assert sorted(each.rank for each in found) == [0, 1]
        stores.add(found[0].bootstrap_store_info.master_port)
    assert len(stores) == 3, "a fresh store each"


def too_few(nodes: Nodes) -> None:
    """With fewer than MIN the wait ends after ``join_timeout``."""
    with pytest.raises(RendezvousTimeoutError):
        nodes.handler(join_timeout="15").next_rendezvous()


def too_many(nodes: Nodes) -> None:
    """A node beyond MAX times out as well, and harms nobody; its `shutdown` does not close the job."""
    one, other = nodes.handler(), nodes.handler()
    nodes.meet(one, other)
    third = nodes.handler(join_timeout="5")
    with pytest.raises(RendezvousTimeoutError, match="had no place for this node within 5 s"):
        third.next_rendezvous()
    third.shutdown()
    assert not one.is_closed()


def reserve(nodes: Nodes) -> None:
    """A reserve takes the place of a node that goes."""
    one, other = nodes.handler(1, 2), nodes.handler(1, 2)
    nodes.meet(one, other)
    third = nodes.handler(1, 2, join_timeout="5", reserve="true")
    waiting = nodes.come(third)
    time.sleep(7)  # longer than it may wait for a place if it were none
    assert not waiting.done()
    nodes.made.remove(other)
    try:
        raise ValueError("it goes, and the others may go on")  # noqa: TRY301  # as it is under way when torch calls
    except ValueError:
        other.shutdown()
    until(lambda: one.num_nodes_waiting() > 0)
    coming = nodes.come(one)
    assert sorted([waiting.result(WAIT_S).rank, coming.result(WAIT_S).rank]) == [0, 1]


def closed(nodes: Nodes) -> None:
    """`set_closed` is seen by all when it returns; nobody meets again, and whoever waits is told."""
    one, other, third = nodes.handler(), nodes.handler(), nodes.handler(reserve="true")
    assert not one.is_closed()
    nodes.meet(one, other)
    waiting = nodes.come(third)
    until(lambda: third._line._placeless)  # a node that no master has heard of by then would hear of nothing
    other.set_closed()
    other.set_closed()
    with quickly():
        assert other.is_closed()
        assert one.is_closed()
        for handler in (one, other):
            with pytest.raises(RendezvousClosedError):
                handler.next_rendezvous()
        with pytest.raises(RendezvousClosedError):
            waiting.result(WAIT_S)


def closed_before(nodes: Nodes) -> None:
    """The same before anybody has come."""
    one, other = nodes.handler(), nodes.handler()
    other.set_closed()
    with quickly():
        assert other.is_closed()
        assert one.is_closed()
    with pytest.raises(RendezvousClosedError):
        one.next_rendezvous()


def shut_down(nodes: Nodes) -> None:
    """`shutdown` closes the job, says so, and waits for nothing; a second one does nothing."""
    one, other = nodes.handler(), nodes.handler()
    nodes.meet(one, other)
    with quickly():
        assert other.shutdown() is True
        assert one.is_closed()
    with pytest.raises(RendezvousClosedError):
        one.next_rendezvous()
    assert other.shutdown() is True
    with quickly():
        assert one.shutdown() is True


def nobody(nodes: Nodes) -> None:
    """Without a master: torch's error for it, and False."""
    alone = nodes.handler(is_host="false", join_timeout="3")
    with pytest.raises(RendezvousConnectionError, match="nobody answers"):
        alone.set_closed()
    with pytest.raises(RendezvousConnectionError, match="cannot be asked"):
        alone.is_closed()
    with pytest.raises(RendezvousConnectionError):
        alone.next_rendezvous()
    assert alone.shutdown() is False


def alone_again(nodes: Nodes) -> None:
    """A node that is the whole job comes as often as it likes, and waits for nobody."""
    alone, stores = nodes.handler(1, 1), set()
    for _ in range(4):
        with quickly():
            (found,) = nodes.meet(alone)
        assert (found.rank, found.world_size) == (0, 1)
        stores.add(found.bootstrap_store_info.master_port)
    assert len(stores) == 4, "a fresh store each"


def nowhere(nodes: Nodes) -> None:
    """Without a place to meet there is no handler for more than one node, and none for a port that cannot be."""
    for endpoint in ("", "localhost:0", "localhost:port", "localhost:65536"):
        with pytest.raises(ValueError, match=r"rdzv-endpoint"):
            get_rendezvous_handler(RendezvousParameters("dlrover", endpoint, "by-hand", 2, 2))


CASES = (alone_again, nowhere, meets, meets_again, too_few, too_many, reserve, closed, closed_before, shut_down, nobody)


def main() -> None:
    """Play the case, and leave nothing."""
    rendezvous.OVER_S = rendezvous.LEAVE_S = rendezvous.MASTERS_S = UNHEARD_S
    nodes = Nodes()
    {one.__name__: one for one in CASES}[sys.argv[1]](nodes)
    nodes.end()


if __name__ == "__main__":
    main()

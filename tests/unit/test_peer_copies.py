"""Copies on another node: which replace which, which stay, and what a saver that begins anew takes over."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import pytest
from saver_nodes import DATA_BYTES, LAYOUT, OURS, Home, Node, fetched, opened, same
from saver_nodes import node as node  # noqa: PLC0414 - the fixture is taken over

from dlrover_adapters.checkpoint.peers import (
    PeerRefused,
    Wanted,
    send,
)
from dlrover_core.checkpoint.arena import BLOCK_BYTES, PAGE, Control


def test_send_and_fetch_back(node: Callable[..., Node]) -> None:
    """A copy left with a partner is memory that the agent is told of, and comes back as it was when the node is gone."""
    home, partner = Home(1), node()
    view = home.save(7)
    sent = send(partner.address, view, OURS, generation=1)
    assert not sent.had
    assert sent.size > DATA_BYTES
    (copy,) = partner.made
    assert (copy.rank, copy.world, copy.layout) == (1, 2, LAYOUT)
    assert same(view, opened(copy.fd, close=False))
    assert same(view, fetched(partner, Wanted(1, 1, 7, LAYOUT)))


def test_newer_replaces_older_in_turn(node: Callable[..., Node]) -> None:
    """Two slots, taken in turn: the one before the newest stays, memory is made once, and what was there is not sent again."""
    home, partner = Home(), node()
    for step in (10, 20, 30):
        view = home.save(step)
        send(partner.address, view, OURS, generation=1)
    assert send(partner.address, view, OURS, generation=1).had
    (copy,) = partner.made
    control = Control(mmap.mmap(copy.fd, 0))
    assert sorted(stamp.step for _, stamp in control.stamps()) == [20, 30]
    assert send(partner.address, home.save(10), OURS, generation=1).there == {(1, 10), (1, 30)}


def test_an_older_step_is_taken_and_never_replaces_the_newest(node: Callable[..., Node]) -> None:
    """The others may have left the newest out. Of another world's workers nothing older is taken."""
    home, partner = Home(own=4096), node()
    for step in (10, 30):
        sent = send(partner.address, home.save(step), OURS, generation=1, light=True)
    assert sent.there == {(1, 10), (1, 30)}
    older = home.save(20)
    assert not send(partner.address, older, OURS, generation=1, light=True).had
    again = send(partner.address, older, OURS, generation=1, light=True)
    assert again.had
    assert again.there == {(1, 10), (1, 20), (1, 30)}
    send(partner.address, home.save(2, generation=2), OURS, generation=2, light=True)
    with pytest.raises(PeerRefused, match="older than what is here"):
        send(partner.address, home.save(40), OURS, generation=2, light=True)


@pytest.mark.parametrize("light", [False, True])
def test_a_step_that_was_saved_again_takes_the_place_of_its_first_copy(node: Callable[..., Node], light: bool) -> None:
    """The partner tells the two apart by their stamps, has one of them at a time, and keeps the step before."""
    home, partner = Home(own=4096), node()
    for step in (10, 20):
        send(partner.address, home.save(step), OURS, generation=1, light=light)
    view = home.save(20)
    assert not send(partner.address, view, OURS, generation=1, light=light).had
    (copy,) = partner.made
    control = Control(mmap.mmap(copy.fd, 0))
    assert sorted(stamp.step for _, stamp in control.stamps()) == [10, 20]
    got = fetched(partner, Wanted(0, 1, 20, LAYOUT))
    assert got.stamp.same(view.stamp)
    assert same(view, got) or light
    name = "rank.0.extra.t"
    mine, theirs = (next(item for item in one.table.items if item.name == name) for one in (view, got))
    assert bytes(view.raw(mine)) == bytes(got.raw(theirs))
    assert send(partner.address, view, OURS, generation=1, light=light).had


def test_a_first_copy_that_is_being_read_is_not_overwritten(node: Callable[..., Node]) -> None:
    """The second one is refused until then; no slot ever holds a mixture."""
    home, partner = Home(), node()
    first = home.save(20, slot=0)
    send(partner.address, first, OURS, generation=1)
    second = home.save(20, slot=1)
    with partner.server.copied(Wanted(0, 1, 20, LAYOUT)) as read:
        assert read is not None
        with pytest.raises(PeerRefused, match="being read"):
            send(partner.address, second, OURS, generation=1)
        assert same(first, read)
    send(partner.address, second, OURS, generation=1)
    assert same(second, fetched(partner, Wanted(0, 1, 20, LAYOUT)))


def test_a_second_copy_that_needs_other_memory_leaves_no_first_one(node: Callable[..., Node]) -> None:
    """Where the step's objects have outgrown their room, the first copy lies in other memory, and is let go."""
    home, partner = Home(), node()
    send(partner.address, home.save(20), OURS, generation=1)
    grown = Home(blob_room=8192)
    grown.sequence = home.sequence
    view = grown.save(20)
    assert not send(partner.address, view, OURS, generation=1).had
    assert len(partner.made) == 2
    assert not list(Control(mmap.mmap(partner.made[0].fd, 0)).stamps())
    assert same(view, fetched(partner, Wanted(0, 1, 20, LAYOUT)))


@pytest.mark.parametrize(("own", "live"), [(0, 0), (4096, 0), (4000, 33), (1000, BLOCK_BYTES + 100)])
def test_light(node: Callable[..., Node], own: int, live: int) -> None:
    """A light copy leaves out the tensors that are the same on every node, and says so in its table."""
    home, partner = Home(1, own=own, live=live), node()
    view = home.save(7)
    assert send(partner.address, view, OURS, generation=1, light=True).size < 16_384 + live
    (copy,) = partner.made
    assert copy.light
    got = fetched(partner, Wanted(1, 1, 7, LAYOUT))
    assert bytes(got.blob) == bytes(view.blob)
    got.verify()
    assert [one.name for one in got.table.elsewhere] == ["w"]
    assert [bytes(got.raw(one)) for one in got.table.items] == [bytes(view.raw(one)) for one in view.table.items[1:]]


def test_light_copies_of_many_steps(node: Callable[..., Node]) -> None:
    """Without tensors a copy is small, so the last steps are kept; a whole one takes their place."""
    home, partner = Home(1), node()
    for step in range(1, 13):
        send(partner.address, home.save(step), OURS, generation=1, light=True)
    (copy,) = partner.made
    control = Control(mmap.mmap(copy.fd, 0))
    assert sorted(stamp.step for _, stamp in control.stamps()) == list(range(5, 13))
    for step in (13, 14):
        send(partner.address, home.save(step), OURS, generation=1)
    assert [one.light for one in partner.server.copies()] == [False]


def test_what_is_to_be_kept_is_not_overwritten(node: Callable[..., Node]) -> None:
    """A step that all nodes have copied stays although a newer one was begun and given up, until the sender says otherwise."""
    home, partner = Home(), node()
    for step in (10, 20, 30):
        send(partner.address, home.save(step), OURS, generation=1, keep=(1, 10))
    (copy,) = partner.made
    control = Control(mmap.mmap(copy.fd, 0))
    assert sorted(stamp.step for _, stamp in control.stamps()) == [10, 30]
    send(partner.address, home.save(40), OURS, generation=1, keep=(1, 30))
    assert sorted(stamp.step for _, stamp in control.stamps()) == [30, 40]


def test_another_layout_takes_new_memory(node: Callable[..., Node]) -> None:
    """After a change of the world the old copies stay until two newer ones are there."""
    partner = node()
    send(partner.address, Home().save(10), OURS, generation=1)
    after = Home(layout=8, world=4)
    send(partner.address, after.save(11, generation=2), OURS, generation=2)
    assert [copy.layout for copy in partner.server.copies()] == [LAYOUT, 8]
    send(partner.address, after.save(12, generation=2), OURS, generation=2)
    assert [copy.layout for copy in partner.server.copies()] == [8]
    assert [copy.layout for copy in partner.gone] == [LAYOUT]


def test_forget(node: Callable[..., Node]) -> None:
    """The agent can let copies go."""
    partner = node()
    send(partner.address, Home().save(10), OURS, generation=1)
    partner.server.forget(lambda copy: copy.rank == 0)
    assert not partner.server.copies()
    with pytest.raises(PeerRefused, match="has no step 10"):
        fetched(partner, Wanted(0, 1, 10, LAYOUT))


def test_adopted(node: Callable[..., Node]) -> None:
    """A saver that took over from one that died serves its copies, and goes on with them; what is no arena is left out."""
    home, dead, partner = Home(), node(), node()
    view = home.save(10)
    send(dead.address, view, OURS, generation=1)
    (copy,) = dead.made
    fd = os.dup(copy.fd)
    dead.server.stop()
    none = os.memfd_create("none")
    os.ftruncate(none, PAGE)
    partner.server.adopt([copy._replace(fd=fd), copy._replace(fd=none)])
    os.close(fd)
    os.close(none)
    assert same(view, fetched(partner, Wanted(0, 1, 10, LAYOUT)))
    send(partner.address, home.save(11), OURS, generation=1)
    assert not partner.made
    with partner.server.copied(Wanted(0, 1, 11, LAYOUT)) as found:
        assert found is not None

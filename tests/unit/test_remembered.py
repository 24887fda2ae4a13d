"""States that torch's planner dealt out, found in the memory of nodes by all ranks together."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.unit.restoring import Arena, FakeNode, Live, World, bits, fsdp, sharded, state

from dlrover_adapters.torch.checkpoint.meeting import Meeting
from dlrover_adapters.torch.checkpoint.remembered import Remembered, recalled
from dlrover_adapters.torch.checkpoint.vault import REPLICA, Fetched, VaultGone


class Node(FakeNode):
    """As `Vault`, with what only hooks ask for."""

    nproc, gone = 1, ""

    def borrow(self, holding: int) -> int:
        """As `Vault`."""
        if self.gone:
            raise VaultGone(self.gone)
        return super().borrow(holding)

    def fetch(self, address: str, rank: int, generation: int, step: int, layout: int) -> Fetched:
        """As `Vault`."""
        if self.gone:
            raise VaultGone(self.gone)
        return super().fetch(address, rank, generation, step, layout)

    def head(self, address: str, rank: int, generation: int, step: int, layout: int) -> Fetched:
        """As `Vault`."""
        if self.gone:
            raise VaultGone(self.gone)
        return super().head(address, rank, generation, step, layout)

    def close(self) -> None:
        """The line."""
        self.gone = "closed"


class Fading(Node):
    """An agent that stops to answer after it has said what it holds."""

    def borrow(self, holding: int) -> int:
        """In vain."""
        self.gone = f"no answer to 'borrow' of {holding} within 10 s"
        raise VaultGone(self.gone)


class Deaf(Node):
    """An agent that does not answer."""

    def inventory(self) -> Any:
        """Never."""
        raise VaultGone("no answer to 'inventory' within 10 s")


@pytest.fixture
def pair() -> list[Node]:
    """Two nodes of one rank each; both have both ranks' steps 9 and 10, their own and a copy."""
    cluster: dict[str, FakeNode] = {}
    nodes = [Node(cluster), Node(cluster)]
    for rank, arena in enumerate(fsdp(list(nodes), 2, 9, 10)):
        copy = nodes[1 - rank].has(Arena(rank, 2, 1, arena.shares, ((0,), (1,))), REPLICA)
        copy.save(9, slot=0)
        copy.save(10, slot=1)
    return nodes


def found(nodes: list[Any], step: int | None = None) -> list[tuple[int, Any]]:
    """The step that every rank recalls, and the first part of ``model.w`` as it reads it; step -1: none."""
    for node in nodes:
        node.gone = ""  # workers have a line of their own each time

    def one(rank: int, meeting: Meeting) -> tuple[int, Any]:
        state = recalled(nodes[rank], step, None, meeting)
        if state is None:
            return -1, None
        try:
            return state.step, bits(_first(state))
        finally:
            state.close()

    return World(nodes, [Live(rank, sharded(rank, 2)) for rank in range(2)]).together(one)


def _first(remembered: Remembered) -> Any:
    remembered.metadata()
    return remembered.chunk("model.w", (0, 0)).clone()


def part(step: int) -> Any:
    """What ``model.w`` begins with, as rank 0 has it."""
    share = next(one for one in sharded(0, 2) if one.name == "model.w")
    return bits(state(step)["model.w"][: share.shape[0]])


def test_the_newest(pair: list[Node]) -> None:
    """Without a fault, and by its number."""
    assert [step for step, _ in found(list(pair))] == [10, 10]
    assert [step for step, _ in found(list(pair), 9)] == [9, 9]


def test_tables_do_not_come_through_the_store(pair: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """The store takes what anybody writes: of what other nodes have, the tables come from their savers."""
    posted: list[bytes] = []
    post = Meeting.post
    monkeypatch.setattr(Meeting, "post", lambda self, name, value: (posted.append(value), post(self, name, value)))
    new = Node(pair[0].others)
    assert [step for step, _ in found([pair[0], new])] == [10, 10]
    assert (pair[0].heads, new.heads) == ([], [0])
    assert posted
    assert not [one for one in posted if b"model.w" in one]


def test_a_table_that_does_not_come_is_told(pair: list[Node], caplog: pytest.LogCaptureFixture) -> None:
    """What one rank cannot plan with, no rank uses."""
    new = Node(pair[0].others)
    monkey = new.head

    def head(address: str, rank: int, generation: int, step: int, layout: int) -> Fetched:
        if step == 10:
            raise VaultGone("its table or its objects were changed on the way")
        return monkey(address, rank, generation, step, layout)

    new.head = head  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        assert [step for step, _ in found([pair[0], new])] == [9, 9]
    assert "step 10 in memory is passed over, rank 1 says: the table of rank 0: VaultGone: its table or" in caplog.text


@pytest.mark.parametrize("which", ["own", "copy"])
def test_a_damaged_copy_is_used_by_nobody(pair: list[Node], which: str, caplog: pytest.LogCaptureFixture) -> None:
    """One of two copies of a rank's part is damaged: told, and the other one read by all."""
    _, arena = pair[0 if which == "own" else 1].arenas[1 if which == "own" else 2]
    assert arena.rank == 0
    arena.damage(slot=1)
    with caplog.at_level(logging.WARNING):
        assert [(step, (read == part(10)).all()) for step, read in found(list(pair))] == [(10, True)] * 2
    assert "step 10 of rank 0 in the memory of" in caplog.text


def test_the_state_before_is_taken_where_no_copy_is_whole(pair: list[Node]) -> None:
    """Both copies of a part are damaged."""
    pair[0].arenas[1][1].damage(slot=1)
    pair[1].arenas[2][1].damage(slot=1)
    assert [(step, (read == part(9)).all()) for step, read in found(list(pair))] == [(9, True)] * 2


def test_what_a_rank_needs_of_others_is_brought_before_all_agree(
    pair: list[Node], caplog: pytest.LogCaptureFixture
) -> None:
    """A node that came anew has nothing: it fetches its rank's part at once. Can it not, storage is for all to read."""
    new = Node(pair[0].others)
    assert [step for step, _ in found([pair[0], new])] == [10, 10]
    assert new.fetched[0] == 1
    pair[0].down = pair[1].down = True
    with caplog.at_level(logging.WARNING):
        assert found([pair[0], new]) == [(-1, None)] * 2
    assert (
        "step 10 in memory is passed over, rank 1 says: the part of rank 1: VaultRefused: nobody answers" in caplog.text
    )


def test_an_agent_that_does_not_answer_is_told(pair: list[Node], caplog: pytest.LogCaptureFixture) -> None:
    """Its rank could read nothing from others either: storage, for all, and loudly."""
    with caplog.at_level(logging.WARNING):
        assert found([pair[0], Deaf({})]) == [(-1, None)] * 2
    assert "memory is passed over, rank 1 says: its agent does not say what it holds: no answer" in caplog.text


def test_a_line_that_ends_meanwhile_is_no_damage(pair: list[Node], caplog: pytest.LogCaptureFixture) -> None:
    """Every part is there twice, but one rank could read none of them: storage, for all."""
    fading = Fading(pair[1].others)
    fading.arenas = pair[1].arenas
    with caplog.at_level(logging.WARNING):
        assert found([pair[0], fading]) == [(-1, None)] * 2
    assert "without a line to the agents of ranks {1: \"no answer to 'borrow'" in caplog.text

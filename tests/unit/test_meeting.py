"""How ranks talk about checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

torch_store = pytest.importorskip("torch._C._distributed_c10d")

from dlrover_adapters.torch.checkpoint.meeting import CHUNK_BYTES, Meeting, MeetingFailed  # noqa: E402

LIMIT_S = 20.0


@pytest.fixture
def port() -> Iterator[int]:
    """A store that listens."""
    server = torch_store.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port
    del server


def client(port: int) -> Any:
    """Of the store that listens there."""
    return torch_store.TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S)
    )


def meet(port: int, world: int, does: Callable[[Meeting], Any], limit_s: float = LIMIT_S) -> list[Any]:
    """What each rank got; an error is what it got, too."""

    def one(rank: int) -> Any:
        meeting = Meeting(client(port), rank, world, limit_s=limit_s)
        try:
            return does(meeting)
        except MeetingFailed as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def test_all_gather_and_share(port: int) -> None:
    """Everybody gets what everybody said, by rank, and what rank 0 said; again and again under one name."""

    def does(meeting: Meeting) -> Any:
        told = [meeting.all_gather("told", b"%d of round %d" % (meeting.rank, number)) for number in range(3)]
        return told, meeting.share("plan", b"the plan" if meeting.rank == 0 else None)

    for told, plan in meet(port, 3, does):
        assert told == [[b"%d of round %d" % (rank, number) for rank in range(3)] for number in range(3)]
        assert plan == b"the plan"


def test_large_values(port: int) -> None:
    """A value larger than what the store takes in one request arrives as it was."""
    large = bytes(range(256)) * (2 * CHUNK_BYTES // 256) + b"the end"
    assert meet(port, 2, lambda meeting: meeting.all_gather("large", large if meeting.rank else b"")[1]) == [large] * 2


def test_decide(port: int) -> None:
    """Rank 0 alone makes something of what was said; all get the same."""
    assert meet(port, 3, lambda meeting: meeting.decide("sum", bytes([meeting.rank]), b"".join)) == [b"\0\1\2"] * 3


def test_an_error_of_the_decision_is_everybodys(port: int) -> None:
    """Where rank 0 cannot decide, the others learn why at once instead of waiting."""

    def how(told: list[bytes]) -> bytes:
        raise MeetingFailed("there is nothing to decide")

    zero, one = meet(port, 2, lambda meeting: meeting.decide("plan", b"", how))
    assert "there is nothing to decide" in str(zero)
    assert "there is nothing to decide" in str(one)


def test_a_decision_may_have_a_bound_of_its_own(port: int) -> None:
    """Where ranks have much to read before it, more is waited for than elsewhere; here, less."""
    came = meet(
        port,
        2,
        lambda meeting: None if meeting.rank else meeting.decide("read", b"", b"".join, limit_s=0.5),
        limit_s=60,
    )
    assert isinstance(came[0], MeetingFailed)
    assert "rank 1 of 2 did not come within 0.5 s" in str(came[0])


def test_who_does_not_come_is_named(port: int) -> None:
    """Everybody who came learns which ranks did not."""
    came = meet(
        port, 4, lambda meeting: None if meeting.rank in {1, 3} else meeting.all_gather("told", b""), limit_s=0.5
    )
    for error in (came[0], came[2]):
        assert isinstance(error, MeetingFailed)
        assert error.missing == (1, 3)
        assert "ranks 1, 3 of 4 did not come within 0.5 s" in str(error)


def test_rank_0_does_not_come(port: int) -> None:
    """Without rank 0 there is an end too, and its absence is what is told."""
    came = meet(port, 2, lambda meeting: meeting.all_gather("told", b"") if meeting.rank else None, limit_s=0.25)
    assert came[1].missing == (0,)


def test_post_and_look(port: int) -> None:
    """A look finds what was posted, and nothing before; it does not wait."""
    posted = threading.Event()

    def does(meeting: Meeting) -> Any:
        if meeting.rank == 0:
            before = meeting.look("boundary")
            meeting.share("looked", b"")
            assert posted.wait(LIMIT_S)
            return before, meeting.look("boundary")
        meeting.share("looked", None)
        meeting.post("boundary", b"120")
        posted.set()
        return None

    assert meet(port, 2, does)[0] == (None, b"120")


def test_a_second_meeting_is_another_one(port: int) -> None:
    """What was said in a process's first meeting is not heard in its second."""

    def does(_: Meeting, told: bytes) -> None:
        _.post("boundary", told)

    meet(port, 2, lambda meeting: does(meeting, b"1"))
    assert meet(port, 2, lambda meeting: meeting.look("boundary")) == [None, None]


def test_the_store_does_not_fill(port: int) -> None:
    """Rounds leave nothing behind but the last one's outcome."""

    def keys(rounds: int) -> int:
        meet(port, 2, lambda meeting: [meeting.all_gather("told", b"x" * 100) for _ in range(rounds)])
        return int(client(port).num_keys())

    first = keys(3)
    assert keys(30) - first <= first


def test_the_store_is_gone(port: int) -> None:
    """A store that does not answer is an error of ours, with the place where it happened."""

    class Gone(torch_store.Store):  # type: ignore[misc,name-defined]
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(MeetingFailed, match="does not answer: Connection reset by peer"):
        Meeting(Gone(), 0, 2)


def test_alone() -> None:
    """A world of one needs no store."""
    meeting = Meeting(None, 0, 1)
    assert meeting.all_gather("told", b"me") == [b"me"]
    assert meeting.share("plan", b"mine") == b"mine"
    assert meeting.look("boundary") is None
    meeting.post("boundary", b"1")
    assert meeting.look("boundary") == b"1"


def test_environment(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun tells a rank is enough to meet; without it the error says what to do."""
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Meeting.of_environment().world == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeetingFailed, match="start it with dlrover-run"):
        Meeting.of_environment()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    meeting = Meeting.of_environment(limit_s=LIMIT_S)
    assert (meeting.rank, meeting.world, meeting.local_rank) == (1, 2, 1)


# ---- one outcome for each


def test_assign(port: int) -> None:
    """Rank 0 hears who speaks, and says one thing to all and another to each; nothing of it stays in the store but that one."""

    def how(said: dict[int, bytes]) -> tuple[bytes, list[bytes]]:
        assert said == {0: b"0", 2: b"2"}
        return b"all", [b"for %d" % rank for rank in range(3)]

    def does(meeting: Meeting) -> Any:
        return [meeting.assign("parts", b"%d" % meeting.rank, how, (0, 2)) for _ in range(10)]

    assert meet(port, 3, does) == [[(b"all", b"for %d" % rank)] * 10 for rank in range(3)]
    left = client(port).list_keys()
    assert not [one for one in left if "parts/" in one and not one.endswith("decided")]


def test_assign_large_values(port: int) -> None:
    """More than one request takes, in both directions, and many small ones."""
    large = b"x" * (2 * CHUNK_BYTES + 7)

    def how(said: dict[int, bytes]) -> tuple[bytes, list[bytes]]:
        assert said[1] == large
        return large, [b"", large, b"small"]

    zero, one, two = meet(port, 3, lambda meeting: meeting.assign("large", large, how, (1,)))
    assert (zero, one, two) == ((large, b""), (large, large), (large, b"small"))


def test_assign_alone() -> None:
    """A world of one needs no store."""
    assert Meeting(None, 0, 1).assign("parts", b"me", lambda said: (b"all", [said[0]]), (0,)) == (b"all", b"me")


@pytest.mark.parametrize("fails", [0, 2])
def test_who_cannot_come_says_so(port: int, fails: int) -> None:
    """Nobody waits for a rank that has failed before it came: all hear whom and why, and its own error goes on."""

    def does(meeting: Meeting) -> Any:
        try:
            with meeting.refusing("told"):
                mine = b"%d" % (1 // (meeting.rank - fails))
            return meeting.all_gather("told", mine)
        except ZeroDivisionError as error:
            return error

    came = meet(port, 3, does)
    assert isinstance(came.pop(fails), ZeroDivisionError)
    for error in came:
        assert isinstance(error, MeetingFailed)
        assert f"rank {fails}: ZeroDivisionError: integer division or modulo by zero" in str(error)


def test_values_are_not_read_again_to_be_deleted(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value is read once by rank 0."""
    read: list[str] = []
    whole = Meeting._whole

    def counted(meeting: Meeting, key: str, first: bytes) -> bytes:
        read.append(f"{meeting.rank} {key}")
        return whole(meeting, key, first)

    monkeypatch.setattr(Meeting, "_whole", counted)
    meet(port, 3, lambda meeting: [meeting.all_gather("told", b"x") for _ in range(3)])
    assert len(read) == len(set(read)) == 3 * (2 + 2)


def test_rank_0_makes_few_requests(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its round trips do not grow with the ranks: it reads many values at once, and each rank deletes its own."""
    asked: dict[int, int] = {}
    real = Meeting._asked

    def counted(meeting: Meeting, name: str, call: Callable[[], Any]) -> Any:
        asked[meeting.rank] = asked.get(meeting.rank, 0) + 1
        return real(meeting, name, call)

    monkeypatch.setattr(Meeting, "_asked", counted)
    meet(port, 12, lambda meeting: meeting.all_gather("told", b"x"))
    assert asked[0] <= 4

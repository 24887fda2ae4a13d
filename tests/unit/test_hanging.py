"""Who is named, by what was seen of all ranks."""

from __future__ import annotations

import random

import pytest

from dlrover_core.diagnosis import hanging
from dlrover_core.diagnosis.flight import Newest
from dlrover_core.diagnosis.hanging import Facts, Named
from dlrover_core.diagnosis.stacks import Frame

TRAIN = Frame("/job/train.py", 42, "step")
OTHER = Frame("/job/data.py", 7, "read")
REDUCE = Frame("/venv/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce")
DONE, DOING = Newest("0", 8, "all_reduce", "[[1]]", False), Newest("0", 9, "all_reduce", "[[1]]", True)


def waits(rank: int, *, recorded: bool = False) -> Facts:
    """A rank in a collective."""
    return Facts(rank, "S", stack=(REDUCE, TRAIN), gil="free", recorded=recorded, groups=(DOING,) if recorded else ())


def judged(*facts: Facts, ranks: int = 0) -> Named:
    """The verdict on a world of so many ranks."""
    return hanging.name({one.rank: one for one in facts}, range(ranks or len(facts)))


@pytest.mark.parametrize(
    ("guilty", "signature", "rule"),
    [
        (Facts(1, "T"), "hang.stopped", "its process is stopped"),
        (
            Facts(1, "S", stack=(TRAIN,), recorded=True, groups=(DONE,)),
            "hang.rank",
            "it lags behind in the flight recorder",
        ),
        (Facts(1, "S", stack=(TRAIN,), gil="held"), "hang.rank", "it holds Python's lock (GIL)"),
        (Facts(1, "S", stack=(TRAIN,), gil="free"), "hang.rank", "its stack is in no collective, others' are"),
        (
            Facts(1, "S", stack=(REDUCE, TRAIN), recorded=True, groups=(Newest("0", 9, "barrier", "", True),)),
            "hang.rank",
            "it called another collective",
        ),
        (Facts(1, "D"), "hang.rank", "it is in an uninterruptible sleep"),
    ],
)
def test_the_one_that_differs_is_named(guilty: Facts, signature: str, rule: str) -> None:
    """Stopped, lagging, with Python's lock, not in the collective, in another one, or in D: each tells the rank."""
    named = judged(waits(0, recorded=True), guilty, waits(2, recorded=True), waits(3, recorded=True))
    assert (named.rank, named.ranks, named.signature, named.rule) == (1, (1,), signature, rule)
    assert named.others == "all_reduce"


def test_who_could_not_be_looked_at_is_named() -> None:
    """An agent that does not answer, where all who do only wait."""
    named = judged(waits(0), waits(1), ranks=4)
    assert (named.ranks, named.rule) == ((2, 3), "nobody could look at it")


def test_the_odd_stack_is_named() -> None:
    """Nobody is in a collective that could be recognised, and one stack is unlike the others."""
    same = [Facts(rank, "S", stack=(TRAIN,)) for rank in range(3)]
    assert judged(*same, Facts(3, "S", stack=(OTHER, TRAIN))).ranks == (3,)


def test_what_all_show_nobody_is_guilty_of() -> None:
    """All in the same collective, or all in the same line of the program: nobody can be named, and that is said."""
    for all_alike in ([waits(rank) for rank in range(4)], [Facts(rank, "S", stack=(TRAIN,)) for rank in range(4)]):
        named = judged(*all_alike)
        assert (named.signature, named.rank, named.ranks) == ("hang.global", -1, ())


def test_two_ranks_in_different_collectives_are_told_as_that() -> None:
    """Of two that disagree neither is in the right."""
    other = Facts(1, "S", stack=(REDUCE, TRAIN), recorded=True, groups=(Newest("0", 9, "barrier", "", True),))
    named = judged(waits(0, recorded=True), other)
    assert (named.rank, named.rule) == (-1, "ranks called different collectives: all_reduce and barrier")


def test_a_lone_rank_is_the_one() -> None:
    """Where there is nobody else, nobody else can be guilty."""
    assert judged(Facts(0, "S", stack=(TRAIN,))).rank == 0


def test_a_slow_witness_of_one_that_waits_is_no_lock() -> None:
    """In a collective Python's lock is free: whoever is there and does not answer is only late."""
    late = waits(0)._replace(gil="held")
    assert judged(late, Facts(1, "S", stack=(TRAIN,), gil="free"), waits(2)).ranks == (1,)


def test_whoever_works_is_busy_and_a_stopped_one_is_not() -> None:
    """Rank 0 may evaluate while others wait; what is stopped or has the lock does not work, whatever its clock says."""
    busy = Facts(0, "R", stack=(TRAIN,), gil="free", busy=True)
    assert judged(busy, waits(1)).busy
    assert not judged(busy._replace(gil="held"), waits(1)).busy
    assert not judged(busy._replace(state="T"), waits(1)).busy
    assert not judged(busy._replace(busy=False), waits(1)._replace(busy=True)).busy
    assert judged(busy, busy._replace(rank=1)).busy


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_answers_means_nothing(seed: int) -> None:
    """Whoever answers first, the verdict is the same."""
    dice = random.Random(seed)
    facts = [waits(rank) for rank in range(8)]
    guilty = dice.randrange(8)
    facts[guilty] = Facts(guilty, "S", stack=(TRAIN,), gil=dice.choice(["", "free", "held"]))
    shuffled = dice.sample(facts, len(facts))
    assert hanging.name({one.rank: one for one in shuffled}, range(8)) == judged(*facts)
    assert judged(*facts).rank == guilty


def test_facts_travel_whole_and_bounded() -> None:
    """What an agent writes its leader reads; however deep a stack, it fits; what is no facts is none."""
    facts = Facts(3, "S", "futex", 61, "free", True, (TRAIN, OTHER), "time.sleep(9)", True, (DONE, DOING))
    assert hanging.from_text(hanging.to_text(facts)) == facts
    deep = facts._replace(stack=tuple(Frame("/a" * 900, 1, "b" * 900) for _ in range(99)))
    text = hanging.to_text(deep)
    assert len(text.encode()) <= hanging.FACTS_BYTES_MAX
    cut = hanging.from_text(text)
    assert cut is not None
    assert cut.stack
    for foreign in (
        "",
        "{}",
        "[]",
        "3",
        '{"rank": "x", "stack": [], "groups": []}',
        text[:-9],
        text.replace("true", '"x"'),
    ):
        assert hanging.from_text(foreign) is None


def test_the_sentence_says_it_all() -> None:
    """Who, where, for how long, by what, what the others do, and where to read on."""
    facts = Facts(3, "S", stack=(TRAIN,), source="time.sleep(60)", gil="free")
    named = judged(waits(0), waits(1), waits(2), facts)
    assert hanging.sentence(named, "worker-1-0", facts, 61_000_000, "/state/hang-1.txt") == (
        "rank 3 hangs on worker-1 in step (train.py:42: time.sleep(60)), 61 s without a step: "
        "its stack is in no collective, others' are; the others wait in all_reduce; stacks: /state/hang-1.txt"
    )
    stopped = Facts(1, "T", "do_signal_stop")
    named = judged(waits(0), stopped, waits(2))
    assert hanging.sentence(named, "worker-0-0", stopped, 61_000_000, "") == (
        "rank 1 hangs on worker-0 in the kernel (do_signal_stop), 61 s without a step: its process is stopped; "
        "the others wait in all_reduce"
    )
    nobody = judged(waits(0), waits(1))
    assert hanging.sentence(nobody, "worker-0-0", None, 61_000_000, "") == (
        "the job hangs, 61 s without a step: no rank stands out; ranks wait in all_reduce"
    )

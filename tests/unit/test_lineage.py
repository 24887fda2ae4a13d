"""The lineage of a model's state: which states are in it, and which cuts do not go together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover_core.data.cut import Place, pack
from dlrover_core.job.lineage import KNOWN_MAX, UNKNOWN, Known, Lineage, place_of, readable, samples


def cut(position: int, epoch: int = 0, source: str = "") -> bytes:
    """The cut of one dataset."""
    return pack((Place("train", epoch, position, source),))


def lineage() -> Lineage:
    """Generation 1 began anew, and made the steps 10, 20 and 30 of 4 samples each."""
    made = Lineage()
    assert made.resume(1, UNKNOWN, b"", 0)
    for step in (10, 20, 30):
        made.learn(1, step, cut(4 * step), step)
    return made


def states(one: Lineage) -> list[tuple[int, int]]:
    """The states that are known."""
    return [known.state for known in one.known]


def test_it_grows_with_what_is_told() -> None:
    """The newest cut is that of the newest state, in whatever order they come; a state is known once."""
    made = lineage()
    made.learn(1, 25, cut(100), 40)
    made.learn(1, 25, cut(104), 41)
    made.learn(1, 40, b"", 41)
    assert states(made) == [(1, 10), (1, 20), (1, 25), (1, 30)]
    assert made.find(1, 25) == Known(1, 25, cut(100), 40)
    assert place_of(made.newest, "train") == Place("train", 0, 120)
    assert place_of(made.newest, "other") is None
    assert list(made.check()) == []


def test_a_restore_ends_what_came_after_its_state() -> None:
    """Of the generations before, states up to the one resumed from stay; late news of others change nothing."""
    made = lineage()
    assert made.resume(2, (1, 20), cut(80), 50)
    assert not made.resume(2, (1, 30), cut(120), 51), "the first word counts"
    assert states(made) == [(1, 10), (1, 20)]
    made.learn(1, 30, cut(120), 52)
    made.learn(2, 22, cut(88), 53)
    assert made.resume(3, (2, 22), cut(88), 60)
    made.learn(2, 24, cut(96), 61)
    made.learn(1, 15, cut(60), 62)
    assert states(made) == [(1, 10), (1, 15), (1, 20), (2, 22)]
    assert not made.resume(1, UNKNOWN, b"", 70), "older generations have no say"
    assert made.resume(4, UNKNOWN, b"", 80)
    assert (states(made), made.newest) == ([], ())
    assert list(made.check()) == []


def test_a_state_of_another_branch_may_be_resumed() -> None:
    """A node that had been away still holds it: it is the lineage now."""
    made = lineage()
    made.resume(2, (1, 10), cut(40), 50)
    made.resume(3, (1, 30), cut(120), 60)
    assert states(made) == [(1, 10), (1, 30)]
    assert list(made.clashes(1, 30, cut(120), 60)) == []


def test_older_agents_name_the_step_alone() -> None:
    """The newest generation that has that step is meant."""
    made = lineage()
    made.resume(2, (1, 20), cut(80), 50)
    made.resume(3, (0, 20), b"", 60)
    assert made.bases[3] == (1, 20)


def test_news_of_a_generation_before_its_restore() -> None:
    """A heartbeat may come before the report of how the generation began."""
    made = lineage()
    made.learn(2, 24, cut(96), 50)
    assert states(made) == [(1, 10), (1, 20), (1, 30), (2, 24)]
    assert list(made.check()) == []
    assert made.resume(2, (1, 20), cut(80), 51)
    assert states(made) == [(1, 10), (1, 20), (2, 24)]


@pytest.mark.parametrize(
    ("state", "told", "known", "word"),
    [
        ((1, 20), 84, (1, 20), "the same state of generation 1: dataset 'train': position is 84 here, 80 there"),
        ((1, 25), 70, (1, 20), "step 20 of generation 1: dataset 'train': position is 70 here, 80 there"),
        ((1, 25), 130, (1, 30), "step 30 of generation 1"),
        ((1, 35), 80, (1, 30), "step 30 of generation 1"),
    ],
)
def test_clashes_are_named(state: tuple[int, int], told: int, known: tuple[int, int], word: str) -> None:
    """A state with other samples than it had, with fewer than one before, with more than one after."""
    made = lineage()
    made.learn(*state, cut(told), 90)
    (clash,) = made.clashes(*state, cut(told), 90)
    assert (clash.told.state, clash.known.state) == (state, known)
    assert word in clash.why


OLD, NEW = "size=100 seed=7 order=shuffled source=a", "size=150 seed=7 order=shuffled source=b"
ADDED = pack((Place("train", 2, 0, OLD), Place("val", 0, 0, "size=3")))
BEGUN = pack((Place("train", 2, 0, OLD), Place("val", 0, 2, "size=3")))


@pytest.mark.parametrize(
    ("known", "told", "word"),
    [
        (cut(0, 2, OLD), cut(0, 2, NEW), ""),
        (cut(0, 2, NEW), cut(0, 2, OLD), ""),
        (cut(0, 2, OLD), ADDED, ""),
        (ADDED, cut(0, 2, OLD), ""),
        (cut(0, 2, OLD), pack((Place("train", 2, 0, NEW), Place("val", 0, 0, "size=3"))), ""),
        (cut(8, 2, OLD), cut(8, 2, NEW), "fingerprint is 'size=150"),
        (cut(0, 2, OLD), cut(0, 2, NEW.replace("seed=7", "seed=8")), "fingerprint is 'size=150"),
        (cut(0, 2, OLD), cut(0, 2, OLD.replace("source=a", "source=b")), "fingerprint is 'size=100"),
        (cut(0, 2, OLD), cut(0, 3, NEW), "epoch is 3 here, 2 there"),
        (cut(0, 2, OLD), BEGUN, ""),
        (BEGUN, cut(0, 2, OLD), "dataset 'val': there, not here"),
    ],
    ids=[
        "grown",
        "grown-late",
        "added",
        "added-late",
        "both",
        "grown-within",
        "seed",
        "content",
        "epoch",
        "added-begun",
        "lost",
    ],
)
def test_cuts_of_one_state_are_compared_by_the_samples_they_consumed(known: bytes, told: bytes, word: str) -> None:
    """A source that grew before an epoch began, or a dataset that was added at its beginning, consumes nothing else."""
    made = Lineage()
    made.resume(1, UNKNOWN, b"", 0)
    made.learn(1, 10, known, 10)
    made.resume(2, (1, 10), told, 20)
    found = [clash.why for clash in made.clashes(1, 10, told, 20, resumed=True)]
    assert len(found) == bool(word)
    assert word in "".join(found)


def test_the_makers_word_may_come_after_that_of_ranks_that_resumed() -> None:
    """A dataset that they have added is no fault then, and one that they have lost is; makers agree in all."""
    for resumed, told, clashes in ((BEGUN, cut(0, 2, OLD), 0), (cut(0, 2, OLD), BEGUN, 1)):
        made = Lineage()
        made.resume(1, UNKNOWN, b"", 0)
        made.resume(2, (1, 10), resumed, 20)
        assert len(list(made.clashes(1, 10, told, 30))) == clashes
        made = Lineage()
        made.resume(1, UNKNOWN, b"", 0)
        made.learn(1, 10, resumed, 10)
        assert len(list(made.clashes(1, 10, told, 30))) == 1


def test_what_is_off_the_lineage_clashes_with_nothing() -> None:
    """It is of no use to anybody."""
    made = lineage()
    made.resume(2, (1, 10), cut(40), 50)
    assert list(made.clashes(1, 30, cut(1), 60)) == []
    assert list(made.clashes(2, 12, b"", 60)) == []


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30)), max_size=80))
def test_honest_histories_never_clash(moves: list[tuple[bool, int]]) -> None:
    """Whatever is restored and saved: where cuts tell what was consumed, all go together, and the invariants hold."""
    made, generation, step = Lineage(), 1, 0
    made.resume(1, UNKNOWN, b"", 0)
    for at, (rolls, many) in enumerate(moves):
        if rolls:
            of, base = made.known[-min(many, len(made.known))].state if made.known else UNKNOWN
            generation, step = generation + 1, base
            packed = cut(4 * base) if of else b""
            assert made.resume(generation, (of, base), packed, at)
            assert list(made.clashes(of, base, packed, at)) == []
        else:
            step += many
            made.learn(generation, step, cut(4 * step), at)
            assert list(made.clashes(generation, step, cut(4 * step), at)) == []
        assert list(made.check()) == []


def test_it_is_bounded() -> None:
    """Nobody goes back that far."""
    made = Lineage()
    for generation in range(1, 3 * KNOWN_MAX):
        made.resume(generation, (generation - 1, generation - 1) if generation > 1 else UNKNOWN, cut(generation - 1), 1)
        made.learn(generation, generation, cut(generation), generation)
    assert len(made.known) == len(made.bases) == KNOWN_MAX
    assert list(made.check()) == []


def test_broken_lineages_are_named() -> None:
    """`check` finds what it is meant to find."""
    made = lineage()
    made.known.append(Known(1, 5, cut(20), 1))
    assert "path: K" in "".join(made.check())
    made = lineage()
    made.bases[1] = (2, 9)
    assert "base: " in "".join(made.check())


def test_samples_between_two_places() -> None:
    """Over the ends of epochs; never less than none."""
    assert samples(100, None, Place("a", 0, 30)) == 30
    assert samples(100, Place("a", 0, 90), Place("a", 2, 10)) == 120
    assert samples(100, Place("a", 2, 10), Place("a", 0, 90)) == 0
    assert samples(100, None, None) == 0
    assert readable(cut(1))
    assert not readable(b"\xc1")

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dlrover_core.checkpoint.retention import YOUNG_S, Stored, to_go

LONG_AGO = 10 * YOUNG_S


def steps(*told: int) -> list[Stored]:
    """Steps of one generation; the incomplete ones have a minus."""
    return [Stored(abs(one), one > 0, 1, age_s=LONG_AGO) for one in told]


@pytest.mark.parametrize(
    ("there", "keep", "going"),
    [
        (steps(1, 2, 3, 4, 5), 3, (1, 2)),
        (steps(1, 2, 3), 3, ()),
        (steps(1, 2, 3), 1, (1, 2)),
        (steps(1, 2, 3), 0, ()),
        (steps(-1, 2, -3, 4), 3, (1, 3)),
        (steps(1, -2), 1, ()),
        (steps(1, -2, -3), 1, (2,)),
        (steps(-1, -2), 1, ()),
        ([], 3, ()),
    ],
)
def test_the_newest_complete_ones_stay_and_older_incomplete_ones_go(there: Any, keep: Any, going: Any) -> None:
    """Of complete steps the newest `keep` stay; what is incomplete and older than the newest of them goes; minus: incomplete."""
    assert to_go(there, keep) == going


def test_a_job_that_went_back_keeps_its_new_steps() -> None:
    """Steps of a newer generation are newer, however small their numbers; so are this run's before those of others."""
    there = [Stored(200, True, 1), Stored(190, True, 1), Stored(110, True, 2)]
    assert to_go(there, 1) == (190, 200)
    there = [Stored(200, True, 5, ours=False), Stored(110, True, 1)]
    assert to_go(there, 1) == (200,)


def test_what_may_still_be_written_stays() -> None:
    """An incomplete step that was touched lately is not removed from under its writers, unless it is known to be older."""
    young = YOUNG_S / 2
    there = [Stored(100, True, 2), Stored(110, False, 2, age_s=young), Stored(120, False, 2, age_s=young)]
    assert to_go(there, 1) == ()
    there = [Stored(100, True, 2), Stored(110, False, -1, age_s=young), Stored(90, False, 2, age_s=young)]
    assert to_go(there, 1) == (90,)
    there = [Stored(100, True, 2), Stored(110, False, -1, age_s=LONG_AGO)]
    assert to_go(there, 1) == (110,)


a_step = some.builds(
    Stored, some.integers(0, 30), some.booleans(), some.integers(-1, 3), some.booleans(), some.floats(0, 2 * YOUNG_S)
)


@given(some.lists(a_step, max_size=12, unique_by=lambda one: one.step), some.integers(1, 4))
def test_whatever_lies_there_the_newest_complete_one_stays(there: Any, keep: Any) -> None:
    """Never the newest complete one goes, at least `keep` complete ones stay if there are, and doing it again removes nothing."""
    going = to_go(there, keep)
    stay = [one for one in there if one.step not in going]
    complete = [one for one in there if one.complete]
    if complete:
        assert max(complete, key=lambda one: one.order) in stay
        younger = [one for one in there if not one.complete and one.order > max(one.order for one in complete)]
        if younger and max(younger, key=lambda one: one.order).generation >= 0:
            assert max(younger, key=lambda one: one.order) in stay
    else:
        assert not going
    assert sum(one.complete for one in stay) == min(keep, len(complete))
    assert to_go(stay, keep) == ()

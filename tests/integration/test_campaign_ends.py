"""The campaign `ends`, one run of it by day: whichever rank comes late to ``close()``, the last state is on storage."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.campaign_ends import End, drawn, end
from tools.trials import Patience


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("mib", "kind_of", "skews"),
    [
        pytest.param(115, "frozen", (0, 200), id="rank1"),
        pytest.param(
            *(80, "buffer", (250, 0)), id="rank0", marks=pytest.mark.nightly(reason="rank 1 stands for it in make test")
        ),
    ],
)
def test_the_last_state_is_on_storage(tmp_path: Path, mib: int, kind_of: str, skews: tuple[int, ...]) -> None:
    """One rank comes to ``close()`` while the other one's part is being written: the step is sealed, and has its values."""
    one = End("plain", 1, 2, mib, kind_of, every=2, store_every=1000, steps=8, pause=0.005, skews=skews)
    assert end(tmp_path / "job", one, Patience())["left_out"] == 0


def test_trials_are_the_seeds() -> None:
    """A trial's number always draws the same; all kinds, shapes and ballasts come up, within their bounds."""
    trials = [drawn(0, number) for number in range(200)]
    assert trials == [drawn(0, number) for number in range(200)]
    assert {one.kind for one in trials} == {"plain", "huggingface", "lightning"}
    assert {(one.nodes, one.nproc) for one in trials} == {(1, 2), (2, 1), (2, 2)}
    assert {one.kind_of for one in trials} == {"frozen", "buffer", "trained"}
    assert all(10 <= one.mib <= 500 and min(one.skews) == 0 and max(one.skews) <= 500 for one in trials)

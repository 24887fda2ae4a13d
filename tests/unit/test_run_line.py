"""The live line of `dlrover-run`: a rate that is a speed, and a step that does not jump back and forth."""

from __future__ import annotations

import pytest

from dlrover_adapters.cli.line import Line, Rate, Steady


def test_the_rate_is_of_one_generation() -> None:
    """A restart from another step is no speed: the last rate stays until the new generation has its own."""
    rate = Rate()
    for second in range(8):
        rate.feed(1, 10 * second, float(second))
    assert rate.per_s == pytest.approx(10.0)
    assert rate.feed(2, 70, 8.0) == pytest.approx(10.0)  # still the old step
    assert rate.feed(2, 5000, 9.0) == pytest.approx(10.0)  # the first of its own
    assert rate.feed(2, 5002, 10.0) == pytest.approx(2.0)
    assert rate.feed(2, 4000, 11.0) == pytest.approx(2.0)  # the script began anew by itself


def test_the_rate_falls_when_nothing_moves() -> None:
    """Steps that stop coming pull the rate down to nothing within the window."""
    rate = Rate()
    for second in range(30):
        rate.feed(1, min(10 * second, 100), float(second))
    assert rate.per_s == 0.0


def test_the_step_does_not_fall_back_to_the_last_logged_one() -> None:
    """Between worlds the master knows only the log's last step, which is old; the line keeps the newest it has shown."""
    steady = Steady()
    assert [steady.feed(*seen) for seen in ((1, -1), (1, 100), (1, 162), (2, 71), (2, 71), (2, 161), (2, 165))] == [
        0, 100, 162, 162, 162, 161, 165,
    ]  # fmt: skip


def test_the_line_says_state_step_rate_generation_and_what_is_wrong() -> None:
    """Also a control plane that is degraded, and the last incident."""
    status = {"state": "running", "step": 7, "generation": 2, "degraded": "", "last_incident": ""}
    line = Line("job")
    assert line.text(status, 1.0) == "[job] running  step 7  0.0/s  generation 2"
    told = line.text(
        {**status, "degraded": "the log is full", "last_incident": "1: exit.sigkill -> RESTART_PROCESSES"}, 2.0
    )
    assert told.endswith("control plane degraded: the log is full  incident 1: exit.sigkill -> RESTART_PROCESSES")


@pytest.mark.parametrize(
    ("about", "epochs", "text"), [(80, 3, "epoch 1/3 80%"), (300, 3, "epoch 3/3 100%"), (1205, 0, "epoch 13 5%")]
)
def test_the_line_says_how_far_the_data_are(about: int, epochs: int, text: str) -> None:
    """By the newest step, behind the generation."""
    status = {"state": "running", "step": 7, "generation": 2, "degraded": "", "last_incident": ""}
    data = [{"dataset": "train", "size": 100, "epochs": epochs, "about": about}]
    assert Line("job").text({**status, "data": data}, 1.0).endswith(f"generation 2  train {text}")


def test_the_line_says_how_fast_the_data_go_and_how_long_they_take() -> None:
    """Of each dataset by itself; of a stream, which has no end, the position."""
    line = Line("job")
    for at in range(5):
        data = [
            {"dataset": "train", "size": 1000, "epochs": 2, "about": 100 + 50 * at},
            {"dataset": "clicks", "size": 2**53, "epochs": 1, "about": 8000 * at},
        ]
        status = {"state": "running", "step": at, "generation": 2, "degraded": "", "last_incident": "", "data": data}
        told = line.text(status, float(at))
    assert told.endswith("  train epoch 1/2 30% 50/s 34.0 s left  clicks position 32,000 8,000/s")

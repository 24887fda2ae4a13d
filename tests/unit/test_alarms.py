from __future__ import annotations

import pytest

from dlrover_adapters.torch.checkpoint.alarms import Alarms
from dlrover_adapters.torch.checkpoint.meeting import StoreGone


def test_an_error_of_ours_is_told_in_words_and_anothers_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """The end of a keeper is expected, and its error says all there is to say. A surprise comes with where it was raised."""
    alarms = Alarms()
    alarms.ring("step 5 was not saved", StoreGone("this generation's store does not answer"))
    alarms.ring("step 6 was not saved", RuntimeError("an optimizer that cannot be read"))
    ours, surprise = caplog.records
    assert "step 5 was not saved: StoreGone: this generation's store does not answer" in ours.getMessage()
    assert not ours.exc_info
    assert surprise.exc_info
    assert surprise.exc_info[0] is RuntimeError


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError("can't start new thread"),
            "RuntimeError: can't start new thread; a limit of processes is reached",
        ),
        (OSError(28, "No space left on device", "/state/x"), "[Errno 28] No space left on device: '/state/x'"),
    ],
)
def test_what_the_system_refuses_is_told_in_words(
    error: Exception, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Limits that a host reaches for a while are no surprise."""
    Alarms().ring("step 5 was not saved", error)
    (record,) = caplog.records
    assert told in record.getMessage()
    assert not record.exc_info

"""What an agent's process tells people while the job runs."""

from __future__ import annotations

from dlrover_adapters.cli.agent_process import LINE_CHARS_MAX, failure
from dlrover_core.runtime.launcher import WorkerExit


def ended(exit_code: int, error: str = "") -> WorkerExit:
    """Rank 3 has ended in generation 2."""
    return WorkerExit(
        generation=2, local_rank=1, rank=3, exit_code=exit_code, asked=False, died_us=1, tail="", error=error
    )


def test_a_failure_is_told_in_one_line() -> None:
    """Who, how and when; of an exception its last line; whatever a worker wrote, it is one harmless line."""
    assert failure("worker-1-0", ended(-9)) == "rank 3 on worker-1-0 failed: killed by SIGKILL (generation 2)"
    assert failure("worker-1-0", ended(1, "Traceback\nValueError: no\n\n")).endswith(" (generation 2): ValueError: no")
    told = failure("worker-1-0", ended(1, "\x1b[2J" + "x" * 5000))
    assert "\x1b" not in told
    assert len(told) < LINE_CHARS_MAX + 100

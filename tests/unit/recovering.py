"""Evidence and exits, for the rules of recovery."""

from __future__ import annotations

from typing import Any

from drive import SECOND, Drive

from dlrover_core.job import evidence

BUG = "Traceback (most recent call last):\n  File \"/job/train.py\", line 31, in load\n    raise KeyError(name)\nKeyError: 'x'"


def see(drive: Drive, node: str, signature: str, source: str = "kernel", *, age_s: float = 0, rank: int = -1) -> None:
    """The node's agent sees a sign of something."""
    drive.do(
        evidence.ReportEvidence(node, source, signature, f"sign of {signature}", rank, age_us=round(age_s * SECOND))
    )


def newest(drive: Drive, cls: type) -> Any:
    """The newest event of a kind."""
    return drive.facts(cls)[-1]

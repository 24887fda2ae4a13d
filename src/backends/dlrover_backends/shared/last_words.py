"""What a node's program has printed last, behind its exit status: diagnosis finds the cause in it."""

from __future__ import annotations

from dlrover_core.runtime.backend import PRINTED

CHARS_MAX = 300


def exited(told: str, code: int, printed: str) -> str:
    """``told``, an end in words, with the end of what was printed: of the launcher's own words, where they begin.

    ``code``: the exit status; ``printed``: may be empty, and have lines
    """
    from dlrover_core.diagnosis.classify import EX_USAGE, USAGE_WORD  # commands that see no end do without

    said = " ".join(printed.split())
    ours = said.rfind(USAGE_WORD) if code == EX_USAGE else -1
    said = said[ours:][:CHARS_MAX] if ours >= 0 else said[-CHARS_MAX:]
    return f"{told}{PRINTED}{said}" if said else told

"""One line per incident for whoever started the job: when something is decided, and when training goes on.

A line also says when nodes begin to wait for their platform, and when none waits any more.
"""

from __future__ import annotations

import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlrover_core.job import checks, hangs, incidents, nodes, stragglers
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.words import count, plain

if TYPE_CHECKING:
    from dlrover_core.history.checks import CheckNews
    from dlrover_core.history.headline import Headlines

WARM_S = 2.0
"""So long after its start a master gets ready for failures (`warm`): neither the start nor the first recovery waits for that."""

_CHECKS = (checks.CheckStarted, checks.CheckReported, checks.CheckJudged)
_PACES = (stragglers.SlowRank, stragglers.SlowEnded, stragglers.SlowReplaced)
_TELLING = (incidents.Diagnosed, incidents.ActionChosen, incidents.IncidentClosed)
LINE_BYTES_MAX = 512
"""As much as any pipe takes at once (POSIX): where a poll says that it can be written, it is written whole."""


class Teller:
    """Says the news of committed records to ``fd``, and never waits: a reader that does not read loses lines, and nobody else.

    ``lost`` counts them.
    """

    def __init__(self, job: str, fd: int = 2) -> None:
        self._job, self._fd = job, fd
        self._headlines: Headlines | None = None
        self._news: CheckNews | None = None
        self._queued = False
        self.lost = 0

    def committed(self, state: JobState, records: Sequence[Record]) -> None:
        """Take in a batch; ``state`` is the fold up to its end."""
        news: dict[int, str] = {}
        for record in records:
            if isinstance(record.event, hangs.HangNamed):
                self._say(f"[{self._job}] {record.event.text}")
            elif isinstance(record.event, _PACES):
                from dlrover_core.history.words import say

                self._say(f"[{self._job}] {say(record.event)}")
            elif isinstance(record.event, _TELLING):
                told = self._lines().feed(state, record)
                if told is not None:
                    # Of what is decided at once only the last word: the steps to it are in the log.
                    news[told.incident] = told.text
            elif isinstance(record.event, nodes.NodePending) and record.event.waits:
                self._waits(state, record.event)
            elif isinstance(record.event, _CHECKS):
                for line in self._checks().feed(record):
                    self._say(f"[{self._job}] {line}")
        for incident, text in news.items():
            self._say(f"[{self._job}] incident {incident}: {text}")
        if self._queued and not _waiting(state):
            self._queued = False
            self._say(f"[{self._job}] no node waits for its platform any more")

    def _waits(self, state: JobState, fact: nodes.NodePending) -> None:
        """Say that nodes wait, once until none does: reasons change, and a platform may have many."""
        number = _waiting(state)
        if number and not self._queued:
            self._queued = True
            waits = "waits" if number == 1 else "wait"
            self._say(f"[{self._job}] {count(number, 'node')} {waits} for the platform: {fact.node}: {fact.waits}")

    def _checks(self) -> CheckNews:
        if self._news is None:
            from dlrover_core.history.checks import CheckNews

            self._news = CheckNews()
        return self._news

    def _lines(self) -> Headlines:
        if self._headlines is None:
            from dlrover_core.history.headline import Headlines

            self._headlines = Headlines()
        return self._headlines

    def _say(self, text: str) -> None:
        # Over the live line, which draws itself again.
        clear = "\r\x1b[K" if os.isatty(self._fd) else ""
        line = (clear + " ".join(plain(text, LINE_BYTES_MAX).splitlines())).encode()[: LINE_BYTES_MAX - 1] + b"\n"
        try:
            if not _writable(self._fd):
                self.lost += 1
                return
            os.write(self._fd, line)
        except OSError:
            self.lost += 1


def _waiting(state: JobState) -> int:
    """How many nodes their platform has no place for."""
    return sum(state.nodes.tally.waits.values())


def _writable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return any(events & select.POLLOUT for _, events in poll.poll(0))


def warm(own: str) -> None:
    """Load what judging and telling need, a quarter of a second's work. ``own``: the user's signatures, as in `JobSpec`."""
    importlib.import_module("dlrover_core.history.headline")
    from dlrover_core.diagnosis import matching

    matching.prepare(own)


def on_stderr(job: str) -> Teller:
    """What our launcher shows: its standard error is ours."""
    return Teller(job, sys.stderr.fileno())

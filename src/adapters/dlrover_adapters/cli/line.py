"""The live line of `dlrover-run`: state, step, rate, generation, last incident."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from dlrover_core.data.streams import ENDLESS
from dlrover_core.history.phrases import duration
from dlrover_core.job.waiting import JOB, OF_RUNNING

SECOND_US = 1_000_000
WINDOW_S, SHORTEST_S = 10.0, 1.0
DATASETS_MAX = 3
SAID = (JOB, *OF_RUNNING)
"""Reasons to wait that the line leaves out: its first word is the job's state, and such worlds run on."""


class Rate:
    """Steps, or samples, a second over the last `WINDOW_S`, of one generation: a number that jumps with a restart is no speed."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._generation, self._before = -1, -1
        self.per_s = 0.0

    def feed(self, generation: int, step: int, at: float) -> float:
        """Take in the step seen at a moment; the rate, which stays the last one until the new generation has its own."""
        if generation != self._generation or (self._seen and step < self._seen[-1][1]):
            self._generation, self._before = generation, step
            self._seen.clear()
        if not self._seen and step == self._before:
            return self.per_s  # still the step of the generation before
        self._seen.append((at, step))
        while len(self._seen) > 2 and at - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        since, first = self._seen[0]
        if at - since >= SHORTEST_S:
            self.per_s = (step - first) / (at - since)
        return self.per_s


class Steady:
    """The step to show: while a new generation has made none of its own, the last one seen, not the last one in the log."""

    def __init__(self) -> None:
        self._generation, self._shown, self._stale = -1, -1, -1

    def feed(self, generation: int, step: int) -> int:
        """Take in a step; the one to show."""
        if generation != self._generation:
            self._generation, self._stale = generation, step
        if step != self._stale:
            self._shown, self._stale = step, -1
        else:
            self._shown = max(self._shown, step)
        return max(self._shown, 0)


def _data(one: Mapping[str, Any], per_s: float) -> str:
    """How far a dataset is: ``train epoch 2/3 40% 512/s 1 min 04 s left``."""
    size, epochs, about = int(one["size"]), int(one["epochs"]), int(one["about"])
    left = size * epochs - about if size < ENDLESS else 0
    time_left = f" {duration(round(left / per_s * SECOND_US))} left" if per_s and left > 0 else ""
    pace = f" {per_s:,.0f}/s{time_left}" if per_s else ""
    if size >= ENDLESS:
        return f"{one['dataset']} position {about:,}{pace}"
    epoch = min(about // size, epochs - 1) if epochs else about // size
    share = (about - epoch * size) * 100 // size
    return f"{one['dataset']} epoch {epoch + 1}{f'/{epochs}' if epochs else ''} {share}%{pace}"


class Line:
    """Draws itself over its predecessor on a terminal; elsewhere a line is printed when more than the step has changed."""

    def __init__(self, job: str, period_s: float = 10.0) -> None:
        self._job, self._period_s = job, period_s
        self._rate, self._step = Rate(), Steady()
        self._rates: dict[str, Rate] = {}
        self._said: tuple[object, ...] = ()
        self._said_at = 0.0
        self._tty = sys.stderr.isatty()
        self._open = False

    def show(self, status: Mapping[str, Any], at: float) -> None:
        """Show a status seen at a moment of the monotonic clock."""
        text = self.text(status, at)
        if self._tty:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            sys.stderr.write("\r" + text[: columns - 1].ljust(columns - 1))
            self._open = True
        else:
            # Into a file: every change of fortune at once, mere steps now and again.
            said = tuple(status[key] for key in ("state", "generation", "degraded", "last_incident"))
            if said == self._said and at - self._said_at < self._period_s:
                return
            self._said, self._said_at = said, at
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def text(self, status: Mapping[str, Any], at: float) -> str:
        """The line."""
        generation, step = int(status["generation"]), int(status["step"])
        rate = self._rate.feed(generation, step, at)
        parts = [
            f"[{self._job}] {status['state']}",
            f"step {self._step.feed(generation, step)}",
            f"{rate:.1f}/s",
            f"generation {generation}",
        ]
        for one in status.get("data", ())[:DATASETS_MAX]:
            pace = self._rates.setdefault(str(one["dataset"]), Rate()).feed(generation, int(one["about"]), at)
            parts.append(_data(one, pace))
        waits = [wait for wait in status.get("waits", ()) if wait["why"] not in SAID]
        parts += [f"{wait['group']} has no world: {wait['words']}" for wait in waits]
        if status["degraded"]:
            parts.append(f"control plane degraded: {status['degraded']}")
        if status["last_incident"]:
            parts.append(f"incident {status['last_incident']}")
        return "  ".join(parts)

    def end(self) -> None:
        """Leave the last one standing."""
        if self._open:
            sys.stderr.write("\n")
            self._open = False

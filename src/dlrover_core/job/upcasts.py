"""Upcasts of deaths in old records, which have only an exit code and text.

This module is frozen: whatever today's table of signatures says, an old log folds to the same state. Today's judgement is
`diagnosis.classify`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Any, NamedTuple

from dlrover_core.diagnosis.evidence import CASC, PLAT, RES, SOFT, USER, Evidence


class Verdict(NamedTuple):
    """Class, signature and confidence of a death."""

    verdict: str
    signature: str
    confidence: float


_CASCADE = re.compile(
    r"Connection (reset|closed|refused)|closed by peer|Broken pipe|DistBackendError|DistNetworkError|DistStoreError"
    r"|ncclRemoteError|NCCL communicator was aborted|Timed out waiting|socket has timed out"
    r"|Application timeout caused pair closure"
    r"|gloo.*(timed out|timeout|unexpected)|Rank .* is not healthy",
    re.IGNORECASE | re.DOTALL,
)
_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|DefaultCPUAllocator: can't allocate memory", re.IGNORECASE
)
_BY_SIGNAL = {
    signal.SIGKILL: Verdict(PLAT, "exit.sigkill", 0.6),
    signal.SIGTERM: Verdict(PLAT, "exit.sigterm", 0.7),
    signal.SIGSEGV: Verdict(SOFT, "exit.sigsegv", 0.5),
    signal.SIGBUS: Verdict(RES, "exit.sigbus", 0.6),
    signal.SIGABRT: Verdict(SOFT, "exit.sigabrt", 0.4),
}


def exit_1(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """A `WorkerExited` of version 1 as one of version 2, judged as it was then."""
    exit_code, asked, tail, error = fields[3], fields[4], fields[7], fields[8]
    found = worker_death(1 if asked else exit_code, error, tail)
    return (*fields, found.signature, "", found.verdict, found.confidence)


def action_1(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """An `ActionChosen` of version 1 as one of version 2: there were two budgets then, and each action had its own."""
    budget = {"RESTART_PROCESSES": "restarts", "RELAUNCH_NODE": "relaunches"}.get(fields[1], "")
    return (*fields, budget, -1, "", 0, 0)


def worker_death(exit_code: int, error: str, tail: str) -> Verdict:
    """The verdict on one worker's exit."""
    text = error or tail
    if _CASCADE.search(text):
        return Verdict(CASC, "peer.lost", 0.8)
    if _MEMORY.search(text):
        return Verdict(RES, "memory.exhausted", 0.8)
    if exit_code < 0:
        known = _BY_SIGNAL.get(signal.Signals(-exit_code)) if -exit_code in set(signal.Signals) else None
        return known or Verdict(SOFT, f"exit.signal{-exit_code}", 0.4)
    if error or "Traceback (most recent call last)" in tail:
        return Verdict(USER, f"exception.{_exception(text)}", 0.8)
    return Verdict(USER, f"exit.code{exit_code}", 0.5)


def _exception(text: str) -> str:
    for line in reversed(text.strip().splitlines()):
        found = re.match(r"([A-Za-z_][\w.]*)(:|$)", line.strip())
        if found:
            return found.group(1).rsplit(".", 1)[-1]
    return "unknown"


def node_death(how: str, exit_code: int, reason: str) -> Verdict:
    """The verdict on a node's end without its evidence. ``how``: failed, gone or lost."""
    if reason.startswith("refused for good"):
        return Verdict(USER, "node.refused", 0.9)
    if how == "lost":
        return Verdict(PLAT, "node.silent", 0.6)
    if "OOM" in reason:
        return Verdict(RES, "node.oom", 0.9)
    if how == "failed" and exit_code == -signal.SIGKILL:
        return Verdict(PLAT, "node.sigkill", 0.8)
    return Verdict(PLAT, f"node.{how}", 0.8)


def root(deaths: Sequence[Evidence]) -> Evidence:
    """The root cause as it was chosen before evidence was judged: a node's death first, cascades last, else the earliest."""
    return min(deaths, key=lambda death: (death.verdict == CASC, death.rank >= 0, death.at, death.seq))

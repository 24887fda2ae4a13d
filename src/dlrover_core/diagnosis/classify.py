"""What one death was: a class, a signature, and how sure that is.

Classes are those of the field's failure studies: USER (the program), PLAT (the platform took it), RES (a resource ran out),
NET, HW, SOFT (transient), and CASC: a consequence of somebody else's death, never a root while any other evidence exists.
"""

from __future__ import annotations

import re
import signal
from typing import NamedTuple

from dlrover_core.diagnosis.evidence import CASC, PLAT, RES, SOFT, USER, Evidence

# How a backend's final refusal of a node begins, and its signature.
REFUSED_WORD = "refused for good"
REFUSED = "node.refused"


class Verdict(NamedTuple):
    """What it was."""

    verdict: str
    signature: str
    confidence: float


# A survivor's word about a peer that died: gloo's and NCCL's own texts (torch 2.13), and the store's.
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


def worker_death(exit_code: int, error: str, tail: str) -> Verdict:
    """The verdict on one worker's exit. ``error`` is its error file's message, ``tail`` the last lines it wrote."""
    text = error or tail
    if _CASCADE.search(text):
        return Verdict(CASC, "peer.lost", 0.8)
    if _MEMORY.search(text):
        return Verdict(RES, "memory.exhausted", 0.8)
    if exit_code < 0:
        known = _BY_SIGNAL.get(signal.Signals(-exit_code)) if -exit_code in set(signal.Signals) else None
        return known or Verdict(SOFT, f"exit.signal{-exit_code}", 0.4)
    if error or "Traceback (most recent call last)" in tail:
        return Verdict(USER, f"exception.{exception_name(text)}", 0.8)
    return Verdict(USER, f"exit.code{exit_code}", 0.5)


def signal_name(number: int) -> str:
    """``SIGKILL`` of 9; of a number that is no signal, ``signal 99``."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def exception_name(text: str) -> str:
    """The exception's class: the word before the last ``Name: message`` line, or 'unknown'."""
    for line in reversed(text.strip().splitlines()):
        found = re.match(r"([A-Za-z_][\w.]*)(:|$)", line.strip())
        if found:
            return found.group(1).rsplit(".", 1)[-1]
    return "unknown"


def node_death(how: str, exit_code: int, reason: str) -> Verdict:
    """The verdict on a node: ``how`` is failed, gone or lost."""
    if reason.startswith(REFUSED_WORD):
        return Verdict(USER, REFUSED, 0.9)
    if how == "lost":
        return Verdict(PLAT, "node.silent", 0.6)
    if "OOM" in reason:
        return Verdict(RES, "node.oom", 0.9)
    if how == "failed" and exit_code == -signal.SIGKILL:
        return Verdict(PLAT, "node.sigkill", 0.8)
    return Verdict(PLAT, f"node.{how}", 0.8)


def root(deaths: tuple[Evidence, ...]) -> Evidence:
    """The likeliest first cause: a node's death before any worker's, a cascade after anything else, then the earliest."""
    return min(deaths, key=lambda death: (death.verdict == CASC, death.rank >= 0, death.at, death.seq))


def describe(death: Evidence) -> str:
    """One line about a death, for people."""
    who = f"rank {death.rank} on {death.node}" if death.rank >= 0 else f"node {death.node}"
    if death.text:
        what = death.text.strip().splitlines()[-1][:500]
    elif death.exit_code < 0:
        what = f"killed by {signal_name(-death.exit_code)}"
    else:
        what = f"exit code {death.exit_code}"
    return f"{who}: {what} ({death.signature})"

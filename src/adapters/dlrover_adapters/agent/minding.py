"""An agent asks its servants (zygote, keeper, saver) whether they hang. One that does is killed, and replaced like a dead one."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable

import structlog

from dlrover_core.runtime.watchdog import Verdict, Watch

from . import looks
from .children import Child

log = structlog.get_logger(__name__)


def minded(what: str, child: Child, hung_s: float, ask: Callable[[], bool]) -> Watch:
    """A watch, not yet open, that kills ``child`` when it has not answered for ``hung_s`` (0: never), and logs why."""

    def judged(verdict: Verdict) -> None:
        silent_s = round(verdict.silent_s, 1)
        log.warning("it hangs", who=what, pid=child.pid, silent_s=silent_s, why=verdict.why, killed=verdict.kill)
        if verdict.kill:
            child.signal(signal.SIGKILL)

    return Watch(hung_s, ask=ask, see=functools.partial(looks.seen, child.pid), judged=judged)

"""``torchrun --rdzv-backend dlrover``: a `RendezvousHandler` over a dlrover master, under torch's own elastic agent.

Which call of the elastic agent means what (torch 2.13, `SimpleElasticAgent`):

* `next_rendezvous`: nothing lives of the generation before. If nobody had called it back, its workers failed, and everybody
  starts again.
* ``use_agent_store`` is read just before workers are started; the next `get_backend` comes right after, for their event.
* A count at the store's last barrier: all workers ended well. It never starts any after that.
* `shutdown`: it is over, and the exception under way says how: none (with workers that had not all ended well it has given up,
  without any this handler was used by hand), `ChildFailedError` (no restarts left), or another.
  After a signal it is not called at all; so signals are listened to, and passed on to torch's handler.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import structlog
from torch.distributed import DistStoreError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from dlrover_core.errors import CoreError
from dlrover_core.runtime.launcher import WorkersLaunch

from .torchrun_desk import ENDED, FINISHED, RUNNING, Death, Desk
from .torchrun_line import Line, Parts
from .torchrun_store import GenerationStore, Overtaken, join
from .torchrun_workers import find

NAME = "dlrover"
OVER_S = 10.0
"""At its end torchrun waits this long for the word that the job is over; on the node of rank 0, whose store the others still
use, for as long as it takes."""
PART_S = 5.0
LEAVE_S = 7.0
MASTERS_S = 30.0
"""HOST's torchrun waits this long for its masters: they stay until everybody has heard how the job ended. Where its own workers
have finished and others train on, it waits for as long as those need a master."""
LOOK_S = 1.0
SWEPT = (-signal.SIGTERM, 128 + signal.SIGTERM)

log = structlog.get_logger("dlrover.torchrun")


class DlroverRendezvous(RendezvousHandler):
    """Made by torchrun in its main thread; the master is talked to in a thread of its own, a `Line`."""

    def __init__(self, run_id: str, parts: Parts) -> None:
        self._run_id, self._parts = run_id, parts
        self._desk = Desk()
        self._line = Line(self._desk, parts)
        self._store: GenerationStore | None = None
        self._newest = 0
        self._starting = self._ended = self._closed = False
        atexit.register(self._at_exit)

    # ---- what torch's elastic agent calls

    def get_backend(self) -> str:
        """Our name. Asked first thing after workers were started: then they are looked at."""
        self._look_at_workers()
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """Each generation has a store of its own, that no rank has to serve; unless somebody wants rank 0 to, as for c10d."""
        self._starting = True
        self._desk.begin()
        return not _by_rank_0()

    def get_run_id(self) -> str:
        """What ``--rdzv-id`` says."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next generation, and for the elastic agents of all its nodes."""
        if self._desk.closed is not None:
            raise self._desk.closed
        self._desk.come()
        self._line.start()
        while True:
            launch = self._desk.await_launch(self._newest, time.monotonic() + LOOK_S)
            if launch is None:
                continue
            try:
                store = join(launch, partial(self._desk.lies, launch), self._desk.finish)
                store.meet()
                where = self._where(launch, store)
            except (Overtaken, DistStoreError):
                self._newest = max(self._newest, 0 if self._desk.lies(launch) else launch.generation)
                continue
            if self._desk.take(launch):
                self._store, self._newest = store, launch.generation
                return RendezvousInfo(store, launch.node_rank, launch.nodes, where)

    def _where(self, launch: WorkersLaunch, store: GenerationStore) -> RendezvousStoreInfo:
        """Where ranks find their store: the generation's own, or that which rank 0 is going to serve."""
        if _by_rank_0():
            return RendezvousStoreInfo.build(launch.node_rank, store, local_addr=self._parts.address)
        host, _, port = launch.store.rpartition(":")
        return RendezvousStoreInfo(host.strip("[]"), int(port))

    def is_closed(self) -> bool:
        """Is the job over, or this node not wanted any more? Raises `RendezvousConnectionError`."""
        if self._desk.closed is not None:
            return True
        with _as_torchs():
            return self._parts.over()

    def set_closed(self) -> None:
        """Stop the job, for everybody. Torch's own elastic agent never asks for it. Raises `RendezvousConnectionError`.

        Who has closed it does not ask again: its masters may be gone by then.
        """
        if self._closed:
            return
        reason = f"closed by torchrun on {self._parts.host}"
        with _as_torchs():
            self._parts.stop(reason)
        self._closed = True
        self._desk.close(RendezvousClosedError(f"job {self._parts.job!r} is {reason}"))

    def num_nodes_waiting(self) -> int:
        """More than none while the elastic agent is to stop its workers and come back: that costs none of its restarts."""
        self._look_at_workers()
        return int(self._desk.waiting)

    def shutdown(self) -> bool:
        """The elastic agent is done, one way or another.

        Where none has used this handler, but somebody by hand, the job is closed, as by c10d's. False: no master has heard.
        """
        if self._ended:
            return True
        self._ended = True
        error, finished = sys.exc_info()[1], self._desk.phase == FINISHED
        heard = not isinstance(self._desk.closed, RendezvousConnectionError)
        if isinstance(error, ChildFailedError):
            over = self._failed(tuple(_death(rank, failure, self._parts.words) for rank, failure in _by_time(error)))
        elif error is None and finished:
            over = self._finished()
        elif error is None and self._desk.phase == RUNNING and self._desk.begun:
            # The elastic agent has returned a failed result, which nobody has made an exception of.
            over = self._failed(())
        elif error is None and self._desk.phase != ENDED and self._desk.closed is None:
            over = self._close_for_all()
            heard = self._desk.closed is not None
        else:
            over = False
        if not over:
            self._desk.leave(_why(error), dead=True)
            over = self._line.wait(LEAVE_S) and heard
        # Who never came is waited for by nobody.
        came = self._line.started or self._desk.closed is not None
        self._parts.close(None if error is None and finished else MASTERS_S if over and came else 0.0)
        return over

    # ----

    def _failed(self, deaths: tuple[Death, ...]) -> bool:
        self._desk.fail(deaths)
        return self._line.wait(OVER_S)

    def _close_for_all(self) -> bool:
        try:
            self.set_closed()
        except RendezvousError as error:
            log.warning("the job could not be closed", reason=str(error))
            return False
        return self._line.wait(OVER_S)

    def _finished(self) -> bool:
        """All workers ended well here. Is the job over, and does nobody need our store any more?"""
        if self._store is None:
            return False
        self._store.part(PART_S)
        return self._line.wait(math.inf if self._store.serves else OVER_S)

    def _look_at_workers(self) -> None:
        """Once after every start."""
        launch, starting = self._desk.taken, self._starting
        self._starting = False
        if launch is None or not starting:
            return
        self._desk.exist(find(self._run_id, launch.first_rank))
        if threading.current_thread() is threading.main_thread():
            for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(","):
                number = getattr(signal, name.strip(), None)
                if number is not None:
                    self._listen_to(number)

    def _listen_to(self, number: signal.Signals) -> None:
        """Hear a signal on its way to torch's handler, which torch installs anew with every start."""
        theirs = signal.getsignal(number)
        if not callable(theirs) or isinstance(theirs, _Heard):
            return
        signal.signal(number, _Heard(theirs, lambda: self._desk.leave(f"torchrun got {number.name}", dead=False)))

    def _at_exit(self) -> None:
        """Torchrun ends without `shutdown`: by a signal. Its workers are dead."""
        if self._ended:
            return
        self._ended = True
        if self._line.started:
            self._desk.leave("torchrun has ended", dead=True)
            self._line.wait(LEAVE_S)
        self._parts.close(0.0)


class _Heard:
    """A signal handler that tells us, and then does what the one before it did."""

    def __init__(self, theirs: Callable[..., Any], tell: Callable[[], None]) -> None:
        self._theirs, self._tell = theirs, tell

    def __call__(self, number: int, frame: Any) -> Any:
        self._tell()
        return self._theirs(number, frame)


def _by_rank_0() -> bool:
    """Torch's switch for ranks that do not share the rendezvous' store."""
    return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") == "1"


@contextlib.contextmanager
def _as_torchs() -> Iterator[None]:
    """What our client raises, as torch's error of a rendezvous that cannot be reached."""
    try:
        yield
    except CoreError as error:
        raise RendezvousConnectionError(str(error)) from error


def _by_time(error: ChildFailedError) -> list[tuple[int, ProcessFailure]]:
    """As torch finds its root cause: the earliest first. Those that it has ended itself then, by SIGTERM, come last.

    Torch takes the time in whole seconds, of all of a node's deaths at once.
    """
    return sorted(error.failures.items(), key=lambda item: (item[1].exitcode in SWEPT, item[1].timestamp))


def _death(rank: int, failure: ProcessFailure, words: Callable[[str], Any]) -> Death:
    told = words(failure.error_file)
    return Death(rank, failure.exitcode, told.error, told.error_at_us)


def _why(error: BaseException | None) -> str:
    if error is None:
        return "its workers have finished"
    return f"torchrun ends: {type(error).__name__}: {error}"[:500]

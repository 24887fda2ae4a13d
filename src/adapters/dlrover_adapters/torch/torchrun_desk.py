"""Where two threads meet: torchrun's main one, in which torch's elastic agent runs, and ours, which talks to the master.

The elastic agent asks (`next_rendezvous`, `num_nodes_waiting`) and is never told anything; so what is ordered lies on the desk
until it comes by. In the other direction it is watched: each of its calls says what has become of its workers, and is put
before the launcher as a *sign*.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Union

from dlrover_core.runtime.launcher import WorkersLaunch

AWAY, WAITING, RUNNING, FINISHED, ENDED = "away", "waiting", "running", "finished", "ended"


class Came(NamedTuple):
    """The elastic agent asks for the next generation; nothing lives of the one it comes from, 0 for none."""

    generation: int


class Took(NamedTuple):
    """It starts the workers of this launch."""

    launch: WorkersLaunch


class Seen(NamedTuple):
    """One worker of its own. ``last``: the elastic agent has no restarts left after this one; None: it died before it could
    be asked, and torch's next move will show. ``pidfd`` -1: not watched.
    """

    pid: int
    pidfd: int
    rank: int
    last: bool | None = False
    error_file: str = ""


class Exist(NamedTuple):
    """Its workers have been started; those it could be seen to have."""

    generation: int
    workers: tuple[Seen, ...]


class Finished(NamedTuple):
    """All of its workers ended well; it waits for the other nodes and will never start workers again."""

    generation: int


class Death(NamedTuple):
    """What torch itself says of one dead worker. ``error_at_us``: monotonic; 0 without an error file."""

    rank: int
    exit_code: int
    error: str = ""
    error_at_us: int = 0


class Failed(NamedTuple):
    """It has given up: workers died and it has no restarts left. Without ``deaths`` nobody says which."""

    generation: int
    deaths: tuple[Death, ...]


class Leaving(NamedTuple):
    """It goes, and the others may go on: a signal, or an error of its own. ``dead``: no worker of its own lives any more."""

    reason: str
    dead: bool


Sign = Union[Came, Took, Exist, Finished, Failed, Leaving]


def _nowhere(sign: Sign) -> None:
    """Before anybody listens."""


class Desk:
    """All methods may be called from any thread and return at once, but `await_launch`.

    ``listen`` is given every sign, in order, on the thread that made it.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler may come by while its own thread is here.
        self._changed = threading.Condition(threading.RLock())
        self._listen: Callable[[Sign], None] = _nowhere
        self._posted: WorkersLaunch | None = None
        self._taken: WorkersLaunch | None = None
        self._called_back = self._passed_over = False
        self._closed: Exception | None = None
        self._begun = False
        self.phase = AWAY

    # ---- ours: the launcher's side

    def listen(self, listen: Callable[[Sign], None]) -> None:
        """Put every further sign before ``listen``."""
        with self._changed:
            self._listen = listen

    def post(self, launch: WorkersLaunch) -> bool:
        """Lay the next generation on the desk. False: the elastic agent will never start workers again."""
        with self._changed:
            if self.phase in (FINISHED, ENDED):
                self._passed_over = True
                return False
            self._posted = launch
            self._changed.notify_all()
            return True

    def withdraw(self) -> WorkersLaunch | None:
        """Take back what nobody has taken yet. Returns what the elastic agent runs, or is on its way back from; None: nothing."""
        with self._changed:
            self._posted = None
            self._changed.notify_all()
            return self._taken

    def call_back(self) -> None:
        """Have the elastic agent stop its workers and come: it sees "new nodes" waiting, and that costs none of its restarts."""
        with self._changed:
            self._called_back = True

    @property
    def begun(self) -> bool:
        """Has the elastic agent begun to start workers of what it took? Who uses a handler by hand never does."""
        return self._begun

    def close(self, error: Exception) -> None:
        """There will be no further generation: whoever asks for one is answered with ``error``. The first one counts."""
        with self._changed:
            self._closed = self._closed or error
            self._changed.notify_all()

    # ---- theirs: the elastic agent's side

    @property
    def closed(self) -> Exception | None:
        """Why there will be no further generation."""
        return self._closed

    @property
    def taken(self) -> WorkersLaunch | None:
        """The generation that the elastic agent runs."""
        return self._taken

    @property
    def waiting(self) -> bool:
        """What `num_nodes_waiting` is asked for."""
        return self._called_back and self.phase == RUNNING

    def come(self) -> None:
        """The elastic agent asks for the next generation."""
        with self._changed:
            generation = self._taken.generation if self._taken is not None else 0
            self.phase, self._taken, self._called_back, self._begun = WAITING, None, False, False
            self._listen(Came(generation))

    def await_launch(self, newer_than: int, until: float) -> WorkersLaunch | None:
        """The launch on the desk, of a newer generation; None at ``until`` (monotonic). Raises what it was closed with."""
        with self._changed:
            while True:
                if self._closed is not None:
                    raise self._closed
                if self._posted is not None and self._posted.generation > newer_than:
                    return self._posted
                left = until - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def lies(self, launch: WorkersLaunch) -> bool:
        """Is this launch still what is ordered, taken or not?"""
        with self._changed:
            if self._taken is launch:
                # Where its work is done here, that the job is over is no news.
                over = self._passed_over if self.phase == FINISHED else self._closed is not None
                return not (self._called_back or over)
            return self._posted is launch and self._closed is None

    def take(self, launch: WorkersLaunch) -> bool:
        """Take it, unless it was withdrawn meanwhile."""
        with self._changed:
            if self._posted is not launch:
                return False
            self.phase, self._taken, self._posted = RUNNING, launch, None
            self._listen(Took(launch))
            return True

    def begin(self) -> None:
        """The elastic agent starts workers now."""
        self._begun = self._taken is not None

    def exist(self, workers: tuple[Seen, ...]) -> None:
        """The elastic agent has started its workers."""
        with self._changed:
            self.begin()
            self._listen(Exist(self._taken.generation if self._taken is not None else 0, workers))

    def finish(self) -> None:
        """All of its workers ended well."""
        with self._changed:
            if self.phase == RUNNING and self._taken is not None:
                self.phase = FINISHED
                self._listen(Finished(self._taken.generation))

    def fail(self, deaths: tuple[Death, ...]) -> None:
        """It gives up."""
        with self._changed:
            generation = self._taken.generation if self._taken is not None else 0
            self.phase = ENDED
            self._listen(Failed(generation, deaths))

    def leave(self, reason: str, *, dead: bool) -> None:
        """It goes. From a signal handler too: nothing is waited for."""
        if self.phase != FINISHED:
            self.phase = ENDED
        self._listen(Leaving(reason, dead))

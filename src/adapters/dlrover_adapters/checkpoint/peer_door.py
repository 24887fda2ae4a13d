"""Who may hold a connection to a saver: strangers by age, and peers that have proved that they know the job's token."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading

from dlrover_adapters.checkpoint.peer_line import PeerFailed

CONNECTIONS_MAX = 128
"""Connections of savers of this job, at a time."""
STRANGERS_MAX = 128
"""Connections that have not proved yet that they are of this job; a further one takes the place of the oldest."""


class Door:
    """All connections of a server, by number: strangers until they are `admitted`, of whom the oldest makes room for the newest.

    Kept are descriptors of our own: TLS takes a connection's first one over, and whoever serves it may have closed it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._strangers: dict[int, socket.socket] = {}  # by age: the first is the oldest
        self._peers: dict[int, socket.socket] = {}

    def __len__(self) -> int:
        return len(self._strangers) + len(self._peers)

    def came(self, sock: socket.socket) -> int:
        """A stranger's connection; its number."""
        own = sock.dup()
        with self._lock:
            if len(self._strangers) >= STRANGERS_MAX:
                _hang_up(self._strangers.pop(next(iter(self._strangers))))
            number = next(self._numbers)
            self._strangers[number] = own
            return number

    def admitted(self, number: int) -> bool:
        """Count a connection as a saver of this job. False: too many. Raises `PeerFailed` if it was closed to make room."""
        with self._lock:
            own = self._strangers.pop(number, None)
            if own is None:
                raise PeerFailed(f"{STRANGERS_MAX} newer connections wait")
            self._peers[number] = own
            return len(self._peers) <= CONNECTIONS_MAX

    def left(self, number: int) -> None:
        """Close a connection and forget it."""
        with self._lock:
            for some in (self._strangers, self._peers):
                if number in some:
                    some.pop(number).close()

    def shut(self) -> None:
        """Hang up on everybody; who serves them is woken."""
        with self._lock:
            for one in (*self._strangers.values(), *self._peers.values()):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


def _hang_up(own: socket.socket) -> None:
    with contextlib.suppress(OSError):
        own.shutdown(socket.SHUT_RDWR)
    own.close()

"""Ports that an agent keeps for its workers, over their deaths: bound and not listened on, so that nobody else is given them.

The worker that they are for binds the same port beside us, because both set SO_REUSEPORT; only who listens is connected to. Two
agents of one user could bind one port in the same way, so each port is claimed first: an abstract Unix socket of its number,
which belongs to the network namespace as ports do, and goes with its process.

Ports lie below those that the kernel hands out by itself: between the death of an agent and its successor's start nobody is
given them by chance.
"""

from __future__ import annotations

import contextlib
import socket
import zlib

LOWEST, HIGHEST = 20_000, 29_000
"""Where ports are looked for; below the kernel's own range (from 32,768 on, unless configured) and below our masters' ports."""

TRIES_MAX = 200
_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"


class Ports:
    """Ports in a row on ``bind``. Make it once for an agent; `close` gives them back."""

    def __init__(self, bind: str) -> None:
        self._bind = bind
        self._held: list[socket.socket] = []
        self.first = 0

    @property
    def listens(self) -> str:
        """The address that workers are to listen at."""
        return self._bind

    def keep(self, name: str, count: int, again: int = 0) -> int:
        """Keep ``count`` ports: from ``again`` on, if they are free; else others, the same ones for a ``name`` where they are.

        Returns the first. Raises `OSError` where none can be had.
        """
        if self.first:
            return self.first
        low, high = _range()
        steps = max(1, (high - low) // count)
        begin = zlib.crc32(name.encode()) % steps
        wanted = [again] if again else []
        wanted += [low + (begin + one) % steps * count for one in range(min(steps, TRIES_MAX))]
        for first in wanted:
            held = self._all(first, count)
            if held:
                self._held, self.first = held, first
                return first
        raise OSError(f"no {count} ports in a row are free on {self._bind} between {low} and {high}")

    def _all(self, first: int, count: int) -> list[socket.socket]:
        with contextlib.ExitStack() as stack:
            held: list[socket.socket] = []
            for port in range(first, first + count):
                for one in self._one(port):
                    stack.callback(one.close)
                    held.append(one)
            if len(held) == 2 * count:
                stack.pop_all()
                return held
        return []

    def _one(self, port: int) -> list[socket.socket]:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bound = socket.socket(socket.AF_INET6 if ":" in self._bind else socket.AF_INET, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0dlrover-port-{port}")
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the dead worker's connections linger
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind((self._bind, port))
            # Beside a socket that has it too and does not listen, anybody with SO_REUSEADDR could bind.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except (OSError, OverflowError):
            claim.close()
            bound.close()
            return []
        return [claim, bound]

    def close(self) -> None:
        """Give them back. Idempotent."""
        for one in self._held:
            one.close()
        self._held, self.first = [], 0


def _range() -> tuple[int, int]:
    """Where to look: below the kernel's own range, wherever that begins."""
    try:
        with open(_RANGE) as file:
            begins = int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        begins = 32_768
    return (LOWEST, HIGHEST) if begins > HIGHEST or begins <= LOWEST + 1000 else (LOWEST, begins)

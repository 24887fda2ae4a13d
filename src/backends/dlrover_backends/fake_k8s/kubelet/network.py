"""Loopback addresses that one cluster has for itself, while others run on the same machine."""

from __future__ import annotations

import contextlib
import socket

NETWORKS = 95
"""Pods have addresses in 127.1.0.0/16 to 127.95.0.0/16, services in 127.96.0.0/16 to 127.190.0.0/16."""
GUARD = "255.254"
PORT = 29_399


class Network:
    """The first pair of networks that nobody else on this machine holds; the first of all where none can be held.

    It is held by a socket that is bound to its last address, so the end of the process frees it.
    """

    def __init__(self) -> None:
        self.number, self._guard = 1, socket.socket()
        for number in range(1, NETWORKS + 1):
            with contextlib.suppress(OSError):
                self._guard.bind((f"127.{number}.{GUARD}", PORT))
                self.number = number
                break

    @property
    def services(self) -> str:
        """The first two numbers of services' addresses."""
        return f"127.{self.number + NETWORKS}"

    def pod(self, index: int) -> str:
        """The address of a pod, which counts from 1."""
        return f"127.{self.number}.{index // 250}.{index % 250 + 1}"

    def close(self) -> None:
        """Others may have it."""
        self._guard.close()

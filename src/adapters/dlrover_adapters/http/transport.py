"""Both ends under one name, for the entry point `dlrover.transports`."""

from __future__ import annotations

import socket
import ssl

from dlrover_adapters.http.client import HttpDialer
from dlrover_adapters.http.connection import HttpLimits
from dlrover_adapters.http.server import HttpListener

_LIMITS = HttpLimits()


class HttpTransport:
    """Dialers and listeners of one job: one token, one set of limits."""

    def __init__(
        self,
        token: str,
        *,
        limits: HttpLimits = _LIMITS,
        dialer_tls: ssl.SSLContext | None = None,
        listener_tls: ssl.SSLContext | None = None,
    ) -> None:
        self._token, self._limits, self._dialer_tls, self._listener_tls = token, limits, dialer_tls, listener_tls

    def dialer(self) -> HttpDialer:
        """An agent's end."""
        return HttpDialer(self._token, limits=self._limits, tls=self._dialer_tls)

    def listener(self, sock: socket.socket, *, advertise: str = "") -> HttpListener:
        """A master's end on a listening socket (`bind`, `adopt`)."""
        return HttpListener(sock, self._token, limits=self._limits, advertise=advertise, tls=self._listener_tls)

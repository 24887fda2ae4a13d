"""The aiohttp transport: one WebSocket per agent, and a little REST, on one port behind one token.

Names resolve lazily: an agent needs the client's half only, and `aiohttp.web` is not on its way to the first frame.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_adapters.http.client import HttpDialer, fetch_status
    from dlrover_adapters.http.connection import HttpConnection, HttpLimits
    from dlrover_adapters.http.server import HttpListener, adopt, bind
    from dlrover_adapters.http.token import load_token, make_token, require_token
    from dlrover_adapters.http.transport import HttpTransport

_PLACES = {
    "HttpConnection": "connection",
    "HttpDialer": "client",
    "HttpLimits": "connection",
    "HttpListener": "server",
    "HttpTransport": "transport",
    "adopt": "server",
    "bind": "server",
    "fetch_status": "client",
    "load_token": "token",
    "make_token": "token",
    "require_token": "token",
}

__all__ = [
    "HttpConnection",
    "HttpDialer",
    "HttpLimits",
    "HttpListener",
    "HttpTransport",
    "adopt",
    "bind",
    "fetch_status",
    "load_token",
    "make_token",
    "require_token",
]


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{place}"), name)

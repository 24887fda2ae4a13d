"""The keeper: one process per agent that holds stores (torch's TCPStores), one for each generation and one unused, ahead of need.

A store is new for every generation: torchrun reuses its own, and gloo then reads the addresses of the attempt that died. The
servers are threads inside torch, so they live neither in the agent (which never imports torch) nor in the zygote (which must
have no threads).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from . import wire
from .framework import Framework, load
from .process import libc, run_executed, set_name, set_title

BACKLOG = 1024  # every rank of a world connects at once
PATIENT_S, AGAIN_S = 5.0, 0.02
"""How long a named port that is taken is waited for, and how often it is tried."""


Serve = Callable[[str, int, int], object]
"""As `Framework.serve_store`."""


def open_store(bind: str, serve: Serve) -> tuple[object, int]:
    """A store served by this process on a free port of ``bind``, and the port. Takes under a millisecond."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((bind, 0))
        listener.listen(BACKLOG)
        port = int(listener.getsockname()[1])
    except OSError:
        listener.close()
        raise
    return serve(bind, port, listener.detach()), port


class FixedPort:
    """One named port at which one generation's store listens after the other's.

    The listening socket outlives the stores: nobody else gets the port in between, and whoever connects early waits.
    """

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._listener: socket.socket | None = None
        self._store: object = None

    def open(self, bind: str, port: int, waiting: Callable[[], None] = lambda: None) -> None:
        """A new, empty store at ``bind:port`` in place of the last one. Raises `OSError` and `RuntimeError`.

        ``waiting`` is called now and again while somebody else has the port.
        """
        self._store = None
        if self._listener is None:
            self._listener = _listen_patiently(bind, port, waiting)
        fd = os.dup(self._listener.fileno())
        self._store = self._serve(bind, port, fd)

    def close(self) -> None:
        """Give the port back: another node of this host has the next generation's store."""
        self._store = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _listen_patiently(bind: str, port: int, waiting: Callable[[], None]) -> socket.socket:
    """A listening socket. The keeper that had the port before may be about to give it back. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    until = time.monotonic() + PATIENT_S
    while True:
        try:
            return socket.create_server((bind, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                raise
        waiting()
        time.sleep(AGAIN_S)


def ask_nobody() -> None:
    """Let this process know names by its files alone. torch's store asks for the name of everybody who connects, one after the

    other: a thousand ranks are a thousand questions to a name server, and one that is lost holds up all of them for 5 s.
    """
    configure = getattr(libc(), "__nss_configure_lookup", None)  # glibc's; others have no such thing
    if configure is not None:
        configure(b"hosts", b"files")


def serve(link: socket.socket, framework: Framework) -> int:
    """Answer frames until the agent is gone.

    ``open`` (one more store), ``drop`` (a port nobody uses any more), ``title``, ``fix`` (a new store at the named port),
    ``loosen`` (give that port back), `wire.ASK`.
    """
    set_name("dlrover-keeper")
    ask_nobody()
    stores: dict[int, object] = {}
    fixed = FixedPort(framework.serve_store)
    while (frame := wire.receive(link)) is not None:
        match frame.body:
            case {"op": "open", "bind": str(bind), "title": str(title)}:
                set_title(title)
                _open(link, stores, bind, framework.serve_store)
            case {"op": "drop", "port": int(port)}:
                stores.pop(port, None)
            case {"op": "title", "title": str(title)}:
                set_title(title)
            case {"op": "fix", "bind": str(bind), "port": int(port)}:
                _fix(link, fixed, bind, port)
            case {"op": "loosen"}:
                fixed.close()
            case {"op": wire.ASK}:
                wire.here(link)
    # Store servers are threads in C++ that may be in the middle of an answer; nothing of ours is left to tidy up.
    os._exit(0)


def _open(link: socket.socket, stores: dict[int, object], bind: str, serve_store: Serve) -> None:
    try:
        store, port = open_store(bind, serve_store)
    except (OSError, RuntimeError) as error:
        answer: dict[str, Any] = {"op": "unopened", "reason": f"{type(error).__name__}: {error}"}
    else:
        stores[port] = store
        answer = {"op": "opened", "port": port}
    with contextlib.suppress(OSError):  # the agent may be gone: the next receive says so
        wire.send(link, answer)


def _fix(link: socket.socket, fixed: FixedPort, bind: str, port: int) -> None:
    reason = ""
    try:
        # The agent asks in vain meanwhile, and would take us for hung.
        fixed.open(bind, port, lambda: wire.here(link))
    except (OSError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):  # as above
        wire.send(link, {"op": "fixed", "reason": reason})


def main(arguments: list[str]) -> int:
    """Run a keeper that was executed, not forked: where there is no zygote."""
    parser = argparse.ArgumentParser(prog="keeper")
    parser.add_argument("--framework", required=True)
    told, _ = parser.parse_known_args(arguments)
    return run_executed("keeper", arguments, lambda link: serve(link, load(told.framework)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

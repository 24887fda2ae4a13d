"""The keeper: one process per agent that holds torch's TCPStores, one for each generation and one unused, ahead of need.

A store is new for every generation: torchrun reuses its own, and gloo then reads the addresses of the attempt that died. The
servers are threads inside torch, so they live neither in the agent (which never imports torch) nor in the zygote (which must
have no threads).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Any

from . import wire
from .process import libc, run_executed, set_name, set_title

BACKLOG = 1024  # every rank of a world connects at once


def open_store(bind: str) -> tuple[Any, int]:
    """A TCPStore served by this process on a free port of ``bind``, and the port. Takes under a millisecond."""
    from torch._C._distributed_c10d import TCPStore

    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((bind, 0))
        listener.listen(BACKLOG)
        port = int(listener.getsockname()[1])
    except OSError:
        listener.close()
        raise
    # We bind it: torch itself would listen on every interface, and its stores are unauthenticated.
    store = TCPStore(bind, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def ask_nobody() -> None:
    """Let this process know names by its files alone. torch's store asks for the name of everybody who connects, one after the

    other: a thousand ranks are a thousand questions to a name server, and one that is lost holds up all of them for 5 s.
    """
    configure = getattr(libc(), "__nss_configure_lookup", None)  # glibc's; others have no such thing
    if configure is not None:
        configure(b"hosts", b"files")


def serve(link: socket.socket) -> int:
    """Answer frames until the agent is gone.

    ``open`` (one more store), ``drop`` (a port nobody uses any more), ``title``, `wire.ASK`.
    """
    set_name("dlrover-keeper")
    ask_nobody()
    stores: dict[int, Any] = {}
    while (frame := wire.receive(link)) is not None:
        match frame.body:
            case {"op": "open", "bind": str(bind), "title": str(title)}:
                set_title(title)
                _open(link, stores, bind)
            case {"op": "drop", "port": int(port)}:
                stores.pop(port, None)
            case {"op": "title", "title": str(title)}:
                set_title(title)
            case {"op": wire.ASK}:
                wire.here(link)
    # Store servers are threads in C++ that may be in the middle of an answer; nothing of ours is left to tidy up.
    os._exit(0)


def _open(link: socket.socket, stores: dict[int, Any], bind: str) -> None:
    try:
        store, port = open_store(bind)
    except (OSError, RuntimeError) as error:
        answer: dict[str, Any] = {"op": "unopened", "reason": f"{type(error).__name__}: {error}"}
    else:
        stores[port] = store
        answer = {"op": "opened", "port": port}
    with contextlib.suppress(OSError):  # the agent may be gone: the next receive says so
        wire.send(link, answer)


def main(arguments: list[str]) -> int:
    """Run a keeper that was executed, not forked: where there is no zygote."""
    return run_executed("keeper", arguments, serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

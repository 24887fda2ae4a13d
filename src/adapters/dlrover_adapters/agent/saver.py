"""The saver: one process per agent that reads ranks' states behind their backs: to storage, to hash them, to other nodes.

Forked from the zygote when the first rank says that it saves, or executed where there is none. It has threads of its own for
everything that takes time; those that nobody waits for run at low priority (`checkpoints.priority`). Whatever it reads is pinned
so that nobody overwrites it. It keeps nothing that its successor is not handed by the agent again.
"""

from __future__ import annotations

import os
import socket
import sys

from . import wire
from .process import run_executed, set_name, set_title


def serve(link: socket.socket) -> int:
    """Answer frames until the agent is gone."""
    set_name("dlrover-saver")
    from .checkpoints.orders import Orders  # a zygote that never forks one need not import it

    orders = Orders(link)
    try:
        orders.start()
    except RuntimeError as error:  # the agent starts another one in a while
        sys.stderr.write(f"the saver ends: {error}; a limit of processes is reached: see ulimit -u, and pids.max\n")
        return os.EX_TEMPFAIL
    while (frame := wire.receive(link)) is not None:
        match frame.body:
            case {"op": "title", "title": str(title)}:
                set_title(title)
            case {"op": wire.ASK}:
                orders.here()
            case body:
                orders.take(body, frame.fds)
    # Threads may be in the middle of a write to a dead file server: nobody waits for them, and drafts are known by their names.
    os._exit(0)


def main(arguments: list[str]) -> int:
    """Run a saver that was executed, not forked: where there is no zygote."""
    return run_executed("saver", arguments, serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

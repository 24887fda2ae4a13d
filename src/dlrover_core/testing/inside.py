"""Put on the path of a local job's processes as ``sitecustomize``: links that can be cut, and workers that can be made to raise.

`LocalJob` does so only where a plan needs it. Run by every interpreter of the job before anything else, so it imports next to
nothing and must not fail: what is not as it should be is left as it was.
"""

import os
import signal
import socket
import sys

ROUTES, ERRORS = "DLROVER_CHAOS_ROUTES", "DLROVER_CHAOS_ERRORS"
"""``worker-0=41000,worker-1=41001``: the proxy of each node's link. The folder where a worker finds what it is to raise."""

FAIL = signal.SIGRTMIN + 9
_connect = socket.socket.connect


def _port(place: str) -> int:
    for route in os.environ.get(ROUTES, "").split(","):
        name, _, port = route.partition("=")
        if place == name or place.startswith(f"{name}-"):
            return int(port)
    return 0


def _node() -> str:
    """The node whose agent this process is; '' if it is none."""
    with open("/proc/self/comm") as comm:  # noqa: PTH123  # pathlib is slow to import
        if comm.read() != "dlrover-agent\n":
            return ""
    with open("/proc/self/cmdline", "rb") as line:  # noqa: PTH123  # as above
        words = line.read().replace(b"\0", b" ").decode(errors="replace").split()
    return words[words.index("--node") + 1] if "--node" in words[:-1] else ""


def _routed(one: socket.socket, address: object) -> None:
    """Connect an agent to its proxy, and anybody else to whom he wants."""
    if one.family == socket.AF_INET and isinstance(address, tuple):
        try:
            port = _port(_node())
        except (OSError, ValueError):
            port = 0
        address = ("127.0.0.1", port) if port else address
    _connect(one, address)  # type: ignore[arg-type]  # whatever it was given


def _fail(number: int, frame: object) -> None:  # noqa: ARG001  # the interpreter's
    with open(os.path.join(os.environ[ERRORS], f"raise-{os.getpid()}")) as file:  # noqa: PTH118, PTH123  # as above
        raise RuntimeError(file.read())


def _next_one() -> None:
    """Run the ``sitecustomize`` that this one hides."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # as above
    spec = PathFinder.find_spec("sitecustomize", [one for one in sys.path if os.path.abspath(one) != here])  # noqa: PTH100
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    if os.environ.get(ROUTES):
        socket.socket.connect = _routed  # type: ignore[method-assign, assignment]  # of a class written in C
    if os.environ.get(ERRORS):
        signal.signal(FAIL, _fail)
    _next_one()

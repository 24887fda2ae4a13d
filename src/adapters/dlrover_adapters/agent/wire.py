"""Frames between the agent and the processes it starts: one msgpack map per packet of a Unix SOCK_SEQPACKET pair.

Packets keep boundaries, carry file descriptors, and end when the peer's last copy of the socket is closed, which is how
either side learns of the other's death.
"""

from __future__ import annotations

import array
import contextlib
import socket
from typing import Any, NamedTuple

import msgpack

from dlrover_core.errors import LaunchFailed, MalformedMessage

FRAME_BYTES_MAX = 128 * 1024
FDS_MAX = 8
_FD = array.array("i")
ASK, HERE = "ask", "here"
"""What an agent asks its servants now and again, and what each main loop answers."""


class Frame(NamedTuple):
    """One message and the file descriptors that came with it; the receiver owns them."""

    body: dict[str, Any]
    fds: tuple[int, ...]


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends. Neither survives an exec unless made inheritable."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, body: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one frame whole. Raises `LaunchFailed` for one too large and OSError when the peer is gone or asleep."""
    payload = msgpack.packb(body)
    if len(payload) > FRAME_BYTES_MAX:
        raise LaunchFailed(
            f"a message to a worker has {len(payload)} bytes, {FRAME_BYTES_MAX} fit: shorten the arguments"
        )
    socket.send_fds(sock, [payload], list(fds))


def ask(sock: socket.socket) -> bool:
    """Ask a servant whether it hangs; False: its socket takes nothing now."""
    try:
        send(sock, {"op": ASK})
    except OSError:
        return False
    return True


def here(sock: socket.socket) -> None:
    """Answer an agent's `ASK`."""
    with contextlib.suppress(OSError):  # the agent is gone, or reads nothing just now
        send(sock, {"op": HERE})


def receive(sock: socket.socket) -> Frame | None:
    """The next frame; None when the peer is gone. Raises BlockingIOError where the socket does not block."""
    try:
        # Not socket.recv_fds: it drops its flags (CPython before 3.13), and the descriptors would survive an exec.
        payload, ancillary, _flags, _address = sock.recvmsg(
            FRAME_BYTES_MAX, socket.CMSG_SPACE(FDS_MAX * _FD.itemsize), socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError:
        return None
    if not payload:
        return None
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % _FD.itemsize])
    return Frame(unpack(payload), tuple(fds))


def unpack(payload: bytes) -> dict[str, Any]:
    """The map in ``payload``. Raises `MalformedMessage`."""
    try:
        body = msgpack.unpackb(payload)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"{len(payload)} bytes from a local process are not msgpack") from error
    if not isinstance(body, dict):
        raise MalformedMessage(f"a local process sent a {type(body).__name__}, not a map")
    return body

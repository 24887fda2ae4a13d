"""Frames between the agent and the processes it starts: one msgpack map per packet of a Unix SOCK_SEQPACKET pair.

Packets keep boundaries, carry file descriptors, and end when the peer's last copy of the socket is closed, which is how
either side learns of the other's death. A frame that no packet holds travels in memory whose descriptor is the packet's first.

Arguments and paths need not be UTF-8: Python has lone surrogates for such bytes, and both ends keep them as they are.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from typing import Any, NamedTuple, cast

import msgpack

from dlrover_core.errors import LaunchFailed, MalformedMessage

FRAME_BYTES_MAX = 8 * 1024 * 1024
"""More than Linux takes for the arguments and the environment of one program (6 MiB)."""

PACKET_BYTES_MAX = 128 * 1024
FDS_MAX = 8
_APART = b"\xc1"  # the one byte that msgpack never uses
_SURROGATES = "surrogatepass"
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
    payload = pack(body)
    if len(payload) > FRAME_BYTES_MAX:
        raise LaunchFailed(
            f"a message to a worker has {len(payload)} bytes, {FRAME_BYTES_MAX} fit: shorten the arguments"
        )
    if len(payload) <= PACKET_BYTES_MAX:
        socket.send_fds(sock, [payload], list(fds))
        return
    with open(os.memfd_create("dlrover-frame", os.MFD_CLOEXEC), "w+b") as apart:
        apart.write(payload)
        apart.flush()
        socket.send_fds(sock, [_APART], [apart.fileno(), *fds])


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
            PACKET_BYTES_MAX, socket.CMSG_SPACE((FDS_MAX + 1) * _FD.itemsize), socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError:
        return None
    if not payload:
        return None
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % _FD.itemsize])
    if payload == _APART and fds:
        with open(fds.pop(0), "rb") as apart:
            apart.seek(0)  # both ends have one position
            payload = apart.read(FRAME_BYTES_MAX)
    return Frame(unpack(payload), tuple(fds))


def pack(body: dict[str, Any]) -> bytes:
    """The map as bytes. Arguments and paths that are not UTF-8, which Python holds as half characters, arrive as they were."""
    return cast(bytes, msgpack.packb(body, unicode_errors=_SURROGATES))


def unpack(payload: bytes) -> dict[str, Any]:
    """The map in ``payload``. Raises `MalformedMessage`."""
    try:
        body = msgpack.unpackb(payload, unicode_errors=_SURROGATES)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"{len(payload)} bytes from a local process are not msgpack") from error
    if not isinstance(body, dict):
        raise MalformedMessage(f"a local process sent a {type(body).__name__}, not a map")
    return body

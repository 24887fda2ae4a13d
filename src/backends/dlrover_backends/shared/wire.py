"""What a node host and its clients say to each other: msgpack behind a length, over a Unix socket of one user.

One request per connection; for ``observe`` the answers go on for ever. A connection is the whole state of a conversation,
so a lost one leaves nothing to mend.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import msgpack

from dlrover_core.errors import ConnectionLost, CoreError, MalformedMessage

FRAME_BYTES_MAX = 16 * 1024 * 1024
BACKLOG = 1024
_LENGTH = struct.Struct(">I")

T = TypeVar("T")
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def read(reader: asyncio.StreamReader) -> tuple[Any, ...]:
    """The next frame. Raises `ConnectionLost` and `MalformedMessage`."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > FRAME_BYTES_MAX:
            raise MalformedMessage(f"a frame of {length} bytes exceeds the limit of {FRAME_BYTES_MAX}")
        frame = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise ConnectionLost("the other end is gone") from error
    try:
        found = msgpack.unpackb(frame, use_list=False)
    except Exception as error:  # msgpack raises half a dozen kinds on garbage
        raise MalformedMessage(f"{length} bytes are not msgpack: {error}") from error
    if not isinstance(found, tuple) or not found:
        raise MalformedMessage("a frame is an array with something in it")
    return found


async def write(writer: asyncio.StreamWriter, *fields: object) -> None:
    """Send a frame. Raises `ConnectionLost`."""
    frame = cast(bytes, msgpack.packb(fields, unicode_errors="backslashreplace"))
    try:
        writer.write(_LENGTH.pack(len(frame)) + frame)
        await writer.drain()
    except OSError as error:
        raise ConnectionLost("the other end is gone") from error


@contextlib.asynccontextmanager
async def connect(path: Path) -> AsyncIterator[Stream]:
    """A conversation with the host at ``path``. Raises `ConnectionLost`."""
    try:
        with short(path) as name:
            reader, writer = await asyncio.open_unix_connection(name)
    except OSError as error:
        raise ConnectionLost(
            f"no node host answers at {path}: {error.strerror or error}; is its launcher running?"
        ) from error
    try:
        yield reader, writer
    finally:
        writer.close()


def listen(path: Path) -> socket.socket:
    """A socket at ``path`` that only this user may connect to; a dead host's is replaced. Raises `CoreError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _clear(path)
        # On Linux the file is born with the mode of the unbound socket: it is never open to others, not for a moment.
        os.fchmod(sock.fileno(), stat.S_IRUSR | stat.S_IWUSR)
        with short(path) as name:
            sock.bind(name)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise CoreError(f"cannot listen at {path}: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _clear(path: Path) -> None:
    """Remove a socket that nobody serves any more."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe, short(path) as name:
        try:
            probe.connect(name)
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise CoreError(f"another launcher serves {path}; stop it, or use another --state-dir")


@contextlib.contextmanager
def short(path: Path) -> Iterator[str]:
    """A name for ``path`` that fits into a socket address (108 bytes), however deep the state directory lies."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)

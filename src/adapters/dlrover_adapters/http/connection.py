"""One WebSocket as a `Connection`: whole binary frames, bounded both ways, and an end to every wait.

Three ways in which a peer can hold us, and what bounds them: it sends too much (frames are at most `FRAME_BYTES_MAX`, and
what we have not taken yet stops its socket), it takes nothing (a send that makes no progress for ``send_s``, or more than
``unsent_bytes_max`` waiting, ends the connection), it is gone without a word (pings, answered by any living peer).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Union

import structlog
from aiohttp import WebSocketError, WSCloseCode, WSMessage, WSMsgType

from dlrover_core.errors import ConnectionLost
from dlrover_core.runtime.complaints import Complaints
from dlrover_core.runtime.transport import FRAME_BYTES_MAX
from dlrover_core.runtime.within import within

if TYPE_CHECKING:
    from aiohttp import ClientWebSocketResponse
    from aiohttp.web import WebSocketResponse

T = TypeVar("T")
Socket = Union["ClientWebSocketResponse[Any]", "WebSocketResponse[Any]"]

# What the end of a stream, by the peer's kernel, is told as.
_ENDED = (ConnectionResetError, BrokenPipeError)

# aiohttp calls a message too big when it reaches the limit.
MESSAGE_BYTES_LIMIT = FRAME_BYTES_MAX + 1

log = structlog.get_logger("dlrover.http")


class HttpLimits(NamedTuple):
    """What a peer may take: times in seconds, sizes in bytes."""

    handshake_s: float = 10.0
    """From the first byte to an accepted WebSocket; REST requests must be done by then too."""
    ping_s: float = 10.0
    """Silence after which a ping is sent; without an answer for half as long again the peer is gone."""
    send_s: float = 10.0
    """A peer that takes nothing for this long while something waits for it is closed."""
    close_s: float = 1.0
    """How long a goodbye is waited for."""
    unsent_bytes_max: int = 4 * FRAME_BYTES_MAX
    """What may wait for one slow reader."""
    connections_max: int = 20_000
    """Connections of a master, as far as its descriptors go; further ones are cut off as they come."""
    idle_s: float = 30.0
    """How long a connection may stay open between two pages of records."""
    readers_max: int = 64
    """Requests for records under way at once, those that wait for news included; further ones are refused."""
    strangers_max: int = 4096
    """Connections that are nobody's yet; a further one takes the place of the oldest."""


class HttpConnection:
    """One live connection, either end. Any number of tasks may send; one receives."""

    def __init__(
        self,
        ws: Socket,
        peer: str,
        limits: HttpLimits,
        complaints: Complaints,
        transport: asyncio.WriteTransport | None = None,
    ) -> None:
        self._transport = transport
        self._ws, self.peer, self._limits, self._complaints = ws, peer, limits, complaints
        self._loop = asyncio.get_running_loop()
        self._unsent_bytes = 0
        self._progress_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._why = ""
        self._ended = False
        self._closing: asyncio.Future[None] | None = None

    async def send(self, frame: bytes) -> None:
        """Send one frame; waits while the peer reads slowly. Raises `ConnectionLost`."""
        self._admit(len(frame))
        if not self._unsent_bytes:
            self._progress_at = self._loop.time()
        self._unsent_bytes += len(frame)
        if self._watch is None:
            self._watch = self._loop.call_later(self._limits.send_s, self._look)
        try:
            await self._ws.send_bytes(frame)
        except (OSError, RuntimeError) as error:
            # While a goodbye is being answered, sending fails too; then there is a code.
            said = self._ws.close_code not in (None, WSCloseCode.ABNORMAL_CLOSURE)
            raise self._lost(str(error), ended=_is_end(error) and not said) from error
        finally:
            self._unsent_bytes -= len(frame)
            self._progress_at = self._loop.time()

    def send_now(self, frame: bytes) -> bool:
        """Send a frame without a task, where the peer has taken all that came before. False: it was not sent, use `send`."""
        if self._why or self._transport is None or self._transport.get_write_buffer_size():
            return False
        sending = self._ws.send_bytes(frame)
        try:
            # It would wait for the peer to read only if there were something unread.
            sending.send(None)
        except StopIteration:
            return True
        except (OSError, RuntimeError):
            return False
        finally:
            sending.close()
        return True

    async def receive(self) -> bytes:
        """The next frame. Raises `ConnectionLost`."""
        if self._why:
            raise self._lost("")
        message = await self._ws.receive()
        if message.type is WSMsgType.BINARY:
            frame = message.data
            assert isinstance(frame, bytes)
            if len(frame) <= FRAME_BYTES_MAX:
                return frame
            self._break(f"it sent a frame of {len(frame)} bytes, the limit is {FRAME_BYTES_MAX}")
        elif message.type is WSMsgType.TEXT:
            self._break("it sent text; frames are binary")
        elif isinstance(message.data, WebSocketError):
            self._break(f"it sent what is no frame of ours, of at most {FRAME_BYTES_MAX} bytes: {message.data}")
        ended = message.type is WSMsgType.CLOSED or _is_end(message.data)
        raise self._lost(_ending(message), ended=ended)

    async def close(self) -> None:
        """Say goodbye, wait a little for the answer, and end. Idempotent; whoever calls second waits for the first."""
        if self._closing is None:
            self._why = self._why or "closed by us"
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await within(self._limits.close_s, self._ws.close())
        except (asyncio.TimeoutError, OSError, RuntimeError) as error:
            log.debug("goodbye not answered", peer=self.peer, error=type(error).__name__)
            self._cut()
        finally:
            if self._watch is not None:
                self._watch.cancel()

    # ---- how it ends

    def _admit(self, size: int) -> None:
        """Raises `ConnectionLost` for what may not be sent."""
        if self._why:
            raise self._lost("")
        if size > FRAME_BYTES_MAX:
            self._break(f"we tried to send a frame of {size} bytes, the limit is {FRAME_BYTES_MAX}")
        elif self._unsent_bytes + size > self._limits.unsent_bytes_max:
            self._break(f"it left {self._unsent_bytes} bytes unread")
        if self._why:
            raise self._lost("")

    def _look(self) -> None:
        """The watch over sends: one timer per ``send_s`` and connection, not one per frame."""
        self._watch = None
        if not self._unsent_bytes or self._why:
            return
        idle_s = self._loop.time() - self._progress_at
        if idle_s >= self._limits.send_s:
            self._break(f"it read nothing for {idle_s:.1f} s while {self._unsent_bytes} bytes waited")
        else:
            self._watch = self._loop.call_later(self._limits.send_s - idle_s, self._look)

    def _break(self, why: str) -> None:
        """The peer, or we, did what no peer of ours does: one line in the log, then the socket is cut."""
        if not self._why:
            self._why = why
            self._complaints.warning("connection closed", peer=self.peer, reason=why)
        self._cut()

    def _cut(self) -> None:
        # Through the socket itself: neither end of aiohttp has a public way to drop a connection without a goodbye.
        sock = self._ws.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _lost(self, reason: str, *, ended: bool = False) -> ConnectionLost:
        """``ended``: nobody here ended it, so far as this call can see."""
        if not self._why:
            self._why = reason or "it is gone"
            # A ping without an answer leaves its time-out behind, and is our own doing.
            self._ended = ended and not isinstance(self._ws.exception(), asyncio.TimeoutError)
        return ConnectionLost(f"connection to {self.peer}: {self._why}", ended=self._ended)


def _is_end(error: object) -> bool:
    """Did the peer's kernel end it? Who waited for the peer to read is told so as the cause of a plain `ConnectionError`."""
    return isinstance(error, _ENDED) or isinstance(getattr(error, "__cause__", None), _ENDED)


def _ending(message: WSMessage) -> str:
    if message.type is WSMsgType.ERROR:
        return str(message.data) or type(message.data).__name__
    return f"it closed with code {message.data}" if message.type is WSMsgType.CLOSE else "it is gone"

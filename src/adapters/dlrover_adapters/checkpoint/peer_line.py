"""A connection between the savers of two nodes: who may speak, frames that nobody else can have written, and raw bytes.

Both ends prove that they know the job's token, which itself is never sent: each answers the other's random challenge by HMAC,
in constant time, the client first. With TLS (`Tls`) everything is encrypted, both ends show a certificate of the job's CA, and
the server's certificate is part of what is proved, so that nobody in between can pass the proof on. Without TLS frames are still
authenticated, and so are a state's table and objects: their HMAC (`Line.seal`) is in the frame that ends the transfer. Only the
tensors' bytes have digests against damage and not against malice.

Everything is bounded: frames, the greeting, silence, and whole transfers by a least speed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from dlrover_core.errors import CoreError

FAMILY = b"DLRPEER"
MAGIC = FAMILY + b"3"
FRAME_BYTES_MAX = 1024 * 1024
GREETING_S = 5.0
IDLE_S = 10.0
"""Silence of a peer, or a window that it does not open, for so long ends the connection."""
SPEED_MIN_BYTES_S = 4 * 1024 * 1024
"""A transfer that is slower on the whole is given up."""
PACE_BYTES_S = 1024 * 1024 * 1024
_NONCE, _MAC, _FRAME_MAC = 32, 32, 16
_CHUNK_BYTES = 1024 * 1024


class PeerFailed(CoreError):
    """A transfer came to nothing; nothing of it is kept. Try again later, another node, or the next tier."""


class PeerCut(PeerFailed):
    """The peer was silent, or gone, in the middle of it: another try may do."""


class PeerRefused(PeerFailed):
    """The peer lives and says why not."""


class StrangerRefused(PeerFailed):
    """One end does not know this job's token, or has no certificate of its CA."""


class Tls(NamedTuple):
    """Files of certificates in PEM form: the CA that both ends are checked by, and what this node shows."""

    ca: str
    certificate: str
    key: str = ""

    def serving(self) -> ssl.SSLContext:
        """For who listens: whoever dials has to show a certificate of the CA. Raises OSError, ssl.SSLError."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._ours(context)

    def dialling(self) -> ssl.SSLContext:
        """For who dials: addresses are found by the job's own master, so names in certificates are not compared."""
        context = ssl.create_default_context(cafile=self.ca)
        context.check_hostname = False
        return self._ours(context)

    def _ours(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key or None)
        return context

    def shown(self) -> bytes:
        """The certificate that this node shows, as the other end sees it."""
        text = Path(self.certificate).read_text(encoding="ascii", errors="replace")
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        return ssl.PEM_cert_to_DER_cert(text[text.index(begin) : text.index(end) + len(end)])


class Credentials(NamedTuple):
    """What two nodes of a run have in common: its name and the job's token; and certificates, if it encrypts."""

    run: str
    token: bytes
    tls: Tls | None = None


class Pace:
    """At most so many bytes a second, over all that share it. ``stopped`` ends every wait."""

    def __init__(self, bytes_s: float, stopped: threading.Event | None = None) -> None:
        self.bytes_s = bytes_s
        self._stopped = stopped or threading.Event()
        self._lock = threading.Lock()
        self._next = 0.0

    def wait(self, size: int) -> None:
        """Until ``size`` bytes more may go. Raises `PeerFailed` when it is stopped."""
        now = time.monotonic()
        with self._lock:
            due = max(self._next, now)
            self._next = due + size / self.bytes_s
        if (due > now and self._stopped.wait(due - now)) or self._stopped.is_set():
            raise PeerFailed("this node stops")


class Line:
    """One connection after its greeting. Every call raises `PeerFailed` where the peer is gone, silent or makes no sense."""

    def __init__(self, sock: socket.socket, key: bytes, *, serves: bool, idle_s: float = IDLE_S) -> None:
        self.socket, self._key, self._idle_s = sock, key, idle_s
        self._out, self._in = (b"server", b"client") if serves else (b"client", b"server")
        self._said = self._heard = 0
        self._until = time.monotonic() + idle_s

    def allow(self, size: int) -> None:
        """The transfer that begins is of ``size`` bytes: how long all of it may take."""
        self._until = time.monotonic() + 3 * self._idle_s + size / SPEED_MIN_BYTES_S

    # ---- frames

    def say(self, body: dict[str, Any]) -> None:
        """One frame."""
        packed = msgpack.packb(body)
        if len(packed) > FRAME_BYTES_MAX:
            raise PeerFailed(f"a frame of {len(packed):,} bytes")
        self.send(len(packed).to_bytes(4, "big") + self._mac(self._out, self._said, packed) + packed)
        self._said += 1

    def hear(self, *, patient: bool = False) -> dict[str, Any]:
        """One frame. One that says "error" raises `PeerRefused`. ``patient``: the peer has work to do before it answers."""
        head = self._receive(4 + _FRAME_MAC, patient=patient)
        size = int.from_bytes(head[:4], "big")
        if size > FRAME_BYTES_MAX:
            raise PeerFailed(f"a frame of {size:,} bytes, at most {FRAME_BYTES_MAX:,} are taken")
        packed = self._receive(size)
        if not hmac.compare_digest(head[4:], self._mac(self._in, self._heard, packed)):
            raise PeerFailed("a frame that the peer did not write")
        self._heard += 1
        try:
            body = msgpack.unpackb(packed)
        except (ValueError, msgpack.UnpackException) as error:
            raise PeerFailed(f"a frame that is none: {error}") from error
        if not isinstance(body, dict):
            raise PeerFailed("a frame that is no map")
        if "error" in body:
            raise PeerRefused(str(body["error"]))
        return body

    def seal(self, *parts: Any) -> bytes:
        """The HMAC of raw bytes that this end sends: the other end computes the same by `sealed`."""
        return self._seal(self._out, parts)

    def sealed(self, seal: object, *parts: Any) -> bool:
        """Whether the other end sent these raw bytes: compares their HMAC with ``seal``."""
        return isinstance(seal, bytes) and hmac.compare_digest(seal, self._seal(self._in, parts))

    def _seal(self, direction: bytes, parts: tuple[Any, ...]) -> bytes:
        made = hmac.new(self._key, b"raw|" + direction, "sha256")
        for part in parts:
            made.update(len(part).to_bytes(8, "big"))
            made.update(part)
        return made.digest()

    def _mac(self, direction: bytes, number: int, packed: bytes) -> bytes:
        told = direction + number.to_bytes(8, "big") + packed
        return hmac.digest(self._key, told, "sha256")[:_FRAME_MAC]

    # ---- raw bytes

    def send(self, content: Any, pace: Pace | None = None) -> None:
        """All of a buffer, from where it lies: no copy of ours."""
        with memoryview(content) as whole, whole.cast("B") as view:
            at = 0
            while at < len(view):
                with view[at : at + _CHUNK_BYTES] as chunk:
                    if pace is not None:
                        pace.wait(len(chunk))
                    at += self._done(functools.partial(self.socket.send, chunk))

    def receive_into(self, content: Any, *, patient: bool = False) -> None:
        """Fill a buffer."""
        with memoryview(content) as whole, whole.cast("B") as view:
            at = 0
            while at < len(view):
                with view[at:] as rest:
                    count = self._done(functools.partial(self.socket.recv_into, rest), patient=patient)
                if not count:
                    raise PeerCut(f"the peer hung up, {len(view) - at:,} bytes early")
                at += count

    def _receive(self, size: int, *, patient: bool = False) -> bytes:
        found = bytearray(size)
        self.receive_into(found, patient=patient)
        return bytes(found)

    def _done(self, what: Callable[[], int], *, patient: bool = False) -> int:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise PeerFailed("the peer is too slow")
        wait_s = left_s if patient else min(left_s, self._idle_s)
        try:
            self.socket.settimeout(wait_s)
            return what()
        except TimeoutError as error:
            raise PeerCut(f"the peer has been silent for {wait_s:.1f} s") from error
        except OSError as error:
            raise PeerCut(f"the peer is gone: {error}") from error

    def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


# ---- greetings


def dial(address: str, credentials: Credentials, *, idle_s: float = IDLE_S) -> Line:
    """A connection to the saver at ``address`` (``host:port``). Raises `PeerFailed`, `StrangerRefused`."""
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=GREETING_S)
    except (OSError, ValueError, OverflowError) as error:
        raise PeerFailed(f"nobody answers at {address!r}: {error}") from error
    with _closed_on_error(sock, address) as held:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shown = b""
        if credentials.tls is not None:
            sealed = credentials.tls.dialling().wrap_socket(sock)
            held[0] = sock = sealed
            shown = sealed.getpeercert(binary_form=True) or b""
        ours = os.urandom(_NONCE)
        greeting = _exactly(sock, len(MAGIC) + _NONCE)
        if not greeting.startswith(MAGIC):
            raise PeerFailed(f"at {address} {_other(greeting)}")
        nonces = greeting[len(MAGIC) :] + ours
        sock.sendall(ours + _proof(credentials.token, b"client", nonces, shown))
        answer = _exactly(sock, _MAC)
        if not hmac.compare_digest(answer, _proof(credentials.token, b"server", nonces, shown)):
            raise StrangerRefused(f"{address} does not know this job's token, or we do not")
        return Line(sock, _proof(credentials.token, b"frames", nonces, shown), serves=False, idle_s=idle_s)


def greet(
    sock: socket.socket, credentials: Credentials, context: ssl.SSLContext | None, *, idle_s: float = IDLE_S
) -> Line:
    """The same, for who was dialled; takes ``sock``. ``context`` is `Tls.serving`. Raises `PeerFailed`, `StrangerRefused`."""
    with _closed_on_error(sock, "who dialled") as held:
        sock.settimeout(GREETING_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shown = b""
        if context is not None and credentials.tls is not None:
            held[0] = sock = context.wrap_socket(sock, server_side=True)
            shown = credentials.tls.shown()
        theirs = os.urandom(_NONCE)
        sock.sendall(MAGIC + theirs)
        told = _exactly(sock, _NONCE + _MAC)
        nonces = theirs + told[:_NONCE]
        if not hmac.compare_digest(told[_NONCE:], _proof(credentials.token, b"client", nonces, shown)):
            sock.sendall(bytes(_MAC))
            raise StrangerRefused("who dialled does not know this job's token")
        sock.sendall(_proof(credentials.token, b"server", nonces, shown))
        return Line(sock, _proof(credentials.token, b"frames", nonces, shown), serves=True, idle_s=idle_s)


def _other(greeting: bytes) -> str:
    """Who greets so, in words."""
    if not greeting.startswith(FAMILY):
        return "listens something else than a saver"
    theirs, ours = (one[len(FAMILY) : len(MAGIC)].decode("ascii", "replace") for one in (greeting, MAGIC))
    return f"listens a saver of another version: it speaks protocol {theirs}, this one {ours}; install one release on all hosts"


@contextlib.contextmanager
def _closed_on_error(sock: socket.socket, who: str) -> Iterator[list[socket.socket]]:
    """Closes the socket where a greeting fails, the one in the list: TLS takes the first one over. Errors become ours."""
    held = [sock]
    try:
        yield held
    except BaseException as error:
        held[0].close()
        if isinstance(error, ssl.SSLError):
            raise StrangerRefused(f"{who}: TLS failed: {error.reason or error}") from error
        if isinstance(error, OSError):
            raise PeerFailed(f"{who} hung up: {error}") from error
        raise


def _proof(token: bytes, who: bytes, nonces: bytes, shown: bytes) -> bytes:
    told = b"|".join((MAGIC, who, nonces, hashlib.sha256(shown).digest()))
    return hmac.digest(token, told, "sha256")


def _exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes of a greeting, by one deadline: a peer that sends byte by byte gets no more time for it."""
    until, found = time.monotonic() + GREETING_S, b""
    while len(found) < size:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise PeerFailed("the greeting took too long")
        sock.settimeout(left_s)
        try:
            more = sock.recv(size - len(found))
        except ConnectionResetError:
            more = b""
        if not more:
            raise PeerCut("it hung up in the middle of the greeting; it may be of another version, or full")
        found += more
    return found

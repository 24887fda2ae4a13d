"""Calls to etcd over grpc.aio: each with a deadline, tried at one member after another, its error in our words.

Every member has a channel of its own. A channel over all of them would choose for us: it stays with a member that is stopped
and still connected, and checks every certificate against the first one's name. Here a call that fails or takes too long goes to
the next member, and a member that lives in the past, or is slow, is left alone for a while.

What is tried again may have happened the first time. All that is sent through here bears that: transactions are conditional,
puts and deletes are what they are, and a lease granted in vain expires.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple, NoReturn

import structlog

from dlrover_adapters.etcd.address import Address
from dlrover_adapters.etcd.errors import (
    AuthOff,
    Closed,
    Compacted,
    Denied,
    LeaseGone,
    TimedOut,
    TokenOver,
    TooLarge,
    Unsupported,
    of_words,
    translated,
)
from dlrover_adapters.etcd.members import Member, Members
from dlrover_adapters.etcd.requests import Requests, unknown_number
from dlrover_adapters.etcd.streams import Stream
from dlrover_core.errors import CoreError, LogUnavailable

__all__ = [
    "ATTEMPT_S",
    "CALL_S",
    "Closed",
    "Compacted",
    "Denied",
    "Etcd",
    "LeaseGone",
    "Status",
    "TimedOut",
    "TooLarge",
    "Unsupported",
]

# The first attempt at each member; the next round gives each twice as long. Elections of etcd take 1 to 2 s, and what was asked
# of a member just before one may hang there: it is asked again.
ATTEMPT_S = 1.0
CALL_S = 5.0
PAUSE_FIRST_S, PAUSE_MAX_S = 0.02, 0.5
# Who was given less than this and did not answer is not called slow: it was the end of a call's time.
SLOW_S = 0.2
# Once one member has answered, the others are waited for no longer than this.
OTHERS_S = 0.3
WATCH_SILENCE_S = 5.0
# etcd compares passwords slowly on purpose.
AUTHENTICATE_S = 2.0
_QUOTA_FIELD = 12  # StatusResponse.dbSizeQuota, of 3.6

log = structlog.get_logger("dlrover.etcd")


class Status(NamedTuple):
    """What a member says of itself. ``quota_bytes`` is 0 where it does not say (before 3.6)."""

    version: str
    db_bytes: int
    leader: int
    member: int
    raft_term: int
    quota_bytes: int = 0


class Etcd(Requests):
    """A connection to an etcd cluster, and the maker of its requests. Belongs to one event loop."""

    def __init__(self, address: Address) -> None:
        super().__init__()
        from grpc import RpcError
        from grpc.aio import UsageError

        self.address = address
        self._rpc_error: type[Exception] = RpcError
        self._usage_error: type[Exception] = UsageError
        self._members = Members(address, self.protocol)
        self._term = self._cluster = 0
        # None: not asked for yet.
        self._token: str | None = None if address.user else ""
        self._metadata: tuple[tuple[str, str], ...] = ()
        # A token made because the one before it was doubted, not yet seen to work.
        self._sure: str | None = None
        self._doubted = False
        self._authenticating: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Was it closed?"""
        return self._closed

    # ---- calls

    async def call(
        self, method: str, request: Any, *, timeout_s: float = CALL_S, attempt_s: float = ATTEMPT_S, quorum: bool = True
    ) -> Any:
        """The reply of whichever member gives one first, asked one after another until ``timeout_s`` is over.

        ``quorum``: only a member in touch with the majority can answer this, so its raft term counts. Raises `LogUnavailable`,
        `LogFull`, `LeaseGone`, `TooLarge`, `Compacted`, `Denied`, `Unsupported`; `LogError` for what is our bug.
        """
        loop = asyncio.get_running_loop()
        deadline, tried, pause = loop.time() + timeout_s, 0, PAUSE_FIRST_S
        while True:
            member = self._member()
            try:
                return await self._attempt(member, method, request, min(attempt_s, deadline - loop.time()), quorum)
            except Closed:
                raise
            except LogUnavailable as error:
                why = error
                self._members.leave(member, avoid=_is_slow(error))
            tried += 1
            if tried % len(self._members) == 0:
                # Everybody was asked. Clients that lost the same member do not come back in step.
                await asyncio.sleep(min(pause * (0.5 + random.random()), max(0.0, deadline - loop.time())))
                pause, attempt_s = min(PAUSE_MAX_S, pause * 2), attempt_s * 2
            if loop.time() >= deadline:
                raise LogUnavailable(f"{self.address.shown} does not answer: {why}") from why

    async def ask(self, endpoint: str, method: str, request: Any, *, timeout_s: float = ATTEMPT_S) -> Any:
        """The reply of this very member. Raises as `call` does."""
        self._open()
        return await self._attempt(self._members.of(endpoint), method, request, timeout_s, quorum=False)

    async def _attempt(self, member: Member, method: str, request: Any, timeout_s: float, quorum: bool) -> Any:
        if self._token is None:
            await self._authenticated(member)
        token = self._token
        try:
            reply = await self._send(member, method, request, timeout_s)
        except TokenOver:
            # Simple tokens live for five minutes, and no longer than their member.
            if self._token == token:
                self._forget_token()
            await self._authenticated(member)
            reply = await self._send(member, method, request, timeout_s)
        self._guard(member, reply.header, quorum)
        return reply

    async def _send(self, member: Member, method: str, request: Any, timeout_s: float) -> Any:
        try:
            return await member.methods[method](request, timeout=max(0.001, timeout_s), metadata=self._metadata)
        except self._rpc_error as error:
            raise translated(member.endpoint, error, timeout_s) from error
        except self._usage_error as error:
            # While we authenticated its channel was closed, as others changed certificates or closed the log.
            raise self._cut(member) from error
        except asyncio.CancelledError:
            # A channel that is closed cancels its calls, and grpc says so as if we had been cancelled.
            if self._closed and not _being_cancelled():
                raise self._cut(member) from None
            raise

    def _guard(self, member: Member, header: Any, quorum: bool) -> None:
        """A member that answers under an older term than was seen lives in the past: cut off, or restored from a copy."""
        if self._term <= header.raft_term and header.cluster_id == self._cluster:
            if quorum:
                # One that is cut off counts terms for itself: only what needs the majority teaches us.
                self._term = header.raft_term
            return
        if self._cluster and header.cluster_id and header.cluster_id != self._cluster:
            why = f"belongs to another cluster ({header.cluster_id:x}) than was seen ({self._cluster:x}): endpoints are mixed"
            self._disbelieve(member, f"{why}, or etcd was built anew; then start this process again")
        if header.raft_term and header.raft_term < self._term:
            why = f"answers under raft term {header.raft_term}, {self._term} was seen: it is cut off"
            self._disbelieve(member, f"{why}, or etcd was restored from a backup; then start this process again")
        self._cluster = self._cluster or header.cluster_id
        if quorum:
            self._term = max(self._term, header.raft_term)

    def _disbelieve(self, member: Member, why: str) -> NoReturn:
        self._members.leave(member, avoid=True)
        log.warning("an etcd member is not believed, others are asked", endpoint=member.endpoint, reason=why)
        raise LogUnavailable(f"{member.endpoint} {why}")

    # ---- streams

    async def keep_alive(self, lease: int, *, timeout_s: float) -> int:
        """Renew a lease; the seconds it has now. 0: it is gone. Raises `LogUnavailable` and `Denied`."""
        loop = asyncio.get_running_loop()
        deadline, why = loop.time() + timeout_s, ""
        for _ in range(2 * len(self._members)):
            member = self._member()
            left = deadline - loop.time()
            if left <= 0:
                break
            try:
                return await self._keep_alive(member, lease, min(left, max(timeout_s / 2, left / len(self._members))))
            except Closed:
                raise
            except LogUnavailable as error:
                why = str(error)
                self._members.leave(member, avoid=_is_slow(error))
                await asyncio.sleep(PAUSE_FIRST_S)
        raise LogUnavailable(f"{self.address.shown} does not renew the lease: {why}")

    async def _keep_alive(self, member: Member, lease: int, timeout_s: float) -> int:
        stream = await self._stream(member, "LeaseKeepAlive", timeout=timeout_s)
        try:
            await stream.write(self.rpc.LeaseKeepAliveRequest(ID=lease), timeout_s)
            reply = await stream.read(timeout_s)
        except TokenOver:
            self._forget_token()
            raise
        finally:
            await stream.close()
        if reply is None:
            raise TimedOut(f"{member.endpoint} did not answer within {timeout_s:.3g} s", timeout_s)
        self._guard(member, reply.header, quorum=True)
        return int(reply.TTL)

    async def watch(
        self, prefix: str, start_revision: int, silence_s: float = WATCH_SILENCE_S
    ) -> AsyncGenerator[Any, None]:
        """The responses of one watch on all keys with ``prefix``, at one member, until it breaks; the first is its creation.

        A member that is silent is asked for its progress; if it stays silent, or has lost the majority, `LogUnavailable`. A
        watch that was compacted away raises `Compacted`. Whatever is raised: what was missed is to be read, not guessed.
        """
        member = self._member()
        stream = await self._stream(member, "Watch", ("hasleader", "true"))
        try:
            await stream.write(self.watch_request(prefix, start_revision), silence_s)
            while True:
                response = await stream.read(silence_s)
                if response is None:
                    await stream.write(self.progress_request(), silence_s)
                    response = await stream.read(silence_s)
                yield self._watched(stream, response)
        except LogUnavailable as error:
            self._left(stream, error)
            if self._closed:
                # A channel that is closed before it is connected says nothing to who writes.
                raise self._cut(member) from error
            raise
        finally:
            await stream.close()

    async def progress(self, prefix: str, timeout_s: float) -> bool:
        """Does the member that is asked now tell a watch's progress, when it is asked for it?"""
        member = self._member()
        stream = await self._stream(member, "Watch")
        try:
            await stream.write(self.watch_request(prefix, 0), timeout_s)
            self._watched(stream, await stream.read(timeout_s))
            await stream.write(self.progress_request(), timeout_s)
            self._watched(stream, await stream.read(timeout_s))
            return True
        except LogUnavailable as error:
            self._left(stream, error)
            return False
        finally:
            await stream.close()

    def _left(self, stream: Stream, error: LogUnavailable) -> None:
        """A watch broke: it goes on elsewhere, with another token where that was its fault."""
        self._members.leave(stream.member, avoid=_is_slow(error))
        if isinstance(error, TokenOver) and self._token == stream.token:
            self._forget_token()

    def _watched(self, stream: Stream, response: Any) -> Any:
        """A response that says something. Raises what it says where that is an end."""
        endpoint = stream.member.endpoint
        if response is None:
            raise TimedOut(f"{endpoint} is silent", SLOW_S)
        if response.compact_revision:
            raise Compacted("the watch was compacted away", response.compact_revision)
        if response.canceled:
            error = of_words(endpoint, response.cancel_reason)
            if isinstance(error, Denied) and self._doubt(stream.token):
                raise TokenOver(str(error)) from error
            raise error or LogUnavailable(f"{endpoint} cancelled the watch: {response.cancel_reason}")
        if stream.token == self._sure:
            self._sure = None
        self._guard(stream.member, response.header, quorum=False)
        return response

    async def _stream(self, member: Member, method: str, *metadata: tuple[str, str], **options: Any) -> Stream:
        await self._authenticated(member)
        metadata = (*self._metadata, *metadata)
        try:
            return Stream(member, method, self._cut, self._token or "", metadata=metadata, **options)
        except self._usage_error as error:
            raise self._cut(member) from error

    def _cut(self, member: Member) -> LogUnavailable:
        """A stream that ended by our side's doing: its channel was closed."""
        if self._closed:
            return Closed(f"the log {self.address.shown} is closed")
        return LogUnavailable(f"the stream from {member.endpoint} was cut")

    # ---- members

    async def statuses(self, timeout_s: float = ATTEMPT_S) -> Mapping[str, Status | CoreError]:
        """What every member says of itself, by endpoint; or why it says nothing. Once one spoke the others must hurry."""
        self._open()
        asked = {one: asyncio.ensure_future(self._status(one, timeout_s)) for one in self.address.endpoints}
        try:
            waiting = set(asked.values())
            while waiting:
                spoke = any(isinstance(one.result(), Status) for one in asked.values() if one.done())
                done, waiting = await asyncio.wait(
                    waiting, timeout=OTHERS_S if spoke else None, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
        finally:
            for one in asked.values():
                one.cancel()
            await asyncio.gather(*asked.values(), return_exceptions=True)
        silent = LogUnavailable(f"no answer within {OTHERS_S} s of the others'")
        return {endpoint: silent if one.cancelled() else one.result() for endpoint, one in asked.items()}

    async def _status(self, endpoint: str, timeout_s: float) -> Status | CoreError:
        try:
            told = await self.ask(endpoint, "Status", self.rpc.StatusRequest(), timeout_s=timeout_s)
        except CoreError as error:
            return error
        quota = unknown_number(told, _QUOTA_FIELD)
        return Status(told.version, told.dbSize, told.leader, told.header.member_id, told.raftTerm, quota)

    def _member(self) -> Member:
        self._open()
        return self._members.now()

    def _open(self) -> None:
        if self._closed:
            raise Closed(f"the log {self.address.shown} is closed")

    # ---- user and password

    async def _authenticated(self, member: Member) -> None:
        if self._token is not None:
            return
        if self._authenticating is None or self._authenticating.done():
            self._authenticating = asyncio.ensure_future(self._authenticate(member))
            # Whoever waited for it may be gone when it fails.
            self._authenticating.add_done_callback(_heard)
        await asyncio.shield(self._authenticating)

    def _doubt(self, token: str) -> bool:
        """May a refusal be this token's fault? etcd tells a watch with a token that is over that permission is denied."""
        if not token or token == self._sure:
            return False
        self._doubted = self._doubted or token == self._token
        return True

    def _forget_token(self) -> None:
        if self.address.user:
            self._token = None

    async def _authenticate(self, member: Member) -> None:
        request = self.rpc.AuthenticateRequest(name=self.address.user, password=self.address.password)
        self._metadata = ()
        try:
            token = (await self._send(member, "Authenticate", request, AUTHENTICATE_S)).token
        except AuthOff:
            log.warning("etcd asks nobody for a password", user=self.address.user, endpoint=member.endpoint)
            token = ""
        self._sure = token if self._doubted else None
        self._token, self._doubted = token, False
        self._metadata = (("token", token),) if token else ()

    async def close(self) -> None:
        """Close all channels; what runs ends with `Closed`. Idempotent."""
        self._closed = True
        authenticating = self._authenticating
        await self._members.close()
        if authenticating is not None:
            await asyncio.gather(authenticating, return_exceptions=True)


def _is_slow(error: LogUnavailable) -> bool:
    return isinstance(error, TimedOut) and error.given_s >= SLOW_S


def _heard(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()


def _being_cancelled() -> bool:
    """Is it our own task that is cancelled? Python 3.10 does not tell; there a call that is cut by closing counts as cut."""
    task = asyncio.current_task()
    return sys.version_info >= (3, 11) and task is not None and task.cancelling() > 0

"""The members of a cluster as we speak to them: a channel for each, and what we remember of how it behaved."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from dlrover_adapters.etcd.address import Address
from dlrover_adapters.etcd.protocol import Protocol, quiet
from dlrover_core.errors import LogUnavailable

REPLY_BYTES_MAX = 64 * 1024 * 1024
# How long a member that lives in the past, or did not answer in time, is asked only where nobody else is left.
AVOIDED_S = 10.0
# The same for one that failed at once: grpc takes as long to connect anew.
FAILED_S = 1.0
# Longer than any call takes.
GRACE_S = 10.0

_OPTIONS = [
    ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
    ("grpc.max_send_message_length", REPLY_BYTES_MAX),
    ("grpc.enable_retries", 0),
    # A proxy for the web, named in the environment, is no way to a cluster's own etcd.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A connection that went dead without a word is given up after 13 s; etcd takes pings 5 s apart for an attack.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
]

log = structlog.get_logger("dlrover.etcd")


class Member:
    """One endpoint, its channel and its methods by name."""

    def __init__(self, endpoint: str, channel: Any, protocol: Protocol) -> None:
        self.endpoint, self.channel = endpoint, channel
        stubs = protocol.stubs
        self.methods: dict[str, Callable[..., Any]] = {}
        for stub, names in (
            ("KV", ("Range", "Txn", "Put", "DeleteRange", "Compact")),
            ("Lease", ("LeaseGrant", "LeaseRevoke", "LeaseTimeToLive", "LeaseKeepAlive")),
            ("Watch", ("Watch",)),
            ("Maintenance", ("Status", "HashKV", "Alarm", "MoveLeader")),
            ("Auth", ("Authenticate",)),
        ):
            made = getattr(stubs, f"{stub}Stub")(channel)
            self.methods |= {name: getattr(made, name) for name in names}
        self.avoided_until = self.left_at = 0.0


class Members:
    """All of them, and which one is asked now. Channels are opened when first needed, and anew when certificates change."""

    def __init__(self, address: Address, protocol: Protocol) -> None:
        self.address, self._protocol = address, protocol
        self._all: list[Member] = []
        self._at = 0
        self._stamp: tuple[int, ...] = ()
        self._retired: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self.address.endpoints)

    def now(self) -> Member:
        """The member to ask: the one asked last; the next one that is not to be avoided; else the one that was left first.

        Those to be avoided are asked in turn too: in an election all who live may look like the past, and who is dead does not.
        """
        members, time = self._opened(), asyncio.get_running_loop().time()
        ring = [(self._at + step) % len(members) for step in range(len(members))]
        well = (at for at in ring if members[at].avoided_until <= time)
        self._at = next(well, min(ring, key=lambda at: members[at].left_at))
        return members[self._at]

    def of(self, endpoint: str) -> Member:
        """The member at an endpoint."""
        return next(one for one in self._opened() if one.endpoint == endpoint)

    def leave(self, member: Member, *, avoid: bool = False) -> None:
        """Ask the next one from now on; ``avoid``: and this one last, for a while."""
        member.left_at = asyncio.get_running_loop().time()
        member.avoided_until = member.left_at + (AVOIDED_S if avoid else FAILED_S)
        if self._all and self._all[self._at] is member:
            self._at = (self._at + 1) % len(self._all)
        if self.address.tls and _stamp(self.address) not in ((), self._stamp):
            self._reopen()

    async def close(self) -> None:
        """Close all channels, which ends what runs over them."""
        members, self._all = self._all, []
        for member in members:
            await member.channel.close()
        for task in self._retired:
            task.cancel()
        await asyncio.gather(*self._retired, return_exceptions=True)

    def _opened(self) -> list[Member]:
        if not self._all:
            endpoints = self.address.endpoints
            # Not everybody begins with the same one.
            self._at = random.randrange(len(endpoints))
            self._stamp = _stamp(self.address)
            try:
                with quiet():
                    self._all = [Member(one, self._channel(one), self._protocol) for one in endpoints]
            except OSError as error:
                raise LogUnavailable(f"a certificate for {self.address.shown} cannot be read now: {error}") from error
        return self._all

    def _reopen(self) -> None:
        """Certificates are short-lived in many places: the files have changed, and a call has failed."""
        log.info("the certificates for etcd have changed, connecting anew")
        for member in self._all:
            # What is under way there may end; streams are cut, and begin again.
            task = asyncio.ensure_future(member.channel.close(grace=GRACE_S))
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)
        self._all = []

    def _channel(self, endpoint: str) -> Any:
        from grpc import aio

        if not self.address.tls:
            return aio.insecure_channel(endpoint, _OPTIONS)
        from grpc import ssl_channel_credentials

        files = (self.address.cacert, self.address.cert, self.address.key)
        ca, cert, key = (Path(one).read_bytes() if one else None for one in files)
        credentials = ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)
        return aio.secure_channel(endpoint, credentials, _OPTIONS)


def _stamp(address: Address) -> tuple[int, ...]:
    """When the files of certificates were last written; empty while one of them is being replaced."""
    found = []
    for one in (address.cacert, address.cert, address.key):
        if one:
            try:
                found.append(os.stat(one).st_mtime_ns)  # noqa: PTH116  # a number is all that is wanted
            except OSError:
                return ()
    return tuple(found)

"""Which host is which: whose the endpoint is, where the others reach this one, and its seat in the job.

The kernel is asked, not the name service alone: connecting a datagram socket sends nothing, and says from which address of
ours packets to a host would go. If that is the host's own address, the host is this machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dlrover_core.errors import SpecError

BACKLOG = 1024
SEATS_MAX = 64
# Addresses that nobody has (RFC 5737, RFC 3849): which of ours would go to the world?
_WORLD = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def joined(host: str, port: int) -> str:
    """``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """What `joined` put together."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def resolved(host: str) -> list[str]:
    """The addresses of a host, none if its name is unknown."""
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def source(address: str) -> str:
    """From which address of ours packets to ``address`` would go; empty if from none."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return ""


def is_ours(address: str) -> bool:
    """Is the address one of this machine's?"""
    return _loops(address) or source(address) == address


def is_this_machine(host: str) -> bool:
    """Torchrun's rule: loopback, or this machine's name, or an address of it."""
    return host in ("localhost", socket.gethostname()) or any(is_ours(one) for one in resolved(host))


def _loops(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def literally_loops(host: str) -> bool:
    """Is ``host`` written as a loopback address, or ``localhost``? A machine's name that resolves to one is not."""
    try:
        return host == "localhost" or _loops(host)
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens where all hosts look for the master. Raises `OSError`.

    On the address that ``host`` stands for here. On all of them where that is loopback (many systems give it to their own
    name) or not ours (a forwarder's): the others reach us from outside.
    """
    found = [one for one in resolved(host) if is_ours(one)]
    if len(found) == 1 and (not _loops(found[0]) or literally_loops(host)):
        family = socket.AF_INET6 if ":" in found[0] else socket.AF_INET
        return socket.create_server((found[0], port), family=family, backlog=BACKLOG)
    if literally_loops(host):
        return socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=BACKLOG)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address of ours; ``0.0.0.0`` and ``::`` are all of them. Raises `OSError`."""
    family = socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)[0][0]
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def outside(host: str) -> str:
    """How other hosts are to call what listens at ``host`` here."""
    if host not in ("0.0.0.0", "::"):  # noqa: S104  # recognised, not bound
        return host
    return next((one for one in (source(address) for _, address in _WORLD) if one), socket.gethostname())


def is_taken(error: OSError) -> bool:
    """Does somebody listen there already?"""
    return error.errno == errno.EADDRINUSE


class Place(NamedTuple):
    """Where the stores of this host listen, and what other hosts are told."""

    bind: str
    address: str


def place(master: str, stated: str) -> Place:
    """On the interface that leads to the master at ``host:port``; on the ``stated`` one if there is one. Raises `SpecError`."""
    if stated:
        ours = [one for one in resolved(stated) if is_ours(one)]
        # What is not ours (a name the others know, an address behind a forwarder) cannot be listened at.
        return Place(ours[0] if ours else "0.0.0.0", stated)  # noqa: S104
    host, _ = split(master)
    found = [one for one in (source(address) for address in resolved(host)) if one]
    if found and (literally_loops(host) or not _loops(found[0])):
        return Place(found[0], found[0])
    # The endpoint is this machine by its name, which is loopback here and cannot be there.
    world = [one for one in (source(address) for _, address in _WORLD) if one]
    if not world and not found:
        raise SpecError("local-addr", f"no way leads to {master}; name this host's address with --local-addr")
    here = (world or found)[0]
    return Place(here, here)


class Seat(NamedTuple):
    """This launcher's place on this host for one job. Whoever has it proves that its last holder is dead."""

    name: str
    number: int
    lock: int


@contextlib.contextmanager
def seat(directory: Path) -> Iterator[Seat]:
    """The first seat of the job's directory that nobody holds: locked while this process lives, or its sweeper."""
    for number in range(SEATS_MAX):
        fd = os.open(directory / f"seat-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        try:
            yield Seat(_name(fd), number, fd)
        finally:
            os.close(fd)
        return
    raise SpecError(
        "job-id", f"{SEATS_MAX} launchers on this host are in this job already; give others a --state-dir each"
    )


def _name(fd: int) -> str:
    """Drawn once, when the seat is made: two hosts that share a name and a path do not share this."""
    found = os.pread(fd, 64, 0).decode(errors="replace").strip()
    if len(found) != 32:
        found = secrets.token_hex(16)
        os.truncate(fd, 0)
        os.pwrite(fd, found.encode(), 0)
        os.fsync(fd)
    return found

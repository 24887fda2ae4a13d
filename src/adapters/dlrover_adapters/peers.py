"""Whom a worker can call: addresses of the groups that its group uses. And where this worker is to listen for its own callers.

A group says in its job file whose addresses it needs (``uses = ["trainer"]``). A worker of such a group asks::

    from dlrover_adapters import peers

    told = peers.wait(group="trainer")           # until one trainer can be called
    told.groups["trainer"][0]                    # ("10.0.0.7:20480",): one address for each worker of place 0
    told = peers.wait(newer_than=told.version)   # until any address has changed

and a worker that others call listens where they were told::

    server = peers.listen()

Addresses are news: a peer that moves restarts nobody. A worker that goes on asking finds it at its new address. Importing this
module imports no torch and costs milliseconds. A program in another language reads the file that the variable DLROVER_PEERS
names, as `Peers` describes it, and listens at ``host:port`` of the variable DLROVER_LISTEN.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dlrover_core.errors import MalformedMessage, SpecError

PEERS_VARIABLE, LISTEN_VARIABLE = "DLROVER_PEERS", "DLROVER_LISTEN"
FORMAT = 1
"""Of the file, its field ``format``; a reader refuses higher ones. A file without that field has this one."""

SURE_S = 1.0
"""The file is looked at so often even when inotify reports nothing: its folder may have been removed and made anew."""

LOOK_S = 0.1
"""The same where inotify is not to be had: its instances are limited for each user."""

_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_CREATE, _MOVED_TO, _DELETE_SELF, _MOVE_SELF = 0x100, 0x80, 0x400, 0x800


class Peers(NamedTuple):
    """What the newest version says.

    version: of these addresses; a change of any of them makes a greater one; 1: nobody can be called yet; 0: no file yet
    groups:  by group, by place (the node's number in its group): ``host:port`` of each worker of that node, by local rank. A
             place whose node is gone, or has not offered its ports yet, is missing. Every group in ``uses`` is there
    """

    version: int
    groups: Mapping[str, Mapping[int, tuple[str, ...]]]

    def of(self, group: str) -> tuple[str, ...]:
        """All ``host:port`` of a group, place after place. Empty before there is a version.

        Raises `SpecError` for a group that this one does not use.
        """
        if self.version and group not in self.groups:
            known = ", ".join(self.groups) or "none"
            raise SpecError(
                "group",
                f"{group!r} is not a group whose addresses are told here ({known}): add it to `uses` of this worker's group",
            )
        return tuple(address for _, those in sorted(self.groups.get(group, {}).items()) for address in those)


def peers() -> Peers:
    """The newest addresses. Reads the file, 0.1 ms for a hundred nodes: ask again before every new connection.

    Raises `SpecError` outside of a worker whose group uses others; `MalformedMessage` where the file is not what an agent writes.
    """
    return _read(_path())


def wait(*, newer_than: int = 0, group: str = "", at_least: int = 1, timeout_s: float | None = None) -> Peers:
    """Wait until there is a version above ``newer_than`` in which ``at_least`` workers of ``group`` can be called.

    ``group`` empty: any such version, and ``at_least`` counts for nothing. ``timeout_s``: seconds; None: for ever; 0: look once.
    Blocks its thread, and is woken by the change itself.

    Raises `TimeoutError`; `SpecError` outside of a worker whose group uses others, and for a group that it does not use;
    `MalformedMessage` for a file that a newer release wrote. A file that is cut short or away for now is waited for.
    """
    path, began = _path(), time.monotonic()
    with contextlib.closing(_Changes(path.parent)) as changes:
        while True:
            changes.watch()
            try:
                found, wrong = _read(path), ""
            except _CutShortError as error:
                found, wrong = Peers(0, {}), str(error)
            if found.version > newer_than and (not group or len(found.of(group)) >= at_least):
                return found
            left_s = None if timeout_s is None else began + timeout_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError(wrong or _late(found, newer_than, group, at_least, timeout_s))
            changes.wait(left_s)


def listen(*, backlog: int = 128) -> socket.socket:
    """A TCP socket that listens where the workers of other groups are told to call this one; yours to close.

    This worker's agent keeps the port bound while no worker lives, so that its successor finds it free. Whoever binds it by other
    means must set SO_REUSEPORT, too (asyncio: ``reuse_port=True``). Raises `SpecError` where no group uses this one; `OSError`.
    """
    address = os.environ.get(LISTEN_VARIABLE, "")
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise SpecError(
            LISTEN_VARIABLE,
            f"{address!r} is no HOST:PORT: nobody calls this worker; name its group in `uses` of another one in the job file"
            if address
            else "is not set: nobody calls this worker; name its group in `uses` of another one in the job file",
        )
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, int(port)), family=family, backlog=backlog, reuse_port=True)


# ---- the file


class _CutShortError(MalformedMessage):
    """The file is not whole: whoever waits looks again."""


def _path() -> Path:
    path = os.environ.get(PEERS_VARIABLE, "")
    if not path:
        raise SpecError(
            PEERS_VARIABLE,
            "is not set: this is no worker of a group that uses others; say `uses` for its group in the job file",
        )
    return Path(path)


def _read(path: Path) -> Peers:
    """What the file says. Raises `MalformedMessage`."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return Peers(0, {})
    try:
        told = json.loads(text)
        written_as = int(told.get("format", FORMAT))
        if written_as <= FORMAT:
            groups = {
                group: {int(place): tuple(those) for place, those in places.items()}
                for group, places in told["groups"].items()
            }
            return Peers(int(told["version"]), groups)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _CutShortError(
            f"{path} is not whole ({error}): nobody but the agent may write it, which does with the next change"
        ) from error
    raise MalformedMessage(
        f"{path} has format {written_as}, which a newer dlrover-core wrote; this one reads {FORMAT}: install the agent's "
        "release for this program, too"
    )


def _late(found: Peers, newer_than: int, group: str, at_least: int, timeout_s: float | None) -> str:
    """What did not come."""
    wanted = f"{at_least} workers of group {group!r}" if group else "addresses"
    newest = f"the newest is version {found.version}" if found.version else "there is no file yet"
    has = f", with {len(found.of(group))} of them" if group and found.version else ""
    return f"no {wanted} in a version above {newer_than} within {timeout_s:g} s: {newest}{has}"


class _Changes:
    """Wakes whoever waits for a change in a folder."""

    def __init__(self, folder: Path) -> None:
        import ctypes  # for whoever waits alone

        self._folder = os.fsencode(folder)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = int(self._libc.inotify_init1(_NONBLOCK | _CLOEXEC))

    def watch(self) -> None:
        """Hear of every change from now on. Call it before every look: the folder may be another one by now, or not there yet."""
        if self._fd >= 0:
            self._libc.inotify_add_watch(self._fd, self._folder, _CREATE | _MOVED_TO | _DELETE_SELF | _MOVE_SELF)

    def wait(self, left_s: float | None) -> None:
        """Until something has changed, or might have; no longer than ``left_s``."""
        poll, most_s = select.poll(), LOOK_S
        if self._fd >= 0:
            poll.register(self._fd, select.POLLIN)
            most_s = SURE_S
        if poll.poll(1000 * (most_s if left_s is None else min(most_s, left_s))):
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 65_536)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

"""The agent's side of the keeper: one unused TCPStore is always open, and its address known."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import signal
from collections.abc import Awaitable, Callable

import structlog

from dlrover_core.errors import LaunchFailed
from dlrover_core.runtime.watchdog import Watch
from dlrover_core.runtime.within import within

from . import wire
from .config import LaunchConfig
from .minding import minded
from .nursery import Spare

USELESS_KEEPERS_MAX = 3
FIX_S = 15.0
"""A named port is there within this time, or never."""
DEAD_MAX = 64
"""Addresses of dead stores that are remembered: a world may name one that died meanwhile."""

_log = structlog.get_logger(__name__)


class Stores:
    """Calls ``offer`` with each new store's ``host:port``, and ``lost`` with each that died, unused (True) or named.

    A keeper that dies takes all its stores along; it is replaced, and a new store offered. One that hangs answers nobody: it is
    killed.
    """

    def __init__(
        self,
        config: LaunchConfig,
        make: Callable[[], Awaitable[Spare]],
        gone: Callable[[int], None],
        offer: Callable[[str], None],
        lost: Callable[[str, bool], None],
    ) -> None:
        self._config, self._make, self._gone, self._offer, self._lost = config, make, gone, offer, lost
        self._dead: collections.deque[str] = collections.deque(maxlen=DEAD_MAX)
        self._keeper: Spare | None = None
        self._minding: Watch | None = None
        self._ahead = ""
        self._used: set[str] = set()
        self._life: asyncio.Task[None] | None = None
        self._closing = False
        self._fixing: asyncio.Future[str] | None = None
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def keeper_pid(self) -> int:
        """The keeper's, or 0 while there is none."""
        return self._keeper.child.pid if self._keeper is not None else 0

    def open(self) -> None:
        """Have a keeper made, and by it the first store."""
        self._life = asyncio.create_task(self._live(), name="keeper")

    async def ready(self) -> None:
        """Wait for the first store. Raises `LaunchFailed` when there will be none."""
        await asyncio.shield(self._first)

    async def _live(self) -> None:
        useless, reason = 0, ""
        while not self._closing and useless < USELESS_KEEPERS_MAX:
            try:
                keeper = self._keeper = await self._make()
            except LaunchFailed as error:
                useless, reason = useless + 1, str(error)
                continue
            asyncio.get_running_loop().add_reader(keeper.link, self._hear, keeper)
            self._order_store()
            if self._fixing is not None:
                self._order_fixed()
            self._minding = minded(
                "keeper", keeper.child, self._config.hung_s, functools.partial(wire.ask, keeper.link)
            )
            self._minding.open()
            exit_code = await asyncio.shield(keeper.child.dead)
            useless = 0 if self._ahead or self._used else useless + 1
            reason = f"it died with exit code {exit_code}"
            self._bury(keeper)
            self._lose_all()
            if not self._closing:
                _log.warning("keeper died", exit_code=exit_code, node=self._config.node)
        if not self._closing and not self._first.done():
            self._first.set_exception(LaunchFailed(f"no store can be opened on {self._config.node}: {reason}"))

    def _bury(self, keeper: Spare) -> None:
        if self._minding is not None:
            self._minding.close()
        asyncio.get_running_loop().remove_reader(keeper.link)
        keeper.link.close()
        keeper.child.reap()
        self._gone(keeper.child.pid)
        self._keeper = None

    def _lose_all(self) -> None:
        unused, named = self._ahead, sorted(self._used)
        self._ahead, self._used = "", set()
        self._dead.extend([*named, *([unused] if unused else [])])
        if not self._closing:
            for address in named:
                self._lost(address, False)
            if unused:
                self._lost(unused, True)

    def is_dead(self, address: str) -> bool:
        """Whether this store was ours and is no more."""
        return address in self._dead

    def named(self, node: str) -> None:
        """The node has its name: it is in the keeper's title from now on."""
        self._config = self._config._replace(node=node)
        self._send({"op": "title", "title": self._title()})

    def _title(self) -> str:
        return f"dlrover keeper --job {self._config.job} --node {self._config.node}"

    def _order_store(self) -> None:
        self._send({"op": "open", "bind": self._config.store_bind, "title": self._title()})

    async def fix(self, *, here: bool) -> None:
        """Have a new store at the port that somebody named, if the generation's store is ``here``. Raises `LaunchFailed`.

        Where no port is named nothing is done.
        """
        if not self._config.store_at:
            return
        if not here:
            self._send({"op": "loosen"})
            return
        fixing = self._fixing = asyncio.get_running_loop().create_future()
        self._order_fixed()
        try:
            reason = await within(FIX_S, fixing)
        except asyncio.TimeoutError:
            reason = f"no answer within {FIX_S:g} s"
        finally:
            self._fixing = None
        if reason:
            raise LaunchFailed(f"the store cannot listen at {self._config.store_at}, which was asked for: {reason}")

    def _order_fixed(self) -> None:
        host, _, port = self._config.store_at.rpartition(":")
        self._send({"op": "fix", "bind": host.strip("[]"), "port": int(port)})

    def _send(self, body: dict[str, object]) -> None:
        if self._keeper is not None:
            with contextlib.suppress(OSError):  # it is dying: its successor opens a store by itself
                wire.send(self._keeper.link, body)

    def _hear(self, keeper: Spare) -> None:
        try:
            frame = wire.receive(keeper.link)
        except BlockingIOError:
            return
        if frame is None:
            asyncio.get_running_loop().remove_reader(keeper.link)
            return
        if self._minding is not None:
            self._minding.answered()
        match frame.body:
            case {"op": "opened", "port": int(port)}:
                self._opened(port)
            case {"op": "fixed", "reason": str(reason)}:
                if self._fixing is not None and not self._fixing.done():
                    self._fixing.set_result(reason)
            case {"op": "unopened", "reason": str(reason)}:
                _log.error("no store", bind=self._config.store_bind, reason=reason, node=self._config.node)
                if not self._first.done():
                    self._first.set_exception(
                        LaunchFailed(f"no store can be opened on {self._config.store_bind}: {reason}")
                    )

    def _opened(self, port: int) -> None:
        host = self._config.store_host or self._config.store_bind
        self._ahead = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not self._first.done():
            self._first.set_result(None)
        self._offer(self._ahead)

    def spend(self, address: str) -> None:
        """A generation was given this store; if it is ours, open the next. Idempotent."""
        if address and address == self._ahead:
            self._used.add(address)
            self._ahead = ""
            self._order_store()

    def keep_only(self, address: str) -> None:
        """The generation with this store runs now; those of earlier ones are closed."""
        for old in self._used - {address}:
            self._send({"op": "drop", "port": int(old.rpartition(":")[2])})
        self._used &= {address}

    async def close(self) -> None:
        """End the keeper and its stores."""
        self._closing = True
        if self._keeper is not None:
            self._keeper.child.signal(signal.SIGKILL)
        elif self._life is not None:
            self._life.cancel()  # it waits for a keeper that nobody needs any more
        if self._life is not None:
            await asyncio.wait([self._life])
        if not self._first.done():
            self._first.cancel()
        elif not self._first.cancelled():
            self._first.exception()  # seen

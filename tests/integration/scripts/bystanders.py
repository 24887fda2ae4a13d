"""Who speaks with the masters of a job all the while: one asks them for something, one asks them who leads."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hosts_net import TOKEN

from dlrover_adapters.http.client import Unanswered, fetch_status, send_command
from dlrover_core.errors import ConnectionLost, CoreError, Refused

if TYPE_CHECKING:
    from shared_log import MasterHost

ASK_S, LOOK_S = 1.0, 0.25
PAUSE_S, ABREAST = 0.05, 3


class Petition(NamedTuple):
    """Something that was asked, and what became of it: ``seq`` 0 for a refusal, -1 where nobody knows."""

    name: str
    asked_at: float
    told_at: float
    seq: int


class Petitioner:
    """Asks for one change after another, `ABREAST` at a time, each with a reason of its own that stands in the log if it is made.

    The changes are of a size that no world cares about. Whoever answered last is asked first.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)
        self._numbers = itertools.count(1)
        self._least = itertools.cycle((1, 2))
        self._may = asyncio.Event()
        self._busy = asyncio.Semaphore(ABREAST)
        self.petitions: list[Petition] = []

    async def run(self) -> None:
        """Until cancelled."""
        self._may.set()
        await asyncio.gather(*(self._ask_on() for _ in range(ABREAST)))

    async def _ask_on(self) -> None:
        while True:
            await self._may.wait()
            async with self._busy:
                address = self._addresses[0]
                if (await self.ask(address)).seq < 0 and self._addresses[0] == address:
                    self._addresses.append(self._addresses.pop(0))
            await asyncio.sleep(PAUSE_S)

    async def ask(self, address: str, timeout_s: float = ASK_S) -> Petition:
        """Ask the master at ``address``."""
        name, began = f"petition {next(self._numbers)}", time.monotonic()
        asked = {"command": "scale", "group": "worker", "nodes_min": next(self._least), "nodes_max": 2, "reason": name}
        try:
            seq = await send_command(address, TOKEN, asked, timeout_s=timeout_s)
        except Refused:
            seq = 0
        except (Unanswered, ConnectionLost):
            seq = -1
        made = Petition(name, began, time.monotonic(), seq)
        self.petitions.append(made)
        return made

    async def pause(self) -> None:
        """Return when nothing is under way; nothing is asked from then on."""
        self._may.clear()
        for _ in range(ABREAST):
            await self._busy.acquire()

    def go_on(self) -> None:
        """Ask again."""
        self._may.set()
        for _ in range(ABREAST):
            self._busy.release()


class Claim(NamedTuple):
    """What a master said of itself to a question asked and answered at these moments."""

    asked_at: float
    told_at: float
    host: str
    status: dict[str, Any]


class Witness:
    """Asks all masters again and again, and notes the claims to lead without any doubt. One under an older token is a lie."""

    def __init__(self, hosts: Sequence[MasterHost]) -> None:
        self._hosts = hosts
        self.claims: list[Claim] = []
        self.lies: list[str] = []
        self.degraded: list[Claim] = []
        self._newest = 0

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(*(self._watch(host) for host in self._hosts))

    async def _watch(self, host: MasterHost) -> None:
        while True:
            newest, asked_at = self._newest, time.monotonic()
            with contextlib.suppress(CoreError):
                # One that is stopped answers when it goes on; it must have been asked after the next one led.
                status = dict(await fetch_status(host.at, TOKEN, timeout_s=ASK_S))
                self._hear(Claim(asked_at, time.monotonic(), host.name, status), newest)
            await asyncio.sleep(LOOK_S)

    def _hear(self, claim: Claim, newest: int) -> None:
        if claim.status.get("degraded"):
            self.degraded.append(claim)
            return
        if claim.status.get("role") != "leader":
            return
        self.claims.append(claim)
        token = int(claim.status["token"])
        if token < newest:
            self.lies.append(f"host {claim.host} says that it leads under token {token} though {newest} did before")
        self._newest = max(self._newest, token)

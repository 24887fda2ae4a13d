"""What the parts of a master see of it: the state, what should be true, whether orders may be given, and how to say something."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from dlrover_core.job.orders import Desired, Order
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Command, Reply
from dlrover_core.kernel.events import Origin
from dlrover_core.runtime.messages import Goodbye, Hello


class Leader(Protocol):
    """A `Master`, as its sessions, stalls, leveller and rendezvous need it."""

    version: str
    desired: Desired
    present: frozenset[str]
    left: asyncio.Event

    @property
    def state(self) -> JobState:
        """The committed state, while nothing is being decided."""
        ...

    @property
    def token(self) -> int:
        """This leadership's fencing token; 0 while standing by."""
        ...

    @property
    def orders(self) -> Mapping[str, Order]:
        """What every agent should be doing."""
        ...

    def may_order(self) -> bool:
        """May something new be said to agents or backends now?"""
        ...

    def now(self) -> int:
        """Microseconds by this leader's clock."""
        ...

    def submit(self, command: Command, origin: Origin | None = None) -> asyncio.Future[Reply]:
        """Hand in a command; the future is done when its outcome is durable."""
        ...

    def tell(self, command: Command) -> None:
        """Submit an observation whose reply nobody waits for."""
        ...

    def delete_grace_s(self, name: str) -> float:
        """How long a deleted node, by its backend's name, has to end by itself."""
        ...

    def look_soon(self) -> None:
        """Agents told something that is not to wait for the next look."""
        ...

    async def sent_on(self, hello: Hello) -> Goodbye | None:
        """Where an agent finds who leads; None: it is served here."""
        ...

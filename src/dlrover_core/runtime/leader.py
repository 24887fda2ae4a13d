"""What the parts of a master see of it: the state, the desired state, whether orders may be given, and how to submit commands."""

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
    """A `Master`, as its sessions, stalls, leveller and rendezvous see it."""

    version: str
    desired: Desired
    present: frozenset[str]
    left: asyncio.Event

    @property
    def state(self) -> JobState:
        """The committed state, while no decision is under way."""
        ...

    @property
    def token(self) -> int:
        """This leadership's fencing token; 0 while standing by."""
        ...

    @property
    def orders(self) -> Mapping[str, Order]:
        """The orders of all agents."""
        ...

    def may_order(self) -> bool:
        """May new orders go to agents or backends now?"""
        ...

    def now(self) -> int:
        """Microseconds by this leader's clock."""
        ...

    def submit(self, command: Command, origin: Origin | None = None) -> asyncio.Future[Reply]:
        """Submit a command; the future is done when its outcome is durable."""
        ...

    def tell(self, command: Command) -> None:
        """Submit an observation whose reply is not needed."""
        ...

    def delete_grace_s(self, name: str) -> float:
        """How long a deleted node, by its backend's name, has to end by itself."""
        ...

    def look_soon(self) -> None:
        """An agent's report must not wait for the next look."""
        ...

    async def sent_on(self, hello: Hello) -> Goodbye | None:
        """The goodbye that tells an agent where the leader is; None: this master serves it."""
        ...

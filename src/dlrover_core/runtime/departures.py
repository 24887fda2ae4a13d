"""Departures: when an agent whose connection has ended counts as dead, in joining jobs and in launched ones.

A process's death closes its connections, and a living agent reconnects at once. So a connection that the agent's kernel ended
and that is not back within `gone_s` means a dead process. If more than half of all nodes go at one moment (the only one, too), a
fault of the network or of this master is assumed, and agents get as long as an agent that tries again needs. If no agent is left,
not even a standby, nothing follows before one is back, and nothing for a while then: only silence is judged.

While this master does not know whether it still leads, nothing follows either; afterwards agents get the time once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from typing import Protocol

from dlrover_core.runtime.leader import Leader
from dlrover_core.runtime.masters import RETRY_MAX_S

# The longest time in which an agent that lost its master is back: its longest pause, and half of that for connecting.
RETURN_S = RETRY_MAX_S * 1.5
# A timer that is this late was delayed together with the whole master.
LATE_S = 0.2
DIED = "its agent died: the kernel ended its connection"


class Connected(Sized, Protocol):
    """The agents that are connected; their number counts standbys."""

    def of(self, node: str) -> object | None:
        """The session of a node's agent, if it is connected."""
        ...


class Departures:
    """Nodes whose agents are away. ``gone`` is called with node and reason once one of them counts as dead."""

    def __init__(self, master: Leader, connected: Connected, gone: Callable[[str, str], None]) -> None:
        self._master, self._connected, self._gone = master, connected, gone
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        # Nodes to report as gone once it is known again that this master leads, each with the reason.
        self._held_back: dict[str, str] = {}
        # When an agent came while no other was connected and some were missing.
        self._found_at = -RETURN_S

    def __contains__(self, node: object) -> bool:
        """Is this node's agent away, and waited for?"""
        return node in self._leaving

    def died(self, node: str, within_s: float | None = None) -> None:
        """The agent's kernel has ended its connection; it has ``within_s``, by default ``gone_s``, to be back."""
        self.part_in(node, self._master.state.job.spec.gone_s if within_s is None else within_s, DIED, doubt=True)

    def came(self) -> None:
        """An agent is connected."""
        if self._leaving and len(self._connected) == 1:
            self._found_at = asyncio.get_running_loop().time()

    def stay(self, node: str) -> None:
        """The node's agent is there, or nothing follows from its absence any more."""
        self._held_back.pop(node, None)
        timer = self._leaving.pop(node, None)
        if timer is not None:
            timer.cancel()

    def part_in(self, node: str, seconds: float, why: str, *, doubt: bool = False) -> None:
        """Unless its agent is back by then, the node is gone; with ``doubt`` only if it has probably died."""
        loop = asyncio.get_running_loop()
        self.stay(node)
        self._leaving[node] = loop.call_later(seconds, self._due, node, why, loop.time(), seconds, doubt)

    def resumed(self) -> None:
        """It is known again that this master leads: what was held back becomes due after one more chance to reconnect."""
        for node, why in list(self._held_back.items()):
            self.part_in(node, RETURN_S, why, doubt=True)

    def _due(self, node: str, why: str, since: float, seconds: float, doubt: bool) -> None:
        waited = asyncio.get_running_loop().time() - since
        doubt = doubt and self._expected(node)
        if not self._master.may_order():
            self.stay(node)
            self._held_back[node] = why
        elif waited > seconds + LATE_S:
            # This master was stopped meanwhile: agents that came back then have not been served yet.
            self.part_in(node, RETURN_S, why, doubt=doubt)
        elif doubt and self._deserted():
            self.part_in(node, RETURN_S, why, doubt=True)
        elif doubt and seconds < RETURN_S and self._too_many():
            self.part_in(node, RETURN_S, f"{why}; so did most others", doubt=True)
        else:
            self.stay(node)
            self._gone(node, why)

    def _expected(self, node: str) -> bool:
        """Is the node at work, by the log?"""
        known = self._master.state.nodes.nodes.get(node)
        return self._master.state.job.live and known is not None and known.joined and not known.released

    def _deserted(self) -> bool:
        """Is no agent connected, or was none a moment ago? Then a missing agent says nothing, and only silence is judged."""
        return not len(self._connected) or asyncio.get_running_loop().time() - self._found_at < RETURN_S

    def _too_many(self) -> bool:
        """Are more than half of all nodes losing their connections at once?"""
        joined = [node.node for node in self._master.state.nodes.nodes.values() if node.joined]
        going = sum(node in self._leaving and self._connected.of(node) is None for node in joined)
        return going * 2 > len(joined)

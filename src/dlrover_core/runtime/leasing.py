"""Leases, between agents and their leader: what a node asks for with its heartbeats, and what the leader makes of it.

A node says with every heartbeat how many positions it wants to hold, which of them its workers have used, and what it gives
back. All of this are levels: said again until an order shows that the leader knows it, and heard again by a new leader.
The leader turns them into commands, at most one a second and node where only acknowledgements are new.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.data.ranges import Ranges
from dlrover_core.errors import SpecError
from dlrover_core.job.leases import (
    BYTES_MAX,
    RATE_MAX,
    SPANS_MAX,
    HearLease,
    Leased,
    RecallLease,
    ReturnLease,
    spans_of,
)
from dlrover_core.job.names import group_of
from dlrover_core.job.shards import DATASETS_MAX, NUMBER_MAX
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Command
from dlrover_core.kernel.wire import find, part
from dlrover_core.runtime.levels import Beat, Levels

HALF = 2
"""Nodes share half of what is free, so that there is something left for those that come back sooner."""
ACKS_EVERY_US = 1_000_000
"""Between two events of one node that say nothing but acknowledgements."""
RECALL_S = 1.0
"""A node that still has work for so long can be asked to give some back to one that has none."""
RECALL_EVERY_US = 2_000_000
"""Between two such questions to one node: what it can give may lie elsewhere than what it was asked for."""
NOTHING = Ranges().pack()


class Ask(NamedTuple):
    """What one node says of one dataset.

    dataset: its name
    aim:     positions that the node wants to hold, with those that it holds already; 0: it has enough
    least:   positions of one shard for each of its workers; 0: no worker draws from it now
    rate:    samples in 1,000 s that it has used lately; 0: not known, or none
    todo:    positions that it holds and has handed out to no worker
    idle:    workers wait, and it has nothing for them
    acked:   positions that its workers have used and that it holds by its order, packed
    recall:  the newest question to give positions back that it has answered; 0: none
    yielded: the answer: positions that it never hands out, packed
    generation: the one that it speaks of, as of `LeaseTold`
    """

    dataset: str
    aim: int = 0
    least: int = 0
    rate: int = 0
    todo: int = 0
    idle: bool = False
    acked: bytes = NOTHING
    recall: int = 0
    yielded: bytes = NOTHING
    generation: int = 0


@part(14)
class LeaseBeat(NamedTuple):
    """What one node says of all datasets whose samples are leased."""

    asks: tuple[Ask, ...] = ()


def _sound(ask: Ask) -> bool:
    """Can it be what an agent of ours says?"""
    numbers = ((ask.aim, NUMBER_MAX), (ask.least, NUMBER_MAX), (ask.todo, NUMBER_MAX), (ask.rate, RATE_MAX))
    if not all(0 <= number <= most for number, most in numbers) or ask.recall < 0:
        return False
    if max(len(ask.acked), len(ask.yielded)) > BYTES_MAX:
        return False
    try:
        return max(len(spans_of(ask.acked)), len(spans_of(ask.yielded))) <= SPANS_MAX
    except SpecError:
        return False


@dataclass(slots=True, eq=False)
class Leasing(Levels):
    """All nodes' words. Each is repeated to the log until the state shows it."""

    _asks: dict[str, dict[str, Ask]] = field(default_factory=dict)
    _acked_at: dict[tuple[str, str], int] = field(default_factory=dict)
    _pressing: set[tuple[str, str]] = field(default_factory=set)
    _recalled_at: dict[tuple[str, str], int] = field(default_factory=dict)

    def heard(self, state: JobState, node: str, beat: Beat) -> bool:
        """Take in a node's heartbeat. True: workers wait, an answer has come, or these were the last acknowledgements."""
        asks = find(beat.parts, LeaseBeat).asks
        if not asks and node not in self._asks:
            return False
        self._asks[node] = {ask.dataset: ask for ask in asks[:DATASETS_MAX] if _sound(ask)}
        pressing = False
        for ask in self._asks[node].values():
            leased = state.leases.find(node, ask.dataset)
            if leased is not None and leased.hears(ask.generation) and self._presses(leased, node, ask):
                self._pressing.add((node, ask.dataset))
                pressing = True
        return pressing

    @staticmethod
    def _presses(leased: Leased, node: str, ask: Ask) -> bool:
        spans = leased.lease(node).spans
        last = not leased.free and bool(spans) and not Ranges(spans) - Ranges(spans_of(ask.acked))
        return _answers(leased, node, ask) or last or (ask.idle and not leased.finished)

    def reported(self, command: Command) -> None:
        """A node that gives its lease back wants nothing any more: the heartbeats that asked came before."""
        if isinstance(command, ReturnLease):
            self._asks.get(command.node, {}).pop(command.dataset, None)

    def forget(self, node: str) -> None:
        """The node is gone."""
        for name in self._asks.pop(node, {}):
            self._acked_at.pop((node, name), None)
            self._recalled_at.pop((node, name), None)
            self._pressing.discard((node, name))

    def findings(self, state: JobState, now_us: int) -> Iterator[HearLease | RecallLease]:
        """What nodes have said that the log does not have yet, and what slow nodes are to give back."""
        pressing, self._pressing = self._pressing, set()
        if not state.job.live:
            return
        for group in {group_of(node) for node in self._asks}:
            for name, leased in state.leases.of(group).items():
                asks = {
                    node: found[name]
                    for node, found in self._asks.items()
                    if name in found
                    and leased.hears(found[name].generation)
                    and group_of(node) == group
                    and node in state.nodes.nodes
                }
                sharers = sum(bool(ask.aim) or node in leased.held for node, ask in asks.items())
                frees = any(_answers(leased, node, ask) for node, ask in asks.items())
                waiting = sum(ask.idle and bool(ask.aim) for ask in asks.values())
                # What comes free is granted at once: whoever gives back is heard before those that wait.
                for node, ask in sorted(asks.items(), key=lambda one: one[1].idle):
                    news = self._news(leased, node, ask, now_us, pressing=(node, name) in pressing)
                    share, waits = HALF * sharers, frees and ask.idle and bool(ask.aim)
                    if waits:  # what was given back is for these, and for no others
                        share, waiting = waiting, waiting - 1
                    if news or waits:
                        self._acked_at[node, name] = now_us
                        said = ask.aim, ask.least, ask.rate, ask.acked, ask.recall, ask.yielded
                        yield HearLease(node, name, *said, share, ask.generation)
                if not leased.free:
                    for one in _recalls(leased, asks):
                        if now_us - self._recalled_at.get((one.node, name), -RECALL_EVERY_US) >= RECALL_EVERY_US:
                            self._recalled_at[one.node, name] = now_us
                            yield one

    def _news(self, leased: Leased, node: str, ask: Ask, now_us: int, *, pressing: bool) -> bool:
        """Does the log lack something that the node has said?"""
        if _answers(leased, node, ask):
            return True
        held = Ranges(leased.lease(node).spans)
        acked = held & Ranges(spans_of(ask.acked))
        if acked and (pressing or now_us - self._acked_at.get((node, ask.dataset), 0) >= ACKS_EVERY_US):
            return True
        return bool(leased.free) and node not in leased.recalled and ask.aim > held.count


def _answers(leased: Leased, node: str, ask: Ask) -> bool:
    """Does the node say what it gives back?"""
    asked = leased.recalled.get(node)
    return asked is not None and asked.number == ask.recall


def _recalls(leased: Leased, asks: dict[str, Ask]) -> Iterator[RecallLease]:
    """For each node without work: the one that needs longest for what it has left is to give it a part of that.

    The part is such that both would end together; half, where one of the paces is not known; all, where no worker draws.
    """
    rich = {node: ask for node, ask in asks.items() if ask.todo and node in leased.held and node not in leased.recalled}
    waiting = [(node, ask) for node, ask in asks.items() if ask.idle and ask.aim and node not in rich]
    waiting = waiting[len(leased.recalled) :]  # those that others were asked for already
    for node, ask in waiting:
        if not rich:
            return
        slowest = max(rich, key=lambda one: (not rich[one].least, rich[one].todo / max(rich[one].rate, 1)))
        has = rich.pop(slowest)
        if has.least and has.rate and has.todo * 1_000 <= has.rate * RECALL_S:
            return
        known = ask.rate and has.rate
        part = has.todo * ask.rate // (ask.rate + has.rate) if known else -(-has.todo // 2)
        part = part if has.least else has.todo
        if part:
            yield RecallLease(slowest, ask.dataset, part, node)

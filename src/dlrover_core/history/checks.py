"""Node checks as they go, in lines for people: which nodes are checked, which failed with which partners, the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.diagnosis.pairing import FAULTY, SLOWER
from dlrover_core.history.phrases import duration, one_line
from dlrover_core.job.checks import CheckJudged, CheckReported, CheckStarted
from dlrover_core.job.ranges import from_ranges
from dlrover_core.kernel.events import Record
from dlrover_core.words import count, first_few

# A check that takes less time prints no progress.
LONG_US, AGAIN_US = 2_000_000, 10_000_000
NODES_NAMED_MAX, WHY_MAX = 8, 160


class _Running:
    """One group's check: which nodes work together, and their reports."""

    def __init__(self, fact: CheckStarted, began_at: int) -> None:
        self.began_at = self.told_at = began_at
        self.begin(fact)

    def begin(self, fact: CheckStarted) -> None:
        names = [one.node for part in (fact.nodes, fact.partners) for one in from_ranges(fact.group, part)]
        self.round, self.kind = fact.round, fact.kind
        self.groups = [[names[one] for one in group] for group in fact.groups]
        self.waited_for = {name for group in self.groups for name in group}
        self.failed: dict[str, CheckReported] = {}

    def failures(self) -> str:
        """The nodes that failed in this round, with their partners, and why."""
        told = []
        for group in self.groups:
            words = [self.failed[name] for name in group if name in self.failed]
            unfit = [one for one in words if not one.fit]
            if unfit:
                told += [f"{one.node} failed alone ({one_line(one.what, WHY_MAX)})" for one in unfit]
            elif words:
                others = [name for name in group if name != words[0].node]
                with_whom = f" with {', '.join(others)}" if others else ""
                told.append(f"{words[0].node} failed{with_whom} ({one_line(words[0].what, WHY_MAX)})")
        return first_few(told, between="; ")


class CheckNews:
    """Turns records into lines; most give none."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}

    def feed(self, record: Record) -> Iterator[str]:
        """The lines to print now."""
        match record.event:
            case CheckStarted():
                yield from self._started(record.event, record.at)
            case CheckReported():
                yield from self._reported(record.event, record.at)
            case CheckJudged():
                yield from self._judged(record.event, record.at)
            case _:
                return

    def _started(self, fact: CheckStarted, at: int) -> Iterator[str]:
        running = self._running.get(fact.group)
        if running is None or fact.round == 1:
            running = self._running[fact.group] = _Running(fact, at)
            helpers = sum(many for _, _, many, _, _ in fact.partners)
            help_ = f", with {count(helpers, 'partner')}" if helpers else ""
            yield f"node check ({fact.kind}): {count(len(running.waited_for) - helpers, 'node')}{help_}, {fact.why}"
            return
        failures = running.failures()
        before = {frozenset(one) for one in running.groups}
        failed_in = running.round
        running.begin(fact)
        others = " with other partners" if before != {frozenset(one) for one in running.groups} else " with the same"
        yield f"node check, round {failed_in}: {failures or 'a node is slow'}; round {fact.round}{others}"

    def _reported(self, fact: CheckReported, at: int) -> Iterator[str]:
        running = self._running.get(fact.node.rsplit("-", 2)[0])
        if running is None:  # another master printed its beginning
            return
        running.waited_for.discard(fact.node)
        if not fact.ok:
            running.failed[fact.node] = fact
        if running.waited_for and at - running.began_at >= LONG_US and at - running.told_at >= AGAIN_US:
            running.told_at = at
            all_ = sum(len(group) for group in running.groups)
            rest = sorted(running.waited_for)
            waits = f"waiting for {first_few(rest)}"
            yield f"node check, round {running.round}: {all_ - len(rest)} of {all_} nodes have answered; {waits}"

    def _judged(self, fact: CheckJudged, at: int) -> Iterator[str]:
        running = self._running.pop(fact.group, None)
        failures = running.failures() if running is not None else ""
        if failures:
            yield f"node check, round {fact.rounds}: {failures}"
        for node, kind, why in fact.found[:NODES_NAMED_MAX]:
            words = {FAULTY: "is faulty", SLOWER: "is slow"}.get(kind, "cannot be told apart from its partners")
            yield f"node check: {node} {words}: {one_line(why, WHY_MAX)}"
        if len(fact.found) > NODES_NAMED_MAX:
            yield f"node check: and {len(fact.found) - NODES_NAMED_MAX} more"
        took = f" in {duration(at - running.began_at)}" if running is not None else ""
        yield f"node check: {count(sum(many for _, _, many, _, _ in fact.passed), 'node')} passed{took}"

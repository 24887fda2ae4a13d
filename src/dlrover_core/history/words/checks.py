"""Events of node checks in words."""

from __future__ import annotations

from dlrover_core.history.phrases import duration
from dlrover_core.history.words import Words
from dlrover_core.job import checks
from dlrover_core.job.ranges import from_ranges
from dlrover_core.words import count

CHECKED = {"unclear": "not told apart from its partners"}
SHOWN_GROUPS_MAX = 16


def _check(fact: checks.CheckStarted) -> str:
    names = [one.node for part in (fact.nodes, fact.partners) for one in from_ranges(fact.group, part)]
    said = [" with ".join(names[one] for one in group) for group in fact.groups[:SHOWN_GROUPS_MAX]]
    more = f", and {len(fact.groups) - len(said)} more" if len(fact.groups) > len(said) else ""
    return f"node check {fact.number} ({fact.kind}), round {fact.round}: {', '.join(said)}{more} ({fact.why})"


def _check_word(fact: checks.CheckReported) -> str:
    how = f"passed in {duration(fact.took_us)}" if fact.ok else f"failed: {fact.what}"
    return f"node check {fact.number}, round {fact.round}: {fact.node} {how}"


def _check_end(fact: checks.CheckJudged) -> str:
    passed = sum(many for _, _, many, _, _ in fact.passed)
    found = "; ".join(f"{node} is {CHECKED.get(kind, kind)}: {why}" for node, kind, why in fact.found)
    return f"node check {fact.number}: {count(passed, 'node')} passed{'; ' + found if found else ''}"


WORDS: Words = {
    checks.CheckStarted: _check,
    checks.CheckReported: _check_word,
    checks.CheckJudged: _check_end,
    checks.CheckAsked: lambda fact: (
        f"{', '.join(fact.nodes) or f'all of {fact.group}'} are to be checked before the next world: {fact.why}"
    ),
}

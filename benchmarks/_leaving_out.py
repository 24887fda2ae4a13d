"""Leaving one out: each log judged by a table of signatures to which its own source, or its own family, taught nothing.

A pattern is a choice of branches. A branch is *supported* by a source where it matches a line of that source's logs. Where one
source alone supports a branch, nobody can tell whether it would have been written without that source: so it is taken out when
that source's logs are judged. A branch that several sources support would have been written from the others.

- `STRICT` takes all such branches out, also those that catalogues and manuals tell of. It is a lower bound.
- `TAUGHT` spares what the table held before the engine was first tried on the corpus (`tests/corpus/earlier.txt`: the
  beginnings of those branches' sha256). It is the nearest estimate of how the engine does on a source that it has not met.

What cannot be left out: codes (exit codes, Xids, error numbers, types of exceptions, reasons of platforms), the vocabulary of
last resort, and the rules of the procedure.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dlrover_core.diagnosis import who
from dlrover_core.diagnosis.matching import fastest
from dlrover_core.diagnosis.signatures import Signature, Table

STRICT, TAUGHT = "strict", "taught"
EARLIER = Path(__file__).resolve().parent.parent / "tests" / "corpus" / "earlier.txt"
FIGURES = 12
"""So many figures of a branch's sha256 are kept."""


class Branch(NamedTuple):
    """One branch of a signature's pattern."""

    signature: str
    text: str


def branches(pattern: str) -> list[str]:
    """The branches of a pattern's outermost choice."""
    depth, begin, at, inside, made = 0, 0, 0, False, []
    while at < len(pattern):
        sign = pattern[at]
        if sign == "\\":
            at += 1
        elif inside:
            inside = sign != "]"
        elif sign == "[":
            inside = True
        elif sign == "|" and not depth:
            made.append(pattern[begin:at])
            begin = at + 1
        else:
            depth += (sign == "(") - (sign == ")")
        at += 1
    return [*made, pattern[begin:]]


def earlier() -> frozenset[str]:
    """The beginnings of the sha256 of the branches that were there before the corpus was read."""
    return frozenset(EARLIER.read_text(encoding="utf-8").split())


def mark_of(branch: str) -> str:
    """How a branch is named in `earlier.txt`."""
    return hashlib.sha256(branch.encode()).hexdigest()[:FIGURES]


def supported(table: Table, texts: Sequence[tuple[str, str]]) -> Mapping[Branch, frozenset[str]]:
    """Of each branch the groups that support it. ``texts``: a group (a source, a family) and one of its logs."""
    every = [
        Branch(one.id, text) for one in table.by_id.values() for pattern in one.patterns for text in branches(pattern)
    ]
    matcher = fastest()([one.text for one in every])
    found: dict[Branch, set[str]] = defaultdict(set)
    for group, text in texts:
        lines = text.splitlines()
        for line in {*lines, *(who.peel(line).body for line in lines)}:
            for index in matcher.match(line.encode()) if line.strip() else ():
                found[every[index]].add(group)
    return {branch: frozenset(groups) for branch, groups in found.items()}


def without(table: Table, support: Mapping[Branch, frozenset[str]], group: str, how: str) -> str:
    """The table's rows as a user's own would replace them, without what only this group supports; empty: nothing changes."""
    spared = earlier() if how == TAUGHT else frozenset()
    gone = {branch for branch, groups in support.items() if groups == {group} and mark_of(branch.text) not in spared}
    rows = [_row(table.by_id[name], gone) for name in sorted({one.signature for one in gone})]
    return json.dumps(rows) if rows else ""


def _row(one: Signature, gone: set[Branch]) -> Mapping[str, object]:
    """A signature as a file of one's own has it."""
    told = one._asdict()
    verdict = told.pop("verdict")
    return {**told, "class": verdict, "patterns": [*_left(one, gone)]}


def _left(one: Signature, gone: set[Branch]) -> Iterator[str]:
    for pattern in one.patterns:
        kept = [text for text in branches(pattern) if Branch(one.id, text) not in gone]
        if kept:
            yield "|".join(kept)

"""Finds signatures in text: most lines of a log mean nothing, and must cost nothing.

All patterns are one set. A block of lines is shown to the set as a whole; only where something in it matches is it halved, down
to the line. Whichever engine runs the set, the result is the same: a line's hits are then settled here, by the standard library.
Case counts for nothing, text is bytes, ``^`` and ``$`` are a line's ends.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from dlrover_core.diagnosis import peers
from dlrover_core.diagnosis.patterns import words
from dlrover_core.diagnosis.signatures import CodePattern, Signature, Table, table

GROUP = "dlrover.matchers"
LINE_BYTES_MAX = 4096
BLOCK_BYTES = 16 * 1024
HITS_MAX = 64
SAME_MAX = 8
SIEVED_MAX = 256
# Signatures of a mistake of the program's own, told by an exception's words.
MISTAKES = "mistake."
SUBJECT_MAX = 200
ASKED_MAX = 20_000

_FLAGS = re.IGNORECASE | re.MULTILINE
_LETTERS = re.compile(rb"[a-z]{3,}")
_COLOUR = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")


class SetMatcher(Protocol):
    """Many patterns at once. The entry point group `dlrover.matchers` holds those installed."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Compile them; each is one that `patterns.words` admits."""

    def match(self, text: bytes) -> Sequence[int]:
        """Which of them may match somewhere in ``text``: their indices, in any order, and none left out that does match."""


class ReSet:
    """The set over the standard library.

    A pattern is run where the text has a run of letters that contains what a match of it must contain. Logs repeat their words,
    so that what a word asks for is remembered: a block of known words costs its splitting.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._compiled = [re.compile(one.encode(), _FLAGS) for one in patterns]
        self._always: list[int] = []
        self._wanted: dict[bytes, list[int]] = {}
        self._asked: dict[bytes, tuple[int, ...]] = {}
        for index, pattern in enumerate(patterns):
            runs = {max(_LETTERS.findall(word.encode()), key=len, default=b"") for word in words(pattern)}
            if not runs or b"" in runs:
                self._always.append(index)
                continue
            for run in runs:
                self._wanted.setdefault(run, []).append(index)

    def match(self, text: bytes) -> Sequence[int]:
        """As the port says."""
        maybe = set(self._always)
        for run in set(_LETTERS.findall(text.lower())):
            asked = self._asked.get(run)
            maybe.update(self._ask(run) if asked is None else asked)
        return [index for index in maybe if self._compiled[index].search(text)]

    def _ask(self, run: bytes) -> tuple[int, ...]:
        if len(self._asked) >= ASKED_MAX:
            self._asked.clear()
        found = {index for wanted, indices in self._wanted.items() if wanted in run for index in indices}
        self._asked[run] = tuple(sorted(found))
        return self._asked[run]


class Hit(NamedTuple):
    """A signature in a line. ``number``: the line's, from 1; ``subject``: what else the line names."""

    signature: Signature
    line: str
    number: int
    subject: str = ""


class Matcher:
    """Finds the signatures of one table in text. ``engine``: the class that runs the set (default: the fastest installed)."""

    def __init__(self, table: Table, engine: type[SetMatcher] | None = None) -> None:
        self._table = table
        self._rules: list[Signature | CodePattern] = []
        patterns: list[str] = []
        for one in table.by_id.values():
            for pattern in one.patterns:
                self._rules.append(one)
                patterns.append(pattern)
        for coded in table.code_patterns:
            self._rules.append(coded)
            patterns.append(coded.pattern)
        self._patterns = patterns
        # Codes first, for their rank is known only once they are read; then signatures by rank.
        self._order = [
            (1, -rule.priority, -rule.confidence, index) if isinstance(rule, Signature) else (0, 0, 0.0, index)
            for index, rule in enumerate(self._rules)
        ]
        self._set = (engine or fastest())(patterns)

    @property
    def table(self) -> Table:
        """What it looks for."""
        return self._table

    @property
    def size(self) -> int:
        """How many patterns."""
        return len(self._rules)

    def scan(self, text: str, source: str = "") -> list[Hit]:
        """Each line's signature, if it has one, in order. ``source``: where the text is from; empty: from anywhere.

        At most `HITS_MAX`, and of one signature at most `SAME_MAX`: a flood of one kind hides no other.
        """
        found: list[Hit] = []
        seen: Counter[str] = Counter()
        for first, lines in _blocks(_plain(text)):
            for hit in self._block(lines, first, source):
                seen[hit.signature.id] += 1
                if seen[hit.signature.id] <= SAME_MAX and len(found) < HITS_MAX:
                    found.append(hit)
        return found

    @staticmethod
    def best(hits: Iterable[Hit]) -> Hit | None:
        """The hit that tells most: by priority, then confidence, then the earliest."""
        return max(hits, key=lambda hit: hit.signature.rank, default=None)

    def _block(self, lines: Sequence[bytes], first: int, source: str) -> Iterator[Hit]:
        if len(lines) == 1:
            hit = self._line(lines[0][:LINE_BYTES_MAX], first, source)
            if hit is not None:
                yield hit
        # A pattern's white space would run over thousands of empty lines from each of them.
        elif self._set.match(b"\n".join(line for line in lines if line.strip())):
            half = len(lines) // 2
            yield from self._block(lines[:half], first, source)
            yield from self._block(lines[half:], first + half, source)

    def _line(self, line: bytes, number: int, source: str) -> Hit | None:
        best: tuple[Signature, str] | None = None
        named: tuple[Signature, str] | None = None
        # From the strongest on: of what cannot be better than the best nothing need be looked at.
        for index in sorted(self._set.match(line), key=self._order.__getitem__):
            rule = self._rules[index]
            if best is not None and isinstance(rule, Signature) and rule.rank <= best[0].rank:
                break
            claim = self._claim(index, line, source)
            if claim is None or (source and source not in claim[0].sources) or _excused(claim[0], line):
                continue
            if claim[0].id.startswith("exception.") and claim[1]:
                named = claim
            if best is None or claim[0].rank > best[0].rank:
                best = claim
        if best is None:
            return None
        if best[0].id.startswith(MISTAKES) and named is not None:
            # The program's mistake is called by the exception that it raised; its words make that surer.
            best = named[0]._replace(confidence=best[0].confidence, priority=best[0].priority, general=False), named[1]
        if best[0].id in peers.OPEN:
            whose = self._table.get(peers.meant(best[0].id, line.decode(errors="replace")))
            if whose is not None and (not source or source in whose.sources):
                best = whose._replace(priority=best[0].priority), best[1]
        subject = best[1] or _subject(best[0], line)
        return Hit(best[0], line.decode(errors="replace"), number, subject[:SUBJECT_MAX])

    def _claim(self, index: int, line: bytes, source: str) -> tuple[Signature, str] | None:
        """The signature that the pattern stands for in this line, and what its code names."""
        rule = self._rules[index]
        if isinstance(rule, Signature):
            return (rule, "") if _compiled(self._patterns[index]).search(line) else None
        if rule.sources and source and source not in rule.sources:
            return None
        for found in _compiled(rule.pattern).finditer(line):
            if rule.kind == "exception" and not opens(line[: found.start(1)]):
                continue
            code = next(group for group in found.groups() if group is not None).decode()
            signature = self._table.coded(rule.kind, code)
            if signature is None and rule.otherwise:
                named = f"{rule.otherwise}.{code}" if rule.kind == "exception" else rule.otherwise
                signature = self._table.get(named)
            if signature is not None:
                return signature, code if rule.kind == "exception" else ""
        return None


class Sieve:
    """Finds the lines of a long text that are worth reading: where any of a table's patterns, or a mark, may match."""

    def __init__(self, table: Table, marks: Sequence[str], engine: type[SetMatcher] | None = None) -> None:
        patterns = [pattern for one in table.by_id.values() for pattern in one.patterns if one.verdict]
        patterns += [one.pattern for one in table.code_patterns]
        self._set = (engine or fastest())([*patterns, *marks])

    def lines(self, data: bytes) -> list[int]:
        """Numbers of such lines, from 0. Of one pattern at most `SAME_MAX` and of all `SIEVED_MAX` in one text."""
        found: list[int] = []
        counted: Counter[int] = Counter()
        number = 0
        begin = 0
        while begin < len(data) and len(found) < SIEVED_MAX:
            end = data.find(b"\n", begin + BLOCK_BYTES)
            end = len(data) if end < 0 else end
            block = data[begin:end]
            lines = (_COLOUR.sub(b"", block) if b"\x1b" in block else block).split(b"\n")
            self._look(lines, number, counted, found)
            number += len(lines)
            begin = end + 1
        return found

    def _look(self, lines: Sequence[bytes], first: int, counted: Counter[int], found: list[int]) -> None:
        matched = self._set.match(b"\n".join(line[:LINE_BYTES_MAX] for line in lines if line.strip()))
        if not matched or all(counted[index] >= SAME_MAX for index in matched):
            return
        if len(lines) == 1:
            counted.update(matched)
            found.append(first)
            return
        half = len(lines) // 2
        self._look(lines[:half], first, counted, found)
        self._look(lines[half:], first + half, counted, found)


@functools.lru_cache(maxsize=8)
def matcher(table: Table) -> Matcher:
    """The table's matcher, compiled once."""
    return Matcher(table)


def prepare(extra: str = "") -> None:
    """Read the table and compile it, 30 to 70 ms of CPU: else the first failure waits for it. ``extra``: `JobSpec.signatures`."""
    matcher(table(extra))


@functools.lru_cache(maxsize=1)
def fastest() -> type[SetMatcher]:
    """The engine that is installed beside us; without one, or where it does not load, the standard library's."""
    from importlib.metadata import entry_points

    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            loaded: type[SetMatcher] = entry.load()
        except ImportError:  # it is declared, and its library is an extra
            continue
        return loaded
    return ReSet


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[bytes]:
    return re.compile(pattern.encode(), _FLAGS)


# Before an exception's name: its package, a level that is no warning, a name with a colon; or times, ranks, hosts and brackets.
_LEADS = re.compile(
    rb"(?i)un(?:caught|handled)\b:?|exception:?|[\w.]+\.|[\w.]*RayTaskError\([\w.]*|(?:error|critical|fatal)\b\S*|(?:\S+:)?(?:error|critical|fatal|stderr|stdout|err|[EFP])[\]:|-]*|\S*[:|>][\"\x27]?(?:[\w.]+\.)?|[\[(<]\S*|\S*\d\S*|\W+"
)
_DENIES = re.compile(
    rb"(?i)\b(?:warn(?:ing)?|info|debug|trace|caught|except|ignor\w+|handl\w+|retry\w*|skip\w*|suppress\w*|raises?|no|reason|status)\b"
)
_POD, _CONTAINER = re.compile(rb"[a-z][\w.]*(?:-[\w.]+)+"), re.compile(rb"[a-z][a-z-]+")
_LEAD_BYTES_MAX = 200


def opens(before: bytes) -> bool:
    """Is what stands before an exception's name only what logs put there, so that it was raised and not talked about?"""
    before = before.rpartition(b"\\n")[2]  # a line break within JSON
    before = before.rpartition(b"Internal: ")[2]  # a server's status, around what a backend of its raised
    if len(before) > _LEAD_BYTES_MAX or _DENIES.search(before):
        return False
    words = before.split()
    if len(words) > 1 and _POD.fullmatch(words[0]) and _CONTAINER.fullmatch(words[1]):
        words = words[2:]
    return all(_LEADS.fullmatch(word) for word in words)


def _excused(signature: Signature, line: bytes) -> bool:
    return any(_compiled(pattern).search(line) for pattern in signature.unless)


def _subject(signature: Signature, line: bytes) -> str:
    found = _compiled(signature.subject).search(line) if signature.subject else None
    named = next((group for group in found.groups() if group), b"") if found else b""
    return named.decode(errors="replace").strip()


def _plain(text: str) -> bytes:
    """Bytes with lines parted by newlines alone: a progress bar overwrites its line."""
    data = text.encode(errors="replace")
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data


def _blocks(data: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Lines without their colours, which are no words, in blocks of about `BLOCK_BYTES`, each with the number of its first.

    Nothing is done to all of a text at once that takes long: whoever scans in a thread would keep all others waiting.
    """
    begin, number = 0, 1
    while begin < len(data):
        end = data.find(b"\n", begin + BLOCK_BYTES)
        end = len(data) if end < 0 else end
        block = data[begin:end]
        lines = (_COLOUR.sub(b"", block) if b"\x1b" in block else block).split(b"\n")
        yield number, lines
        number += len(lines)
        begin = end + 1

"""Regular expressions that any engine runs in linear time: which are admitted, and what every match of one must contain.

What a match must contain makes the standard library's engine usable: of 500 patterns it need run only those whose words occur.
Read here is the common part of `re`'s and RE2's languages; whatever else there is, is refused by name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

PATTERN_MAX = 1000
REPEAT_MAX = 1000
# A shorter word occurs in too many lines to tell anything.
WORD_MIN = 3

_GROUP = re.compile(r"\(\?(?::|P<\w+>|[ims]*(?:-[ims]+)?:)")
_REFUSED_GROUP = {
    "(?=": "look-ahead",
    "(?!": "look-ahead",
    "(?<=": "look-behind",
    "(?<!": "look-behind",
    "(?>": "an atomic group",
    "(?P=": "a back-reference",
    "(?(": "a condition",
}
_COUNT = re.compile(r"\{(\d+)(,(\d*))?\}")
_ZERO_WIDTH = "bB"
_CLASSES = "dDwWsS"
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}


class Unfit(Exception):
    """A pattern that not every engine runs in linear time; says why."""


class _Part(NamedTuple):
    """A piece of a sequence: a fixed text, or a choice of texts of which each match has one, or (empty) anything at all.

    ``endless``: it repeats without bound inside.
    """

    text: str = ""
    choice: frozenset[str] = frozenset()
    endless: bool = False
    zero_width: bool = False


def words(pattern: str) -> frozenset[str]:
    """Lower-case texts of which every match contains at least one; empty: none is certain. Raises `Unfit`."""
    return _Reader(pattern).read()


class _Reader:
    """Reads one pattern from the left."""

    def __init__(self, pattern: str) -> None:
        if not pattern.isascii():
            raise Unfit("only ASCII characters; '.' stands for any other")
        if len(pattern) > PATTERN_MAX:
            raise Unfit(f"longer than {PATTERN_MAX} characters")
        if not pattern:
            raise Unfit("empty: it would match every line")
        self._pattern, self._at = pattern, 0

    def read(self) -> frozenset[str]:
        found, _ = self._choice()
        if self._at < len(self._pattern):
            raise Unfit(f"an unmatched ')' at character {self._at + 1}")
        self._compiles()
        return found

    def _compiles(self) -> None:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                compiled = re.compile(self._pattern.encode(), re.IGNORECASE | re.MULTILINE)
            except (re.error, FutureWarning, DeprecationWarning, OverflowError) as error:
                raise Unfit(f"not a regular expression: {error}") from None
        if compiled.search(b""):
            raise Unfit("it would match every line")

    def _choice(self) -> tuple[frozenset[str], bool]:
        """Branches up to the group's end: what one of them must contain, and whether something in them is endless."""
        branches = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            branches.append(self._sequence())
        certain = all(found for found, _ in branches)
        return (
            frozenset().union(*(found for found, _ in branches)) if certain else frozenset(),
            any(endless for _, endless in branches),
        )

    def _sequence(self) -> tuple[frozenset[str], bool]:
        options: list[frozenset[str]] = []
        run, endless = "", False
        while (next_ := self._peek()) and next_ not in "|)":
            part = self._part()
            least, unbounded = self._quantifier(part)
            endless = endless or part.endless or unbounded
            if part.zero_width:
                continue
            run = run + part.text if least and part.text else self._closed(options, run)
            if least and part.choice:
                options.append(part.choice)
            if run and (least, unbounded) != (1, False):
                run = self._closed(options, run)
        self._closed(options, run)
        return max(options, key=_worth, default=frozenset()), endless

    @staticmethod
    def _closed(options: list[frozenset[str]], run: str) -> str:
        if len(run) >= WORD_MIN:
            options.append(frozenset([run]))
        return ""

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _part(self) -> _Part:
        here = self._peek()
        if here == "(":
            return self._group()
        if here == "[":
            return self._class()
        if here == "\\":
            return self._escape()
        self._at += 1
        if here in "^$":
            return _Part(zero_width=True)
        return _Part() if here == "." else _Part(text=here.lower())

    def _group(self) -> _Part:
        rest = self._pattern[self._at :]
        for start, what in _REFUSED_GROUP.items():
            if rest.startswith(start):
                raise Unfit(f"{what} ({start}...) cannot be run in linear time")
        plain = _GROUP.match(rest)
        if plain is None and rest.startswith("(?"):
            raise Unfit(f"a group of a kind that not all engines know: {rest[:6]}")
        self._at += plain.end() if plain else 1
        found, endless = self._choice()
        if self._peek() != ")":
            raise Unfit("a '(' without its ')'")
        self._at += 1
        return _Part(choice=found, endless=endless)

    def _class(self) -> _Part:
        end = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]").match(self._pattern, self._at)
        if end is None:
            raise Unfit("a '[' without its ']'")
        if "[:" in end.group()[1:]:
            raise Unfit("a class by name ([[:alpha:]]) that not all engines know")
        self._at = end.end()
        return _Part()

    def _escape(self) -> _Part:
        escaped = self._pattern[self._at + 1 : self._at + 2]
        self._at += 2
        if escaped.isdigit() and escaped != "0":
            raise Unfit(f"a back-reference (\\{escaped}) cannot be run in linear time")
        if escaped in _ZERO_WIDTH or escaped == "A":
            return _Part(zero_width=True)
        if escaped in _CLASSES:
            return _Part()
        if escaped.isalnum():
            if escaped not in _CONTROL and escaped != "x":
                raise Unfit(f"\\{escaped}, which not all engines know")
            self._at += 2 if escaped == "x" else 0
            return _Part()
        return _Part(text=escaped)

    def _quantifier(self, part: _Part) -> tuple[int, bool]:
        """How often at least, and is there no bound?"""
        here = self._peek()
        if here in {"*", "+", "?"}:
            self._at += 1
            least, unbounded = int(here == "+"), here != "?"
        elif here == "{" and (counted := _COUNT.match(self._pattern, self._at)):
            self._at = counted.end()
            least, unbounded = int(counted[1]), bool(counted[2]) and not counted[3]
            if max(least, int(counted[3] or 0)) > REPEAT_MAX:
                raise Unfit(f"a repetition of more than {REPEAT_MAX}")
        else:
            return 1, False
        if self._peek() == "+":
            raise Unfit("a possessive repetition, which not all engines know")
        if self._peek() == "?":
            self._at += 1
        if unbounded and part.endless:
            raise Unfit("an endless repetition of an endless repetition")
        return least, unbounded


def _worth(choice: frozenset[str]) -> tuple[int, int]:
    """Long words are rare, and few are soon looked for."""
    return min(map(len, choice)) if len(choice) < 12 else 1, -len(choice)

"""The words of a shell's command line, with their places in the text, and with the variables that are known filled in.

Users of an ElasticJob write their launcher's line into ``bash -c "..."``. What it says is read without running it. This knows
quotes, escapes, ``$NAME``, ``${NAME}``, ``${NAME:-default}`` and what separates commands; a word with anything else that a shell
would work out is *open*: its value is known to the shell alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BRACED = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?::?-([^{}$`]*))?\}")
_ENDS = ";&|()\n"


class Word(NamedTuple):
    """One word.

    text:  what the program would see; of an open word the part that is known, and variables as they stand there
    start: where the word begins in the line
    end:   where it ends
    open:  is its value known to the shell alone?
    """

    text: str
    start: int
    end: int
    open: bool = False


def commands(line: str, env: Mapping[str, str]) -> Iterator[list[Word]]:
    """The simple commands of a line, in their order: what ``;``, ``&&``, ``|``, brackets and ends of lines separate."""
    found: list[Word] = []
    at = 0
    while at < len(line):
        one = line[at]
        if one in _ENDS:
            if found:
                yield found
            found, at = [], at + 1
        elif line.startswith("\\\n", at):
            at += 2
        elif one.isspace():
            at += 1
        elif one == "#":
            at = (line.find("\n", at) + 1 or len(line) + 1) - 1
        else:
            word = _word(line, at, env)
            found.append(word)
            at = word.end
    if found:
        yield found


def _word(line: str, start: int, env: Mapping[str, str]) -> Word:
    """The word that begins at ``start``."""
    text, is_open, quote, at = "", False, "", start
    while at < len(line):
        one = line[at]
        if not quote and (one.isspace() or one in _ENDS):
            break
        if one == quote:
            quote, at = "", at + 1
        elif one in "'\"" and not quote:
            quote, at = one, at + 1
        elif one == "\\" and quote != "'":
            text += "" if line[at + 1 : at + 2] == "\n" else line[at + 1 : at + 2]
            at += 2
        elif one == "$" and quote != "'":
            part, at, unknown = _variable(line, at, env)
            text, is_open = text + part, is_open or unknown
        elif one == "`" and quote != "'":
            end = _after(line, "`", at + 1)
            text, at, is_open = text + line[at:end], end, True
        else:
            text, at = text + one, at + 1
    return Word(text, start, min(at, len(line)), is_open)


def _variable(line: str, at: int, env: Mapping[str, str]) -> tuple[str, int, bool]:
    """What ``$`` at this place stands for, where it ends, and whether that is unknown."""
    if line.startswith("$(", at):
        end = _closing(line, at + 1)
        return line[at:end], end, True
    braced = _BRACED.match(line, at + 1)
    name = braced or _NAME.match(line, at + 1)
    if name is None:
        return "$", at + 1, line[at + 1 : at + 2] in set("{@*#?0123456789")
    called = name[1] if braced else name[0]
    value = env.get(called, braced[2] if braced else None)
    return (line[at : name.end()], name.end(), True) if value is None else (value, name.end(), False)


def _closing(line: str, at: int) -> int:
    """Behind the bracket that closes the one at this place."""
    depth = 0
    for place in range(at, len(line)):
        depth += {"(": 1, ")": -1}.get(line[place], 0)
        if depth == 0:
            return place + 1
    return len(line)


def _after(line: str, what: str, at: int) -> int:
    found = line.find(what, at)
    return len(line) if found < 0 else found + len(what)

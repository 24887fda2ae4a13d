"""What words of a failure that no signature knows are likely about: the field's vocabulary, and no message of any one program.

A guess names the signature that stands for a family, and is less than half sure: it is told as "unknown", with its line. It
counts only where nothing else is known: of a log in which signatures found nothing, or nothing but ends, consequences and general
symptoms; and of an exception whose type anybody raises and whose words are new. Jobs that run are never judged by it.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from importlib import resources

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same library under the name it had before
    import tomli as tomllib

GUESSED = 0.45
"""How sure a guess is: less than `procedure.KNOWN`."""
LINES_MAX, LENGTH_MAX = 400, 2000

# A line that says that something failed; and one that says that nothing has, or that it was lived through.
_FAILS = re.compile(
    r"\b(?:\w*errors?|\w*exception|fail(?:ed|ure|s)?|fatal|abort(?:ed)?|cannot|could not|couldn.t|did not|unable|panic|critical"
    r"|timed? ?out|denied|refused|not (?:found|available|responding)|lost|dead|died|evicted|preempted|mismatch|corrupt\w*"
    r"|killed|not enough|insufficient|exceeded|exhausted|terminated|offline"
    r"|can.t|no such|disconnected|disallowed|not allowed|called before|\w+Sanitizer)\b",
    re.IGNORECASE,
)
_LIVED = re.compile(
    r"\b(?:info|debug|retry(?! (?:count|counter|limit|budget)\b)\w*|skipp\w+|ignor\w+|falling back"
    r"|recovered|handled|0 (?:errors?|failures?)|no errors?"
    r"|errors?[:=] ?0|without errors?)\b",
    re.IGNORECASE,
)
# Or that a program only warned of it.
_WARNED = re.compile(r"\bwarn(?:ing)?\b", re.IGNORECASE)
# Libraries whose warnings are what they fail of: NCCL's and libfabric's own levels.
_LEVELS = re.compile(r"\bNCCL WARN\b|<warn>")
# Where a type's name has its words: EndpointConnectionError.
_PARTS = re.compile(r"(?<=[a-z])(?=[A-Z])|_")


@functools.lru_cache(maxsize=1)
def families() -> tuple[tuple[str, tuple[re.Pattern[str], ...]], ...]:
    """Each signature that stands for a family, and the words that must all be there; from the most telling on."""
    text = resources.files(__package__).joinpath("vocabulary.toml").read_text(encoding="utf-8")
    return tuple(
        (row["signature"], tuple(re.compile(one, re.IGNORECASE) for one in row["words"]))
        for row in tomllib.loads(text)["family"]
    )


def likeliest(text: str) -> str:
    """The signature that words are likely about, or empty."""
    said = text[-LENGTH_MAX:]
    first = said.split(maxsplit=1)[0] if said.strip() else ""
    said = f"{_PARTS.sub(' ', first) if first.endswith(':') else ''} {said}"
    return next((name for name, words in families() if all(one.search(said) for one in words)), "")


def guess(
    lines: Sequence[str], meant: Callable[[str], bool] = bool, warned: Container[int] = ()
) -> tuple[int, str] | None:
    """Of the last lines of a log the first that fails, by its index, and what it is likely about; None: there is none.

    ``meant``: may that signature be the one? ``warned``: lines that only warn, which count where no other line fails.
    """
    last = range(max(0, len(lines) - LINES_MAX), len(lines))
    for only_warned in (False, True):
        for number in last:
            line = _LEVELS.sub(" ", lines[number])
            warns = number in warned or _WARNED.search(line) is not None
            if warns != only_warned or not _FAILS.search(line) or _LIVED.search(line):
                continue
            for said in (line, *_going_on(line, lines[number + 1 : number + 2])):
                name = likeliest(said)
                if name and meant(name):
                    return number, name
    return None


def _going_on(line: str, after: Sequence[str]) -> Iterator[str]:
    """A message that goes on in the line after it, deeper indented: both lines together."""
    for one in after:
        if len(one) - len(one.lstrip()) > len(line) - len(line.lstrip()):
            yield f"{line} {one.strip()}"

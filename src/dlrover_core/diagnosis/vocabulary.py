"""What words of a failure that no signature knows are likely about: the field's vocabulary, and no message of any one program.

A guess names the signature that stands for a family, and is less than half sure: it is told as "unknown", with its line. It
counts only where nothing else is known: of a log in which no signature found anything, and of an exception whose type is
general and whose words are new. Jobs that run are never judged by it.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
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
    r"|killed)\b",
    re.IGNORECASE,
)
_LIVED = re.compile(
    r"\b(?:warn(?:ing)?|info|debug|retry\w*|skipp\w+|ignor\w+|falling back|recovered|handled|0 (?:errors?|failures?)|no errors?"
    r"|errors?[:=] ?0|without errors?)\b",
    re.IGNORECASE,
)
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
    said = f"{_PARTS.sub(' ', said.split(maxsplit=1)[0] if said.strip() else '')} {said}"
    return next((name for name, words in families() if all(one.search(said) for one in words)), "")


def guess(lines: Sequence[str]) -> tuple[int, str] | None:
    """Of the last lines of a log the first that fails, by its index, and what it is likely about; None: there is none."""
    for number in range(max(0, len(lines) - LINES_MAX), len(lines)):
        line = lines[number]
        if _FAILS.search(line) and not _LIVED.search(line):
            name = likeliest(line)
            if name:
                return number, name
    return None

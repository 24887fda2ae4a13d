"""A signature drafted from a log that was not known: what tells, generalised, and what else it would match.

The line that tells is the exception that ended the process, or else the last line that speaks of an error. What differs from
run to run is taken out: numbers, addresses, paths, quoted words, ids. What is left is a pattern of the table's kind
(`patterns`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from dlrover_core.diagnosis import exceptions, patterns, who
from dlrover_core.diagnosis.evidence import DATA, HW, NET, PLAT, RES, SOFT, USER

WORDS_MAX, LETTERS_MIN = 14, 8

# What differs between runs: as it is written in a line, and what stands for it in a pattern.
_VARIES = re.compile(
    r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}(?:-[0-9a-f]{4,})*\b"
    r"|'[^'\n]*'|\"[^\"\n]*\"|`[^`\n]*`|(?:https?|s3|gs|hdfs)://\S+|(?<![\w.])/[\w./-]+"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|[-+]?\d[\d.,:]*"
)
_SPEAKS = re.compile(
    r"\b(?:\w*error|\w*exception|fail(?:ed|ure)?|fatal|abort(?:ed)?|cannot|could not|unable|timed? ?out|panic|critical)\b",
    re.IGNORECASE,
)
# A guess at the class, by words.
_CLASSES = (
    (HW, re.compile(r"\b(?:ECC|hardware|temperature|PCIe?|GPU \d+ .*lost|firmware)\b", re.IGNORECASE)),
    (RES, re.compile(r"\b(?:memory|space|quota|limit|resources?|exhausted|full)\b", re.IGNORECASE)),
    (NET, re.compile(r"\b(?:network|socket|connection|connect|peer|unreachable|route)\b", re.IGNORECASE)),
    (DATA, re.compile(r"\b(?:file|storage|bucket|shard|sample|dataset|checkpoint|read|write)\b", re.IGNORECASE)),
    (PLAT, re.compile(r"\b(?:preempt|evict|node|scheduler|drain|maintenance)\w*", re.IGNORECASE)),
)


class Draft(NamedTuple):
    """A signature that a person is to look at. ``line``: from which line of the log, ``number`` its number."""

    id: str
    title: str
    verdict: str
    pattern: str
    line: str
    number: int

    def toml(self) -> str:
        """As a file of one's own signatures takes it."""
        return (
            "[[signature]]\n"
            f'id = "{self.id}"\n'
            f'title = "{_quoted(self.title)}"\n'
            f'class = "{self.verdict}"      # a guess by its words: look at it\n'
            'action = "proc"     # and at this: obs retry proc relaunch isolate reset mem+ shrink fail wait check\n'
            'scope = "process"\n'
            'sources = ["log", "error", "exit"]\n'
            "confidence = 0.7\n"
            f"patterns = ['''{self.pattern}''']\n"
        )


def draft(lines: Sequence[str], name: str) -> Draft | None:
    """A signature of that id from a log; None where no line of it says anything.

    ``name`` is an id as `signatures.own` takes it.
    """
    peeled = [who.peel(line).body for line in lines]
    found = exceptions.chains(peeled)
    if found:
        told = exceptions.telling(found[-1], lambda one: 0 if exceptions.wraps(one) else 2)
        text, number = told.text.split("\n", maxsplit=1)[0], told.last
    else:
        # The level, which is peeled off, may be all that speaks of it.
        spoken = [at for at, line in enumerate(lines) if _SPEAKS.search(line)]
        if not spoken:
            return None
        text, number = peeled[spoken[-1]], spoken[-1]
    pattern = generalised(text)
    if not pattern:
        return None
    verdict = next((verdict for verdict, words in _CLASSES if words.search(text)), USER if found else SOFT)
    return Draft(name, text.strip()[:80], verdict, pattern, text.strip(), number + 1)


def generalised(text: str) -> str:
    """A pattern of a line's own words, in their order; empty where it has too few of them."""
    parts: list[str] = []
    for part in _VARIES.sub("\0", text.strip()).split("\0"):
        words = re.findall(r"[A-Za-z][A-Za-z_]*", part)
        if words:
            parts.append(r"\W+".join(words))
    pattern, count = "", 0
    for part in parts:
        more = part.count(r"\W+") + 1
        if pattern and count + more > WORDS_MAX:
            break
        pattern, count = (rf"{pattern}\b[^\n]{{0,120}}\b{part}" if pattern else rf"\b{part}"), count + more
    letters = sum(len(word) for word in re.findall(r"[A-Za-z]{3,}", pattern.replace(r"\W", "")))
    try:
        fit = bool(pattern) and letters >= LETTERS_MIN and bool(patterns.words(pattern))
    except patterns.Unfit:
        return ""
    return pattern if fit else ""


def _quoted(text: str) -> str:
    return re.sub(r"[^\x20-\x7e]", "?", text).replace("\\", "\\\\").replace('"', "'")

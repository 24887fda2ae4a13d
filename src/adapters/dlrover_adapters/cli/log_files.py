"""Log files from anywhere as observations: whose line it is, when it was written, and what of it the table knows.

A file is read once, in pieces, whatever its size. Only lines that mean something are looked at again: their rank is in what
launchers put before a line, or in the file's name; their time is in the line, or in one before it. An exception is given with
its whole traceback, which is what tells one place in a program from another.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from dlrover_core.diagnosis.evidence import KERNEL, LOG, PLATFORM
from dlrover_core.diagnosis.matching import Hit, Matcher
from dlrover_core.diagnosis.offline import Observation
from dlrover_core.errors import CoreError

PIECE_BYTES = 1024 * 1024
BEFORE_BYTES = 16 * 1024
"""How much before a line is looked through for its time and its traceback."""
SAME_MAX = 4
"""Of one signature and rank so many are taken from a file: the first, and what follows."""
FOUND_MAX = 512
"""Of all of a file."""

CALENDAR, BOOT = "calendar", "since boot"

_RANK = re.compile(
    r"\[(?:rank|default|Rank )(\d{1,6})\]|^\[\d+,(\d{1,6})\]<std|^(\d{1,6}): |^[\w.-]*?(?:worker|rank)[-_]?(\d{1,6})\b *[|:\]]"
    r"|\brank[ =:](\d{1,6})\b.{0,40}\]",
)
_RANK_OF_FILE = re.compile(
    r"(?:^|[._-])(?:rank|worker)[-_]?(\d{1,6})(?:[._-](?:stdout|stderr|out|err|log|txt|gz)){0,3}$"
)
_RANK_OF_FOLDER = re.compile(r"(?:^|/)(\d{1,6})/(?:stdout|stderr|error)\.\w+$")
_TIMES = (
    re.compile(r"\b\d{4}-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?"),
    re.compile(r"\b[EWIF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?"),
    re.compile(r"\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(\d{1,2}) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?"),
)
_SINCE_BOOT = re.compile(r"^(?:<\d+>)?\[ *(\d{1,9}\.\d{1,9})\]", re.MULTILINE)
_LINE_END = re.compile(r"\r\n|\r|\n")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_TRACEBACK = "Traceback (most recent call last)"


class Unreadable(CoreError):
    """A file that cannot be read, or is no text."""


class Line(NamedTuple):
    """A line that means something: in which file, its number there, and what the table knows in it.

    ``clock``: by which its time is, `CALENDAR`, `BOOT`, or none; times by different clocks cannot be compared.
    """

    file: str
    number: int
    signature: str
    observation: Observation
    clock: str = ""


def together(lines: Sequence[Line]) -> tuple[list[Line], list[str]]:
    """The lines by one clock, and the files whose times could not be compared.

    Most lines that have a time decide which clock; what has another, or none, is taken to have been at the first of these.
    """
    clocks = Counter(line.clock for line in lines if line.clock)
    common = max(clocks, key=lambda one: (clocks[one], one == CALENDAR), default="")
    first = min((line.observation.at_s for line in lines if line.clock == common), default=0.0)
    strange = [line for line in lines if line.clock != common]
    begins = {name: min(line.observation.at_s for line in strange if line.file == name) for name in _files(strange)}
    moved = [
        line
        if line.clock == common
        else line._replace(observation=line.observation._replace(at_s=first + _moment(line, begins[line.file])))
        for line in lines
    ]
    return moved, list(begins)


def _files(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line.file for line in lines))


def _moment(line: Line, begin: float) -> float:
    """Later lines of such a file are a moment later: their order is known."""
    return min(line.observation.at_s - begin, 1.0)


class Reader:
    """Reads files with one matcher. ``told``: called now and then with the bytes read of the file."""

    def __init__(self, matcher: Matcher, told: Callable[[str, int], None] = lambda _name, _bytes: None) -> None:
        self._matcher, self._told = matcher, told

    def read(self, path: str) -> list[Line]:
        """What one file tells; ``-`` is stdin. Raises `Unreadable`."""
        name = "stdin" if path == "-" else path
        try:
            with _opened(path) as file:
                return list(self._lines(name, file))
        except (OSError, EOFError, zlib.error) as error:
            raise Unreadable(f"{name}: {getattr(error, 'strerror', None) or error}") from error

    def _lines(self, name: str, file: IO[bytes]) -> Iterator[Line]:
        seen: Counter[tuple[str, int]] = Counter()
        before, number, done = "", 0, 0
        kind, clock = "", 0.0
        taken = 0
        for piece in _pieces(name, file):
            text = piece.decode(errors="replace")
            for hit in self._matcher.scan(text, ""):
                lines = _Context(before, text, hit.number)
                rank = _rank(hit.line, name)
                key = hit.signature.id, rank
                seen[key] += 1
                if seen[key] > SAME_MAX or taken >= FOUND_MAX:
                    continue
                taken += 1
                kind, clock = lines.time() or (kind, clock)
                at_s = clock + (number + hit.number) * 1e-6  # within one moment the order of lines
                seen_there = _observation(hit, at_s, rank, name, lines)
                yield Line(name, number + hit.number, hit.signature.id, seen_there, kind)
            number += text.count("\n")
            done += len(piece)
            before = (before + text)[-BEFORE_BYTES:]
            self._told(name, done)


class _Context:
    """What stands before a line, and the line."""

    def __init__(self, before: str, text: str, number: int) -> None:
        end = 0
        for _ in range(number):
            end = _end(text, end)
        self._text = (before + text[max(0, end - BEFORE_BYTES) : end])[-BEFORE_BYTES:]

    def time(self) -> tuple[str, float] | None:
        """The newest time in it, in seconds of a year, or since boot, and which; None where there is none."""
        times = [(found.start(), _seconds(found)) for pattern in _TIMES for found in pattern.finditer(self._text)]
        if times:
            return CALENDAR, max(times)[1]
        times = [(found.start(), float(found[1])) for found in _SINCE_BOOT.finditer(self._text)]
        return (BOOT, max(times)[1]) if times else None

    def traceback(self, rank: int) -> str:
        """The traceback that ends in the line, of this rank's lines alone; empty where there is none."""
        lines = self._text.splitlines()
        mine = [line for line in lines if (found := _RANK.search(line)) is None or int(_group(found)) == rank]
        starts = [index for index, line in enumerate(mine) if _TRACEBACK in line]
        return "\n".join(mine[starts[-1] :]) if starts else ""


def _end(text: str, begin: int) -> int:
    """Where the line ends that begins there; a bare carriage return ends one, too, as it does for the matcher."""
    found = _LINE_END.search(text, begin)
    return found.end() if found else len(text)


def _observation(hit: Hit, at_s: float, rank: int, name: str, context: _Context) -> Observation:
    text = hit.line.strip()
    if hit.signature.id.startswith("exception."):
        text = context.traceback(rank) or text
    sources = hit.signature.sources
    source = next((one for one in (KERNEL, LOG, PLATFORM) if sources[0] == one), LOG if LOG in sources else sources[0])
    if source == KERNEL:
        rank = -1
    return Observation(at_s, source, node=Path(name).name, rank=rank, text=text)


def _rank(line: str, name: str) -> int:
    found = _RANK.search(line[:400]) or _RANK_OF_FOLDER.search(name) or _RANK_OF_FILE.search(Path(name).name)
    return int(_group(found)) if found else -1


def _group(found: re.Match[str]) -> str:
    return next(group for group in found.groups() if group is not None)


def _seconds(found: re.Match[str]) -> float:
    """Of a year of 31-day months: all that order needs, and logs do not agree upon more."""
    month, day, hour, minute, second, part = found.groups()
    number = _MONTHS.index(month) + 1 if month in _MONTHS else int(month)
    return (((number * 31 + int(day)) * 24 + int(hour)) * 60 + int(minute)) * 60 + int(second) + float(f"0.{part or 0}")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    """The file, or stdin, decompressed if it is."""
    with contextlib.ExitStack() as closing:
        plain: Any = sys.stdin.buffer if path == "-" else closing.enter_context(open(path, "rb"))
        packed = plain.peek(2)[:2] == b"\x1f\x8b"
        if packed:
            plain = closing.enter_context(gzip.open(plain))
        yield plain


def _pieces(name: str, file: IO[bytes]) -> Iterator[bytes]:
    """Whole lines, about a mebibyte at a time. Raises `Unreadable` for what is no text."""
    rest, first = b"", True
    while data := file.read(PIECE_BYTES):
        if first and b"\0" in data[:8192]:
            raise Unreadable(f"{name}: not a text; give logs, plain or compressed with gzip")
        first = False
        data = rest + data
        end = data.rfind(b"\n") + 1
        if not end and len(data) < 8 * PIECE_BYTES:
            rest = data
            continue
        end = end or len(data)
        rest = data[end:]
        yield data[:end]
    if rest:
        yield rest

"""Log files from anywhere, read once, in pieces, whatever their size.

A short file is taken as it is. Of a long one only what is worth reading is kept: lines that a signature or a mark of a
failure may match, with what stands around them, the file's beginning and its end. What those lines mean is
`dlrover_core.diagnosis.reading`'s.
"""

from __future__ import annotations

import contextlib
import gzip
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import IO, Any

from dlrover_core.diagnosis.matching import Sieve
from dlrover_core.diagnosis.rows import Text
from dlrover_core.errors import CoreError

PIECE_BYTES = 1024 * 1024
WHOLE_BYTES = 1536 * 1024
"""A file of no more is taken as it is."""
BEFORE, AFTER = 60, 40
"""So many lines around one that is worth reading are kept."""
FIRST_LINES, LAST_LINES, KEPT_LINES = 100, 400, 6000
"""Of a long file: its beginning, its end, and at most so much of its first and of its last failures."""
LINE_BYTES_MAX = 16 * 1024


class Unreadable(CoreError):
    """A file that cannot be read, or is no text."""


class Reader:
    """Reads files. ``told``: called now and then with the bytes read of the file."""

    def __init__(self, sieve: Sieve, told: Callable[[str, int], None] = lambda _name, _bytes: None) -> None:
        self._sieve, self._told = sieve, told

    def read(self, path: str) -> Text:
        """What of one file is worth reading; ``-`` is stdin. Raises `Unreadable`."""
        name = "stdin" if path == "-" else path
        try:
            with _opened(path) as file:
                pieces, begin = _pieces(name, file), b""
                for piece in pieces:
                    if len(begin) + len(piece) > WHOLE_BYTES:
                        return self._excerpt(name, chain((begin, piece), pieces))
                    begin += piece
                lines = _split(begin)
                return Text(name, range(1, len(lines) + 1), [_line(line) for line in lines])
        except (OSError, EOFError, zlib.error) as error:
            raise Unreadable(f"{name}: {getattr(error, 'strerror', None) or error}") from error

    def _excerpt(self, name: str, pieces: Iterator[bytes]) -> Text:
        kept = _Kept()
        done, number = 0, 1
        before: list[bytes] = []
        for piece in pieces:
            lines = _split(piece)
            if number == 1 and lines:
                kept.add(1, lines[:FIRST_LINES])
            kept.follow(number, lines)
            for found in self._sieve.lines(piece):
                kept.around(number, lines, found, before)
            before = lines[-LAST_LINES:]
            number += len(lines)
            done += len(piece)
            self._told(name, done)
        kept.add(number - len(before), before)
        return kept.text(name)


class _Kept:
    """Lines by number, each once: the first failures and, of what does not fit, the last."""

    def __init__(self) -> None:
        self._first: list[tuple[int, bytes]] = []
        self._last: deque[tuple[int, bytes]] = deque(maxlen=KEPT_LINES)
        self._newest = 0
        self._wanted = 0

    def add(self, number: int, lines: list[bytes]) -> None:
        """Keep lines, the first of which has this number, unless they are kept already."""
        skip = max(0, self._newest + 1 - number)
        for at, line in enumerate(lines[skip:], number + skip):
            (self._first if len(self._first) < KEPT_LINES else self._last).append((at, line))
            self._newest = at

    def around(self, number: int, lines: list[bytes], found: int, before: list[bytes]) -> None:
        """Keep a line of a piece, and what stands around it."""
        if found < BEFORE and before:
            part = before[found - BEFORE :]
            self.add(number - len(part), part)
        begin = max(0, found - BEFORE)
        self.add(number + begin, lines[begin : found + AFTER])
        self._wanted = number + found + AFTER

    def follow(self, number: int, lines: list[bytes]) -> None:
        """Keep what a piece still owes to a line at the end of the one before."""
        if self._wanted > number:
            self.add(number, lines[: self._wanted - number])

    def text(self, name: str) -> Text:
        """All that is kept."""
        rows = [*self._first, *self._last]
        return Text(name, [number for number, _ in rows], [_line(line) for _, line in rows], whole=False)


def _line(line: bytes) -> str:
    return line[:LINE_BYTES_MAX].decode(errors="replace")


def _split(piece: bytes) -> list[bytes]:
    """Lines, as files number them."""
    lines = piece.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    return lines


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

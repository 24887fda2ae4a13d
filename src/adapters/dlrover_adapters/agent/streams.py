"""A worker's standard output, where it must not be the reason for its death.

Output goes into files, and file systems run full. A ``print`` that fails raises, and training ends for want of a log line. So
what does not fit is lost, silently: there is nowhere to say it. (C code never cared: stdio only remembers the error.)
"""

from __future__ import annotations

import errno
import io
import sys
from typing import Any, TextIO, cast

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class ForgivingFile(io.FileIO):
    """A file that takes everything and loses what its file system has no room for."""

    def write(self, data: Any, /) -> int:
        """As `io.FileIO.write`; a full disk counts as done."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _FULL:
                return memoryview(data).nbytes
            raise


def forgive_full_disks() -> None:
    """Replace this process's standard output and error by forgiving ones, else as ``python -u`` makes them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:
            forgiving = _forgiving(stream, f"<{name}>")
            setattr(sys, name, forgiving)
            setattr(sys, f"__{name}__", forgiving)


def _forgiving(stream: TextIO, name: str) -> TextIO:
    raw = ForgivingFile(stream.fileno(), "wb", closefd=False)
    raw.name = name
    text = io.TextIOWrapper(cast(Any, raw), stream.encoding, stream.errors, newline="\n", write_through=True)
    text.mode = "w"  # type: ignore[misc]  # as the interpreter says it
    return text

"""A disk that breaks in this process: from some call on, every system call on files below a folder fails."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NUMBERS = (errno.EROFS, errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EDQUOT)
"""Read-only, full, dead, a file server's that forgot the file, over quota."""

_WRITES = ("mkdir", "rename", "replace", "unlink", "link", "symlink", "write", "pwrite", "ftruncate", "fsync", "rmdir")
_MORE = ("posix_fallocate", "truncate", "utime")
_READS = ("stat", "lstat", "read", "pread", "scandir", "listdir", "fstat")
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Breaking:
    """A disk: all below ``folder``. ``calls`` counts them; it breaks at ``at``, and stays so."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = os.path.realpath(folder), number
        self.calls, self.at = 0, -1

    def touched(self, what: object, *, writes: bool) -> None:
        """A call is made on a path or descriptor. Raises the disk's error."""
        if self.at == -1 or not self._below(what):
            return
        if not writes and self.number not in (errno.EIO, errno.ESTALE):
            return  # such a disk can still be read
        self.calls += 1
        if self.calls > self.at:
            raise OSError(self.number, os.strerror(self.number), what if isinstance(what, (str, bytes)) else None)

    def _below(self, what: object) -> bool:
        if isinstance(what, int):
            with contextlib.suppress(OSError):
                return str(Path(f"/proc/self/fd/{what}").readlink()).startswith(self.folder)
            return False
        return isinstance(what, (str, bytes, os.PathLike)) and os.fsdecode(what).startswith(self.folder)


@contextlib.contextmanager
def breaking(folder: Path, number: int) -> Iterator[Breaking]:
    """A disk that breaks when its ``at`` is set."""
    disk = Breaking(folder, number)

    def wrapped(real: Callable[..., Any], *, writes: bool) -> Callable[..., Any]:
        def call(what: Any = ".", *rest: Any, **named: Any) -> Any:
            disk.touched(what, writes=writes)
            return real(what, *rest, **named)

        return call

    def opens(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, flags: int, *rest: Any, **named: Any) -> Any:
            disk.touched(path, writes=bool(flags & _CHANGES))
            return real(path, flags, *rest, **named)

        return call

    def opens_file(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            disk.touched(path, writes=bool(set(mode) & set("wax+")))
            return real(path, mode, *rest, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in (*_WRITES, *_MORE, *_READS):
            patch.setattr(os, name, wrapped(getattr(os, name), writes=name not in _READS))
        patch.setattr(os, "open", opens(os.open))
        patch.setattr(builtins, "open", opens_file(builtins.open))
        patch.setattr("io.open", opens_file(builtins.open))
        yield disk

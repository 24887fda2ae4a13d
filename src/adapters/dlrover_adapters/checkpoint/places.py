"""Where checkpoints lie: a folder on this machine's file systems, or whatever else fsspec reaches.

Files appear whole or not at all. On local and network file systems a file is written under another name, synced, renamed, and
its folder synced: after a power cut it is there whole or not. On object stores one put, or one multipart upload that becomes
visible when it is completed, does the same. Where there are real files but no sync (HDFS, SFTP), a file is written under another
name and moved.

Every failure is an `OSError` with the URL in it and no password: no space, a read-only folder, no permission, a time-out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from dlrover_adapters.storage.store import ATOMIC, require, shown
from dlrover_core.errors import SpecError

DRAFT_OLD_S = 600.0
"""A draft that nobody has written to for so long, in seconds, was left behind by a writer that died."""
SYNC_EACH_BYTES = 128 * 1024 * 1024
"""How much may lie in the page cache unwritten: else the last sync would hold the disk for all others at once. And whoever
watches a writer (`agent.checkpoints.saving.STALL_S`) sees nothing of it during a sync: it must be short, or a slow disk is
taken for one that hangs. So the first of a file is of `SYNC_FIRST_BYTES`, and later ones are as large as the disk is fast."""
SYNC_FIRST_BYTES, SYNC_LEAST_BYTES = 4 * 1024 * 1024, 1024 * 1024
SYNC_FAST_S, SYNC_SLOW_S = 5.0, 20.0
"""After one that took less the next is twice as large, after one that took more half as large. Between them it stays: where each
takes its time whatever its size, behind what others write, small ones would make it worse."""
_REMOTE_BLOCK_BYTES = 64 * 1024 * 1024
_PIECE_BYTES = 16 * 1024 * 1024
_READ_AT_ONCE = 512
"""Buffers in one read, of the 1,024 that Linux takes."""
_DRAFT = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.draft")


class Entry(NamedTuple):
    """A file or a folder: its last name, bytes, and when it was changed, in seconds since 1970 (0: unknown)."""

    name: str
    size: int
    folder: bool
    changed: float


class Sink(Protocol):
    """What is being written."""

    def write(self, content: Any) -> int:
        """All of a buffer."""


class Source(Protocol):
    """A file, open for reading."""

    def read_at(self, offset: int, into: Sequence[memoryview]) -> int:
        """Fill these buffers, one after the other, from ``offset`` on. Returns how many bytes there were until the end."""

    def close(self) -> None:
        """No more of it."""


class Place:
    """The folder at ``url``, made when first written to: a path, ``file://...``, or any other URL of fsspec.

    Keys, endpoints and time-outs come from the file system's own environment, or from fsspec's (``FSSPEC_S3_...``). Nothing is
    touched before the first call. Raises `SpecError` for what fsspec does not know, and for what needs a package more.
    ``wrote`` is told the bytes of each piece of a file that has been written.
    """

    def __init__(self, url: str, wrote: Callable[[int], None] | None = None) -> None:
        if not url:
            raise SpecError("checkpoints", "an empty URL")
        self.url, self._wrote = url.rstrip("/") or "/", wrote
        self._remote: tuple[Any, str] | None = None
        self._folder: str | None = _local_path(self.url)
        if self._folder is None:
            for part in url.split("::"):
                require(part.partition("://")[0], url, "checkpoints")

    @property
    def local(self) -> bool:
        """Is it a file system of this machine?"""
        return self._folder is not None

    def shown(self, name: str = "") -> str:
        """The URL of a file in it for people: without a password."""
        return shown(f"{self.url}/{name}" if name else self.url)

    # ---- writing

    @contextlib.contextmanager
    def writer(self, name: str, size_hint: int = 0) -> Iterator[Sink]:
        """Write a file, of about ``size_hint`` bytes: there whole once the block has ended well, else not at all."""
        with self._ours(name):
            draft = self._local_draft(name) if self._folder is not None else self._remote_draft(name, size_hint)
        try:
            with self._ours(name, others=True):
                yield draft if self._wrote is None else _Told(draft, self._wrote)
            with self._ours(name):
                draft.commit()
        except BaseException:
            draft.discard()
            raise

    def put(self, name: str, content: bytes | Iterable[Any]) -> int:
        """A whole file, from its bytes or from buffers that follow each other. Returns its size in bytes."""
        pieces = (content,) if isinstance(content, (bytes, bytearray, memoryview)) else content
        size = 0
        with self.writer(name) as out:
            for piece in pieces:
                size += out.write(piece)
        return size

    def _local_draft(self, name: str) -> _LocalDraft:
        assert self._folder is not None
        return _LocalDraft(os.path.join(self._folder, name))

    def _remote_draft(self, name: str, size_hint: int) -> _RemoteDraft:
        files, root = self._files()
        protocols = (files.protocol,) if isinstance(files.protocol, str) else files.protocol
        return _RemoteDraft(files, f"{root}/{name}", atomic=not ATOMIC.isdisjoint(protocols), size_hint=size_hint)

    # ---- reading

    def get(self, name: str) -> bytes:
        """A whole file, a small one. Raises `FileNotFoundError`."""
        with self._ours(name):
            if self._folder is not None:
                with open(os.path.join(self._folder, name), "rb") as file:
                    return file.read()
            files, root = self._files()
            content = files.cat_file(f"{root}/{name}")
            assert isinstance(content, bytes)
            return content

    def size(self, name: str) -> int:
        """Of a file, in bytes. Raises `FileNotFoundError`."""
        with self._ours(name):
            if self._folder is not None:
                return os.stat(os.path.join(self._folder, name)).st_size
            files, root = self._files()
            files.invalidate_cache()
            return int(files.info(f"{root}/{name}")["size"])

    @contextlib.contextmanager
    def reader(self, name: str) -> Iterator[Source]:
        """Open a file for reading at any place."""
        with self._ours(name):
            source: Source
            if self._folder is not None:
                source = _LocalSource(os.path.join(self._folder, name))
            else:
                files, root = self._files()
                source = _RemoteSource(files.open(f"{root}/{name}", "rb", block_size=_PIECE_BYTES))
            try:
                yield source
            finally:
                source.close()

    def ls(self, folder: str = "", *, drafts: bool = False) -> list[Entry]:
        """What is in it, or in a folder of it, by name; nothing where there is no such folder. With ``drafts`` or without."""
        with self._ours(folder):
            try:
                found = self._ls_local(folder) if self._folder is not None else self._ls_remote(folder)
            except FileNotFoundError:
                return []
        return sorted(one for one in found if drafts or not _DRAFT.fullmatch(one.name))

    def _ls_local(self, folder: str) -> list[Entry]:
        assert self._folder is not None
        found = []
        with os.scandir(os.path.join(self._folder, folder)) as entries:
            for one in entries:
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    told = one.stat()
                    found.append(Entry(one.name, told.st_size, stat.S_ISDIR(told.st_mode), told.st_mtime))
        return found

    def _ls_remote(self, folder: str) -> list[Entry]:
        files, root = self._files()
        files.invalidate_cache()
        at = f"{root}/{folder}" if folder else root
        found = []
        for one in files.ls(at, detail=True):
            name = one["name"].rstrip("/")
            if name != at.rstrip("/") and name.strip("/") != at.strip("/"):  # some list the folder itself
                folder_too = one["type"] == "directory"
                found.append(Entry(name.rpartition("/")[2], int(one.get("size") or 0), folder_too, _changed(one)))
        return found

    # ---- removing

    def rm(self, name: str) -> None:
        """A file; it may be gone already."""
        with self._ours(name), contextlib.suppress(FileNotFoundError):
            if self._folder is not None:
                os.unlink(os.path.join(self._folder, name))
            else:
                files, root = self._files()
                files.rm_file(f"{root}/{name}")

    def rmdir(self, folder: str) -> None:
        """A folder, if it is empty; it may be gone already. Object stores have none."""
        with self._ours(folder), contextlib.suppress(FileNotFoundError):
            if self._folder is not None:
                try:
                    os.rmdir(os.path.join(self._folder, folder))
                except OSError as error:
                    if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                        raise
                _sync_folder(self._folder)
            else:
                files, root = self._files()
                if self._has_folders(files):
                    with contextlib.suppress(
                        OSError
                    ):  # not empty; what cannot be removed is told by the next that writes
                        files.rmdir(f"{root}/{folder}")
                    files.invalidate_cache()

    def sync(self, folder: str = "") -> None:
        """What was removed in it stays so, even after a power cut; nothing to do on object stores."""
        with self._ours(folder), contextlib.suppress(FileNotFoundError):
            if self._folder is not None:
                _sync_folder(os.path.join(self._folder, folder))

    # ---- what is under it

    def _files(self) -> tuple[Any, str]:
        """The file system and the folder's path in it. Not before it is needed: some look for keys over the network."""
        if self._remote is None:
            from fsspec.core import url_to_fs

            files, root = url_to_fs(self.url)
            self._remote = (files, root.rstrip("/"))
        return self._remote

    @staticmethod
    def _has_folders(files: Any) -> bool:
        protocols = {files.protocol} if isinstance(files.protocol, str) else {*files.protocol}
        return ATOMIC.isdisjoint(protocols) or "memory" in protocols

    @contextlib.contextmanager
    def _ours(self, name: str, *, others: bool = False) -> Iterator[None]:
        """What the file system raises, as `OSError` of the right kind with the URL in it. ``others`` have a say in it too."""
        try:
            yield
        except OSError as error:
            if error.filename == self.shown(name):
                raise
            raise OSError(
                _number(error), error.strerror or str(error) or type(error).__name__, self.shown(name)
            ) from error
        except Exception as error:
            if self._folder is not None or (others and type(error).__module__.partition(".")[0] in _NO_STORAGE):
                raise
            told = f"{type(error).__name__}: {error}"
            if isinstance(error, NotImplementedError):
                raise OSError(errno.EROFS, f"{told}: cannot be written", self.shown(name)) from error
            slow = "timeout" in type(error).__name__.lower()
            raise OSError(errno.ETIMEDOUT if slow else errno.EIO, told, self.shown(name)) from error


class _Told(NamedTuple):
    """Tells how much was written of a file."""

    out: Sink
    wrote: Callable[[int], None]

    def write(self, content: Any) -> int:
        size = self.out.write(content)
        self.wrote(size)
        return size


# Whose errors come from whoever writes, not from what is written to.
_NO_STORAGE = frozenset({"builtins", "dlrover_adapters", "dlrover_core", "pickle", "torch"})
_NUMBERS = (
    (FileNotFoundError, errno.ENOENT),
    (PermissionError, errno.EACCES),
    (FileExistsError, errno.EEXIST),
    (NotADirectoryError, errno.ENOTDIR),
    (IsADirectoryError, errno.EISDIR),
    (TimeoutError, errno.ETIMEDOUT),
)


def _number(error: OSError) -> int:
    """Its errno; others' file systems leave it away."""
    return error.errno or next((number for kind, number in _NUMBERS if isinstance(error, kind)), errno.EIO)


def _local_path(url: str) -> str | None:
    scheme, there, rest = url.partition("://")
    if not there:
        return os.path.abspath(os.path.expanduser(url))
    if scheme in {"file", "local"} and "::" not in url:
        # As fsspec understands it: nothing is unquoted.
        return os.path.abspath(rest)
    return None


def _changed(told: dict[str, Any]) -> float:
    for key in ("LastModified", "last_modified", "updated", "mtime", "modified", "created"):
        found: Any = told.get(key)
        if isinstance(found, (int, float)):
            return float(found)
        if hasattr(found, "timestamp"):
            return float(found.timestamp())
    return 0.0


class _LocalDraft:
    """A file under another name until it is whole and on the disk."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._folder, name = os.path.split(path)
        _make_folders(self._folder)
        _sweep(self._folder, name)
        self._draft = os.path.join(self._folder, f".{name}.{uuid.uuid4().hex}.draft")
        self._fd = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._unsynced, self._sync_bytes = 0, SYNC_FIRST_BYTES

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        rest = view
        while len(rest):
            written = os.write(self._fd, rest[: min(_PIECE_BYTES, self._sync_bytes - self._unsynced)])
            rest = rest[written:]
            self._unsynced += written
            if self._unsynced >= self._sync_bytes:
                self._sync()
        return len(view)

    def _sync(self) -> None:
        began = time.monotonic()
        os.fdatasync(self._fd)
        took_s, self._unsynced = time.monotonic() - began, 0
        if took_s < SYNC_FAST_S:
            self._sync_bytes = min(SYNC_EACH_BYTES, 2 * self._sync_bytes)
        elif took_s > SYNC_SLOW_S:
            self._sync_bytes = max(SYNC_LEAST_BYTES, self._sync_bytes // 2)

    def commit(self) -> None:
        os.fsync(self._fd)
        fd, self._fd = self._fd, -1
        os.close(fd)
        os.rename(self._draft, self._path)
        _sync_folder(self._folder)

    def discard(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):  # what went wrong is being told
                os.close(fd)
        with contextlib.suppress(OSError):  # renamed, or for the next writer to sweep
            os.unlink(self._draft)


def _make_folders(path: str) -> None:
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
        if path == os.path.dirname(path):
            break
    for one in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another rank was faster
            os.mkdir(one)
        _sync_folder(os.path.dirname(one))


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # some network file systems have nothing to sync there
            raise
    finally:
        os.close(fd)


def _sweep(folder: str, name: str) -> None:
    """Remove drafts of this file whose writer is gone: a living one writes, and so changes, its draft all the time."""
    for one in os.listdir(folder):
        found = _DRAFT.fullmatch(one)
        if found is not None and found["name"] == name:
            path = os.path.join(folder, one)
            with contextlib.suppress(FileNotFoundError):
                if time.time() - os.stat(path).st_mtime > DRAFT_OLD_S:
                    os.unlink(path)


class _RemoteDraft:
    """An upload that is not completed, or a file under another name."""

    def __init__(self, files: Any, path: str, *, atomic: bool, size_hint: int) -> None:
        self._files, self._path, self._atomic = files, path, atomic
        folder, _, name = path.rpartition("/")
        self._draft = path if atomic else f"{folder}/.{name}.{uuid.uuid4().hex}.draft"
        self._small: list[bytes] | None = []
        self._small_bytes = 0
        self._stream: Any = None
        # A multipart upload has 10,000 parts at most.
        self._block_bytes = max(_REMOTE_BLOCK_BYTES, -(-size_hint // 9_000))
        # One that shows what was written so far, as it comes, gets all at once.
        protocols = (files.protocol,) if isinstance(files.protocol, str) else files.protocol
        self._all_at_once = atomic and "memory" in protocols
        if not atomic:
            files.makedirs(folder, exist_ok=True)

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        if self._small is not None:
            self._small.append(bytes(view))
            self._small_bytes += len(view)
            if self._small_bytes > self._block_bytes and not self._all_at_once:
                self._open()
        else:
            for at in range(0, len(view), _PIECE_BYTES):
                self._stream.write(view[at : at + _PIECE_BYTES])
        return len(view)

    def _open(self) -> None:
        pieces, self._small = self._small or [], None
        later = {"autocommit": False} if self._atomic else {}
        self._stream = self._files.open(self._draft, "wb", block_size=self._block_bytes, **later)
        for piece in pieces:
            self._stream.write(piece)

    def commit(self) -> None:
        if self._small is not None:
            self._files.pipe_file(self._draft, b"".join(self._small))
        else:
            self._stream.close()
            if self._atomic:
                self._stream.commit()
        if not self._atomic:
            with contextlib.suppress(FileNotFoundError, NotImplementedError):
                self._files.rm_file(self._path)
            self._files.mv(self._draft, self._path)
        self._files.invalidate_cache()

    def discard(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(Exception):  # what went wrong is being told
                if self._atomic:
                    stream.discard()
            # Else its finaliser would complete the upload.
            with contextlib.suppress(Exception):
                stream.closed = True
        if not self._atomic:
            with contextlib.suppress(Exception):
                self._files.rm_file(self._draft)


class _LocalSource:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_at(self, offset: int, into: Sequence[memoryview]) -> int:
        rest, total = [view for view in into if len(view)], 0
        while rest:
            found = os.preadv(self._fd, rest[:_READ_AT_ONCE], offset + total)
            if not found:
                break
            total += found
            while rest and found >= len(rest[0]):
                found -= len(rest.pop(0))
            if found:
                rest[0] = rest[0][found:]
        return total

    def close(self) -> None:
        os.close(self._fd)


class _RemoteSource:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read_at(self, offset: int, into: Sequence[memoryview]) -> int:
        self._stream.seek(offset)
        total = 0
        for view in into:
            while len(view):
                piece = self._stream.read(min(len(view), _PIECE_BYTES))
                if not piece:
                    return total
                view[: len(piece)] = piece
                view = view[len(piece) :]
                total += len(piece)
        return total

    def close(self) -> None:
        self._stream.close()

"""One job's archive on a file system of fsspec: files appear whole or not at all, and none ever replaces another.

What is under a URL differs in what it can promise. On object stores a put is atomic, and newer ones refuse a second one. Where
there are real files a write can end half-way, so it goes to a draft that is then moved. Where nothing keeps two writers
apart, what lies there in the end is read back: whoever finds something else has lost, and says so. Two masters that archive
the same events, of whom one is deposed and does not know it yet, write the same bytes: for both that is success.
"""

from __future__ import annotations

import contextlib
import errno
import re
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from dlrover_core.errors import SpecError

# Where a file that is written at once is there whole or not at all, and where folders need not be made.
ATOMIC = frozenset({"abfs", "abfss", "az", "gcs", "gs", "memory", "oci", "oss", "s3", "s3a", "tos"})
# A copy in front of an archive would be read back instead of it.
CACHES = frozenset({"blockcache", "cached", "filecache", "simplecache"})


class FsspecStore:
    """The folder at ``url``, made when first written to. Nothing is touched before the first call.

    Keys, endpoints and time-outs come from the file system's own environment, or from fsspec's (``FSSPEC_S3_...``).
    Raises `SpecError` for a scheme that fsspec does not know, and for one whose package is missing.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._place: tuple[Any, str] | None = None
        schemes = [part.partition("://")[0] for part in url.split("::")]
        for scheme in schemes:
            require(scheme, url)

    def names(self) -> list[str]:
        """The names of all files, as the file system has them now; none where there is no such folder."""
        with errors_of_ours(self.url):
            files, root = self._files()
            # A listing that was remembered may lack what another host wrote.
            files.invalidate_cache()
            try:
                found = files.ls(root, detail=False)
            except FileNotFoundError:
                return []
            return [path.rstrip("/").rpartition("/")[2] for path in found]

    def read(self, name: str) -> bytes:
        """A whole file."""
        with errors_of_ours(self.url):
            files, root = self._files()
            content = files.cat_file(f"{root}/{name}")
            assert isinstance(content, bytes)
            return content

    def write(self, name: str, content: bytes) -> None:
        """Put it there, or find it there; raise `FileExistsError` where something else has its name."""
        with errors_of_ours(self.url):
            files, root = self._files()
            path = f"{root}/{name}"
            if not self._stands(name, content):
                if ATOMIC.isdisjoint((files.protocol,) if isinstance(files.protocol, str) else files.protocol):
                    self._move_there(files, root, name, content)
                else:
                    self._put_there(files, path, name, content)
            if not self._stands(name, content):
                raise FileNotFoundError(errno.ENOENT, "written, and not there", path)

    def _files(self) -> tuple[Any, str]:
        """The file system and the folder's path in it. Not before it is needed: some look for keys over the network."""
        if self._place is None:
            files, root = url_to_fs(self.url)
            self._place = (files, root.rstrip("/"))
        return self._place

    def _stands(self, name: str, content: bytes) -> bool:
        """Is this file there, with this content? Raises `FileExistsError` for another content."""
        try:
            found = self.read(name)
        except FileNotFoundError:
            return False
        if found != content:
            raise FileExistsError(errno.EEXIST, "another content has this name", f"{self.url}/{name}")
        return True

    def _put_there(self, files: Any, path: str, name: str, content: bytes) -> None:
        """One put, which the store refuses where somebody was faster, if it can."""
        try:
            try:
                files.pipe_file(path, content, mode="create")
            except OSError:
                raise
            except Exception:  # noqa: BLE001  # a file system older than ``mode`` says so in its library's own words
                files.pipe_file(path, content)
        except Exception:
            # A rival's, or our own whose acknowledgement was lost.
            if not self._stands(name, content):
                raise

    def _move_there(self, files: Any, root: str, name: str, content: bytes) -> None:
        draft = f"{root}/.{name}.{uuid.uuid4().hex}"
        try:
            try:
                files.pipe_file(draft, content)
            except FileNotFoundError:
                files.makedirs(root, exist_ok=True)
                files.pipe_file(draft, content)
            if not self._stands(name, content):
                files.mv(draft, f"{root}/{name}")
        finally:
            with contextlib.suppress(Exception):  # moved, or the connection is gone: a draft is never read
                files.rm_file(draft)


def require(scheme: str, url: str, field: str = "archive") -> None:
    """Raise `SpecError`, about ``field``, for a scheme that cannot be used here."""
    if scheme in CACHES:
        raise SpecError(field, f"{shown(url)!r}: leave {scheme}:: away; it must be read from where it lies")
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError as error:
        raise SpecError(field, f"{shown(url)!r}: fsspec knows no {scheme!r}") from error
    except ImportError as error:
        raise SpecError(field, f"{shown(url)!r}: {error}; install it beside dlrover-core") from error


@contextlib.contextmanager
def errors_of_ours(url: str) -> Iterator[None]:
    """What others' file systems raise, as `OSError`: keys that are missing or wrong, time-outs, a store that is read-only."""
    try:
        yield
    except OSError:
        raise
    except NotImplementedError as error:
        raise OSError(errno.EROFS, f"{type(error).__name__}: cannot be written", shown(url)) from error
    except Exception as error:
        kind = TimeoutError if "timeout" in type(error).__name__.lower() else OSError
        raise kind(errno.EIO, f"{type(error).__name__}: {error}", shown(url)) from error


def shown(url: str) -> str:
    """The URL without the password that may be in it."""
    return re.sub(r"(?<=://)[^/@]*@", "", url)

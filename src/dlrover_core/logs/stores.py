"""Where archives lie: a directory of this host, or whatever a distribution brings under its scheme.

`open_store` is the door. A distribution adds a store by an entry point in the group ``dlrover.stores``: its name is a URL's
scheme, or ``fsspec`` for all that have none of their own, and its object takes the URL of one job's folder.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import unquote, urlsplit

from dlrover_core.errors import SpecError
from dlrover_core.logs.place import file_name, private_dir, private_file

GROUP = "dlrover.stores"
ANY = "fsspec"
# A URL's scheme; of a chain (``a::b://...``) the first. What has neither is a path.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(?:://|::)")


class Store(Protocol):
    """Where the files of one job's archive lie. Calls block; they are made off the event loop."""

    def names(self) -> list[str]:
        """The names of all files; none where there is no archive yet. Raises `OSError`."""
        ...

    def read(self, name: str) -> bytes:
        """A whole file. Raises `OSError`."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write a file durably, whole or not at all; never over another one. Raises `OSError`."""
        ...


def open_store(url: str, job: str) -> Store:
    """The store of one job's archive below ``url``: a path, ``file:PATH``, or the URL of a scheme that is installed.

    Nothing is touched yet. Raises `SpecError` for a URL that no store understands, and for a package that is missing.
    """
    place = _path(url)
    if place is not None:
        return LocalStore(place / file_name(job))
    from importlib.metadata import entry_points

    matched = _SCHEME.match(url)
    assert matched is not None, "what is no path has a scheme"
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    entry = found.get(matched[1]) or found.get(ANY)
    if entry is None:
        raise SpecError(
            "archive", f"no store is installed for {matched[1]!r}; give a directory, or reinstall dlrover-core"
        )
    try:
        opener = cast(Callable[[str], Store], entry.load())
    except ImportError as error:
        raise SpecError(
            "archive", f"{matched[1]}:// needs the package {error.name}: pip install 'dlrover-core[archive]'"
        ) from error
    return opener(f"{url.rstrip('/')}/{file_name(job)}")


def _path(url: str) -> Path | None:
    """The directory that ``url`` names on this host; None for anything else."""
    if url.startswith("file:"):
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise SpecError("archive", f"{url!r} is not file:PATH or file:///ABSOLUTE/PATH")
        return Path(unquote(parts.path, errors="surrogateescape"))
    return None if _SCHEME.match(url) else Path(url)


class LocalStore:
    """A directory of this host, made when first written to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def names(self) -> list[str]:
        """The names of all files."""
        try:
            return os.listdir(self.directory)
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        """A whole file."""
        return (self.directory / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """Temporary name, sync, link to the final name, sync the directory."""
        private_dir(self.directory)
        # A name that nobody else has: containers on several hosts share directories, and their process ids too.
        draft = self.directory / f".{name}.{uuid.uuid4().hex}"
        fd = private_file(draft, os.O_WRONLY | os.O_EXCL)
        try:
            try:
                view = memoryview(content)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            # A link, where rename would silently replace a file that must never change.
            os.link(draft, self.directory / name)
        except FileExistsError:
            if self.read(name) != content:
                raise
        finally:
            draft.unlink(missing_ok=True)
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

"""Watches the imports of this process: how long they take, and which variables of the environment they read.

A module that is imported before the fork sees the environment of the zygote. It must not be a module that reads, while it is
imported, a variable which the worker's seat or the script sets first: the module would keep the wrong value, and say nothing.
So a worker is watched until its first step, and so is the zygote while it imports what such a worker had.

Both need what no public interface offers: when an import ends, and who reads a variable. So a watch replaces a private function
of the import system and the class of `os.environ`. It tries both first (`unwatchable`), and leaves alone what it cannot replace.

Costs about a microsecond per imported module, and nothing once it has ended.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

PACKAGES = ("site-packages", "dist-packages")
"""What installers call the folders that they fill."""

WATCHED_S = 1800.0
"""A script that has told no step by then is watched no longer, and gets no list from this run."""

bootstrap: Any = vars(importlib).get("_bootstrap")
"""What the interpreter's own import statement calls."""

_Environment: Any = type(os.environ)
_TRIED = "dlrover_tries_imports"

_active: ImportWatch | None = None
_original: Any = None
"""The import system's own function, once a watch has begun."""


class ImportWatch:
    """Of the thread that begins it, from `begin` to `end`; one at a time.

    ``given``: variables that others set for this process, such as its rank.
    ``read``: what the imports of the zygote have read: each variable, and the module that read it.
    ``harmless``: variables that an earlier worker of this script set as well, after all imports that read them.
    ``excused``: modules that may read any variable, because somebody puts right afterwards what they made of it.
    ``conflicting`` is called with a variable and a module before the script sets what that module has read already.

    ``whole``: nothing between `begin` and `end` was missed. ``until``: when it ends by itself, by `time.monotonic`.
    """

    def __init__(
        self,
        given: Iterable[str] = (),
        read: Mapping[str, str] | None = None,
        harmless: Iterable[str] = (),
        excused: Iterable[str] = (),
        conflicting: Callable[[str, str], None] | None = None,
    ) -> None:
        self.spent_ns = 0
        self.reads: dict[str, str] = {}
        self.sets: set[str] = set()
        self.cut: tuple[int, str] | None = None
        self.conflict: tuple[str, str] | None = None
        self.whole = False
        self.until = 0.0
        self._given, self._read, self._harmless = set(given), read or {}, set(harmless)
        self._excused, self._conflicting = frozenset(excused), conflicting
        self._standard = standard_folders()
        self._thread = threading.get_ident()
        self._names: list[str] = []
        self._sweep: list[str] = []
        self._outermost = -1
        self._modules_before = self._modules_after = 0
        self._folder = ""
        self._began_ns = 0
        self._environment: Any = None

    def begin(self) -> None:
        """Watch from now on. Does nothing where imports are `unwatchable`."""
        global _active, _original  # noqa: PLW0603 - there is one import system in a process
        assert _active is None, "one watch at a time"
        if unwatchable():
            return
        self._modules_after, self._folder = len(sys.modules), _current_folder()
        _active, self.whole, self.until = self, True, time.monotonic() + WATCHED_S
        if bootstrap._find_and_load is not _find_and_load:
            _original = bootstrap._find_and_load
        bootstrap._find_and_load = _find_and_load
        self._environment = os.environ
        self._environment.__class__ = _WatchedEnvironment

    def end(self) -> None:
        """Watch no more, and leave everything as it was. Idempotent."""
        global _active  # noqa: PLW0603 - as above
        if _active is not self:
            return
        _active = None
        # What others have put in the place of ours meanwhile stays: it may well call ours.
        if bootstrap._find_and_load is _find_and_load:
            bootstrap._find_and_load = _original
        if type(self._environment) is _WatchedEnvironment:
            self._environment.__class__ = _Environment

    @property
    def spent_us(self) -> int:
        """Microseconds that imports took until now."""
        return self.spent_ns // 1000

    # ---- what is watched

    def load(self, name: str, import_: Any) -> ModuleType:
        """The import of a module that is not there yet."""
        found: ModuleType
        if threading.get_ident() != self._thread:
            found = _original(name, import_)
            return found
        if not self._names:
            self._began_ns = time.monotonic_ns()
        if self._outermost < 0 and not self._is_local(name):
            # Imports of the script's own modules are no part of it: what they import is.
            self._outermost, self._modules_before = len(self._names), len(sys.modules)
        direct = not self._names or self._is_local(self._names[-1])
        if direct and self.cut is None:
            self._look_around(len(sys.modules))
        self._names.append(name)
        try:
            found = _original(name, import_)
            return found
        finally:
            self._names.pop()
            if len(self._names) <= self._outermost:
                self._outermost = -1
            if direct and not self._is_local(name):
                self._modules_after = len(sys.modules)
            if not self._names:
                self.spent_ns += time.monotonic_ns() - self._began_ns

    def _look_around(self, now: int) -> None:
        """Look for what the script did since its last import that would make the next import differ in the zygote.

        ``now``: modules that are there.
        """
        if _current_folder() != self._folder:
            self.cut = (now, "the script changes the current folder before its next imports")
            return
        new = now - self._modules_after
        made = [name for name in itertools.islice(reversed(sys.modules), max(0, new)) if _is_made_by_hand(name)]
        if made:
            self.cut = (now, f"the script puts a module {made[-1]} of its own making before its next imports")

    def enumerated(self, keys: list[str]) -> None:
        """Somebody asks for the names of all variables."""
        if threading.get_ident() == self._thread:
            self._sweep = keys[::-1]

    def was_read(self, variable: str) -> None:
        """Somebody asks for a variable. Who copies all of them, in their order, asks for none."""
        if not self._names or threading.get_ident() != self._thread:
            return
        if self._sweep and self._sweep[-1] == variable:
            self._sweep.pop()
            return
        reader = self._names[-1]
        self.reads.setdefault(variable, reader)
        changes = variable in self._given or variable in self.sets
        if self.cut is None and changes and reader not in self._excused and not self._is_local(reader):
            self.cut = (self._modules_before, f"{reader} reads {variable}, which is set for each worker anew")

    def was_set(self, variable: str) -> None:
        """Somebody changes a variable. What a library sets while it is imported, it sets in the zygote too."""
        if threading.get_ident() != self._thread or (self._names and not self._is_local(self._names[-1])):
            return
        self.sets.add(variable)
        reader = self._read.get(variable)
        if reader is not None and variable not in self._harmless and self.conflict is None:
            self.conflict = (variable, reader)
            if self._conflicting is not None:
                self._conflicting(variable, reader)

    def _is_local(self, name: str) -> bool:
        """Is it a module of the script's own, by what is known while it is imported?"""
        module = sys.modules.get(name)
        return module is not None and is_local(module, self._standard)


def _watching() -> ImportWatch | None:
    """The watch, if there is one; it ends here if no step was told in time."""
    watch = _active
    if watch is not None and time.monotonic() > watch.until:
        watch.whole = False
        watch.end()
        return None
    return watch


def _find_and_load(name: str, import_: Any) -> ModuleType:
    watch = _watching()
    if watch is None:
        found: ModuleType = _original(name, import_)
        return found
    return watch.load(name, import_)


# The interpreter cuts its own frames out of tracebacks by their file's name: a failed import shall look as ever.
for _function in (_find_and_load, ImportWatch.load):
    _function.__code__ = _function.__code__.replace(co_filename="<frozen importlib._bootstrap>")


class _WatchedEnvironment(_Environment):  # type: ignore[misc]  # whatever class the interpreter has for it
    """What `os.environ` is meanwhile.

    It calls the methods of its base by name: `super` fails where another thread has ended the watch since the call began.
    """

    def __iter__(self) -> Iterator[str]:
        keys: list[str] = list(_Environment.__iter__(self))
        if (watch := _watching()) is not None:
            watch.enumerated(keys)
        return iter(keys)

    def __getitem__(self, key: str) -> str:
        if (watch := _watching()) is not None:
            watch.was_read(key)
        value: str = _Environment.__getitem__(self, key)
        return value

    def __setitem__(self, key: str, value: str) -> None:
        if (watch := _watching()) is not None and not _is(self, key, value):
            watch.was_set(key)
        _Environment.__setitem__(self, key, value)

    def __delitem__(self, key: str) -> None:
        if (watch := _watching()) is not None:
            watch.was_set(key)
        _Environment.__delitem__(self, key)


def _is(environment: Any, key: str, value: str) -> bool:
    try:
        return bool(_Environment.__getitem__(environment, key) == value)
    except KeyError:
        return False


def _forked() -> None:
    if _active is not None:
        _active.end()


os.register_at_fork(after_in_child=_forked)


@functools.cache
def unwatchable() -> str:
    """Why imports cannot be watched in this process; empty: they can. Finds out by one import that fails at once."""
    if type(os.environ) is not _Environment:
        return f"os.environ is a {type(os.environ).__name__}"
    try:
        os.environ.__class__ = _WatchedEnvironment
    except TypeError:
        return "the class of os.environ cannot be changed"
    finally:
        with contextlib.suppress(TypeError):
            os.environ.__class__ = _Environment
    original = getattr(bootstrap, "_find_and_load", None)
    if original is None:
        return "importlib has no _find_and_load"
    seen: list[object] = []

    def load(*given: Any, **named: Any) -> Any:
        try:
            return original(*given, **named)
        except ImportError:
            seen.append((given[:1], len(given), len(named)))
            raise

    sys.modules[_TRIED] = None  # type: ignore[assignment]  # how the interpreter itself marks a name that is not to be imported
    bootstrap._find_and_load = load
    try:
        with contextlib.suppress(Exception):
            __import__(_TRIED)
    finally:
        bootstrap._find_and_load = original
        del sys.modules[_TRIED]
    return (
        "" if ((_TRIED,), 2, 0) in seen else "its imports do not go through importlib's _find_and_load(name, import_)"
    )


@functools.cache
def standard_folders() -> tuple[str, ...]:
    """Where the standard library lies."""
    return tuple(sorted({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")}))


def is_installed(folder: str) -> bool:
    """Is it, by its name, a folder that installers fill?"""
    return os.path.basename(folder.rstrip(os.sep)) in PACKAGES


def origin_of(module: object) -> str:
    """The file of a module; empty where there is none: built in, a namespace, made by hand."""
    if not issubclass(type(module), ModuleType):  # `isinstance` would ask proxies for their class, which may import it
        return ""
    # By its dictionary: modules that load their parts when they are asked for must not be asked.
    spec = vars(module).get("__spec__")
    found = getattr(spec, "origin", None) if spec is not None else vars(module).get("__file__")
    return found if isinstance(found, str) and os.path.isabs(found) else ""


def is_shared(origin: str, standard: tuple[str, ...]) -> bool:
    """Does this file belong to an installed package or to the standard library?"""
    return any(f"{os.sep}{name}{os.sep}" in origin for name in PACKAGES) or origin.startswith(standard)


def _is_made_by_hand(name: str) -> bool:
    """Did somebody put it there without importing it, as a stand-in or to forbid its import?"""
    module = sys.modules.get(name)
    if module is None:
        return True
    return issubclass(type(module), ModuleType) and vars(module).get("__spec__") is None and not origin_of(module)


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def is_local(module: object, standard: tuple[str, ...]) -> bool:
    """Does it come from a file outside the standard library and the installed packages?"""
    origin = origin_of(module)
    return bool(origin) and not is_shared(origin, standard)

"""Watches the imports of this process: how long they take, and which variables of the environment they read.

A module that is imported before the fork sees the environment of the zygote. It must not be a module that reads, while it is
imported, a variable which the worker's seat or the script sets first: the module would keep the wrong value, and say nothing.
So a worker is watched until its first step, and so is the zygote while it imports what such a worker had.

Costs about a microsecond per imported module, and nothing once it has ended.
"""

from __future__ import annotations

import importlib
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

bootstrap: Any = vars(importlib)["_bootstrap"]
"""What the interpreter's own import statement calls."""

_active: ImportWatch | None = None


class ImportWatch:
    """Of the thread that begins it, from `begin` to `end`; one at a time.

    ``given``: variables that others set for this process, such as its rank.
    ``read``: what the imports of the zygote have read: each variable, and the module that read it.
    ``harmless``: variables that an earlier worker of this script set as well, after all imports that read them.
    ``excused``: modules that may read any variable, because somebody puts right afterwards what they made of it.
    ``warn`` is called with a variable and a module, once, when the script sets what that module has read already.
    """

    def __init__(
        self,
        given: Iterable[str] = (),
        read: Mapping[str, str] | None = None,
        harmless: Iterable[str] = (),
        excused: Iterable[str] = (),
        warn: Callable[[str, str], None] | None = None,
    ) -> None:
        self.spent_ns = 0
        self.reads: dict[str, str] = {}
        self.sets: set[str] = set()
        self.cut: tuple[int, str] | None = None
        self.conflict: tuple[str, str] | None = None
        self._given, self._read, self._harmless = set(given), read or {}, set(harmless)
        self._excused, self._warn = frozenset(excused), warn
        self._standard = standard_folders()
        self._thread = threading.get_ident()
        self._names: list[str] = []
        self._sweep: list[str] = []
        self._outermost = -1
        self._modules_before = 0
        self._began_ns = 0
        self._original: Callable[[str, Any], ModuleType] | None = None

    def begin(self) -> None:
        """Watch from now on."""
        global _active  # noqa: PLW0603 - there is one import system in a process
        assert _active is None, "one watch at a time"
        _active = self
        self._original = bootstrap._find_and_load
        bootstrap._find_and_load = _find_and_load
        os.environ.__class__ = _WatchedEnvironment

    def end(self) -> None:
        """Watch no more, and leave everything as it was. Idempotent."""
        global _active  # noqa: PLW0603 - as above
        if _active is not self:
            return
        _active = None
        if bootstrap._find_and_load is _find_and_load:
            bootstrap._find_and_load = self._original
        os.environ.__class__ = os._Environ

    @property
    def spent_us(self) -> int:
        """Microseconds that imports took until now."""
        return self.spent_ns // 1000

    # ---- what is watched

    def load(self, name: str, import_: Any) -> ModuleType:
        """The import of a module that is not there yet."""
        assert self._original is not None, "begin() keeps the original"
        if threading.get_ident() != self._thread:
            return self._original(name, import_)
        if not self._names:
            self._began_ns = time.monotonic_ns()
        if self._outermost < 0 and not self._is_local(name):
            # Imports of the script's own modules are no part of it: what they import is.
            self._outermost, self._modules_before = len(self._names), len(sys.modules)
        self._names.append(name)
        try:
            return self._original(name, import_)
        finally:
            self._names.pop()
            if len(self._names) <= self._outermost:
                self._outermost = -1
            if not self._names:
                self.spent_ns += time.monotonic_ns() - self._began_ns

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
            if self._warn is not None:
                self._warn(variable, reader)

    def _is_local(self, name: str) -> bool:
        """Is it a module of the script's own, by what is known while it is imported?"""
        module = sys.modules.get(name)
        return module is not None and is_local(module, self._standard)


def _find_and_load(name: str, import_: Any) -> ModuleType:
    watch = _active
    if watch is None:
        found: ModuleType = bootstrap._find_and_load(name, import_)
        return found
    return watch.load(name, import_)


# The interpreter cuts its own frames out of tracebacks by their file's name: a failed import shall look as ever.
for _function in (_find_and_load, ImportWatch.load):
    _function.__code__ = _function.__code__.replace(co_filename="<frozen importlib._bootstrap>")


class _WatchedEnvironment(os._Environ[str]):
    """What `os.environ` is meanwhile."""

    def __iter__(self) -> Iterator[str]:
        keys = list(super().__iter__())
        if _active is not None:
            _active.enumerated(keys)
        return iter(keys)

    def __getitem__(self, key: str) -> str:
        if _active is not None:
            _active.was_read(key)
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: str) -> None:
        if _active is not None and not self._is(key, value):
            _active.was_set(key)
        super().__setitem__(key, value)

    def _is(self, key: str, value: str) -> bool:
        try:
            return super().__getitem__(key) == value
        except KeyError:
            return False

    def __delitem__(self, key: str) -> None:
        if _active is not None:
            _active.was_set(key)
        super().__delitem__(key)


def standard_folders() -> tuple[str, ...]:
    """Where the standard library lies."""
    return tuple(sorted({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")}))


def is_installed(folder: str) -> bool:
    """Is it, by its name, a folder that installers fill?"""
    return os.path.basename(folder.rstrip(os.sep)) in PACKAGES


def origin_of(module: object) -> str:
    """The file of a module; empty where there is none: built in, a namespace, made by hand."""
    if not isinstance(module, ModuleType):
        return ""
    # By its dictionary: modules that load their parts when they are asked for must not be asked.
    spec = vars(module).get("__spec__")
    found = getattr(spec, "origin", None) if spec is not None else vars(module).get("__file__")
    return found if isinstance(found, str) and os.path.isabs(found) else ""


def is_shared(origin: str, standard: tuple[str, ...]) -> bool:
    """Does this file belong to an installed package or to the standard library?"""
    return any(f"{os.sep}{name}{os.sep}" in origin for name in PACKAGES) or origin.startswith(standard)


def is_local(module: object, standard: tuple[str, ...]) -> bool:
    """Does it come from a file outside the standard library and the installed packages?"""
    origin = origin_of(module)
    return bool(origin) and not is_shared(origin, standard)

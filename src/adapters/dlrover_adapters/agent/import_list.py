"""What the workers of a script import until their first step: learnt by one run, imported before the fork in the next.

One file per script in the state directory. It holds for one script and its own modules (by their contents), one interpreter and
one set of installed packages; whoever finds that something of this has changed treats the file as absent. It names modules of
installed packages and of the standard library alone, never the script's own. Light to import: the agent needs it first of all.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from .config import DEFAULT_GROUP, TORCH, LaunchConfig, Mode
from .import_watch import ImportWatch, is_installed, is_local, is_shared, origin_of, standard_folders, unwatchable

VERSION = 3
LISTS_MAX = 64
"""Files that are kept; the oldest go first."""

SOURCES_MAX = 500
"""A script with more modules of its own gets no list: they would have to be read at each start."""

SOURCE_BYTES_MAX = 4 * 1024 * 1024

MODULES_MAX = 20_000
PAUSE_S, PAUSE_EVERY = 0.001, 100
"""While it writes the list, a thread of the worker hands Python's lock to training so often."""

FINISH_S = 2.0
"""A script that ends right after its first step waits so long for its list at most."""

OURS = ("dlrover_adapters", "dlrover_backends", "dlrover_core")
MAINS = frozenset({"__main__", "__mp_main__"})
GROWS = ("modules", "sets", "found")
"""The fields in which a worker may have something to add to the list as it is."""


class ImportList(NamedTuple):
    """What one file holds.

    ``modules``: names in the order of their imports.
    ``local``: modules of the script's own. An import before the fork must not bring in one of these names.
    ``sets``: variables that the script sets without harm: nothing that is imported later reads them.
    ``cut``: why ``modules`` ends before the last import of the worker; no module is added to it then.
    ``refused``: why nothing may be imported before the fork; empty: nothing is known against it.
    ``origins``: the file of each of ``modules``.
    ``found``: what the framework had found out about the host (`Framework.found`).
    """

    modules: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    cut: str = ""
    refused: str = ""
    origins: tuple[str, ...] = ()
    found: tuple[str, ...] = ()


def path_of(config: LaunchConfig) -> str:
    """The file for the workers of ``config``; empty where modules are not preloaded by what workers imported."""
    if not config.imports or not config.warm or unwatchable():
        return ""
    name = config.argv[0]
    try:
        script = name if config.mode is Mode.MODULE else os.path.realpath(name)
        folder = os.getcwd() if config.mode is Mode.MODULE else ""
    except FileNotFoundError:  # the current folder was removed while the job runs
        return ""
    warm = config.env.get("DLROVER_WARM", os.environ.get("DLROVER_WARM", ""))
    place: tuple[str, ...] = (config.mode.value, script, folder, sys.executable, warm)
    if (config.group, config.framework) != (DEFAULT_GROUP, TORCH):
        place = (*place, config.group, config.framework)  # another group's workers do other things in the same script
    key = zlib.crc32(repr((*place, os.environ.get("PYTHONPATH", ""))).encode(errors="surrogateescape"))
    readable = "".join(one if one.isalnum() and one.isascii() else "-" for one in os.path.basename(name))[:60]
    return os.path.join(config.imports, f"{readable}-{key:08x}.json")


def read(path: str, paths: Sequence[str]) -> ImportList | None:
    """The list, if there is one and it holds for the packages in ``paths`` and for the script as they are now."""
    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
        if raw["version"] != VERSION or raw["installed"] != installed(paths) or not _unchanged(raw["sources"]):
            return None
        names = ("modules", "local", "sets", "origins", "found")
        modules, local, sets, origins, found = (tuple(map(str, raw[one])) for one in names)
        if len(origins) != len(modules):
            return None
        return ImportList(modules, local, sets, str(raw["cut"]), str(raw["refused"]), origins, found)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(path: str, found: ImportList, paths: Sequence[str], sources: Sequence[str]) -> None:
    """Write the list, which holds as long as the packages in ``paths`` and ``sources`` stay as they are. Raises `OSError`."""
    raw = {"version": VERSION, "installed": installed(paths), "sources": [_source(one) for one in sources]}
    _replace(path, {**raw, **found._asdict()})
    _prune(os.path.dirname(path))


def refuse(path: str, reason: str, keep: int = 0) -> None:
    """Note in an existing file that its modules, all but the first ``keep``, must not be preloaded. Never raises."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
        raw["modules"], raw["origins"] = raw["modules"][:keep], raw["origins"][:keep]
        raw["cut" if keep else "refused"] = reason
        _replace(path, raw)


def refused(path: str) -> str:
    """Why nothing of the list in this file may be imported before the fork; empty: nothing is known against it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(path, encoding="utf-8") as file:
        return str(json.load(file)["refused"])
    return ""


def _replace(path: str, raw: dict[str, Any]) -> None:
    """Whole or not at all: several agents of a host may write at once."""
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    fd, part = tempfile.mkstemp(prefix=".part-", dir=folder)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(raw, file)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _prune(folder: str) -> None:
    with os.scandir(folder) as entries:
        found = [(one.stat().st_mtime_ns, one.path) for one in entries]
    for _, path in sorted(found)[: max(0, len(found) - LISTS_MAX)]:
        with contextlib.suppress(OSError):
            os.unlink(path)


def installed(paths: Sequence[str]) -> list[list[Any]]:
    """The interpreter and the folders of installed packages among ``paths``: installing or updating one changes its folder."""
    found: list[list[Any]] = [[sys.version, sys.prefix, 0]]
    for folder in paths:
        if is_installed(folder):
            with contextlib.suppress(OSError):
                found.append([folder, "", os.stat(folder).st_mtime_ns])
    return found


def _source(path: str) -> list[Any]:
    with open(path, "rb") as file:
        return [path, zlib.crc32(file.read(SOURCE_BYTES_MAX))]


def _unchanged(sources: Any) -> bool:
    return bool(sources) and all(_source(path) == [path, digest] for path, digest in sources)


# ---- in a worker


class Learner:
    """One worker's: watches it until its first step, then brings the list up to date. ``path`` empty: only watches.

    ``ahead``: modules that were imported for it by the list as it was. ``ended`` is called at the first step. ``found`` says what
    the framework has found out (`Framework.found`).
    """

    def __init__(
        self,
        path: str,
        watch: ImportWatch,
        ahead: Collection[str] = (),
        ended: Callable[[], None] | None = None,
        found: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self._path, self._watch, self._ended, self._found = path, watch, ended, found
        # Counted only: a copy of the names costs a forked process 4 ms, as it touches the pages of all of them.
        self._first = self._last = len(sys.modules)
        self._ahead, self._paths = ahead, tuple(sys.path)
        self._names: tuple[str, ...] = ()
        self._learning = _thread.allocate_lock()

    def begin(self) -> None:
        """The script begins."""
        self._watch.begin()

    def stepped(self) -> int:
        """The first step is done: microseconds that imports took before it. Costs a fraction of a millisecond."""
        self._watch.end()
        if self._ended is not None:
            self._ended()
        if self._path and self._watch.whole:
            self._last = len(sys.modules)
            self._learning.acquire()
            atexit.register(self._finish, os.getpid())
            # Not a `Thread`, whose start waits until it runs: on a busy machine that takes a time slice.
            _thread.start_new_thread(self._learn, ())
        return self._watch.spent_us

    def _learn(self) -> None:
        try:
            self._names = tuple(sys.modules)[: self._last]
            self.learn()
        finally:
            self._learning.release()

    def _finish(self, pid: int) -> None:
        """At the interpreter's end: a script that ends after its first step has its list, too. A forked child has no thread."""
        if os.getpid() == pid:
            self._learning.acquire(timeout=FINISH_S)

    def learn(self) -> None:
        """Write the list, if it says something new. What goes wrong here is nobody's business but the next start's."""
        with contextlib.suppress(Exception):
            known = read(self._path, self._paths)
            if known is not None and (known.cut or known.refused):
                return
            names = self._names[: self._watch.cut[0]] if self._watch.cut is not None else self._names
            found, sources = self._sorted(names)
            if known is not None and all(set(getattr(found, one)) <= set(getattr(known, one)) for one in GROWS):
                return
            if 0 < len(sources) <= SOURCES_MAX and len(found.modules) <= MODULES_MAX:
                write(self._path, _merged(known, found), self._paths, sources)

    def _sorted(self, names: Iterable[str]) -> tuple[ImportList, list[str]]:
        """The new modules of these, and the files of the script's own modules."""
        standard, before = standard_folders(), set(self._names[: self._first]).difference(self._ahead)
        candidates = set(names) - before - MAINS
        modules, origins, local, sources = [], [], [], []
        folders = tuple(os.path.join(one, "") for one in self._paths if one)
        for count, name in enumerate(self._names):
            if count % PAUSE_EVERY == 0:
                time.sleep(PAUSE_S)
            module = sys.modules.get(name)
            if name in MAINS:
                sources += _main_file(module)
            elif name.partition(".")[0] in OURS:
                continue
            elif module is None or is_local(module, standard):
                local.append(name)
                sources += [origin_of(module)] if module is not None else []
            elif name in candidates and is_shared(origin_of(module), standard) and _goes_by(module, name):
                # What the script has found by a path of its own, the zygote would find elsewhere, or not at all.
                if origin_of(module).startswith((*folders, *standard)):
                    modules.append(name)
                    origins.append(origin_of(module))
                else:
                    local.append(name)
        cut = self._watch.cut[1] if self._watch.cut is not None else ""
        found = ImportList(
            tuple(modules),
            tuple(local),
            tuple(sorted(self._watch.sets)),
            cut,
            origins=tuple(origins),
            found=self._found(),
        )
        return found, sorted(set(sources))


def _main_file(module: Any) -> list[str]:
    found = getattr(module, "__file__", None)
    return [os.path.abspath(found)] if isinstance(found, str) and os.path.isfile(found) else []


def _goes_by(module: Any, name: str) -> bool:
    """Is it its own name that it is imported by? Others are aliases, which importing the real one makes.

    So is one whose file has another name, as setuptools' own ``distutils``: imported before setuptools, it would be another.
    """
    spec, place = vars(module).get("__spec__"), os.sep + name.replace(".", os.sep)
    if spec is None or spec.name != name:
        return False
    return os.path.dirname(origin_of(module)).endswith(place) or origin_of(module).partition(place + ".")[1] != ""


def _merged(known: ImportList | None, found: ImportList) -> ImportList:
    if known is None:
        return found
    pairs = ((known.local, found.local), (known.sets, found.sets), (known.found, found.found))
    local, sets, told = (tuple(dict.fromkeys((*old, *new))) for old, new in pairs)
    files = dict(zip((*known.modules, *found.modules), (*known.origins, *found.origins), strict=True))
    return ImportList(tuple(files), local, sets, found.cut, origins=tuple(files.values()), found=told)

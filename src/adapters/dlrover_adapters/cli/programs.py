"""Is the program there? A script, module or command, and modules to preload, looked for without running any of them."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import pkgutil
import shutil
import sys
from collections.abc import Iterable, Sequence

from dlrover_adapters.agent.config import Mode
from dlrover_adapters.agent.main_module import first_path
from dlrover_core.errors import SpecError

_Spec = importlib.machinery.ModuleSpec
# What a package's __init__ says that makes its modules lie elsewhere than in its folder.
_DYNAMIC = (b"__path__", b"meta_path", b"sys.modules")
_SOURCE_BYTES_MAX = 1024 * 1024


def check(mode: Mode, argv: Sequence[str], preload: Iterable[str] | None) -> None:
    """Raises `SpecError` where workers could never start: the program or a module to preload is not there."""
    if mode is Mode.COMMAND:
        _check_command(argv[0])
        return
    if mode is Mode.MODULE:
        _check_module(argv[0])
    else:
        _check_script(argv[0])
    for name in preload or ():
        fault = missing(name, None if mode is Mode.RUN_PATH else first_path(mode, tuple(argv)))
        if fault:
            raise SpecError("preload", f"{fault}; install it, or leave it out")


def _check_script(script: str) -> None:
    if not os.path.exists(script):
        raise SpecError("script", f"{script!r} is not a file; for a module say -m, for a program --no-python")
    if not os.access(script, os.R_OK):
        raise SpecError("script", f"{script!r} cannot be read by this user; chmod +r it, or name another file")
    if os.path.isdir(script) and _look("__main__", [script]) is None:
        raise SpecError("script", f"{script!r} is a folder without __main__.py; name the script in it")


def _check_module(name: str) -> None:
    fault = missing(name, os.getcwd(), runs=True)
    if not fault:
        return
    if name.endswith(".py") or os.path.exists(name):
        fault += f"; for a file leave -m out: dlrover-run {name}"
    else:
        fault += "; say PACKAGE.MODULE as for python -m, from a folder where python finds it"
    raise SpecError("module", fault)


def _check_command(program: str) -> None:
    """As `execvp` would find it."""
    if shutil.which(program) is not None:
        return
    if os.path.isdir(program):
        raise SpecError("script", f"{program!r} is a folder; --no-python runs a program")
    if os.path.dirname(program) and os.path.exists(program):
        raise SpecError("script", f"{program!r} is not executable; chmod +x it, or leave --no-python out for Python")
    where = "not there" if os.path.dirname(program) else "not on the PATH; say ./PROGRAM for one in this folder"
    raise SpecError("script", f"the program {program!r} is {where}")


def missing(name: str, first: str | None, *, runs: bool = False) -> str:
    """Why ``import name`` would fail, or with ``runs`` ``python -m name``; empty: nothing speaks against it.

    ``first`` goes before `sys.path`, as the script's folder does. No package is imported, so where the code of a package may
    decide what lies in it, the answer is empty.
    """
    parts = name.split(".")
    if os.sep in name or not all(parts):
        return f"{name!r} is not the name of a module"
    if name in sys.modules and not runs:
        return ""  # such as os.path, which no folder has
    entries = sys.path if first is None or getattr(sys.flags, "safe_path", False) else [first, *sys.path]
    spec: _Spec | None = None
    for count in range(1, len(parts) + 1):
        whole = ".".join(parts[:count])
        found = _top(whole, entries) if spec is None else _look(whole, _folders(spec))
        if found is None:
            if spec is None:
                return f"there is no module {name!r}" + (f", nor a package {whole!r}" if whole != name else "")
            return "" if _is_dynamic(spec) else f"there is no module {whole!r}, though there is {spec.name!r}"
        spec = found
    assert spec is not None, "a name has a part"
    is_package = spec.submodule_search_locations is not None and not _is_dynamic(spec)
    if runs and is_package and _look(f"{name}.__main__", _folders(spec)) is None:
        return f"{name!r} is a package without __main__.py, which python -m cannot run"
    return ""


def _top(name: str, entries: Iterable[str]) -> _Spec | None:
    """A module that is in no package: where paths lead, built in, or what an installed finder knows (editable installs)."""
    found = _look(name, entries)
    for finder in sys.meta_path:
        if found is not None:
            break
        if finder is not importlib.machinery.PathFinder:
            with contextlib.suppress(Exception):  # somebody else's code
                found = finder.find_spec(name, None)
    return found


def _look(name: str, entries: Iterable[str]) -> _Spec | None:
    """A module in one of the folders or archives; several folders without __init__ are one package."""
    portions: list[str] = []
    for entry in entries:
        finder = pkgutil.get_importer(entry or os.getcwd())
        spec = finder.find_spec(name) if finder is not None else None
        if spec is not None and spec.loader is not None:
            return spec
        portions += spec.submodule_search_locations or () if spec is not None else ()
    if not portions:
        return None
    namespace = _Spec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace


def _folders(spec: _Spec) -> list[str]:
    return list(spec.submodule_search_locations or ())


def _is_dynamic(spec: _Spec) -> bool:
    """May this package's code put modules into it, or find them elsewhere?"""
    if spec.submodule_search_locations is None or not spec.has_location:
        return False  # no package, or one without code
    try:
        with open(str(spec.origin), "rb") as file:
            source = file.read(_SOURCE_BYTES_MAX)
    except OSError:
        return True  # in an archive
    return any(word in source for word in _DYNAMIC)

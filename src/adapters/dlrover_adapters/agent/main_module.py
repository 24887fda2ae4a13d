"""Run a program as `__main__`, as a fresh ``python -u script.py`` (or ``-m module``) would.

`__main__` must be real: pickle finds classes of the script there, and the spawn and forkserver methods of multiprocessing (so
DataLoader's) read its ``__file__`` or ``__spec__`` to import it again in their children.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable
from typing import Any

from .config import Mode

_OURS = os.path.dirname(os.path.abspath(__file__))


def first_path(mode: Mode, argv: tuple[str, ...]) -> str:
    """What the interpreter puts first on ``sys.path``: the script's own folder (links resolved), or the working directory."""
    if mode is not Mode.SCRIPT:
        return os.getcwd()
    if _is_container(argv[0]):
        return os.path.abspath(argv[0])
    return os.path.dirname(os.path.realpath(argv[0]))


def set_first_path(path: str) -> None:
    """Replace the entry that our own ``-m`` start left first on ``sys.path``."""
    if getattr(sys.flags, "safe_path", False):
        return  # PYTHONSAFEPATH: the interpreter put no such entry there, for us as for the script
    if sys.path:
        sys.path[0] = path
    else:
        sys.path.append(path)


def execute(mode: Mode, argv: tuple[str, ...]) -> None:
    """Run ``argv`` to its end in a new `__main__`. Whatever the program raises comes through."""
    sys.argv = list(argv)
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if mode is Mode.MODULE else []), *argv]
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    if "__annotations__" in vars(sys.modules["__main__"]):
        vars(main)["__annotations__"] = {}  # as this interpreter begins it; from 3.14 on it does not
    sys.modules["__main__"] = main
    set_first_path(first_path(mode, argv))
    if mode is Mode.MODULE:
        _as_main(argv[0], alter_argv=True)
    elif mode is Mode.RUN_PATH:
        runpy.run_path(argv[0], run_name="__main__")
    elif _is_container(argv[0]):
        _as_main("__main__", alter_argv=False)
    else:
        _run_file(argv[0], main)


def _is_container(script: str) -> bool:
    """A folder or a zip file with a __main__.py in it."""
    return os.path.isdir(script) or pkgutil.get_importer(script) is not None


def _as_main(module: str, *, alter_argv: bool) -> None:
    # What the interpreter itself calls for ``-m`` and for folders; the public functions restore `__main__` at the end,
    # too early for atexit handlers and threads.
    run: Callable[..., Any] = vars(runpy)["_run_module_as_main"]
    run(module, alter_argv=alter_argv)


def _run_file(script: str, main: types.ModuleType) -> None:
    path = os.path.abspath(script)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        # In the interpreter's own words, with its exit code: people search for them.
        sys.stderr.write(f"{sys.executable}: can't open file '{path}': [Errno {error.errno}] {error.strerror}\n")
        sys.exit(2)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __loader__=loader, __cached__=None)
    exec(compile(source, path, "exec", dont_inherit=True), vars(main))  # noqa: S102 - running the user's script is the point


def program_traceback(error: BaseException) -> types.TracebackType | None:
    """The traceback without the frames of this package, as the program's own launch would show it."""
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == _OURS:
        trace = trace.tb_next
    return trace

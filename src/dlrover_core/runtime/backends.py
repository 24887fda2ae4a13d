"""Chooses a job's backend by name or by path, and makes it: the contract between a command line and somebody's `Backend`.

``NAME[:ARGS]`` names an entry point of the group ``dlrover.backends``; ``MODULE:CLASS[:ARGS]`` and ``FILE.py:CLASS[:ARGS]`` name
an object. What stands before the first colon decides: with a dot or a slash in it, it is a module or a file, else a name. ARGS is
one text that reaches the backend as it was typed.

The object, a class or a function, is called with one argument, a `BackendContext`, and what it returns has the methods of
`Backend`. It is called in the launcher, once, so that a mistake ends the command before anything is started, and in every master.
So it must be quick, and must neither connect nor start anything: the first call of a method may.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from dlrover_core.errors import SpecError
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime import objects
from dlrover_core.runtime.backend import Backend

GROUP = "dlrover.backends"
FIELD = "backend"

NODE, JOB, RUN, MASTERS, NPROC = "DLROVER_NODE", "DLROVER_JOB", "DLROVER_RUN", "DLROVER_MASTERS", "DLROVER_NPROC"
STANDBY, SEAT = "DLROVER_STANDBY", "DLROVER_SEAT"
"""What an agent that waits without a name is told in place of ``NODE``: its group, and what its backend calls its place."""
TOKEN, HOST, ADDRESS = "DLROVER_TOKEN", "DLROVER_HOST", "DLROVER_ADDRESS"
"""What an agent that a scheduler starts is told by its environment. The last two are the scheduler's to set."""

_METHODS: Mapping[str, tuple[str, ...]] = {
    "launch": ("node", "token"),
    "delete": ("name", "token", "grace_s"),
    "observe": (),
    "room": ("group",),
}
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_OBJECT = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_PATH_FORMS = "mypackage.slurm:Slurm or ./slurm.py:Slurm"


@dataclass(frozen=True)
class BackendContext:
    """What a backend is made from: the job that it serves, and how the agent of a node is started.

    job:        the job's name
    run:        the id of this life of the job; agents of another run are strangers to its masters
    masters:    ``host:port`` of each master, as nodes reach them
    token:      the job's secret, which agents find as ``DLROVER_TOKEN``; apart from ``env``, as clusters keep secrets apart
    command:    the whole command that starts a node's agent, with this interpreter; empty: the backend has one of its own
    arguments:  the command's words after ``dlrover-run``, for a backend whose nodes have another interpreter
    env:        variables that the agent of every node needs; `environment` adds those of one node
    cwd:        the directory in which the command is run: paths in it may be relative to it
    directory:  a private directory of the job on this host, which outlives masters and launcher: the backend's memory
    args:       what stood behind the backend's name, as it was typed
    stop_grace_s: seconds that workers have to end when they are asked to stop
    """

    job: str
    run: str
    masters: tuple[str, ...]
    token: str = field(repr=False)
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    directory: str = ""
    args: str = ""
    stop_grace_s: float = 30.0

    def environment(self, node: NodeLaunch) -> dict[str, str]:
        """The variables that make the command that node's agent, without the token."""
        told = {JOB: self.job, RUN: self.run, MASTERS: ",".join(self.masters)}
        return {**self.env, **told, NODE: node.node, NPROC: str(node.nproc)}

    def options(self, **defaults: str) -> dict[str, str]:
        """``args`` read as ``KEY=VALUE,KEY=VALUE``, over ``defaults``. Raises `SpecError` for a key that has no default."""
        found = dict(defaults)
        for part in filter(None, self.args.split(",")):
            key, equals, value = part.partition("=")
            if not equals or key not in defaults:
                known = ", ".join(f"{name}=" for name in defaults) or "none"
                what = f"there is no {key!r}" if equals else f"{part!r} is not KEY=VALUE"
                raise SpecError(FIELD, f"{what} among the backend's arguments; there are: {known}")
            found[key] = value
        return found


class Choice(NamedTuple):
    """A backend as a person named it.

    name: an entry point's name; empty where it was named by ``path``
    path: ``module:Class`` or ``/absolute/file.py:Class``
    args: its own arguments
    """

    name: str
    path: str
    args: str

    @property
    def text(self) -> str:
        """The same choice as one text, which `read` takes, wherever it is read."""
        return f"{self.name or self.path}{':' if self.args else ''}{self.args}"


def read(text: str, cwd: str | None = None) -> Choice:
    """What ``NAME[:ARGS]``, ``MODULE:CLASS[:ARGS]`` or ``FILE.py:CLASS[:ARGS]`` names; a file is relative to ``cwd``.

    Raises `SpecError`.
    """
    head, _, rest = text.partition(":")
    if "." not in head and "/" not in head:
        if not _NAME.fullmatch(head):
            raise SpecError(FIELD, f"{text!r} is not NAME[:ARGS], nor a path such as {_PATH_FORMS}")
        return Choice(head, "", rest)
    name, _, args = rest.partition(":")
    if not _OBJECT.fullmatch(name):
        raise SpecError(FIELD, f"{text!r} names no class in {head!r}; say {head}:CLASS, and :ARGS behind it if need be")
    if "/" in head and not head.endswith(".py"):
        raise SpecError(FIELD, f"{head!r} is no Python file: its name must end with .py; a module is mypackage.slurm")
    if head.endswith(".py"):
        head = str(Path(cwd or Path.cwd(), head).resolve())
    return Choice("", f"{head}:{name}", args)


def find(choice: Choice, ours: Mapping[str, str], cwd: str | None = None) -> Callable[[BackendContext], Any]:
    """The class or function of that name; ``ours`` are names that need no installed metadata. Raises `SpecError`.

    Modules are looked for in ``cwd`` too, last of all, so that none of its files hides an installed one.
    """
    if choice.path:
        here = cwd or str(Path.cwd())
        if here not in sys.path:
            sys.path.append(here)
        thing = objects.find(choice.path, FIELD)
    elif choice.name in ours:
        thing = objects.find(ours[choice.name], FIELD)
    else:
        thing = _installed(choice.name, ours)
    if not callable(thing):
        raise SpecError(
            FIELD, f"{choice.text!r} is a {type(thing).__name__}; name a class or a function that makes one"
        )
    if isinstance(thing, type):
        _check_methods(thing, choice.text)
    return cast("Callable[[BackendContext], Any]", thing)


def _installed(name: str, ours: Mapping[str, str]) -> Any:
    from importlib.metadata import entry_points

    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        import difflib

        known = sorted({*ours, *found})
        near = difflib.get_close_matches(name, known, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise SpecError(
            FIELD,
            f"no backend {name!r} is installed{meant}; there are: {', '.join(known)}. One of your own is named by its path, "
            f"with a dot or a slash in it: {_PATH_FORMS}",
        )
    try:
        return found[name].load()
    except Exception as error:
        raise SpecError(
            FIELD, f"{name!r} ({found[name].value}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def make(found: Callable[[BackendContext], Any], context: BackendContext, text: str) -> Backend:
    """The backend that ``found`` makes of the context. Raises `SpecError` where it makes none, or no backend."""
    try:
        inspect.signature(found).bind(context)
    except TypeError as error:
        raise SpecError(
            FIELD, f"{text!r} must be made from one argument, a BackendContext, and takes {inspect.signature(found)}"
        ) from error
    except ValueError:
        pass  # written in C: the call itself will tell
    try:
        backend = found(context)
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(FIELD, f"{text!r} cannot be made: {type(error).__name__}: {error}") from error
    _check_methods(backend, text)
    return cast(Backend, backend)


def _check_methods(thing: Any, text: str) -> None:
    """Raises `SpecError` that names the method which does not fit the port."""
    for name, arguments in _METHODS.items():
        method, form = getattr(thing, name, None), f"{name}({', '.join(arguments)})"
        if not callable(method):
            raise SpecError(FIELD, f"{text!r} has no method {form}, which a Backend must have (dlrover_core.Backend)")
        unbound = isinstance(thing, type) and inspect.isfunction(inspect.getattr_static(thing, name))
        try:
            inspect.signature(method).bind(*(("self",) if unbound else ()), *arguments)
        except TypeError as error:
            raise SpecError(
                FIELD, f"{text!r} has a {name}{inspect.signature(method)}; a Backend's is {form}"
            ) from error
        except ValueError:
            continue  # written in C: the call itself will tell
        if name == "observe" and inspect.iscoroutinefunction(method):
            raise SpecError(
                FIELD, f"{text!r} has an observe() that returns once; a Backend's yields Listed, then each Changed"
            )

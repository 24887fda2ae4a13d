"""Executing the processes of the launcher. Light to import: the zygote is started before anything slow is.

All of this must be called from the main thread: a parent-death signal is bound to the thread that started the process.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from typing import Any, NamedTuple

from dlrover_core.errors import LaunchFailed

from . import wire
from .config import AUTO, LaunchConfig, Mode, birth_environment
from .framework import substituted
from .import_list import path_of
from .main_module import first_path

_MODULE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_module.py")


class Spawned(NamedTuple):
    """A process just executed, and our end of its socket. Nobody watches it yet."""

    pid: int
    link: socket.socket


def module_command(name: str) -> tuple[str, ...]:
    """The beginning of a command that runs a module of ours, whatever lies in the working directory."""
    return (sys.executable, "-u", _MODULE, name)


def _execute(module: str, config: LaunchConfig, *arguments: str, first: dict[str, Any] | None = None) -> Spawned:
    if threading.current_thread() is not threading.main_thread():
        raise LaunchFailed(
            f"{module} must be started from the main thread: processes die with the thread that started them"
        )
    try:
        link, theirs = wire.pair()
    except OSError as error:
        raise LaunchFailed(f"no socket can be made for {module}: {error.strerror}; see ulimit -n") from error
    with theirs:
        if first is not None:
            wire.send(link, first)
        theirs.set_inheritable(True)
        # -u as under torchrun: forked workers inherit unbuffered streams.
        command = [*module_command(f"{__package__}.{module}"), "--fd", str(theirs.fileno())]
        command += ["--agent", str(os.getpid()), *arguments, "--job", config.job, "--node", config.node]
        env = birth_environment(config, os.environ)
        try:
            pid = os.posix_spawn(sys.executable, command, env, setsigmask=())
        except OSError as error:
            link.close()
            raise LaunchFailed(f"cannot execute {sys.executable}: {error}") from error
    link.setblocking(False)
    return Spawned(pid, link)


def spawn_zygote(config: LaunchConfig, refused: frozenset[str] = frozenset()) -> Spawned:
    """A zygote that begins to get warm, with all preloads but the ``refused``."""
    arguments = ["--framework", config.framework, "--probe-s", str(config.probe_s)]
    arguments += [word for one in config.preload or () if one not in refused for word in ("--preload", one)]
    if AUTO not in refused and (imports := path_of(config)):
        arguments += ["--imports", imports]
    if config.mode is not Mode.RUN_PATH:
        arguments += ["--path", first_path(config.mode, config.argv)]
    argv = substituted(config.argv, 0)
    return _execute("zygote", config, *arguments, first={"op": "argv", "argv": argv})


def spawn_plain(config: LaunchConfig) -> Spawned:
    """A worker that waits for its seat, with nothing imported."""
    return _execute("plain", config, "--framework", config.framework)


def spawn_keeper(config: LaunchConfig) -> Spawned:
    """A keeper of its own, where there is no zygote to fork it."""
    return _execute("keeper", config, "--framework", config.framework)


def spawn_saver(config: LaunchConfig) -> Spawned:
    """A saver of its own, where there is no zygote to fork it."""
    return _execute("saver", config)

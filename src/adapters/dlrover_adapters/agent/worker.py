"""A worker's life: wait for a seat, become what a fresh process would be, run the program, leave by the interpreter's own end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import types
from collections.abc import Mapping
from typing import Any

from . import wire
from .afresh import NOTHING, Beginning, Preloaded
from .config import Mode
from .framework import Framework, substituted
from .import_list import Learner
from .import_watch import ImportWatch
from .main_module import execute, program_traceback
from .process import set_name, set_title
from .seat import Seat, from_wire
from .streams import forgive_full_disks

SOCKET_VARIABLE = "DLROVER_AGENT_SOCKET"


def run_spare(link: socket.socket, framework: Framework, preloaded: Preloaded = NOTHING) -> int:
    """Wait, already belonging to the agent, for the seat that makes this process a worker; then be it."""
    set_name("dlrover-spare")
    forget_the_zygote()
    frame = wire.receive(link)
    if frame is None:
        os._exit(0)  # not needed, and no code of the user's has run: nothing to end properly
    link.close()
    return run_seat(from_wire(frame.body), frame.fds, framework, preloaded)


def run_seat(seat: Seat, fds: tuple[int, ...], framework: Framework, preloaded: Preloaded = NOTHING) -> int:
    """Take the seat and run its program; the exit code."""
    born = dict(os.environ)
    beginning = Beginning(seat, fds, framework, preloaded) if preloaded.path else None
    slot_fd = take_seat(seat, fds, framework)
    argv = substituted(seat.argv, seat.local_rank)
    if seat.mode is Mode.COMMAND:
        return _become((seat.argv[0], *argv[1:]))  # the slot's descriptor closes with the exec
    forgive_full_disks()
    shelter_multiprocessing(os.path.dirname(seat.agent_socket))
    learner = _learner(seat, born, framework, preloaded, beginning)
    learner.begin()
    framework.reseed()
    framework.begin(seat.launch, seat.rank, seat.agent_socket, slot_fd, learner.stepped)
    os.close(slot_fd)
    return _run(seat.mode, argv, framework)


def _learner(
    seat: Seat, born: Mapping[str, str], framework: Framework, preloaded: Preloaded, beginning: Beginning | None
) -> Learner:
    """Who watches this worker's imports. ``born``: the environment that modules saw which were imported before the fork."""
    given = [name for name, value in os.environ.items() if born.get(name) != value]
    again = beginning.again if beginning is not None else None
    watch = ImportWatch(given, preloaded.reads, preloaded.harmless, framework.excused(), again)
    ended = beginning.forget if beginning is not None else None
    return Learner(seat.imports, watch, preloaded.modules, ended, framework.found)


def take_seat(seat: Seat, fds: tuple[int, ...], framework: Framework) -> int:
    """Streams, names and environment of one rank; the step slot's file descriptor."""
    stdout, stderr, slot = fds
    for fd, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    set_name(f"worker-{seat.rank}")
    set_title(seat.title)
    os.environ.update(framework.environment(seat.launch, seat.local_rank, seat.role, seat.error_file))
    os.environ.update(seat.env)
    os.environ[SOCKET_VARIABLE] = seat.agent_socket
    if seat.cpus:
        os.sched_setaffinity(0, seat.cpus)  # before any thread: those to come inherit it
    return slot


def forget_the_zygote() -> None:
    """Undo what a fork inherits and a fresh process has not."""
    signal.set_wakeup_fd(-1)
    for number, action in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGCHLD, signal.SIG_DFL),
        (signal.SIGPIPE, signal.SIG_IGN),  # as the interpreter sets it
    ):
        signal.signal(number, action)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _reset_multiprocessing()


def _reset_multiprocessing() -> None:
    """Servants of the zygote's (should a preload have started any) are not ours, and its secret would be every rank's."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    if tracker is not None:
        tracker._resource_tracker.__init__()
    server = sys.modules.get("multiprocessing.forkserver")
    if server is not None:
        server._forkserver.__init__()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)


def shelter_multiprocessing(folder: str) -> None:
    """Have multiprocessing keep its sockets in ``folder``, which goes with the run; in this process and all its children.

    Each DataLoader child makes a folder of its own under the system's temporary one, and leaves it there when it is killed.
    """
    from multiprocessing import process

    current: Any = process.current_process()
    current._config["tempdir"] = folder


def _become(argv: tuple[str, ...]) -> int:
    """Replace this process by a command; the death signal and the session stay. Returns only if that fails."""
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.stderr.write(f"dlrover: cannot execute {argv[0]!r}: {error.strerror}\n")
    return 127  # as a shell says it


def _hide_our_frames(error: BaseException) -> None:
    """Let the interpreter show this exception as the program's own launch would. Re-raising it adds our frames again."""
    hook, trace = sys.excepthook, program_traceback(error)

    def show(kind: type[BaseException], value: BaseException, raised: types.TracebackType | None) -> None:
        if value is error:
            value, raised = error.with_traceback(trace), trace  # the traceback of the value is what is printed
        hook(kind, value, raised)

    sys.excepthook = show


def _run(mode: Mode, argv: tuple[str, ...], framework: Framework) -> int:
    try:
        execute(mode, argv)
    except SystemExit:
        raise  # the interpreter knows what it means
    except KeyboardInterrupt as error:
        _hide_our_frames(error)
        raise  # the interpreter dies of SIGINT, as its parents expect it to
    except BaseException as error:  # noqa: BLE001 - this is the program's outermost frame
        framework.record_error(error)
        trace = program_traceback(error)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0

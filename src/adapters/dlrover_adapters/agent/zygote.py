"""The zygote: one warm process that has imported the framework and the preloads, and from which workers are forked.

What makes a process fit to be forked from, and why it is checked (`_fault`):

* *No thread of its own.* A thread does not survive the fork, but the locks it held and the team it belonged to do: a preload
  that multiplied matrices leaves an OpenMP team behind, and every child that computes waits for it for ever. OpenBLAS
  ends its threads before a fork and starts them anew afterwards, so threads are counted *after* a fork.
* *No initialised CUDA.* Its context is unusable in children.
* *A child that can compute*, proved by one that does, within a bound.

What workers of the script imported in an earlier run (`import_list`) is imported last, and looked at as one: where a module
leaves threads behind, or anything else that workers must not share (`belongings`), that module and all after it are left out from
then on.

A process that failed cannot be mended (threads cannot be taken back), so the zygote names the preload at fault and ends; the
agent starts another without it.

Whoever is forked here returns from `Zygote.serve` with the role to play, and `main` calls that role last of all: no frame of the
zygote stands between a worker's script and the interpreter's own end.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

from . import import_list, keeper, saver, wire, worker
from .afresh import NOTHING, Preloaded, servants
from .config import AUTO
from .framework import Framework, load
from .import_watch import ImportWatch, origin_of, standard_folders, unwatchable
from .main_module import set_first_path
from .process import die_with_parent, end_sessions, outlive_parent, own_link, poll_ms, set_name, set_title

Role = Callable[[], int]
END_SESSIONS_S = 10.0
_PLAIN_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/shm/", "/dev/pts/", "/dev/tty")  # noqa: S108
PROBE_PAUSES_S = (0.1, 0.4, 1.6)
_LIMITS = {
    errno.EAGAIN: "; a limit of processes is reached: see ulimit -u, and pids.max of the control group",
    errno.ENOMEM: "; no memory is left for it: see free, and the control group's limit",
    errno.EMFILE: "; see ulimit -n",
}


class Unfit(Exception):
    """This process must not be forked any more. ``preload`` names the module at fault; empty: the framework itself.

    ``kept``: modules of a list that another zygote may still import. ``host``: nothing is wrong here, and this host forks nobody
    for a while.
    """

    def __init__(self, preload: str, reason: str, kept: int = 0, *, host: bool = False) -> None:
        super().__init__(f"{preload or 'the framework'}: {reason}")
        self.preload, self.reason, self.kept, self.host = preload, reason, kept, host


class Zygote:
    """Answers frames: ``fork`` (with a socket), ``gone`` (a session that is no more), ``mine`` (older ones), ``title``, ``argv``

    (the script's, for modules that look at it), and `wire.ASK`.
    """

    def __init__(self, link: socket.socket, agent: int, framework: str, probe_s: float, imports: str = "") -> None:
        self._link, self._agent, self._name, self._probe_s = link, agent, framework, probe_s
        self._framework: Framework
        self._sessions: set[int] = set()
        self._imports, self._listed, self._born = imports, NOTHING, dict(os.environ)

    def serve(self, preloads: tuple[str, ...]) -> Role | None:
        """Get warm, then answer until the agent is gone. In a forked child: the role to play."""
        # Importing makes a million objects that stay: collections meanwhile find nothing and cost a third of the time.
        gc.disable()
        try:
            role = self._warm(preloads)
        except Unfit as unfit:
            told = {"op": "unfit", "preload": unfit.preload, "reason": unfit.reason, "kept": unfit.kept}
            wire.send(self._link, {**told, "host": unfit.host})
            return None
        if role is not None:
            return role
        # From here on there may be sessions to end before our own: the socket tells of the agent's death.
        outlive_parent()
        gc.freeze()  # what is alive now is shared for ever: no collection in a child shall touch, and so copy, it
        gc.enable()
        with contextlib.suppress(
            ConnectionError
        ):  # the agent died before it took or read what we say: the end, as below
            wire.send(self._link, {"op": "ready"})
            while (frame := wire.receive(self._link)) is not None:
                role = self._answer(frame)
                if role is not None:
                    return role
        end_sessions(self._sessions, END_SESSIONS_S)
        return None

    def _warm(self, preloads: tuple[str, ...]) -> Role | None:
        """Import everything, checking after each preload. The keeper is forked early, as soon as its library is there."""
        with self._blaming("", "cannot be imported"):
            self._framework = load(self._name)
            self._framework.import_core()
        role = self._answer_waiting()
        if role is not None:
            return role
        with self._blaming("", "cannot be imported"):
            self._framework.import_rest()
        self._check("")
        for name in preloads:
            wire.send(self._link, {"op": "loading", "preload": name})
            with self._blaming(name, "cannot be imported"), self._framework.quietly():
                importlib.import_module(name)
            self._check(name)
        listed = import_list.read(self._imports, sys.path) if self._imports else None
        if listed is not None and not listed.refused:
            self._import_listed(listed)
        unwatchable()  # found out once for all workers
        standard_folders()
        return self._answer_waiting()

    def _import_listed(self, listed: import_list.ImportList) -> None:
        """Import what a worker had. Raises `Unfit`, and notes that in the list, where that is not fit for a fork."""
        wire.send(self._link, {"op": "loading", "preload": AUTO})
        watch, before = ImportWatch(excused=self._framework.excused()), frozenset(sys.modules)
        watch.begin()
        try:
            with self._blaming(AUTO, "cannot be imported"), self._framework.quietly():
                self._import_each(listed.modules, listed.origins)
                self._framework.find(listed.found)
            self._check_names([one for one in listed.local if one not in before])
            self._check(AUTO)
        except Unfit as unfit:
            if unfit.preload == AUTO:  # a host that cannot fork for a while says nothing against the list
                import_list.refuse(self._imports, unfit.reason, unfit.kept)
            raise
        finally:
            watch.end()
        self._listed = Preloaded(
            watch.reads, listed.sets, listed.modules, path=self._imports, framework=self._name, born=self._born
        )

    def _import_each(self, names: tuple[str, ...], origins: tuple[str, ...]) -> None:
        tasks, before = _tasks(), belongings()
        for place, (name, origin) in enumerate(zip(names, origins, strict=True)):
            if name in sys.modules:
                _check_origin(name, origin, place)
                continue
            with contextlib.suppress(Exception):  # the script may have caught this, too; else it meets it itself
                importlib.import_module(name)
            _check_origin(name, origin, place)
            if _tasks() > tasks and (fault := self._fault()):
                raise Unfit(AUTO, f"{name}: {fault}", kept=place)
            tasks = _tasks()
            if shared := belongings() - before:
                raise Unfit(AUTO, f"{name}: it leaves {min(shared)} behind, which all workers would share", kept=place)

    def _check_names(self, local: list[str]) -> None:
        brought = [one for one in local if sys.modules.get(one) is not None]
        if brought:
            raise Unfit(AUTO, f"it brings in {brought[0]}, a name which the script has for a module of its own")

    @contextlib.contextmanager
    def _blaming(self, preload: str, what: str) -> Iterator[None]:
        try:
            yield
        except Unfit:
            raise
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            raise Unfit(preload, f"{what}: {type(error).__name__}: {error}") from error

    def _answer_waiting(self) -> Role | None:
        while select.select([self._link], [], [], 0)[0]:
            frame = wire.receive(self._link)
            if frame is None:
                os._exit(0)  # the agent died while we were getting warm; nothing was started yet
            role = self._answer(frame)
            if role is not None:
                return role
        return None

    # ---- fitness

    def _check(self, preload: str) -> None:
        fault = self._fault()
        if fault:
            raise Unfit(preload, fault)

    def _fault(self) -> str:
        return self._framework.refusal_in_zygote() or self._probe()

    def _probe(self) -> str:
        """Fork a child that computes, as workers will; what is wrong with it or with us, or nothing."""
        reader, writer, pid = self._fork_probe()
        if pid == 0:
            os.close(reader)
            self._probe_child(writer)
        os.close(writer)
        # Threads that end before a fork have ended now. Looked at first: they are why most children hang.
        fault = self._threads() or self._answer_of_probe(reader)
        os.close(reader)
        if fault:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        return fault or (
            "" if status == 0 else f"a forked child ends with exit code {os.waitstatus_to_exitcode(status)}"
        )

    @staticmethod
    def _fork_probe() -> tuple[int, int, int]:
        """A pipe, and a child at its other end. Raises `Unfit` for the host's sake when nobody can be forked for a while."""
        reader, writer = os.pipe()
        fault = ""
        for pause_s in (*PROBE_PAUSES_S, None):
            try:
                return reader, writer, _fork()
            except OSError as error:
                fault = unforkable(error)
            if pause_s is not None:
                time.sleep(pause_s)  # of the limits that stop a fork most are somebody else's doing, and pass
        os.close(reader)
        os.close(writer)
        raise Unfit("", fault, host=True)

    def _threads(self) -> str:
        tasks = _tasks()
        if tasks == 1:
            return ""
        names = [repr(one.name) for one in threading.enumerate() if one is not threading.main_thread()]
        native = tasks - 1 - len(names)
        listed = ", ".join([*names, *([f"{native} outside Python"] if native > 0 else [])])
        return f"it leaves threads running, which forked workers would not have: {listed}"

    def _answer_of_probe(self, reader: int) -> str:
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        if not poll.poll(poll_ms(self._probe_s)):
            return f"a forked child did not finish a matrix product within {self._probe_s:g} s (--set probe_s=SECONDS)"
        answer = os.read(reader, 4096).decode(errors="replace")
        return "" if answer == "fit" else answer or "a forked child that computes dies"

    def _probe_child(self, writer: int) -> None:
        try:
            tasks = _tasks()
            fault = self._framework.refusal_in_child()
            if tasks != 1:
                fault = f"a forked child has {tasks} threads"
            os.write(writer, (fault or "fit").encode(errors="backslashreplace")[:4096])
        except BaseException as error:  # noqa: BLE001 - a probe must never return into the zygote's code
            words = f"a forked child that computes raises {type(error).__name__}: {error}"
            os.write(writer, words.encode(errors="backslashreplace")[:4096])
        finally:
            os._exit(0)

    # ---- forking

    def _answer(self, frame: wire.Frame) -> Role | None:
        match frame.body:
            case {"op": "fork", "role": str(kind), "key": int(key)} if len(frame.fds) == 1:
                return self._fork(kind, key, frame.fds[0])
            case {"op": "gone", "pid": int(pid)}:
                self._sessions.discard(pid)
            case {"op": "mine", "pids": list(pids)}:
                self._sessions.update(int(one) for one in pids)
            case {"op": "argv", "argv": list(argv)}:
                sys.argv = [str(one) for one in argv]
            case {"op": "title", "title": str(title)}:
                set_title(title)
            case {"op": wire.ASK}:
                wire.here(self._link)
        return None

    def _fork(self, kind: str, key: int, fd: int) -> Role | None:
        """Fork a child for the agent, through a go-between whose death makes the agent its parent.

        As a child of ours it would die with us and could not be waited for by the agent.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        reader = writer = -1
        try:
            reader, writer = os.pipe()
            between = _fork()
        except OSError as error:
            for one in (fd, reader, writer):
                if one >= 0:
                    os.close(one)
            self._unforked(key, unforkable(error))
            return None
        if between == 0:
            passed, pid = self._fork_between(writer)
            if pid:
                os._exit(0)
            for one in (reader, writer, self._link.detach()):
                os.close(one)
            return self._role(kind, passed, fd)
        os.close(writer)
        os.close(fd)
        told = int.from_bytes(os.read(reader, 4), "little", signed=True)
        os.close(reader)
        os.waitpid(between, 0)
        if told > 0:
            self._sessions.add(told)
            wire.send(self._link, {"op": "forked", "key": key, "pid": told})
            return None
        why = unforkable(OSError(-told, os.strerror(-told))) if told else "the go-between died before it could fork"
        self._unforked(key, why)
        return None

    @staticmethod
    def _fork_between(writer: int) -> tuple[int, int]:
        """In the go-between: fork, and say the pid, or the error's number below 0. Our pidfd, and what `os.fork` returns."""
        try:
            passed = os.pidfd_open(os.getpid())
            pid = _fork()
        except OSError as error:
            os.write(writer, (-(error.errno or errno.EAGAIN)).to_bytes(4, "little", signed=True))
            os._exit(1)
        if pid:
            os.write(writer, pid.to_bytes(4, "little", signed=True))
        return passed, pid

    def _unforked(self, key: int, reason: str) -> None:
        wire.send(self._link, {"op": "unforked", "key": key, "reason": reason})

    def _role(self, kind: str, passed: int, fd: int) -> Role:
        """In the new process: wait until the agent is the parent, then belong to it for life and death."""
        poll = select.poll()
        poll.register(passed, select.POLLIN)
        poll.poll()
        os.close(passed)
        if not die_with_parent(self._agent):
            os._exit(0)  # the agent died first; nobody would watch us
        os.setsid()
        gc.freeze()
        gc.enable()  # off while we were getting warm, and this may be one of those forked before the end of it
        link = socket.socket(fileno=fd)
        if kind == "keeper":
            return lambda: keeper.serve(link, self._framework)
        if kind == "saver":
            return lambda: saver.serve(link)
        return lambda: worker.run_spare(link, self._framework, self._listed)


def _check_origin(name: str, origin: str, place: int) -> None:
    """Raise `Unfit` where this process found another file than the script's workers did."""
    found = origin_of(sys.modules.get(name))
    if found and found != origin:
        raise Unfit(AUTO, f"{name}: it is {found} here, and {origin} in the script", kept=place)


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def belongings() -> Counter[str]:
    """What a fork of this process shares with it: sockets, pollers and devices that are open here, and processes started here.

    They are counted, because all pollers have one name, and so have all openings of a device. Servants of
    multiprocessing are left out: a worker forgets them (`worker.forget_the_zygote`).
    """
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            device = target.startswith("/dev/") and not target.startswith(_PLAIN_DEVICES)
            if device or target.startswith(("socket:", "anon_inode:[eventpoll]")):
                found[target] += 1
    with contextlib.suppress(OSError):  # a kernel without CONFIG_PROC_CHILDREN
        children = f"/proc/self/task/{threading.get_native_id()}/children"
        with open(children, encoding="ascii") as file:
            started = set(map(int, file.read().split())) - servants()
        found.update(f"process {pid}" for pid in started)
    return found


def unforkable(error: OSError) -> str:
    """Why nothing was forked, and where to look."""
    return f"cannot fork: {error.strerror or error}{_LIMITS.get(error.errno or 0, '')}"


def _fork() -> int:
    """A fork without the warning (CPython 3.12) that threads may be lost: which ones are is what `_threads` looks at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def main(arguments: list[str]) -> int:
    """Run a zygote for the agent at the other end of ``--fd``."""
    parser = argparse.ArgumentParser(prog="zygote")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--agent", type=int, required=True)
    parser.add_argument("--framework", required=True)
    parser.add_argument("--preload", action="append", default=[])
    parser.add_argument("--imports", default="")
    parser.add_argument("--probe-s", type=float, required=True)
    parser.add_argument("--path", default=None)
    parser.add_argument("--job", default="")
    parser.add_argument("--node", default="")
    told = parser.parse_args(arguments)
    os.setsid()
    if not die_with_parent(told.agent):
        return 0
    if told.path is not None:
        set_first_path(told.path)  # preloads are found where the script will find them
    set_name("dlrover-zygote")
    zygote = Zygote(own_link(told.fd), told.agent, told.framework, told.probe_s, told.imports)
    role = zygote.serve(tuple(told.preload))
    del zygote
    if role is None:
        os._exit(0)  # a refused preload's threads and exit handlers shall not hold us up
    return role()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

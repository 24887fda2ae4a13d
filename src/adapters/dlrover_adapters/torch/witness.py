"""A worker's own witness: it can be seen where it is, whatever it is at.

A thread waits on the agent's socket and answers it: with the stacks of all threads, with torch's flight recorder, and by
answering at all, for that takes Python's lock (GIL). With the lock nobody's stack changes while it is read, so this harms nobody.
For a worker whose thread does not answer there is `faulthandler`, which writes all stacks on a signal, in C, without the lock: it
reads what other threads may be changing, and a process in which they run can die of it. The agent signals with that in mind.

The signal is never taken from a script. One that has a handler already is left alone; one that gets a handler later is noticed at
the next step that is told, and the agent told so. The thread begins with the first step of a script that trains with others: by
then torch itself has threads, so that forking such a process is as good or bad as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import msgpack

from .slot import Slot

SIGNAL_VARIABLE = "DLROVER_HANG_SIGNAL"
STACKS = "stacks-{}-{}.txt"
_REQUEST_BYTES_MAX = 4096
_SIGACTION_WORDS = 32
_TRIES_MAX = 5
_FRAMES_MAX = 100
"""Of one thread, as in `faulthandler`."""


def wanted_signal(text: str) -> int:
    """The signal's number; the default is a real-time one that nobody has a use for. 0: none."""
    if not text:
        return int(signal.SIGRTMIN) + 11
    if text.isdecimal():
        return int(text)
    known = signal.Signals.__members__.get(text)
    return int(known) if known is not None else 0


class Witness:
    """Of one worker. Its stacks go into a file beside the agent's socket."""

    def __init__(self, generation: int, rank: int, agent_socket: str, slot: Slot) -> None:
        self._generation, self._rank, self._path, self._slot = generation, rank, agent_socket, slot
        self._stacks = str(Path(agent_socket).parent / STACKS.format(generation, rank))
        self._pid, self._tries = os.getpid(), 0
        self._thread: threading.Thread | None = None
        self._number, self._ours = wanted_signal(os.environ.get(SIGNAL_VARIABLE, "")), 0
        self._words = (ctypes.c_ulonglong * _SIGACTION_WORDS)()
        self._libc = ctypes.CDLL(None)
        if self._number and not self._handler():
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                self._register()

    def _register(self) -> None:
        fd = os.open(self._stacks, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(self._number, file=fd, all_threads=True, chain=False)
        self._ours = self._handler()
        self._slot.shows_on(self._number)

    def _handler(self) -> int:
        """The address of what handles the signal now, by whoever's doing; 0: nothing."""
        if self._libc.sigaction(self._number, None, self._words) != 0:
            return 1  # no signal of this host: as good as taken
        return int(self._words[0])

    def look(self) -> None:
        """Now and again: is the signal still ours, and may the thread begin?"""
        if self._ours and self._handler() != self._ours:
            self._ours = 0
            self._slot.shows_on(0)
        if self._thread is None and self._tries < _TRIES_MAX and _trains_with_others():
            self._tries += 1
            self._listen()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # an agent that is gone, or no room for a thread
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            line.settimeout(1.0)
            line.connect(self._path)
            line.settimeout(None)
            line.send(msgpack.packb({"listens": self._generation, "rank": self._rank}))
            thread = threading.Thread(target=self._answer, args=(line,), name="dlrover-witness", daemon=True)
            thread.start()
            self._thread = thread

    def _answer(self, line: socket.socket) -> None:
        with contextlib.suppress(OSError), line:
            while (packet := line.recv(_REQUEST_BYTES_MAX)) and os.getpid() == self._pid:
                asked: dict[str, Any] = msgpack.unpackb(packet)
                if not asked["path"]:
                    with contextlib.suppress(OSError):  # a full disk is no reason not to answer
                        self._show()
                line.send(msgpack.packb({"answers": asked["probe"]}))
                if asked["path"]:
                    told = _recorded()
                    Path(asked["path"]).write_bytes(told)
                    line.send(msgpack.packb({"recorded": asked["probe"]}))

    def _show(self) -> None:
        """Write where all threads are into the file into which the signal has it written."""
        fd = os.open(self._stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, _stacks().encode(errors="replace"))
        finally:
            os.close(fd)


def _stacks() -> str:
    """All threads' but this one's, as `faulthandler` writes them: the newest call first, the main thread last."""
    main, me, lines = threading.main_thread().ident, threading.get_ident(), list[str]()
    for thread, newest in sorted(sys._current_frames().items(), key=lambda one: one[0] == main):
        if thread == me:
            continue
        lines.append(f"Thread 0x{thread:016x} (most recent call first):")
        frame: FrameType | None = newest
        for _ in range(_FRAMES_MAX):
            if frame is None:
                break
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
            frame = frame.f_back
        lines.append("")
    return "\n".join(lines)


def _trains_with_others() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    return bool(distributed is not None and distributed.is_available() and distributed.is_initialized())


def _recorded() -> bytes:
    """Torch's flight recorder; empty where this torch has none."""
    try:
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]  # torch's stub lacks it

        return bytes(_dump_fr_trace_json())
    except (ImportError, RuntimeError, TypeError):
        return b""

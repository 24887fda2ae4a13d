"""A private folder that stays: kept from cleaners of temporary folders, and made anew where it was removed all the same.

systemd-tmpfiles leaves out a folder, and all below it, on which somebody holds a BSD lock (tmpfiles.d(5), "Age"). Others
(tmpwatch, tmpreaper) look at times alone, so everything in the folder is touched now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from dlrover_core.host.threads import NO_THREAD
from dlrover_core.logs.place import make_dirs

TOUCH_S = 3600.0
"""Cleaners by age count in days; whoever counts in fewer hours than this takes files of running programs every day."""

LOOK_S = 1.0


class Ground:
    """The private folder ``path``; ``deep``: what lies in its folders is touched too.

    `hold` it again and again, `release` it at the end; in one thread at a time.
    """

    def __init__(self, path: str | Path, *, deep: bool = True) -> None:
        self.path, self._deep = Path(path), deep
        self._fd = -1
        self._touched = 0.0

    def hold(self) -> bool:
        """Have the folder there, locked and young; True: it is another one than before. Raises `OSError` where it cannot be.

        A folder of somebody else's is refused: temporary folders are everybody's.
        """
        if self._fd >= 0 and _same(self._fd, self.path):
            self._touch()
            return False
        make_dirs(self.path)
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_uid != os.getuid():
                raise PermissionError(errno.EPERM, f"{self.path} is another user's by now")  # noqa: TRY301
            with contextlib.suppress(OSError):  # a file system without locks has no cleaner that asks for them either
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        anew = self._fd >= 0
        self.release()
        self._fd, self._touched = fd, time.monotonic()
        return anew

    def _touch(self) -> None:
        if time.monotonic() - self._touched < TOUCH_S:
            return
        self._touched = time.monotonic()
        for folder, _, files in os.walk(self.path):
            for name in ("", *files):
                with contextlib.suppress(OSError):  # gone meanwhile, or a file system that is read-only by now
                    os.utime(os.path.join(folder, name), follow_symlinks=False)
            if not self._deep:
                return

    def release(self) -> None:
        """Let the folder be cleaned. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _same(fd: int, path: Path) -> bool:
    """Is the open folder the one at the path?"""
    try:
        found, own = os.lstat(path), os.fstat(fd)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


class Restorable(Protocol):
    """Something that listens in a folder."""

    def restore(self) -> bool:
        """Listen again where the socket was removed; was it? Raises `OSError`."""


class Watch:
    """Keeps an agent's folder and the sockets in it; ``say`` is told, in words for people, when they went or are back."""

    def __init__(self, path: str, sockets: Sequence[Restorable], say: Callable[[str], None]) -> None:
        self._ground, self._sockets, self._say = Ground(path), sockets, say
        self._wrong = ""
        self._looking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Keep them from now on. Raises `OSError`."""
        await asyncio.to_thread(self._ground.hold)
        self._task = asyncio.create_task(self._keep(), name="ground")

    async def look(self) -> None:
        """Have everything there now, if that can be; whoever starts workers waits for it."""
        path = self._ground.path
        async with self._looking:
            try:
                anew = await asyncio.to_thread(self._ground.hold)
                lost = sum(one.restore() for one in self._sockets)
            except RuntimeError:
                if not self._wrong:
                    self._say(f"{path} is not looked after for now: {NO_THREAD}")
                self._wrong = NO_THREAD
                return
            except OSError as error:
                wrong = (
                    f"{path} is gone and cannot be made anew ({error.strerror or error}): training goes on, and a worker "
                    "that is restarted now resumes from storage, not from memory, and tells no steps; free room there, or "
                    "make the disk writable, and the rest comes back by itself"
                )
                if not self._wrong:
                    self._say(wrong)
                self._wrong = wrong
                return
            lacked = self._wrong not in ("", NO_THREAD)
            if anew or lost or lacked:
                what = f"{path} was removed" if anew or lacked else f"{lost} sockets in {path} were removed"
                self._say(f"{what} while the job runs, and was made anew; output of workers not shown by then is lost")
            self._wrong = ""

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def end(self) -> None:
        """Keep them no longer. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._ground.release()

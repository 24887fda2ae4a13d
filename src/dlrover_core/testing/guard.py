"""See that nothing of a local job outlives its test: ``python -I -S guard.py MARK FOLDER [DISK MIB]``. Run as a file.

Nobody cleans up after SIGKILL but somebody else. It mounts a small file system at DISK, if asked to, says ``ready`` or why not,
and reads what its test says, the number of the process to watch, until the test has ended, in whatever way. Then it kills that
process, whose own sweeper cleans up after it, and after a while whatever bears MARK in its environment; unmounts DISK, and
removes FOLDER, if that is named.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time

SWEEP_S, LOOK_S, LAST_S = 10.0, 0.02, 10.0
_DETACH = 2


def main(mark: str, folder: str, disk: str, mib: str) -> None:
    """Returns when nothing is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    refused = ""
    if disk and libc.mount(b"dlrover-chaos", os.fsencode(disk), b"tmpfs", 0, f"size={mib}m".encode()):
        refused, disk = os.strerror(ctypes.get_errno()), ""
    sys.stdout.write(f"{refused or 'ready'}\n")
    sys.stdout.flush()
    words = sys.stdin.read().split()
    if words:
        _kill(int(words[-1]), mark.encode())
    end_all(mark.encode())
    if disk:
        libc.umount2(os.fsencode(disk), _DETACH)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def end_all(mark: bytes) -> None:
    """Wait for those that bear the mark; kill what is slow."""
    began = time.monotonic()
    while (left := marked(mark)) and time.monotonic() < began + SWEEP_S + LAST_S:
        if time.monotonic() > began + SWEEP_S:
            for pid in left:
                _kill(pid, mark)
        time.sleep(LOOK_S)


def marked(mark: bytes) -> list[int]:
    """Everything alive that began with the mark in its environment."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]  # noqa: PTH208  # -S
    return [pid for pid in pids if bears(pid, mark)]


def bears(pid: int, mark: bytes) -> bool:
    """Did this process begin with the mark? Not one that is dead, or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:  # noqa: PTH123  # -S
            return mark in environ.read().split(b"\0")
    except OSError:
        return False


def _kill(pid: int, mark: bytes) -> None:
    """SIGKILL a process that bears the mark; whoever has its number by now, and does not, is left alone."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if bears(pid, mark):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)


if __name__ == "__main__":
    main(*sys.argv[1:])

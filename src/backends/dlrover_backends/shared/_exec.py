"""Become another program, and die with the process that started this one: ``python -I -S _exec.py PARENT FD PROGRAM ARG...``.

Run as a file, never imported. A death signal has to be set inside the child, after the fork and before the program; a
``preexec_fn`` would run Python in the fork of a process that may have threads, so it is this: an execution in between, some
10 ms. The death signal survives the second one. What goes wrong is written to descriptor FD as ``errno message``; that
descriptor closes when the program runs.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL at the parent's end. Raises `OSError`."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")


def main(parent: int, report: int, argv: list[str]) -> None:
    """Never returns."""
    os.set_inheritable(report, False)
    try:
        die_with_parent()
        # The parent may have died before the signal was set; then nobody would ever send it.
        if os.getppid() == parent:
            os.execvp(argv[0], argv)  # noqa: S606
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", 0) or 0
        os.write(report, os.fsencode(f"{number} {argv[0]}: {getattr(error, 'strerror', None) or error}"))
    os._exit(127)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

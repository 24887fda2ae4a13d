"""What the kernel, or a sandbox around us, must give before anything can be started."""

from __future__ import annotations

import os


def lacking() -> str:
    """What processes and states are owned by, and this kernel or sandbox does not give; empty: all is there."""
    calls = (("pidfd_open", "Linux 5.4", _pidfd), ("memfd_create", "Linux 3.17", _memfd))
    for name, since, call in calls:
        try:
            os.close(call())
        except OSError as error:
            return f"{name}: {error.strerror}; it needs {since}, and a sandbox (seccomp) must allow it"
    return ""


def _pidfd() -> int:
    return os.pidfd_open(os.getpid())


def _memfd() -> int:
    return os.memfd_create("dlrover-probe", os.MFD_CLOEXEC)

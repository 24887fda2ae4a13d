"""A memory fence without compiled code, for memory that processes share."""

from __future__ import annotations

import threading


def fence() -> None:
    """What was loaded and stored before is so before anything after: a full barrier, less than 1 us.

    Plain stores and loads order nothing on aarch64, and on x86-64 a load may still overtake a store. Taking a lock and giving it
    back are atomics with a barrier each: what comes before is done at the latest when it is given back, what comes after begins
    at the earliest when it is taken. Both could still meet inside, so it is done twice: the second taking is never before the
    first giving back (x86-64: locked instructions; aarch64: LDAXR after STLXR). The lock is nobody else's: never waited for, and
    no fork finds it taken.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
    lock.release()

"""Which signal stops the workers: the one that stopped the job, as under torchrun.

The launcher of the job writes it down in the run's folder, where the agents of this host look before they stop anything with
grace: whatever way the order to stop takes from there to here, through a master or not.
"""

from __future__ import annotations

import contextlib
import os
import signal

FILE = "signal"


def tell(run_dir: str, number: int) -> None:
    """Let every agent of this run on this host stop its workers with ``number``. A folder that is gone needs no signal."""
    part = os.path.join(run_dir, f"{FILE}.part")
    with contextlib.suppress(OSError):
        with open(part, "w", encoding="ascii") as file:
            file.write(str(int(number)))
        os.replace(part, os.path.join(run_dir, FILE))


def asked(run_dir: str | None) -> bool:
    """Has somebody stopped the job by a signal?"""
    return run_dir is not None and os.path.exists(os.path.join(run_dir, FILE))


def told(run_dir: str | None) -> signal.Signals:
    """The signal to stop workers with: what was told, else SIGTERM."""
    if run_dir is not None:
        with contextlib.suppress(OSError, ValueError), open(os.path.join(run_dir, FILE), encoding="ascii") as file:
            return signal.Signals(int(file.read()))
    return signal.SIGTERM

"""A rollout worker without torch: units of work, one after the other, and a line for each, as `ddp_step.py` writes them.

``what`` is begin or unit, ``rank`` the place, ``step`` the unit's number. While it works it listens for news of the trainers'
addresses, as a real one does.
"""

import os
import time

BEGAN = time.monotonic_ns()

import argparse  # noqa: E402
import contextlib  # noqa: E402
from pathlib import Path  # noqa: E402

from dlrover_adapters import peers  # noqa: E402
from dlrover_adapters.plain import step  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--diary", type=Path, required=True)
    parser.add_argument("--unit", type=float, default=0.01, help="seconds of one unit of work")
    options = parser.parse_args()
    file = os.open(options.diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    who = f"{os.environ['DLROVER_RESTART_COUNT']} {os.environ['DLROVER_PLACE']} {os.getpid()}"
    os.write(file, f"begin {who} 0 {BEGAN}\n".encode())
    unit, version = 0, 0
    while True:
        with contextlib.suppress(TimeoutError):
            version = peers.wait(newer_than=version, timeout_s=options.unit).version
        unit += 1
        step(unit)
        os.write(file, f"unit {who} {unit} {time.monotonic_ns()}\n".encode())


if __name__ == "__main__":
    main()

"""Train nothing, step by step, until told to finish. Needs no torch of its own.

Writes a line for each life into ``told-RANK``; ``--child`` starts a process that would outlive it in a session of its own;
``--term`` writes there which signal stopped it, and leaves.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dlrover_adapters.torch import step

FOLDER, RANK = Path(os.environ["FOLDER"]), os.environ["RANK"]


def tell(*words: object) -> None:
    """Write a line for the test."""
    with (FOLDER / f"told-{RANK}").open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def terminated(number: int, frame: object) -> None:
    """Say so, and go."""
    tell("terminated", signal.Signals(number).name)
    sys.exit(0)


if "--term" in sys.argv:
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(one, terminated)
if "--deaf" in sys.argv:
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, signal.SIG_IGN)
if "--child" in sys.argv:
    tell("child", subprocess.Popen(["/bin/sleep", "600"], start_new_session=True).pid)
number = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) * 1000
tell("born", os.getpid())
while not (FOLDER / "finish").exists():
    number += 1
    step(number)
    time.sleep(0.01)

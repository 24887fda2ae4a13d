"""Say where a worker runs, leave an orphan behind and see it reaped, then wait for ``finish``: inside.py FOLDER."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dlrover_adapters.torch import step

FOLDER = Path(sys.argv[1])
INSIDE = ("DLROVER_NODE", "DLROVER_TOKEN", "DLROVER_MASTERS", "DLROVER_RUN")


def orphan_s() -> float:
    """How long the agent takes to reap a process whose parent is dead; -1: it does not."""
    shell = "setsid sh -c 'echo $$; exec >/dev/null; exec sleep 0.2' &"
    pid = int(subprocess.run(["/bin/sh", "-c", shell], stdout=subprocess.PIPE, check=True).stdout)
    began = time.monotonic()
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() - began > 30:
            return -1.0
        time.sleep(0.05)
    return time.monotonic() - began


found = {
    "agent": os.getppid(),
    "uid": os.getuid(),
    "user": os.environ.get("USER"),
    "home": os.environ.get("HOME"),
    "temporary": tempfile.gettempdir(),
    "root": os.access("/", os.W_OK),
    "told": [name for name in INSIDE if name in os.environ],
    "orphan_s": orphan_s(),
}
part = FOLDER / f"part-{os.getpid()}"
part.write_text(json.dumps(found))
part.rename(FOLDER / f"inside-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{time.time_ns()}.json")
number = 0
while not (FOLDER / "finish").exists():
    step(number := number + 1)
    time.sleep(0.05)

"""Make steps until the file ``finish`` is in the folder that is named: light_steps.py FOLDER. Needs no torch of its own.

Stands for ``allreducing.py`` where a test is about nodes and masters, and not about what trains on them.
"""

import os
import sys
import time
from pathlib import Path

from dlrover_adapters.torch import step

FOLDER, RANK = Path(sys.argv[1]), os.environ["RANK"]
with (FOLDER / f"told-{RANK}").open("a") as file:
    file.write(f"born {os.getpid()} of {os.environ['WORLD_SIZE']}\n")
number = 0
while not (FOLDER / "finish").exists():
    step(number := number + 1)
    time.sleep(0.02)
sys.stdout.write(f"rank {RANK} ends\n")
sys.stdout.flush()

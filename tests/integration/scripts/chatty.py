"""Print much more than fits, step by step, until told to finish."""

import os
import sys
import time
from pathlib import Path

FOLDER, RANK = Path(os.environ["FOLDER"]), os.environ["RANK"]
number = 0
while not (FOLDER / "finish").exists():
    number += 1
    print("x" * 4000)  # noqa: T201 - what a script does
    sys.stderr.write("y" * 4000 + "\n")
    (FOLDER / f"told-{RANK}").write_text(f"step {number} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
    time.sleep(0.001)

"""Rank 1 raises; the others wait to be stopped. Each writes down where it ran."""

import os
import signal
from pathlib import Path

Path(os.environ["FOLDER"], f"ran-{os.environ['RANK']}").touch()
if os.environ["RANK"] == "1":
    raise ValueError("bad batch 17")
signal.pause()

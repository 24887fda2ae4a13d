"""Steps of 20 ms that compute nothing, told one by one; ``--idle``: none at all. ``FOLDER/begun-RANK`` appears when it begins.

Needs `dlrover_adapters`, which whoever runs under `dlrover-run` has.
"""

import os
import sys
import time
from pathlib import Path

from dlrover_adapters.torch import step

STEP_S = 0.02

folder, idle = Path(sys.argv[1]), "--idle" in sys.argv
(folder / f"begun-{os.environ['RANK']}").touch()
number = 0
while True:
    time.sleep(3600.0 if idle else STEP_S)
    number += 1
    step(number)

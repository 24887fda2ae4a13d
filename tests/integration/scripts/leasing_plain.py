"""A worker without torch that draws leased shards at its own pace, and writes down the indices that it has used.

leasing_plain.py SIZE PACES        PACES: seconds that a shard takes, by place of the node
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from dlrover_adapters.data import LeasedIndices


def main() -> None:
    """Use everything."""
    place = int(os.environ["DLROVER_PLACE"])
    pace_s = float(sys.argv[2].split(",")[place])
    with (Path(os.environ["FOLDER"]) / f"used-{place}-{os.getpid()}").open("a", buffering=1) as out:
        for shard in LeasedIndices("eval", size=int(sys.argv[1]), epochs=2, seed=7, shard=4):
            for index in shard.indices:
                out.write(f"{shard.epoch * int(sys.argv[1]) + index}\n")
                time.sleep(pace_s / len(shard.indices))
        out.write("end\n")


if __name__ == "__main__":
    main()

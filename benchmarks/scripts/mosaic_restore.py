"""A peer of `bench_data.py`: mosaicml-streaming at 90 % of a shuffled epoch; prints its milliseconds to a batch.

    mosaic_restore.py SIZE BATCH TRIALS

The state is that of two nodes, and one restores it. The samples are their indices, in shards of 100,000 on a local disk; all
shards are links to one file.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def without_torchvision() -> None:
    """The package imports torchvision for its datasets of pictures, which nobody needs here."""
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
    for name in names:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]


without_torchvision()

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

CHUNK = 100_000


def written(folder: str, size: int) -> None:
    """A dataset of ``size`` samples, a multiple of `CHUNK`."""
    with MDSWriter(out=folder, columns={"index": "int"}, size_limit=2**30) as out:
        for index in range(CHUNK):
            out.write({"index": index})
    index_file = Path(folder) / "index.json"
    told = json.loads(index_file.read_text())
    (first,) = told["shards"]
    shards = []
    for number in range(size // CHUNK):
        name = f"shard.{number:05}.mds"
        shards.append({**first, "raw_data": {**first["raw_data"], "basename": name}})
        if number:
            (Path(folder) / name).hardlink_to(Path(folder) / first["raw_data"]["basename"])
    index_file.write_text(json.dumps({**told, "shards": shards}))


def loader(folder: str, batch: int) -> Any:
    """One rank's."""
    data = StreamingDataset(local=folder, shuffle=True, shuffle_seed=7, batch_size=batch, num_canonical_nodes=2)
    return StreamingDataLoader(data, batch_size=batch, num_workers=0)


def main() -> int:
    """Measure."""
    size, batch, trials = map(int, sys.argv[1:4])
    folder = tempfile.mkdtemp(prefix="dlb-mds-")
    try:
        written(folder, size)
        used = size * 9 // 10 // (2 * batch) * 2 * batch
        state = {"epoch": 0, "sample_in_epoch": used, "num_canonical_nodes": 2, "shuffle_seed": 7}
        state["initial_physical_nodes"] = 2
        took = []
        for _ in range(trials):
            clean_stale_shared_memory()
            began = time.perf_counter()
            again = loader(folder, batch)
            again.load_state_dict(state)
            found = next(iter(again))
            took.append((time.perf_counter() - began) * 1e3)
            if len(found["index"]) != batch:
                return 1
        print(json.dumps(took), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # its threads read on, and fail without the folder


if __name__ == "__main__":
    sys.exit(main())

"""A peer of `bench_data.py`: LitData's StreamingDataLoader at 90 % of a shuffled epoch; prints its milliseconds to a batch.

    litdata_restore.py SIZE BATCH TRIALS

The state is that of two ranks, and one restores it: LitData calls this an elastic resume. The samples are their indices, in
chunks of 100,000 on a local disk; all chunks are links to one file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from litdata.streaming import StreamingDataLoader, StreamingDataset
from litdata.streaming.cache import Cache
from litdata.utilities.env import _DistributedEnv
from restoring import print_ms

CHUNK = 100_000


def written(folder: str, size: int) -> None:
    """A dataset of ``size`` samples, a multiple of `CHUNK`."""
    cache = Cache(input_dir=folder, chunk_size=CHUNK)
    for index in range(CHUNK):
        cache[index] = index
    cache.done()
    cache.merge()
    index_file = Path(folder) / "index.json"
    told = json.loads(index_file.read_text())
    (first,) = told["chunks"]
    chunks = [{**first, "filename": f"chunk-0-{number}.bin"} for number in range(size // CHUNK)]
    for one in chunks[1:]:
        (Path(folder) / one["filename"]).hardlink_to(Path(folder) / first["filename"])
    index_file.write_text(json.dumps({**told, "chunks": chunks}))


def loader(folder: str, batch: int) -> Any:
    """One rank's."""
    data = StreamingDataset(folder, shuffle=True, seed=7, drop_last=False)
    return StreamingDataLoader(data, batch_size=batch, num_workers=0, collate_fn=list)


def main() -> int:
    """Measure."""
    size, batch, trials = map(int, sys.argv[1:4])
    with tempfile.TemporaryDirectory(prefix="dlb-lit-") as folder:
        written(folder, size)
        first = loader(folder, batch)
        first.dataset.distributed_env = _DistributedEnv(2, 0, 1)
        used = size * 9 // 10 // (2 * batch) * batch
        state = {"dataset": first.dataset.state_dict(used, 1, batch), "current_epoch": 1, "num_samples_yielded": used}
        state["latest_worker_idx"] = 0

        def restored() -> Any:
            again = loader(folder, batch)
            again.load_state_dict(json.loads(json.dumps(state)))
            return again

        return print_ms(restored, batch, trials)


if __name__ == "__main__":
    sys.exit(main())

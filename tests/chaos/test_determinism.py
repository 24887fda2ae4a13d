"""The same story twice gives the same log, byte for byte, whatever the interpreter's hash seed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster


async def story() -> str:
    """Three deaths on seven nodes, a cut, and the hash of the log they leave."""
    async with Cluster(JobSpec("j", (GroupSpec(nodes_min=7, nodes_max=7, nproc=2),))) as cluster:
        await cluster.until(lambda: cluster.training.done >= 5)
        for rank in (3, 9, 12):
            cluster.kill_worker(rank)
        await cluster.until(lambda: cluster.training.done >= 10)
        cluster.network.cut("worker-2-0", "worker-4-0", "worker-6-0")
        cluster.kill_node("worker-1-0")
        cluster.kill_node("worker-5-0")
        await cluster.until(lambda: cluster.training.done >= 12 or "worker-5-1" in cluster.backend.launched)
        cluster.network.heal()
        await cluster.until(lambda: cluster.training.done >= 20)
        cluster.kill_master()
        cluster.start_master()
        await cluster.outcome()
        digest = hashlib.sha256()
        async for batch in cluster.log.batches("j"):
            digest.update(batch.payload)
        return digest.hexdigest()


def test_same_story_same_bytes() -> None:
    """Told twice in one process, a story leaves the same bytes."""
    assert virtual_loop.run(story()) == virtual_loop.run(story())


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_hash_seed_does_not_matter(seed: str) -> None:
    """Told in an interpreter with another hash seed, it leaves the same bytes: no set is iterated into the log."""
    environment = {
        **os.environ,
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split()[-1] == virtual_loop.run(story())


if __name__ == "__main__":
    sys.stdout.write(virtual_loop.run(story()) + "\n")

"""Torch's own opinion on which CPUs each local rank belongs: ``python -m dlrover_adapters.torch.affinity MODE NPROC``.

A process of its own, because asking for a GPU's place initialises CUDA, which neither an agent nor a zygote may do.
"""

from __future__ import annotations

import json
import sys


def cpus(mode: str, nproc: int) -> list[list[int]]:
    """The CPUs of each local rank, by torchrun's ``--numa-binding`` modes."""
    from torch.numa import binding

    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    # torch 2.13: what `torchrun` itself hands to numactl.
    found = [
        sorted(binding._get_logical_cpus_to_bind_to(gpu_index=rank, numa_options=options)) for rank in range(nproc)
    ]
    if not all(found):
        raise RuntimeError(f"no CPU is left for local ranks {[rank for rank, one in enumerate(found) if not one]}")
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(cpus(sys.argv[1], int(sys.argv[2]))))

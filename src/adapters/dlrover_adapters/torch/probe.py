"""What `dlrover doctor` runs as a worker: compute, talk to the other ranks, copy; and write down what was seen.

``python -m dlrover_adapters.torch.probe cpu|cuda FOLDER`` as a worker, ``... devices`` on its own: which devices torch sees.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZE = 512
GROUP_S = 30.0
COPY_BYTES, COPIES = 256 * 2**20, 8
DRIVER = Path("/proc/driver/nvidia/version")


def devices() -> dict[str, Any]:
    """What torch sees, without initialising CUDA where that can be avoided."""
    return {
        "devices": int(torch.cuda.device_count()),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "driver": DRIVER.exists(),
    }


def compute(device: torch.device) -> float:
    """A matrix product of which every element is known; seconds to the result. Raises RuntimeError for a wrong one."""
    began = time.monotonic()
    ones = torch.ones(SIZE, SIZE, device=device)
    product = ones @ ones
    if not bool((product == SIZE).all()):
        raise RuntimeError(
            f"a matrix product on {device} is wrong: {float(product.min())} to {float(product.max())}, not {SIZE}"
        )
    return time.monotonic() - began


def talk(device: torch.device) -> float:
    """A process group and one all-reduce of which the sum is known; seconds. Raises RuntimeError for a wrong one."""
    from datetime import timedelta

    began = time.monotonic()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=GROUP_S))
    world, mine = dist.get_world_size(), torch.full((SIZE,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(mine)
    right = world * (world + 1) / 2
    if not bool((mine == right).all()):
        raise RuntimeError(
            f"an all-reduce of {world} ranks is wrong: {float(mine.min())} to {float(mine.max())}, not {right:g}"
        )
    return time.monotonic() - began


def bandwidth(device: torch.device) -> dict[str, float]:
    """Copies between pinned host memory and the device, GB/s each way."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    return {
        "to_device_gb_s": _rate(lambda: there.copy_(host, non_blocking=True)),
        "to_host_gb_s": _rate(lambda: host.copy_(there, non_blocking=True)),
    }


def _rate(copy: Callable[[], object]) -> float:
    copy()  # the first one maps pages
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(COPIES):
        copy()
    torch.cuda.synchronize()
    return COPY_BYTES * COPIES / (time.monotonic() - began) / 1e9


def probe(kind: str) -> dict[str, Any]:
    """Everything that a worker of this kind must be able to do."""
    told: dict[str, Any] = {
        "began": time.monotonic(),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "pid": os.getpid(),
    }
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        began = time.monotonic()
        torch.cuda.set_device(device)
        torch.cuda.synchronize()
        told |= {"cuda_s": time.monotonic() - began, "name": torch.cuda.get_device_name(device)}
    told["product_s"] = compute(device)
    told["group_s"] = talk(device)
    if kind == "cuda":
        told |= bandwidth(device)
    dist.destroy_process_group()
    return told


def main(arguments: list[str]) -> int:
    """Tell devices, or be one rank."""
    if arguments[:1] == ["devices"]:
        print(json.dumps(devices()))  # noqa: T201 - whoever asked reads it
        return 0
    kind, folder = arguments
    told = probe(kind)
    Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(told), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

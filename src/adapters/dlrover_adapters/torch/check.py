"""One worker of a node check: compute alone, then reduce with the partners' workers; the last line says how it went.

What it measures is what training is made of: matrix products, and all-reduces over gloo or NCCL. Everything is verified: a wrong
result is a failure as much as none. Sizes are small: it is meant to tell a broken or dragging node from others, not to rate one.

Tests, and people who want to see it, may make it fail or drag, where ``DLROVER_TESTING=1`` is set too: ``MOCK_ERR_RANK`` (a rank
of the job, or a node's name) fails alone, ``MOCK_ERR_PAIR`` fails with partners, ``MOCK_SLOW_RANK=WHO:SECONDS`` takes so much
longer. Without it these variables do nothing: one that somebody forgot must not condemn a node.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

CPU_SIZE, CPU_PRODUCTS, GPU_SIZE, GPU_PRODUCTS = 384, 20, 8192, 50
WARM_UP = 3
CPU_ELEMENTS, GPU_ELEMENTS, REDUCES = 2**16, 2**24, 10
TELL_S = 2.0
TESTING = "DLROVER_TESTING"
"""Set to 1: variables that inject faults are obeyed."""


class Broken(Exception):
    """What failed, in words for people."""


def mine(variable: str) -> bool:
    """Whether a fault-injecting variable names this worker or its node, and `DLROVER_TESTING` allows it."""
    if os.environ.get(TESTING) != "1":
        return False
    who = os.environ.get(variable, "").rpartition(":")[0] or os.environ.get(variable, "")
    return bool(who) and who in (os.environ["DLROVER_CHECK_RANK"], os.environ["DLROVER_CHECK_NODE"])


def device() -> torch.device:
    """Where this worker trains. Raises `Broken` where there should be a GPU and is none."""
    local = int(os.environ["LOCAL_RANK"])
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    if torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise Broken(f"CUDA: {torch.cuda.device_count()} devices are visible, local rank {local} has none")
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    if not hidden and torch.version.cuda and os.path.exists("/dev/nvidia0"):  # noqa: PTH110  # a device, no file
        raise Broken("CUDA: there are GPUs, and torch sees none")
    torch.set_num_threads(1)
    return torch.device("cpu")


def compute(where: torch.device) -> None:
    """Products of which every element is known. Raises `Broken`."""
    if os.environ.get("DLROVER_CHECK_UNFIT"):
        raise Broken(os.environ["DLROVER_CHECK_UNFIT"])
    if mine("MOCK_ERR_RANK"):
        raise Broken("mocked error (MOCK_ERR_RANK)")
    cuda = where.type == "cuda"
    size, products = (GPU_SIZE, GPU_PRODUCTS) if cuda else (CPU_SIZE, CPU_PRODUCTS)
    ones = torch.ones(size, size, device=where, dtype=torch.bfloat16 if cuda else torch.float32)
    product = ones
    for _ in range(WARM_UP + products):
        product = ones @ ones
    if not bool((product == size).all()):
        raise Broken(f"a matrix product on {where} is wrong")
    if cuda:
        torch.cuda.synchronize()
    if mine("MOCK_SLOW_RANK"):
        time.sleep(float(os.environ["MOCK_SLOW_RANK"].rpartition(":")[2]))


def connect(limit_s: float) -> Store:
    """The store of those that work together; of one node alone, a file. Raises RuntimeError."""
    address, size = os.environ["DLROVER_CHECK_STORE"], int(os.environ["WORLD_SIZE"])
    if address.startswith("file:"):
        return FileStore(address.removeprefix("file:"), size)
    host, _, port = address.rpartition(":")
    wait = timedelta(seconds=limit_s)
    tcp = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=wait)
    return PrefixStore(os.environ["DLROVER_CHECK_PREFIX"], tcp)


def meet(limit_s: float) -> Store:
    """The store, once every partner is there and fit. Raises `Broken`."""
    address = os.environ["DLROVER_CHECK_STORE"]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wait = timedelta(seconds=limit_s)
    try:
        store = connect(limit_s)
        store.set(f"fit-{rank}", "")
        store.wait([f"fit-{one}" for one in range(size)], wait)
        unfit = [one for one in range(size) if store.get(f"fit-{one}")]
    except (RuntimeError, ValueError) as error:
        raise Broken(f"its partners did not come to the store at {address} within {limit_s:.0f} s") from error
    if unfit:
        raise Broken("its partner failed alone")
    return store


def tell_unfit() -> None:
    """Let the partners know, so that they do not wait."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        with contextlib.suppress(RuntimeError, ValueError):
            connect(TELL_S).set(f"fit-{os.environ['RANK']}", "unfit")


def reduce(where: torch.device, store: Store, limit_s: float) -> None:
    """All-reduces of which the sum is known. Raises `Broken`."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = where.type == "cuda"
    try:
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=limit_s)
        )
        if mine("MOCK_ERR_PAIR"):
            raise Broken("mocked error with partners (MOCK_ERR_PAIR)")
        for _ in range(REDUCES):
            given = torch.full((GPU_ELEMENTS if cuda else CPU_ELEMENTS,), float(rank + 1), device=where)
            dist.all_reduce(given)
            if not bool((given == size * (size + 1) / 2).all()):
                raise Broken(f"an all-reduce of {size} ranks is wrong")
    except RuntimeError as error:
        raise Broken(f"all_reduce failed: {brief(str(error))}") from error


def brief(text: str) -> str:
    """The first sentence of a library's error, without the place in its sources."""
    line = (text.strip().splitlines() or [""])[0]
    return re.sub(r"^(\[[^\]]*\.(cc|cpp|h):\d+\]\s*)+", "", line).partition(". ")[0][:200]


def timed(part: Callable[[], None]) -> float:
    """How long a part takes, in seconds."""
    began = time.monotonic()
    part()
    return time.monotonic() - began


def check() -> dict[str, object]:
    """Everything; what is told of it."""
    limit_s = float(os.environ["DLROVER_CHECK_LIMIT_S"])
    began, alone_s, took_s, fit, what = time.monotonic(), 0.0, 0.0, False, ""
    try:
        where = device()
        alone_s = took_s = timed(lambda: compute(where))
        # What its own workers cannot do together is as much its own as what each does alone.
        fit = int(os.environ["WORLD_SIZE"]) > int(os.environ["LOCAL_WORLD_SIZE"])
        if int(os.environ["WORLD_SIZE"]) > 1:
            store = meet(limit_s - (time.monotonic() - began))
            # Only the work counts, not how late a partner came to it.
            took_s += timed(lambda: reduce(where, store, max(1.0, limit_s - (time.monotonic() - began))))
    except Broken as error:
        what = str(error)
    except Exception as error:  # noqa: BLE001  # a library may raise anything here, and all of it is an answer
        what = f"{type(error).__name__}: {error}".splitlines()[0]
    fit = fit or not what
    if not fit:
        tell_unfit()
    return {"ok": fit and not what, "fit": fit, "alone_s": alone_s, "took_s": took_s, "what": what}


if __name__ == "__main__":
    told = json.dumps(check())
    sys.stdout.write(f"\n{told}\n")
    sys.stdout.flush()
    os._exit(0)  # a process group whose peer hangs must not hold us up

"""torch.distributed.checkpoint as installed, with our stager, writer and reader in its hooks."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from running import Job
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict

from dlrover_adapters.checkpoint.manifests import SEAL, CheckpointDamaged
from dlrover_adapters.torch.checkpoint.dcp import FlashStager, FlashStorageReader, FlashStorageWriter, step_in
from dlrover_core.errors import CoreError, SpecError

# torch's own: what it says about a single process, about its older calls, and about itself.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
BOUND_S = 90


def state(seed: int = 0) -> dict[str, Any]:
    """A trained model's and its Adam's state, a buffer, something that is no tensor, and lists."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    return {
        "model": weights,
        "optimizer": moments,
        "note": {"epoch": 3, "words": ["a", "b"]},
        "rows": [torch.arange(3.0) + seed, torch.tensor(7 + seed)],
        "half": torch.full((3, 2), 0.5 + seed, dtype=torch.bfloat16),
    }


def same(one: Any, other: Any) -> bool:
    """Deep equality, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def test_saved_by_ours_and_loaded_by_torch_and_by_us(tmp_path: Path) -> None:
    """What our writer saved, torch's own reader loads, and ours loads, bit for bit; and ours loads the newest unasked."""
    writer = FlashStorageWriter(str(tmp_path))
    for step in (3, 12):
        dcp.save(state(step), checkpoint_id=f"step-{step}", storage_writer=writer)
    writer.close()
    for reader in (dcp.FileSystemReader(tmp_path / "step-0000000012"), FlashStorageReader(str(tmp_path))):
        found = state(1)
        dcp.load(found, storage_reader=reader)
        assert same(found, state(12))
    older, reader = state(1), FlashStorageReader(f"file://{tmp_path}")
    dcp.load(older, checkpoint_id="anything/step-3", storage_reader=reader)
    assert same(older, state(3))
    assert (reader.step, reader.tier) == (3, "storage")


def test_saved_at_the_moment_of_the_call(tmp_path: Path) -> None:
    """An asynchronous save stores the state of the moment of the call, though all of it is changed at once; again and again."""
    writer, stager = FlashStorageWriter(str(tmp_path)), FlashStager()
    assert isinstance(stager, AsyncStager)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        places = set()
        for step in range(1, 5):
            now = state(step)
            saved: Any = dcp.async_save(now, checkpoint_id=str(step), storage_writer=writer, async_stager=stager)
            for tensor in (*now["model"].values(), now["half"], *now["rows"]):
                tensor.zero_()
            saved.result(timeout=BOUND_S)
            places.add(stager.stage(state())["half"].data_ptr())
        found = state()
        for step in range(1, 5):
            dcp.load(found, checkpoint_id=str(step), storage_reader=FlashStorageReader(str(tmp_path)))
            assert same(found, state(step))
    finally:
        torch.distributed.destroy_process_group()
        stager.close()
        writer.close()
    assert len(places) == 1


def test_an_unchanged_plan_is_known(tmp_path: Path) -> None:
    """With torch's plan caching, where an unchanged plan is not sent again, every save is complete."""
    writer = FlashStorageWriter(str(tmp_path))
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    for step in (1, 2, 3):
        dcp.save(state(step), checkpoint_id=str(step), storage_writer=writer, planner=planner)
    found = state()
    dcp.load(found, checkpoint_id="3", storage_reader=FlashStorageReader(str(tmp_path)))
    assert same(found, state(3))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    """``keep`` leaves so many complete checkpoints."""
    writer = FlashStorageWriter(str(tmp_path), keep=2)
    for step in (1, 2, 3, 4):
        dcp.save({"a": torch.ones(3)}, checkpoint_id=str(step), storage_writer=writer)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-0000000003", "step-0000000004"]


def test_a_flipped_bit_is_no_checkpoint(tmp_path: Path) -> None:
    """Damaged bytes are not loaded: the error names the file."""
    dcp.save(state(), checkpoint_id="1", storage_writer=FlashStorageWriter(str(tmp_path)))
    file = tmp_path / "step-0000000001" / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 4
    file.write_bytes(raw)
    with pytest.raises((CheckpointDamaged, CheckpointException), match=r"__0_0\.distcp"):
        dcp.load(state(), storage_reader=FlashStorageReader(str(tmp_path)))


def test_what_was_not_finished_is_not_taken_for_newest(tmp_path: Path) -> None:
    """A step without its seal is passed over; where there is none at all, that is said."""
    writer = FlashStorageWriter(str(tmp_path))
    for step in (1, 2):
        dcp.save(state(step), checkpoint_id=str(step), storage_writer=writer)
    (tmp_path / "step-0000000002" / SEAL).unlink()
    found, reader = state(), FlashStorageReader(str(tmp_path))
    dcp.load(found, storage_reader=reader)
    assert reader.step == 1
    (tmp_path / "step-0000000001" / SEAL).unlink()
    with pytest.raises((CoreError, CheckpointException), match="no complete checkpoint"):
        dcp.load(found, storage_reader=reader)


def test_ids_end_with_a_step() -> None:
    """The step is the last number of the last component; an id without one is refused with an example."""
    assert [step_in(one) for one in ("5", "run7/step-120", Path("/a/9/epoch=1-step=44.ckpt"), None)] == [
        5,
        120,
        44,
        None,
    ]
    with pytest.raises(SpecError, match="step-120"):
        step_in("run7/latest")
    with pytest.raises(SpecError, match="missing"):
        FlashStorageWriter("x").reset()


RANKS = """
import os, sys, torch, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from dlrover_adapters.torch.checkpoint.dcp import FlashStager, FlashStorageReader, FlashStorageWriter

folder, = sys.argv[1:]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
def sharded(seed):
    full = torch.arange(35.0).reshape(7, 5) + seed
    return {"w": distribute_tensor(full, mesh, [Shard(0)]), "same": torch.full((3,), float(seed)), "note": {"seed": seed}}
writer, stager = FlashStorageWriter(folder), FlashStager()
for step in (10, 20):
    now = sharded(step)
    done = dcp.async_save(now, checkpoint_id=f"step-{step}", storage_writer=writer, async_stager=stager)
    now["w"].to_local().zero_()
    done.result()
stager.close(); writer.close()
reader, found = FlashStorageReader(folder), sharded(0)
dcp.load(found, storage_reader=reader)
assert reader.step == 20
assert torch.equal(found["w"].full_tensor(), torch.arange(35.0).reshape(7, 5) + 20), found
assert found["same"].eq(20).all() and found["note"] == {"seed": 20}
dist.destroy_process_group()
"""


def ranks(world: int, script: Path, *words: str) -> None:
    """Run a script in as many processes."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "PYTHONPATH": ":".join(sys.path),
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(script), *words],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    for one in started:
        said, _ = one.communicate(timeout=BOUND_S)
        assert one.returncode == 0, said


def test_two_ranks_save_and_any_number_load(tmp_path: Path) -> None:
    """Shards of two ranks, saved beside training, are loaded by two ranks and by one: torch's planner reshards."""
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(RANKS))
    folder = str(tmp_path / "ckpts")
    ranks(2, script, folder)
    for reader in (FlashStorageReader(folder), dcp.FileSystemReader(f"{folder}/step-0000000020")):
        found: dict[str, Any] = {"w": torch.zeros(7, 5), "same": torch.zeros(3), "note": {"seed": 0}}
        dcp.load(found, storage_reader=reader)
        assert torch.equal(found["w"], torch.arange(35.0).reshape(7, 5) + 20)
        assert found["note"] == {"seed": 20}


KILLED = """
import os, signal, sys, torch, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dlrover_adapters.torch import step as report_step
from dlrover_adapters.torch.checkpoint.dcp import FlashStager, FlashStorageReader, FlashStorageWriter

folder, = sys.argv[1:]
dist.init_process_group("gloo")
rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
state = {"w": torch.zeros(1000, 64), f"mine{rank}": torch.zeros(7), "step": 0}
if not first:
    reader = FlashStorageReader(folder)
    dcp.load(state, storage_reader=reader)
    assert state["step"] == reader.step and state["w"].eq(reader.step).all() and state[f"mine{rank}"].eq(reader.step).all()
    print(f"rank {rank}: step {reader.step} from {reader.tier}", flush=True)
writer, stager = FlashStorageWriter(folder), FlashStager()
for step in range(state["step"] + 1, 7):
    for name in ("w", f"mine{rank}"):
        state[name] += 1
    state["step"] = step
    dcp.async_save(state, checkpoint_id=f"step-{step}", storage_writer=writer, async_stager=stager).result()
    report_step(step)
    dist.barrier()
    if first and step == 4 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
writer.close()
dist.barrier()
dist.destroy_process_group()
"""


def test_a_killed_worker_loads_from_memory(tmp_path: Path) -> None:
    """On two nodes a worker is killed, and its successors load the newest step from the agents' memory, also from each other's.

    What was saved is on storage in the end, committed, and torch's own reader loads it.
    """
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    folder = tmp_path / "ckpts"
    words = ["--local-nodes", "2", "--nproc-per-node", "1", str(script), str(folder)]
    with Job(tmp_path, *words, job="dcp") as job:
        assert job.ended(BOUND_S) == 0, job.said()
        said = job.out.read_text()
        told = job.dlrover("events")
        assert job.left() == []
    assert sorted(said.splitlines()) == ["rank 0: step 4 from memory", "rank 1: step 4 from memory"]
    assert "CheckpointCommitted" in told
    newest = max(one.parent for one in folder.glob(f"*/{SEAL}"))
    found = {"w": torch.zeros(1000, 64), "mine0": torch.zeros(7), "mine1": torch.zeros(7), "step": 0}
    dcp.load(found, storage_reader=dcp.FileSystemReader(newest))
    assert found["w"].eq(found["step"]).all()
    assert found["mine1"].eq(found["step"]).all()

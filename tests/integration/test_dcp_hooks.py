"""torch.distributed.checkpoint as installed, with our stager, writer and reader in its hooks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from running import SCRIPTS, Job

from dlrover_adapters.checkpoint.manifests import SEAL, CheckpointDamaged
from dlrover_core.errors import CoreError, SpecError

# torch's own: what it says about a single process, about its older calls, and about itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.xdist_group("dcp_hooks"),  # what they import is imported by one process
]
BOUND_S = 90


@pytest.fixture(scope="module")
def used() -> ModuleType:
    """Torch's own calls and our hooks, imported once a test is run, and not when all are collected."""
    import dcp_states

    return dcp_states


def test_saved_by_ours_and_loaded_by_torch_and_by_us(used: ModuleType, tmp_path: Path) -> None:
    """What our writer saved, torch's own reader loads, and ours loads, bit for bit; and ours loads the newest unasked."""
    writer = used.FlashStorageWriter(str(tmp_path))
    for step in (3, 12):
        used.dcp.save(used.state(step), checkpoint_id=f"step-{step}", storage_writer=writer)
    writer.close()
    for reader in (used.dcp.FileSystemReader(tmp_path / "step-0000000012"), used.FlashStorageReader(str(tmp_path))):
        found = used.state(1)
        used.dcp.load(found, storage_reader=reader)
        assert used.same(found, used.state(12))
    older, reader = used.state(1), used.FlashStorageReader(f"file://{tmp_path}")
    used.dcp.load(older, checkpoint_id="anything/step-3", storage_reader=reader)
    assert used.same(older, used.state(3))
    assert (reader.step, reader.tier) == (3, "storage")


def test_saved_at_the_moment_of_the_call(used: ModuleType, tmp_path: Path) -> None:
    """An asynchronous save stores the state of the moment of the call, though all of it is changed at once; again and again."""
    writer, stager = used.FlashStorageWriter(str(tmp_path)), used.FlashStager()
    assert isinstance(stager, used.AsyncStager)
    used.torch.distributed.init_process_group("gloo", store=used.torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for step in range(1, 5):
            now = used.state(step)
            saved: Any = used.dcp.async_save(now, checkpoint_id=str(step), storage_writer=writer, async_stager=stager)
            for tensor in (*now["model"].values(), now["half"], *now["rows"]):
                tensor.zero_()
            saved.result(timeout=BOUND_S)
        found = used.state()
        for step in range(1, 5):
            used.dcp.load(found, checkpoint_id=str(step), storage_reader=used.FlashStorageReader(str(tmp_path)))
            assert used.same(found, used.state(step))
    finally:
        used.torch.distributed.destroy_process_group()
        stager.close()
        writer.close()


def test_an_unchanged_plan_is_known(used: ModuleType, tmp_path: Path) -> None:
    """With torch's plan caching, where an unchanged plan is not sent again, every save is complete."""
    writer = used.FlashStorageWriter(str(tmp_path))
    planner = used.dcp.DefaultSavePlanner(enable_plan_caching=True)
    for step in (1, 2, 3):
        used.dcp.save(used.state(step), checkpoint_id=str(step), storage_writer=writer, planner=planner)
    found = used.state()
    used.dcp.load(found, checkpoint_id="3", storage_reader=used.FlashStorageReader(str(tmp_path)))
    assert used.same(found, used.state(3))


def test_only_the_newest_are_kept(used: ModuleType, tmp_path: Path) -> None:
    """``keep`` leaves so many complete checkpoints."""
    writer = used.FlashStorageWriter(str(tmp_path), keep=2)
    for step in (1, 2, 3, 4):
        used.dcp.save({"a": used.torch.ones(3)}, checkpoint_id=str(step), storage_writer=writer)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-0000000003", "step-0000000004"]


def test_a_flipped_bit_is_no_checkpoint(used: ModuleType, tmp_path: Path) -> None:
    """Damaged bytes are not loaded: the error names the file."""
    used.dcp.save(used.state(), checkpoint_id="1", storage_writer=used.FlashStorageWriter(str(tmp_path)))
    file = tmp_path / "step-0000000001" / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 4
    file.write_bytes(raw)
    with pytest.raises((CheckpointDamaged, used.CheckpointException), match=r"__0_0\.distcp"):
        used.dcp.load(used.state(), storage_reader=used.FlashStorageReader(str(tmp_path)))


def test_what_was_not_finished_is_not_taken_for_newest(used: ModuleType, tmp_path: Path) -> None:
    """A step without its seal is passed over; where there is none at all, that is said."""
    writer = used.FlashStorageWriter(str(tmp_path))
    for step in (1, 2):
        used.dcp.save(used.state(step), checkpoint_id=str(step), storage_writer=writer)
    (tmp_path / "step-0000000002" / SEAL).unlink()
    found, reader = used.state(), used.FlashStorageReader(str(tmp_path))
    used.dcp.load(found, storage_reader=reader)
    assert reader.step == 1
    (tmp_path / "step-0000000001" / SEAL).unlink()
    with pytest.raises((CoreError, used.CheckpointException), match="no complete checkpoint"):
        used.dcp.load(found, storage_reader=reader)


def test_ids_end_with_a_step(used: ModuleType) -> None:
    """The step is the last number of the last component; an id without one is refused with an example."""
    assert [used.step_in(one) for one in ("5", "run7/step-120", Path("/a/9/epoch=1-step=44.ckpt"), None)] == [
        5,
        120,
        44,
        None,
    ]
    with pytest.raises(SpecError, match="step-120"):
        used.step_in("run7/latest")
    with pytest.raises(SpecError, match="missing"):
        used.FlashStorageWriter("x").reset()


RANKS = """
import os, sys, torch, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from dlrover_adapters.torch.checkpoint.dcp import FlashStager, FlashStorageReader, FlashStorageWriter

folder, = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
def sharded(seed):
    full = torch.arange(35.0).reshape(7, 5) + seed
    return {"w": distribute_tensor(full, mesh, [Shard(0)]), "same": torch.full((3,), float(seed)), "note": {"seed": seed}}
writer, stager = FlashStorageWriter(folder), FlashStager()
def saved(step, now):
    done = dcp.async_save(now, checkpoint_id=f"step-{step}", storage_writer=writer, async_stager=stager)
    now["w"].to_local().zero_()
    return done
for step in (3, 5):
    saved(step, sharded(step)).result()
states = {step: sharded(step) for step in (7, 10, 20)}  # which takes collectives of the main thread's
for done in [saved(step, now) for step, now in states.items()]:
    done.result()
stager.close(); writer.close()
reader, found = FlashStorageReader(folder), sharded(0)
dcp.load(found, storage_reader=reader)
assert reader.step == 20
assert torch.equal(found["w"].full_tensor(), torch.arange(35.0).reshape(7, 5) + 20), found
assert found["same"].eq(20).all() and found["note"] == {"seed": 20}
dist.destroy_process_group()
"""


def test_two_ranks_save_and_any_number_load(used: ModuleType, tmp_path: Path) -> None:
    """Shards of two ranks, saved beside training, are loaded by two ranks and by one: torch's planner reshards.

    So it is, too, of those that nobody waits for before the next: torch would mix up what the ranks say to each other.
    """
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(RANKS))
    folder = str(tmp_path / "ckpts")
    line = [sys.executable, str(SCRIPTS / "forked.py"), str(script), "2", folder]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for reader in (used.FlashStorageReader(folder), used.dcp.FileSystemReader(f"{folder}/step-0000000020")):
        found: dict[str, Any] = {"w": used.torch.zeros(7, 5), "same": used.torch.zeros(3), "note": {"seed": 0}}
        used.dcp.load(found, storage_reader=reader)
        assert used.torch.equal(found["w"], used.torch.arange(35.0).reshape(7, 5) + 20)
        assert found["note"] == {"seed": 20}
    for step in (3, 5, 7, 10):
        found = {"w": used.torch.zeros(7, 5), "same": used.torch.zeros(3), "note": {"seed": 0}}
        used.dcp.load(found, checkpoint_id=f"{folder}/step-{step:010d}")
        assert used.torch.equal(found["w"], used.torch.arange(35.0).reshape(7, 5) + step)
        assert found["note"] == {"seed": step}


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


@pytest.mark.nightly(
    reason="two ranks that save and load, and test_flash_ddp.py, whose rank is killed, stand for it in make test"
)
def test_a_killed_worker_loads_from_memory(used: ModuleType, tmp_path: Path) -> None:
    """On two nodes a worker is killed, and its successors load the newest step from the agents' memory, also from each other's.

    What was saved is on storage in the end, committed, and torch's own reader loads it.
    """
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    folder = tmp_path / "ckpts"
    words = ["--local-nodes", "2", "--nproc-per-node", "1", str(script), str(folder)]
    with Job(tmp_path, *words, job="dcp") as job:
        assert job.ended(BOUND_S) == 0, job.said()
        loaded = sorted(job.out.read_text().splitlines())
        assert loaded == ["rank 0: step 4 from memory", "rank 1: step 4 from memory"], job.said()
        told = job.dlrover("events")
        assert job.left() == []
    assert "CheckpointCommitted" in told
    newest = max(one.parent for one in folder.glob(f"*/{SEAL}"))
    found = {"w": used.torch.zeros(1000, 64), "mine0": used.torch.zeros(7), "mine1": used.torch.zeros(7), "step": 0}
    used.dcp.load(found, storage_reader=used.dcp.FileSystemReader(newest))
    assert found["w"].eq(found["step"]).all()
    assert found["mine1"].eq(found["step"]).all()

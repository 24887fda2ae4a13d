"""Saving never ends training: an error that is not about the truth of the state is an alarm, and one save less."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from by_hand import LIMIT_S, Training, complete, engine_of, held, pinned
from test_flash_by_hand_ranks import Two, two
from torch import nn
from torch.distributed import HashStore, PrefixStore, TCPStore

from dlrover_adapters.agent.checkpoints.duty import CheckpointDuty
from dlrover_adapters.agent.checkpoints.vault import Caller
from dlrover_adapters.torch.checkpoint import by_hand, closing, flash, meeting, replicas
from dlrover_adapters.torch.checkpoint.alarms import about_truth
from dlrover_adapters.torch.checkpoint.closing import NotStored
from dlrover_adapters.torch.checkpoint.copier import Copier, Moves
from dlrover_adapters.torch.checkpoint.engine import STORE_LOST, UNPROVEN
from dlrover_adapters.torch.checkpoint.flash import FlashCheckpoint
from dlrover_adapters.torch.checkpoint.meeting import Meeting, MeetingFailed, StoreGone
from dlrover_adapters.torch.checkpoint.sources import Mismatch
from dlrover_adapters.torch.checkpoint.standalone import Standalone
from dlrover_adapters.torch.checkpoint.vault import VaultRefused
from dlrover_core.checkpoint.arena import Geometry
from dlrover_core.errors import CoreError, SpecError

__all__ = ["two"]


def fails(error: BaseException) -> Callable[..., Any]:
    """Whatever is asked of it."""

    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


# ---- which errors


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (SpecError("model", "wrong"), True),
        (Mismatch("another shape"), True),
        (KeyboardInterrupt(), True),
        (SystemExit(1), True),
        (MeetingFailed("gone"), False),
        (CoreError("whatever"), False),
        (VaultRefused("no room"), False),
        (OSError("disk"), False),
        (MemoryError(), False),
        (RuntimeError("CUDA out of memory"), False),
        (AssertionError(), False),
    ],
)
def test_what_is_about_the_truth(error: BaseException, *, ends: bool) -> None:
    """A state that cannot be saved as it was given, and what ends the process; nothing else ends training."""
    assert about_truth(error) is ends


@pytest.mark.parametrize("part", ["capture", "memory", "copy", "blob"])
def test_an_error_leaves_one_save_out(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever in a save it happens: training goes on, the alarm is logged and counted, and the next save is whole."""
    run = Training()
    with FlashCheckpoint("", **run.parts, every=1, mode="blocking") as ckpt:
        ckpt.restore()
        run.trains(ckpt, 1, 1)
        engine = engine_of(ckpt)
        what, name = {
            "capture": (engine.capture, "chunks"),
            "memory": (engine.memory, "write_blob"),
            "copy": (Moves, "all_now"),
            "blob": (engine.capture, "objects"),
        }[part]
        with monkeypatch.context() as patched:
            patched.setattr(what, name, fails(OSError(f"{part} failed")))
            run.trains(ckpt, 2, 3)
        assert ckpt.stats.failed == 2
        assert caplog.text.count(f"was not saved: OSError: {part} failed") == 2
        assert "Training goes on" in caplog.text
        assert held(ckpt).keys() == {1}
        run.trains(ckpt, 4, 5)
        assert held(ckpt).keys() == {4, 5}
        assert ckpt.stats.failed == 2


def test_a_state_that_cannot_be_saved_ends_training_at_the_first_save() -> None:
    """What would be saved is not what the script means: nobody may train for days before hearing of it."""
    run = Training()
    with FlashCheckpoint("", **run.parts, state={"unpicklable": threading.Lock()}, every=1) as ckpt:
        run.work(1)
        with pytest.raises(SpecError, match="cannot be serialised"):
            ckpt.step(1)


def test_a_copy_that_fails_beside_training_ends_no_optimizer_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copier's error comes to light in the optimizer's hook, in the middle of a step."""
    run = Training()
    with FlashCheckpoint("", **run.parts, every=2) as ckpt:
        ckpt.restore()
        run.trains(ckpt, 1, 2)
        with monkeypatch.context() as patched:
            patched.setattr(Moves, "strides", fails(MemoryError("no room")))
            ckpt.step(3)
            ckpt.step(4)
            run.work(5)
        ckpt.step(5)
        run.trains(ckpt, 6, 6)
        assert ckpt.stats.failed == 1
        assert held(ckpt).keys() == {2, 6}


def test_memory_that_was_refused_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rank that was refused it alone: the others, who have theirs, meet for no layout again."""
    run = Training()
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        with monkeypatch.context() as patched:
            patched.setattr(Standalone, "arena", fails(VaultRefused("a state takes 1 TiB, and there is 1 GiB")))
            run.trains(ckpt, 1, 2)
        assert ckpt.stats.failed == 2
        patched_meeting: Any = engine_of(ckpt).meeting
        monkeypatch.setattr(patched_meeting, "all_gather", fails(AssertionError("a collective")))
        assert ckpt.save(3)
        assert held(ckpt).keys() == {3}


def test_the_agent_hears_of_it() -> None:
    """Every alarm is in the agent's log; the first of each rank is told to people."""
    said: list[str] = []
    keeps: Any = SimpleNamespace(vault=None, saving=None)
    duty = CheckpointDuty(keeps, token=b"", host="", bind="", say=said.append)
    for rank, generation in ((1, 1), (1, 1), (0, 1), (1, 2)):
        duty.told(Caller(generation, rank, rank, 2), {"op": "alarm", "words": "step 4 was not saved: OSError: disk"})
    assert said == [f"rank {rank}: step 4 was not saved: OSError: disk" for rank in (1, 0, 1)]


def test_people_hear_that_training_begins_anew() -> None:
    """On the launcher's terminal, in the words of the rank, beside the alarms of saves."""
    said: list[str] = []
    keeps: Any = SimpleNamespace(vault=None, saving=None)
    duty = CheckpointDuty(keeps, token=b"", host="", bind="", say=said.append)
    duty.told(Caller(2, 0, 0, 2), {"op": "lost", "words": "training begins anew: step 10 is lost"})
    duty.told(Caller(2, 0, 0, 2), {"op": "alarm", "words": "step 4 was not saved: OSError: disk"})
    assert said == ["training begins anew: step 10 is lost", "rank 0: step 4 was not saved: OSError: disk"]


# ---- several ranks


def test_a_rank_that_cannot_save_keeps_nobody_waiting(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state cannot be read at the first save, before a layout is agreed on: the others leave that save out, too."""
    real = flash.Capture.chunks

    def chunks(capture: Any) -> Any:
        if threading.current_thread().name == "1" and broken.is_set():
            raise OSError("a state_dict that reads a file")
        return real(capture)

    broken = threading.Event()
    broken.set()
    monkeypatch.setattr(flash.Capture, "chunks", chunks)

    def rank(number: int) -> None:
        run = Training()
        with FlashCheckpoint("", **run.parts, every=2) as ckpt:
            two.train(run, ckpt, 1, 2)
            assert held_nothing(ckpt)
            two.together.wait()
            assert not ckpt.save(3)
            two.together.wait()
            broken.clear()
            two.together.wait()
            two.train(run, ckpt, 4, 6)
            assert held(ckpt).keys() == {4, 6}
            assert ckpt.stats.failed == (3 if number else 2)

    two.run(rank)


def held_nothing(ckpt: FlashCheckpoint) -> bool:
    """There is no memory yet."""
    return engine_of(ckpt).control is None


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("part", ["memory", "agent"])
def test_a_restore_that_fails_on_one_rank_fails_on_all(
    part: str, which: int, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node has too little memory, or its agent is gone: all ranks raise in this call, and the others name that rank."""
    what, name, error = {
        "memory": (Standalone, "arena", VaultRefused("a state takes 1 TiB, and there is 1 GiB")),
        "agent": (FlashCheckpoint, "_opened", flash.AgentGone("no agent")),
    }[part]
    real = getattr(what, name)

    def broken(*given: Any, **more: Any) -> Any:
        if part == "agent":
            real(*given, **more)  # without an agent, as here, ranks meet to open a line
        if threading.current_thread().name == str(which):
            raise error
        return real(*given, **more)

    monkeypatch.setattr(what, name, broken)

    def rank(number: int) -> None:
        ckpt = FlashCheckpoint("", **Training().parts, every=1)
        own = flash.NoMemory if part == "memory" else flash.AgentGone
        words = f"rank {which}: NoMemory.*1 TiB" if part == "memory" else r"AgentGone.*no agent"
        with pytest.raises(own if number == which else MeetingFailed, match=None if number == which else words):
            ckpt.restore()
        ckpt._finish(wait=False)

    two.run(rank)


@pytest.mark.parametrize("part", ["capture", "memory", "digests"])
def test_an_error_at_the_first_save_of_one_rank_keeps_nobody_waiting(
    part: str, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others come to every collective of that save: they hear that this rank does not, and the next save is whole on all."""
    what, name = {
        "capture": (flash.Capture, "chunks"),
        "memory": (Standalone, "arena"),
        "digests": (replicas, "_sampled"),
    }[part]
    real, left = getattr(what, name), [2]

    def broken(*asked: Any) -> Any:
        if threading.current_thread().name == "1" and left[0]:
            left[0] -= 1
            raise OSError(f"{part} failed")
        return real(*asked)

    monkeypatch.setattr(what, name, broken)

    def rank(_number: int) -> None:
        run = Training()
        with FlashCheckpoint("", **run.parts, every=1) as ckpt:
            two.train(run, ckpt, 1, 4)
            assert {3, 4} <= held(ckpt).keys()

    two.run(rank)


def test_a_rank_that_fails_as_the_layout_changes_keeps_nobody_waiting(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in that call nor in the next one, in which the layout is the old one again."""
    real = flash.Capture.objects

    def objects(capture: Any) -> Any:
        found = real(capture)
        if threading.current_thread().name == "1" and "state.more" in found[0]:
            raise OSError("a state_dict that reads a file")
        return found

    monkeypatch.setattr(flash.Capture, "objects", objects)

    def rank(_number: int) -> None:
        run, state = Training(), {"one": 1}
        with FlashCheckpoint("", **run.parts, state=state, every=1) as ckpt:
            two.train(run, ckpt, 1, 3)
            state["more"] = 2
            two.train(run, ckpt, 4, 4)
            del state["more"]
            two.train(run, ckpt, 5, 6)
            assert {5, 6} <= held(ckpt).keys()
            assert (ckpt.stats.failed, ckpt.stats.layouts) == (1, 1)

    two.run(rank)


def test_new_intervals_are_told_though_the_save_failed(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks wait for rank 0's word of them after certain saves; and a rank that left its own out needs it as well."""
    real = flash.Engine._claim

    def claim(engine: Any, step: int, *how: Any, **more: Any) -> Any:
        if step == (4, 6)[engine.meeting.rank]:
            raise MemoryError("no room")
        return real(engine, step, *how, **more)

    monkeypatch.setattr(flash.Engine, "_claim", claim)

    def rank(_number: int) -> tuple[int, ...]:
        run = Training()
        with FlashCheckpoint("", **run.parts) as ckpt:
            ckpt._cadence.bounds = replace(ckpt._cadence.bounds, plan_steps_min=2)
            ckpt._cadence.plan = ckpt._cadence.plan._replace(every=2, next=4)
            two.train(run, ckpt, 1, 7)
            assert ckpt.stats.failed == 1
            return tuple(ckpt._cadence.plan)

    found: dict[int, tuple[int, ...]] = {}
    two.run(lambda number: found.update({number: rank(number)}))
    assert found[0] == found[1]
    assert found[0][2] > 6


def test_a_save_that_one_rank_left_out_is_known_to_the_others(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a save like any other: what is whole on both stays, on the rank that has a newer one, too."""
    real = flash.Engine._claim

    def claim(engine: Any, step: int, *how: Any, **more: Any) -> Any:
        if engine.meeting.rank == 1 and step == 6:
            raise MemoryError("no room")
        return real(engine, step, *how, **more)

    monkeypatch.setattr(flash.Engine, "_claim", claim)

    def rank(number: int) -> None:
        run = Training()
        with FlashCheckpoint("", **run.parts, every=2) as ckpt:
            two.train(run, ckpt, 1, 8)
            assert 4 in held(ckpt), "the newest that is proven whole on both as 8 is saved"
            assert ckpt.stats.failed == number

    two.run(rank)


@pytest.fixture
def server() -> Iterator[Any]:
    """A store in a process of its own, which can be killed."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serves, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(LIMIT_S)

    def kill() -> None:
        process.kill()
        process.join(LIMIT_S)

    yield SimpleNamespace(port=ours.recv(), kill=kill)
    kill()


def serves(told: Any) -> None:
    """Until it is killed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))
    told.send(store.port)
    signal.pause()


def connected(port: int) -> TCPStore:
    """A client."""
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))


def test_a_store_that_has_gone_leaves_the_agents_word(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on. What others miss is unknown, so the newest state that is proven stays until the agents say of a newer one
    that it is whole on all ranks: then saves go on.
    """
    monkeypatch.setattr(
        Meeting, "of_environment", lambda **_: Meeting(connected(server.port), int(threading.current_thread().name), 2)
    )
    both = Two()

    def rank(number: int) -> None:
        run = Training()
        with FlashCheckpoint("", **run.parts, every=2) as ckpt:
            both.train(run, ckpt, 1, 4)
            assert held(ckpt).keys() == {2, 4}
            both.together.wait()
            if number == 0:
                server.kill()
            both.together.wait()
            both.train(run, ckpt, 5, 8)
            assert held(ckpt).keys() == {2, 4}, "nobody knows whether the other rank has 4"
            assert (ckpt.stats.skipped, ckpt.stats.failed) == (2, 1)
            engine = engine_of(ckpt)
            assert engine.why_left_out == UNPROVEN
            engine.control.whole = 4 + 1
            both.train(run, ckpt, 9, 10)
            assert held(ckpt).keys() == {4, 10}
            engine.control.whole = 10 + 1
            both.train(run, ckpt, 11, 12)
            assert held(ckpt).keys() == {10, 12}
            assert ckpt.save(13) is False, "10 is all that is known to be whole, and 12 may be about to be"
            with pytest.raises(MeetingFailed):
                ckpt.restore()

    monkeypatch.setattr(by_hand, "BY_HAND_S", 0.0)
    both.run(rank)
    assert caplog.text.count(STORE_LOST) == 2, "each rank says it once"


def test_a_connection_that_one_rank_lost_is_made_anew(server: Any) -> None:
    """The store is there: nobody waits for that rank in vain, and nothing that it missed is lost."""
    first, second = Meeting(connected(server.port), 0, 2, limit_s=LIMIT_S), Meeting(connected(server.port), 1, 2)
    before = second._base
    broken: Any = SimpleNamespace(set=fails(RuntimeError("Broken pipe")), wait=fails(RuntimeError("Broken pipe")))
    broken.check = broken.get = broken.set
    second._store = broken
    second.post("missed/4", b"1")
    assert first.look("missed/4") == b"1"
    assert second._base is not before
    second._store = broken
    told: list[bytes] = []
    waits = threading.Thread(target=lambda: told.append(second.share("plan", None)), daemon=True)
    waits.start()
    first.share("plan", b"mine")
    waits.join(LIMIT_S)
    assert told == [b"mine"]


def test_a_store_that_has_gone_is_asked_once(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead server costs one attempt to connect, not one in every step."""
    one = Meeting(connected(server.port), 0, 2, limit_s=LIMIT_S)
    server.kill()
    with pytest.raises(StoreGone, match="does not answer"):
        one.look("missed/4")
    monkeypatch.setattr(PrefixStore, "check", fails(AssertionError("it is asked again")))
    for call in (lambda: one.look("missed/4"), lambda: one.post("missed/6", b"1"), lambda: one.all_gather("told", b"")):
        with pytest.raises(StoreGone, match="does not answer"):
            call()
    assert meeting.AGAIN_S <= 5.0


# ---- FSDP2


def test_an_evaluation_between_steps_ends_no_training(tmp_path: Path) -> None:
    """FSDP2 leaves the root gathered after a forward without a backward: its parameters are others then, but not the state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def evaluate() -> None:
            with torch.no_grad():
                model(torch.ones(2, 8))

        with FlashCheckpoint(str(tmp_path), model=model, optimizer=optimizer, every=1, store_every=1000) as ckpt:
            for step in range(1, 4):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                evaluate()
                ckpt.step(step)
            evaluate()
            assert ckpt.save(3)
            assert (ckpt.stats.failed, ckpt.stats.layouts) == (0, 1)
            wanted = [one.to_local().clone() for one in model.parameters()]  # type: ignore[attr-defined]
        with torch.no_grad():
            for one in model.parameters():
                one.zero_()
        evaluate()
        with FlashCheckpoint(str(tmp_path), model=model, optimizer=optimizer) as ckpt:
            assert ckpt.restore() == 3
        found = [one.to_local() for one in model.parameters()]  # type: ignore[attr-defined]
        assert all(map(torch.equal, found, wanted))
    finally:
        dist.destroy_process_group()


# ---- the end of a script


def test_a_script_without_an_agent_hears_that_its_last_state_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the step, and what to do; after an error of the script's that error goes on."""
    monkeypatch.setattr(Standalone, "_part", fails(OSError("No space left")))

    def script(ckpt: FlashCheckpoint, run: Training, error: type[BaseException] | None = None) -> None:
        with ckpt:
            run.trains(ckpt, 1, 4)
            if error is not None:
                raise error

    run = Training()
    with pytest.raises(KeyboardInterrupt):
        script(FlashCheckpoint(str(tmp_path), **run.parts, every=2), run, KeyboardInterrupt)
    with pytest.raises(NotStored, match="step 4, the last state of this script, is not on storage") as raised:
        script(FlashCheckpoint(str(tmp_path), **run.parts, every=2), run)
    assert "No space left" in str(raised.value)
    assert "start the script again" in str(raised.value)
    by_hand_alone = FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=0)
    assert by_hand_alone.save(5)
    with pytest.raises(NotStored, match="step 5, the last state of this script"):
        by_hand_alone.close()


def left_out_at_last(tmp_path: Path, store_every: int = 6) -> FlashCheckpoint:
    """Step 6, the last one that is due, has found no slot."""
    run = Training()
    ckpt = FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=store_every)
    ckpt.restore()
    run.trains(ckpt, 1, 5)
    let_go = [pinned(ckpt, one) for one in held(ckpt)]
    run.trains(ckpt, 6, 6)
    for one in let_go:
        one()
    assert 6 not in held(ckpt)
    return ckpt


@pytest.mark.parametrize("store_every", [6, 1_000])
def test_a_last_state_that_was_due_and_left_out_is_saved_at_the_end(tmp_path: Path, store_every: int) -> None:
    """On storage, or in memory alone. It is still in the tensors: the end waits for a slot, and it is what storage gets."""
    ckpt = left_out_at_last(tmp_path, store_every)
    ckpt.close()
    assert complete(tmp_path)[-1] == 6


def test_a_last_state_that_was_due_and_is_not_there_any_more_is_not_taken_for_stored(tmp_path: Path) -> None:
    """The script went on to step 7: an older one goes there instead, and is not what was due."""
    ckpt = left_out_at_last(tmp_path)
    ckpt.step(7)
    with pytest.raises(
        NotStored, match=r"step 6, the last.*storage is slower than saves come; step 4 goes there instead"
    ):
        ckpt.close()
    assert complete(tmp_path) == [4]


def test_a_script_whose_saves_all_failed_hears_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training went on without them; the end tries once more, and says that nothing is there."""
    run = Training()
    monkeypatch.setattr(Standalone, "arena", fails(VaultRefused("a state takes 1 TiB, and there is 1 GiB")))
    ckpt = FlashCheckpoint(str(tmp_path), **run.parts, every=2)
    run.trains(ckpt, 1, 4)
    with pytest.raises(NotStored, match=r"step 4, the last.*1 TiB"):
        ckpt.close()


def test_an_interpreter_that_ends_without_its_last_state_on_storage_fails(tmp_path: Path) -> None:
    """Nobody has called `close`: what is raised as the interpreter ends changes no status, so that is set."""
    code = f"""
import torch
from dlrover_adapters.torch.checkpoint import standalone
from dlrover_adapters.torch.checkpoint.flash import FlashCheckpoint
def no(*_):
    raise OSError("No space left")
standalone.Standalone._part = no
model = torch.nn.Linear(2, 2)
ckpt = FlashCheckpoint({str(tmp_path)!r}, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), every=1)
ckpt.restore()
ckpt.step(1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1, done.stderr
    assert "step 1, the last state of this script, is not on storage" in done.stderr


# ---- in the small


def test_no_descriptor_is_left_where_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for again and again, as a save does, it would use up all of them."""
    line = Standalone("", Meeting(None, 0, 1), rank=0, world=1, keep=3, form="dcp")
    monkeypatch.setattr(os, "ftruncate", fails(OSError("Cannot allocate memory")))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(VaultRefused, match="no memory for checkpoints"):
            line.arena(1, Geometry(2, 100, 100, 100))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_ctrl_c_while_the_last_copy_is_awaited_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the copy itself raises was told before; Ctrl-C is the user's."""
    one = Copier()
    monkeypatch.setattr(one, "settle", fails(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        one.close()
    monkeypatch.setattr(one, "settle", fails(OSError()))
    one.close()
    assert closing.CLOSE_S > 0

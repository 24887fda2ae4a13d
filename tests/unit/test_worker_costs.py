"""What a worker notes of its costs and losses in the memory that it shares with its agent, and what the agent reads there."""

from __future__ import annotations

import math
import mmap
import os
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest

from dlrover_adapters.agent.pace_watch import PaceWatch, WorkerSlot
from dlrover_adapters.cli.workers import launch_fields
from dlrover_adapters.torch import loss, meter
from dlrover_core.diagnosis.changepoint import BLOCK_STEPS
from dlrover_core.diagnosis.slots import (
    BLOCKS_MAX,
    DETECT_VARIABLE,
    FINITE,
    GRADIENT,
    GRADS_VARIABLE,
    INFINITE,
    NAN,
    NEVER,
    PACE,
    PACE_AT,
    SLOT_BYTES,
)
from dlrover_core.diagnosis.workload import FITTED, SKIPPED
from dlrover_core.job.orders import Order, Work
from dlrover_core.kernel.wire import find
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.paces import LossBeat, PaceBeat, RankLoss

ORDER = Order(leave=False, reason="", grace_us=0, work=Work(generation=3))


class Host:
    """Workers' slots, their clocks in the test's hand, and the duty that reads them."""

    def __init__(self, ranks: int) -> None:
        self.fds = [os.memfd_create("slot") for _ in range(ranks)]
        self.generation = 3
        self.watch = PaceWatch(self.slots)
        self.desk = Desk("worker-0-0", "run", ORDER, lambda command: None)
        self.now_s = 0.0
        for fd in self.fds:
            os.ftruncate(fd, SLOT_BYTES)

    def memory(self, rank: int) -> mmap.mmap:
        """What that worker maps."""
        return mmap.mmap(self.fds[rank], SLOT_BYTES)

    def slots(self) -> list[WorkerSlot]:
        """As the launcher has them."""
        return [WorkerSlot(self.generation, local, 8 + local, fd) for local, fd in enumerate(self.fds)]

    def look(self) -> tuple[PaceBeat, LossBeat]:
        """What the next beat tells, a second later."""
        self.now_s += 1.0
        self.watch.look(self.desk, self.now_s)
        return find(self.desk.told.values(), PaceBeat), find(self.desk.told.values(), LossBeat)


@pytest.fixture
def host() -> Iterator[Host]:
    """Two workers of one node."""
    made = Host(2)
    yield made
    made.watch._close()
    meter.end()
    loss.end()
    for fd in made.fds:
        os.close(fd)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The thread's CPU time and the wall clock, both by hand; no CUDA."""
    at = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: at[0])
    monkeypatch.setattr(time, "perf_counter", lambda: at[0])
    monkeypatch.setattr(time, "monotonic", lambda: at[0])
    monkeypatch.setattr(meter, "_cuda_in_use", lambda: False)
    return at


def blocks_of(memory: mmap.mmap) -> tuple[int, int]:
    """Blocks written, and the measure."""
    return PACE.unpack_from(memory, PACE_AT)


def test_a_slow_rank_is_seen_across_the_shared_memory(host: Host, clock: list[float]) -> None:
    """One worker's steps cost more from step 600 on: the node's beat names its rank, with what it took before and after."""
    meters = [meter.Meter(host.memory(0)), meter.Meter(host.memory(1))]
    told = PaceBeat()
    for step in range(700):
        for rank, one in enumerate(meters):
            one._last = clock[0]
            clock[0] += 0.050 if rank == 1 and step >= 600 else 0.040
            one.step_done()
        if step % 50 == 49:
            told, _ = host.look()
    assert [one.rank for one in told.slow] == [9]
    assert (told.slow[0].before_us, told.slow[0].now_us) == (40_000, 50_000)
    assert told.others == 10_000


def test_who_looks_late_loses_the_oldest(host: Host, clock: list[float]) -> None:
    """A ring has room for so many blocks: a reader who comes late reads the newest, and the next look goes on from there."""
    one = meter.Meter(host.memory(0))
    for _ in range((BLOCKS_MAX + 40) * BLOCK_STEPS):
        clock[0] += 0.04
        one.step_done()
    host.look()
    seen = host.watch._pace._ranks[0]
    assert seen.changes._blocks == BLOCKS_MAX - 1
    host.look()
    assert seen.changes._blocks == BLOCKS_MAX - 1


def test_marked_regions_count_by_the_wall_clock(host: Host, clock: list[float]) -> None:
    """``with compute():`` measures what is inside, whatever the step does beside it; steps without one are left out."""
    memory = host.memory(0)
    one = meter.begin(memory)
    for step in range(2 * BLOCK_STEPS):
        clock[0] += 5.0
        if step % 2:
            with meter.compute():
                clock[0] += 0.03
        one.step_done()
    assert blocks_of(memory) == (1, meter.WALL)
    host.look()
    assert host.watch._pace._ranks[0].changes._blocks == 1


def test_tokens_explain_the_cost(host: Host, clock: list[float]) -> None:
    """Steps of twice the tokens that cost twice as much cost the same; the measure says that it is another one."""
    memory = host.memory(0)
    one = meter.begin(memory)
    for step in range(SKIPPED + FITTED + BLOCK_STEPS):
        tokens = 1000 * (1 + step % 3)
        meter.report_tokens(tokens / 2)
        meter.report_tokens(tokens / 2)
        clock[0] += tokens * 1e-5
        one.step_done()
    assert blocks_of(memory) == (1, meter.CPU + meter.WITH_TOKENS)
    assert one._costs == []
    host.look()


class Event:
    """A CUDA event that is done when the test says so."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms, self.done = at_ms, False

    def query(self) -> bool:
        """Has it happened?"""
        return self.done

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this one to that."""
        return end.at_ms - self.at_ms


def test_short_steps_make_longer_blocks(host: Host, clock: list[float]) -> None:
    """Steps of 2 ms: 25 of them make a block, so that an agent sees twenty blocks a second; of a microsecond, 512."""
    memory = host.memory(0)
    one = meter.Meter(memory)
    for _ in range(1_000):
        clock[0] += 0.002
        one.step_done()
    assert 38 <= blocks_of(memory)[0] <= 42
    before = blocks_of(memory)[0]
    for _ in range(10 * meter.STEPS_MAX):
        one.step_done()
    assert blocks_of(memory)[0] == before + 10
    assert len(one._costs) < meter.STEPS_MAX


def test_cuda_events_are_read_once_they_are_done(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for: a step's cost is taken with a later step, when its events have happened; a flood is dropped."""
    monkeypatch.setattr(meter, "BLOCK_S", 0.0)
    memory = host.memory(0)
    one = meter.Meter(memory)
    events = [(Event(0.0), Event(30.0)) for _ in range(BLOCK_STEPS)]
    for pair in events:
        one.marked_by(pair)
        one.step_done()
    assert blocks_of(memory)[0] == 0
    for _, end in events:
        end.done = True
    one.step_done()
    assert blocks_of(memory) == (1, meter.CUDA)
    for _ in range(3 * meter.PENDING_MAX):
        one.marked_by((Event(0.0), Event(1.0)))
        one.step_done()
    assert len(one._pending) == meter.PENDING_MAX


def test_cpu_time_says_nothing_beside_cuda(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that feeds a GPU spins while it waits: unless the script marks its part, nothing is written."""
    monkeypatch.setitem(sys.modules, "torch.cuda", types.SimpleNamespace(_initialized=True))  # type: ignore[arg-type]
    memory = host.memory(0)
    one = meter.Meter(memory)
    for _ in range(2 * BLOCK_STEPS):
        one.step_done()
    assert blocks_of(memory)[0] == 0


def test_what_workers_measure_is_set_by_their_environment() -> None:
    """``--detect off`` and ``--watch-grads`` reach the workers, and nothing is set by default."""
    plain = {"spec": "{}"}
    assert "env" not in launch_fields(plain)
    assert launch_fields({**plain, "detect": False})["env"] == {DETECT_VARIABLE: "off"}
    assert launch_fields({**plain, "watch_grads": True})["env"] == {GRADS_VARIABLE: "1"}


def test_outside_of_a_worker_nothing_happens() -> None:
    """The calls of the script do nothing where no agent listens, or in a forked child."""
    meter.end()
    loss.end()
    with meter.compute():
        meter.report_tokens(1)
    loss.report_loss(math.nan)
    loss.applied(object())


# ---- losses


def watch(host: Host, values: list[float], first: int = 1) -> RankLoss | None:
    """A worker that reports one loss a step; what the beat says of it."""
    one = loss.begin(host.memory(0))
    for step, value in enumerate(values, first):
        one.step = step - 1
        loss.report_loss(value)
    told = host.look()[1]
    assert told.reporting == 1
    return told.ranks[0] if told.ranks else None


def test_a_loss_that_is_no_number_is_told_with_its_first_step(host: Host) -> None:
    """Three steps without a finite loss: the first of them, and whether it was NaN or infinite."""
    assert watch(host, [2.0, 1.0, math.nan, math.nan, math.inf]) == RankLoss(8, 3, NAN, NEVER, 0)
    assert watch(host, [2.0, math.inf, math.nan, math.nan]) == RankLoss(8, 2, INFINITE, NEVER, 0)


def test_a_skipped_batch_is_no_failure(host: Host) -> None:
    """One or two bad steps in a row are the script's business; so is a step that was tried again, though not for ever."""
    assert watch(host, [2.0, math.nan, math.nan, 1.9, math.nan]) is None
    one = loss.begin(host.memory(0))
    for _ in range(loss.STUCK - 1):
        loss.report_loss(math.nan)
    assert host.look()[1].ranks == ()
    loss.report_loss(math.nan)
    assert [found.broken for found in host.look()[1].ranks] == [1]
    assert one.step == 0


def test_a_jump_is_told_with_its_factor(host: Host) -> None:
    """Six times the median of the last losses is told; twice is not, and a jump is not told again for a while."""
    usual = [2.0 + 0.1 * (at % 5) for at in range(40)]
    assert watch(host, [*usual, 4.0]) is None
    found = watch(host, [*usual, 13.2, 14.0])
    assert found is not None
    assert (found.how, found.jumped) == (FINITE, 41)
    assert found.times == pytest.approx(6_000, rel=0.05)


def test_tensors_are_taken_as_they_are(host: Host) -> None:
    """A tensor of one element, with or without a gradient, is as good as a number."""
    torch = pytest.importorskip("torch")
    one = loss.begin(host.memory(0))
    for step in range(3):
        one.step = step
        loss.report_loss(torch.tensor(float("nan"), requires_grad=True))
    assert [found.broken for found in host.look()[1].ranks] == [1]


def test_what_cannot_be_watched_stops_no_training(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss on a device of another kind, or of another form, is left out; that is said once, and never raised."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(loss, "_said", False)
    loss.begin(host.memory(0))
    for value in (torch.empty((), device="meta"), torch.ones(2), "a loss", None):
        loss.report_loss(value)
    assert host.look()[1].reporting == 0
    assert [one.getMessage() for one in caplog.records] == [
        "a loss cannot be watched, and is left out: it is on device meta, not on a CPU or a CUDA device"
    ]


def test_gradients_are_looked_at_on_request(host: Host) -> None:
    """Asked to, it takes the gradients' norm now and again, and says that these are what broke; a spike is no loss's."""
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer: Any = torch.optim.SGD([weight], lr=0.0)
    for asked in (False, True):
        one = loss.begin(host.memory(0), asked)
        for step in range(5 * loss.GRADIENTS_EVERY):
            weight.grad = torch.full((4,), math.nan)
            one.step = step
            loss.applied(optimizer)
        told = host.look()[1].ranks
    assert [(found.broken, found.how) for found in told] == [(loss.GRADIENTS_EVERY, GRADIENT)]


def test_another_generation_begins_anew(host: Host, clock: list[float]) -> None:
    """New processes, new slots: the old ones are let go, and what the last beat said is said no more."""
    watch(host, [math.nan] * 3)
    host.generation = 4
    for fd in host.fds:
        os.pwrite(fd, bytes(SLOT_BYTES), 0)
    assert host.look() == (PaceBeat(), LossBeat())
    host.watch._slots = list
    host.look()
    assert host.desk.told == {}
    assert host.watch._open == {}

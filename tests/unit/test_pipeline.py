"""The pipeline: one append in flight, groups, nothing released before the commit, and loud about what must not be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dlrover_core.errors import LogError, LogFull, LogUnavailable
from dlrover_core.job.job import CreateJob, NotePause, StopJob
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.engine import Accepted, Engine, NotDone, Resend
from dlrover_core.kernel.events import Batch, Origin
from dlrover_core.kernel.log import AlreadyAppended, Appended, Conflict, Fenced, Outcome
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime import pipeline
from dlrover_core.runtime.pipeline import Deposed, Overloaded, Pipeline
from dlrover_core.spec import JobSpec
from dlrover_core.testing import virtual_loop

CREATE = CreateJob("run-1", JobSpec("j").to_json())


class Lead:
    """A leadership whose appends take 0.1 s and end as scripted, then well."""

    token = 1

    def __init__(self, *script: Outcome | Exception, takes_s: float = 0.1) -> None:
        self.script, self.takes_s = list(script), takes_s
        self.batches: list[Batch] = []
        self.in_flight = 0

    def valid(self) -> bool:
        """It leads."""
        return True

    def trouble(self) -> str:
        """Nobody has noticed any."""
        return ""

    async def append(self, batch: Batch) -> Outcome:
        """Answer as scripted, after a while."""
        self.in_flight += 1
        assert self.in_flight == 1, "two appends in flight"
        await asyncio.sleep(self.takes_s)
        self.in_flight -= 1
        self.batches.append(batch)
        outcome = self.script.pop(0) if self.script else Appended(batch.last_seq)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def tell(lead: Lead, story: Callable[[Pipeline, list[Batch]], Awaitable[None]]) -> None:
    """Tell a story to a pipeline over ``lead`` and a fresh engine."""

    async def told() -> None:
        committed: list[Batch] = []
        engine: Engine[JobState] = Engine(MODEL, CODEC, MODEL.new(), 1)
        loop = asyncio.get_running_loop()
        line = Pipeline(engine, lead, lambda: int(loop.time() * 1e6), committed.append)  # type: ignore[arg-type]  # as much of a leadership as it needs
        await story(line, committed)

    virtual_loop.run(told())


def test_group_commit() -> None:
    """What queues up while an append is in flight becomes the next batch, whole."""

    async def story(line: Pipeline, committed: list[Batch]) -> None:
        running = asyncio.ensure_future(line.run())
        first = line.submit(CREATE)
        await asyncio.sleep(0.05)
        rest = [line.submit(NotePause(number)) for number in range(100)]
        await first
        await asyncio.gather(*rest)
        assert [len(batch.records) for batch in committed] == [2, 100]
        line.stop()
        await running

    tell(Lead(), story)


@pytest.mark.parametrize("ends", [(), (LogUnavailable("away"),)], ids=["well", "badly"])
def test_an_append_that_hangs_is_told(ends: tuple[Exception, ...]) -> None:
    """A dead disk raises no error: after ``hung_s`` it is said that decisions wait, since when, and where to look."""

    async def story(line: Pipeline, committed: list[Batch]) -> None:
        running = asyncio.ensure_future(line.run())
        reply = line.submit(CREATE)
        await asyncio.sleep(0.5)
        for _ in range(5):
            line.look()
            assert line.degraded == ""
            await asyncio.sleep(1.0)
        line.look()  # it is overdue
        assert line.degraded == ""
        await asyncio.sleep(1.0)
        line.look()
        assert line.degraded.startswith("the log has not answered for 6 s: look at the disk")
        await asyncio.sleep(10.0)
        line.look()
        assert "for 16 s" in line.degraded
        assert committed == []
        lead.takes_s = 0.1
        assert await reply == Accepted(1)
        assert line.degraded == ""
        line.stop()
        await running
        assert len(committed) == 2, "whose silence does not count, and for how long, is recorded"

    lead = Lead(*ends, takes_s=20.0)
    tell(lead, story)


def test_a_master_that_was_stopped_does_not_take_its_append_for_one_that_hangs() -> None:
    """Its disk has had no time to answer since."""

    async def story(line: Pipeline, committed: list[Batch]) -> None:
        running = asyncio.ensure_future(line.run())
        reply = line.submit(CREATE)
        await asyncio.sleep(59.9)
        line.look()
        line.look()
        assert line.degraded == ""
        assert await reply == Accepted(1)
        line.look()
        assert line.degraded == ""
        running.cancel()

    tell(Lead(takes_s=60.0), story)


def test_the_next_leader_gets_the_rest() -> None:
    """Once it takes nothing more a pipeline does what is queued, and what comes later is for whoever leads next."""

    async def story(line: Pipeline, committed: list[Batch]) -> None:
        running = asyncio.ensure_future(line.run())
        first = line.submit(CREATE)
        await asyncio.sleep(0.05)
        second = line.submit(NotePause(1))
        line.stop(taking=False)
        assert line.submit(NotePause(2)).cancelled()
        await running
        assert (first.result(), second.result()) == (Accepted(1), Accepted(3))
        assert [len(batch.records) for batch in committed] == [2, 1]

    tell(Lead(), story)


def test_nothing_is_released_before_the_commit() -> None:
    """While its append is in flight a command is neither answered nor committed; nor is one behind it decided."""

    async def story(line: Pipeline, committed: list[Batch]) -> None:
        running = asyncio.ensure_future(line.run())
        first, second = line.submit(CREATE), None
        await asyncio.sleep(0.05)
        second = line.submit(StopJob("now"))
        await asyncio.sleep(0.04)
        assert not first.done()
        assert committed == []
        assert line._engine.state.job.state == "created"
        assert await first == Accepted(1)
        assert not second.done()
        assert await second == Accepted(3)
        running.cancel()

    tell(Lead(), story)


@pytest.mark.parametrize("error", [LogUnavailable("away"), LogFull("full")], ids=["unavailable", "full"])
def test_log_away(error: LogError) -> None:
    """While the log is away the same batch is sent again, the reason is told, and nothing is decided."""

    async def story(line: Pipeline, committed: list[Batch]) -> None:
        running = asyncio.ensure_future(line.run())
        reply = line.submit(CREATE)
        await asyncio.sleep(0.2)
        assert type(error).__name__ in line.degraded
        assert await reply == Accepted(1)
        assert line.degraded == ""
        running.cancel()

    lead = Lead(error, error, error)
    tell(lead, story)
    assert len({(batch.token, batch.counter, batch.payload) for batch in lead.batches}) == 1
    assert len(lead.batches) == 4


def test_lost_acknowledgement() -> None:
    """A batch found to be appended already counts as appended."""

    async def story(line: Pipeline, committed: list[Batch]) -> None:
        running = asyncio.ensure_future(line.run())
        assert await line.submit(CREATE) == Accepted(1)
        assert len(committed) == 1
        running.cancel()

    tell(Lead(LogUnavailable("ack lost"), AlreadyAppended(2)), story)


@pytest.mark.parametrize(
    ("outcome", "error"), [(Fenced(1, 2), Deposed), (Conflict(0, 7), LogError)], ids=["fenced", "conflict"]
)
def test_no_longer_leader(outcome: Outcome, error: type[Exception]) -> None:
    """Fenced or in conflict, it ends loudly; nothing is committed, and every reply, later ones too, is cancelled."""

    async def story(line: Pipeline, committed: list[Batch]) -> None:
        running = asyncio.ensure_future(line.run())
        replies = [line.submit(CREATE)]
        await asyncio.sleep(0.05)
        replies.append(line.submit(StopJob("queued behind it")))
        with pytest.raises(error):
            await running
        replies.append(line.submit(StopJob("too late")))
        await asyncio.sleep(0)
        assert all(reply.cancelled() for reply in replies)
        assert committed == []

    tell(Lead(outcome), story)


def test_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is bounded: what does not fit is refused at once, what fits is done."""
    monkeypatch.setattr(pipeline, "QUEUE_MAX", 3)

    async def story(line: Pipeline, committed: list[Batch]) -> None:
        fits = [line.submit(CREATE), *(line.submit(NotePause(number)) for number in range(2))]
        too_much = line.submit(NotePause(9))
        with pytest.raises(Overloaded):
            await too_much
        running = asyncio.ensure_future(line.run())
        assert [type(reply) for reply in await asyncio.gather(*fits)] == [Accepted] * 3
        running.cancel()

    tell(Lead(), story)


def test_repeated_command() -> None:
    """A command sent twice is decided once and answered alike; a gap is asked for; a refusal repeats itself."""

    async def story(line: Pipeline, committed: list[Batch]) -> None:
        running = asyncio.ensure_future(line.run())
        await line.submit(CREATE)
        first = await line.submit(StopJob("a"), Origin("s", 1, 1))
        assert await line.submit(StopJob("a"), Origin("s", 1, 1)) == first
        assert await line.submit(StopJob("c"), Origin("s", 1, 3)) == Resend(2)
        refused = await line.submit(StopJob("b"), Origin("s", 1, 2))
        assert isinstance(refused, NotDone)
        assert await line.submit(StopJob("b"), Origin("s", 1, 2)) == refused
        running.cancel()

    tell(Lead(), story)


def test_stop_finishes_the_queue() -> None:
    """Told to stop, it commits what is queued and then ends."""

    async def story(line: Pipeline, committed: list[Batch]) -> None:
        reply = line.submit(CREATE)
        line.stop()
        await line.run()
        assert reply.result() == Accepted(1)
        assert len(committed) == 1

    tell(Lead(), story)

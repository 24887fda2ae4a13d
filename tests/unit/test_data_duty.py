"""The agent's side of leased data: what sessions are handed, what becomes of that when they end, and what the leader is told."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from dlrover_adapters.agent import data_duty
from dlrover_adapters.agent.data_duty import DataDuty
from dlrover_adapters.agent.data_socket import DataSocket
from dlrover_adapters.data import leases
from dlrover_adapters.data.leases import DataGone, LeasedIndices, LeaseLine, Wait
from dlrover_core.data.ranges import Ranges, Span
from dlrover_core.errors import SpecError
from dlrover_core.job.leases import Leases, LeaseTold, ReportAcked, ReportRepeated, ReturnLease, spans_of
from dlrover_core.job.orders import Order
from dlrover_core.job.shards import LEASE, RegisterDataset, Terms
from dlrover_core.runtime.duties import LOST, Desk
from dlrover_core.runtime.launcher import WorkerExit, WorkersGone, WorkersLaunch
from dlrover_core.runtime.leasing import Ask, LeaseBeat

LAUNCH = WorkersLaunch("run", 3, 2, 2, 4, 1, 2, "h:1", 2, 3, node="n-0-1")
TERMS = Terms("eval", 100, 7, "file", "", 2, 0, LEASE)
NOBODY = Order(leave=False, reason="", grace_us=0)


class Stand:
    """A data duty with its socket, and a test in the leader's place."""

    def __init__(self, folder: Path) -> None:
        self.sent: list[Any] = []
        self.launcher = SimpleNamespace(data=DataSocket(str(folder)))
        self.told: list[str] = []
        self.duty = DataDuty(self.launcher, self.told.append)
        self.desk = Desk("n-0-1", "run", NOBODY, self._sent)
        self.too_old = False
        self.lines: list[LeaseLine] = []

    def _sent(self, command: Any) -> int:
        if self.too_old:
            return LOST
        self.sent.append(command)
        return len(self.sent)

    @property
    def ask(self) -> Ask:
        """What the next heartbeat says of the dataset."""
        (part,) = self.desk.told.values()
        assert isinstance(part, LeaseBeat)
        (one,) = part.asks
        return one

    def order(self, *spans: tuple[int, int], **more: Any) -> None:
        """The leader tells the node's leases."""
        told = LeaseTold(*TERMS[:6], spans=Ranges(spans).pack(), **more)
        self.duty.ordered(NOBODY.telling(Leases((told,))))

    async def line(self, *, opened: bool = True, local_rank: int = 0) -> LeaseLine:
        """A process of a rank dials."""
        os.environ.update(RANK=str(2 + local_rank), LOCAL_RANK=str(local_rank))
        line = await asyncio.to_thread(LeaseLine)
        self.lines.append(line)
        if opened:
            await asyncio.to_thread(line.open, TERMS, 4)
        return line

    async def draw(self, line: LeaseLine, *acked: Span, within_s: float = 20.0) -> Any:
        """A worker draws."""
        return await asyncio.to_thread(line.draw, "eval", 4, acked, within_s)

    async def until(self, true: Callable[[], Any]) -> None:
        """Wait for it."""
        while not true():  # noqa: ASYNC110  # the words come from threads
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def stand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    """Of a node with ranks 2 and 3."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("DLROVER_AGENT_SOCKET", str(folder / "agent.sock"))
    one = Stand(folder)
    one.launcher.data.open()
    one.launcher.data.begin(LAUNCH)
    running = asyncio.ensure_future(one.duty.run(one.desk))
    await asyncio.sleep(0)
    try:
        yield one
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for line in one.lines:
            line.close()
        one.launcher.data.close()


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Stand], Any]], None]:
    """Runs a test on a stand of its own."""

    def played(test: Callable[[Stand], Any]) -> None:
        async def whole() -> None:
            async with stand(tmp_path, monkeypatch) as one:
                await test(one)

        asyncio.run(asyncio.wait_for(whole(), 30))

    return played


def test_a_session_draws_acknowledges_and_hears_the_end(play: Any) -> None:
    """The dataset is registered once; draws wait for the leader's order; the end is said once the leader says so."""

    async def test(one: Stand) -> None:
        line, other = await one.line(), await one.line(local_rank=1)
        assert one.sent == [RegisterDataset("n-0-1", 3, *TERMS)]
        drawing = asyncio.ensure_future(one.draw(line))
        await one.until(lambda: one.desk.told and one.ask.idle and one.desk.hurried.is_set())
        assert one.ask.aim == 16  # two shards for each of its workers
        one.order((0, 8))
        assert await drawing == (0, 4)
        assert await one.draw(other) == (4, 8)
        ending = asyncio.ensure_future(one.draw(line, Span(0, 4)))
        await asyncio.to_thread(other.acked, "eval", [Span(4, 8)])
        await one.until(lambda: spans_of(one.ask.acked) == ((0, 8),))
        one.order(finished=True)
        assert await ending is None
        assert await one.draw(other) is None

    play(test)


def test_the_leaders_refusal_reaches_its_workers(play: Any) -> None:
    """Those that wait, and those that come later. Other terms, and the next start of a worker, are tried anew."""

    async def test(one: Stand) -> None:
        line, other = await one.line(), await one.line(local_rank=1)
        drawing = asyncio.ensure_future(one.draw(line))
        await one.until(lambda: one.desk.told and one.ask.idle)
        one.desk.answered(1, "worker has 16 leased datasets already: mix several into one")
        for draws in (drawing, one.draw(other), asyncio.to_thread((await one.line(opened=False)).open, TERMS, 4)):
            with pytest.raises(SpecError, match="dataset 'eval': the job's master refuses it: worker has 16 leased"):
                await draws
        assert len(one.sent) == 1
        await asyncio.to_thread((await one.line(opened=False)).open, TERMS._replace(size=50), 4)
        one.desk.answered(2, "no")
        one.launcher.data.begin(LAUNCH._replace(generation=4))
        line = await one.line()
        assert one.sent[1:] == [
            RegisterDataset("n-0-1", 3, *TERMS._replace(size=50)),
            RegisterDataset("n-0-1", 4, *TERMS),
        ]
        one.order((0, 8))
        assert await one.draw(line) == (0, 4)

    play(test)


def test_a_lost_registration_is_repeated(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the master was too old to know it, and where it was done and no order shows it; never while an answer is due."""
    monkeypatch.setattr(data_duty, "REGISTER_EVERY_S", 0.02)

    async def test(one: Stand) -> None:
        one.too_old = True
        line = await one.line()
        assert (await one.draw(line, within_s=0.01)).why.startswith("the job's master is of an older release")
        one.too_old = False
        await one.until(lambda: len(one.sent) == 1)
        one.desk.answered(1, "")
        await one.until(lambda: len(one.sent) == 2)
        assert one.sent == [RegisterDataset("n-0-1", 3, *TERMS)] * 2
        one.order((0, 8))
        one.desk.answered(2, "")
        assert await one.draw(line) == (0, 4)
        assert len(one.sent) == 2

    play(test)


def test_a_wait_has_words(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing registered yet, others have the rest, no master answers: the worker hears which."""

    async def test(one: Stand) -> None:
        line = await one.line()
        assert await one.draw(line, within_s=0.01) == Wait("the job's master has not registered the dataset yet")
        one.order()
        assert await one.draw(line, within_s=0.01) == Wait("other workers have the rest, and have not used it yet")
        monkeypatch.setattr(data_duty, "SILENT_S", -1.0)
        assert (await one.draw(line, within_s=0.01)).why.startswith("no master has answered for 0 s")

    play(test)


@pytest.mark.parametrize("how", ["its socket", "its exit", "its generation"])
def test_what_a_dead_session_had_is_handed_out_again_and_told(play: Any, how: str) -> None:
    """However its end is seen. Its last words count, even those that nobody had read yet."""

    async def test(one: Stand) -> None:
        line, other = await one.line(), await one.line(local_rank=1)
        one.order((0, 50))
        assert await one.draw(line) == (0, 4)
        assert await one.draw(other) == (4, 8)
        line.acked("eval", [Span(0, 1)])
        if how == "its socket":
            line.close()
        elif how == "its exit":
            one.duty.noticed(WorkerExit(3, 0, 2, -9, False, 0))
        else:
            one.duty.noticed(WorkersGone(3))
        await one.until(lambda: len(one.sent) > 1)
        assert isinstance(one.sent[1], ReportRepeated)
        assert spans_of(one.sent[1].spans) == ((1, 4),)
        third = await one.line(local_rank=1)
        assert (await one.draw(third)).start == 1
        if how == "its exit":
            with pytest.raises(DataGone, match="does not answer"):
                await one.draw(line)

    play(test)


def test_a_shard_is_of_one_epoch(play: Any) -> None:
    """The order of the second epoch is another one."""

    async def test(one: Stand) -> None:
        line = await one.line()
        one.order((98, 110))
        assert [await one.draw(line) for _ in range(2)] == [(98, 100), (100, 104)]

    play(test)
    work = LeasedIndices("eval", size=100, epochs=2, seed=7, order="file", shard=4)
    assert work._indices(Span(100, 104)) == (1, (0, 1, 2, 3))


def test_two_datasets_of_one_name_in_a_process_are_refused_with_both_told(play: Any) -> None:
    """They share the process's line; an agent would only see the first one."""

    async def test(one: Stand) -> None:
        line = await one.line()
        with pytest.raises(
            SpecError, match=r"^name: 'eval' of two .*100 samples, seed 7, .* has 100 samples, seed 5, .*another name"
        ):
            line.open(TERMS._replace(seed=5), 4)

    play(test)


def test_a_question_of_the_leader_is_answered_at_once(play: Any) -> None:
    """What is not handed out is given back, and never handed out after."""

    async def test(one: Stand) -> None:
        line = await one.line()
        one.order((0, 20))
        await one.draw(line)
        one.order((0, 20), recall=9, recalled=Ranges([(2, 20)]).pack())
        await one.until(lambda: one.ask.recall == 9)
        assert spans_of(one.ask.yielded) == ((4, 20),)
        assert one.desk.hurried.is_set()
        assert isinstance(await one.draw(line, within_s=0.01), Wait)

    play(test)


def test_an_agent_that_leaves_says_what_was_used(play: Any) -> None:
    """After its workers have ended, as a report: no heartbeat may come any more. The rest it gives back, for good."""

    async def test(one: Stand) -> None:
        line = await one.line()
        one.order((0, 20))
        span = await one.draw(line)
        settling = asyncio.ensure_future(one.duty.settle(NOBODY._replace(grace_us=10_000_000)))
        await asyncio.to_thread(line.acked, "eval", [span])
        line.close()
        await settling
        assert one.sent[1:] == [ReportAcked("n-0-1", "eval", Ranges([(0, 4)]).pack()), ReturnLease("n-0-1", "eval")]
        assert not one.desk.told
        with pytest.raises(SpecError, match="this node leaves the job"):
            await one.draw(await one.line())

    play(test)


def test_an_agent_that_leaves_wants_nothing_any_more(play: Any) -> None:
    """Its next heartbeat asks for nothing, and comes soon. What was granted to it meanwhile it gives back unseen."""

    async def test(one: Stand) -> None:
        line = await one.line()
        await one.until(lambda: one.desk.told and one.ask.aim)
        one.desk.hurried.clear()
        line.close()
        await one.duty.settle(NOBODY)
        assert not one.desk.told
        assert one.desk.hurried.is_set()
        assert one.sent[1:] == [ReturnLease("n-0-1", "eval")]

    play(test)


def test_another_dataset_of_the_name_is_refused(play: Any) -> None:
    """By the other session's, and by the job's; both are told."""

    async def test(one: Stand) -> None:
        await one.line()
        line = await one.line(opened=False)
        with pytest.raises(SpecError, match=r"the job has it with 100 samples.*this one has 99 samples.*another name"):
            await asyncio.to_thread(line.open, TERMS._replace(size=99), 4)
        with pytest.raises(SpecError, match="'cursor' of dataset 'eval': only 'lease' or 'lease-model' is drawn"):
            await asyncio.to_thread(line.open, TERMS._replace(assignment="cursor"), 4)
        with pytest.raises(SpecError, match="open it before you draw"):
            await one.draw(line)

    play(test)


def test_credits(play: Any) -> None:
    """A session that draws on and on without using anything is told what to do."""

    async def test(one: Stand) -> None:
        line = await one.line()
        one.order((0, 100))
        for _ in range(data_duty.SHARDS_MAX if data_duty.SHARDS_MAX < 100 else 0):
            await asyncio.to_thread(line.draw, "eval", 1)
        with pytest.raises(SpecError, match=r"3 shards were drawn and not acknowledged: say data.done\(\)"):
            await asyncio.to_thread(line.draw, "eval", 1)

    before, data_duty.SHARDS_MAX = data_duty.SHARDS_MAX, 3
    try:
        play(test)
    finally:
        data_duty.SHARDS_MAX = before


class Interrupted(Exception):
    """What a signal's handler raises."""


@pytest.mark.parametrize("when", ["before its answer", "after its answer", "unsent", "twice"])
def test_an_interrupted_draw_loses_nothing(play: Any, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """The next draw gets its shard, and takes no old answer for its own."""

    async def test(one: Stand) -> None:
        line, other = await one.line(), await one.line(local_rank=1)
        if when != "before its answer":
            one.order((0, 20))
        for _ in range(2 if when == "twice" else 1):
            with monkeypatch.context() as patched:

                def interrupted(*_: Any) -> Any:
                    raise Interrupted

                patched.setattr(line, "_answer_to", interrupted)
                if when == "unsent":
                    patched.setattr(leases, "_packed", interrupted)
                with pytest.raises(Interrupted):
                    await one.draw(line)
        if when == "before its answer":
            one.order((0, 20))
        assert await one.draw(line) == (0, 4)
        assert await one.draw(line, Span(0, 4)) == (4, 8)
        await asyncio.to_thread(line.open, TERMS._replace(name="other"), 4)
        assert await one.draw(other) == (8, 12)

    play(test)


def test_whoever_begins_a_dataset_anew_keeps_what_it_has_of_another(play: Any) -> None:
    """A line for each dataset: of the other one nothing is handed out again, or told to be repeated."""

    async def test(one: Stand) -> None:
        works = [LeasedIndices(name, size=100, epochs=2, seed=7, order="file", shard=4) for name in ("eval", "other")]
        os.environ.update(RANK="2", LOCAL_RANK="0")
        told = (LeaseTold(*work.terms[:6], spans=Ranges([(0, 20)]).pack()) for work in works)
        one.duty.ordered(NOBODY.telling(Leases(tuple(told))))

        async def drawn() -> list[Any]:
            return [found.span for work in works if (found := await asyncio.to_thread(work.draw))]

        try:
            assert await drawn() == [(0, 4), (0, 4)]
            works[0].begin_anew()
            await one.until(lambda: any(isinstance(sent, ReportRepeated) for sent in one.sent))
            assert await drawn() == [(0, 4), (4, 8)]
            repeated = [sent.dataset for sent in one.sent if isinstance(sent, ReportRepeated)]
            assert repeated == ["eval"]
        finally:
            for work in works:
                work.begin_anew()

    play(test)


@pytest.mark.parametrize("where", ["announced", "_indices"])
def test_a_shard_that_came_and_was_not_taken_is_drawn_again(
    play: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Whether a signal's handler raises in the line, or before the caller has its shard: others wait for all positions."""

    @contextlib.contextmanager
    def interrupted(*_: Any) -> Any:
        yield
        raise Interrupted

    def at_once(*_: Any) -> Any:
        raise Interrupted

    async def test(one: Stand) -> None:
        line = await one.line()
        one.order((0, 20))
        monkeypatch.setattr(leases, "line_of_process", lambda _name: line)
        work = LeasedIndices("eval", size=100, seed=7, order="file", epochs=2, shard=4)
        drawn = []
        for number in range(5):
            with monkeypatch.context() as patched:
                if number in {1, 2}:
                    what: Any = work if where == "_indices" else leases
                    patched.setattr(what, where, at_once if where == "_indices" else interrupted)
                try:
                    shard = await asyncio.to_thread(work.draw)
                    drawn.append(shard.span)
                except Interrupted:
                    drawn.append("interrupted")
        assert drawn == [(0, 4), "interrupted", "interrupted", (4, 8), (8, 12)]

    play(test)


@pytest.mark.parametrize(
    "packet",
    [
        b"\xc1", b"\x01", msgpack.packb({"op": "draw"}), msgpack.packb({"op": "hello", "rank": -1}),
        msgpack.packb({"op": "acked", "dataset": "eval", "spans": [4, 2]}),
        msgpack.packb({"op": "acked", "dataset": "eval", "spans": [1]}),
        msgpack.packb({"op": "draw", "dataset": "eval", "most": 0, "spans": []}),
        msgpack.packb({"op": "open", "terms": ["eval"], "shard": 1}),
    ],
)  # fmt: skip
def test_nonsense_ends_the_connection_and_nothing_else(play: Any, packet: bytes) -> None:
    """Before and after the greeting."""

    async def test(one: Stand) -> None:
        line = await one.line()
        one.order((0, 20))
        for greeted in (False, True):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.settimeout(10)
            stranger.connect(one.launcher.data.path)
            if greeted:
                stranger.send(msgpack.packb({"op": "hello", "rank": 2, "local_rank": 0, "pid": 1, "n": 1}))
                assert b"node" in await asyncio.to_thread(stranger.recv, 1000)
            stranger.send(packet)
            assert await asyncio.to_thread(stranger.recv, 1000) == b""
            stranger.close()
        assert await one.draw(line) == (0, 4)

    play(test)


def test_without_an_agent_it_says_how_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Plain Python and torchrun have nobody who hands samples out; an agent that is gone is named."""
    monkeypatch.delenv("DLROVER_AGENT_SOCKET", raising=False)
    with pytest.raises(SpecError, match="start the script with dlrover-run"):
        LeaseLine()
    monkeypatch.setenv("DLROVER_AGENT_SOCKET", str(tmp_path / "agent.sock"))
    (tmp_path / "data.sock").write_text("")
    with pytest.raises(DataGone, match="no agent hands out samples at"):
        LeaseLine()


@pytest.mark.parametrize(
    ("field", "value"), [("size", 0), ("size", True), ("epochs", -1), ("shard", 0), ("shard", 2**31 + 1)]
)
def test_fields_out_of_bounds(field: str, value: Any) -> None:
    """Field, value, and what may be given."""
    with pytest.raises(SpecError, match=rf"{field}.*{value}.* give \d"):
        LeasedIndices("eval", **{"size": 10, field: value})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": ""}, "name: '': give a text of 1 to 128"),
        ({"fingerprint": "f" * 129}, "fingerprint: .*give a text of 0 to 128"),
        ({"fingerprint": "f" * 120, "chunk": 2}, "fingerprint: 'chunk=2 window=.*give a text of 0 to 128"),
        ({"size": 2**40, "epochs": 2**23}, r"epochs: 8388608 of 1099511627776 samples are more than 2\*\*62"),
    ],
)
def test_what_the_master_would_refuse_is_told_at_once(fields: dict[str, Any], words: str) -> None:
    """No worker waits for a dataset that can never be registered."""
    with pytest.raises(SpecError, match=words):
        LeasedIndices(**{"name": "eval", "size": 10, **fields})


def test_what_is_used_while_another_thread_draws_is_said_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw takes away what it has said, and nothing that came meanwhile; done says the rest."""
    said: list[tuple[Span, ...]] = []

    class Line:
        def open(self, *_: object) -> None:
            """As `LeaseLine` does."""

        def draw(self, _name: str, _most: int, used: tuple[Span, ...], _within_s: float) -> Span:
            """Another thread is done with a shard meanwhile."""
            said.append(used)
            work.used(Span(2, 3))
            return Span(5, 6)

        def acked(self, _name: str, spans: tuple[Span, ...]) -> None:
            """As `LeaseLine` does."""
            said.append(spans)

    monkeypatch.setattr(leases, "line_of_process", lambda _name: Line())
    work = copy.deepcopy(LeasedIndices("eval", size=10))  # as it is pickled for loaders
    work.used(Span(0, 1))
    drawn = work.draw()
    assert isinstance(drawn, leases.Shard)
    assert drawn.span == Span(5, 6)
    work.done()
    work.done()
    assert said == [(Span(0, 1),), (Span(2, 3),)]


def test_how_an_order_is_read_is_part_of_the_terms() -> None:
    """Positions of other chunks are other samples: one of two such workers is refused."""
    words = [LeasedIndices("eval", size=100, fingerprint="f", **more).terms.fingerprint for more in ({}, {"chunk": 10})]
    assert words[0] == "f"
    assert words[1].startswith("chunk=10 window=")


def test_what_a_worker_gives_back_goes_to_others_and_is_not_said_to_be_repeated(play: Any) -> None:
    """Who waits gets it at once; what the worker still has, or another one, is not touched."""

    async def test(one: Stand) -> None:
        line, other = await one.line(), await one.line()
        one.order((0, 8))
        assert [await one.draw(line), await one.draw(other)] == [(0, 4), (4, 8)]
        waits = asyncio.ensure_future(one.draw(other))
        await one.until(lambda: one.launcher.data.waiting)
        await asyncio.to_thread(line.returned, "eval", [Span(1, 6)])
        assert await waits == (1, 4)
        line.close()
        await one.until(lambda: len(one.sent) > 1)
        (_, repeated) = one.sent
        assert isinstance(repeated, ReportRepeated)
        assert tuple(Ranges.unpack(repeated.spans)) == ((0, 1),)

    play(test)

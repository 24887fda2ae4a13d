"""A master that leads and hands out its records over HTTP, for tests that read them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from tests.unit.life import three_deaths

from dlrover_adapters.http import HttpLimits, HttpListener, bind
from dlrover_core.job.job import ResumeJob, SuspendJob
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.log import Appended, EventLog
from dlrover_core.logs import open_log
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.runtime import records as pages
from dlrover_core.runtime.master import Master
from dlrover_core.runtime.records import Records
from dlrover_core.spec import GroupSpec, JobSpec

TOKEN = "the-token-of-this-job"
BOUND_S = 30.0


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment, where readers look for it."""
    monkeypatch.setenv("DLROVER_TOKEN", TOKEN)


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Tell a story in an event loop of its own, within a bound."""

    async def told() -> None:
        await asyncio.wait_for(story(), BOUND_S)

    asyncio.run(told())


class Leading:
    """A master of job `j`, which leads or stands by; nobody launches its nodes."""

    def __init__(self, event_log: EventLog, holder: str = "one", *, answers: bool = False, **limits: float) -> None:
        self.listener = HttpListener(bind(), TOKEN, job="j", limits=HttpLimits(close_s=0.3)._replace(**limits))
        self.at = self.listener.address
        self.master = Master(
            JobSpec("j", (GroupSpec(nodes_min=1, nodes_max=2),)),
            event_log=event_log,
            listener=self.listener,
            backend=None,
            wall=lambda: time.time_ns() // 1000,
            holder=holder,
            run_id="run-1",
            answers=answers,
        )
        self.task = asyncio.ensure_future(self.master.run())

    async def leads(self) -> Leading:
        """Wait until it does."""
        led = asyncio.ensure_future(self.master.led.wait())
        await asyncio.wait({self.task, led}, return_when=asyncio.FIRST_COMPLETED)
        assert led.done(), self.task
        return self

    async def toss(self, times: int = 1) -> None:
        """Something for the log: suspended and resumed in turn."""
        for _ in range(times):
            suspended = self.master.state.job.state == "suspended"
            await self.master.submit(ResumeJob("x") if suspended else SuspendJob("x"))

    async def end(self) -> None:
        """Without a hand-over."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def leading(event_log: EventLog | None = None, **limits: float) -> AsyncIterator[Leading]:
    """A master that leads."""
    found = Leading(event_log if event_log is not None else MemoryLog(CODEC), **limits)
    try:
        yield await found.leads()
    finally:
        await found.end()


async def all_of(log: EventLog, job: str = "j", after: int = 0) -> list[Record]:
    """What a log holds."""
    return [record async for record in log.read(job, after)]


async def _nobody(_connection: object) -> None:
    return None


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Whatever listens there, and where."""
    server = await asyncio.start_server(handler, "127.0.0.1")
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.close()
        await server.wait_closed()


def page(*payloads: bytes, after: int = 0, last: int = 1, job: str = "j") -> bytes:
    """A page of these batches."""
    body = b"".join(payloads)
    row = (job, after, last, last, False, 0, "", "", [len(one) for one in payloads], pages.zlib.crc32(body))
    return pages.pack(row, body)


def answer(body: bytes, kind: str = pages.CONTENT_TYPE, status: str = "200 OK", more: int = 0) -> bytes:
    """An answer as it goes over the wire; it promises ``more`` bytes than there are."""
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body) + more}\r\nLocation: /login\r\n\r\n".encode()
        + body
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A finished job's log in a file, and where something hands it out as its master would."""
    folder = tmp_path_factory.mktemp("served")
    url, ready, end = f"sqlite://{folder}/log.db", threading.Event(), asyncio.Event()
    at = list[str]()
    loop = asyncio.new_event_loop()

    async def hand_out() -> None:
        async with open_log(url) as event_log:
            lead = await event_log.lead("digits", "test")
            life = three_deaths(JobSpec("digits", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),)))
            batch = CODEC.batch(lead.token, 1, [record._replace(token=lead.token) for record in life.records])
            assert isinstance(await lead.append(batch), Appended)
            await lead.resign()
            listener = HttpListener(bind(), TOKEN, job="digits", limits=HttpLimits(close_s=0.3))
            desk = Records(event_log, "digits", lambda: None)
            await listener.serve(_nobody, lambda: {"job": "digits"}, None, desk.hand_out)
            at.append(listener.address)
            ready.set()
            await end.wait()
            await listener.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(hand_out(),))
    thread.start()
    assert ready.wait(BOUND_S)
    yield url, at[0]
    loop.call_soon_threadsafe(end.set)
    thread.join(BOUND_S)
    loop.close()

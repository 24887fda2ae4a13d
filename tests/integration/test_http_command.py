"""`POST /v1/command` over real sockets to a real master: what is done, what is refused, and what is no command at all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dlrover_adapters.http import HttpLimits, HttpListener, bind
from dlrover_adapters.http.client import Unanswered, fetch_status, send_command
from dlrover_adapters.http.command import BODY_BYTES_MAX
from dlrover_core.errors import ConnectionLost, MalformedMessage, NotLeading, Refused, TokenRefused
from dlrover_core.job.state import CODEC
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.runtime.master import Master
from dlrover_core.spec import GroupSpec, JobSpec

TOKEN = "the-token-of-this-job"
BOUND_S = 30.0


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Tell a story in an event loop of its own, within a bound."""

    async def told() -> None:
        await asyncio.wait_for(story(), BOUND_S)

    asyncio.run(told())


@asynccontextmanager
async def leading(event_log: MemoryLog | None = None, **limits: Any) -> AsyncIterator[tuple[Master, str]]:
    """A master that leads a job of two nodes, which nobody launches, and where it listens."""
    listener = HttpListener(bind(), TOKEN, limits=HttpLimits(close_s=0.3, **limits))
    master = Master(
        JobSpec("j", (GroupSpec(nodes_min=1, nodes_max=2),)),
        event_log=event_log if event_log is not None else MemoryLog(CODEC),
        listener=listener,
        backend=None,
        wall=lambda: time.time_ns() // 1000,
        holder="test",
        run_id="run-1",
    )
    task = asyncio.ensure_future(master.run())
    try:
        await asyncio.wait({task, led := asyncio.ensure_future(master.led.wait())}, return_when=asyncio.FIRST_COMPLETED)
        assert led.done()
        yield master, listener.address
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def post(
    address: str, body: bytes, token: str = TOKEN, method: str = "POST", more: str = ""
) -> tuple[int, dict[str, Any]]:
    """Raw bytes, and what came back."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    more += f"Authorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n"
    head = f"{method} /v1/command HTTP/1.1\r\nHost: x\r\n{more}\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    told, _, text = answer.partition(b"\r\n\r\n")
    return int(told.split()[1]), json.loads(text) if text.startswith(b"{") else {}


def test_each_command_is_done_and_durable() -> None:
    """Every verb reaches the job, and the answer is the number of its record."""

    async def story() -> None:
        async with leading() as (master, address):
            asked = {
                "command": "scale",
                "job": "j",
                "group": "worker",
                "nodes_min": 2,
                "nodes_max": 4,
                "reason": "more",
            }
            seq = await send_command(address, TOKEN, asked)
            assert master.state.job.spec.group("worker").nodes_max == 4
            records = [record async for record in master._log.read("j")]
            assert type(records[seq - 1].event).__name__ == "GroupScaled"
            await send_command(address, TOKEN, {"command": "suspend"})
            assert (master.state.job.state, master.state.job.reason) == ("suspended", "asked over HTTP")
            await send_command(address, TOKEN, {"command": "resume"})
            with pytest.raises(Refused, match="there is no node 'worker-9-0'; there are: worker-0-0, worker-1-0"):
                await send_command(address, TOKEN, {"command": "drain", "node": "worker-9-0"})
            with pytest.raises(Refused, match="only a suspended one can be resumed"):
                await send_command(address, TOKEN, {"command": "resume"})
            with pytest.raises(Refused, match="this master leads job 'j', not 'other'"):
                await send_command(address, TOKEN, {"command": "stop", "job": "other"})
            with pytest.raises(MalformedMessage, match="hop"):
                await send_command(address, TOKEN, {"command": "hop"})
            await send_command(address, TOKEN, {"command": "stop", "reason": "enough"})
            assert master.state.job.reason == "enough"

    run(story)


def test_a_standby_is_asked() -> None:
    """A master that stands by does nothing, says so for certain, and where the leader is; its status says the same."""

    async def story() -> None:
        event_log = MemoryLog(CODEC)
        async with leading(event_log) as (leader, there):
            listener = HttpListener(bind(), TOKEN, limits=HttpLimits(close_s=0.3))
            standby = Master(
                JobSpec("j", (GroupSpec(nodes_min=1, nodes_max=2),)),
                event_log=event_log,
                listener=listener,
                backend=None,
                wall=lambda: time.time_ns() // 1000,
                holder="other",
                run_id="run-1",
                answers=True,
            )
            task = asyncio.ensure_future(standby.run())
            here = listener.address
            try:
                while (told := await fetch_status(here, TOKEN))["leader"] != "test":
                    assert not task.done()
                assert (told["role"], told["leader_address"]) == ("standby", there)
                status, answer = await post(here, b'{"command": "suspend"}')
                assert (status, answer["done"], answer["leader"]) == (503, False, there)
                with pytest.raises(ConnectionLost, match=f"stands by: .*{there}; ask there") as caught:
                    await send_command(here, TOKEN, {"command": "suspend"})
                assert not isinstance(caught.value, Unanswered)
                leader.hand_over("enough")
                await asyncio.wait_for(standby.led.wait(), 5)
                await send_command(here, TOKEN, {"command": "suspend"})
                assert standby.state.job.state == "suspended"
                assert (await fetch_status(here, TOKEN))["role"] == "leader"
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    run(story)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_a_body_that_is_not_encoded_as_it_says(encoding: str) -> None:
    """It is refused in words, and the master does not log a traceback."""

    async def story() -> None:
        async with leading() as (master, address):
            before = master.state.seq
            status, told = await post(address, b'{"command": "suspend"}', more=f"Content-Encoding: {encoding}\r\n")
            assert status == 400
            if encoding != "br":  # which aiohttp's parser refuses itself where it knows no brotli
                assert "cannot be read" in told["reason"]
            assert master.state.seq == before

    run(story)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 16_000, "not JSON"),
        (b"[]", "a command is an object"),
        (b"{}", "there is no command NoneType; there are: scale, drain, stop, suspend, resume"),
        (b'{"command": ["stop"]}', "there is no command list"),
        (b'{"command": "format"}', "there is no command 'format'"),
        (b'{"command": "drain"}', "node is missing"),
        (b'{"command": "stop", "node": "x"}', "'node' is unknown"),
        (b'{"command": "scale", "nodes_max": "4"}', "nodes_max: str '4' is not what was declared"),
        (b'{"command": "scale", "nodes_max": true}', "nodes_max"),
        (b'{"command": "scale", "nodes_max": 1e300}', "nodes_max"),
        (b'{"command": "scale", "nodes_max": 99999999999999999999999}', "nodes_max"),
        (b'{"command": "drain", "node": {"a": 1}}', "node"),
    ],
)
def test_what_is_no_command_changes_nothing(asked: bytes, reason: str) -> None:
    """Nonsense is answered with 400 and what would be right, and no record is made."""

    async def story() -> None:
        async with leading() as (master, address):
            before = master.state.seq
            status, told = await post(address, asked)
            assert (status, reason in told["reason"]) == (400, True), told
            assert master.state.seq == before

    run(story)


def test_half_characters_and_long_reasons_are_recorded_as_far_as_they_can_be() -> None:
    """A lone surrogate cannot be packed: it must not fail the command after it was taken."""

    async def story() -> None:
        async with leading() as (master, address):
            status, told = await post(
                address, json.dumps({"command": "stop", "reason": "\ud800" + "x" * 9000}).encode()
            )
            assert status == 200, told
            reason = master.state.job.reason
            assert reason.startswith("\\ud800" + "x" * 480)
            assert len(reason) <= 500

    run(story)


def test_too_much_is_not_read() -> None:
    """A body beyond the limit is refused, whatever its head says, and one that never comes is cut off."""

    async def story() -> None:
        async with leading(handshake_s=1.0) as (master, address):
            before = master.state.seq
            status, told = await post(address, b'{"command": "stop", "reason": "' + b"x" * BODY_BYTES_MAX + b'"}')
            assert (status, told["reason"]) == (413, f"a command has at most {BODY_BYTES_MAX} bytes")
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            head = (
                f"POST /v1/command HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 99\r\n\r\n"
            )
            writer.write(head.encode() + b'{"command"')
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await reader.readuntil(b"HTTP/1.1 200")
            writer.close()
            assert master.state.seq == before

    run(story)


def test_who_may_not() -> None:
    """Without the token nothing is read; with GET nothing is done."""

    async def story() -> None:
        async with leading() as (master, address):
            before = master.state.seq
            with pytest.raises(TokenRefused, match="is not this job's"):
                await send_command(address, "another-token", {"command": "stop"})
            with pytest.raises(TokenRefused, match="is missing"):
                await send_command(address, "", {"command": "stop"})
            assert (await post(address, b'{"command": "stop"}', method="GET"))[0] == 405
            assert master.state.seq == before

    run(story)


def test_nobody_there() -> None:
    """Where nobody listens nothing was done; where somebody says nothing, nobody knows."""

    async def story() -> None:
        with bind() as sock:
            address = "{}:{}".format(*sock.getsockname()[:2])
            with pytest.raises(Unanswered, match="did not answer within"):
                await send_command(address, TOKEN, {"command": "stop"}, timeout_s=0.2)
        with pytest.raises(ConnectionLost, match="nobody answers") as found:
            await send_command(address, TOKEN, {"command": "stop"})
        assert not isinstance(found.value, Unanswered)

    run(story)


def test_a_master_that_is_deposed_does_not_claim_to_have_done_it() -> None:
    """A command that no log will ever hold is answered with 503, not with silence."""

    async def story() -> None:
        listener = HttpListener(bind(), TOKEN, limits=HttpLimits(close_s=0.3))

        async def accept(_: object) -> None:
            return None

        async def obey(_: object) -> int:
            raise NotLeading("j")

        await listener.serve(accept, dict, obey)
        with pytest.raises(Unanswered, match="is led by another process"):
            await send_command(listener.address, TOKEN, {"command": "stop"})
        await listener.close()

    run(story)


def test_a_listener_that_takes_none() -> None:
    """A transport may serve agents alone."""

    async def story() -> None:
        listener = HttpListener(bind(), TOKEN, limits=HttpLimits(close_s=0.3))

        async def accept(_: object) -> None:
            return None

        await listener.serve(accept, dict)
        with pytest.raises(Unanswered, match="takes no commands"):
            await send_command(listener.address, TOKEN, {"command": "stop"})
        await listener.close()

    run(story)

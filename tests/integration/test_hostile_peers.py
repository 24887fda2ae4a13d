"""A real master with hostile peers inside, which know the token: others are served, the log stays short, memory stays flat."""

from __future__ import annotations

import asyncio
import itertools
import struct
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import msgpack
import pytest
from hostile_house import MEBIBYTE, TOKEN, Stranger, house, run

from dlrover_adapters.http import HttpDialer
from dlrover_core.errors import ConnectionLost
from dlrover_core.job import world
from dlrover_core.kernel.wire import COMMANDS
from dlrover_core.runtime import messages
from dlrover_core.runtime.levels import Beat
from dlrover_core.runtime.messages import Goodbye, Hello, Message, Welcome, numbered
from dlrover_core.runtime.transport import FRAME_BYTES_MAX

# ---- inside: with the token, and no good


def test_a_frame_of_a_hundred_megabytes(tmp_path: Path) -> None:
    """A frame over the limit ends its connection with the first bytes, announced or sent, whole or in pieces."""

    async def story() -> None:
        async with house(tmp_path) as here:
            frames = (
                (struct.pack(">BBQ4x", 0x82, 0x80 | 127, 100 * MEBIBYTE), bytes(MEBIBYTE)),
                (
                    struct.pack(">BBH4x", 0x02, 0x80 | 126, 4),
                    struct.pack(">BBH4x", 0x00, 0x80 | 126, 60000) + bytes(60000),
                ),
                (b"", struct.pack(">BBQ4x", 0x82, 0x80 | 127, MEBIBYTE) + bytes(MEBIBYTE)),
            )
            for make, (opening, chunk) in itertools.product((Stranger.inside, Stranger.guest), frames):
                stranger = await make(here.address)
                ended = asyncio.ensure_future(stranger.ended())
                stranger.writer.write(opening + bytes(4) * (opening[:1] == b"\x02"))
                await stranger.pour(chunk, 100 * MEBIBYTE // len(chunk))
                await ended
            complaints = [line for line in here.lines() if "level=warning" in line]
            assert len(complaints) == 6
            assert all("limit" in line or "msgpack" in line for line in complaints)

    run(story)


def test_half_open_frames(tmp_path: Path) -> None:
    """A hundred, half of them greeted, announce a mebibyte, send ten bytes, stall; a ping they cannot answer finds them out."""

    async def story() -> None:
        async with house(tmp_path) as here:
            strangers = [await make(here.address) for make in (Stranger.inside, Stranger.guest) for _ in range(50)]
            for stranger in strangers:
                stranger.frame(bytes(10), announced=FRAME_BYTES_MAX)
            for stranger in strangers:
                await stranger.ended()
            await here.until_logged("agent connection lost")
            assert len(here.lines("agent connection lost")) <= 11

    run(story)


def test_slow_reader(tmp_path: Path) -> None:
    """An agent that talks and never reads the answers loses its connection; what waits for it is bounded."""

    async def story() -> None:
        async with house(tmp_path, decided=1) as here:
            stranger = await Stranger.guest(here.address)
            stranger.writer.transport.pause_reading()  # type: ignore[attr-defined]  # of the reading half
            # Said again and again it is decided once, and answered each time, with the address.
            command = messages.encode(numbered(1, world.WithdrawStore("guest-0-0", "x" * 3000)))
            stranger.frame(command)
            for _ in range(100):
                if await stranger.pour((struct.pack(">BBH4x", 0x82, 0x80 | 126, len(command)) + command) * 100, 1) == 0:
                    break
            await here.until_logged(r"connection (closed|lost).*(unread|read nothing)")
            stranger.hang_up()

    run(story)


def test_speaking_for_others(tmp_path: Path) -> None:
    """An agent that reports about another's node is shown the door, whatever it reports; nothing of it is believed."""

    async def story() -> None:
        async with house(tmp_path) as here:
            kinds = [kind for kind, cls in COMMANDS.items() if "node" in cls._fields]  # type: ignore[attr-defined]
            for kind in kinds:
                stranger = await Stranger.guest(here.address)
                cls: Any = COMMANDS[kind]
                plain = {int: 1, str: "x", bool: False, bytes: b""}
                blank = [() if get_origin(hint) is tuple else plain[hint] for hint in get_type_hints(cls).values()]
                blank[cls._fields.index("node")] = "worker-0-0"
                stranger.frame(messages.encode(messages.Numbered(1, kind, tuple(blank))))
                await stranger.ended()
            assert len(kinds) >= 9
        told = here.lines("agent connection closed")
        assert len(told) == len(kinds) if len(kinds) <= 10 else 11
        assert min(len(told), 10) + here.suppressed("agent connection closed") == len(kinds)
        assert all("guest-0-0 speaks for worker-0-0" in line for line in told)

    run(story)


def test_taking_the_place_of_others(tmp_path: Path) -> None:
    """Who says Hello as a node that has an agent already is turned away, and so is who names none of this run."""

    async def story() -> None:
        async with house(tmp_path) as here:
            dialer = HttpDialer(TOKEN)
            for node, says in (("worker-0-0", "has an agent already"), ("worker-9-0", "not a node of this run")):
                connection = await dialer.connect(here.address)
                await connection.send(messages.encode(Hello(messages.VERSION, "run-1", node, 8, 0, 0)))
                goodbye = messages.decode(await connection.receive())
                assert isinstance(goodbye, Goodbye)
                assert goodbye.leave
                assert says in goodbye.reason
                with pytest.raises(ConnectionLost):
                    await connection.receive()
                await connection.close()
            await dialer.close()
            assert len(here.lines("agent turned away")) == 2

    run(story)


def test_a_thousand_bad_hellos(tmp_path: Path) -> None:
    """Who has the token and comes back a thousand times with the wrong name costs a few lines, however long the name is."""

    async def story() -> None:
        async with house(tmp_path) as here:
            dialer = HttpDialer(TOKEN)
            for number in range(1000):
                name = "\x1b[2J" + "n" * (500_000 if number < 20 else 10)
                connection = await dialer.connect(here.address)
                await connection.send(messages.encode(Hello(messages.VERSION, "run-1", name, 8, 0, 0)))
                assert isinstance(messages.decode(await connection.receive()), Goodbye)
                await connection.close()
            await dialer.close()
            told = here.lines("agent turned away")
            assert len(told) == 10
            assert all(line.isprintable() and len(line) < 2000 for line in told)

    run(story)


NESTED = b"".join(b"\xdd" + (FRAME_BYTES_MAX - 10 - level * 5).to_bytes(4, "big") for level in range(1000))
BOMBS = {
    "depth": b"\x91" * FRAME_BYTES_MAX,
    "a map of four milliards": b"\xdf\xff\xff\xff\xff" + bytes(100_000),
    "an array of four milliards": b"\xdd\xff\xff\xff\xff" + bytes(100_000),
    "arrays of a million in one another": NESTED + bytes(FRAME_BYTES_MAX - len(NESTED)),
    "a string of four gigabytes": b"\xdb\xff\xff\xff\xff" + bytes(100_000),
    "a million empty maps": b"\xdd\x00\x0f\xff\x00" + b"\x80" * 0xFFF00,
    "extensions": b"\xdd\x00\x04\x00\x00" + b"\xd4\x05a" * 0x40000,
    "a map where a tuple should be": msgpack.packb([1, {"version": 2}]),
    "a number without bounds": msgpack.packb([1, [2**64 - 1, "run-1", "guest-0-0", 9, 0, 0]]),
    "nothing": b"",
}


def test_bombs(tmp_path: Path) -> None:
    """What is small on the wire and huge when unpacked is never unpacked: a line, and the end of the connection."""

    async def story() -> None:
        async with house(tmp_path) as here:
            for bomb in BOMBS.values():
                for make in (Stranger.inside, Stranger.guest):
                    stranger = await make(here.address)
                    stranger.frame(bomb[:FRAME_BYTES_MAX])
                    await stranger.ended()
        told = here.lines("agent connection closed")
        assert len(told) == 11
        assert 10 + here.suppressed("agent connection closed") == 2 * len(BOMBS)
        assert all(line.isprintable() and len(line) < 1000 for line in told)

    run(story)


def test_the_newest_and_the_last_version_are_served(tmp_path: Path) -> None:
    """A version too old or too new is refused with one line that says what to install; the one before ours is served."""

    async def story() -> None:
        async with house(tmp_path) as here:
            dialer = HttpDialer(TOKEN)
            answers: dict[int, Message] = {}
            oldest = messages.OLDEST_VERSION
            for version in (0, oldest - 1, messages.VERSION + 1, oldest):
                connection = await dialer.connect(here.address)
                # As long as the first version's was.
                await connection.send(msgpack.packb((1, (version, "run-1", "guest-0-0", 9, 0, 0))))
                answers[version] = messages.decode(await connection.receive())
                await connection.close()
            await dialer.close()
            for version in (0, oldest - 1, messages.VERSION + 1):
                goodbye = answers[version]
                assert isinstance(goodbye, Goodbye)
                assert f"protocol {version} is not served here: {oldest} to {messages.VERSION} are" in goodbye.reason
                assert "install dlrover-core" in goodbye.reason
            welcome = answers[oldest]
            assert isinstance(welcome, Welcome)
            assert welcome.version == oldest
            told = [line for line in here.lines("agent turned away") if "level=warning" in line]
            assert len(told) == 3

    run(story)


def test_a_flood_of_beats(tmp_path: Path) -> None:
    """An agent that beats as fast as it can, and reads, is served, and keeps nobody else from being served."""

    async def story() -> None:
        async with house(tmp_path) as here:
            stranger = await Stranger.guest(here.address)
            beat = messages.encode(Beat(0, -1, 0))
            chunk = (struct.pack(">BB4x", 0x82, 0x80 | len(beat)) + beat) * 1000
            ended = asyncio.ensure_future(stranger.ended())
            assert await stranger.pour(chunk, 50) == 50
            assert not ended.done()
            stranger.hang_up()
            await ended

    run(story)

"""Foreign words at every border where words enter: the fuzz behind `test_borders` and the campaign `borders`.

A trial draws words from its seed: half characters, NUL, escape sequences, text of a hundred thousand characters, bytes that are
not UTF-8, numbers that no message holds, nested values. It sends them through each border as a worker, a host, another process or
a person would, and checks the border's promise. A word is one text, one line, one packet or one frame.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import random
import re
import shutil
import socket
import string
import tempfile
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import structlog
from tests.unit.drive import Drive

from dlrover_adapters.agent import hang_duty, kernel_log, last_words, log_watch, wire
from dlrover_adapters.agent.checkpoints import vault
from dlrover_adapters.agent.checkpoints.duty import CheckpointDuty
from dlrover_adapters.agent.doorbell import STEP_MAX, Doorbell
from dlrover_adapters.cli import meeting, read
from dlrover_adapters.cli.told import Teller
from dlrover_adapters.etcd import address
from dlrover_adapters.http import command as http_command
from dlrover_adapters.http import token as http_token
from dlrover_core.diagnosis import classify, flight, hanging, stacks
from dlrover_core.diagnosis.matching import matcher
from dlrover_core.diagnosis.signatures import table
from dlrover_core.errors import CoreError, MalformedMessage, Refused
from dlrover_core.history import Headlines, ReportBuilder, explanation_of, incident_of, render, render_story, status_of
from dlrover_core.history.plain import plain as plain_values
from dlrover_core.history.plain import record_of
from dlrover_core.history.report import report_values
from dlrover_core.job import incidents, nodes
from dlrover_core.job.orders import Order
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.engine import CommandFailed
from dlrover_core.kernel.state import digest
from dlrover_core.kernel.wire import COMMANDS
from dlrover_core.logs.place import file_name
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime import messages, operations
from dlrover_core.runtime.complaints import Complaints
from dlrover_core.runtime.launcher import TAIL_BYTES_MAX, WorkersLaunch
from dlrover_core.runtime.outbox import Outbox
from dlrover_core.runtime.transport import FRAME_BYTES_MAX
from dlrover_core.spec import JobSpec
from dlrover_core.words import TEXT_CHARS_MAX, plain, quiet_json

Counts = dict[str, int]

LONG = 100_000
NODE = "worker-0-0"
_LOUD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
PIECES = (
    "\ud800", "\udce9", "\udfff", "\x00", "\x1b[31m", "\x1b]0;title\x07", "\x1b]8;;x", "\x1b", "\x9b2J", "\x07", "\r", "\r\n",
    "\n", "\t", "\u202e", "\u2028", "\x85", "\x0b", "\x1c", "\x7f", "\ufeff", "\U0001f680", "é", "漢", "%s", "{}", "${x}",
    "'", '"', "\\", "/", "..", " ", "=", ":", "ValueError: bad", "CUDA error: uncorrectable ECC error encountered",
    "Killed process 7 (python)",
    'Traceback (most recent call last):\n  File "a.py", line 3, in f\n', "exit code 1", "rank 3", "\x1b[", "\x1bP",
)  # fmt: skip
NUMBERS = (0, -1, 1, 7, 2**31, 2**53, 2**62, 2**62 + 1, 2**63 - 1, -(2**63), 2**64 - 1)


class Draw:
    """What one trial draws, and how many words that were."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.words = 0

    def text(self, *, long: bool = True) -> str:
        """Any text that a Python string may hold."""
        self.words += 1
        kind = self.random.random()
        if long and kind < 0.01:
            return self.random.choice(PIECES) * (LONG // 4) + "x" * self.random.choice((1, LONG))
        if kind < 0.15:
            return "".join(chr(self.random.randrange(0x110000)) for _ in range(self.random.randrange(12)))
        ordinary = string.ascii_letters + string.digits
        return "".join(
            self.random.choice(PIECES) if self.random.random() < 0.5 else self.random.choice(ordinary)
            for _ in range(self.random.randrange(16))
        )

    def name(self) -> str:
        """As the kernel hands it to Python: bytes without NUL, decoded as file names are."""
        raw = self.raw(long=False)[:200].replace(b"\0", b"")
        return os.fsdecode(raw)

    def raw(self, *, long: bool = True) -> bytes:
        """Any bytes."""
        if self.random.random() < 0.5:
            self.words += 1
            return self.random.randbytes(self.random.randrange(40))
        return self.text(long=long).encode("utf-8", "surrogatepass")

    def number(self) -> int:
        """Any number that msgpack holds."""
        return self.random.choice(NUMBERS)

    def value(self, depth: int = 3) -> Any:
        """Any value that msgpack and JSON hold."""
        kind = self.random.randrange(8 if depth else 5)
        if kind < 2:
            return self.text(long=False)
        if kind == 2:
            return self.number()
        if kind == 3:
            return self.random.choice((None, True, False, 0.5, -1e300))
        if kind == 4:
            return self.random.choice(
                ("restored", "keeping", "alarm", "lost", "saved", "acked", "hello", "memory", 3, 2, 1, 0)
            )
        if kind == 5:
            return {self.text(long=False): self.value(depth - 1) for _ in range(self.random.randrange(4))}
        return [self.value(depth - 1) for _ in range(self.random.randrange(4))]

    def of(self, hint: Any) -> Any:
        """A value of a field's declared type."""
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if hint is str:
            return self.text()
        if hint is bytes:
            return self.random.randbytes(self.random.randrange(40))
        if hint is int:
            return self.number() if self.random.random() < 0.3 else self.random.randrange(4)
        if hint is bool:
            return self.random.random() < 0.5
        if hint is float:
            return 0.5
        if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
            return tuple(self.of(args[0]) for _ in range(self.random.randrange(3)))
        if origin is tuple:
            return tuple(self.of(one) for one in args)
        raise TypeError(f"no value of {hint}")

    def command(self) -> Any:
        """What an agent reports, in foreign words."""
        cls: Any = self.random.choice(list(COMMANDS.values()))
        hints = _hints(cls)
        fields = {name: self.of(hints[name]) for name in cls._fields}
        if self.random.random() < 0.8 and "generation" in fields:
            fields["generation"] = 1
        return cls(**{**fields, "node": NODE}) if "node" in fields else cls(**fields)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def quiet(value: Any) -> None:
    """Nothing in it is what cannot be encoded, or what a terminal obeys."""
    if isinstance(value, str):
        value.encode()
        assert _LOUD.search(value) is None, f"{value[:80]!r} is not plain"
        assert len(value) <= TEXT_CHARS_MAX
    elif isinstance(value, dict):
        quiet([*value.keys(), *value.values()])
    elif isinstance(value, (tuple, list)):
        for one in value:
            quiet(one)


# ---- the borders


def texts(draw: Draw) -> None:
    """`plain` is plain, bounded, the same when it is done again, and leaves ordinary text alone."""
    for _ in range(10):
        word, bound = draw.text(), draw.random.choice((0, 1, 5, 80, TEXT_CHARS_MAX))
        bare = plain(word, bound)
        quiet(bare)
        assert len(bare) <= bound
        assert plain(bare, bound) == bare
        if word.isascii() and word.isprintable() and len(word) <= bound:
            assert bare == word


class Wire:
    """An agent's outbox, the wire, and the engine and log of a master, over one job."""

    def __init__(self) -> None:
        self.job = Drive(nodes_min=1, nodes_max=1, nproc=2).up()
        self.outbox = Outbox()

    def report(self, command: Any, version: int) -> None:
        """As an agent of ``version`` reports it and the master takes it. Raises AssertionError where that does not work."""
        self.outbox.add(command)
        item = self.outbox.next()
        assert item is not None
        frame = messages.encode(messages.numbered(*item, version), version)
        assert len(frame) <= FRAME_BYTES_MAX
        self.outbox.answered(item[0])
        self.take(frame)

    def take(self, frame: bytes) -> None:
        """What the master does with a frame. Raises `MalformedMessage`."""
        message = messages.decode(frame)
        if not isinstance(message, messages.Numbered):
            return
        command: Any = messages.command_of(message)
        quiet(command)
        if getattr(command, "node", NODE) == NODE:
            self.job.do(command)

    def check(self) -> None:
        """Every record is in the log as it was decided, and nothing failed to be."""
        failed = [record.event for record in self.job.records if isinstance(record.event, CommandFailed)]
        assert not failed, failed[:3]
        stored = [record for batch in self.job.batches for record in CODEC.decode(batch.payload).records]
        assert stored == self.job.records
        assert digest(MODEL.fold(stored)) == digest(self.job.state)


def reports(draw: Draw, job: Wire) -> None:
    """Whatever an agent reports is a frame, reaches the master as plain text, and is recorded or refused."""
    for _ in range(12):
        job.report(draw.command(), draw.random.randint(messages.OLDEST_VERSION, messages.VERSION))
    death = incidents.ReportExit(NODE, 1, 0, 1, False, 3, 0, draw.text(), draw.text(), draw.text(), draw.text())
    job.report(death, messages.VERSION)
    for cls in (messages.Hello, messages.Goodbye):
        hints = _hints(cls)
        told = cls(*(draw.of(hints[name]) for name in cls._fields))
        with contextlib.suppress(MalformedMessage, OverflowError):  # of a number; a word that is refused may not raise
            quiet(
                messages.decode(
                    messages.encode(told._replace(version=messages.VERSION) if cls is messages.Hello else told)
                )
            )


def frames(draw: Draw, job: Wire) -> None:
    """Bytes on the wire are a message or are refused by `MalformedMessage`; strangers' texts come in plain."""
    for _ in range(8):
        if draw.random.random() < 0.5:
            frame = bytearray(msgpack.packb([draw.random.randrange(12), draw.value()], unicode_errors="surrogatepass"))
            for _ in range(draw.random.randrange(3)):
                frame[draw.random.randrange(len(frame))] = draw.random.randrange(256)
            sent = bytes(frame)
        else:
            cls: Any = type(draw.command())
            kind = next(number for number, one in COMMANDS.items() if one is cls)
            sent = msgpack.packb([4, [draw.random.randrange(9), kind, draw.value()]], unicode_errors="surrogatepass")
        draw.words += 1
        with contextlib.suppress(MalformedMessage):
            job.take(sent)


def backend(draw: Draw, job: Wire) -> None:
    """What a platform says of a node is recorded as plain text."""
    phase = draw.random.choice(("pending", "running", "failed", "gone", draw.text()))
    job.job.observe(NODE, phase, draw.random.randrange(3), draw.text(), draw.name())
    seen = nodes.Observed("worker-9-0", "running", 0, draw.text(), draw.name(), draw.text())
    job.job.listed(seen)


def people(draw: Draw, job: Wire) -> None:
    """What people send over HTTP is done, refused or no command; the answer is JSON."""

    async def obey(asked: object) -> int:
        command = operations.command_of(asked)
        reply = job.job.do(command)
        if getattr(reply, "reason", ""):
            raise Refused(cast(Any, reply).reason)
        return 1

    for _ in range(4):
        asked = draw.value()
        if draw.random.random() < 0.7:
            asked = {"command": draw.random.choice(["drain", "scale", "quarantine", "release", "suspend", "resume"])}
            names = draw.random.sample(["node", "reason", "host", "group", "nodes_max", "hosts", draw.text()], 3)
            asked |= {name: draw.value(1) for name in names}
        body = json.dumps(asked).encode()
        if draw.random.random() < 0.2:
            body = draw.raw() or b"x"
        draw.words += 1
        status, answer = asyncio.run(http_command.answer_to(body, obey, "peer"))
        assert status in {200, 400, 409, 413}, answer
        json.loads(answer)


def dead_workers(draw: Draw, folder: Path) -> None:
    """Last words of any kind are plain, bounded, and known by a signature or by none."""
    files = SimpleNamespace(
        stderr=SimpleNamespace(path=str(folder / "err")),
        stdout=SimpleNamespace(path=str(folder / "out")),
        error=str(folder / "error"),
    )
    for _ in range(4):
        (folder / "err").write_bytes(draw.raw())
        extra = {"timestamp": draw.random.choice(["1700000000", "9" * 400, draw.text()]), "py_callstack": draw.text()}
        message: Any = {"message": draw.text(), "extraInfo": draw.random.choice([extra, draw.value()])}
        told: Any = draw.random.choice([{"message": message}, {"message": draw.text()}, draw.value()])
        body = json.dumps(told).encode() if draw.random.random() < 0.8 else b"[" * 100_000
        (folder / "error").write_bytes(body)
        words = last_words.last_words(cast(Any, files))
        quiet((words.tail, words.error))
        assert len(words.tail.encode()) <= TAIL_BYTES_MAX
        assert len(words.error.encode()) <= TAIL_BYTES_MAX
        found = classify.of_exit(table(""), draw.random.choice((1, -9, -6, 137)), words.error, words.tail)
        classify.place_of(words.trace[:4096])
        str(found).encode()


def lines(draw: Draw) -> None:
    """Lines of output and of the kernel's log are read, and what is matched in them is text."""
    output = b"\n".join([*(draw.raw(long=False) for _ in range(60)), draw.raw()])
    text = log_watch.lines_of(output)
    for hit in matcher(table("")).scan(text):
        hit.line.encode()
        hit.subject.encode()
    for _ in range(6):
        head = draw.random.choice([b"3,10,5,-;", b"3,10,5;", b"", b"9" * 30 + b",1,1;"])
        line = kernel_log.parsed(head + draw.raw())
        if line is not None:
            line.text.encode()
            kernel_log.Ours("/x").keeps(line.text, {7: 0})


def looks(draw: Draw, folder: Path) -> None:
    """Stacks and dumps of any kind are facts or nothing, fit into a report, and are written down."""
    for _ in range(3):
        stack = stacks.main_thread(
            draw.text() + f'\nThread 0x1 (most recent call first):\n  File "{draw.text()}", line 3 in f'
        )
        entry = {
            "process_group": [draw.value(0)],
            "collective_seq_id": draw.value(0),
            "is_p2p": False,
            "state": draw.value(0),
        }
        dump = json.dumps(draw.random.choice([{"entries": [entry]}, draw.value()]))
        groups = flight.newest(dump)
        facts = hanging.Facts(0, draw.text()[:1], draw.text(), stack=stack, source=draw.text(), groups=groups)
        shown = hanging.to_text(facts)
        assert len(shown.encode()) <= hanging.FACTS_BYTES_MAX
        hanging.from_text(shown)
        hanging.from_text(json.dumps(draw.value()))
        duty = hang_duty.HangDuty(cast(Any, None), str(folder / "hangs"))
        assert duty._keep(NODE, 1, [draw.text(), str(facts)])


def packets(draw: Draw) -> None:
    """A worker's packets are understood, answered, or end its connection; the agent goes on."""

    async def test() -> None:
        faults: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: faults.append(context))
        said: list[str] = []
        keeps: Any = SimpleNamespace(vault=None, saving=None)
        duty = CheckpointDuty(keeps, token=b"", host="h", bind="", say=said.append)
        duty._site = cast(Any, SimpleNamespace(keeping=None))
        box = vault.Vault("/nonexistent")
        box.launch = WorkersLaunch("run", 1, 0, 1, 1, 0, 1, "h:1", 0, 3, node=NODE)
        box.listener = duty
        for _ in range(6):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                ours.setblocking(False)
                box._open[ours] = caller = vault.Caller(1, 0, 0, 1)
                duty._ranks.generation, duty._ranks.callers = 1, {0: caller}
                for _ in range(3):
                    _send(theirs, _packet(draw))
                    if ours in box._open:
                        box._hear(ours)
                        await asyncio.sleep(0)
                if ours in box._open:
                    box._hang_up(ours)
        assert not faults, faults
        quiet(said)
        rung: list[int] = []
        bell = Doorbell("/nonexistent", lambda _generation, _rank, step, _told, _imports: rung.append(step))
        for _ in range(6):
            body = {"generation": draw.number(), "rank": draw.number(), "step": draw.number(), "told": True}
            bell._understood(cast(Any, None), wire.pack(body if draw.random.random() < 0.5 else {"x": draw.value()}))
            bell._understood(cast(Any, None), draw.raw())
        assert all(step <= STEP_MAX for step in rung)

    asyncio.run(test())


def _packet(draw: Draw) -> bytes:
    draw.words += 1
    kind = draw.random.random()
    if kind < 0.15:
        return draw.raw()
    verbs = [
        "restored",
        "keeping",
        "alarm",
        "lost",
        "saved",
        "acked",
        "boundary",
        "hello",
        "ready",
        "borrow",
        draw.value(),
    ]
    op = draw.random.choice(verbs)
    body: dict[str, Any] = {
        "op": op,
        "n": draw.value(0),
        "words": draw.random.choice((draw.value(), _deep())),
        "id": draw.value(0),
    }
    body |= {"step": draw.value(0), "tier": draw.value(), "took_us": 1, "fell": draw.value(), "plan": draw.value(0)}
    if kind < 0.4:
        body |= {
            "url": draw.text(),
            "format": draw.text(),
            "local": draw.text(),
            "every": 1,
            "store_every": 1,
            "keep": 1,
        }
        body |= {"planned": True, "node_bytes": draw.number(), "writes": True, "step": 1, "tier": "memory"}
    return wire.pack(body)


def _deep() -> Any:
    value: Any = []
    for _ in range(400):
        value = [value]
    return value


def _send(line: socket.socket, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # larger than the kernel takes: it stays the worker's error
        line.send(packet or b"x")


def arguments(draw: Draw) -> None:
    """Arguments, paths and environments reach workers byte by byte."""
    ours, theirs = wire.pair()
    with ours, theirs:
        for _ in range(4):
            body = {"argv": [draw.name() for _ in range(4)], "env": {draw.name(): draw.name()}}
            wire.send(ours, body)
            frame = wire.receive(theirs)
            assert frame is not None
            assert frame.body == body


NAMES: tuple[Callable[[str], object], ...] = (
    lambda text: address.parse(f"etcd://{text}"),
    lambda text: address.parse(f"etcd://h:1/{text}?ttl={text}"),
    meeting.parse_conf,
    lambda text: meeting.parse_endpoint("rdzv-endpoint", text),
    lambda text: http_token._checked(text, "DLROVER_TOKEN"),
    http_token.shown,
    lambda text: http_token.same(text, "x"),
    file_name,
    JobSpec,
    lambda text: JobSpec("j", on_join=text),
)


def names(draw: Draw) -> None:
    """A name, address or option is taken or refused by one of our errors."""
    for _ in range(6):
        word = draw.random.choice((draw.text, draw.name))()
        with contextlib.suppress(CoreError):
            draw.random.choice(NAMES)(word)


def terminal(draw: Draw, job: Wire, folder: Path) -> None:
    """Of a log with foreign words every line and JSON is plain: events, reports, stories, what the launcher says."""
    records = job.job.records
    told, headlines, builder, state = [], Headlines(), ReportBuilder(), MODEL.new()
    with (folder / "said").open("wb", buffering=0) as said:
        teller = Teller("j", said.fileno())
        for record in records:
            MODEL.apply(state, record)
            news = headlines.feed(state, record)
            builder.feed(record)
            teller.committed(state, [record])
            told.append(render.event_line(record, records[0].at, news=news))
            _json(read.as_line(record_of(record)))
    told += (folder / "said").read_bytes().decode().splitlines()
    report = builder.report(records[-1].at + 5)
    told += [render.report(report), render.status(status_of(state, records[-1], headlines), records[-1].at)]
    _json(read.as_json(report_values(report)))
    _json(read.as_json(plain_values(status_of(state, records[-1], headlines))))
    story, explained = incident_of(records, 0), explanation_of(records, draw.random.choice(records).seq)
    told += [render_story.story(story)] if story is not None else []
    told += [render.explanation(explained)] if explained is not None else []
    for text in told:
        text.encode()
        assert _LOUD.search(text) is None, f"{text[:200]!r} is obeyed by a terminal"


def _json(text: str) -> None:
    text.encode()
    assert _SHOWN.search(text) is None, f"{text[:200]!r} is obeyed by a terminal"
    json.loads(text)


def control_log(draw: Draw) -> None:
    """A line of the control log holds any word, and stays one line; JSON of foreign words can be printed."""
    renderer = structlog.processors.LogfmtRenderer(key_order=("event",))
    heard: list[dict[str, Any]] = []
    for _ in range(4):
        assert "\n" not in renderer(None, "info", {"event": draw.text(), "reason": draw.text()})
        value = draw.value()
        _json(quiet_json(json.dumps(value, ensure_ascii=False)))
        # Two halves of one character become that character: JSON has no other way to say it.
        assert json.dumps(json.loads(read.as_line(value))) == json.dumps(value)

    async def complain() -> None:
        say = SimpleNamespace(warning=lambda event, **words: heard.append(words))
        complaints = Complaints(say)
        complaints.warning("x", name=draw.text(), reason=draw.text())
        complaints.close()

    asyncio.run(complain())
    quiet([list(one.values()) for one in heard])


def orders(draw: Draw) -> None:
    """An order or a goodbye in any words can be sent."""
    for _ in range(4):
        # A reason is bounded where it is recorded.
        order = Order(leave=True, reason=draw.text()[:500], grace_us=5)
        frame = messages.encode(messages.level(7, order))
        decoded = messages.decode(frame)
        assert isinstance(decoded, messages.Level)
        messages.order_of(decoded)


@functools.cache
def _folder() -> Path:
    root = Path(tempfile.mkdtemp(prefix="borders-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def trial(seed: int) -> Counts:
    """One pass over all borders. How many words were sent; raises what broke."""
    draw = Draw(seed)
    folder = _folder()
    with _logs_nothing():
        for border in (texts, lines, packets, arguments, names, control_log, orders):
            border(draw)
        dead_workers(draw, folder)
        looks(draw, folder)
        job = asyncio.run(_job(draw))
        people(draw, job)
        job.check()
        terminal(draw, job, folder)
    return {"words": draw.words}


async def _job(draw: Draw) -> Wire:
    job = Wire()
    reports(draw, job)
    frames(draw, job)
    backend(draw, job)
    return job


@contextlib.contextmanager
def _logs_nothing() -> Iterator[None]:
    """Whatever is logged is dropped; a traceback fails the trial."""
    before = structlog.get_config()
    structlog.configure(processors=[_no_traceback])
    try:
        yield
    finally:
        structlog.configure(**before)


def _no_traceback(_logger: object, _method: str, words: Any) -> Any:
    assert not words.get("exc_info"), f"a traceback is logged: {words}"
    assert "where" not in words, f"a duty failed: {words}"
    raise structlog.DropEvent

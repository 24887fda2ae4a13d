"""The agent's socket for data: workers and their loader processes draw shards of leased datasets here, and say what was used.

One packet socket, ``data.sock`` beside the agent's own, one msgpack map per packet. A session is a connection: whoever dials is
one of the workers that run, or a process that one of them has made, and its end is seen at once, however it came. What a session
had not acknowledged by then is handed out again.

A draw is answered with a shard, with the end of the data, or after a while with why there is nothing yet. Then the worker draws
again: so it never waits without a word, and an agent that dies is noticed. A worker whose draw was interrupted, by a signal or a
time-out, says so with its next one (``lost``: the number of the first draw whose answer it did not get), and gets that shard.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import structlog

from dlrover_core.data.ranges import POSITION_MAX, Span
from dlrover_core.job.shards import Terms
from dlrover_core.runtime.checked import checked

from . import wire
from .packet_server import Nonsense, PacketServer

NAME = "data.sock"
PACKET_BYTES_MAX = 80 * 1024
CONNECTIONS_MAX = 2048
WAIT_S_MAX = 30.0
SHARD_MAX = 2**31
ACKS_MAX = 1024
"""Ranges in one packet."""
TEXT_MAX = 1000
RESTORED_S = 5.0
"""Whoever says where its generation goes on waits so long for the leader's word; those who draw hear a later one."""

log = structlog.get_logger("dlrover.agent")


class Refused(Exception):
    """The answer is no; the words are for people."""


class Session(NamedTuple):
    """Who is at the other end: a worker, or a process of it. ``number``: of the connection; no two are alike."""

    number: int
    generation: int
    rank: int
    local_rank: int
    pid: int


class Drawn(NamedTuple):
    """The answer to a draw: a shard, or the end; neither: there is nothing yet."""

    span: Span | None = None
    ended: bool = False


class Counter(Protocol):
    """Whoever has the shards. All of it returns at once."""

    def opened(self, session: Session, terms: Terms, shard: int) -> None:
        """The session draws from this dataset, ``shard`` samples at a time. Raises `Refused`."""

    def draw(self, session: Session, dataset: str, most: int) -> Drawn:
        """Hand a shard out. Raises `Refused`."""

    def acked(self, session: Session, dataset: str, spans: Sequence[Span]) -> None:
        """These positions were used, whoever of the node says so."""

    def returned(self, session: Session, dataset: str, spans: Sequence[Span]) -> None:
        """The session has drawn these and not used them, and others are to have them."""

    def claim(self, session: Session, dataset: str, span: Span, holder: int) -> bool:
        """Its rank takes what the session of number ``holder`` has in hand; False: that one has it no more."""

    def restored(
        self, session: Session, terms: Terms, state: tuple[int, int], spans: bytes, answer: Callable[[str], None]
    ) -> None:
        """The session's generation has resumed from a state, generation and step, that was trained on ``spans``, packed.

        ``answer`` hears what the leader says: why not, or nothing. Raises `Refused`.
        """

    def why(self, dataset: str) -> str:
        """Why there is nothing to draw now."""

    def gone(self, session: Session, why: str) -> None:
        """The session is over."""


class _Wait(NamedTuple):
    number: int
    dataset: str
    most: int
    timer: asyncio.TimerHandle


class _Given(NamedTuple):
    """The newest shard of a session and a dataset, and the number of the draw that it was the answer to."""

    number: int
    span: Span


class DataSocket(PacketServer[Session]):
    """Listens at ``folder``/data.sock, mode 0600."""

    def __init__(self, folder: str) -> None:
        super().__init__(os.path.join(folder, NAME), connections_max=CONNECTIONS_MAX, packet_bytes_max=PACKET_BYTES_MAX)
        self.counter: Counter | None = None
        self._waits: dict[socket.socket, _Wait] = {}
        self._given: dict[socket.socket, dict[str, _Given]] = {}
        self._resuming: dict[socket.socket, tuple[int, asyncio.TimerHandle]] = {}
        self._numbers = 0

    def close(self) -> None:
        """Hang up on everybody. Idempotent."""
        for one in list(self._open):
            self._hang_up(one, "its agent ends")
        self._listener.close()

    @property
    def sessions(self) -> list[Session]:
        """Those that there are."""
        return [one for one in self._open.values() if one is not None]

    def over(self, generation: int, local_rank: int | None, why: str) -> None:
        """A worker has ended, or all of a generation (None): so have the processes that it has made. Their last words count."""
        self.catch_up()
        for line, one in list(self._open.items()):
            if one is not None and one.generation == generation and local_rank in (None, one.local_rank):
                self._hang_up(line, why)

    def serve(self) -> None:
        """There may be something for those that wait, first come, first served."""
        for line, wait in list(self._waits.items()):
            self._serve(line, wait)

    @property
    def waiting(self) -> set[str]:
        """The datasets that somebody waits for."""
        return {wait.dataset for wait in self._waits.values()}

    # ---- packets

    def _understood(self, line: socket.socket, body: dict[str, Any]) -> None:
        """Do what a packet says. Raises `Nonsense`, `MalformedMessage`."""
        op, session = body.get("op"), self._open[line]
        try:
            if op == "draw" and session is not None:
                self._draw(line, session, body)
            elif op == "acked" and session is not None:
                self._acked(session, body)
            elif op == "returned" and session is not None:
                self._counter().returned(session, _text(body, "dataset"), list(_spans(body.get("spans"))))
            elif op == "claim" and session is not None:
                self._claim(line, session, body)
            elif op == "restored" and session is not None:
                self._restored(line, session, body)
            elif op == "open" and session is not None:
                self._opened(line, session, body)
            elif op == "hello" and session is None:
                self._hello(line, body)
            else:
                raise Nonsense
        except Refused as refused:
            if "n" not in body:
                return  # who waits for no answer would take it for that of its next question
            self._send(line, _number(body), {"error": str(refused)[:TEXT_MAX]})

    def _hello(self, line: socket.socket, body: dict[str, Any]) -> None:
        rank, local_rank, pid = (_int(body, name) for name in ("rank", "local_rank", "pid"))
        launch = self.launch
        if launch is None:
            raise Refused("no workers run here")
        if rank != launch.first_rank + local_rank or local_rank >= launch.nproc:
            raise Refused(
                f"rank {rank} (local rank {local_rank}) is not one of this agent's workers: ranks {launch.first_rank} to "
                f"{launch.first_rank + launch.nproc - 1} are"
            )
        self._numbers += 1
        self._open[line] = Session(self._numbers, launch.generation, rank, local_rank, pid)
        answer = {"node": launch.node, "generation": launch.generation, "session": self._numbers}
        self._send(line, _number(body), answer)

    def _opened(self, line: socket.socket, session: Session, body: dict[str, Any]) -> None:
        terms, shard = body.get("terms"), _int(body, "shard")
        if not isinstance(terms, list) or not 0 < shard <= SHARD_MAX:
            raise Nonsense
        self._counter().opened(session, checked(Terms, tuple(terms)), shard)
        self._send(line, _number(body), {})

    def _acked(self, session: Session, body: dict[str, Any]) -> None:
        spans = list(_spans(body.get("spans", [])))
        if spans:
            self._counter().acked(session, _text(body, "dataset"), spans)

    def _claim(self, line: socket.socket, session: Session, body: dict[str, Any]) -> None:
        spans = list(_spans(body.get("span")))
        if len(spans) != 1:
            raise Nonsense
        taken = self._counter().claim(session, _text(body, "dataset"), spans[0], _int(body, "holder"))
        self._send(line, _number(body), {"taken": taken})

    def _restored(self, line: socket.socket, session: Session, body: dict[str, Any]) -> None:
        terms, spans, state = body.get("terms"), body.get("spans"), (_int(body, "of"), _int(body, "step"))
        if not isinstance(terms, list) or not isinstance(spans, bytes):
            raise Nonsense
        number, known = _number(body), checked(Terms, tuple(terms))
        self._end_resuming(line)
        answer = partial(self._resumed, line, number)
        self._resuming[line] = number, asyncio.get_running_loop().call_later(RESTORED_S, answer, "")
        try:
            self._counter().restored(session, known, state, spans, answer)
        except Refused as refused:
            answer(str(refused))

    def _resumed(self, line: socket.socket, number: int, refused: str) -> None:
        """Answer, once, whoever has said where its generation goes on."""
        if (resuming := self._resuming.get(line)) is not None and resuming[0] == number:
            self._end_resuming(line)
            self._send(line, number, {"error": refused[:TEXT_MAX]} if refused else {})

    def _end_resuming(self, line: socket.socket) -> None:
        if resuming := self._resuming.pop(line, None):
            resuming[1].cancel()

    def _draw(self, line: socket.socket, session: Session, body: dict[str, Any]) -> None:
        self._acked(session, body)
        dataset, most, within_s = _text(body, "dataset"), _int(body, "most"), body.get("within_s", 1.0)
        if not 0 < most <= SHARD_MAX or not isinstance(within_s, (int, float)) or not 0 <= within_s <= WAIT_S_MAX:
            raise Nonsense
        self._end_wait(line)  # of a draw that was interrupted: whoever draws twice at a time has two sessions
        given, lost = self._given.get(line, {}).get(dataset), _int({"lost": 0, **body}, "lost")
        again = given is not None and 0 < lost <= given.number
        drawn = Drawn(given.span) if given and again else self._counter().draw(session, dataset, most)
        if drawn.span is not None or drawn.ended:
            self._answer(line, _number(body), dataset, drawn)
        else:
            timer = asyncio.get_running_loop().call_later(within_s, self._waited, line)
            self._waits[line] = _Wait(_number(body), dataset, most, timer)

    def _serve(self, line: socket.socket, wait: _Wait) -> None:
        session = self._open.get(line)
        if session is None or self._waits.get(line) is not wait:
            return
        try:
            drawn = self._counter().draw(session, wait.dataset, wait.most)
        except Refused as refused:
            self._end_wait(line)
            self._send(line, wait.number, {"error": str(refused)[:TEXT_MAX]})
            return
        if drawn.span is not None or drawn.ended:
            self._end_wait(line)
            self._answer(line, wait.number, wait.dataset, drawn)

    def _waited(self, line: socket.socket) -> None:
        wait = self._end_wait(line)
        if wait is not None:
            self._send(line, wait.number, {"wait": self._counter().why(wait.dataset)[:TEXT_MAX]})

    def _end_wait(self, line: socket.socket) -> _Wait | None:
        wait = self._waits.pop(line, None)
        if wait is not None:
            wait.timer.cancel()
        return wait

    def _answer(self, line: socket.socket, number: int, dataset: str, drawn: Drawn) -> None:
        if drawn.span is not None:
            self._given.setdefault(line, {})[dataset] = _Given(number, drawn.span)
        self._send(line, number, {"end": True} if drawn.span is None else {"span": list(drawn.span)})

    def _send(self, line: socket.socket, number: int, answer: dict[str, Any]) -> None:
        try:
            line.send(wire.pack({**answer, "n": number}))
        except OSError:  # it is gone, or asks and never reads
            self._hang_up(line, "its process ended")

    def _gone(self, line: socket.socket, caller: Session | None, why: str, /) -> None:
        self._end_wait(line)
        self._end_resuming(line)
        self._given.pop(line, None)
        if caller is not None and self.counter is not None:
            self.counter.gone(caller, why)

    def _counter(self) -> Counter:
        if self.counter is None:
            raise Refused("this agent has not joined its job yet: try again")
        return self.counter


def _number(body: dict[str, Any]) -> int:
    return _int({"n": 0, **body}, "n")


def _int(body: dict[str, Any], name: str) -> int:
    found = body.get(name)
    if type(found) is not int or not 0 <= found < 2**62:
        raise Nonsense
    return found


def _text(body: dict[str, Any], name: str) -> str:
    found = body.get(name)
    if not isinstance(found, str):
        raise Nonsense
    return found


def _spans(said: Any) -> Iterator[Span]:
    """Ranges, as starts and ends in turn."""
    if not isinstance(said, list) or len(said) % 2 or len(said) > 2 * ACKS_MAX:
        raise Nonsense
    if not all(type(one) is int and 0 <= one <= POSITION_MAX for one in said):
        raise Nonsense
    for start, end in zip(said[::2], said[1::2], strict=True):
        if start >= end:
            raise Nonsense
        yield Span(start, end)

"""Leased samples, drawn in shards from the agent: for workers that keep their own pace. No torch is needed.

    work = LeasedIndices("eval", size=len(source), shard=32)
    for shard in work:                      # a worker gets the next shard when it asks, so fast ones get more
        for index in shard.indices:
            write(index, model(source[index]))

A shard counts as used when the next one is asked for, in this loop or in another, or at `LeasedIndices.done`. What a worker that
dies had drawn and not used is drawn by others; a sample that it had used, but not said so, is used again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgpack

from dlrover_adapters.data.following import announced
from dlrover_adapters.data.index_file import say
from dlrover_adapters.data.orders import order_of
from dlrover_core.data.cut import NAME_CHARS_MAX
from dlrover_core.data.permutation import SHUFFLED, WINDOW
from dlrover_core.data.ranges import POSITION_MAX, Ranges, Span
from dlrover_core.data.terms import LEASE, NUMBER_MAX, SEED_MASK, Terms
from dlrover_core.errors import CoreError, SpecError

SOCKET_VARIABLE, PATH_NAME = "DLROVER_AGENT_SOCKET", "data.sock"
PACKET_BYTES_MAX = 80 * 1024
WAIT_S = 1.0
"""A wait is made of parts of this length."""
ANSWER_S = 60.0
"""An agent that answers nothing for so long is given up; one that is dead hangs up."""
TOLD_S = 60.0
ACKS_MAX = 1024
SHARD_MAX = 2**31
_LINES: weakref.WeakSet[LeaseLine] = weakref.WeakSet()
_FORKS: list[int] = []


class DataGone(CoreError):
    """The agent, which hands out the samples, is gone or does not answer. It takes its workers with it."""


class Wait(NamedTuple):
    """There is nothing to draw now; why, in words."""

    why: str


class LeaseLine:
    """This process's line to the agent, one for each dataset. Made where it is first needed; a forked child makes its own."""

    def __init__(self) -> None:
        """Dial. Raises `SpecError` where no agent of ours runs this process, `DataGone`."""
        path = _path()
        if path is None or not path.exists():
            raise SpecError(
                "assign",
                '"lease" needs an agent that hands out samples, and this process has none: start the script with dlrover-run',
            )
        self.pid, self._opened, self._lost = os.getpid(), dict[str, Terms](), dict[str, int]()
        self._drawn: dict[str, int] = {}  # of the newest draw that was answered, its number
        self._numbers, self._lock = itertools.count(1), threading.Lock()
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _close_in_children()
        _LINES.add(self)
        try:
            self._line.settimeout(ANSWER_S)
            self._line.connect(str(path))
            rank, local_rank = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK"))
        except (OSError, KeyError, ValueError) as error:
            self._line.close()
            raise DataGone(f"no agent hands out samples at {path}: {error}") from error
        try:
            answer = self._ask({"op": "hello", "rank": rank, "local_rank": local_rank, "pid": self.pid})
            self.session = int(answer.get("session", 0))
        except BaseException:
            self._line.close()
            raise

    def open(self, terms: Terms, shard: int) -> None:
        """Draw from this dataset from now on. Raises `SpecError` where the job has another one of that name, `DataGone`."""
        known = self._opened.get(terms.name)
        if known is None:
            self._ask({"op": "open", "terms": list(terms), "shard": shard})
            self._opened[terms.name] = terms
        elif known != terms:
            had, has = (f"{one}, epochs {one.epochs}" for one in (known, terms))
            raise SpecError(
                "name",
                f"{terms.name!r} of two leased datasets in one process: one has {had}; the other has {has}: give it another name",
            )

    def draw(self, dataset: str, most: int, acked: Sequence[Span] = (), within_s: float = WAIT_S) -> Span | Wait | None:
        """The next positions, ``most`` at most, after ``acked`` were used; None: all of the data were used. Raises `DataGone`.

        A draw that is interrupted, by whatever exception, loses nothing until it returns: the next one gets the positions that
        were its answer. Whoever is interrupted before it has put these away calls `not_taken`.
        """
        self._drawn.pop(dataset, None)
        for first in range(0, max(0, len(acked) - ACKS_MAX), ACKS_MAX):
            self.acked(dataset, acked[first : first + ACKS_MAX])
        spans = _flat(acked[-(len(acked) % ACKS_MAX or ACKS_MAX) :])
        body = {"op": "draw", "dataset": dataset, "most": most, "spans": spans, "within_s": within_s}
        try:
            with announced():
                answer = self._ask(body, draws=dataset)
            if "span" in answer:
                return Span(*answer["span"])
            return None if answer.get("end") else Wait(str(answer.get("wait", "")))
        except BaseException:
            self.not_taken(dataset)
            raise

    def not_taken(self, dataset: str) -> None:
        """Let the next draw get what the newest one was answered, if that is known here."""
        if number := self._drawn.pop(dataset, 0):
            self._lost.setdefault(dataset, number)

    def acked(self, dataset: str, spans: Sequence[Span]) -> None:
        """These were used. Raises `DataGone`."""
        self._say("acked", dataset, spans)

    def returned(self, dataset: str, spans: Sequence[Span]) -> None:
        """These were drawn here and not used, and others are to have them. Raises `DataGone`."""
        self._say("returned", dataset, spans)

    def _say(self, op: str, dataset: str, spans: Sequence[Span]) -> None:
        for first in range(0, len(spans), ACKS_MAX):
            packet = {"op": op, "dataset": dataset, "spans": _flat(spans[first : first + ACKS_MAX])}
            with self._lock:
                try:
                    self._line.send(_packed(packet))
                except OSError as error:
                    raise DataGone(f"the agent, which hands out samples, is gone: {error}") from error

    def claim(self, dataset: str, span: Span, holder: int) -> bool:
        """Take what the session ``holder`` has drawn; False: it has it no more, so others use it. Raises `DataGone`."""
        answer = self._ask({"op": "claim", "dataset": dataset, "span": list(span), "holder": holder})
        return answer.get("taken") is True

    def restored(self, terms: Terms, of: int, step: int, spans: Ranges) -> None:
        """This generation goes on from ``step`` of generation ``of``, whose model was trained on ``spans``.

        Raises `SpecError` where the job has another dataset of that name, `DataGone`.
        """
        self._ask({"op": "restored", "terms": list(terms), "of": of, "step": step, "spans": spans.pack()})

    def close(self) -> None:
        """Hang up: what was drawn and not acknowledged goes to others. Idempotent."""
        self._line.close()

    def _ask(self, body: dict[str, Any], draws: str = "") -> dict[str, Any]:
        with self._lock:
            number = next(self._numbers)
            if draws:
                body = {**body, "lost": self._lost.get(draws, 0)}
                self._lost.setdefault(draws, number)  # until its answer is here
            try:
                self._line.send(_packed({**body, "n": number}))
                answer = self._answer_to(number)
            except (OSError, ValueError) as error:
                why = f"{type(error).__name__}: {error}" if str(error) else "it hung up"
                raise DataGone(f"the agent, which hands out samples, does not answer {body['op']!r}: {why}") from error
            if not isinstance(answer, dict) or answer.get("n") != number:
                raise DataGone(f"the agent's answer to {body['op']!r} makes no sense")
            if draws:
                self._drawn[draws] = self._lost[draws]
                del self._lost[draws]
        if "error" in answer:
            raise SpecError("data", str(answer["error"]))
        return cast("dict[str, Any]", answer)

    def _answer_to(self, number: int) -> Any:
        """The answer to this question. Those to earlier ones, which were interrupted, are read and left."""
        while True:
            answer = msgpack.unpackb(self._line.recv(PACKET_BYTES_MAX))
            if not isinstance(answer, dict) or type(answer.get("n")) is not int or not 0 < answer["n"] < number:
                return answer


def line_of_process(dataset: str) -> LeaseLine:
    """This process's line for a dataset, made where there is none yet. Raises as `LeaseLine` does."""
    line = _KEPT.get(dataset)
    if line is None or line.pid != os.getpid():
        made = LeaseLine()
        if line is not None:
            _KEPT.pop(dataset, None)
        line = _KEPT.setdefault(dataset, made)
        if line is not made:  # another thread was sooner
            made.close()
    return line


def hang_up(dataset: str) -> None:
    """Give up all of a dataset that this process has drawn and not acknowledged.

    Others get it, and the log says that it may be repeated.
    """
    line = _KEPT.pop(dataset, None)
    if line is not None:
        line.close()


_KEPT: dict[str, LeaseLine] = {}
"""By dataset: whoever gives one up keeps what it has of others. Lines live as long as their process."""


def _close_in_children() -> None:
    """A child that held its parent's line open would keep the parent's end from being seen."""
    if not _FORKS:
        _FORKS.append(os.getpid())
        os.register_at_fork(after_in_child=_forget_lines)


def _forget_lines() -> None:
    for one in list(_LINES):
        if one.pid != os.getpid():
            with contextlib.suppress(OSError):
                one.close()
            _LINES.discard(one)
    _KEPT.clear()


class Shard(NamedTuple):
    """Samples that were drawn together.

    epoch:   of all of them; the first is 0
    indices: of the samples
    span:    their positions in the order of all epochs
    """

    epoch: int
    indices: tuple[int, ...]
    span: Span


class LeasedIndices:
    """Iterates over shards until all epochs are used, by whichever workers. See the module.

    ``name``: of the dataset, its own in the job. ``size``: samples of an epoch. ``epochs``: 0: without end. ``seed``, ``order``,
    ``chunk``, ``window``: the order of an epoch, as of `ElasticDataset`. ``shard``: samples that are drawn at a time, at
    most: what a dead worker may have used twice. ``fingerprint``: what the source's content is told by.
    ``assignment``: "lease-model" is for `ElasticDataset`, which saves with the model what was trained.

    Raises `SpecError` for what cannot be right, and where no agent of ours runs this process.
    """

    def __init__(
        self,
        name: str,
        *,
        size: int,
        epochs: int = 1,
        seed: int = 0,
        order: str = SHUFFLED,
        chunk: int = 1,
        window: int = WINDOW,
        shard: int = 1,
        fingerprint: str = "",
        assignment: str = LEASE,
    ) -> None:
        for field, value, least in (("size", size, 1), ("epochs", epochs, 0), ("shard", shard, 1)):
            _check(name, field, value, least)
        read = f"chunk={chunk} window={window}"
        if chunk > 1 and read not in fingerprint:  # an `ElasticDataset` has said it already
            fingerprint = f"{read} {fingerprint}".strip()
        for field, text, least in (("name", name, 1), ("fingerprint", fingerprint, 0)):
            if not least <= len(text) <= NAME_CHARS_MAX:
                raise SpecError(field, f"{text!r}: give a text of {least} to {NAME_CHARS_MAX} characters")
        if size * epochs > POSITION_MAX:
            raise SpecError("epochs", f"{epochs} of {size} samples are more than 2**62 positions: give fewer")
        self.terms = Terms(name, size, seed & SEED_MASK, order, fingerprint, epochs, 0, assignment)
        self.shard, self._seed, self._read = shard, seed, (chunk, window)
        self._order = order_of(size, seed, 0, chunk=chunk, window=window, order=order)
        self._used: list[Span] = []
        self._left: list[Span] = []
        self._current: Span | None = None
        self._saying = threading.Lock()  # one thread may draw ahead while another one uses
        self._pid = os.getpid()

    def draw(self, within_s: float = WAIT_S) -> Shard | Wait | None:
        """The next shard; `Wait`: there is none now; None: all of the data were used. Shards before it count only by `used`."""
        self._as_this_process()
        line = self._line()
        with self._saying:
            # Whatever is interrupted here is drawn again: no shard stays with a process that does not know of it.
            if self._left:
                shard = Shard(*self._indices(self._left[-1]), self._left[-1])
                del self._left[-1]
                return shard
            used, span = tuple(self._used), None
            try:
                span = line.draw(self.terms.name, self.shard, used, within_s)
                del self._used[: len(used)]
                return Shard(*self._indices(span), span) if isinstance(span, Span) else span
            except BaseException:
                if isinstance(span, Span):
                    line.not_taken(self.terms.name)
                raise

    def used(self, span: Span) -> None:
        """These positions were used; it is said with the next draw, or by `done`."""
        self._as_this_process()
        self._used.append(span)

    def claim(self, span: Span, holder: int) -> bool:
        """Take what a loader process has drawn; False: it is gone, and others use it."""
        return self._line().claim(self.terms.name, span, holder)

    @property
    def session(self) -> int:
        """The number by which the agent knows this process."""
        return self._line().session

    def restored(self, of: int, step: int, spans: Ranges | None) -> None:
        """Where this generation goes on, as of `LeaseLine.restored`, said by rank 0; None: another rank says so."""
        line = line_of_process(self.terms.name)
        if spans is not None:
            line.restored(self.terms, of, step, spans)

    def _line(self) -> LeaseLine:
        line = line_of_process(self.terms.name)
        line.open(self.terms, self.shard)
        return line

    def put_back(self, span: Span) -> None:
        """These positions of a shard were not used; the next draw here gets them."""
        self._as_this_process()
        if span.start < span.end:
            self._left.append(span)

    def give_back(self) -> None:
        """Give the agent what was put back here: other processes draw it."""
        self._as_this_process()
        with self._saying:
            if self._left:
                self._line().returned(self.terms.name, tuple(Ranges(self._left)))
                self._left.clear()

    def _as_this_process(self) -> None:
        # A forked process draws under a session of its own: what its parent holds is its parent's alone.
        if self._pid != os.getpid():
            self._left, self._used, self._current = [], [], None
            self._saying = threading.Lock()  # a thread of the parent may have held it
            self._pid = os.getpid()

    def begin_anew(self) -> None:
        """Give up all of this dataset that this process has drawn and not said to be used."""
        hang_up(self.terms.name)
        self._left.clear()
        self._used.clear()

    def done(self) -> None:
        """Say now what was used, the present shard of a loop too."""
        self._as_this_process()
        self._count_current()
        with self._saying:
            used = tuple(self._used)
            if used:
                self._line().acked(self.terms.name, tuple(Ranges(used)))
                del self._used[: len(used)]

    def __iter__(self) -> Iterator[Shard]:
        """Shards, each used when the next one is asked for."""
        self._as_this_process()
        while True:
            self._count_current()
            shard = self.waited()
            if shard is None:
                return
            self._current = shard.span
            yield shard

    def _count_current(self) -> None:
        span, self._current = self._current, None
        if span is not None:
            self.used(span)

    def waited(self) -> Shard | None:
        """The next shard, however long it takes; None: all of the data were used."""
        began = told = time.monotonic()
        while True:
            found = self.draw()
            if not isinstance(found, Wait):
                return found
            now = time.monotonic()
            if now - told >= TOLD_S:
                told = now
                say(f"dataset {self.terms.name!r}: {now - began:.0f} s waited for samples: {found.why}")

    def _indices(self, span: Span) -> tuple[int, tuple[int, ...]]:
        epoch, first = divmod(span.start, self.terms.size)
        if self._order.epoch != epoch:
            chunk, window = self._read
            self._order = order_of(
                self.terms.size, self._seed, epoch, chunk=chunk, window=window, order=self.terms.order
            )
        return epoch, tuple(self._order.indices(first, first + span.end - span.start))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_saying"} | {
            "_used": [],
            "_left": [],
            "_current": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._saying = threading.Lock()
        self._pid = os.getpid()


def _check(name: str, field: str, value: Any, least: int) -> None:
    most = SHARD_MAX if field == "shard" else NUMBER_MAX
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise SpecError(field, f"{value!r} of dataset {name!r}: give {least} to {most}")


def _path() -> Path | None:
    agent = os.environ.get(SOCKET_VARIABLE, "")
    return Path(agent).with_name(PATH_NAME) if agent else None


def _flat(spans: Sequence[Span]) -> list[int]:
    return [edge for span in spans for edge in span]


def _packed(body: dict[str, Any]) -> bytes:
    return cast(bytes, msgpack.packb(body))

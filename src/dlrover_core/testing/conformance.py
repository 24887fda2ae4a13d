"""Runs a conformance kit against somebody's class without a test runner: what `dlrover conformance` does.

Three things can be given, in the order of what they can say: a class that can be made with no argument (a log: with a codec); a
function that returns or yields what is to be tried, empty each time (a backend, a `Stand`, a log); a subclass of the kit. What
only the last two can know, such as how a node is killed from outside, is skipped with a word about it where they are not given.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Union
from unittest import SkipTest

from dlrover_core.errors import SpecError
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.log import EventLog, Snapshot
from dlrover_core.runtime.backend import Backend
from dlrover_core.testing.backend_conformance import BackendConformance
from dlrover_core.testing.backend_stand import Stand, watching
from dlrover_core.testing.log_conformance import LogConformance
from dlrover_core.testing.reasons import is_foreign, place, reason_of

Kit = Union[type[BackendConformance], type[LogConformance]]

BACKEND, LOG = "backend", "log"
KITS: dict[str, Kit] = {BACKEND: BackendConformance, LOG: LogConformance}
METHODS = {
    BACKEND: ("launch", "delete", "observe", "room"),
    LOG: ("lead", "leader", "head", "jobs", "batches", "read", "follow", "latest_snapshot", "close"),
}
OK, FAILED, SKIPPED = "ok", "failed", "skipped"
# Beyond a story's own bound: what it takes to end what it had started. A story that blocks its loop is cut off then.
ENDING_S = 10.0
EMPTYING_S = 5.0
NEW = "{new}"

BACKEND_FORM = """import contextlib
from dlrover_core.testing import Stand

@contextlib.asynccontextmanager
async def mine():                        # called for every promise: no nodes yet
    backend = MyBackend(...)
    yield Stand(backend, backend_kill)   # async kill(name): end that node from outside, as an accident does"""
LOG_FORM = """import contextlib
from dlrover_core.testing import LogConformance

class Mine(LogConformance):
    @contextlib.asynccontextmanager
    async def make_log(self):            # called for every promise: an empty log that decodes with self.codec
        async with open_my_log(self.codec) as log:
            yield log
    async def depose(self, log, job): ...                       # the present leader loses the job, not by its own doing
    async def halve_snapshot(self, log, job, snapshot): ...     # leave a snapshot whose writer died half-way"""
FORMS = {BACKEND: BACKEND_FORM, LOG: LOG_FORM}


class Promise(NamedTuple):
    """One promise of a contract: its test's name without ``test_``, and what it says."""

    name: str
    text: str


class Verdict(NamedTuple):
    """What came of one promise. ``reason`` says why it was not kept, or not tried."""

    promise: Promise
    outcome: str
    reason: str
    took_s: float


class Blocked(BaseException):
    """A story held its event loop, or did not end. No `Exception`, so that code under test does not swallow it."""


# ---- what was given, as a kit


def kit_of(thing: Any, spec: str, kind: str | None = None, url: str | None = None) -> tuple[str, Kit]:
    """The contract that ``thing`` is to keep, ``backend`` or ``log``, and the kit that tries it. Raises `SpecError`."""
    kind = kind or _kind_of(thing, spec)
    if isinstance(thing, type) and issubclass(thing, KITS[kind]):
        fixtures = [name for name, value in vars(thing).items() if _is_fixture(value)]
        if fixtures:
            raise SpecError(spec, f"needs pytest for its fixtures ({', '.join(fixtures)}): run pytest on it")
        return kind, thing
    if isinstance(thing, type):
        _suited(thing, kind, spec)
    elif not callable(thing):
        raise SpecError(
            spec,
            f"is a {type(thing).__name__}; every promise begins anew, so give the class, or a function:\n\n{FORMS[kind]}",
        )
    if kind == BACKEND:
        if url is not None:
            raise SpecError("--url", f"is for logs, {spec} is a backend")
        _takes(thing, spec, BACKEND, most=0)
        return kind, backend_kit(thing, spec)
    if url is not None:
        return kind, _url_kit(thing, spec, url)
    _takes(thing, spec, LOG, most=1)
    bare = not _needed(thing)
    return kind, log_kit((lambda _: thing()) if bare else thing, spec)


def _kind_of(thing: Any, spec: str) -> str:
    if isinstance(thing, type):
        for kind, kit in KITS.items():
            if issubclass(thing, kit):
                return kind
        kind = max(METHODS, key=lambda one: sum(hasattr(thing, name) for name in METHODS[one]) / len(METHODS[one]))
        _suited(thing, kind, spec)
        return kind
    if not callable(thing):
        kind = max(METHODS, key=lambda one: sum(hasattr(thing, name) for name in METHODS[one]))
    else:
        kind = LOG if _needed(thing) else BACKEND
    return kind


def _is_fixture(value: Any) -> bool:
    return hasattr(value, "_pytestfixturefunction") or type(value).__name__ == "FixtureFunctionDefinition"


def _needed(thing: Callable[..., Any]) -> list[str]:
    """The names of the arguments that it cannot be called without."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return []  # written in C: it will say
    return [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]


def _takes(thing: Callable[..., Any], spec: str, kind: str, most: int) -> None:
    needed = _needed(thing)
    if len(needed) > most:
        more = f" or --url 'SCHEME:...{NEW}...'" if hasattr(thing, "open_url") else ""
        raise SpecError(
            spec,
            f"cannot be made without {', '.join(needed)}. Give a function or a kit instead{more}:\n\n{FORMS[kind]}",
        )


def _suited(thing: Any, kind: str, spec: str) -> None:
    lacks = [name for name in METHODS[kind] if not callable(getattr(thing, name, None))]
    if not lacks:
        return
    what = thing.__name__ if isinstance(thing, type) else f"a {type(thing).__name__}"
    if len(lacks) == len(METHODS[kind]):
        raise SpecError(
            spec,
            f"{what} is neither a backend ({', '.join(METHODS[BACKEND])}) nor an event log ({', '.join(METHODS[LOG])}), "
            f"nor one of the kits' subclasses; a function may make one:\n\n{FORMS[kind]}",
        )
    raise SpecError(spec, f"{what} is no {kind}: it has no {', '.join(lacks)}; the port is {', '.join(METHODS[kind])}")


@contextlib.asynccontextmanager
async def _entered(made: Any) -> AsyncIterator[Any]:
    """What was returned, entered or awaited if need be; closed in the end if it can be."""
    if hasattr(type(made), "__aenter__"):
        async with made as inside:
            yield made if inside is None else inside
        return
    if inspect.isawaitable(made):
        async with _entered(await made) as inside:
            yield inside
        return
    try:
        yield made
    finally:
        close = getattr(made, "close", None) or getattr(made, "aclose", None)
        if callable(close):
            closed = close()
            if inspect.isawaitable(closed):
                await closed


def backend_kit(make: Callable[[], Any], spec: str) -> type[BackendConformance]:
    """A kit for whatever ``make`` returns: a backend, a `Stand`, or what has to be entered or awaited to become one."""

    class Given(BackendConformance):
        """The contract of backends, for what was given."""

        @contextlib.asynccontextmanager
        async def make_backend(self) -> AsyncIterator[Stand]:
            """As it was given."""
            async with _entered(make()) as made:
                stand = made if isinstance(made, Stand) else Stand(made, getattr(made, "kill", _no_kill))
                _suited(stand.backend, BACKEND, spec)
                try:
                    yield stand
                finally:
                    if stand is not made:
                        await _emptied(stand.backend, self.token + 1)

    return Given


async def _no_kill(_name: str) -> None:
    raise SkipTest("nobody knows how to kill a node from outside: give a `Stand`, or the backend a method `kill(name)`")


async def _emptied(backend: Backend, token: int) -> None:
    """Delete what a story left, as far as that works: what does not is the story's to tell."""

    async def emptied() -> None:
        async with watching(backend) as watch:
            for name in list(watch.nodes):
                await backend.delete(name, token, 0.0)
            await watch.until(lambda nodes: not nodes)

    with contextlib.suppress(Exception):
        await asyncio.wait_for(emptied(), EMPTYING_S)


def log_kit(make: Callable[[Codec], Any], spec: str) -> type[LogConformance]:
    """A kit for whatever ``make`` returns for a codec: a log, or what has to be entered or awaited to become one."""

    class Given(_Unknowing):
        """The contract of event logs, for what was given."""

        @contextlib.asynccontextmanager
        async def make_log(self) -> AsyncIterator[EventLog]:
            """As it was given."""
            async with _entered(make(self.codec)) as log:
                _suited(log, LOG, spec)
                yield log

    return Given


def _url_kit(thing: Any, spec: str, url: str) -> type[LogConformance]:
    if not callable(getattr(thing, "open_url", None)):
        raise SpecError("--url", f"{spec} has no `open_url(url, codec)`")
    if NEW not in url:
        raise SpecError(
            "--url", f"write {NEW} where a name may stand: every promise begins with an empty log of its own"
        )

    class Given(_Unknowing):
        """The contract of event logs, for what a URL opens."""

        def make_log(self) -> AbstractAsyncContextManager[EventLog]:
            """A place of its own."""
            self.url = url.replace(NEW, f"conformance-{uuid.uuid4().hex}")
            return _entered(thing.open_url(self.url, self.codec))

        def second(self, _log: EventLog) -> AbstractAsyncContextManager[EventLog]:
            """The same place again."""
            return _entered(thing.open_url(self.url, self.codec))

    return Given


class _Unknowing(LogConformance):
    """A log whose inside is not known."""

    async def depose(self, _log: EventLog, _job: str) -> None:
        """Not known."""
        raise SkipTest("nobody knows how this log's leader is deposed: give a subclass of LogConformance with `depose`")

    async def halve_snapshot(self, _log: EventLog, _job: str, _snapshot: Snapshot) -> None:
        """Not known."""
        raise SkipTest(
            "nobody knows how half a snapshot looks here: give a subclass of LogConformance with `halve_snapshot`"
        )


# ---- trying


def promises(kit: Kit, words: Sequence[str] = ()) -> list[Promise]:
    """What a kit tries, in the order it is written; with ``words`` those whose name holds one of them."""
    found: dict[str, str] = {}
    for one in kit.__mro__:
        found |= dict.fromkeys(name for name in vars(one) if name.startswith("test_"))  # type: ignore[arg-type]
    told = [Promise(name[5:], " ".join((inspect.getdoc(getattr(kit, name)) or name[5:]).split())) for name in found]
    return [one for one in told if not words or any(word in one.name for word in words)]


def opens(kit: Kit, spec: str) -> None:
    """Make once what is to be tried, so that what cannot be made is told once. Raises `SpecError`."""

    async def opened() -> None:
        made = kit().make_backend() if issubclass(kit, BackendConformance) else kit().make_log()
        async with made:
            pass

    try:
        with Alarm(kit).after(kit.story_s + ENDING_S):
            asyncio.run(asyncio.wait_for(opened(), kit.story_s))
    except SpecError:
        raise
    except (Exception, Blocked) as error:
        raise SpecError(spec, f"could not be made: {reason_of(error, kit)}") from error


def try_all(
    kit: Kit,
    chosen: Sequence[Promise],
    *,
    story_s: float | None = None,
    tell: Callable[[Verdict], None] = lambda _: None,
) -> list[Verdict]:
    """Try one promise after the other, each within its bound. ``tell`` hears each verdict at once."""
    verdicts = []
    for promise in chosen:
        verdict = _try(kit, promise, story_s)
        verdicts.append(verdict)
        tell(verdict)
    return verdicts


def _try(kit: Kit, promise: Promise, story_s: float | None) -> Verdict:
    one = kit()
    if story_s is not None:
        one.story_s = story_s
    began = time.monotonic()

    def verdict(outcome: str, reason: str = "") -> Verdict:
        return Verdict(promise, outcome, reason, time.monotonic() - began)

    alarm = Alarm(kit)
    try:
        with alarm.after(one.story_s + ENDING_S):
            getattr(one, f"test_{promise.name}")()
    except SkipTest as skipped:
        return verdict(SKIPPED, str(skipped))
    except (Exception, Blocked, SystemExit) as error:
        if alarm.interrupted:
            raise KeyboardInterrupt from error
        late = isinstance(error, asyncio.TimeoutError) and time.monotonic() - began >= one.story_s
        words = [f"not done within {one.story_s:g} s"] if late or alarm.rang else []
        return verdict(FAILED, ": ".join([*words, alarm.rang or reason_of(error, kit)]))
    return verdict(OK)


class Alarm:
    """Raises `Blocked` in what does not end by itself: asyncio's own bounds need a loop that runs. ``rang`` tells where.

    Ctrl-C is for it too: asyncio's answer to that is to cancel a task, which one that blocks does not hear.
    """

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self.rang = ""
        self.interrupted = False

    @contextlib.contextmanager
    def after(self, bound_s: float) -> Iterator[None]:
        """Ring so much later, and again; in the main thread, where alone it can be done."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGALRM, self._ring)
        asked = signal.signal(signal.SIGINT, self._interrupt)
        others = signal.setitimer(signal.ITIMER_REAL, bound_s, ENDING_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *others)
            signal.signal(signal.SIGINT, asked)
            signal.signal(signal.SIGALRM, before)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> NoReturn:
        self.interrupted = True
        signal.setitimer(signal.ITIMER_REAL, ENDING_S, ENDING_S)  # clearing up may block as well
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # what is cut off in the midst has nothing to add
        raise KeyboardInterrupt

    def _ring(self, _number: int, frame: FrameType | None) -> NoReturn:
        while frame is not None and not is_foreign(frame, self._kit):
            frame = frame.f_back
        where = f", at {place(frame, frame.f_lineno)}" if frame is not None else ""
        self.rang = self.rang or f"it blocks its event loop, or does not end when it is cancelled{where}"
        raise Blocked(self.rang)

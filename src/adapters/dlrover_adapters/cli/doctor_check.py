"""One check of a machine: what it finds, how bad that is, what to do next. Every one is bounded in time."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Union

from dlrover_core.runtime.within import within

BOUND_S = 10.0


class Verdict(enum.Enum):
    """FAIL: a job would not run here, or not as asked. WARN: it would, and one day it would hurt."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


class Finding(NamedTuple):
    """What a check found, in words with units, and what to do next. ``values`` are the same numbers for programs."""

    verdict: Verdict
    found: str
    advice: str = ""
    values: Mapping[str, Any] = {}


Look = Callable[[], Union[Finding, Awaitable[Finding]]]


class Check(NamedTuple):
    """A name, and how to look. A look that blocks is given a thread, and given up after ``bound_s``.

    ``stuck`` is the advice where it does not come back.
    """

    name: str
    look: Look
    bound_s: float = BOUND_S
    stuck: str = ""


class Result(NamedTuple):
    """One finished check."""

    name: str
    finding: Finding
    took_s: float

    @property
    def verdict(self) -> Verdict:
        """Its verdict."""
        return self.finding.verdict


def ok(found: str, advice: str = "", /, **values: object) -> Finding:
    """All is well."""
    return Finding(Verdict.OK, found, advice, values)


def warn(found: str, advice: str, /, **values: object) -> Finding:
    """It works, and one day it would hurt."""
    return Finding(Verdict.WARN, found, advice, values)


def fail(found: str, advice: str, /, **values: object) -> Finding:
    """It does not work."""
    return Finding(Verdict.FAIL, found, advice, values)


async def examine(check: Check) -> Result:
    """Run one check within its bound; whatever it raises is a finding, because one broken check must not hide the others."""
    began = time.monotonic()
    try:
        finding = await within(check.bound_s, _look(check))
    except asyncio.TimeoutError:
        finding = fail(
            f"no answer within {check.bound_s:g} s", check.stuck or "something here hangs; look at the kernel log"
        )
    except OSError as error:
        finding = fail(f"{type(error).__name__}: {error}", check.stuck or "see the error; the check could not be made")
    except Exception as error:  # noqa: BLE001 - as the docstring says
        finding = fail(
            f"the check itself broke: {type(error).__name__}: {error}", "please report this as a bug of ours"
        )
    return Result(check.name, finding, time.monotonic() - began)


async def _look(check: Check) -> Finding:
    if inspect.iscoroutinefunction(check.look):
        found: Finding = await check.look()
        return found
    return await _in_thread(check)


def _in_thread(check: Check) -> asyncio.Future[Finding]:
    """In a daemon's thread: a system call that hangs (a dead network file system) keeps nobody from ending."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Finding] = loop.create_future()

    def deliver(found: object) -> None:
        if answer.done():
            return
        if isinstance(found, BaseException):
            answer.set_exception(found)
        else:
            answer.set_result(found)  # type: ignore[arg-type]

    def run() -> None:
        try:
            found: object = check.look()
        except Exception as error:  # noqa: BLE001 - it is raised again where it is awaited
            found = error
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, found)

    threading.Thread(target=run, name=f"check {check.name}", daemon=True).start()
    return answer


def size(amount: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 10 else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"

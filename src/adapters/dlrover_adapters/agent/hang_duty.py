"""Showing what ranks are at, when the leader suspects a hang: stacks, the kernel's view, torch's flight recorder.

Everything is looked at twice, a moment apart, because whoever moves or works does not hang. The worker's witness thread shows
stacks; one whose thread does not answer holds Python's lock, for the thread needs it to answer; and /proc tells of a process that
is stopped. So it works however the worker is stuck, also without its own help: then `faulthandler` writes stacks in a signal
handler in C. But that may kill a process in which Python runs, and a suspicion may be wrong. So nobody is signalled whose witness
answers, nor one that works and has none.

What is found out of each rank goes to the leader in a few lines; all of it stays in a file on this host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import NamedTuple, Protocol

import structlog

from dlrover_core.diagnosis import flight, hanging, stacks
from dlrover_core.diagnosis.hanging import Facts
from dlrover_core.job.hangs import Probe, ReportStacks
from dlrover_core.runtime.duties import Desk, Orders

from . import looks
from .doorbell import Asked
from .ranks import Rank

APART_S = 0.3
"""Between the two looks."""
ANSWER_S = 1.0
"""Whoever's witness does not answer for so long holds Python's lock."""
SHOWN_S = 0.6
SETTLED_S = 0.03
POLL_S = 0.01
QUIET_S = 0.025
"""Who uses no more CPU than this between the two looks, a tick or two, runs no Python."""
BUSY_SHARE, MOVING_SHARE, BUSY_BYTES = 0.2, 0.02, 64 * 1024
STACKS_BYTES_MAX = 256 * 1024
KEPT_MAX = 20

_log = structlog.get_logger("dlrover.agent")


class Ranks(Protocol):
    """Where the ranks are: a launcher."""

    def ranks(self, generation: int) -> list[Rank]:
        """The living workers of a generation."""
        ...


class _Seen(NamedTuple):
    facts: Facts
    text: str


class HangDuty(Orders):
    """Shows this node's ranks whenever an order asks for it; ``folder`` keeps the whole of what was seen."""

    def __init__(self, launcher: Ranks, folder: str) -> None:
        super().__init__()
        self._launcher, self._folder = launcher, folder

    async def run(self, desk: Desk) -> None:
        """Until cancelled."""
        shown = 0
        while True:
            order = await self.news(desk)
            hang = order.part(Probe).hang
            if hang <= shown:
                continue
            shown = hang
            try:
                command = await self._show(desk.node, order.generation, hang)
            except OSError as error:
                _log.warning("ranks cannot be looked at", hang=hang, error=str(error))
                command = ReportStacks(desk.node, hang, ())
            desk.send(command)

    async def _show(self, node: str, generation: int, hang: int) -> ReportStacks:
        ranks = self._launcher.ranks(generation)
        seen = await asyncio.gather(*(_seen(one, hang) for one in ranks))
        path = await asyncio.to_thread(self._keep, node, hang, [one.text for one in seen])
        return ReportStacks(node, hang, tuple(hanging.to_text(one.facts) for one in seen), path)

    def _keep(self, node: str, probe: int, texts: list[str]) -> str:
        """Write it all down; where there is no room, it is the leader's few lines only."""
        path = os.path.join(self._folder, f"hang-{probe}-{node}.txt")
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            with open(path, "w", encoding="utf-8", errors="backslashreplace", opener=_private) as file:
                file.write("\n".join(texts))
            old = sorted(entry.path for entry in os.scandir(self._folder) if entry.name.startswith("hang-"))
            for one in sorted(old, key=os.path.getmtime)[:-KEPT_MAX]:
                os.unlink(one)
        except OSError as error:
            _log.warning("stacks are not kept", path=path, error=str(error))
            return ""
        return path


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


async def _seen(rank: Rank, probe: int) -> _Seen:
    """One rank, from outside and by its own witness."""
    size = _size(rank.stacks)
    first = await asyncio.to_thread(looks.look, rank.pid)
    stopped = first.state in hanging.STOPPED
    asked = None if stopped else rank.ask(probe, "")
    await asyncio.sleep(APART_S)
    second = await asyncio.to_thread(looks.look, rank.pid)
    before, after, free = (
        ("", "", False) if stopped else await _shown(rank, probe, size, asked, quiet=_quiet(first, second))
    )
    recorded = await _recorded(rank, probe) if free else None
    stack, shown = stacks.main_thread(after or before), stacks.main_thread(before or after)
    frame = stacks.users(stack)
    source = await asyncio.to_thread(looks.source_line, rank.pid, frame.file, frame.line) if frame is not None else ""
    facts = Facts(
        rank=rank.rank,
        state=second.state or first.state,
        wchan=second.wchan,
        idle_us=rank.idle_us(),
        gil="" if asked is None else "free" if free else "held",
        busy=_busy(first, second, moved=stack != shown),
        stack=stacks.brief(stack),
        source=source,
        recorded=recorded is not None,
        groups=flight.newest(recorded) if recorded is not None else (),
    )
    kernel = await asyncio.to_thread(looks.details, rank.pid)
    return _Seen(facts, _text(facts, kernel, before, after, recorded))


def _busy(first: looks.Look, second: looks.Look, *, moved: bool) -> bool:
    share = (second.cpu_s - first.cpu_s) / APART_S
    works = share >= BUSY_SHARE and not second.on_gpu
    return works or (moved and share >= MOVING_SHARE) or second.io_bytes - first.io_bytes >= BUSY_BYTES


def _quiet(first: looks.Look, second: looks.Look) -> bool:
    # Whoever spins for a GPU may run Python as well.
    return second.cpu_s - first.cpu_s <= QUIET_S


async def _shown(rank: Rank, probe: int, size: int, asked: Asked | None, *, quiet: bool) -> tuple[str, str, bool]:
    """Its stacks at the first look and at the second, as far as they are to be had, and whether its witness answers.

    The first question was ``asked`` `APART_S` ago, when the stacks' file had this ``size``.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + ANSWER_S - APART_S
    if asked is not None and not asked.answered.done() and not quiet:
        await _within(asked.answered, until - loop.time())
    if asked is not None and asked.answered.done():
        before = await asyncio.to_thread(_read, rank.stacks, size)
        again = rank.ask(probe, "")
        if again is None or not await _within(again.answered, ANSWER_S):
            return before, "", True
        return before, await asyncio.to_thread(_read, rank.stacks, size + len(before.encode())), True
    if not quiet and asked is None:
        return "", "", False
    # A signal may kill where other threads' frames change while they are read. Here they do not: it uses no CPU; or whoever has
    # Python's lock has kept it for so long that even the witness did not get it, and so is in C, and the others wait for it.
    # Once, for each is a risk; a second time only where nothing came of the first.
    shown = await _stacks(rank, size) or await _stacks(rank, size)
    return shown, "", asked is not None and await _within(asked.answered, until - loop.time())


async def _stacks(rank: Rank, offset: int) -> str:
    """Have it show its stacks, and read what it wrote from ``offset`` on: there is no end mark, it is when nothing comes."""
    if not await rank.show():
        return ""
    loop = asyncio.get_running_loop()
    until, settled, size = loop.time() + SHOWN_S, 0.0, offset
    while loop.time() < until:
        await asyncio.sleep(POLL_S)
        now = _size(rank.stacks)
        if now != size:
            size, settled = now, loop.time()
        elif size > offset and loop.time() - settled >= SETTLED_S:
            break
    return _read(rank.stacks, offset)


def _read(path: str, offset: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(STACKS_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


async def _within(done: asyncio.Future[None], bound_s: float) -> bool:
    await asyncio.wait([done], timeout=max(0.0, bound_s))
    return done.done() and not done.cancelled()


async def _recorded(rank: Rank, probe: int) -> bytes | None:
    """Torch's flight recorder; None where it was not to be had."""
    path = f"{rank.stacks}.recorder"
    asked = rank.ask(probe, path)
    if asked is None or not await _within(asked.recorded, ANSWER_S):
        return None

    def read() -> bytes:
        with open(path, "rb") as file:
            told = file.read()
        os.unlink(path)
        return told

    with contextlib.suppress(OSError):
        return await asyncio.to_thread(read)
    return None


def _text(facts: Facts, kernel: str, before: str, after: str, recorded: bytes | None) -> str:
    """All of it, for people."""
    lock = {"free": "free", "held": "held: its witness thread does not answer", "": "unknown"}[facts.gil]
    head = f"==== rank {facts.rank}: state {facts.state or '?'}, {'busy' if facts.busy else 'idle'}, Python's lock {lock} ===="
    groups = [
        f"  group {one.group}: {one.op} {one.seq} {'under way' if one.active else 'over'}" for one in facts.groups
    ]
    told = [head, "stacks:", before.rstrip() or "  none"]
    if after.strip() and after != before:
        told += [f"stacks {APART_S:g} s later:", after.rstrip()]
    told += ["flight recorder:", *(groups or ["  nothing" if recorded is not None else "  not to be had"]), kernel, ""]
    return "\n".join(told)

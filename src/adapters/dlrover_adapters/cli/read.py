"""The commands that read: `status`, `events`, `explain`, `report`. They open the log, and leave the telling to `history`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from dlrover_adapters.cli.places import (
    FAILED,
    OK,
    NotFound,
    called,
    find_job,
    log_arguments,
    log_url,
    said_when_slow,
    shown,
    token_arguments,
)
from dlrover_core.words import quiet_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dlrover_core.kernel.log import EventLog

STATUS_EXAMPLES = """\
  dlrover status                          the only job, or the one with the newest event
  dlrover status digits --state-dir /data/dlrover
  dlrover status digits --json | jq .step
  dlrover status digits --log etcd://e1:2379,e2:2379 --master head1:29400,head2:29400
                                          asks the masters, even while the log is out of reach
  until dlrover status digits --json | jq -e '.ended_at > 0'; do sleep 5; done"""
EVENTS_EXAMPLES = """\
  dlrover events digits                   the whole log
  dlrover events digits --since 120       what came after event 120
  dlrover events digits --follow          and whatever comes, until Ctrl-C
  dlrover events digits --follow --log etcd://e1:2379,e2:2379,e3:2379
                                          through changes of leaders, here and there, from any host
  dlrover events http://head1:29400,head2:29400/digits --follow
                                          the same through the masters, without access to the log
  dlrover events digits --json | jq 'select(.event == "WorkerExited")'"""
EXPLAIN_EXAMPLES = """\
  dlrover explain digits                  the incident that the job failed over, else the newest one, as a story
  dlrover explain digits --incident 3     that incident
  dlrover explain digits 121              why event 121 happened, and what came of it
  dlrover explain 121                     the same of the newest job"""
REPORT_EXAMPLES = """\
  dlrover report digits
  dlrover report digits --json | jq .goodput.ratio
  dlrover report --log sqlite:///data/log.db"""


JOB_HELP = "its name, or http://HOST:29400/JOB to read through its master (default: the only job, or that with the newest event)"

PATIENCE_S = 3.0
"""How long `status` waits for the log before it asks the masters: while the log is out of reach, they are what people need."""


ASK_MASTERS = "dlrover status: --master HOST:PORT[,HOST:PORT] asks the masters themselves, with the job's token"
NOT_ASKED = "why no world forms only its master knows, which cannot be asked: --token-file FILE names the job's token"
NOBODY_LEADS = "nobody leads it now: nothing is decided until a master of this job is started again"


class Source(NamedTuple):
    """An open log and the job to be read from it."""

    log: EventLog
    job: str

    async def now(self) -> int | None:
        """Where a live job's time ends: now (microseconds) while somebody leads it; else None, at its last record."""
        leader = await self.log.leader(self.job)
        return time.time_ns() // 1000 if leader is not None else None


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """What every reading command takes."""
    parser.add_argument("job", metavar="JOB", nargs="?", help=JOB_HELP)
    log_arguments(parser)
    token_arguments(parser)
    parser.add_argument("--json", action="store_true", help="for programs: every field named, times in microseconds")


def status_arguments(parser: argparse.ArgumentParser) -> None:
    """What `status` takes."""
    from dlrover_adapters.cli import live

    common_arguments(parser)
    live.arguments(parser)


def events_arguments(parser: argparse.ArgumentParser) -> None:
    """What `events` takes."""
    common_arguments(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="go on with whatever is appended, until Ctrl-C")
    parser.add_argument("--since", metavar="SEQ", type=seq, default=0, help="only events after this number")


def explain_arguments(parser: argparse.ArgumentParser) -> None:
    """What `explain` takes."""
    from dlrover_adapters.cli import live

    common_arguments(parser)
    live.arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("seq", metavar="SEQ", nargs="?", type=seq, default=0, help="the event to explain")
    what.add_argument("--incident", metavar="N", type=incident, default=0, help="the incident to explain")


def seq(text: str) -> int:
    """A sequence number, as ``121`` or ``#121``."""
    try:
        number = int(text.removeprefix("#"))
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of an event; 'dlrover events' shows them")
    return number


def incident(text: str) -> int:
    """The number of an incident: 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of an incident; 'dlrover report' shows them")
    return int(text)


@asynccontextmanager
async def opened(args: argparse.Namespace) -> AsyncIterator[Source]:
    """The log and the job that the arguments name. Raises `NotFound`."""
    from dlrover_core.logs import open_log

    url = log_url(args.log, args.state_dir)
    async with AsyncExitStack() as stack:
        with said_when_slow(f"dlrover {args.command}", f"no answer yet from {shown(url)}"):
            log = await stack.enter_async_context(open_log(url))
            job = await find_job(log, url, args.job)
        yield Source(log, job)


async def status(args: argparse.Namespace) -> int:
    """`dlrover status`. What the log tells, and the leader of whether it can decide; or the masters alone, without the log."""
    from dlrover_core.errors import LogUnavailable

    async with AsyncExitStack() as stack:
        opening = asyncio.ensure_future(stack.enter_async_context(opened(args)))
        await asyncio.wait({opening}, timeout=PATIENCE_S)
        try:
            if not opening.done() and await _status_without_log(args, f"no answer within {PATIENCE_S:g} s"):
                return OK
            return await _status(args, await opening)
        except LogUnavailable as error:
            if await _status_without_log(args, str(error), says=True):
                return OK
            if not args.master and args.log and not args.log.startswith(("sqlite:", "http:", "https:")):
                print(ASK_MASTERS, file=sys.stderr)
            raise
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)


async def _status(args: argparse.Namespace, source: Source) -> int:
    from dlrover_adapters.cli import live
    from dlrover_adapters.cli.detached.record import lost
    from dlrover_adapters.cli.standing import degraded, in_memory
    from dlrover_adapters.cli.standing import waiting as standbys
    from dlrover_core.history import Headlines, render, status_of
    from dlrover_core.history.plain import plain
    from dlrover_core.job.state import FOLD

    state, headlines, last = FOLD.new(), Headlines(), None
    async for record in source.log.read(source.job):
        FOLD.apply(state, record)
        headlines.feed(state, record)
        last = record
    leader = await source.log.leader(source.job)
    told = status_of(state, last, headlines)
    said = None if told.over else await live.leader_says(args, source.job, leader.address if leader is not None else "")
    waits = live.waits_of(said) if said is not None else None
    told = told._replace(waits=waits or ())
    steps = live.steps_of(said) if said is not None else None
    if steps is not None:
        told = told._replace(step=steps["step"], step_at=time.time_ns() // 1000 - steps["age_us"])
    if args.json:
        levels = {
            "live": steps,
            "control_plane": said.control_plane if said is not None else None,
            "checkpoints": said.status.get("checkpoints", {}) if said is not None else None,
            "waits": plain(waits) if waits is not None or told.over else None,
            "standbys": said.status.get("standbys", 0) if said is not None else None,
        }
        print(as_json({**plain(told), **levels}))
    else:
        now = time.time_ns() // 1000
        print(render.status(told, None if leader is None and said is None else now, live=steps))
        for line in (*in_memory(said.status), *standbys(said.status)) if said is not None else ():
            print(line)
        if said is not None and said.status.get("degraded"):
            print(degraded(said.status, now))
        gone = "" if said is not None or told.over else lost(args.state_dir, source.job, told.run)
        if gone:
            print(gone)
        elif leader is None and said is None and not told.over:
            print(NOBODY_LEADS)
        elif waits is None and not told.over and not (told.worlds and all(world.active for world in told.worlds)):
            print(NOT_ASKED)
    return FAILED if told.failed else OK


async def _status_without_log(args: argparse.Namespace, why: str, *, says: bool = False) -> bool:
    """Show what masters say while the log is out of reach; False where they are, too: why, it ``says`` of those asked for."""
    from dlrover_adapters.cli import live
    from dlrover_core.errors import CoreError

    try:
        said = await live.masters_say(args)
    except CoreError as error:
        if says and args.master:
            print(f"dlrover status: the masters cannot be asked: {error}", file=sys.stderr)
        return False
    remark = f"the log cannot be read: {why} ({shown(log_url(args.log, args.state_dir))})"
    if args.json:
        print(as_json({**said.status, "control_plane": said.control_plane, "log_error": remark}))
    else:
        print("\n".join(live.lines(said)))
        print(f"dlrover status: {remark}", file=sys.stderr)
    return True


async def events(args: argparse.Namespace) -> int:
    """`dlrover events`."""
    from dlrover_core.history import Headlines, render
    from dlrover_core.history.plain import record_of
    from dlrover_core.job.job import JobCreated
    from dlrover_core.job.state import FOLD

    async with opened(args) as source:
        began, state, headlines = None, FOLD.new(), Headlines()
        # From the first event even with --since: offsets count from the beginning of the run.
        records = source.log.follow(source.job) if args.follow else source.log.read(source.job)
        # A reader that goes, `| head`, ends it at any line.
        async with aclosing(records) as told:  # type: ignore[type-var]  # a generator in all logs
            async for record in told:
                if began is None or isinstance(record.event, JobCreated):
                    began = record.at
                FOLD.apply(state, record)
                news = headlines.feed(state, record)
                if record.seq > args.since:
                    line = as_line(record_of(record)) if args.json else render.event_line(record, began, news=news)
                    print(line, flush=args.follow)
    return OK


async def explain(args: argparse.Namespace) -> int:
    """`dlrover explain`. What the log tells, and the leader of what groups wait for now."""
    from dlrover_adapters.cli import live
    from dlrover_core.history import explanation_of, incident_of, render, render_story
    from dlrover_core.history.explain import explanation_values
    from dlrover_core.history.plain import plain
    from dlrover_core.history.story import incident_values

    if args.job is not None and args.job.removeprefix("#").isdecimal() and not args.seq:
        # A lone number is an event of the newest job: names of jobs may be numbers too, but then SEQ is there to tell.
        args.job, args.seq = None, seq(args.job)
    async with opened(args) as source:
        records = [record async for record in source.log.read(source.job)]
        story = incident_of(records, args.incident) if not args.seq else None
        if story is None and args.incident:
            raise NotFound(
                f"job {source.job!r} has no incident {args.incident}; 'dlrover report' shows those there are"
            )
        # Of an incident the last thing that was decided about it.
        decided = story.story.measures[-1].seq if args.incident and story and story.story.measures else 0
        story = story._replace(job=called(args, story.job)) if story is not None else None
        told = explanation_of(records, args.seq or decided)
        if told is None:
            raise NotFound(f"job {source.job!r} has no event {args.seq}; its events are 1-{len(records)}")
        leader = await source.log.leader(source.job)
        said = await live.leader_says(args, source.job, leader.address if leader is not None else "")
        waits = live.waits_of(said) if said is not None else None
        if args.json:
            values = {
                "incident": incident_values(story) if story is not None else None,
                "waits": plain(waits) if waits is not None else None,
            }
            print(as_json({**explanation_values(told), **values}))
        else:
            print(render_story.story(story) if story is not None else render.explanation(told))
            for line in render.waiting(waits or (), time.time_ns() // 1000):
                print(line)
    return OK


async def report(args: argparse.Namespace) -> int:
    """`dlrover report`."""
    from dlrover_core.history import ReportBuilder, render
    from dlrover_core.history.report import report_values

    async with opened(args) as source:
        builder = ReportBuilder()
        async for record in source.log.read(source.job):
            builder.feed(record)
        told = builder.report(await source.now())
        print(as_json(report_values(told)) if args.json else render.report(told))
    return OK


def as_json(value: Any) -> str:
    """One value, to be read by people too."""
    return quiet_json(json.dumps(value, indent=2, ensure_ascii=False))


def as_line(value: Any) -> str:
    """One value in one line."""
    return quiet_json(json.dumps(value, separators=(",", ":"), ensure_ascii=False))

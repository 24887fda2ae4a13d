"""Which run the masters of a job serve: settled in its log by each launcher, before it starts a master.

Whoever leads for a moment continues the job's live run, or begins one; whoever finds the job led stands by for the run that is
led. So masters started at the same instant serve one run, and a standby's master that is started again when that run has
ended finds it ended, and begins no other.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import replace

from dlrover_adapters.cli.continuing import differences, listed, resizing
from dlrover_adapters.cli.places import shown
from dlrover_adapters.cli.settings import Settings
from dlrover_core.errors import NotLeading, Refused, SpecError
from dlrover_core.job.job import JobSlice
from dlrover_core.job.operations import sizes
from dlrover_core.job.state import JobState
from dlrover_core.kernel.log import EventLog, Leadership
from dlrover_core.runtime.restoring import caught_up, restored

LOOK_AGAIN_S = 0.1
SAY_S, SAY_EVERY_S = 2.0, 10.0
LEAVE_S = 30.0
"""How long, beyond the job's own grace, a leader may take to be done with a run that is over."""


async def settled(settings: Settings, event_log: EventLog) -> Settings:
    """The settings with the run to serve, which the log has by then, and with its masters so far. Raises `SpecError`."""
    loop, job = asyncio.get_running_loop(), settings.job
    began, say_at = loop.time(), loop.time() + SAY_S
    patience_s = job.stop_grace_s + job.kill_wait_s + LEAVE_S
    state = await restored(event_log, job.job)
    while True:
        try:
            lead = await event_log.lead(job.job, settings.holder(os.getpid()), wait=False)
        except NotLeading as led:
            state = await caught_up(event_log, job.job, state)
            if state.job.live:
                _check_same(settings, state.job, led)
                return replace(settings, run=state.job.run, masters=(led.address,) if led.address else ())
            waited = loop.time() - began
            who = _who(led)
            if waited >= patience_s:
                raise SpecError(
                    "job-id",
                    f"job {job.job!r} in {shown(settings.log)} is led by {who}, and has had no run to stand by for "
                    f"within {waited:.0f} s; give this one another --job-id, or try again when that one is gone",
                ) from led
            if loop.time() >= say_at:
                say_at = loop.time() + SAY_EVERY_S
                what = f"a run that is {state.job.state}" if state.job.run else "no run yet"
                _say(f"job {job.job} is led by {who}, with {what}: waiting ... {waited:.0f} s")
        else:
            taken = await taken_up(settings, event_log, lead)
            if taken is not None:
                return taken
            state = await restored(event_log, job.job)
        await asyncio.sleep(LOOK_AGAIN_S)


async def taken_up(settings: Settings, event_log: EventLog, lead: Leadership) -> Settings | None:
    """The settings with the run that this leadership, which ends here, has continued or begun; None: it was lost meanwhile.

    In a log of this host alone none is begun: its masters do that. A live run goes on where it bears the name that its owner
    gave this one too; and in a job of the very same spec whose nodes are elsewhere and have not ended with the launcher that
    led them. Other sizes are applied. Raises `SpecError` where an owner's run differs in anything else.
    """
    try:
        state = await restored(event_log, settings.job.job)
        job = state.job
        if settings.owned and job.run == settings.run:
            if job.live:
                _refuse_others(settings, job.spec_json)
                await _go_on(settings, event_log, lead, state)
            return settings  # one that is over is found so by its masters
        if not settings.shared and not (job.live and settings.nodes_elsewhere and not settings.owned):
            return settings  # the one host's masters begin it
        other = differences(job.spec_json, settings.spec, sizes=False) if job.live else []
        if job.live and settings.nodes_elsewhere and not other and not settings.owned:
            await _go_on(settings, event_log, lead, state)
            return replace(settings, run=job.run)
        if job.live and settings.owned:
            _say(f"job {job.name} is alive in the log as run {job.run}: run {settings.run} takes its place")
        elif other:
            _say(f"job {job.name} is alive in the log, with other settings: a new run takes its place: {listed(other)}")
        from dlrover_core.runtime.beginning import begin  # all rules, which a run that goes on does not need here

        await begin(lead, state, settings.run, settings.spec, time.time_ns() // 1000)
        return settings
    except NotLeading:
        return None
    finally:
        await lead.resign()


async def _go_on(settings: Settings, event_log: EventLog, lead: Leadership, state: JobState) -> None:
    """Go on with the live run that ``state`` is, in the sizes that are asked for now."""
    _say(f"job {state.job.name} is alive in the log: its run goes on")
    asked = await resizing(event_log, state, settings.spec)
    if not asked:
        return
    from dlrover_core.runtime.beginning import resize

    try:
        await resize(lead, state, asked, time.time_ns() // 1000)
    except Refused as refused:
        _say(f"job {settings.job.job} keeps its sizes: {refused}; dlrover scale changes them later")
        return
    for one in asked:
        _say(f"group {one.group} is scaled to {sizes(one.nodes_min, one.nodes_max)}")


def _refuse_others(settings: Settings, theirs: str) -> None:
    """Raises `SpecError` where the owner's live run has other settings than sizes."""
    found = differences(theirs, settings.spec, sizes=False)
    if found:
        raise SpecError(
            "run",
            f"run {settings.run!r} of job {settings.job.job!r} is alive with other settings: {listed(found)}; only sizes "
            "(--nnodes) can be changed within a run: say the others as they were, or give the run another name",
        )


def _check_same(settings: Settings, job: JobSlice, led: NotLeading) -> None:
    """May this host's masters stand by for that run? Raises `SpecError` that names what differs."""
    if settings.owned and job.run != settings.run:
        raise SpecError(
            "run",
            f"job {settings.job.job!r} is led by {_who(led)}, as run {job.run!r}, not {settings.run!r}; stop that one first, "
            "or give this one another --job-id",
        )
    found = differences(job.spec_json, settings.spec)
    if found:
        raise SpecError(
            "job-id",
            f"job {settings.job.job!r} runs already, led by {_who(led)}, with other settings: {listed(found)}; "
            "say the same to stand by for it, or give this one another --job-id",
        )


def _who(led: NotLeading) -> str:
    return f"{led.holder or 'somebody'}{f' at {led.address}' if led.address else ''}"


def _say(words: str) -> None:
    print(words, file=sys.stderr)

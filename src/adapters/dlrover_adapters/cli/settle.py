"""Which run the masters of several hosts serve: settled in their shared log by each launcher, before it starts a master.

Whoever leads for a moment continues the job's live run, or begins one; whoever finds the job led stands by for the run that is
led. So masters started at the same instant serve one run, and a standby's master that is started again when that run has
ended finds it ended, and begins no other.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dlrover_adapters.cli.places import shown
from dlrover_adapters.cli.settings import Settings
from dlrover_core.errors import NotLeading, SpecError
from dlrover_core.kernel.log import EventLog, Leadership
from dlrover_core.runtime.beginning import begin
from dlrover_core.runtime.restoring import caught_up, restored

LOOK_AGAIN_S = 0.1
SAY_S, SAY_EVERY_S = 2.0, 10.0
LEAVE_S = 30.0
"""How long, beyond the job's own grace, a leader may take to be done with a run that is over."""


class Differs(NamedTuple):
    """A setting that two specs of one job do not share."""

    name: str
    theirs: object
    ours: object

    def __str__(self) -> str:
        return f"{self.name} is {self.theirs} there, {self.ours} here"


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
                _check_same(settings, state.job.spec_json, led)
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

    In a log of this host alone none is begun: its masters do that. A live run is continued where this is a joining job of the
    very same spec: its nodes are elsewhere, and have not ended with the launcher that led them.
    """
    try:
        state = await restored(event_log, settings.job.job)
        job = state.job
        if not settings.shared and not (job.live and job.spec_json == settings.spec):
            return settings  # the one host's masters begin it
        other = differences(job.spec_json, settings.spec) if job.live else []
        if job.live and settings.joining and not other:
            _say(f"job {job.name} is alive in the log: its run goes on")
            return replace(settings, run=job.run)
        if other:
            _say(
                f"job {job.name} is alive in the log, with other settings: a new run takes its place: {_listed(other)}"
            )
        await begin(lead, state, settings.run, settings.spec, time.time_ns() // 1000)
        return settings
    except NotLeading:
        return None
    finally:
        await lead.resign()


def _check_same(settings: Settings, theirs: str, led: NotLeading) -> None:
    """May this host's masters stand by for that run? Raises `SpecError` that names what differs."""
    found = differences(theirs, settings.spec)
    if found:
        raise SpecError(
            "job-id",
            f"job {settings.job.job!r} runs already, led by {_who(led)}, with other settings: {_listed(found)}; "
            "say the same to stand by for it, or give this one another --job-id",
        )


def _who(led: NotLeading) -> str:
    return f"{led.holder or 'somebody'}{f' at {led.address}' if led.address else ''}"


def _listed(found: Sequence[Differs]) -> str:
    return ", ".join(map(str, found))


def differences(theirs: str, ours: str) -> list[Differs]:
    """What two specs, as JSON, do not share: by name, those of a group as ``group.name``."""
    one, other = _flat(json.loads(theirs)), _flat(json.loads(ours))
    return [
        Differs(name, one.get(name, "not set"), other.get(name, "not set"))
        for name in dict.fromkeys((*one, *other))
        if one.get(name) != other.get(name)
    ]


def _flat(spec: Mapping[str, Any]) -> dict[str, object]:
    return dict(_named(spec))


def _named(spec: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in spec.items():
        if name != "groups":
            yield name, value
            continue
        for group in value:
            yield from ((f"{group.get('name', '')}.{inner}", one) for inner, one in group.items() if inner != "name")


def _say(words: str) -> None:
    print(words, file=sys.stderr)

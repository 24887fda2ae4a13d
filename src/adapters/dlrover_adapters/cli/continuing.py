"""Going on with a live run: what two specs of one job do not share, and other sizes, which a launcher that starts again applies.

Whoever starts masters of a job under the run's own name (`run_flags`) goes on with it. Sizes may differ then, nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dlrover_core.job.job import GroupScaled, JobCreated
from dlrover_core.job.operations import ScaleGroup
from dlrover_core.job.state import JobState
from dlrover_core.kernel.log import EventLog
from dlrover_core.spec import JobSpec

_SIZES = ("nodes_min", "nodes_max")
REASON = "started again with other sizes"
"""Of `GroupScaled`: what a start asked for, told apart from what a person did in between."""


class Differs(NamedTuple):
    """A setting that two specs of one job do not share."""

    name: str
    theirs: object
    ours: object

    def __str__(self) -> str:
        return f"{self.name} is {self.theirs} there, {self.ours} here"


def differences(theirs: str, ours: str, *, sizes: bool = True) -> list[Differs]:
    """What two specs, as JSON, do not share: by name, those of a group as ``group.name``; with or without groups' sizes.

    A setting that the release which wrote a spec did not know has its default.
    """
    one, other = (_flat(json.loads(JobSpec.from_json(spec).to_json())) for spec in (theirs, ours))
    return [
        Differs(name, one.get(name, "not set"), other.get(name, "not set"))
        for name in dict.fromkeys((*one, *other))
        if one.get(name) != other.get(name) and (sizes or name.rpartition(".")[2] not in _SIZES)
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


async def resizing(event_log: EventLog, state: JobState, ours: str) -> list[ScaleGroup]:
    """The changes of size that a start with the spec ``ours`` asks for, of the live run that ``state`` is.

    Sizes that the last start asked for already are no change: a person may have scaled the group since, and means it.
    """
    wanted = {group.name: (group.nodes_min, group.nodes_max) for group in JobSpec.from_json(ours).groups}
    inforce = {group.name: (group.nodes_min, group.nodes_max) for group in state.job.spec.groups}
    if wanted == inforce:
        return []
    asked = await _asked_last(event_log, state)
    return [
        ScaleGroup(name, *size, REASON)
        for name, size in wanted.items()
        if size not in (inforce.get(name), asked.get(name))
    ]


async def _asked_last(event_log: EventLog, state: JobState) -> dict[str, tuple[int, int]]:
    """By group, the sizes of the newest start of this run."""
    found: dict[str, tuple[int, int]] = {}
    async for record in event_log.read(state.job.name):
        match record.event:
            case JobCreated(_, run, spec) if run == state.job.run:
                found = {one.name: (one.nodes_min, one.nodes_max) for one in JobSpec.from_json(spec).groups}
            case GroupScaled(group, fewest, most, reason) if reason == REASON:
                found[group] = (fewest, most)
    return found


def listed(found: Sequence[object]) -> str:
    """Several of them, in words."""
    return ", ".join(map(str, found))

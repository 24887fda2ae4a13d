"""The steps under a URL: which are complete, how large, how old; and removing them so that none is ever taken for whole."""

from __future__ import annotations

import time
from typing import NamedTuple

from dlrover_adapters.checkpoint.manifests import (
    METADATA,
    SEAL,
    CheckpointDamaged,
    CheckpointTooNew,
    Part,
    Seal,
    is_ours,
    part_of,
    step_name,
    step_of,
)
from dlrover_adapters.checkpoint.places import Entry, Place
from dlrover_core.checkpoint.retention import Stored, to_go

COMPLETE, INCOMPLETE, DAMAGED, NEWER = "complete", "incomplete", "damaged", "newer"


class Step(NamedTuple):
    """A step as it lies there. ``state``: `COMPLETE`: sealed, which says nothing of each byte; `INCOMPLETE`; `DAMAGED`: its seal
    cannot be read; `NEWER`: a newer version of ours wrote it.

    ``size`` in bytes; ``changed``: when anything in it was, in seconds since 1970; ``parts``: how many ranks' parts there are.
    ``generation`` -1, ``run`` and ``job`` empty where nothing in it says so. ``why``: in words, unless it is complete.
    """

    step: int
    state: str
    size: int
    changed: float
    kind: str = ""
    run: str = ""
    generation: int = -1
    world: int = 0
    parts: int = 0
    why: str = ""
    job: str = ""


def steps(place: Place) -> list[Step]:
    """All steps, oldest first. Raises `OSError` with the URL."""
    found = [step_of(one.name) for one in place.ls() if one.folder]
    return [look(place, step) for step in sorted(one for one in found if one is not None)]


def look(place: Place, step: int) -> Step:
    """One step: its listing, and one manifest of it."""
    folder = step_name(step)
    files = place.ls(folder)
    changed = max((one.changed for one in files), default=0.0)
    ranks = [rank for rank in (part_of(one.name) for one in files) if rank is not None]
    size = sum(one.size for one in files)
    found = Step(step, INCOMPLETE, size, changed, parts=len(ranks))
    name = f"{folder}/{SEAL}"
    if any(one.name == SEAL for one in files):
        try:
            seal = Seal.unpacked(place.get(name), place.shown(name))
        except FileNotFoundError:
            return _part(place, found, files)
        except CheckpointDamaged as error:
            told = _part(place, found, files)
            return told if told.state == NEWER else told._replace(state=DAMAGED, why=str(error))
        except CheckpointTooNew as error:
            return found._replace(state=NEWER, why=str(error))
        if seal.step != step:
            return found._replace(state=DAMAGED, why=f"its manifest is of step {seal.step}")
        told = found._replace(kind=seal.kind, run=seal.run, generation=seal.generation, world=seal.world, job=seal.job)
        return told._replace(state=COMPLETE)
    return _part(place, found, files)


def _part(place: Place, found: Step, files: list[Entry]) -> Step:
    """What is known of a step that is not complete, from the part that was written last."""
    parts = [one for one in files if part_of(one.name) is not None]
    if not parts:
        return found._replace(why="no rank has written its part")
    name = f"{step_name(found.step)}/{max(parts, key=lambda one: one.changed).name}"
    try:
        part = Part.unpacked(place.get(name), place.shown(name))
    except (FileNotFoundError, CheckpointDamaged) as error:
        return found._replace(why=str(error))
    except CheckpointTooNew as error:
        return found._replace(state=NEWER, why=str(error))
    told = found._replace(kind=part.kind, run=part.run, generation=part.generation, world=part.world, job=part.job)
    return told._replace(why=f"{found.parts} parts, not sealed")


def newest(found: list[Step]) -> Step | None:
    """The newest complete one: of the newest generation, and there the greatest step."""
    complete = [one for one in found if one.state == COMPLETE]
    return max(complete, key=lambda one: (one.changed, one.generation, one.step), default=None)


def retain(
    place: Place,
    keep: int,
    *,
    run: str = "",
    job: str = "",
    everybody: bool = False,
    now: float | None = None,
) -> list[int]:
    """Remove what is not to be kept of this job, earlier runs of it included; which steps went.

    ``run``: whose steps are newer than all others'. ``job``: its name; empty: no agent gave one, then steps that have none
    either are ours. ``everybody``: all jobs' steps are one list, as somebody asked for by hand. ``now`` in seconds since 1970.
    Never touched: steps of another job name, what a newer version wrote, folders that no manifest says to be ours. Raises
    `OSError` with the URL.
    """
    now = time.time() if now is None else now
    stored = [
        Stored(
            one.step, one.state == COMPLETE, one.generation, one.run == run or everybody, max(now - one.changed, 0.0)
        )
        for one in steps(place)
        if one.state != NEWER and one.generation >= 0 and (everybody or _is_of(one, run, job))
    ]
    going = list(to_go(stored, keep))
    for step in going:
        delete(place, step)
    return going


def _is_of(one: Step, run: str, job: str) -> bool:
    """Did this job write it, in this run or an earlier one?"""
    if run and one.run == run:
        return True
    return one.job == job and (bool(job) or one.run == run)


def delete(place: Place, step: int) -> None:
    """Remove a step, and only files that are named as ours are: what else lies in its folder stays. Raises `OSError`.

    First goes what says that it is complete, then the parts but one, then the bytes, and last the part that says whose they were:
    what a kill leaves is incomplete, and known to be ours.
    """
    folder = step_name(step)
    place.rm(f"{folder}/{SEAL}")
    place.sync(folder)
    names = [one.name for one in place.ls(folder, drafts=True) if not one.folder and is_ours(one.name)]
    last = [name for name in names if part_of(name) is not None][-1:]
    first = [name for name in names if (name == METADATA or part_of(name) is not None) and name not in last]
    for name in first:
        place.rm(f"{folder}/{name}")
    place.sync(folder)
    for name in names:
        if name not in first and name not in last:
            place.rm(f"{folder}/{name}")
    place.sync(folder)
    for name in last:
        place.rm(f"{folder}/{name}")
    place.rmdir(folder)

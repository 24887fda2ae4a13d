"""Compares a disturbed run with an undisturbed one, bit for bit, from what the ranks of both wrote down. Imports nothing of ours.

The files ``rank-R`` of a folder hold lines of JSON (`ranks.py`), each of one ``life``. The first line of a life has ``restored``,
``tier``, ``world`` and ``whole``; each step has ``loss``, ``extra``, ``drawn`` and ``whole``; the last line of a life that
was not killed has ``ended``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]
COMPARED = ("loss", "extra", "drawn", "whole")


class Wrong(AssertionError):
    """The disturbed run differs from the undisturbed one. The message names life, rank, step and tensor."""


class Found(NamedTuple):
    """The result of a run that is equal."""

    restored: int
    """The step that the second life restored."""
    tier: str
    """The tiers that ranks restored it from, joined by "+"."""
    compared: int
    """How many steps of single ranks were compared."""


def lives(folder: Path) -> list[dict[int, list[Line]]]:
    """Read the lines of each rank in each life, the first life first."""
    found: dict[int, dict[int, list[Line]]] = {}
    for path in sorted(folder.glob("rank-*")):
        for line in path.read_text().splitlines():
            told = json.loads(line)
            found.setdefault(told["life"], {}).setdefault(int(path.name[5:]), []).append(told)
    return [found[life] for life in sorted(found)]


def check(folder: Path, control: Path, *, steps: int, least: int, tiers: set[str], reshaped: bool = False) -> Found:
    """Compare the run in ``folder`` with the one in ``control``, step by step, rank by rank.

    ``least``: the oldest step that may be restored. ``tiers``: where it may be restored from. ``reshaped``: the second life has
    another world size; then only its full tensors after the restore are compared, and its losses have to be finite.
    Raises `Wrong`.
    """
    told, (undisturbed,) = lives(folder), lives(control)
    if len(told) < 2:
        raise Wrong(f"{len(told)} lives, where the second one was to restore something")
    compared = 0
    for number, life in enumerate(told):
        last = number == len(told) - 1
        same_ranks = number == 0 or not reshaped
        if same_ranks and life.keys() != undisturbed.keys():
            raise Wrong(f"life {number} has ranks {sorted(life)}, the control {sorted(undisturbed)}")
        if number:
            _begun(number, life, least, tiers)
            _same_state(number, life, undisturbed)
        if same_ranks:
            compared += sum(_equal(rank, number, life[rank], undisturbed[rank]) for rank in life)
        if last:
            _finished(life, steps)
    first = next(iter(told[1].values()))[0]
    return Found(first["restored"], "+".join(sorted({lines[0]["tier"] for lines in told[1].values()})), compared)


def _begun(number: int, life: dict[int, list[Line]], least: int, tiers: set[str]) -> None:
    """Raise `Wrong` unless all ranks restored the same step, new enough, from an allowed tier."""
    steps = {rank: lines[0]["restored"] for rank, lines in life.items()}
    if len(set(steps.values())) != 1:
        raise Wrong(f"life {number}: ranks restored different steps: {steps}")
    if min(steps.values()) < least:
        raise Wrong(f"life {number} restored step {min(steps.values())}, though step {least} was safe")
    found = {lines[0]["tier"] for lines in life.values()}
    if not found <= tiers:
        raise Wrong(f"life {number} was restored from {sorted(found)}, not from {sorted(tiers)}")


def _equal(rank: int, number: int, lines: list[Line], control: list[Line]) -> int:
    """Count the steps of a rank's life, all of which equal the control's. Raises `Wrong` at the first difference."""
    wanted = {one["step"]: one for one in control if "step" in one}
    at = lines[0]["restored"]
    made = [one for one in lines if "step" in one]
    for one in made:
        at += 1
        if one["step"] != at:
            raise Wrong(f"life {number}, rank {rank}: step {one['step']} came where {at} was due")
        for key in COMPARED:
            if one[key] != wanted[at][key]:
                what = _difference(one[key], wanted[at][key])
                raise Wrong(
                    f"life {number}, rank {rank}, restored {lines[0]['restored']} from {lines[0]['tier']}: {key} of step {at}: "
                    f"{what}"
                )
    return len(made)


def _difference(found: Any, wanted: Any) -> str:
    if isinstance(found, dict) and isinstance(wanted, dict):
        names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
        return f"{len(names)} of {len(wanted)} tensors differ: {', '.join(names[:4])}"
    return f"{found}, not {wanted}"


def _united(life: dict[int, list[Line]], at: int) -> dict[str, str]:
    """Collect the full tensors of all ranks after step ``at``. Raises `Wrong` where ranks differ in one."""
    found: dict[str, str] = {}
    for rank, lines in life.items():
        mine = next((one for one in lines if at in (one.get("step"), one.get("restored"))), None)
        for name, value in mine["whole"].items() if mine else ():
            if found.setdefault(name, value) != value:
                raise Wrong(f"{name} after step {at} differs between ranks; rank {rank} is one of them")
    return found


def _same_state(number: int, life: dict[int, list[Line]], undisturbed: dict[int, list[Line]]) -> None:
    """Raise `Wrong` unless the full tensors after the restore are the control's after that step."""
    at = next(iter(life.values()))[0]["restored"]
    found, wanted = _united(life, at), _united(undisturbed, at)
    if found != wanted:
        raise Wrong(f"life {number} restored step {at}, but {_difference(found, wanted)}")


def _finished(life: dict[int, list[Line]], steps: int) -> None:
    """Raise `Wrong` unless all ranks came to the end and all losses are finite."""
    for rank, lines in life.items():
        if lines[-1].get("ended") != steps:
            raise Wrong(f"rank {rank} did not end after step {steps}, its last line is {json.dumps(lines[-1])[:200]}")
        for one in lines:
            if "loss" in one and not math.isfinite(float.fromhex(one["loss"])):
                raise Wrong(f"rank {rank}: the loss of step {one['step']} is {one['loss']}")

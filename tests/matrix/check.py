"""Was a disturbed run the undisturbed one, bit for bit? Reads what ranks wrote down (`ranks.py`), and knows of nothing else.

The files ``rank-R`` of a folder hold lines of JSON, each of one ``life``. A life begins with ``restored``, ``tier``, ``world``
and ``whole``; then come steps, with ``loss``, ``extra``, ``drawn`` and ``whole``; a life that was not struck closes with ``ended``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]
COMPARED = ("loss", "extra", "drawn", "whole")


class Wrong(AssertionError):
    """The disturbed run is not the undisturbed one. The message says where they part."""


class Found(NamedTuple):
    """What a run that is right came to.

    ``restored``: the step that its second life began with; ``tier``: from where, of all ranks; ``compared``: lines that are equal.
    """

    restored: int
    tier: str
    compared: int


def lives(folder: Path) -> list[dict[int, list[Line]]]:
    """What each rank wrote in each life, the first life first."""
    found: dict[int, dict[int, list[Line]]] = {}
    for path in sorted(folder.glob("rank-*")):
        for line in path.read_text().splitlines():
            told = json.loads(line)
            found.setdefault(told["life"], {}).setdefault(int(path.name[5:]), []).append(told)
    return [found[life] for life in sorted(found)]


def check(folder: Path, control: Path, *, steps: int, least: int, tiers: set[str], reshaped: bool = False) -> Found:
    """Compare. ``least``: the oldest step that may be restored. ``reshaped``: the second life has other ranks.

    Then its state after the restore is compared with the one that was saved, and its losses only have to be numbers.
    Raises `Wrong`.
    """
    told, (undisturbed,) = lives(folder), lives(control)
    if len(told) < 2:
        raise Wrong(f"{len(told)} lives, where the second one was to restore something")
    compared = 0
    for number, life in enumerate(told):
        last = number == len(told) - 1
        if number == 0 or not reshaped:
            if life.keys() != undisturbed.keys():
                raise Wrong(f"life {number} has ranks {sorted(life)}, the control {sorted(undisturbed)}")
            compared += sum(_equal(rank, number, life[rank], undisturbed[rank]) for rank in life)
        if number:
            _same_state(number, life, undisturbed)
            _begun(number, life, least, tiers)
        if last:
            _finished(life, steps)
    first = next(iter(told[1].values()))[0]
    return Found(first["restored"], "+".join(sorted({lines[0]["tier"] for lines in told[1].values()})), compared)


def _begun(number: int, life: dict[int, list[Line]], least: int, tiers: set[str]) -> None:
    """All ranks have begun with the same step, which is new enough, from a place where it may come from."""
    steps = {rank: lines[0]["restored"] for rank, lines in life.items()}
    if len(set(steps.values())) != 1:
        raise Wrong(f"life {number}: ranks restored different steps: {steps}")
    if min(steps.values()) < least:
        raise Wrong(f"life {number} restored step {min(steps.values())}, though step {least} was safe")
    found = {lines[0]["tier"] for lines in life.values()}
    if not found <= tiers:
        raise Wrong(f"life {number} was restored from {sorted(found)}, not from {sorted(tiers)}")


def _equal(rank: int, number: int, lines: list[Line], control: list[Line]) -> int:
    """Every step of a rank's life is the control's; how many there are. Raises `Wrong` at the first difference."""
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
    """The full tensors of all ranks as they are after step ``at``, which a life may have restored. Raises `Wrong`."""
    found: dict[str, str] = {}
    for rank, lines in life.items():
        mine = next((one for one in lines if at in (one.get("step"), one.get("restored"))), None)
        for name, value in mine["whole"].items() if mine else ():
            if found.setdefault(name, value) != value:
                raise Wrong(f"{name} after step {at} differs between ranks; rank {rank} is one of them")
    return found


def _same_state(number: int, life: dict[int, list[Line]], undisturbed: dict[int, list[Line]]) -> None:
    """What was restored is what was saved, which is what the control had."""
    at = next(iter(life.values()))[0]["restored"]
    found, wanted = _united(life, at), _united(undisturbed, at)
    if found != wanted:
        raise Wrong(f"life {number} restored step {at}, but {_difference(found, wanted)}")


def _finished(life: dict[int, list[Line]], steps: int) -> None:
    """All ranks came to the end, and all losses are numbers."""
    for rank, lines in life.items():
        if lines[-1].get("ended") != steps:
            raise Wrong(f"rank {rank} did not end after step {steps}, its last line is {json.dumps(lines[-1])[:200]}")
        for one in lines:
            if "loss" in one and not math.isfinite(float.fromhex(one["loss"])):
                raise Wrong(f"rank {rank}: the loss of step {one['step']} is {one['loss']}")

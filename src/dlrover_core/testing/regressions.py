"""Replay tokens that once failed, in a file, one a line: they are replayed before anything new is tried.

``TOKEN``, then the id of the test that it belongs to, or nothing: then it belongs to every test of chaos. After ``#`` stands
what went wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dlrover_core.errors import PlanError
from dlrover_core.sim.scenario import Plan, plan_of

FILE = "CHAOS_REGRESSIONS"


class Regression(NamedTuple):
    """One line of the file. ``call`` is which simulation of the test it was, counted from 1."""

    token: str
    plan: Plan
    call: int = 1
    test: str = ""
    why: str = ""


def read_token(text: str) -> tuple[Plan, int]:
    """The plan of a token, and which simulation of its test it was: ``TOKEN``, or ``TOKEN@2``. Raises `PlanError`."""
    token, at, call = text.strip().partition("@")
    if at and not (call.isdecimal() and int(call)):
        raise PlanError(f"{text.strip()[-20:]!r}: after the @ of a replay token stands which simulation it was, from 1")
    return plan_of(token), int(call or 1)


def read(path: Path) -> list[Regression]:
    """All of a file. Raises `PlanError`, which names the line."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words, _, why = f" {line}".partition(" #")
        token, _, test = words.strip().partition(" ")
        if not token:
            continue
        try:
            plan, call = read_token(token)
        except PlanError as error:
            raise PlanError(f"{path}:{number}: {error}") from error
        found.append(Regression(token, plan, call, test.strip(), why.strip()))
    return found


def of(regressions: Iterable[Regression], test: str) -> list[Regression]:
    """Those of a test, by its id."""
    return [one for one in regressions if one.test in ("", test)]


def line(token: str, test: str = "", why: str = "") -> str:
    """A line for the file."""
    return f"{token} {test}".rstrip() + (f"  # {why}" if why else "")

"""What failures look like: the table of signatures, a data file, and a user's own beside it.

A signature names one kind of failure: its class, the scope it speaks about, the action that usually suffices, and the texts or
codes by which it is known. Matching itself is `matching`'s.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same library under the name it had before
    import tomli as tomllib

# What usually suffices. `obs`: record only; `retry`: again in place; `proc`: restart the processes; `relaunch`: a new node;
# `isolate`: relaunch elsewhere and keep off the host until it has proved itself; `reset`: as `isolate`, its GPU needs a reset;
# `mem+`: relaunch with more memory; `shrink`: go on without; `fail`: end the job; `wait`: back off; `check`: check first.
ACTIONS = ("obs", "retry", "proc", "relaunch", "isolate", "reset", "mem+", "shrink", "fail", "wait", "check")


class Signature(NamedTuple):
    """One kind of failure. ``sources``: where it may be seen; ``codes``: exit codes, Xids or reasons that mean it."""

    id: str
    title: str
    verdict: str
    action: str
    scope: str
    confidence: float
    sources: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    origin: str = ""


class Table:
    """Signatures by id. A later one of the same id takes the earlier one's place."""

    def __init__(self, signatures: tuple[Signature, ...]) -> None:
        self.by_id: Mapping[str, Signature] = {one.id: one for one in signatures}

    def get(self, name: str) -> Signature | None:
        """The signature of that id."""
        return self.by_id.get(name)


@functools.lru_cache(maxsize=8)
def table(extra: str = "") -> Table:
    """The table; ``extra``: a user's own signatures, as `JobSpec.signatures` holds them (JSON, a list of tables)."""
    text = resources.files(__package__).joinpath("signatures.toml").read_text(encoding="utf-8")
    rows = [*tomllib.loads(text)["signature"], *(json.loads(extra) if extra else ())]
    return Table(tuple(_signature(row) for row in rows))


def _signature(row: Mapping[str, Any]) -> Signature:
    return Signature(
        id=row["id"],
        title=row["title"],
        verdict=row["class"],
        action=row["action"],
        scope=row.get("scope", "process"),
        confidence=float(row.get("confidence", 0.8)),
        sources=tuple(row.get("sources", ())),
        patterns=tuple(row.get("patterns", ())),
        codes=tuple(map(str, row.get("codes", ()))),
        origin=row.get("origin", ""),
    )

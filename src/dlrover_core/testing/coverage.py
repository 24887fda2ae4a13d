"""Which kind of fault has struck a job in which state: what a campaign has seen, and above all what it has not.

Seeds that break no promise prove nothing about what never happened in them. So the cells that fixed seeds reach are kept in a
file, and a cell that is empty one day fails: the harness has gone blind in one eye, whatever the seeds say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from dlrover_core.errors import PlanError

Cell = tuple[str, str]
"""A kind of fault, and a state of the job."""

_HEAD = "# Fault kind: states of the job in which fixed seeds strike it. Made by: {how}\n"


def merged(hits: Iterable[Mapping[Cell, int]]) -> Counter[Cell]:
    """The sum of what several runs have hit."""
    total: Counter[Cell] = Counter()
    for one in hits:
        total.update(one)
    return total


def table(hits: Mapping[Cell, int], kinds: Iterable[str] = ()) -> list[str]:
    """The matrix as lines: a row per kind (``kinds`` that never struck, too), a column per state, ``.`` for never."""
    states = sorted({state for _, state in hits})
    rows = sorted({*kinds, *(kind for kind, _ in hits)})
    cells = [["", *states], *([row, *(str(hits.get((row, state), 0) or ".") for state in states)] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(states) + 1)]
    return [
        "  ".join([line[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(line[1:], widths[1:], strict=True))])
        for line in cells
    ]


def save(path: Path, hits: Mapping[Cell, int], how: str) -> None:
    """Keep the cells that were hit, without how often: a change of the engine moves the counts and not the cells.

    ``how`` is the command that makes the file anew.
    """
    lines = [
        f"{row}: {' '.join(sorted(state for kind, state in hits if kind == row))}\n"
        for row in sorted({kind for kind, _ in hits})
    ]
    path.write_text(_HEAD.format(how=how) + "".join(lines))


def load(path: Path) -> frozenset[Cell]:
    """The cells that are kept. Raises `PlanError`."""
    cells: set[Cell] = set()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        kind, colon, states = line.partition("#")[0].strip().partition(":")
        if kind and not (colon and states.split()):
            raise PlanError(f"{path}:{number}: not 'kind: state state ...': {line[:80]!r}")
        cells |= {(kind, state) for state in states.split()}
    return frozenset(cells)


def gone(expected: Iterable[Cell], hits: Mapping[Cell, int]) -> list[str]:
    """The cells that used to be hit and are not: ``kind while state``, sorted."""
    return [f"{kind} while {state}" for kind, state in sorted(expected) if not hits.get((kind, state))]

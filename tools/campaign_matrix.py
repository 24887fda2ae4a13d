"""The campaign `matrix`: every cell of tests/matrix is a real job that is killed and must equal an undisturbed run.

``python -m tools.campaign matrix`` runs what has no result yet; ``python -m tools.campaign_matrix --only NAME`` runs one cell
again (part of a name: all that have it), ``--jobs N`` several at a time, ``--anew`` all of them. What a failing cell left
behind lies in build/matrix/NAME: what ranks wrote down, all output, the control log, and the command that runs it again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.matrix.cells import Cell, Wrong, cells, command, controls, run

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "matrix.json"
KEPT = ROOT / "build" / "matrix"


def tried(cell: Cell, folder: Path, controls_at: Path) -> dict[str, Any]:
    """One cell's result: ``met``, and what was found or how it went wrong."""
    began = time.monotonic()
    try:
        return {"met": True, "expected": cell.expected, **run(cell, folder, controls_at)}
    except Wrong as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is a find
        why = f"{type(error).__name__}: {error}"
    kept = KEPT / cell.name
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder, kept, ignore=_unreadable, ignore_dangling_symlinks=True)
    took_s = round(time.monotonic() - began, 1)
    return {
        "met": False,
        "expected": cell.expected,
        "why": why[:700].replace(str(folder), "."),
        "again": command(cell),
        "took_s": took_s,
    }


def _unreadable(folder: str, names: list[str]) -> set[str]:
    """Sockets and the like."""
    return {one for one in names if not ((path := Path(folder) / one).is_file() or path.is_dir())}


class Campaign:
    """The result on disk, which grows by a cell at a time."""

    def __init__(self, chosen: list[Cell], machine: dict[str, Any], *, anew: bool) -> None:
        self.result: dict[str, Any] = {"campaign": "matrix", "machine": machine, "took_s": 0.0, "cells": {}}
        if RESULT.exists():
            self.result["cells"] = json.loads(RESULT.read_text())["cells"]
        done = self.result["cells"]
        known = {one.name for one in cells()}
        self.result["cells"] = done = {name: one for name, one in done.items() if name in known}
        self.todo = [one for one in chosen if anew or not done.get(one.name, {}).get("met")]
        self._lock = threading.Lock()
        self._began, self._made = time.monotonic(), 0
        self._until = float("inf")

    def run(self, jobs: int, *, for_s: float = 0.0) -> int:
        """All that is to be done, or what begins within ``for_s`` seconds; how many cells of all do not hold."""
        self._until = self._began + for_s if for_s else float("inf")
        with tempfile.TemporaryDirectory(prefix="matrix-") as text:
            folder = Path(text)
            controls(sorted({one.row.kind for one in self.todo if not one.row.words}), folder / "controls")
            with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
                waiting = [pool.submit(self._one, cell, folder) for cell in self.todo]
                try:
                    for one in concurrent.futures.as_completed(waiting):
                        one.result()
                except KeyboardInterrupt:
                    for one in waiting:
                        one.cancel()
                    raise
        print(file=sys.stderr)
        return sum(not one["met"] for one in self.result["cells"].values())

    def _one(self, cell: Cell, folder: Path) -> None:
        if time.monotonic() > self._until:
            return
        found = tried(cell, folder / cell.name, folder / "controls")
        shutil.rmtree(folder / cell.name, ignore_errors=True)
        with self._lock:
            self._made += 1
            order = [one.name for one in cells()]
            merged = {**self.result["cells"], cell.name: found}
            self.result["cells"] = {name: merged[name] for name in order if name in merged}
            self.result["took_s"] = round(sum(one["took_s"] for one in merged.values()), 1)
            RESULT.write_text(json.dumps(self.result, indent=1) + "\n")
            if not found["met"]:
                print(f"\n{cell.name}: {found['why']}", file=sys.stderr)
            left = len(self.todo) - self._made
            bad = sum(not one["met"] for one in self.result["cells"].values())
            took_s = time.monotonic() - self._began
            print(
                f"\rmatrix: {self._made} cells in {took_s:.0f} s, {left} left, {bad} do not hold",
                end="",
                file=sys.stderr,
            )


def campaign(seed: int, trials: int, machine: dict[str, Any], *, jobs: int = 2) -> int:
    """Go on where the result stopped, for ``trials`` cells (0: all); how many do not hold. ``seed``: nothing is drawn."""
    del seed
    missing = Campaign(cells(), machine, anew=False)
    missing.todo = missing.todo[: trials or None]
    return missing.run(jobs)


def main() -> int:
    """Some cells, or all."""
    from tools.campaign import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cells that have this in their names, done or not")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default 2)")
    parser.add_argument("--anew", action="store_true", help="run all again, done or not")
    parser.add_argument(
        "--for-s", type=float, default=0.0, help="begin no more cells after so many seconds; 0: no bound"
    )
    options = parser.parse_args()
    chosen = [one for one in cells() if options.only in one.name]
    if not chosen:
        parser.error(f"no cell has {options.only!r} in its name; they are called like {cells()[0].name}")
    found = Campaign(chosen, machine(), anew=options.anew or bool(options.only))
    return found.run(options.jobs, for_s=options.for_s) > 0


if __name__ == "__main__":
    sys.exit(main())

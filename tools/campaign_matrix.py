"""The campaign `matrix`: runs the cells of tests/matrix, real jobs that are killed and must equal undisturbed runs.

``python -m tools.campaign_matrix`` runs the cells without a result, or all if none is missing; ``--failed`` those that do not
hold; ``--only NAME`` those with NAME in their names. What a failing cell left behind lies in build/matrix/NAME: what its ranks
wrote down, all output, the control log, and in ``command`` what runs it again.
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
JOBS = 2


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
    """Cells that are run, and the result on disk, which grows by a cell at a time. Two campaigns may run side by side."""

    def __init__(self, chosen: list[Cell], machine: dict[str, Any]) -> None:
        self._todo, self._machine = chosen, machine
        self._lock = threading.Lock()
        self._began, self._until, self._made = time.monotonic(), float("inf"), 0

    def run(self, jobs: int, *, for_s: float = 0.0) -> int:
        """Run all cells, or those that begin within ``for_s`` seconds. Returns how many of all results do not hold."""
        self._until = self._began + for_s if for_s else float("inf")
        with tempfile.TemporaryDirectory(prefix="matrix-") as text:
            folder = Path(text)
            controls(sorted({one.row.kind for one in self._todo if not one.row.words}), folder / "controls")
            with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
                waiting = [pool.submit(self._one, cell, folder) for cell in self._todo]
                try:
                    for one in concurrent.futures.as_completed(waiting):
                        one.result()
                except KeyboardInterrupt:
                    for one in waiting:
                        one.cancel()
                    raise
        print(file=sys.stderr)
        return sum(not one["met"] for one in known().values())

    def _one(self, cell: Cell, folder: Path) -> None:
        if time.monotonic() > self._until:
            return
        found = tried(cell, folder / cell.name, folder / "controls")
        shutil.rmtree(folder / cell.name, ignore_errors=True)
        with self._lock:
            self._made += 1
            results = self._saved(cell, found)
            if not found["met"]:
                print(f"\n{cell.name}: {found['why']}", file=sys.stderr)
            bad = sum(not one["met"] for one in results.values())
            left, took_s = len(self._todo) - self._made, time.monotonic() - self._began
            line = f"matrix: {self._made} cells in {took_s:.0f} s, {left} left, {bad} of {len(results)} do not hold"
            print(f"\r{line}", end="", file=sys.stderr, flush=True)

    def _saved(self, cell: Cell, found: dict[str, Any]) -> dict[str, Any]:
        """Add a result to those on disk, in the order of the table."""
        merged = {**known(), cell.name: found}
        results = {one.name: merged[one.name] for one in cells() if one.name in merged}
        took_s = round(sum(one["took_s"] for one in results.values()), 1)
        told = {"campaign": "matrix", "machine": self._machine, "took_s": took_s, "cells": results}
        RESULT.write_text(json.dumps(told, indent=1) + "\n")
        return results


def known() -> dict[str, Any]:
    """The results on disk, by the names of their cells."""
    return dict(json.loads(RESULT.read_text())["cells"]) if RESULT.exists() else {}


def missing() -> list[Cell]:
    """Cells without a result; all of them where none is missing."""
    done = known()
    return [one for one in cells() if one.name not in done] or cells()


def campaign(seed: int, trials: int, machine: dict[str, Any]) -> int:
    """Go on where the result stopped, or begin anew if it is complete, for ``trials`` cells (0: all).

    Returns how many results do not hold. ``seed``: nothing is drawn here.
    """
    del seed
    return Campaign(missing()[: trials or None], machine).run(JOBS)


def main() -> int:
    """Some cells, or all."""
    from tools.campaign import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cells that have this in their names, done or not")
    parser.add_argument("--failed", action="store_true", help="run the cells again whose results do not hold")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"how many at a time (default {JOBS})")
    parser.add_argument(
        "--for-s", type=float, default=0.0, help="begin no more cells after so many seconds; 0: no bound (default)"
    )
    options = parser.parse_args()
    chosen = [one for one in cells() if options.only in one.name] if options.only else missing()
    if options.failed:
        bad = {name for name, one in known().items() if not one["met"]}
        chosen = [one for one in cells() if one.name in bad and options.only in one.name]
    if not chosen:
        parser.error(f"no cell has {options.only!r} in its name; they are called like {cells()[0].name}")
    return Campaign(chosen, machine()).run(options.jobs, for_s=options.for_s) > 0


if __name__ == "__main__":
    sys.exit(main())

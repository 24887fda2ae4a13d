"""Trials of a campaign, several at once: each is done once, its result is on disk when it ends, and a stopped campaign goes on.

A trial is a number, and a function that returns what it found, or raises AssertionError for a broken promise. The result in
``benchmarks/results/NAME.json`` says date, commit, machine, how many trials there were, and what each of them found. All trials
that broke a promise are listed in it by number.
"""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Found = dict[str, Any]
TEXT_MAX = 2000
LOOK_S = 1.0


class Stopped(Exception):
    """The campaign was stopped by Ctrl-C while this trial ran."""


class Patience:
    """Waits for what other processes do, until the campaign is stopped."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def sleep(self, seconds: float) -> None:
        """Let that time pass. Raises `Stopped`."""
        if self.stop.wait(max(0.0, seconds)):
            raise Stopped

    def until(self, look: Callable[[], object], what: str, bound_s: float, look_s: float = 0.05) -> None:
        """Wait until ``look`` is true. Raises AssertionError after ``bound_s``, and `Stopped`."""
        deadline = time.monotonic() + bound_s
        while not look():
            assert time.monotonic() < deadline, f"{what}: not within {bound_s:g} s"
            self.sleep(look_s)


Trial = Callable[[int, Patience], Found]


class Trials:
    """The trials ``numbers`` of the campaign ``name``.

    ``same``: the parameters; a result of other parameters is not continued. ``machine``: where the figures come from.
    ``sums``: what the trials came to together, from all that they found.
    """

    def __init__(
        self,
        name: str,
        numbers: range,
        same: Mapping[str, Any],
        machine: Mapping[str, Any],
        sums: Callable[[list[Found]], Found],
    ) -> None:
        self._path, self._numbers, self._sums = RESULTS / f"{name}.json", numbers, sums
        self._head = {"campaign": name, **same, "machine": dict(machine)}
        self._found: dict[int, Found] = {}
        if self._path.exists():
            before = json.loads(self._path.read_text())
            earlier = {int(one.pop("trial")): one for one in before.get("found", [])}
            alike = all(before.get(key) == value for key, value in self._head.items())
            if alike and any(number not in earlier for number in numbers):
                self._found = earlier

    def run(self, trial: Trial, jobs: int) -> int:
        """Do all that are missing, ``jobs`` at a time; how many broke a promise in all."""
        patience = Patience()
        missing = [number for number in self._numbers if number not in self._found]
        waiting: set[Future[tuple[int, Found]]] = set()
        with ThreadPoolExecutor(jobs) as pool:
            try:
                while missing or waiting:
                    while missing and len(waiting) < jobs:
                        waiting.add(pool.submit(_tried, trial, missing.pop(0), patience))
                    done, waiting = wait(waiting, LOOK_S, FIRST_COMPLETED)
                    for one in done:
                        number, found = one.result()
                        self._found[number] = found
                        self._save()
            except KeyboardInterrupt:
                patience.stop.set()
                raise
        print(file=sys.stderr)
        return len(self._broken())

    def _broken(self) -> dict[str, str]:
        return {str(number): one["broken"] for number, one in sorted(self._found.items()) if "broken" in one}

    def _save(self) -> None:
        """Write the result, whole or not at all, and a line of progress."""
        told = [{"trial": number, **one} for number, one in sorted(self._found.items())]
        broken = self._broken()
        result = {
            **self._head,
            "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
            "commit": commit(),
            "trials": len(told),
            "misses": len(broken),
            "failures": broken,
            "sums": self._sums(list(self._found.values())),
        }
        lines = ",\n  ".join(json.dumps(one) for one in told)
        body = json.dumps({**result, "found": []}, indent=1).removesuffix("[]\n}") + f"[\n  {lines}\n ]\n}}\n"
        RESULTS.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(body)
        part.replace(self._path)
        line = f"{self._head['campaign']}: {len(told)} of {len(self._numbers)} trials, {len(broken)} broke a promise"
        print(f"\r{line}", end="", file=sys.stderr, flush=True)


def _tried(trial: Trial, number: int, patience: Patience) -> tuple[int, Found]:
    began, at = time.monotonic(), commit()
    try:
        found = trial(number, patience)
    except Stopped:
        raise
    except Exception as error:  # noqa: BLE001  # whatever it is, it is a find
        where = traceback.extract_tb(error.__traceback__)[-1]
        found = {"broken": f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"[:TEXT_MAX]}
    return number, {**found, "commit": at, "took_s": round(time.monotonic() - began, 1)}


def commit() -> str:
    """The commit of this tree, with ``+`` where files differ from it; empty outside of a repository."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["/usr/bin/env", "git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "tools", "tests")
    return git("rev-parse", "--short=12", "HEAD") + "+" * bool(changed)

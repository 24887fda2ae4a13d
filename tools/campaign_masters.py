"""The campaign `masters`: outages of an etcd of three members and of three masters, and masters that start at one instant.

Two of three trials are outages (`tests/integration/scripts/outages.py`), which happen one after another to the same job, to a
fresh one after `STAGE` of them; each third trial starts two masters of one new job at the same instant (`twins.py`). After
each, everything is compared with everything.

etcd 3.5.0 to 3.5.2 may lose data when killed under load: where its members' hashes differ the trial is void. It is counted and
done again on a fresh etcd; two voids of one trial in succession are a failure.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tests" / "integration" / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

from outages import OUTAGES, play  # noqa: E402
from shared_log import Stage, Void  # noqa: E402
from tools.etcd_cluster import Cluster  # noqa: E402
from twins import twins  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "masters.json"
TRIALS = 300
STAGE = 15
TWINS = "twins"


class Campaign:
    """The trials, and what they are done to: made when it is needed, thrown away when it is spoilt."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed, self._folder = seed, folder
        self._stack = contextlib.ExitStack()
        self._stage: Stage | None = None
        self._etcd: Cluster | None = None
        self._made = self._played = 0

    def name(self, number: int) -> str:
        """What happens in a trial: every outage before one happens again."""
        if number % 3 == 0:
            return TWINS
        nth = number - number // 3 - 1
        order = sorted(OUTAGES)
        random.Random(f"{self._seed}.{nth // len(order)}").shuffle(order)
        return order[nth % len(order)]

    def trial(self, number: int) -> float:
        """Seconds until something was decided again. Raises AssertionError and `Void`."""
        name = self.name(number)
        if name == TWINS:
            return twins(self._cluster(), self._fresh(), number)
        stage = self._staged()
        self._played += 1
        return play(stage, name, self._seed + number)

    def close(self) -> None:
        """End everything."""
        self._stage = self._etcd = None
        self._stack.close()

    def _staged(self) -> Stage:
        if self._stage is not None and self._played >= STAGE:
            self._stage.finish()
            self.close()
        if self._stage is None:
            self.close()
            self._stage, self._played = self._stack.enter_context(Stage(self._fresh())), 0
        return self._stage

    def _cluster(self) -> Cluster:
        if self._etcd is None:
            self._etcd = self._stack.enter_context(Cluster(directory=self._folder))
        return self._etcd

    def _fresh(self) -> Path:
        self._made += 1
        return self._folder / str(self._made)


def campaign(seed: int, trials: int, machine: dict[str, Any]) -> int:
    """Go on where an earlier one with this seed stopped; 1 where a promise was broken."""
    result: dict[str, Any] = {
        "campaign": "masters", "seed": seed, "machine": machine | {"etcd": Cluster().version}, "trials": 0, "voids": [],
        "failures": {}, "kinds": {}, "took_s": 0.0, "rows": [],
    }  # fmt: skip
    if RESULT.exists():
        found = json.loads(RESULT.read_text())
        if found["seed"] == seed and found["trials"] < trials:
            result = found
    folder = Path(tempfile.mkdtemp(prefix="masters-"))
    doing = Campaign(seed, folder)
    began, took = time.monotonic(), result["took_s"]
    try:
        while result["trials"] < trials:
            number = result["trials"] + 1
            _done(doing, number, result)
            result["trials"] = number
            result["kinds"] = by_kind(result["rows"])
            result["took_s"] = round(took + time.monotonic() - began, 1)
            save(result)
    finally:
        doing.close()
    if result["failures"]:
        print(f"\nthe jobs' folders are kept: {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    print(file=sys.stderr)
    return 0


def _done(doing: Campaign, number: int, result: dict[str, Any]) -> None:
    """One trial, twice where the first is void."""
    name = doing.name(number)
    for _ in range(2):
        try:
            result["rows"].append([number, name, round(doing.trial(number), 3)])
        except Void as void:
            result["voids"].append([number, name])
            print(f"\ntrial {number} is void: {void}", file=sys.stderr)
            doing.close()
        except Exception as error:  # noqa: BLE001  # whatever it is, it is a find
            result["failures"][str(number)] = f"{name}: {type(error).__name__}: {error}"[:2000]
            doing.close()
            return
        else:
            return
    result["failures"][str(number)] = f"{name}: void twice in succession"


def by_kind(rows: list[list[Any]]) -> dict[str, dict[str, float]]:
    """Seconds until something was decided again, by what had happened; of twins, until one leads and one stands by."""
    groups: dict[str, list[float]] = {}
    for _, name, took_s in rows:
        groups.setdefault(name, []).append(took_s)
    return {
        name: {"trials": len(those), "median_s": round(statistics.median(those), 3), "max_s": round(max(those), 3)}
        for name, those in sorted(groups.items())
    }


def save(result: dict[str, Any]) -> None:
    """Write the result whole or not at all, and a line of progress."""
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    part = RESULT.with_suffix(".part")
    lines = ",\n  ".join(json.dumps(one) for one in result["rows"])
    body = json.dumps({**result, "rows": []}, indent=1).replace('"rows": []', f'"rows": [\n  {lines}\n ]')
    part.write_text(body + "\n")
    part.replace(RESULT)
    last = result["rows"][-1] if result["rows"] else []
    failed, voids = len(result["failures"]), len(result["voids"])
    line = f"masters: {result['trials']}, {failed} failures, {voids} void, last {last}, {result['took_s']:.0f} s"
    print(f"\r{line:<100}", end="", file=sys.stderr, flush=True)

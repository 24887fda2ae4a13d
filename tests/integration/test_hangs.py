"""Ranks that hang, in real processes: named by what is seen from outside, restarted without help; and what is no hang."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import dlrover
from running import warmth

from dlrover_adapters.torch import witness

SCRIPT = Path(__file__).parent / "scripts" / "hangs.py"
THRESHOLD_S, ALLOWED_S = 2.0, 8.0  # on a quiet machine 1.2; whoever waits in vain for stacks waits for 15
BOUND_S = 100


def run(folder: Path, plan: str, *options: str, steps: int = 60) -> subprocess.CompletedProcess[str]:
    """One job of two ranks."""
    line = [
        str(Path(sys.executable).with_name("dlrover-run")),
        "--state-dir",
        str(folder / "state"),
        "--job-id",
        "hangs",
    ]
    line += ["--nproc-per-node", "2", "--max-restarts", "20", "--hang-timeout", str(THRESHOLD_S), *options]
    return subprocess.run(
        [*line, str(SCRIPT), plan, str(steps)],
        cwd=folder,
        env={**os.environ, **warmth([str(SCRIPT)])},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )


def events(folder: Path) -> list[dict[str, Any]]:
    """The job's log."""
    told = dlrover(["events", "--json", "--state-dir", str(folder / "state"), "hangs"])
    assert told.returncode == 0, told.stderr
    return [json.loads(row) for row in told.stdout.splitlines()]


@pytest.mark.parametrize(
    ("plan", "ranks", "stopped", "gil"),
    [
        ("phase4:0:8,sleep:1:16,gil:1:24,stop:0:32,own:1:40", [1, 1, 0, 1], [2], [1]),
        pytest.param(
            "phase4:0:8,sleep:1:16,lock:0:24,gil:1:32,stop:0:40,own:1:50",
            [1, 0, 1, 0, 1],
            [3],
            [2],
            marks=pytest.mark.nightly(reason="the shorter plan stands for it in make test"),
        ),
    ],
    ids=["short", "every kind"],
)
def test_hangs_are_named_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, ranks: list[int], stopped: list[int], gil: list[int]
) -> None:
    """Asleep, in a lock, with Python's lock, stopped: each rank is named in time, told with its stack, and the job ends well.

    An evaluation that is announced is none, however long, and who waits for it learns no longer patience from it. Where the
    script has a handler for our signal, however late it came, it is not signalled, and named all the same.
    """
    monkeypatch.setenv(witness.SIGNAL_VARIABLE, "SIGUSR1")
    done = run(tmp_path, plan)
    assert done.returncode == 0, done.stderr
    told = events(tmp_path)
    named = [one for one in told if one["event"] == "HangNamed"]
    began = [float(at) for at in re.findall(r"hangs: \d+ (?!phase)\w+ \d+ ([\d.]+)", done.stdout)]
    assert [one["fields"]["ranks"] for one in named] == [[rank] for rank in ranks]
    assert [one["fields"]["signature"] for one in named] == [
        "hang.stopped" if at in stopped else "hang.rank" for at in range(len(ranks))
    ]
    assert sum(one["event"] == "StacksSeen" for one in told) == len(ranks), "a rank was named without stacks"
    assert all("GIL" in named[at]["fields"]["rule"] for at in gil)
    after = [round(one["at_us"] / 1e6 - at - THRESHOLD_S, 2) for one, at in zip(named, began, strict=True)]
    assert all(one <= ALLOWED_S for one in after), after
    assert {one["fields"]["threshold_us"] for one in told if one["event"] == "HangSuspected"} == {2_000_000}
    assert re.search(
        r"rank 1 hangs on worker-0 in hang \(hangs\.py:\d+: time\.sleep\(1e6\)\), \d s without a step", done.stderr
    )
    stacks = re.findall(r"stacks: (\S+)", done.stderr)
    assert len(stacks) == len(ranks)
    text = Path(stacks[0]).read_text(encoding="utf-8")
    assert "in hang\n" in text
    assert "in all_reduce\n" in text
    assert "done: 60" in done.stdout
    assert "mine" not in done.stdout

"""Ranks that hang, in real processes: named by what is seen from outside, restarted without help; and what is no hang."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlrover_adapters.torch import witness

SCRIPT = Path(__file__).parent / "scripts" / "hangs.py"
THRESHOLD_S, ALLOWED_S = 2.0, 2.0
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
        [*line, str(SCRIPT), plan, str(steps)], cwd=folder, capture_output=True, text=True, timeout=BOUND_S, check=False
    )


def events(folder: Path) -> list[dict[str, Any]]:
    """The job's log."""
    line = [
        str(Path(sys.executable).with_name("dlrover")),
        "events",
        "--json",
        "--state-dir",
        str(folder / "state"),
        "hangs",
    ]
    told = subprocess.run(line, capture_output=True, text=True, timeout=BOUND_S, check=True)
    return [json.loads(row) for row in told.stdout.splitlines()]


def test_every_kind_of_hang_is_named_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asleep, in a lock, with Python's lock, stopped: each rank is named in time, told with its stack, and the job ends well.

    An evaluation that is announced is none, however long, and who waits for it learns no longer patience from it. Where the
    script has a handler for our signal, however late it came, it is not signalled, and named all the same.
    """
    monkeypatch.setenv(witness.SIGNAL_VARIABLE, "SIGUSR1")
    plan = "phase4:0:8,sleep:1:16,lock:0:24,gil:1:32,stop:0:40,own:1:50"
    done = run(tmp_path, plan)
    assert done.returncode == 0, done.stderr
    told = events(tmp_path)
    named = [one for one in told if one["event"] == "HangNamed"]
    began = [float(at) for at in re.findall(r"hangs: \d+ (?!phase)\w+ \d+ ([\d.]+)", done.stdout)]
    assert [one["fields"]["ranks"] for one in named] == [[1], [0], [1], [0], [1]]
    assert [one["fields"]["signature"] for one in named] == [*["hang.rank"] * 3, "hang.stopped", "hang.rank"]
    assert "GIL" in named[2]["fields"]["rule"]
    after = [round(one["at_us"] / 1e6 - at - THRESHOLD_S, 2) for one, at in zip(named, began, strict=True)]
    assert all(one <= ALLOWED_S for one in after), after
    assert {one["fields"]["threshold_us"] for one in told if one["event"] == "HangSuspected"} == {2_000_000}
    assert re.search(
        r"rank 1 hangs on worker-0 in hang \(hangs\.py:\d+: time\.sleep\(1e6\)\), \d s without a step", done.stderr
    )
    stacks = re.findall(r"stacks: (\S+)", done.stderr)
    assert len(stacks) == 5
    text = Path(stacks[0]).read_text(encoding="utf-8")
    assert "in hang\n" in text
    assert "in all_reduce\n" in text
    assert "done: 60" in done.stdout
    assert "mine" not in done.stdout

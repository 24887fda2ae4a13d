"""Every benchmark works: each runs at its smallest size, where its figures mean nothing, and leaves a result that can be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools.benchmark_table import NAMES, rows_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MET, MISSED = 0, 1
BY_DAY = {
    "commands": "--turns 20 --peer-turns 5",
    "crashes": "--events 300 --nodes 8",
    "diagnosis": "--logs-mib 1",
    "etcd_latency": "--pairs 5",
    "goodput": "--nodes 16 --days 1 --jobs 5",
    "heartbeats": "--agents 20 --seconds 0.5",
    "import": "",
    "join_2000": "--agents 50",
    "replay": "--events 3000",
    "simulate": "--nodes 16 --days 1 --failures 5",
    "straggler": "--cases 2 --hours 1",
}
BY_NIGHT = {
    "checkpoint": "--quick --only persist whole restore peer grow drain",
    "cold_start": "",
    "corpus": "",
    "data": "--indices 20480 --peer-samples 0 --cost-pairs 1",
    "data_jobs": "--kills 1 --epoch-s 1",
    "detached": "",
    "detectors": "--steps 20",
    "digests": "--mib 1",
    "etcd_append": "--events 640 --puts 20 --turns 5",
    "etcd_growth": "--events 200000 --room-events 640",
    "etcd_read": "--events 2000",
    "failover": "--hand-overs 1 --crashes 1",
    "hung_master": "--pauses 3 --jobs 1",
    "idle": "--agents 20 --seconds 2",
    "imports": "--only lightning",
    "join": "",
    "k8s": "--trials 1 --pods 20 --lists 2 --failures 2 --watched 20 --seconds 0.5",
    "k8s_away": "--seconds 8 --frozen 0",
    "k8s_kills": "",
    "k8s_masters": "",
    "k8s_notices": "--only evicted kueue --grace 15",
    "k8s_silent": "--silence 3 --only dead",
    "killed_master": "--peer-trials 1",
    "killed_node": "",
    "killed_worker": "",
    "layout": "--ranks 4 --peer 4",
    "leases": "--trials 1 --seconds 0.5 --epoch-s 1",
    "matcher": "--lines 1000",
    "overhead": "--steps 20",
    "ray": "--only failing worker away idle --kills 1 --away 4 --nodes 4 --living 1 --seconds 1",
    "records": "--events 3000 --agents 20 --readers 3 --seconds 0.5 --beats 100 --turns 1",
    "roles": "--rollouts 2 --kills 1",
}


def runs(name: str, words: str, result: Path, bound_s: float) -> None:
    """One trial of a benchmark. Its targets are for full sizes: they may be missed."""
    line = [
        sys.executable,
        str(BENCHMARKS / f"bench_{name}.py"),
        "--trials",
        "1",
        "--json",
        str(result),
        *words.split(),
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_TOKEN")}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=bound_s, check=False)
    # A traceback ends with 1, too, as a missed target does; it leaves no result.
    works = done.returncode in (MET, MISSED) and result.exists()
    assert works, f"exit {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    told = json.loads(result.read_text())
    assert told["benchmark"] == name
    rows = rows_of(told)
    assert rows
    assert [row.what for row in rows if not row.ours or row.trials < 1] == []


def test_none_is_left_out() -> None:
    """A new benchmark gets a smallest size, by day or by night."""
    assert sorted([*BY_DAY, *BY_NIGHT]) == sorted(NAMES)


@pytest.mark.parametrize("name", BY_DAY)
def test_it_runs(name: str, tmp_path: Path) -> None:
    """The benchmark measures something, and says what."""
    runs(name, BY_DAY[name], tmp_path / "found.json", 100)


@pytest.mark.nightly(
    "they start launchers, loaders and peers, of which some are installed first, or take longer; the others run by day"
)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", BY_NIGHT)
def test_it_runs_by_night(name: str, tmp_path: Path) -> None:
    """The same for those that take longer, or that need an environment of the peer's."""
    runs(name, BY_NIGHT[name], tmp_path / "found.json", 1400)

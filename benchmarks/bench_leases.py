"""Leased datasets in real jobs: agents, leader and SQLite log as `dlrover-run` starts them, clients included.

Shards: 64 lines of 4 worker processes of one node, shards of one sample, one a request, each acknowledged with the next; counted
for some seconds after 5 s of warming up. The time of a draw is from its packet to the answer, in the worker's process.

Paces: four nodes, of which one is three times slower. The time from the first shard to the end that the last worker hears, over
T n / (n - 1 + s), T being what the epoch takes n workers of full pace. A static split is told beside it, by arithmetic.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from _bench import HERE, Result, Row, options, quantile, say
from _jobs import OURS, Broken, Job, kept

MEASURES = (
    "src/dlrover_core/runtime/leasing.py",
    "src/dlrover_core/runtime/node_leases.py",
    "src/dlrover_core/rules/leases.py",
    "src/adapters/dlrover_adapters/agent/data_socket.py",
    "src/adapters/dlrover_adapters/agent/data_duty.py",
    "src/adapters/dlrover_adapters/data/leases.py",
)

SCRIPT = HERE / "scripts" / "lease_clients.py"
PROCESSES, LINES = 4, 16
SHARDS_TARGET, P99_MS, IDEAL = 10_000.0, 10.0, 1.15
NODES, SLOW = 4, 3.0
LARGE = 10**9


def told(launch: list[str], arguments: list[str]) -> list[dict[str, object]]:
    """Run a job, and return what its workers wrote down. Raises `Broken`."""
    with tempfile.TemporaryDirectory(prefix="dlb-leases-") as folder:
        job_file = Path(folder) / "job.toml"
        words = [sys.executable, str(SCRIPT), *arguments, folder]
        job_file.write_text(
            "\n".join(["[groups.worker]", f"command = {json.dumps(words)}", 'framework = "none"', *launch])
        )
        with kept(lambda home: Job(OURS, home, (), ("--job", str(job_file)), None)) as job:
            code = job.wait()
            if code:
                raise Broken(f"the job ended with {code}: {job.said()}")
        return [json.loads(one.read_text()) for one in Path(folder).iterdir() if one.name.isdigit()]


def shards(seconds: float) -> tuple[float, float]:
    """Shards a second, and the 99th percentile of a draw in milliseconds."""
    found = told(["nodes = 1", f"processes = {PROCESSES}"], [str(LARGE), str(seconds), str(LINES), "0"])
    ms = [one for its in found for one in its["ms"]]  # type: ignore[attr-defined]
    return len(ms) / seconds, quantile(ms, 0.99)


def slow_node(seconds: float, pace_s: float = 0.01) -> float:
    """The time of the epoch over the ideal."""
    size = round(seconds / pace_s * (NODES - 1 + 1 / SLOW))
    paces = ",".join([str(pace_s)] * (NODES - 1) + [str(pace_s * SLOW)])
    launch = [f"nodes = {NODES}", "processes = 1", 'coupling = "each"']
    found = told(launch, [str(size), "0", "1", paces])
    took = max(float(one["end"]) for one in found) - min(float(one["first"]) for one in found)  # type: ignore[arg-type]
    return took / (size * pace_s / (NODES - 1 + 1 / SLOW))


def main() -> int:
    """Shards a second, and a slow node."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, default=5.0, help="of a trial of shards (5)")
        parser.add_argument("--epoch-s", type=float, default=30.0, help="ideal time of the slow node's epoch (30)")

    chosen = options(__doc__, trials=5, more=more)
    result = Result("leases", "nobody")
    say("shards")
    found = [shards(chosen.seconds) for _ in range(chosen.trials)]
    result.rows.append(
        Row("shards handed out and acknowledged, 64 workers in 4 processes", "shards/s", [one for one, _ in found],
            target=SHARDS_TARGET, most=False)
    )  # fmt: skip
    result.rows.append(Row("a draw of these, p99", "ms", [p99 for _, p99 in found], target=P99_MS))
    say("a slow node")
    ratios = [slow_node(chosen.epoch_s) for _ in range(chosen.trials)]
    result.rows.append(Row("one of 4 workers 3x slower: the epoch over the ideal", "x", ratios, target=IDEAL))
    result.notes.append(
        f"a static split takes {SLOW * (NODES - 1 + 1 / SLOW) / NODES:.2f}x of the ideal, by arithmetic"
    )
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())

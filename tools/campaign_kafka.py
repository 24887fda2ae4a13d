"""The campaign `kafka_kills`: each seed is one real job that trains from a topic of a real broker.

Workers, agents and the master are killed with SIGKILL, and the broker is stopped for a while, at steps that the seed draws.
Messages are written before and while the job trains, to three partitions, unevenly. Afterwards each message must be in the
model's lineage once, and `dlrover data verify` must prove as many from the log alone.

    python -m tools.campaign_kafka SEED    one trial, in words
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

from tests.unit.kafka_brokers import Tansu, Writer
from tools.campaign_data import BIN, SCRIPTS, TOKEN, Blow, Job, eventually, lineage, lines_of, strike

BATCH = 8
"""As in the script."""
STEPS, PACE_S, LIMIT_S = 40, 0.05, 240.0
PARTITIONS = 3
KINDS = ("worker", "worker", "broker", "broker", "agent", "master")
STOPPED_S = 1.5


class Plan(NamedTuple):
    """One trial: a job of so many nodes, what happens to it, and to which partition each message goes."""

    nodes: int
    blows: tuple[Blow, ...]
    partitions: tuple[int, ...]


def drawn(seed: int) -> Plan:
    """The plan of a seed."""
    dice = random.Random(f"kafka.{seed}")
    steps = sorted(dice.randrange(4, STEPS - 6) for _ in range(dice.randrange(2, 4)))
    blows = tuple(Blow(step, dice.choice(KINDS), dice.randrange(60)) for step in steps)
    weights = [dice.random() + 0.1 for _ in range(PARTITIONS)]
    return Plan(dice.choice((1, 2, 2)), blows, tuple(dice.choices(range(PARTITIONS), weights, k=STEPS * BATCH)))


def trial(seed: int) -> dict[str, Any]:
    """One job. Raises AssertionError for a message that is lost or twice."""
    with tempfile.TemporaryDirectory(prefix="kafka-kills-") as name:
        return run(drawn(seed), Path(name))


def run(plan: Plan, folder: Path) -> dict[str, Any]:
    """Train through what is planned."""
    (folder / "token").write_text(TOKEN)
    broker = Tansu(folder)
    broker.start()
    try:
        broker.create("clicks", PARTITIONS)
        writer = Writer(broker.address, "clicks")
        half = len(plan.partitions) // 2
        for partition in plan.partitions[:half]:
            writer.write(partition, 1)
        script = [
            str(SCRIPTS / "kafka_ranks.py"),
            str(STEPS),
            str(folder / "stored"),
            f"kafka://{broker.address}/clicks",
        ]
        line = ["--local-nodes", str(plan.nodes), "--nproc-per-node", "1", "--max-restarts", "20"]
        with Job(folder, *line, *script, env={"PACE_S": str(PACE_S)}) as job:
            rest = threading.Thread(target=lambda: [writer.write(one, 1) for one in plan.partitions[half:]])
            eventually(lambda: _made(folder) >= 2 or job.process.poll() is not None, "a step", 90)
            rest.start()
            for blow in plan.blows:
                eventually(lambda step=blow.step: _made(folder) >= step or job.process.poll() is not None, "a step", 90)
                if job.process.poll() is None:
                    _strike(job, broker, blow)
            code = job.ended(LIMIT_S)
            rest.join(LIMIT_S)
            assert code == 0, f"it ended with {code}: {job.said()[-3000:]}"
            return _proved(job) | {"committed": broker.committed("clicks", PARTITIONS)}
    finally:
        broker.stop()


def _strike(job: Job, broker: Tansu, blow: Blow) -> None:
    if blow.kind != "broker":
        strike(job, blow)
        return
    assert broker.process is not None
    broker.process.send_signal(signal.SIGSTOP)
    timer = threading.Timer(STOPPED_S, broker.process.send_signal, [signal.SIGCONT])
    timer.start()


def _proved(job: Job) -> dict[str, Any]:
    """Each message is in the lineage once, and the log proves as many, and the offsets of each partition."""
    made = lineage(job.folder)
    assert list(made) == list(range(1, STEPS + 1)), f"steps {list(made)}"
    found = sorted(one for its in made.values() for one in its)
    assert found == list(range(STEPS * BATCH)), f"{len(found)} messages, {len(set(found))} different ones"
    line = [str(BIN / "dlrover"), "data", "verify", job.name, "--state-dir", str(job.state), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = {one["dataset"]: one for one in json.loads(done.stdout)["datasets"]}
    parts = sum(one["samples"] for name, one in told.items() if "/" in name)
    assert (told["clicks"]["samples"], parts) == (STEPS * BATCH, STEPS * BATCH), told
    return {"generations": told["clicks"]["generations"], "resumed": told["clicks"]["resumed"]}


def _made(folder: Path) -> int:
    return max((told.get("step", 0) for told in lines_of(folder, 0)[-3:]), default=0)


if __name__ == "__main__":
    sys.stdout.write(f"{drawn(int(sys.argv[1]))[:2]}\n{trial(int(sys.argv[1]))}\n")

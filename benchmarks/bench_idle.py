"""What does it cost when nothing happens? CPU time from /proc, in percent of one core, over `--seconds`.

* A master with 500 agents connected over the real server, one heartbeat a second from each, spread evenly over the second,
  nothing to decide. Its log is in SQLite, its lease is renewed as always. The agents are simulated, in this process.
* `dlrover-run --nproc-per-node 8`, with a script that steps every 20 ms and tells each step, and with one that sleeps: the agent,
  its zygote and its keeper; beside them the launcher with both masters. Neither the workers nor the spare ones are counted. The
  clock starts when all workers have begun and the spare ones have been forked.

There is no peer to run in turn: torchrun's agent polls its workers every 0.1 s, and has no master.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from _agents import BEAT, BEAT_SEEN, Broken, Joining, SimAgent, Swarm, dialled, room_for
from _bench import A_JOB, BROKEN, HERE, Result, Row, options, say
from _jobs import LIMIT_S, MARK, marked
from _master import cpu_s, started

MEASURES = (*A_JOB, "src/adapters/dlrover_adapters/torch", "src/dlrover_core/host")

MASTER_TARGET, AGENT_TARGET = 5.0, 0.5
WORKERS = 8
SETTLE_S = 5.0
BEAT_S = 1.0
AGENT = ("dlrover-agent", "dlrover-zygote", "dlrover-keeper")
LAUNCHER = ("dlrover-run", "dlrover-master", "dlrover-sweeper")


class Shares(NamedTuple):
    """Shares of processor time, in percent of a core."""

    agent: float
    launcher: float


def master_with(agents: int, seconds: float) -> float:
    """Percent of a core that a master uses for beating agents."""
    folder = Path(tempfile.mkdtemp(prefix="dlb-"))
    try:
        with started(folder, agents) as master:
            here = dialled(range(agents), master.address, master.token)
            swarm, joining = Swarm(here), Joining(here)
            joining.greet()
            swarm.run(joining.heard)
            answered = _beat(swarm, here, SETTLE_S)
            used, began = master.cpu_s(), time.perf_counter()
            answered = _beat(swarm, here, seconds)
            took, used = time.perf_counter() - began, master.cpu_s() - used
            swarm.close()
            if answered < 0.9 * agents * seconds / BEAT_S:
                raise Broken(f"{agents} agents had {answered} beats answered in {seconds:g} s")
            return 100 * used / took
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _beat(swarm: Swarm, agents: list[SimAgent], seconds: float) -> int:
    """One heartbeat a second from each, evenly; how many were answered."""
    began, sent, answered = time.perf_counter(), 0, 0

    def heard(_: SimAgent, message: Any) -> bool:
        nonlocal answered
        answered += message[0] == BEAT_SEEN
        return False

    while (passed := time.perf_counter() - began) < seconds:
        while sent < passed * len(agents) / BEAT_S:
            agent = agents[sent % len(agents)]
            agent.say((BEAT, (agent.generation, sent, 10)))
            sent += 1
        swarm.look(heard, BEAT_S / len(agents))
    return answered


@contextlib.contextmanager
def job(folder: Path, *arguments: str) -> Iterator[str]:
    """A job of eight workers that have begun; its mark."""
    mark = secrets.token_hex(8)
    ours = Path(sys.executable).parent / "dlrover-run"
    script = [str(HERE / "scripts" / "even_step.py"), str(folder), *arguments]
    command = [str(ours), "--nproc-per-node", str(WORKERS), "--job-id", "bench", "--state-dir", str(folder), *script]
    env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER")}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**env, "TMPDIR": str(folder), MARK: mark},
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while len(list(folder.glob("begun-*"))) < WORKERS:
            if process.poll() is not None or time.monotonic() > deadline:
                raise Broken(f"the job did not begin: {(folder / 'output').read_text()[-1000:]}")
            time.sleep(0.05)
        yield mark
    finally:
        process.terminate()
        process.wait()


def used(mark: str) -> dict[str, float]:
    """CPU seconds by the names of the job's processes."""
    found: dict[str, float] = {}
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
            found[name] = found.get(name, 0.0) + cpu_s(pid)
    return found


def agent_with(seconds: float, *arguments: str) -> Shares:
    """Percent of a core that an agent, and a launcher, use for eight workers."""
    folder = Path(tempfile.mkdtemp(prefix="dlb-"))
    try:
        with job(folder, *arguments) as mark:
            time.sleep(SETTLE_S)
            before, began = used(mark), time.perf_counter()
            time.sleep(seconds)
            after, took = used(mark), time.perf_counter() - began
            if not set(AGENT) <= set(before) or not set(AGENT) <= set(after):
                raise Broken(f"no agent among {sorted(after)}")
            return Shares(
                *(100 * sum(after.get(n, 0) - before.get(n, 0) for n in names) / took for names in (AGENT, LAUNCHER))
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Trials in turn."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--agents", type=int, default=500, metavar="N", help="of the master (default 500)")
        parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each measurement (default 20)")

    chosen = options(__doc__, trials=3, more=more)
    room_for(chosen.agents)
    result = Result("idle", "nobody")
    masters, training, idle = list[float](), list[Shares](), list[Shares]()
    try:
        for number in range(chosen.trials):
            masters.append(master_with(chosen.agents, chosen.seconds))
            training.append(agent_with(chosen.seconds))
            idle.append(agent_with(chosen.seconds, "--idle"))
            say(
                f"{number + 1}/{chosen.trials} master {masters[-1]:.2f} %; agent {training[-1].agent:.2f} % while training, "
                f"{idle[-1].agent:.2f} % while idle; launcher and masters {training[-1].launcher:.2f} %"
            )
    except (Broken, OSError, RuntimeError) as error:
        say(f"nothing measured: {error}")
        return BROKEN
    unit, eight = "% of a core", f"agent, zygote and keeper of {WORKERS} workers"
    result.rows = [
        Row(f"master with {chosen.agents} agents, a heartbeat a second from each", unit, masters, (), MASTER_TARGET),
        Row(f"{eight} that step every 20 ms", unit, [one.agent for one in training], (), AGENT_TARGET),
        Row(f"{eight} that sleep", unit, [one.agent for one in idle], (), AGENT_TARGET),
        Row("launcher and masters of the job that steps", unit, [one.launcher for one in training]),
    ]
    result.notes.append(f"CPU time by the kernel's count, over {chosen.seconds:g} s; the clock's grain is 0.01 s")
    result.details = {"agents": chosen.agents, "workers": WORKERS, "seconds": chosen.seconds}
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())

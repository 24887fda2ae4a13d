"""The demonstration: real training on real data that survives a killed worker, a killed node and a killed master.

Two nodes of two workers each on this host train on the digits while this script kills, at three different steps, one worker,
one whole node and the leading master, each with SIGKILL. The state is saved in memory every other step, so a step or two are
lost each time: after the worker's death it comes from its own node's memory, after the node's from the other node's. It ends
with the report. Run it by `make demo`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrover_adapters.http.client import fetch_status
from dlrover_core import CoreError

JOB = "demo"
STEPS, PAUSE_S = 400, 0.02
HERE = Path(__file__).resolve().parent
LIMIT_S = 300.0


def processes(comm: str, *words: str) -> list[int]:
    """The processes of this name whose command line holds all these words."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == comm:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if all(word in line for word in words):
                    found.append(int(entry.name))
        except OSError:  # it ended while we looked
            continue
    return found


class Chaos:
    """Kills one thing at each of three steps, and says so."""

    def __init__(self, state: Path, token: str, steps: int) -> None:
        self._settings = state / "jobs" / JOB / "settings.json"
        self._token = token
        self._plan: list[tuple[int, str, Callable[[dict[str, Any]], int]]] = [
            (steps * 3 // 20, "worker with rank 3", lambda _: processes("worker-3", f"--job {JOB}")[0]),
            (
                steps * 8 // 20,
                "node worker-1-0, its agent and all",
                lambda _: processes("dlrover-agent", f"--job {JOB}", "--node worker-1-0")[0],
            ),
            (steps * 14 // 20, "leading master", lambda status: int(status["leader"].split("/")[1])),
        ]

    def run(self) -> None:
        """Watch the step and strike; ends with the plan, or with the process."""
        while self._plan:
            status = self._status()
            if status is not None and status["step"] >= self._plan[0][0] and not status["open_incidents"]:
                _, what, find = self._plan.pop(0)
                pid = find(status)
                os.kill(pid, signal.SIGKILL)
                print(f"\n>>> step {status['step']}: SIGKILL to the {what} (pid {pid})", file=sys.stderr, flush=True)
            threading.Event().wait(0.05)

    def _status(self) -> dict[str, Any] | None:
        try:
            address = json.loads(self._settings.read_text())["masters"][0]
            return dict(asyncio.run(fetch_status(address, self._token)))
        except (OSError, ValueError, CoreError):  # not there yet, or just changing hands
            return None


def train(state: Path, token: str, steps: int) -> tuple[int, str]:
    """Run the job; its exit status and what rank 0 said."""
    scripts = Path(sys.executable).parent
    command = [
        str(scripts / "dlrover-run"),
        "--local-nodes",
        "2",
        "--nproc-per-node",
        "2",
        "--job-id",
        JOB,
        "--state-dir",
        str(state),
    ]
    command += ["--progress", "on", "--preload", "sklearn.datasets", str(HERE / "torch" / "flash_checkpoint.py")]
    command += ["--steps", str(steps), "--pause", str(PAUSE_S), "--checkpoint", str(state / "digits")]
    print("$", " ".join(command), file=sys.stderr, flush=True)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "DLROVER_TOKEN": token}
    ) as job:
        threading.Thread(target=Chaos(state, token, steps).run, daemon=True).start()
        watchdog = threading.Timer(LIMIT_S, job.terminate)
        watchdog.start()
        try:
            said, _ = job.communicate()
        except KeyboardInterrupt:
            job.wait()
            raise
        finally:
            watchdog.cancel()
    return job.returncode, said


def main() -> int:
    """Train, hurt, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps (default {STEPS})")
    steps = parser.parse_args().steps
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dlrover-demo-") as folder:
        state = Path(folder)
        code, said = train(state, os.urandom(16).hex(), steps)
        print(said, end="")
        report = [str(Path(sys.executable).parent / "dlrover"), "report", JOB, "--state-dir", str(state)]
        print("$ dlrover report", JOB)
        reported = subprocess.run(report, check=False).returncode
        found = re.search(r"accuracy on \d+ held-out digits: ([\d.]+)", said)
        accuracy = float(found.group(1)) if found else 0.0
    good = code == 0 and reported == 0 and accuracy >= 0.95
    verdict = "The job survived" if good else "THE DEMONSTRATION FAILED"
    print(f"{verdict}: accuracy {accuracy:.4f}, {time.monotonic() - began:.0f} s in all")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

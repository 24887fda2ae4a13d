"""Kill everything once, and show that training did not notice: the loss curve is the undisturbed one, bit for bit.

    python examples/chaos/survive_everything.py

Trains `examples/torch/ddp_digits.py` twice through `dlrover-run`, on two nodes of one worker each: once in peace, and once
while a worker, an agent, the leading master, a zygote (the warm process that workers are forked from) and a keeper (of the
rendezvous store) are killed with SIGKILL, each at a step of its own. Every loss must equal that of the undisturbed run's same
step, those of steps that had to be made again too. In the end nothing of either run may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from dlrover_adapters.cli.scratch import MARK
from dlrover_adapters.http.client import fetch_status
from dlrover_core import CoreError

SCRIPT = Path(__file__).resolve().parents[1] / "torch" / "ddp_digits.py"
STEPS, PAUSE_S = 150, 0.02
LIMIT_S, LOOK_S, GONE_S = 120.0, 0.05, 10.0


class Victim(NamedTuple):
    """Who dies at which step: the newest process of that name, or the master that leads."""

    step: int
    what: str
    name: str


def plan(steps: int) -> list[Victim]:
    """Five deaths, spread over the run."""
    return [
        Victim(steps * 2 // 15, "worker with rank 1", "worker-1"),
        Victim(steps * 5 // 15, "agent of a node, and so its worker", "dlrover-agent"),
        Victim(steps * 8 // 15, "leading master", "dlrover-master"),
        Victim(steps * 10 // 15, "zygote", "dlrover-zygote"),
        Victim(steps * 12 // 15, "keeper", "dlrover-keeper"),
    ]


def living(mark: str, name: str = "") -> list[int]:
    """The processes of this run with that name, the oldest first."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            ours = mark.encode() in (entry / "environ").read_bytes().split(b"\0")
            if (
                ours
                and name in ("", (entry / "comm").read_text().strip())
                and b") Z " not in (entry / "stat").read_bytes()
            ):
                found.append(int(entry.name))
        except OSError:  # it ended while we looked, or is another user's
            continue
    return sorted(found)


class Run:
    """One `dlrover-run` of the digits, in a folder of its own."""

    def __init__(self, folder: Path, name: str, steps: int) -> None:
        self.name, self.state, self.curve, self.steps = name, folder / "state", folder / f"{name}.curve", steps
        self.token = os.urandom(16).hex()
        command = [str(Path(sys.executable).parent / "dlrover-run"), "--local-nodes", "2", "--job-id", name]
        command += ["--state-dir", str(self.state), "--preload", "sklearn.datasets"]
        command += ["--set", "heartbeat_s=0.2", str(SCRIPT), "--steps", str(steps)]
        command += ["--pause", str(PAUSE_S), "--checkpoint", str(folder / f"{name}.pt"), "--curve", str(self.curve)]
        print("$", " ".join(command), flush=True)
        self.process = subprocess.Popen(command, env={**os.environ, "DLROVER_TOKEN": self.token})

    def settings(self) -> dict[str, Any]:
        """What the launcher wrote down; empty before."""
        try:
            return dict(json.loads((self.state / "jobs" / self.name / "settings.json").read_text()))
        except OSError:
            return {}

    @property
    def mark(self) -> str:
        """What all of its processes have in their environment."""
        return f"{MARK}={self.settings()['run']}"

    def status(self) -> dict[str, Any] | None:
        """What the leading master says; None while nobody leads."""
        try:
            return dict(asyncio.run(fetch_status(self.settings()["masters"][0], self.token)))
        except (KeyError, IndexError, CoreError):
            return None

    def hurt(self, victims: list[Victim]) -> None:
        """Kill each as soon as its step is reached and all is well."""
        while victims and self.process.poll() is None:
            status = self.status()
            if status is not None and status["step"] >= victims[0].step and not status["open_incidents"]:
                victim = victims.pop(0)
                leads = victim.name == "dlrover-master"
                pid = int(status["leader"].split("/")[1]) if leads else living(self.mark, victim.name)[-1]
                os.kill(pid, signal.SIGKILL)
                print(f">>> step {status['step']}: SIGKILL to the {victim.what} (pid {pid})", flush=True)
            threading.Event().wait(LOOK_S)

    def ended(self) -> int:
        """Its exit status."""
        try:
            return self.process.wait(LIMIT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self.process.kill()  # everything of its goes with it
            self.process.wait()
            raise

    def losses(self) -> tuple[dict[int, set[str]], int]:
        """The losses of each step, exactly (one, if all is well); and how many steps were made again."""
        lines = [line.split() for line in self.curve.read_text().splitlines()] if self.curve.exists() else []
        found: dict[int, set[str]] = {}
        for step, loss in lines:
            found.setdefault(int(step), set()).add(loss)
        return found, len(lines) - len(found)

    def left(self) -> list[int]:
        """Its processes that live on, after a moment's patience."""
        deadline = time.monotonic() + GONE_S
        while (found := living(self.mark)) and time.monotonic() < deadline:
            threading.Event().wait(LOOK_S)
        return found


def main() -> int:
    """Train in peace, train through the plan, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps of each run (default {STEPS})")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="survive-") as folder:
        peace = Run(Path(folder), "peace", steps)
        codes = [peace.ended()]
        war, victims = Run(Path(folder), "war", steps), plan(steps)
        try:
            war.hurt(victims)
        except BaseException:
            war.process.kill()
            war.process.wait()
            raise
        codes.append(war.ended())
        (expected, _), (found, again) = peace.losses(), war.losses()
        left = peace.left() + war.left()
    wrong = [step for step in range(1, steps + 1) if expected.get(step) != found.get(step)]
    print(
        f"{steps} steps, {again} of them made again; {len(wrong)} losses differ; exit codes {codes}; left behind: {left}"
    )
    good = codes == [0, 0] and not victims and not wrong and not left
    print(
        "Survived everything: the same curve, bit for bit"
        if good
        else f"DID NOT SURVIVE; first different step: {wrong[:1]}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

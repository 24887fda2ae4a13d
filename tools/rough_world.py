"""One rough world: a real training job, what is done to it, and the outside witness's verdict. `campaign_rough` starts it.

    python -m tools.rough_world FOLDER      run what FOLDER/plan.json says; FOLDER/verdict.json is the result

Where that is permitted it runs in namespaces of its own (`rough_ground`): what it starts and mounts ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.campaign_storms import ENDLESS, FURTHER, RANKS, epilogue
from tools.rough_hosts import RoughHosts, ThreeHosts
from tools.rough_kinds import Strike
from tools.rough_striking import Diary, Metronome, Rough
from tools.storming import BIN, SCRIPTS, TOKEN, Control, Storm, lives
from tools.trials import Patience

WITNESS = Path(__file__).with_name("rough_witness.py")
JOB = "rough"
FIRST_S, END_S = 120.0, 400.0
FOLLOW_PAUSE_S = 0.5


class World:
    """What the plan says, and where everything lies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        plan = json.loads((folder / "plan.json").read_text())
        self.seed, self.seconds, self.pause = int(plan["seed"]), float(plan["seconds"]), float(plan["pause"])
        self.strikes = [Strike(*one) for one in plan["strikes"]]
        self.clock, self.epilogue = plan["clock"], bool(plan["epilogue"])
        self.hosts = bool(plan["hosts"])
        self.options: list[str] = plan["options"]
        ground = json.loads((folder / "ground.json").read_text())
        self.own, self.mounts = bool(ground["own"]), ground["mounts"]
        self.groups = {name: Path(one) for name, one in ground["groups"].items()}
        self.temporary, self.stored = folder / "tmp", folder / "stored"
        self.shared = sorted(os.listdir("/dev/shm")) if self.own else []  # noqa: S108, PTH208

    def environment(self, host: str = "") -> dict[str, str]:
        """What a host's launcher is born with."""
        found = {"TMPDIR": str(self.temporary), "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache")}
        if self.clock:
            file = self.folder / f"clock{host and '-'}{host}"
            if not file.exists():
                file.write_bytes(bytes(8))
            found |= {"LD_PRELOAD": self.clock, "ROUGH_CLOCK": str(file)}
        return found

    def clocks(self, *hosts: str) -> dict[str, Path]:
        """The files of the hosts' clocks."""
        return {host: self.folder / f"clock{host and '-'}{host}" for host in hosts} if self.clock else {}

    def enters(self) -> list[str]:
        """What a command begins with to be in the job's control group for processes."""
        group = self.groups.get("pids")
        return ["/bin/sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "enters"] if group else []


class OneHost(Storm):
    """A job of two nodes on this host, with its log in SQLite."""

    def __init__(self, world: World) -> None:
        line = (*ENDLESS, *world.options, str(SCRIPTS / "stormy.py"), str(world.stored), "--pause", str(world.pause))
        super().__init__(world.folder, *line, job=JOB, env=world.environment(), prefix=world.enters())
        self.folders, self.clock_files = [world.folder], world.clocks("")
        self.log = ["--state-dir", str(self.state)]
        self.said_in = ["out", "err", "state/jobs/*/control.log", "again/err", "again/state/jobs/*/control.log"]

    def marks(self) -> list[str]:
        """What its processes have in their environment."""
        return [self.mark]

    def prefix(self, pid: int) -> list[str]:  # on several hosts it matters
        """What a command begins with to run on the host of a process: nothing."""
        return []

    def ours(self) -> list[int]:
        """The processes that are the harness's."""
        return []

    def ends(self, patience: Patience) -> list[dict[str, Any]]:
        """Let it end; how its launchers did."""
        self.finish()
        return [{"what": "dlrover-run", "status": self.over(patience, END_S)}]


class Follower:
    """`dlrover events --follow`, and when it said what. It is started again where it could not read on."""

    def __init__(self, log: Sequence[str], file: Path) -> None:
        self._log, self._file = log, file
        self._over, self.starts, self._seq = threading.Event(), 0, 0
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        line = [str(BIN / "dlrover"), "events", JOB, "--follow", "--json", *self._log]
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        with self._file.open("a", buffering=1) as told:
            while not self._over.is_set():
                self.starts += 1
                since = ("--since", str(self._seq)) if self._seq else ()
                self._process = subprocess.Popen([*line, *since], stdout=subprocess.PIPE, text=True, env=env)
                assert self._process.stdout is not None
                for text in self._process.stdout:
                    event = json.loads(text)
                    self._seq = event["seq"]
                    told.write(json.dumps({"seen": time.monotonic(), "event": event}) + "\n")
                self._process.wait()
                self._over.wait(FOLLOW_PAUSE_S)

    def close(self, patience: Patience) -> None:
        """End it, when it has read everything."""
        patience.sleep(2 * FOLLOW_PAUSE_S)
        self._over.set()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()  # whoever started us may ignore SIGINT, and it inherits that
        self._thread.join(30.0)


def struck(world: World, job: Any, patience: Patience) -> tuple[list[dict[str, Any]], dict[str, int], int]:
    """Strike it, and let it end: how its launchers ended, what was done, how often the follower was started."""
    patience.until(
        lambda: job.check_alive() or any(one.steps for each in job.folders for one in lives(each)),
        "the first step",
        FIRST_S,
    )
    diary = Diary(world.folder / "diary.jsonl")
    metronome, follower = Metronome(diary), Follower(job.log, world.folder / "events.jsonl")
    kind = RoughHosts if world.hosts else Rough
    striking = kind(
        job, patience, diary, folders=job.folders, disks={name: world.folder / name for name in ("state", "stored")},
        groups=world.groups, clocks=job.clock_files, seed=world.seed,
    )  # fmt: skip
    try:
        striking.run(world.strikes, world.seconds)
        ended = job.ends(patience)
    finally:
        striking.close()
        follower.close(patience)
        metronome.close()
    return ended, dict(sorted(striking.done.items())), follower.starts


@contextlib.contextmanager
def running(world: World) -> Iterator[Any]:
    """The job of the plan."""
    with ThreeHosts(world) if world.hosts else OneHost(world) as job:
        yield job


def run(world: World) -> dict[str, Any]:
    """All of it: the verdict. Raises AssertionError where the job does not begin or end."""
    patience, folder = Patience(), world.folder
    world.temporary.mkdir(exist_ok=True)
    with running(world) as job:
        ended, done, follows = struck(world, job, patience)
        (folder / "exit.json").write_text(json.dumps(ended))
        marks = job.marks()
        last = max(max(one.steps, default=0) for each in job.folders for one in lives(each))
        with contextlib.closing(Control(folder / "control", last + FURTHER, RANKS)) as control:
            broken = epilogue(folder, world.stored, patience)[0] if world.epilogue else []
            control.curve(patience)
        about = {
            "job": JOB, "status": 0, "marks": marks, "own_processes": world.own, "harness": job.ours(), "shared": world.shared,
            "mounts": world.mounts, "groups": [str(one) for one in world.groups.values()], "log": job.log,
            "dlrover": [str(BIN / "dlrover")], "stored": str(world.stored), "said": job.said_in,
        }  # fmt: skip
        (folder / "world.json").write_text(json.dumps(about, indent=1))
        verdict = witnessed(folder)
    verdict["broken"] += [f"a later job: {one}" for one in broken]
    verdict["figures"] |= {"done": done, "follower_starts": follows}
    return verdict


def witnessed(folder: Path) -> dict[str, Any]:
    """The witness's verdict: a process of its own."""
    line = [sys.executable, "-I", str(WITNESS), str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "DLROVER_TOKEN": TOKEN}, check=False)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {"broken": [f"the witness ended with {done.returncode}: {done.stderr[-1500:]}"], "figures": {}}


def main() -> int:
    """As the first lines say."""
    folder = Path(sys.argv[1])
    try:
        verdict = run(World(folder))
    except AssertionError as error:
        verdict = {"broken": [f"{error}"[:2000]], "figures": {}}
    part = folder / "verdict.part"
    part.write_text(json.dumps(verdict, indent=1))
    part.replace(folder / "verdict.json")
    return int(bool(verdict["broken"]))


if __name__ == "__main__":
    sys.exit(main())

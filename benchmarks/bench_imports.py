"""A worker of a script with slow imports is killed: how long until the next step?

Three scripts (`scripts/imports.py`) with 2 workers each: a Trainer of Hugging Face, one of Lightning, and a loop as nanoGPT's
with a compiled model in DDP. Each runs under `dlrover-run` with nothing typed and a state directory of its own, once, then N
times in turn with its peers: torchrun, and the launcher of NVRx. These look at their workers every 0.1 s and grant 1 s between
SIGTERM and SIGKILL. All use this environment's packages, and the same cache of inductor, which the first run fills.

After its third step rank 1 gets SIGKILL; measured is the time until all ranks of the new attempt have completed a step. The
second run is what the target is about: by then it is known what the script's workers import. Beside it stands what the script
needs by itself: its first step made again in one process, without DDP, with everything imported: less than a new process needs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from _bench import A_JOB, BROKEN, HERE, Result, Row, median, options, say
from _jobs import MARK, NVRX, OURS, TORCHRUN, marked, nvrx_folder

MEASURES = (*A_JOB, "src/adapters/dlrover_adapters/torch", "src/dlrover_core/host")

SCRIPT = HERE / "scripts" / "imports.py"
KINDS = {"hf": "Hugging Face Trainer", "lightning": "Lightning", "compile": "nanoGPT with torch.compile"}
RANKS, KILL_AT = 2, 3
TARGET_S = 1.0
LIMIT_S, BACK_LIMIT_S = 180.0, 60.0
PEERS = {
    TORCHRUN: ("torch.distributed.run", "--monitor-interval", "0.1", "--shutdown-timeout", "1"),
    NVRX: (
        "nvidia_resiliency_ext.fault_tolerance.launcher", "--monitor-interval", "0.1", "--workers-stop-timeout", "1",
        "--ignore-missing-fault-tol-cfg",
    ),
}  # fmt: skip
"""The module of each, and what it does best with."""


class Lost(Exception):
    """The job did not make its steps in time."""


Steps = dict[tuple[int, int], list[tuple[int, float]]]
"""By rank and pid: the number and the instant of each step."""


def steps(diary: Path) -> Steps:
    """Read the diary."""
    found: Steps = {}
    with contextlib.suppress(FileNotFoundError):
        for line in diary.read_text().splitlines():
            rank, pid, step, at = map(int, line.split())
            found.setdefault((rank, pid), []).append((step, at / 1e9))
    return found


def until(diary: Path, process: subprocess.Popen[bytes], limit_s: float, true: Callable[[Steps], bool]) -> Steps:
    """Wait until ``true`` accepts the diary, and return the diary. Raises `Lost` after ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while not true(found := steps(diary)):
        if time.monotonic() > deadline or process.poll() is not None:
            raise Lost(f"nothing within {limit_s:g} s (exit code {process.poll()})")
        time.sleep(0.01)
    return found


@contextlib.contextmanager
def running(launcher: str, kind: str, folder: Path, state: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """Run the script under a launcher; kill what is left of it after the block."""
    size = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "5"]
    ours = [str(Path(sys.executable).parent / "dlrover-run"), *size, "--state-dir", str(state)]
    command = ours if launcher == OURS else [sys.executable, "-m", *PEERS[launcher], *size]
    diary, mark = folder / "diary", secrets.token_hex(8)
    env = {**os.environ, MARK: mark, "TORCHINDUCTOR_CACHE_DIR": str(state / "inductor"), "OMP_NUM_THREADS": "1"}
    if launcher == NVRX:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(nvrx_folder()), env.get("PYTHONPATH"))))
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, str(SCRIPT), kind, str(diary)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True,
        )  # fmt: skip
    try:
        yield diary, process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def back(launcher: str, kind: str, state: Path) -> tuple[float, float]:
    """Seconds from the command to the first step of all ranks, and from the kill to the next one. Raises `Lost`."""
    with tempfile.TemporaryDirectory(prefix="bench-imports-") as name:
        folder, began = Path(name), time.monotonic()
        try:
            with running(launcher, kind, folder, state) as (diary, process):
                found = until(
                    diary, process, LIMIT_S, lambda all_: sum(one[-1][0] >= KILL_AT for one in all_.values()) == RANKS
                )
                start_s = max(one[0][1] for one in found.values()) - began
                before = set(found)
                killed = time.monotonic()
                os.kill(next(pid for rank, pid in before if rank == 1), signal.SIGKILL)
                found = until(diary, process, BACK_LIMIT_S, lambda all_: len(all_.keys() - before) == RANKS)
                return start_s, max(found[one][0][1] for one in found.keys() - before) - killed
        except Lost as lost:
            raise Lost(f"{lost}: {(folder / 'output').read_text(errors='replace')[-400:]}") from None


def setup(kind: str, state: Path) -> float:
    """Seconds that the script needs for its first step once all modules are imported."""
    with tempfile.TemporaryDirectory(prefix="bench-imports-") as name:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(state / "inductor"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(SCRIPT), kind, str(Path(name) / "diary"), "--setup"]
        said = subprocess.run(command, capture_output=True, text=True, env=env, timeout=LIMIT_S, check=True).stdout
        return float(said.rsplit("setup ", 1)[1])


def measure(result: Result, kind: str, trials: int) -> None:
    """One script under all launchers."""
    state = Path(tempfile.mkdtemp(prefix="bench-imports-state-"))
    again, alone = list[tuple[float, float]](), list[float]()
    peers: dict[str, list[float]] = {name: [] for name in PEERS}
    try:
        first, first_back = back(OURS, kind, state)
        say(f"{kind}: first run: first step after {first:.2f} s, back after {first_back:.2f} s")
        for _ in range(trials):
            again.append(back(OURS, kind, state))
            alone.append(setup(kind, state))
            say(
                f"{kind}: a later run: first step after {again[-1][0]:.2f} s, back after {again[-1][1]:.2f} s; "
                f"the script's own set-up {alone[-1]:.2f} s"
            )
            for name, those in peers.items():
                _peer(result, name, kind, state, those)
    finally:
        shutil.rmtree(state, ignore_errors=True)
    title, seconds = KINDS[kind], [one[1] for one in again]
    result.rows += [
        Row(f"{title}: killed worker to next step, first run; peer torchrun", "s", [first_back], peers[TORCHRUN]),
        Row(f"{title}: the same, second run; peer torchrun", "s", seconds, peers[TORCHRUN]),
        Row(f"{title}: the same, second run; peer NVRx's launcher", "s", seconds, peers[NVRX]),
        Row(f"{title}: the script's own set-up", "s", alone),
        Row(f"{title}: second run, beyond the set-up", "s", [one - median(alone) for one in seconds], target=TARGET_S),
        Row(f"{title}: command to first step, first run", "s", [first]),
        Row(f"{title}: command to first step, second run", "s", [one[0] for one in again]),
    ]


def _peer(result: Result, name: str, kind: str, state: Path, those: list[float]) -> None:
    try:
        those.append(back(name, kind, state)[1])
        say(f"{kind}: {name}: back after {those[-1]:.2f} s")
    except Lost as lost:
        say(f"{kind}: {name}: {lost}")
        result.notes.append(f"{KINDS[kind]} under {name}: not back ({str(lost).partition(':')[0]})")


def main() -> int:
    """Measure the scripts: all three, or the one that ``--only`` names."""
    told = options(__doc__, 3, lambda parser: parser.add_argument("--only", choices=sorted(KINDS), action="append"))
    result = Result(
        "imports", f"torchrun, and {NVRX}; both with --monitor-interval 0.1 and 1 s between SIGTERM and SIGKILL"
    )
    try:
        nvrx_folder()
        for kind in told.only or KINDS:
            measure(result, kind, told.trials)
    except (Lost, subprocess.CalledProcessError, OSError) as error:
        say(f"not measured: {error}")
        return BROKEN
    return result.finish(told.json)


if __name__ == "__main__":
    sys.exit(main())

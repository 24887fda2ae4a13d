"""What do checkpoints cost, and how soon is training back?

All figures are of one run, `--mib` of state (AdamW over linear layers), on this host's memory and disk; ours under `dlrover-run`
with its agent and saver, peers in processes of their own, in turn. `--only` measures some of them:

- saves: `scripts/saving.py`: windows of four steps without and with one save, A-B-A-B. *Stall*: the training thread stood in
  calls of the engine, its optimizer hooks included. *Step time*: what the two windows differ by, so all that a save costs, what
  goes on beside training included. With one compute thread of the two cores, and with both busy. Peers: dlrover 0.6.1's engine
  into shared memory, outside of its agent; `torch.save` to disk; `torch.distributed.checkpoint.async_save` with its thread and
  its process; a memcpy into warm memory. The control is two windows without a save; the floor is a memmove of the same bytes by a
  thread beside training that nothing waits for. Blocking mode, first saves and minor faults are of the same runs.
  A first save of ours is made once its memory is populated, which `FlashCheckpoint` begins with when it knows all sizes; until
  then it leaves out what would make training stand.
- persist: times of steps while the saver writes a state to disk, and of steps before.
- whole: stretches of 40 steps of 100 ms with a save in every tenth, and without any, a quarter of `--mib` of state.
- restore: rank 0 of a job kills itself with SIGKILL again and again; the restore from memory, verified in full or by headers,
  beside a fresh process that does `torch.load` and `load_state_dict` from the page cache; and the time from the kill to the next
  step.
  Its floor, in the same run: the bytes hashed once and read into fresh memory, by as many threads (`_floors`).
- peer: a node of two is killed whole; what its relaunched rank's restore from the other node's memory took, a quarter of `--mib`.
- grow, drain: steps lost when two nodes become four, and when one of them is drained; and how long nobody made a step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _bench import A_JOB, BROKEN, HERE, Result, Row, median, options, quantile, say
from _floors import Source, restore_s, transfer_s
from _hosts import ancestor, kill_tree
from _jobs import OURS, Broken, Job, Line, running
from _saving import GIB, dlrover_python, first_per_gib, per_gib, run

MEASURES = (
    *A_JOB,
    "src/adapters/dlrover_adapters/checkpoint",
    "src/adapters/dlrover_adapters/storage",
    "src/adapters/dlrover_adapters/torch",
    "src/dlrover_core/checkpoint",
    "src/dlrover_core/host",
)

SCRIPT = HERE / "scripts" / "kept.py"
ENGINES = ("none", "memcpy", "beside", "ours", "ours_blocking", "dlrover", "torch_save", "dcp_thread", "dcp_process")
BUSY = ("none", "memcpy", "ours")
STALL_MS, STEP_MS, BUSY_X, BLOCKING_X, FAULTS_MAX, FIRST_X = 5.0, 5.0, 1.1, 0.9, 100, 1.3
PERSIST_X, RUN_X, RESTORE_X, NEXT_STEP_S, PEER_S = 1.05, 1.01, 0.45, 0.6, 1.0
BACK_S = 90.0
PERSIST_TRIALS = 6
PEERS = ("peer-load", "peer-mmap")
OTHERS = {
    "torch_save": "torch.save to disk",
    "dcp_thread": "DCP's async thread, to disk",
    "dcp_process": "DCP's async process, to disk",
    "memcpy": "a memcpy while training stands",
}


def saves(result: Result, chosen: argparse.Namespace) -> None:
    """Measure what saves into memory cost: stall, step time, blocking mode, page faults, first saves."""
    common = ["--mib", str(chosen.mib), "--trials", str(chosen.trials), "--step-s", str(chosen.step_s)]
    one: dict[str, list[dict[str, Any]]] = {name: [] for name in ENGINES}
    busy: dict[str, list[dict[str, Any]]] = {name: [] for name in BUSY}
    for number in range(chosen.rounds):
        for name, into in one.items():
            into.append(run(name, [*common, "--threads", "1"]))
            stall, added = median(per_gib(into[-1:], "stall_s")), median(per_gib(into[-1:], "added_s"))
            say(f"{number + 1}/{chosen.rounds} {name}: {stall:.1f} ms/GiB stall, {added:.1f} ms/GiB in all")
        for name, into in busy.items():
            into.append(run(name, [*common, "--threads", "2"]))
            say(
                f"{number + 1}/{chosen.rounds} {name}, both cores busy: {median(per_gib(into[-1:], 'added_s')):.1f} ms/GiB"
            )
    stalls = {name: per_gib(found, "stall_s") for name, found in one.items()}
    added = {name: per_gib(found, "added_s") for name, found in one.items()}
    unit, ours = "ms/GiB", "ours"
    control = median(added["none"])
    beyond = {name: [value - control for value in found] for name, found in added.items()}
    result.rows += [
        Row("stall per save; peer dlrover 0.6.1", unit, stalls[ours], stalls["dlrover"], STALL_MS),
        Row("step time per save, one compute thread; peer the control: no save", unit, added[ours], added["none"]),
        Row(
            "the same beyond the control; peer a memmove of the bytes by a thread beside training, beyond the control",
            unit,
            beyond[ours],
            beyond["beside"],
            STEP_MS,
        ),
        Row(
            "CPU time of the process per save; peer that thread's, which is the copy alone",
            unit,
            per_gib(one[ours], "cpu_s"),
            per_gib(one["beside"], "cpu_s"),
        ),
        Row("step time per save; peer dlrover 0.6.1", unit, added[ours], added["dlrover"]),
        *(Row(f"the same; peer {OTHERS[name]}", unit, added[ours], added[name]) for name in OTHERS),
        Row(
            "step time per save, both cores busy; peer a memcpy",
            unit,
            per_gib(busy[ours], "added_s"),
            per_gib(busy["memcpy"], "added_s"),
            BUSY_X,
            "ratio",
        ),
        Row(
            "blocking mode; peer a memcpy",
            "GiB/s",
            [1000 / one for one in stalls["ours_blocking"]],
            [1000 / one for one in stalls["memcpy"]],
            BLOCKING_X,
            "ratio",
            most=False,
        ),
        Row(
            "minor faults in the calls of a warm, blocking save, more than in those without",
            "faults",
            [save["faults"] - save["other_faults"] for found in one["ours_blocking"] for save in found["saves"]],
            (),
            FAULTS_MAX,
        ),
        Row(
            "first save, blocking; peer a warm one",
            unit,
            first_per_gib(one["ours_blocking"], "stall_s"),
            [median(per_gib([found], "stall_s")) for found in one["ours_blocking"]],
            FIRST_X,
            "ratio",
        ),
        Row(
            "from its making until the memory of its two slots is populated, beside training",
            "s/GiB",
            [one["ready_s"] * GIB / one["size"] for found in (one[ours], one["ours_blocking"]) for one in found],
        ),
        Row(
            "first save, blocking; peer dlrover 0.6.1",
            unit,
            first_per_gib(one["ours_blocking"], "stall_s"),
            first_per_gib(one["dlrover"], "stall_s"),
        ),
    ]
    result.details["saves"] = {
        "stall_ms_per_gib": {name: median(found) for name, found in stalls.items()},
        "added_ms_per_gib": {name: median(found) for name, found in added.items()},
        "added_ms_per_gib_quartiles": {
            name: [quantile(found, 0.25), quantile(found, 0.75)] for name, found in added.items()
        },
        "first_stall_ms_per_gib": {name: median(first_per_gib(found, "stall_s")) for name, found in one.items()},
        "step_s": {name: median([step for run_ in found for step in run_["step_s"]]) for name, found in one.items()},
        "ours_says": one[ours][-1]["details"],
    }
    result.notes.append(
        "what two windows without a save differ by is `none` in the details; only ours, a memcpy and dlrover stay in memory"
    )


def persist(result: Result, chosen: argparse.Namespace) -> None:
    """Measure steps while a state is written to storage."""
    found = run(
        "none",
        ["--mib", str(chosen.mib), "--trials", str(PERSIST_TRIALS), "--step-s", str(chosen.step_s), "--window", "10"],
        "persisting",
    )
    pairs = [
        (median(writing), median(plain))
        for writing, plain in zip(found["writing_s"], found["plain_s"], strict=True)
        if writing
    ]
    if not pairs:
        raise Broken("a state was written within a step; take a larger one")
    beside, before = zip(*pairs, strict=True)
    result.rows.append(
        Row("step time while persisting; peer the steps before", "s", beside, before, PERSIST_X, "ratio")
    )
    result.details["persist"] = {"to_storage_s": found["took_s"], "steps": sum(map(len, found["writing_s"]))}


def whole(result: Result, chosen: argparse.Namespace) -> None:
    """Measure a whole run with saves and without."""
    wanted = ["--mib", str(chosen.mib // 4), "--trials", str(chosen.trials), "--step-s", str(chosen.step_s / 2)]
    found = run("none", wanted, "whole_run")
    result.rows.append(
        Row(
            "40 steps, a save in every 10th; peer the same without",
            "s",
            found["with_s"],
            found["without_s"],
            RUN_X,
            "ratio",
        )
    )
    result.details["whole"] = found.get("details", {})


def restore(result: Result, chosen: argparse.Namespace) -> None:
    """Kill a rank again and again; measure its restores from memory and the time to its next step."""
    lives = 2 * chosen.trials
    arguments = ["--mib", str(chosen.mib), "--lives", str(lives), "--steps", str(6 * (lives + 1))]
    launch = ("--nproc-per-node", "1", "--max-restarts", str(lives + 2))
    with running(OURS, arguments, launch, SCRIPT) as job:
        job.until(lambda lines: any(one.what == "end" for one in lines), 0.05, 60.0 + 40.0 * lives)
        lines = job.lines()
    took = {kind: [one.at for one in lines if one.what == kind] for kind in {one.what for one in lines}}
    full, header = took.get("restored-memory-full", []), took.get("restored-memory-header", [])
    if not full or not header:
        raise Broken(f"not restored from memory: {sorted(took)}")
    floors = _floors(chosen.mib, chosen.trials, lambda source: restore_s(source, _threads(), verified=True))
    # A life is restored after what the life before it loaded: by headers and in full in turn, in full first.
    loads, maps = (dict(zip(("full", "header"), (took[kind][::2], took[kind][1::2]), strict=True)) for kind in PEERS)
    nexts = after_kills(lines)
    size = chosen.mib / 1024
    result.rows += [
        Row(
            "restore from memory, by header and generation; peer torch.load",
            "s/GiB",
            [one / size for one in header],
            [one / size for one in loads["header"]],
            RESTORE_X,
            "ratio",
        ),
        Row(
            "the same, verified in full",
            "s/GiB",
            [one / size for one in full],
            [one / size for one in loads["full"]],
            RESTORE_X,
            "ratio",
        ),
        Row(
            "the same, verified in full; peer torch.load(mmap=True)",
            "s/GiB",
            [one / size for one in full],
            [one / size for one in maps["full"]],
        ),
        Row(
            "restore from memory, verified in full; peer its floor: hash the bytes, read them into fresh memory",
            "s/GiB",
            [one / size for one in full],
            [one / size for one in floors],
        ),
        Row(
            "killed worker to next step; peer that floor",
            "s",
            nexts,
            floors,
            NEXT_STEP_S if chosen.mib >= 1024 else None,
        ),
    ]
    result.details["restore"] = {"lives": lives, "phases_s": phases(lines)}


def _threads() -> int:
    """The number of threads that a restore of one rank uses here."""
    return max(1, min(4, len(os.sched_getaffinity(0))))


def _floors(mib: int, trials: int, one: Callable[[Source], float]) -> list[float]:
    """Seconds of the least work on so many bytes, ``trials`` times."""
    source = Source(mib)
    try:
        return [one(source) for _ in range(trials)]
    finally:
        source.close()


def after_kills(lines: Sequence[Line]) -> list[float]:
    """From each kill to the next life's first step."""
    found = []
    for at, one in enumerate(lines):
        if one.what == "killed":
            following = next((line.at for line in lines[at:] if line.what == "step"), None)
            if following is not None:
                found.append(following - one.at)
    return found


def phases(lines: Sequence[Line]) -> dict[str, float]:
    """Medians: from the kill to the script's begin, and from there to the first step."""
    begins, steps, killed = [], [], 0.0
    begun = 0.0
    for one in lines:
        if one.what == "killed":
            killed = one.at
        elif one.what == "begin" and killed:
            begins.append(one.at - killed)
            begun = one.at
        elif one.what == "step" and begun:
            steps.append(one.at - begun)
            begun = 0.0
    return {"kill_to_script": median(begins or [0.0]), "script_to_step": median(steps or [0.0])}


def peer(result: Result, chosen: argparse.Namespace) -> None:
    """Kill a whole node; measure the restore of its state from the other node."""
    took, floors = [], []
    for number in range(chosen.trials):
        floors += _floors(chosen.mib // 4, 1, lambda source: transfer_s(source, _threads()))
        launch = ("--local-nodes", "2", "--nproc-per-node", "1", "--max-restarts", "3")
        with running(OURS, ["--mib", str(chosen.mib // 4), "--every", "2"], launch, SCRIPT) as job:
            job.until(lambda lines: all(_steps(lines, rank) >= 20 for rank in range(2)))
            before = {one.pid for one in job.lines()}
            victim = next(one.pid for one in reversed(job.lines()) if one.rank == 1)
            kill_tree(ancestor(victim, "dlrover-agent"))
            lines = job.until(lambda lines, before=before: _all_step(lines, before, 2), 0.02, BACK_S)
            said = [one for one in lines if one.pid not in before and one.what.startswith("restored") and one.rank == 1]
            if said[-1].what != "restored-peer":
                raise Broken(f"the relaunched node restored from {said[-1].what}")
            took.append(said[-1].at)
            say(f"peer {number + 1}/{chosen.trials}: {said[-1].at:.3f} s; its floor {floors[-1]:.3f} s")
    what = f"restore of a lost node from its peer, {chosen.mib // 4} MiB"
    result.rows.append(
        Row(f"{what}; peer its floor: receive into fresh memory, read into fresh memory", "s", took, floors, PEER_S)
    )


def grow(result: Result, chosen: argparse.Namespace) -> None:
    """Grow a job from 2 nodes to 4 by command; count lost steps."""
    _change(result, chosen, "2 nodes become 4", ("scale", "bench", "worker=4"), 4)


def drain(result: Result, chosen: argparse.Namespace) -> None:
    """Drain one of two nodes; count lost steps."""
    _change(result, chosen, "one of 2 nodes is drained", ("drain", "bench", "worker-1"), 2)


def _change(result: Result, chosen: argparse.Namespace, what: str, command: Sequence[str], ranks: int) -> None:
    found = [_changed(chosen, command, ranks) for _ in range(min(3, chosen.trials))]
    result.rows += [
        Row(f"steps lost when {what}", "steps", [lost for lost, _ in found], (), 0.0),
        Row(f"from the last step to the next one when {what}", "s", [pause_s for _, pause_s in found]),
    ]


def _changed(chosen: argparse.Namespace, command: Sequence[str], ranks: int) -> tuple[float, float]:
    """Steps that were made twice, and seconds from the old world's last step to the new one's first, on rank 0."""
    launch = ("--local-nodes", "2", "--nproc-per-node", "1", "--on-join", "planned")
    with running(OURS, ["--mib", str(max(16, chosen.mib // 16)), "--every", "10"], launch, SCRIPT) as job:
        job.until(lambda lines: all(_steps(lines, rank) >= 25 for rank in range(2)))
        before = {one.pid for one in job.lines()}
        told = _tell(job, command)
        try:
            lines = job.until(lambda lines: _all_step(lines, before, ranks), 0.02, BACK_S)
        except Broken as error:
            raise Broken(f"dlrover {' '.join(command)} said {told!r}; {error}") from error
        last = max((one for one in lines if one.what == "step" and one.pid in before), key=lambda one: one.step)
        first = min((one for one in lines if one.what == "step" and one.pid not in before), key=lambda one: one.step)
        return float(last.step + 1 - first.step), first.at - last.at


def _tell(job: Job, command: Sequence[str]) -> str:
    ours = Path(sys.executable).parent / "dlrover"
    done = subprocess.run(
        [str(ours), *command, "--state-dir", str(job.folder)],
        env={**os.environ, "DLROVER_TOKEN": job.token},
        capture_output=True,
        text=True,
        timeout=BACK_S,
        check=False,
    )
    return (done.stdout + done.stderr)[-500:]


def _steps(lines: Sequence[Line], rank: int) -> int:
    return max((one.step for one in lines if one.what == "step" and one.rank == rank), default=0)


def _all_step(lines: Sequence[Line], before: set[int], ranks: int) -> bool:
    return len({one.rank for one in lines if one.what == "step" and one.pid not in before}) >= ranks


PARTS: dict[str, Callable[[Result, argparse.Namespace], None]] = {
    "saves": saves, "persist": persist, "whole": whole, "restore": restore, "peer": peer, "grow": grow, "drain": drain,
}  # fmt: skip


def main() -> int:
    """All parts, or some; one that cannot be measured is said, and the status is 2."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--mib", type=int, default=1024, metavar="N", help="of state (default 1024)")
        parser.add_argument("--step-s", type=float, default=0.2, metavar="S", help="a step's time (default 0.2)")
        parser.add_argument("--rounds", type=int, default=3, metavar="N", help="processes of each engine (default 3)")
        parser.add_argument("--quick", action="store_true", help="64 MiB, 2 trials, 1 round: does it run?")
        parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="these parts")

    chosen = options(__doc__, trials=5, more=more)
    if chosen.quick:
        chosen.mib, chosen.trials, chosen.rounds, chosen.step_s = 64, 2, 1, 0.05
    result = Result("checkpoint", "what each row says")
    broken = []
    if "saves" in chosen.only:
        dlrover_python()
    for name in chosen.only:
        began = time.monotonic()
        try:
            PARTS[name](result, chosen)
            say(f"{name}: measured in {time.monotonic() - began:.0f} s")
        except Broken as error:
            broken.append(name)
            say(f"{name}: not measured: {error}")
            result.notes.append(f"not measured: {name}: {str(error)[:300]}")
    if not result.rows:
        return BROKEN
    result.notes.append(
        f"{chosen.mib} MiB of state, steps of {chosen.step_s:g} s, {chosen.rounds} rounds of {chosen.trials}"
    )
    code = result.finish(chosen.json)
    return BROKEN if broken else code


if __name__ == "__main__":
    sys.exit(main())

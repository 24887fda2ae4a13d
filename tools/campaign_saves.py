"""The campaign `saves`: ranks that save are killed at random instructions of a save, and what is left in memory is read.

The real engine copies, publishes and chooses slots, in processes that are forked from this one for each trial: two or four ranks
that step together, one exchange with all others between two steps, as a collective is. One or two of them are killed with
SIGKILL while they save: after a number of bytecode instructions that the seed draws, of the training thread or of the copier's,
or some microseconds after the save began, which is mostly within a copy. The others go on until the exchange does not come, as
survivors do, and are killed then, or at once. This process stands for the agents: it made the memory, and reads it.

What must hold of every trial: each slot that says it is whole holds, on every rank, the very content that its step has on that
rank, which is a function of both; and all ranks have a step in common that is not older than the newest which was complete
everywhere when the kill came, by a count that each rank keeps of its own publications.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools.saving_ranks import GENERATION, LIMIT_S, RANK_BYTES, Exchange, Plan, Words, live, training, value

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "saves.json"
TRIALS = 1_000
INSTRUCTIONS = {"instruction": 14_000, "copier": 1_500}
"""Of the interpreter, from the begin of a save on: at most so many, about as many as a whole save has."""
MICROSECONDS = 4_000
TELL_S = 0.001
HOW = ("instruction", "copier", "copier", "time")


def drawn(seed: int, number: int) -> Plan:
    """The trial of that number. Each dozen goes through worlds, victims and intervals."""
    dice = random.Random(f"saves.{seed}.{number}")
    world, victims = (2, 4)[number % 2], (1, 2)[number // 2 % 2]
    every = (1, 2, 10)[number // 4 % 3]
    chosen = tuple(sorted(dice.sample(range(world), victims)))
    at_call = every * dice.randint(1, 3 if every == 10 else 12)
    how = tuple(dice.choice(HOW) for _ in chosen)
    after = tuple(dice.randint(1, INSTRUCTIONS.get(one, MICROSECONDS)) for one in how)
    return Plan(world, every, chosen, at_call, how, after, dice.random() < 0.5, number // 12 % 4 != 3)


# ---- a trial


class Found(NamedTuple):
    """What a trial told.

    ``states``: of each victim, where it died. ``common``: the newest step that all ranks hold; ``complete``: that was known to be
    complete before. ``hit``: a victim died within a save.
    """

    states: list[str]
    common: int
    complete: int
    hit: bool


def trial(seed: int, number: int, careless: bool = False) -> Found:
    """One kill. Raises AssertionError for a broken promise."""
    plan = drawn(seed, number)._replace(careless=careless)
    folder = tempfile.mkdtemp(prefix="saves-")
    fds = [os.memfd_create(f"rank-{rank}") for rank in range(plan.world)]
    page, exchange = mmap.mmap(-1, RANK_BYTES * plan.world), Exchange(plan.world)
    reads, writes = os.pipe()
    pids: list[int] = []
    try:
        for rank in range(plan.world):
            pid = os.fork()
            if pid == 0:
                _child(lambda rank=rank: live(plan, rank, exchange, fds[rank], page, folder, writes))  # type: ignore[misc]
            pids.append(pid)
        exchange.close()
        agents = Agents(fds)
        try:
            _kill(plan, pids, reads, page, agents)
        finally:
            agents.close()
        return _judged(plan, fds, page, agents.whole)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for fd in (*fds, reads, writes):
            os.close(fd)
        for path in Path(folder).iterdir():
            path.unlink()
        Path(folder).rmdir()


def _child(run: Callable[[], None]) -> None:
    try:
        run()
    except BaseException:  # noqa: BLE001  # a forked child must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(4)


class Agents:
    """Tells each rank what is whole on all of them, as their agents do from what they hear of each other."""

    def __init__(self, fds: list[int]) -> None:
        self._fds, self.whole = fds, 0
        self._controls: list[tuple[mmap.mmap, Any]] = []

    def tell(self) -> None:
        """Look, and tell."""
        from dlrover_core.checkpoint.arena import MAGIC, Control

        while len(self._controls) < len(self._fds):
            fd = self._fds[len(self._controls)]
            if not os.fstat(fd).st_size:
                return
            memory = mmap.mmap(fd, 0)
            if int.from_bytes(memory[:8], "little") != MAGIC:
                memory.close()
                return
            self._controls.append((memory, Control(memory)))
        held = [{stamp.step for _slot, stamp in control.stamps()} for _memory, control in self._controls]
        self.whole = max(self.whole, *set.intersection(*held), 0)
        for _memory, control in self._controls:
            control.whole = self.whole + 1 if self.whole else 0

    def close(self) -> None:
        """Let the memory go."""
        for memory, control in self._controls:
            control.release()
            memory.close()


def _kill(plan: Plan, pids: list[int], ready: int, page: mmap.mmap, agents: Agents) -> None:
    """Have the victims die, then the survivors; until none is left."""
    deadline = time.monotonic() + LIMIT_S
    timed = {rank: after for rank, how, after in zip(plan.victims, plan.how, plan.after, strict=True) if how == "time"}
    waiting = {os.pidfd_open(pids[rank]): rank for rank in plan.victims}
    dead: set[int] = set()
    try:
        while len(dead) < len(plan.victims):
            left = deadline - time.monotonic()
            assert left > 0, f"{plan}: ranks {set(plan.victims) - dead} are not dead after {LIMIT_S:g} s"
            if not plan.coupled:
                agents.tell()
                left = TELL_S
            readable, _, _ = select.select([*waiting, *([ready] if timed else [])], [], [], left)
            if ready in readable:
                rank = os.read(ready, 1)[0]
                _spin_us(timed[rank])
                os.kill(pids[rank], signal.SIGKILL)
            for fd in readable:
                if fd in waiting:
                    dead.add(waiting.pop(fd))
                    os.close(fd)
            # Of two victims the second may wait in the exchange for the first, and never come to its own end.
            if dead and len(dead) < len(plan.victims) and not timed.keys() - dead:
                _stalled(plan, pids, page, dead)
                break
    finally:
        for fd in waiting:
            os.close(fd)
    if not plan.at_once:
        _stalled(plan, pids, page, dead)
    codes = []
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    pids.clear()
    assert set(codes) <= {-signal.SIGKILL, 0}, f"{plan}: ranks ended with {codes}"


def _spin_us(microseconds: int) -> None:
    until = time.perf_counter_ns() + 1_000 * microseconds
    while time.perf_counter_ns() < until:
        pass


def _stalled(plan: Plan, pids: list[int], page: mmap.mmap, dead: set[int]) -> None:
    """Until no rank gets any further: what it had begun has landed by then."""
    deadline = time.monotonic() + 2.0
    before: list[tuple[int, str]] = []
    while time.monotonic() < deadline:
        now = [(pid, _state(pid)) for rank, pid in enumerate(pids) if rank not in dead]
        calls = [int(Words(page, rank).call) for rank in range(plan.world)]
        shown = [(pid, f"{state}{calls}") for pid, state in now]
        if shown == before and all("R" not in state for _pid, state in now):
            return
        before = shown
        select.select([], [], [], 0.01)  # two looks, some time apart, at processes that tell nobody


def _state(pid: int) -> str:
    """Of all its threads: running or not."""
    with contextlib.suppress(OSError):
        return "".join(
            (one / "stat").read_text().rpartition(")")[2].split()[0] for one in Path(f"/proc/{pid}/task").iterdir()
        )
    return ""


# ---- what is left


def _judged(plan: Plan, fds: list[int], page: mmap.mmap, whole: int) -> Found:
    """Read all memory. Raises AssertionError."""
    words = [Words(page, rank) for rank in range(plan.world)]
    published, calls = [one.published for one in words], [one.call for one in words]
    held = [set(_content(plan, rank, fd)) for rank, fd in enumerate(fds)]
    common = max(set.intersection(*held), default=0)
    # Complete everywhere: by the ranks' own notes what each has published at least, or what their agents have seen of all.
    complete = min(published) if plan.coupled else whole
    told = f"{plan}: calls {calls}, published {published}, held {[sorted(one) for one in held]}"
    assert common >= complete, f"no whole generation as new as {complete}: {told}"
    assert common or not complete, told
    states = [words[rank].note() or plan.how[at] for at, rank in enumerate(plan.victims)]
    hit = any(words[rank].saving > words[rank].published for rank in plan.victims)
    return Found(states, common, complete, hit)


def _content(plan: Plan, rank: int, fd: int) -> Iterator[int]:
    """The steps that a rank holds, each looked at in full."""
    import numpy as np

    from dlrover_adapters.checkpoint.hashing import digest
    from dlrover_adapters.checkpoint.table import Table, unpack_blob
    from dlrover_core.checkpoint.arena import PAGE, ArenaBroken, Control

    size = os.fstat(fd).st_size
    if not size:
        return
    memory = mmap.mmap(fd, size)
    try:
        control = Control(memory)
    except ArenaBroken:
        return  # killed before it was made: nothing can have been published
    table = Table.unpacked(memory[PAGE : PAGE + control.table_used])
    for slot in range(control.geometry.slots):
        stamp = control.stamp(slot)
        if stamp is None:
            continue
        told = f"{plan}: rank {rank}, slot {slot}, step {stamp.step}"
        assert (stamp.generation, stamp.step % plan.every) == (GENERATION, 0), told
        begin = control.geometry.data_at(slot)
        for item in table.items:
            found = np.frombuffer(memory, np.float64, item.size // 8, begin + item.at)
            wanted = value(rank, _number(item.name), stamp.step)
            assert (found == wanted).all(), f"{told}: {item.name} has {sorted(set(found.tolist()))[:3]}, not {wanted}"
        at = control.geometry.blob_at(slot)
        blob = memory[at : at + stamp.blob_bytes]
        assert digest(blob) == stamp.blob_digest, f"{told}: its objects are damaged"
        _objects(unpack_blob(blob), rank, stamp.step, told)
        yield stamp.step


def _number(name: str) -> int:
    """Of a tensor, as `value` counts them."""
    if name.endswith(".seen"):
        return 999
    parts = name.split(".")
    layer, kind = next((int(one), parts[at + 1]) for at, one in enumerate(parts) if one.isdigit())
    parameter = 2 * layer + (kind == "bias")
    return 2 * parameter + (parts[-1] == "momentum")


def _objects(blob: dict[str, bytes], rank: int, step: int, told: str) -> None:
    """The position in it is that of the step."""
    import io

    import torch

    (position,) = (raw for name, raw in blob.items() if "extra" in name)
    found = torch.load(io.BytesIO(position), weights_only=True)
    assert found == {"rank": rank, "step": step, "text": "x" * (step % 50)}, f"{told}: its position is {found}"


# ---- the campaign


def warm() -> None:
    """Have everything imported that a child needs: children are forked."""
    import torch

    import dlrover_adapters.torch.checkpoint.engine  # noqa: F401
    from dlrover_adapters.torch.checkpoint.capture import Capture

    torch.set_num_threads(1)
    model, optimizer, position = training(0)
    optimizer.step()
    capture = Capture(model=model, optimizer=optimizer, extra=position)
    capture.foreseen()
    capture.chunks()
    capture.objects()


def run(seed: int, first: int, count: int, *, careless: bool = False) -> Iterator[tuple[int, Found | str]]:
    """Trials one after the other: what each found, or the promise that it broke. ``careless``: with a fault planted."""
    warm()
    for number in range(first, first + count):
        try:
            yield number, trial(seed, number, careless)
        except AssertionError as error:
            yield number, str(error)[:2_000] or "an assertion"


def campaign(seed: int, trials: int, machine: dict[str, Any]) -> int:
    """Go on where the result stopped; how many trials broke a promise."""
    result: dict[str, Any] = {
        "campaign": "saves", "seed": seed, "machine": machine, "trials": 0, "failures": {}, "took_s": 0.0,
        "worlds": {}, "every": {}, "victims": {}, "states": {}, "kills_within_a_save": 0, "steps_behind": {},
    }  # fmt: skip
    if RESULT.exists():
        before = json.loads(RESULT.read_text())
        if before["seed"] == seed and before["trials"] < trials:
            result = before
    saved = time.monotonic()
    began, took = time.monotonic(), result["took_s"]
    for number, found in run(seed, result["trials"], trials - result["trials"]):
        plan = drawn(seed, number)
        result["trials"] += 1
        _count(result["worlds"], str(plan.world))
        _count(result["every"], str(plan.every))
        _count(result["victims"], str(len(plan.victims)))
        if isinstance(found, str):
            result["failures"][str(number)] = found
        else:
            for one in found.states:
                _count(result["states"], one)
            result["kills_within_a_save"] += found.hit
            _count(result["steps_behind"], str(plan.at_call - found.common))
        result["took_s"] = round(took + time.monotonic() - began, 1)
        if time.monotonic() - saved > 2.0 or result["trials"] == trials:
            saved = time.monotonic()
            result["states"] = dict(Counter(result["states"]).most_common())
            RESULT.write_text(json.dumps(result, indent=1) + "\n")
            line = f"saves: {result['trials']} kills, {len(result['failures'])} broke a promise"
            print(f"\r{line}, {result['kills_within_a_save']} within a save", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return len(result["failures"])


def _count(found: dict[str, int], key: str) -> None:
    found[key] = found.get(key, 0) + 1


def main() -> int:
    """Some trials that no result is kept of: what each came to, a line of JSON each; 1 if one broke a promise."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--until-broken", action="store_true", help="end with the first broken promise")
    parser.add_argument("--careless", action="store_true", help="plant a fault, which must be found")
    parser.add_argument("--then-careless", type=int, default=0, help="so many more with that fault, until it is found")
    options = parser.parse_args()
    broken = _told(run(options.seed, options.first, options.trials, careless=options.careless), options.until_broken)
    if options.then_careless:
        more = run(options.seed, options.first + options.trials, options.then_careless, careless=True)
        broken += _told(more, until_broken=True)
    return int(broken > 0)


def _told(trials: Iterator[tuple[int, Found | str]], until_broken: bool) -> int:
    """Print them; how many broke a promise."""
    broken = 0
    for number, found in trials:
        failed = isinstance(found, str)
        broken += failed
        told = {"broken": found} if isinstance(found, str) else found._asdict()
        print(json.dumps({"trial": number, **told}), flush=True)
        if failed and until_broken:
            break
    return broken


if __name__ == "__main__":
    sys.exit(main())

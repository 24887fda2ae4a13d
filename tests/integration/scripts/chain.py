"""A training whose state can be wrong, without torch: every step is a link of a chain that hangs on all steps before it.

``chain.py FOLDER``: each rank keeps its last link in FOLDER/state-RANK, written whole or not at all, and appends ``step digest
generation pid nanoseconds`` to FOLDER/chain-RANK. A step that is lost or made twice, or a second process of the same rank beside
the first, shows in that file. It ends when FOLDER/finish exists. With ``--child``, each life starts a process that would
outlive it in a session of its own.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dlrover_adapters.torch import step as tell_step

PAUSE_S = 0.05


def link(before: str, rank: int, step: int) -> str:
    """The digest of a step."""
    return hashlib.sha256(f"{before} {rank} {step}".encode()).hexdigest()[:16]


class Link(NamedTuple):
    """One step that a rank has made; ``at`` in seconds by CLOCK_MONOTONIC."""

    step: int
    digest: str
    generation: int
    pid: int
    at: float


def links(folder: Path, rank: int) -> list[Link]:
    """The steps of a rank so far."""
    try:
        text = (folder / f"chain-{rank}").read_text()
    except FileNotFoundError:
        return []
    rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return [Link(int(row[0]), row[1], int(row[2]), int(row[3]), int(row[4]) / 1e9) for row in rows]


def flaws(links: Sequence[Link], rank: int) -> list[str]:
    """What is wrong with a chain: a link of another chain, one left out or made anew without need, two processes at once."""
    wrong, digest = [], ""
    before: Link | None = None
    for one in links:
        again = before is not None and one.step == before.step and one.pid != before.pid
        if before is not None:
            if one.step != before.step + 1 and not again:
                wrong.append(f"{one} after {before}: steps were lost or made twice")
            if (one.pid != before.pid) != (one.generation > before.generation):
                wrong.append(f"{one} after {before}: two processes at once")
        digest = digest if again else link(digest, rank, one.step)
        if one.digest != digest:
            wrong.append(f"{one}: the chain undisturbed is {digest}")
        before = one
    return wrong


def main() -> None:
    """Train."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    state, chain = folder / f"state-{rank}", os.open(folder / f"chain-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if "--child" in sys.argv:
        subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    step, digest = 0, ""
    if state.exists():
        saved = state.read_text().split()
        step, digest = int(saved[0]), saved[1]
    while not (folder / "finish").exists():
        step += 1
        digest = link(digest, rank, step)
        os.write(chain, f"{step} {digest} {generation} {os.getpid()} {time.monotonic_ns()}\n".encode())
        part = state.with_suffix(".part")
        part.write_text(f"{step} {digest}")
        part.replace(state)
        tell_step(step)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()

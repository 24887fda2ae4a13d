"""Processes of running jobs are paused (SIGSTOP, 3 s, SIGCONT), one at a time in each job: is any of them started anew?

A seed draws who is paused: the roles in turn, in an order drawn anew for each round, and of a role with several processes any.
Several jobs run side by side, which saves time and changes nothing for the one that is paused.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from _bench import say
from _jobs import Broken, Job, marked

PAUSE_S, BETWEEN_S = 3.0, 1.0
READY_LIMIT_S = 60.0
NAMES = {"dlrover-agent": "agent", "dlrover-keeper": "keeper", "dlrover-saver": "saver", "dlrover-zygote": "zygote"}
ROLES = ("leader", "reserve", "agent", "keeper", "saver", "zygote", "worker")

Ask = Callable[[], Mapping[str, Any] | None]
Place = Callable[[], "contextlib.AbstractContextManager[tuple[Job, Ask]]"]


class Paused(NamedTuple):
    """Which processes were paused with the log in one place, and which of them were started anew because of it."""

    pauses: Mapping[str, int]
    """How often each role was paused."""
    anew: Mapping[str, int]
    """How many processes of each role were gone afterwards, or led no more."""


def census(job: Job, told: Mapping[str, Any]) -> dict[str, frozenset[int]]:
    """The processes of each role now."""
    found: dict[str, set[int]] = {role: set() for role in ROLES}
    found["leader"].add(int(str(told["leader"]).split("/")[1]))
    found["worker"] |= {line.pid for line in job.lines() if Path(f"/proc/{line.pid}").exists()}
    for pid in marked(job.mark):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name == "dlrover-master" and pid not in found["leader"]:
                found["reserve"].add(pid)
            elif name in NAMES and pid not in found["worker"]:
                found[NAMES[name]].add(pid)
    return {role: frozenset(pids) for role, pids in found.items()}


def paused(name: str, place: Place, pauses: int, jobs: int, seed: int) -> Paused:
    """Pause processes of ``jobs`` jobs at a time, ``pauses`` times in all."""
    shares = [pauses // jobs + (number < pauses % jobs) for number in range(jobs)]
    stop = threading.Event()

    def one(number: int) -> Paused:
        try:
            with place() as (job, ask):
                dice = random.Random(f"{seed} {name} {number}")
                return _job(job, ask, shares[number], dice, f"{name}, job {number + 1} of {jobs}", stop)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(jobs) as pool:
        done = [one.result() for one in [pool.submit(one, number) for number in range(jobs) if shares[number]]]
    pauses_of, anew = Counter[str](), Counter[str]()
    for each in done:
        pauses_of.update(each.pauses)
        anew.update(each.anew)
    return Paused(pauses_of, anew)


def _job(job: Job, ask: Ask, pauses: int, dice: random.Random, who: str, stop: threading.Event) -> Paused:
    before, token = _ready(job, ask)
    pauses_of = Counter[str]()
    for number, role in zip(range(pauses), _roles(dice), strict=False):
        if stop.is_set():
            raise Broken(f"{who}: another one failed")
        _pause(dice.choice(sorted(before[role])))
        pauses_of[role] += 1
        time.sleep(BETWEEN_S)
        if number % 10 == 9:
            say(f"{who}: {number + 1} pauses")
    steps = len(job.lines())
    job.until(lambda lines: len(lines) > steps, 0.05, READY_LIMIT_S)
    told = _told(job, ask)
    after = census(job, told)
    anew = {role: len(pids - after[role]) for role, pids in before.items() if pids - after[role]}
    if told["token"] != token:
        anew["leader"] = max(1, anew.get("leader", 0))
    if anew:
        say(f"{who}: started anew: {anew}; the launcher said: {job.said()}")
    return Paused(pauses_of, anew)


def _ready(job: Job, ask: Ask) -> tuple[dict[str, frozenset[int]], int]:
    """Every role is there, and none is being started any more: who they are, and the leader's token."""
    job.until(lambda lines: any(line.what == "step" and line.step >= 20 for line in lines), 0.05)
    deadline = time.monotonic() + READY_LIMIT_S
    earlier: dict[str, frozenset[int]] = {}
    while True:
        told = _told(job, ask)
        found = census(job, told)
        if all(found.values()) and found == earlier:
            return found, int(told["token"])
        if time.monotonic() > deadline:
            missing = sorted(role for role, pids in found.items() if not pids)
            raise Broken(f"not ready; missing: {missing}; it said: {job.said()}")
        earlier = found
        time.sleep(1.0)


def _told(job: Job, ask: Ask) -> Mapping[str, Any]:
    deadline = time.monotonic() + READY_LIMIT_S
    while (told := ask()) is None:
        if time.monotonic() > deadline:
            raise Broken(f"nobody leads; the launcher said: {job.said()}")
        time.sleep(0.1)
    return told


def _roles(dice: random.Random) -> Iterator[str]:
    while True:
        yield from dice.sample(ROLES, len(ROLES))


def _pause(pid: int) -> None:
    """Stop a process for `PAUSE_S` seconds, and let it go on."""
    with contextlib.suppress(ProcessLookupError):  # it was killed over a pause, which is counted at the end
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(PAUSE_S)
        finally:
            os.kill(pid, signal.SIGCONT)


def total(counts: Mapping[str, int], roles: Sequence[str] = ROLES) -> int:
    """The sum of the counts of ``roles``."""
    return sum(counts.get(role, 0) for role in roles)

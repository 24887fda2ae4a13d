"""What a rough world does to a job: the kinds of strikes, how often each comes, and the schedule that a seed draws."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import NamedTuple

MEAN_S = 6.5
"""Seconds between two strikes, on average."""

ROLES = {
    "worker": 5, "dlrover-agent": 2, "dlrover-keeper": 2, "dlrover-saver": 2, "dlrover-zygote": 2, "dlrover-master": 4,
    "dlrover-spare": 1, "dlrover-sweeper": 1,
}  # fmt: skip
SHORT_S, LONG_S = (0.1, 3.0), (8.0, 25.0)
"""How long a process stays stopped: well below ``hung_s`` (5), or well above. What lies between may end either way."""

LONG = 0.4
CLOCK_H = (1.0, 2.0, 5.0, 24.0, 72.0)
NAMED_KINDS = {
    "kill": "SIGKILL for a process of any role",
    "stop": "SIGSTOP for a process of any role, and SIGCONT later",
    "clock": "the wall clock jumps by hours, forwards or backwards, and back again",
    "disk-full": "the disk of the state directory or of the checkpoints has no room for some seconds",
    "disk-stall": "a disk completes no write for some seconds",
    "pids": "no more processes and threads may be made for some seconds",
    "files": "a process may open no more files for some seconds",
    "oom": "the kernel's OOM killer ends a worker that reaches its control group's limit",
    "strangers": "another user holds 1,000 connections to every listening port of ours for some seconds",
    "hostile": "another user sends meaningless bytes to every listening port of ours",
    "cut": "the link of a host is cut, both ways or one way",
    "loss": "the network loses packets",
    "delay": "the network delays and reorders packets",
    "host": "every process of a host is killed at once",
    "etcd-kill": "SIGKILL for a member of etcd, often the leader, and it comes back later",
    "etcd-stop": "SIGSTOP for a member of etcd, often the leader, and SIGCONT later",
    "etcd-full": "etcd has no room: its NOSPACE alarm, until somebody makes room",
    "etcd-wipe": "a member of etcd loses its disk and is replaced",
}
EVERYWHERE = {
    "kill": 10.0, "stop": 8.0, "clock": 2.0, "disk-full": 1.5, "disk-stall": 1.2, "pids": 0.8, "files": 0.8, "oom": 0.8,
    "strangers": 0.5, "hostile": 0.7,
}  # fmt: skip
BETWEEN_HOSTS = {
    "cut": 1.5, "loss": 1.0, "delay": 1.0, "host": 0.4, "etcd-kill": 1.2, "etcd-stop": 1.2, "etcd-full": 0.3,
    "etcd-wipe": 0.2,
}  # fmt: skip
HOSTS = ("a", "b", "c")
SECONDS: Mapping[str, tuple[float, float]] = {
    "clock": (3.0, 20.0), "disk-full": (2.0, 15.0), "disk-stall": (0.5, 20.0), "pids": (2.0, 8.0), "files": (2.0, 8.0),
    "strangers": (6.0, 10.0), "cut": (1.0, 40.0), "loss": (4.0, 20.0), "delay": (4.0, 20.0), "host": (2.0, 10.0),
    "etcd-kill": (1.0, 10.0), "etcd-stop": (1.0, 15.0), "etcd-full": (10.0, 25.0), "etcd-wipe": (1.0, 5.0),
}  # fmt: skip
"""How long a strike of a kind lasts: from, to."""


class Strike(NamedTuple):
    """One strike.

    ``at_s``: seconds after the job's first step.
    ``kind``: a key of `NAMED_KINDS`.
    ``target``: the role, the disk, the host or the member that is hit; empty where a kind has none.
    ``which``: a number from 0 to 1. It chooses one of those that live, the oldest first, or what a kind leaves open.
    ``lasts_s``: how long it lasts; 0 for what is done in a moment.
    ``amount``: hours of a jump of the clock, the share of lost packets, seconds of delay.
    """

    at_s: float
    kind: str
    target: str = ""
    which: float = 0.0
    lasts_s: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        lasts = f"for {self.lasts_s:g} s" if self.lasts_s else ""
        amount = f"{self.amount:+g}" if self.amount else ""
        return f"{self.at_s:8.2f} s  {self.kind:<11} {self.target.removeprefix('dlrover-'):<9} {lasts:<13} {amount}".rstrip()


def has_hosts(seed: int) -> bool:
    """Is this seed's job one of several hosts with their log in etcd? The others have one host and SQLite."""
    return seed % 5 in (1, 3)


def shm_mib(seed: int) -> int:
    """How much shared memory this seed's machine has; 0: as much as it likes."""
    return 64 if seed % 5 in (2, 3) else 0


def slow_disk(seed: int) -> str:
    """What lies on the disk that can stall: the state directory, or the checkpoints."""
    return ("state", "stored")[seed % 2]


def drawn(seed: int, seconds: float, left_out: Collection[str] = (), mean_s: float = MEAN_S) -> list[Strike]:
    """The strikes of a seed. Kinds that are left out are drawn and dropped: the others strike as they would with them."""
    dice, found, at = random.Random(f"rough.{seed}"), list[Strike](), 0.0
    weights = EVERYWHERE | (BETWEEN_HOSTS if has_hosts(seed) else {})
    while True:
        at += dice.expovariate(1 / mean_s)
        kind = dice.choices(list(weights), list(weights.values()))[0]
        one = _strike(dice, seed, kind)._replace(at_s=round(at, 2), which=round(dice.random(), 3))
        if at >= seconds:
            return found
        if kind not in left_out:
            found.append(one)


def _strike(dice: random.Random, seed: int, kind: str) -> Strike:
    low, high = SECONDS.get(kind, (0.0, 0.0))
    if kind == "stop":
        low, high = LONG_S if dice.random() < LONG else SHORT_S
    strike = Strike(0.0, kind, lasts_s=round(dice.uniform(low, high), 2))
    roles = dice.choices(list(ROLES), list(ROLES.values()))[0]
    amount = {
        "clock": dice.choice(CLOCK_H) * dice.choice((1, -1)),
        "loss": round(dice.uniform(0.01, 0.2), 3),
        "delay": round(dice.uniform(0.01, 0.3), 3),
    }.get(kind, 0.0)
    target = {
        "kill": roles, "stop": roles, "oom": "worker", "files": dice.choice(("dlrover-master", "dlrover-saver")),
        "disk-full": dice.choice(("state", "stored")), "disk-stall": slow_disk(seed),
        "cut": dice.choice(HOSTS), "host": dice.choice(HOSTS), "clock": dice.choice(HOSTS),
    }.get(kind, "")  # fmt: skip
    return strike._replace(target=target, amount=amount)

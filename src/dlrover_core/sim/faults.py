"""What can go wrong, in one vocabulary for all three levels: simulated engine, virtual-time loop, real processes.

A fault is data: when, what, to whom, how much. It draws nothing, so a list of faults can be shortened and the rest stays what it
was. ``target`` is a name (``worker-3``, ``host-7``, ``rack-2``), or a number: the how-manyeth of those that there are at that
moment, counted around, so that a number always hits somebody.
"""

from __future__ import annotations

from typing import NamedTuple

from dlrover_core.errors import PlanError
from dlrover_core.sim import triggers

ENGINE, LOOP, LOCAL = "engine", "loop", "local"
LEVELS = (ENGINE, LOOP, LOCAL)


class Fault(NamedTuple):
    """One thing done to a job. ``amount`` 0 means its kind's default; ``cause`` is a label for reports, and for the log lines
    that a data set's failures leave.
    """

    at: str
    kind: str
    target: str | int = 0
    amount: float = 0.0
    cause: str = ""

    def __str__(self) -> str:
        """``step 100: kill_worker 2``."""
        much = f" {self.amount:g} {KINDS[self.kind].unit}" if self.amount and self.kind in KINDS else ""
        return f"{self.at}: {self.kind} {self.target}{much}{f' ({self.cause})' if self.cause else ''}"


class Kind(NamedTuple):
    """A kind of fault: what it does, to what sort of target, its amount's unit and what 0 stands for, and where it exists."""

    doc: str
    target: str
    unit: str = ""
    default: float = 0.0
    levels: tuple[str, ...] = LEVELS


_SIMULATED = (ENGINE, LOOP)

KINDS: dict[str, Kind] = {
    # Processes and machines.
    "kill_worker": Kind("SIGKILL for one worker", "worker"),
    "fail_worker": Kind("a worker raises; `cause` is its error's text", "worker", levels=LEVELS),
    "kill_node": Kind("SIGKILL for an agent and its workers; the scheduler sees it end", "node"),
    "kill_host": Kind("a host and its nodes are gone, told by the scheduler; back after", "host", "s", 3600.0, _SIMULATED),
    "kill_rack": Kind("all hosts of a rack; back after", "rack", "s", 3600.0, (ENGINE,)),
    "lose_host": Kind("a power cut, which its scheduler sees after", "host", "s", 60.0, _SIMULATED),
    "sick_host": Kind("its workers die soon after a start, `cause` in their words; cured after", "host", "s", 3600.0, (ENGINE,)),
    "silence_node": Kind("an agent is stopped (SIGSTOP), its workers train on; goes on after", "node", "s", 30.0),
    "hang_worker": Kind("a worker lives and makes no step, so no rank does; goes on after, 0: never", "worker", "s", 0.0),
    "slow_worker": Kind("a worker computes so many times as long, for 60 s", "worker", "x", 2.0),
    "unreach_node": Kind("a living node's host cannot be reached by its scheduler; it can after", "node", "s", 30.0, _SIMULATED),
    "dark_host": Kind("a power cut, the scheduler calls the host lost; its end is seen after", "host", "s", 600.0, _SIMULATED),
    "flap_node": Kind("the scheduler calls a running node lost, and running again after", "node", "s", 20.0, _SIMULATED),
    # Networks.
    "partition": Kind("a node's link to masters is cut with a reset; heals after", "node", "s", 10.0, LEVELS),
    "drop": Kind("frames on a node's link vanish, both ways, without an error; heals after", "node", "s", 10.0, _SIMULATED),
    "drop_to_master": Kind("the same one way: the master hears nothing", "node", "s", 10.0, _SIMULATED),
    "drop_to_node": Kind("the same one way: the node hears nothing", "node", "s", 10.0, _SIMULATED),
    "delay": Kind("every frame of a node's link takes so much longer, for 60 s", "node", "s", 1.0, _SIMULATED),
    "lose_messages": Kind("so many of the next frames to the master are lost, connection and all", "node", "n", 3, _SIMULATED),
    "double_messages": Kind("so many of the next frames to the master arrive twice", "node", "n", 3, _SIMULATED),
    "reorder_messages": Kind("so many of the next frames to the master overtake one another", "node", "n", 3, _SIMULATED),
    # The log.
    "ack_lost": Kind("the next append lands, its acknowledgement does not", "log", levels=_SIMULATED),
    "log_slow": Kind("the next append's acknowledgement takes", "log", "s", 1.0, _SIMULATED),
    "log_down": Kind("the log cannot be reached for", "log", "s", 10.0, _SIMULATED),
    "log_full": Kind("the log has no room for", "log", "s", 10.0, _SIMULATED),
    "log_fenced": Kind("another master takes the lead as the next append is under way", "log", levels=_SIMULATED),
    "disk_full": Kind("the disk of a file log is full for", "log", "s", 5.0, (LOCAL,)),
    "torn_write": Kind("the master dies with half a batch written", "log", levels=(LOCAL,)),
    "bit_flip": Kind("a bit of an older batch is flipped on disk while the master is dead", "log", levels=(LOCAL,)),
    # Clocks.
    "clock_jump": Kind("the leader's wall clock jumps by", "master", "s", 3600.0, _SIMULATED),
    "clock_skew": Kind("masters started from now on have wall clocks off by", "master", "s", 3600.0, _SIMULATED),
    "node_clock": Kind("a node's monotonic clock runs so many times as fast, from now on", "node", "x", 1.1, (LOOP,)),
    # Masters.
    "crash_master": Kind("the leading master is killed; its successor comes after", "master", "s", 1.0),
    "crash_before_append": Kind("the same, with a batch decided and not appended", "master", "s", 1.0, _SIMULATED),
    "crash_after_append": Kind("the same, with a batch appended and no reply sent", "master", "s", 1.0, _SIMULATED),
    "pause_master": Kind("the leading master's process is stopped for", "master", "s", 10.0),
    "second_master": Kind("one more master is started", "master", levels=_SIMULATED),
    "hand_over": Kind("the leading master is asked to go, another takes over", "master", levels=_SIMULATED),
    "old_agent": Kind("agents that start from now on speak the oldest protocol that we serve", "node", levels=(LOOP,)),
    # Schedulers that lie.
    "create_error": Kind("so many of the next launches raise, though the node is created", "backend", "n", 1, _SIMULATED),
    "create_stuck": Kind("the next so many nodes stay pending for ever", "backend", "n", 1, _SIMULATED),
    "stale_list": Kind("the scheduler lists what was so many seconds ago, once", "backend", "s", 30.0, _SIMULATED),
    "relist": Kind("the scheduler's stream of changes breaks, it lists anew", "backend", levels=_SIMULATED),
    "quota": Kind("every launch is refused for now, for", "backend", "s", 60.0, _SIMULATED),
    "preempt": Kind("a node is taken away with a notice of", "node", "s", 120.0, _SIMULATED),
    "preempt_sooner": Kind("the same, and the notice moves to half of it", "node", "s", 120.0, _SIMULATED),
    "preempt_later": Kind("the same, and half-way the notice moves to twice as much", "node", "s", 120.0, _SIMULATED),
    "preempt_withdrawn": Kind("a notice of, withdrawn half-way: the node stays", "node", "s", 120.0, _SIMULATED),
    "hold_queue": Kind("the scheduler places no node, and says why, for", "backend", "s", 600.0, _SIMULATED),
    "preempt_now": Kind("a node is taken away without a word", "node", levels=_SIMULATED),
    # What people ask for, in the midst of it all.
    "scale": Kind("a person scales the first group to so many nodes", "node", "n", 1, _SIMULATED),
    "drain": Kind("a person drains a node", "node", levels=_SIMULATED),
    "suspend": Kind("a person suspends the job, and resumes it after", "master", "s", 30.0, _SIMULATED),
    # What happens at its appointed time, for instance a planned interruption.
    "interrupt": Kind("all workers are stopped and begin again, as for an update of the code", "worker", levels=(ENGINE,)),
}  # fmt: skip


def kinds(level: str) -> tuple[str, ...]:
    """The kinds that exist at a level."""
    return tuple(name for name, kind in KINDS.items() if level in kind.levels)


def amount(fault: Fault) -> float:
    """How much, in the unit of its kind."""
    return fault.amount or KINDS[fault.kind].default


def checked(fault: Fault, level: str) -> Fault:
    """The fault, if it can be done at this level. Raises `PlanError`."""
    kind = KINDS.get(fault.kind)
    if kind is None:
        raise PlanError(f"no fault is called {fault.kind!r}; there are {', '.join(KINDS)}")
    if level not in kind.levels:
        raise PlanError(f"{fault.kind} ({kind.doc}) exists at the levels {', '.join(kind.levels)}, not at {level!r}")
    if fault.amount < 0 and fault.kind not in ("clock_jump", "clock_skew"):
        raise PlanError(f"{fault}: an amount cannot be negative")
    triggers.parse(fault.at)
    return fault

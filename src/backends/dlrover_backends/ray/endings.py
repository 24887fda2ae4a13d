"""What Ray's records say of a node: its phase, how it ended, why it waits, and what the cluster is about to do with its host.

The reason begins with Ray's own word, which diagnosis knows: ``NODE_DIED``, ``EXPECTED_TERMINATION``, ``NODE_OUT_OF_MEMORY``,
``RUNTIME_ENV_SETUP_FAILED``. Where the keeper lived to report its agent's end, the exit status says it all, and there is no word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dlrover_backends.ray.records import Actor, Group, Host, Place, Snapshot
from dlrover_backends.shared.last_words import exited
from dlrover_backends.shared.process import told
from dlrover_core.job.nodes import STANDBY_SEAT
from dlrover_core.runtime.backend import AVOIDED, Observation

TEXT_MAX = 300
PLAN = re.compile(r"Worker exits with an exit code (-?\d+)\.?(.*)", re.DOTALL)
"""How Ray tells of an exit status, and behind it what the keeper has handed over: its agent's last words."""
_EXIT_TYPE = re.compile(r"Worker exit type: (\w+)")
_DETAIL = re.compile(r"Worker exit detail: (.*)", re.DOTALL)
_ERROR_LINE = re.compile(r"^(?:[\w.]+)?(?:Error|Exception)\b")
PREEMPTED = "AUTOSCALER_DRAIN_PREEMPTED"
ENDED_ON_PURPOSE = frozenset({"EXPECTED_TERMINATION", "AUTOSCALER_DRAIN_IDLE"})
OUT_OF_MEMORY = "NODE_OUT_OF_MEMORY"
NOT_STARTED = "NOT_STARTED"
"""A word of ours. Ray says only that somebody killed the actor."""


def observation(actor: Actor, seen: Snapshot, group: Group | None, place: Place, wall_s: float) -> Observation:
    """What the records say of an actor's node. ``wall_s``: the wall clock, for deadlines and the age of an end."""
    host = seen.hosts.get(actor.host_id)
    name = host.name if host is not None else ""
    if actor.is_dead:
        age_us = max(0, int(wall_s * 1e6) - actor.ended_ms * 1000) if actor.ended_ms else 0
        phase, code, reason = ending(actor.cause)
        return Observation(actor.name, phase, code, reason, name, age_us=age_us)
    seat = f"{STANDBY_SEAT}{actor.seat}" if actor.seat else ""
    if actor.state != "ALIVE":
        return Observation(actor.name, "pending", host=name, waits=_waits(group, place, seen.hosts), seat=seat)
    if host is not None and host.ended:
        return Observation(actor.name, "failed", -1, f"NODE_DIED: the raylet of {name} has ended", name)
    if host is not None and not host.alive:
        return Observation(actor.name, "lost", reason=f"NODE_DIED: the cluster has lost {name}", host=name)
    notice, notice_us = _notice(host, wall_s)
    return Observation(actor.name, "running", host=name, notice=notice, notice_us=notice_us, seat=seat)


def ending(cause: Mapping[str, Any]) -> tuple[str, int, str]:
    """A death cause as phase, exit code and reason."""
    match cause:
        case {"runtime_env_failed_context": found}:
            return "failed", 1, _worded("RUNTIME_ENV_SETUP_FAILED", _last_error(_message(found)))
        case {"oom_context": found}:
            return "failed", 137, _worded(OUT_OF_MEMORY, _message(found))
        case {"actor_unschedulable_context": found}:
            return "failed", 1, _worded("Unschedulable", _message(found))
        case {"creation_task_failure_context": found}:
            told_ = str(found.get("formatted_exception_string") or _message(found))
            return "failed", 1, _worded("the keeper cannot start its agent", _last_error(told_))
        case {"actor_died_error_context": found}:
            return _died(found)
    return "failed", -1, "ACTOR_DIED: Ray does not say why"


def given_up(waits_s: float) -> str:
    """Why a node ended: Ray did not start its actor within so many seconds, and the desk killed the actor."""
    return f"{NOT_STARTED}: Ray did not start the actor within {waits_s:.0f} s, and did not wait for room either"


def _died(context: Mapping[str, Any]) -> tuple[str, int, str]:
    message, word = _message(context), str(context.get("reason") or "ACTOR_DIED")
    if word == "NODE_DIED" or "node_death_info" in context:
        return _host_died(context, message)
    found = PLAN.search(message)
    if found is not None:
        code = int(found[1])
        phase = "failed" if code else "succeeded"
        if 128 < code < 160:
            return phase, code, told(-(code - 128))
        return phase, code, exited(told(code), code, found[2])
    type_ = _EXIT_TYPE.search(message)
    if type_ is not None and type_[1] == OUT_OF_MEMORY:
        return "failed", 137, _worded(OUT_OF_MEMORY, _detail(message))
    if type_ is not None and type_[1] == "INTENDED_USER_EXIT":
        return "succeeded", 0, told(0)
    if word == "RAY_KILL":
        return "failed", -9, "RAY_KILL: somebody killed the actor by ray.kill"
    return "failed", -1, _worded(word, _detail(message))


def _host_died(context: Mapping[str, Any], message: str) -> tuple[str, int, str]:
    """What was ended on purpose is over; what only is not heard may live on, and its agent is asked."""
    info = context.get("node_death_info") or {}
    why, detail = str(info.get("reason") or "UNSPECIFIED"), str(info.get("reason_message") or message)
    if why == PREEMPTED or context.get("preempted"):
        return "failed", -1, _worded("DRAIN_NODE_REASON_PREEMPTION", detail)
    if why in ENDED_ON_PURPOSE:
        return "failed", -1, _worded(why, detail)
    return "lost", 0, _worded("NODE_DIED", f"{why}: {detail}")


def _notice(host: Host | None, wall_s: float) -> tuple[str, int]:
    """Why the host will go, and after how many microseconds; 0: nobody says when."""
    if host is None or host.drain_ms is None:
        return "", 0
    left_us = max(1, host.drain_ms * 1000 - int(wall_s * 1e6)) if host.drain_ms else 0
    return f"Ray drains {host.name}", left_us


def _waits(group: Group | None, place: Place, hosts: Mapping[str, Host]) -> str:
    """Why a pending node is not placed; empty: nothing is in its way."""
    if group is None or group.state == "CREATED":
        return ""
    fitting = [one for one in hosts.values() if one.alive and fits(place.wants, one.has)]
    avoided = sorted({one.name for one in fitting if one.name in place.avoid})
    if avoided and len(avoided) == len({one.name for one in fitting}):
        return f"{AVOIDED}: {', '.join(avoided)}"
    wants = written(place.wants or group.wants)
    if group.scheduling == "INFEASIBLE" and not fitting:
        return f"Unschedulable: no host has {wants}; the largest has {largest(hosts)}"[:TEXT_MAX]
    if group.scheduling == "INFEASIBLE":
        return f"Unschedulable: no host with {wants} has the labels that are asked for"[:TEXT_MAX]
    return f"NO_RESOURCES: {wants} are not free on any one host"[:TEXT_MAX]


def fits(wants: Mapping[str, float], has: Mapping[str, float]) -> bool:
    """Could a host with these resources take this, were it empty?"""
    return all(has.get(name, 0.0) >= amount for name, amount in wants.items())


def largest(hosts: Mapping[str, Host]) -> str:
    """The resources of the largest living host, in words."""
    living = [one.has for one in hosts.values() if one.alive]
    if not living:
        return "nothing, for none is alive"
    most = max(living, key=lambda has: (has.get("GPU", 0.0), has.get("CPU", 0.0), has.get("memory", 0.0)))
    return written({name: amount for name, amount in most.items() if ":" not in name and name != "object_store_memory"})


def written(resources: Mapping[str, float]) -> str:
    """Resources as ``--resources`` takes them, memory in MiB."""
    return ",".join(
        f"{name}={int(amount) >> 20}Mi" if name == "memory" else f"{name}={amount:g}"
        for name, amount in sorted(resources.items())
    )


def _message(context: Mapping[str, Any]) -> str:
    return str(context.get("error_message") or "")


def _detail(message: str) -> str:
    found = _DETAIL.search(message)
    # Behind the first sentences Ray lists what might have been the cause of anybody's death.
    return (
        (found[1] if found else message).partition(" Some common causes")[0].partition(" There are some potential")[0]
    )


def _last_error(text: str) -> str:
    """The line of a traceback that says what is wrong: the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if _ERROR_LINE.match(line)), lines[0] if lines else "")


def _worded(reason: str, detail: str) -> str:
    words = " ".join(detail.split())
    return f"{reason}: {words}"[:TEXT_MAX] if words else reason

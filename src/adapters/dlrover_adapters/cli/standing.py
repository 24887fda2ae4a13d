"""What a launcher's masters say, told to people in a line whenever it changes: who leads, can it decide, is there no room?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from dlrover_core.job import waiting as reasons

REASON_CHARS_MAX = 300
PLACELESS = "(waits: "
"""So a node that its scheduler cannot place is told among those that a world lacks."""


class Standing:
    """Turns what a master says of itself into the lines that are news. ``address`` is where its host's masters are reached."""

    def __init__(self, job: str, address: str) -> None:
        self._job, self._address = job, address
        self._role = ""
        self._degraded_since = 0

    def news(self, status: Mapping[str, Any], now_us: int) -> Iterator[str]:
        """The lines to say now, mostly none."""
        from dlrover_core.history.phrases import duration, one_line  # a launcher's start is in a hurry

        role = self._role_of(status)
        if role and role != self._role:
            self._role = role
            yield role
        if status.get("degraded"):
            if not self._degraded_since:
                self._degraded_since = int(status.get("degraded_since", 0)) or now_us
                why = one_line(status["degraded"], REASON_CHARS_MAX)
                yield f"control plane degraded: {why}; training goes on, decisions wait"
        elif self._degraded_since and role:  # a master that has only just started knows nothing yet
            yield f"control plane is back, after {duration(max(0, now_us - self._degraded_since))}"
            self._degraded_since = 0

    def _role_of(self, status: Mapping[str, Any]) -> str:
        if status.get("role") == "leader":
            return f"leads job {self._job} at {self._address}"
        # Between its election and its first words a leader has a name, and no address yet: that comes in a moment.
        leader = status.get("leader_address")
        if status.get("role") != "standby" or not leader:
            return ""
        return f"stands by for job {self._job}; {leader} leads"


class Unplaced:
    """Tells people why their job has no world: its nodes' scheduler has no place for them, and has had none for ``after_s``."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._since: dict[str, float] = {}
        self._said: set[str] = set()

    def news(self, status: Mapping[str, Any], at: float) -> Iterator[str]:
        """The lines to say now, mostly none: one for each time that a group waits. ``at``: seconds of the monotonic clock."""
        waits = {
            str(one["group"]): str(one["words"])
            for one in status.get("waits", ())
            if one["why"] in {reasons.NODES, reasons.ROOM}
            and PLACELESS in one["words"]
            and _none_comes(status, one["nodes"])
        }
        self._since = {group: self._since.get(group, at) for group in waits}
        self._said &= waits.keys()
        for group, words in waits.items():
            if group not in self._said and at - self._since[group] >= self._after_s:
                self._said.add(group)
                yield f"{group} has no place for its nodes since {self._after_s:g} s, and waits on; Ctrl-C ends the job: {words}"


def _none_comes(status: Mapping[str, Any], nodes: Iterable[str]) -> bool:
    """Have none of these nodes a place? One that has may merely be slow to start, and a world may need no more."""
    known = status.get("nodes", {})
    return all(known[one]["state"] == "pending" and not known[one].get("host") for one in nodes if one in known)


def in_memory(status: Mapping[str, Any]) -> Iterator[str]:
    """Which step is whole in the memory of all nodes, by group: a level, which only the leader knows."""
    for group, kept in dict(status.get("checkpoints", {})).items():
        if int(kept.get("whole", -1)) >= 0:
            yield f"{group}: step {kept['whole']} is whole in the memory of all nodes"


def waiting(status: Mapping[str, Any]) -> Iterator[str]:
    """How many agents wait warm for the place of a dead node, where the nodes' scheduler keeps some."""
    wanted = int(status.get("standbys_wanted", 0))
    if wanted:
        yield f"standbys: {int(status.get('standbys', 0))} of {wanted} wait for the place of a dead node"


def degraded(status: Mapping[str, Any], now_us: int) -> str:
    """Since when the control plane is degraded, and why; empty: it is not."""
    from dlrover_core.history.phrases import duration, one_line

    if not status.get("degraded"):
        return ""
    since = int(status.get("degraded_since", 0))
    when = f" since {datetime.fromtimestamp(since / 1e6).astimezone():%Y-%m-%d %H:%M:%S}" if since else ""
    lasts = f" (for {duration(max(0, now_us - since))})" if since else ""
    return f"control plane degraded{when}{lasts}: {one_line(status['degraded'], REASON_CHARS_MAX)}"

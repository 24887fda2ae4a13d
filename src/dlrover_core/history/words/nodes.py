"""Events of nodes in words."""

from __future__ import annotations

from typing import Any

from dlrover_core.history.phrases import exit_of
from dlrover_core.history.words import Follows, Keys, Known, Words
from dlrover_core.job import nodes
from dlrover_core.words import count


def _failed(fact: nodes.NodeFailed) -> str:
    if not fact.seen and fact.reason:
        return f"node {fact.node} failed: {fact.reason}"
    return f"node {fact.node} failed: {exit_of(fact.exit_code)}{', ' + fact.reason if fact.reason else ''}"


def _gone(fact: nodes.NodeGone) -> str:
    return f"node {fact.node} is gone{', as expected' if fact.expected else ''}: {fact.reason or 'no reason given'}"


def _planned(fact: nodes.NodePlanned) -> str:
    avoid = f", not on {', '.join(fact.avoid)}" if fact.avoid else ""
    return f"node {fact.node} should exist{avoid}"


def _pending(fact: nodes.NodePending) -> str:
    if fact.waits:
        return f"node {fact.node} {'waits' if fact.accepted else 'is refused for now, and waits'}: {fact.waits}"
    return f"node {fact.node} was accepted by its backend"


def _joined(fact: nodes.NodeJoined) -> str:
    workers = count(fact.nproc, "worker")
    if fact.seat.startswith(nodes.STANDBY_SEAT):
        return f"a warm standby on {fact.host} became {fact.node}, with {workers}"
    return f"the agent of {fact.node} joined from {fact.host} with {workers}"


def _plan(fact: Any, known: Known) -> tuple[int, ...]:
    return (known.newest(nodes.NodePlanned, fact.node),)


def _release(fact: Any, known: Known) -> tuple[int, ...]:
    return (known.newest(nodes.NodeReleased, fact.node),)


WORDS: Words = {
    nodes.NodePlanned: _planned,
    nodes.NodePending: _pending,
    nodes.NodeRunning: lambda fact: f"node {fact.node} runs{' on ' + fact.host if fact.host else ''}",
    nodes.NodeJoined: _joined,
    nodes.NodeSucceeded: lambda fact: f"node {fact.node} ended well",
    nodes.NodeFailed: _failed,
    nodes.NodeGone: _gone,
    nodes.NodeLost: lambda fact: f"node {fact.node} was given up: {fact.reason}",
    nodes.NodeReleased: lambda fact: f"node {fact.node} should no longer exist: {fact.reason}",
    nodes.NodeLeft: lambda fact: f"the agent of {fact.node} stopped its workers and left",
    nodes.PlaceReopened: lambda fact: (
        f"place {fact.group}-{fact.index} was given up long ago: any host may have it now"
    ),
}

KEYS: Keys = {nodes.NodePlanned: lambda fact: fact.node, nodes.NodeReleased: lambda fact: fact.node}
FOLLOWS: Follows = {
    **dict.fromkeys((nodes.NodePending, nodes.NodeRunning, nodes.NodeJoined), _plan),
    nodes.NodeLeft: _release,
    nodes.NodeGone: lambda fact, known: _release(fact, known) if fact.expected else (),
}

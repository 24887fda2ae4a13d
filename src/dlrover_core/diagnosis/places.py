"""What words speak of: something that one host has, something that all hosts share, or a path between two.

No host is accused of what it shares with the others.
"""

from __future__ import annotations

import re

# A path that one host may lack and another have.
_PATH = re.compile(r"['\" ](?:/[\w.-]|\w+://)")
_LOCAL_PATH = re.compile(
    r"['\" ](?:/(?:tmp|var|usr|opt|etc|dev|proc|sys|run|scratch|local|mnt/(?:local|nvme|ssd)|raid|nvme)\b|\w+\.so\b)"
)
# A queue pair that cannot be connected: routes, addresses, subnets and the peer have a part in it.
_CONNECTS = re.compile(r"\bibv_(?:modify|create)_qp\b|\b(?:Network is|Host) unreachable\b", re.IGNORECASE)
# What was asked for, and not who was asked.
_REQUESTED = re.compile(
    r"\b(?:layout tasks|distribute tasks|invalid (?:account|partition|qos|time|gres|option)"
    r"|more (?:processors|tasks) (?:requested|than)|Requested \w+ (?:count|configuration|partition)|task count)\b",
    re.IGNORECASE,
)


def shared(words: str) -> bool:
    """Do they name a path, and none that each host has for itself?"""
    return _PATH.search(words) is not None and _LOCAL_PATH.search(words) is None


def between_hosts(words: str) -> bool:
    """Do they tell of a connection that could not be made?"""
    return _CONNECTS.search(words) is not None


def requested(words: str) -> bool:
    """Do they tell of a request that does not fit, whatever host it goes to?"""
    return _REQUESTED.search(words) is not None

"""Names of nodes: ``worker-1-0`` is group, index and incarnation."""

from __future__ import annotations


def group_of(node: str) -> str:
    """The group in a node's name: ``worker`` of ``worker-1-0``."""
    return node.rsplit("-", 2)[0]

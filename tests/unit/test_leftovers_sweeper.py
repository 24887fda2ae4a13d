"""An agent and the sweeper of its own folder."""

from __future__ import annotations

import pytest

from dlrover_adapters.agent import leftovers
from dlrover_core.host.procfs import Member


def test_an_agent_leaves_its_own_sweeper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a child in a session of its own, and no worker's leaving; a daemon of a worker's is."""
    sweeper, daemon = (Member(pid, name, "S", 1, pid, 1) for pid, name in ((11, "dlrover-sweeper"), (12, "daemon")))
    monkeypatch.setattr(leftovers, "_adopting", True)
    monkeypatch.setattr(leftovers, "children_of_ours", lambda: [sweeper, daemon])
    monkeypatch.setattr(leftovers, "processes", lambda: iter((sweeper, daemon)))
    assert leftovers.left((), ()) == [daemon]

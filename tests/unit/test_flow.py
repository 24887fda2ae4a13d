"""How far one decision walks through the core is measured, and does not creep up unseen."""

from __future__ import annotations

import re

import pytest
from tools import flow

FILES_MAX, CHANGES_MAX = 49, 428
"""A little above what docs/design.md says. Whoever needs more measures anew, and says there why."""


def test_one_decision(capsys: pytest.CaptureFixture[str]) -> None:
    """From a worker's exit to the relaunch of its node: every step of it is a call of core that is counted."""
    assert flow.main() == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(
        "WorkerExited, IncidentOpened, Diagnosed, ActionChosen, HostQuarantined, NodeReleased, NodePlanned"
    )
    found = re.fullmatch(r"(\d+) calls in (\d+) files, (\d+) changes of file", said[-1])
    assert found is not None
    calls, files, changes = map(int, found.groups())
    assert len(said) == files + 2
    assert 20 < files <= FILES_MAX
    assert files < changes <= CHANGES_MAX
    assert changes < calls

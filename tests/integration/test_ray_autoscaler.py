"""Ray's autoscaler brings the host that a job's second node waits for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import SCRIPTS

pytestmark = [
    pytest.mark.nightly(
        reason="an autoscaler takes its time; a node that waits for room is tried by day in test_ray_backend"
    ),
    pytest.mark.alone(reason="a cluster with an autoscaler runs `ray stop --force`, though it sees no other Ray"),
    pytest.mark.timeout(400),
]
APART = (
    *("unshare", "--user", "--map-root-user", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"),
    *(sys.executable, str(SCRIPTS / "ray_autoscaling.py")),
)
"""In namespaces of its own: nothing that is stopped there, and no port that is taken there, is anybody else's."""


@pytest.fixture(name="folder")
def made_folder() -> Iterator[Path]:
    """A short one: the address of a socket has 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="ra-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_node_waits_for_the_autoscaler(folder: Path) -> None:
    """The job begins with one node. Its other one is the autoscaler's demand, comes, and trains with it."""
    if shutil.which("unshare") is None or subprocess.run([*APART[:-2], "true"], check=False).returncode:
        pytest.skip("no process namespace can be made here, and this would end every Ray of the machine")
    done = subprocess.run([*APART, str(folder)], capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    seen = json.loads((folder / "seen.json").read_text(encoding="utf-8"))
    assert (seen["nodes"], seen["status"]) == (["worker-0-0", "worker-1-0"], 0), seen
    assert "NO_RESOURCES" in seen["waits"], seen
    assert seen["incidents"] == 0, seen

"""Which children of a launcher's are orphans of its nodes: killed, and reaped; those of an entry script are neither."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import os, signal, subprocess, sys, time
from dlrover_backends.shared import orphans

SLEEP = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"]
DAEMON = '''
import os, subprocess, sys
os.read(0, 1)
made = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
os.write(1, b"%d\\\\n" % made.pid)
os.read(0, 1)
os._exit(0)
'''

def side():
    return subprocess.Popen(SLEEP, stdin=subprocess.PIPE, start_new_session=True, env={})

def parent():
    return subprocess.Popen(
        [sys.executable, "-c", DAEMON], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env={}
    )

def daemon_of(one):
    one.stdin.write(b"x"); one.stdin.flush()
    return int(one.stdout.readline())

def orphan_of(one):
    one.stdin.write(b"x"); one.stdin.flush()
    one.wait()

def state(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]

def dead(pid):
    fd = os.pidfd_open(pid)
    import select
    assert select.select([fd], [], [], 20)[0]
    os.close(fd)
"""


def run(body: str) -> None:
    """In a process of its own: being a parent is a process's affair."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + body],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_what_an_entry_script_has_started_is_left_alone() -> None:
    """``setsid exporter & exec dlrover-run ...``: the exporter is the launcher's child then; its daemons may become so."""
    run(
        """
before, theirs = side(), parent()
orphans.adopt()
mine = parent()
stranger, orphan = daemon_of(theirs), daemon_of(mine)
orphans.started.add(mine.pid)
orphans.reap()
orphan_of(theirs); orphan_of(mine)
assert orphans.end(10.0) == 0
assert before.poll() is None
assert state(stranger) not in "ZX"
assert not os.path.exists(f"/proc/{orphan}")
os.kill(stranger, 9)
before.kill()
"""
    )


def test_whoever_started_a_child_before_hears_how_it_ended() -> None:
    """A program that calls the launcher: its children's exit codes are its own. Children that came since are taken away."""
    run(
        """
orphans.UNREAPED_S = 0.0
before, theirs = side(), parent()
orphans.adopt()
stranger = daemon_of(theirs)
orphans.reap()
orphan_of(theirs)
os.kill(stranger, 9)
before.kill()
dead(before.pid); dead(stranger)
orphans.reap()
assert not os.path.exists(f"/proc/{stranger}")
assert before.wait() == -9
"""
    )


def test_bodies_that_somebody_here_reaps_are_left_for_a_while() -> None:
    """Whoever started a child reaps it long before; who does not is helped after `UNREAPED_S`."""
    run(
        """
orphans.adopt()
mine, kept = side(), side()
orphans.started.add(kept.pid)
for one in (mine, kept):
    one.kill(); dead(one.pid)
orphans.reap()
assert state(mine.pid) == "Z"
orphans.UNREAPED_S = 0.0
orphans.reap()
assert not os.path.exists(f"/proc/{mine.pid}")
assert state(kept.pid) == "Z"
assert kept.wait() == -9
"""
    )


@pytest.mark.parametrize("first", [True, False])
def test_the_first_process_of_a_container_kills_no_orphan(first: bool) -> None:
    """It inherits everybody's."""
    run(
        f"""
orphans.adopt()
mine = parent()
orphan = daemon_of(mine)
orphans.started.add(mine.pid)
orphan_of(mine)
if {first}:
    os.getpid = lambda: 1
assert orphans.end(10.0) == 0
assert os.path.exists(f"/proc/{{orphan}}") is {first}
if {first}:
    os.kill(orphan, 9)
"""
    )

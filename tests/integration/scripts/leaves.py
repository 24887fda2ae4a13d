"""Leave children behind, each as others do, and end: a plain one, one in a session of its own, a daemon, a daemon without
environment that adopts orphans, and an orphan that it has adopted.

Arguments: seconds after which each writes FOLDER/left-KIND; the exit code of the first life, later ones end with 0; -1: each
life stays until FOLDER/finish is there.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

FOLDER, SECONDS = os.environ["FOLDER"], sys.argv[1]
PR_SET_CHILD_SUBREAPER = 36
WRITES = "import sys, time; time.sleep(float(sys.argv[1])); open(sys.argv[2], 'w').write('done')"


def child(kind: str, env: dict[str, str]) -> None:
    """Be it."""
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", WRITES, SECONDS, f"{FOLDER}/left-{kind}"], env)  # noqa: S606


def fork(kind: str, *, session: bool, twice: bool = False, env: dict[str, str] | None = None, adopts: str = "") -> None:
    """Start one; ``twice``: its parent ends at once; ``adopts``: it has an orphan of this kind."""
    pid = os.fork()
    if pid == 0:
        if session:
            os.setsid()
        if twice and os.fork():
            os._exit(0)
        with (Path(FOLDER) / "pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        if adopts:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            fork(adopts, session=True, twice=True, env={})
        child(kind, dict(os.environ) if env is None else env)
    if twice:
        os.waitpid(pid, 0)


signal.signal(signal.SIGCHLD, signal.SIG_DFL)
fork("plain", session=False)
fork("session", session=True)
fork("daemon", session=True, twice=True)
fork("bare", session=True, twice=True, env={}, adopts="adopted")
pids = Path(FOLDER) / "pids"
while not pids.exists() or len(pids.read_text().splitlines()) % 5:
    pass
code = int(sys.argv[2])
if code > 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    code = 0
while code < 0 and not (Path(FOLDER) / "finish").exists():
    time.sleep(0.02)
sys.exit(max(0, code))

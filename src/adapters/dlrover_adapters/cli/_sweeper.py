"""Clean up after a launcher: ``python -I -S _sweeper.py FD FOLDER MARK CGROUPS GROUP ROOF...``. Run as a file, never imported.

Nobody cleans up after SIGKILL but somebody else. This waits for the end of the pipe FD, whose other end only the launcher
holds; then it kills every process whose environment bears MARK, and all in the run's control groups below GROUP (CGROUPS is the
file of the module that knows them), and removes FOLDER, and folders below each ROOF that bear the run's name. A launcher that
ends in order does all that itself and kills this. Should both be killed at once, the next launcher removes the folder: see
`scratch`.
"""

import contextlib
import os
import runpy
import shutil
import signal
import sys
import time

ROUNDS_MAX, ROUND_S, GROUPS_S = 200, 0.05, 10.0


def main(pipe: int, folder: str, mark: str, cgroups: str, group: str, *roofs: str) -> None:
    """Returns when nothing is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write("dlrover-sweeper")
    while os.read(pipe, 4096):
        pass
    for _ in range(ROUNDS_MAX):
        # Again and again: what is being killed may be starting others.
        if not kill_marked(mark.encode()):
            break
        time.sleep(ROUND_S)
    with contextlib.suppress(OSError):  # uninstalled meanwhile
        runpy.run_path(cgroups)["end_all"](group, GROUPS_S, run=mark.partition("=")[2])
    for one in (folder, *elsewhere(mark.partition("=")[2], roofs)):
        shutil.rmtree(one, ignore_errors=True)


def elsewhere(run: str, roofs: tuple[str, ...]) -> list[str]:
    """The folders of a run's nodes that lie outside the run's folder. `run_folders.private_folder` names them after the run."""
    found = []
    for roof in roofs if run.isalnum() else ():
        with contextlib.suppress(OSError):
            found += [f"{roof}/{name}" for name in os.listdir(roof) if name.startswith(f"dlrover-run-{run}-")]
    return found


def kill_marked(mark: bytes) -> int:
    """SIGKILL every process with ``mark`` in the environment it began with; how many there were."""
    found = 0
    for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue  # gone meanwhile
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                if mark in environ.read().split(b"\0"):
                    found += 1
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except OSError:  # gone, or another user's
            continue
        finally:
            os.close(pidfd)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])

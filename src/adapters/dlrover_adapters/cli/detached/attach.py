"""`dlrover attach`: the live line of a detached job and its output, until the job ends; the exit status is the job's."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrover_adapters.cli.detached import output, record
from dlrover_adapters.cli.places import INTERRUPTED, NO_MASTER, NotFound
from dlrover_core.logs.place import default_state_dir

EXAMPLES = """\
  dlrover attach digits                   what it writes from now on, and its live line; Ctrl-C detaches, the job goes on
  dlrover attach digits --state-dir /data/dlrover
  dlrover attach k8s:ml/digits            what the nodes of a job in Kubernetes print, with a kubeconfig alone"""

LOOK_S = 0.1


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `attach` takes."""
    parser.add_argument("job", metavar="JOB", help="the job's name")
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        type=Path,
        help="the state directory that dlrover-run was given (default: $XDG_STATE_HOME/dlrover, else ~/.local/state/dlrover)",
    )


def run(args: argparse.Namespace) -> int:
    """Show the job until it ends, or until Ctrl-C."""
    directory = (args.state_dir.absolute() if args.state_dir else default_state_dir()) / "jobs" / args.job
    known = record.read(directory)
    if known is None:
        raise NotFound(f"there is no detached job {args.job!r} in {directory.parent}; dlrover-run --detach starts one")
    status = record.ended(directory, known.mark)
    if status is not None:
        _say(f"job {args.job} has ended with status {status}; dlrover status {args.job}{known.where} says how")
        return status
    if gone := record.lost(args.state_dir, args.job):
        _say(gone)
        return NO_MASTER
    _say(f"attached to job {args.job}; Ctrl-C detaches, and the job goes on")
    try:
        return asyncio.run(_show(args, directory, known))
    except KeyboardInterrupt:
        _say(f"detached from job {args.job}, which goes on")
        return INTERRUPTED


def _say(words: str) -> None:
    print(f"dlrover attach: {words}", file=sys.stderr, flush=True)


async def _show(args: argparse.Namespace, directory: Path, known: record.Record) -> int:
    following = asyncio.ensure_future(_line(args.job, directory)) if sys.stderr.isatty() else None
    fd = os.open(directory / record.OUTPUT, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.lseek(fd, 0, os.SEEK_END)
        while True:
            status = record.ended(directory, known.mark)
            held = status is not None or record.lives(directory)
            while piece := output.read(fd):
                sys.stdout.buffer.write(piece)
                sys.stdout.flush()
            if status is not None:
                return status
            if not held and (gone := record.lost(args.state_dir, args.job)):
                _say(gone)
                return NO_MASTER
            await asyncio.sleep(LOOK_S)
    finally:
        os.close(fd)
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _line(job: str, directory: Path) -> None:
    """The live line, while masters answer."""
    from dlrover_adapters.cli.line import Line
    from dlrover_adapters.cli.settings import Settings
    from dlrover_adapters.cli.supervisor import watch
    from dlrover_adapters.http.token import load_token

    settings, line = Settings.read(str(directory / "settings.json")), Line(job)

    def show(status: Mapping[str, Any], _now: float) -> None:
        line.show(status, time.monotonic())

    try:
        with contextlib.suppress(OSError):
            await watch(settings.masters[0], load_token({}, str(directory / "token")), None, show, 0.5)
    finally:
        line.end()

"""`dlrover hosts`: what is known against the hosts of a job, and a person's word about one of them.

Looking needs nothing but the log. What a person says of a host goes to whoever leads, as `operate` sends it.
"""

from __future__ import annotations

import argparse
import math
import re
from typing import TYPE_CHECKING, Any

from dlrover_adapters.cli import operate, read
from dlrover_adapters.cli.places import OK, NotFound, log_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping

EXAMPLES = """\
  dlrover hosts digits                                 who runs where, what failed there, who is kept off and why
  dlrover hosts digits --json | jq '.hosts[] | select(.quarantined_until > 0)'
  dlrover hosts digits --quarantine gpu-17 --for 2h    start nothing there; 'dlrover drain' moves what runs there
  dlrover hosts digits --release gpu-17                it was mended: forget its failures"""

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "": 1}
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d|)")
DAY_S = 86_400


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `hosts` takes."""
    parser.add_argument("job", metavar="JOB", nargs="?", help=read.JOB_HELP)
    log_arguments(parser)
    parser.add_argument("--json", action="store_true", help="for programs: every field named, times in microseconds")
    word = parser.add_mutually_exclusive_group()
    word.add_argument("--quarantine", metavar="HOST", help="start nothing on this host; what runs there is left alone")
    word.add_argument("--release", metavar="HOST", help="end its quarantine or probation, and forget its failures")
    parser.add_argument(
        "--for", metavar="TIME", dest="for_s", type=length, default=DAY_S, help="as 90s, 30min, 2h, 3d (default: 1d)"
    )
    operate.asking_arguments(parser)


def length(text: str) -> int:
    """Seconds of ``90s``, ``30min``, ``2h``, ``3d``; at least one."""
    found = _LENGTH.fullmatch(text)
    seconds = math.ceil(float(found[1]) * _UNITS[found[2]]) if found is not None else 0
    if seconds < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no length of time: say 90s, 30min, 2h or 3d")
    return seconds


async def run(args: argparse.Namespace) -> int:
    """`dlrover hosts`."""
    if args.quarantine:
        return await _tell(args, "quarantine", {"host": args.quarantine, "for_s": args.for_s})
    if args.release:
        return await _tell(args, "release", {"host": args.release})
    return await _list(args)


async def _tell(args: argparse.Namespace, verb: str, arguments: Mapping[str, Any]) -> int:
    if args.job is None:
        # Nobody should change another job than the one that was meant.
        raise NotFound(f"name the job whose host it is: dlrover hosts JOB --{verb} {arguments['host']}")
    asking = argparse.Namespace(**{**vars(args), "command": verb, "wait": False})
    return await operate.ask(asking, arguments, lambda _state, _asked: "")


async def _list(args: argparse.Namespace) -> int:
    from dlrover_core.history import hosts_of, render_hosts
    from dlrover_core.history.plain import plain
    from dlrover_core.job.state import FOLD

    async with read.opened(args) as source:
        state = FOLD.new()
        async for record in source.log.read(source.job):
            FOLD.apply(state, record)
        told = hosts_of(state, await source.now())
        print(read.as_json(plain(told)) if args.json else render_hosts.hosts(told))
    return OK

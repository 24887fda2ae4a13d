"""The options of node checks: whether nodes are checked before they train, and what a site looks at besides. Light to import."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Mapping

from dlrover_adapters.cli import dlrover_flags
from dlrover_adapters.cli.torchrun_flags import Given, Options
from dlrover_core.errors import SpecError


def policy(ours: argparse._ArgumentGroup) -> None:
    """What the job's spec holds of them."""
    ours.add_argument(
        "--precheck",
        action=Given,
        type=dlrover_flags.precheck,
        choices=("off", "basic", "full"),
        default="off",
        help="check nodes before they train: disk, memory, devices (basic), and computing in pairs (full); default off. "
        "DLRover's 0, 1 and 2 are off, full and full",
    )
    ours.add_argument(
        "--check-slow",
        action=Given,
        choices=("report", "replace"),
        default="report",
        help="a node whose check was slow: only report it (default), or replace it, once",
    )


def here(ours: argparse._ArgumentGroup) -> None:
    """What each host may have of its own."""
    ours.add_argument(
        "--check-script",
        action="append",
        default=[],
        metavar="COMMAND",
        help="a check of your own, run with --precheck on every node: an executable that ends with 0 where all is well, and "
        "else says why in its last line; may be given again",
    )


def scripts(options: Options) -> tuple[str, ...]:
    """The site's own checks. Raises `SpecError` for one that is no command."""
    for one in options.check_script:
        try:
            words = shlex.split(one)
        except ValueError as error:
            raise SpecError("check-script", f"{one!r} is not a command: {error}") from error
        if not words:
            raise SpecError("check-script", "name an executable")
        if shutil.which(words[0]) is None:
            raise SpecError(
                "check-script", f"{words[0]!r} is not there, or cannot be executed: nodes would fail for that"
            )
    return tuple(options.check_script)


def notes(options: Options) -> Mapping[str, str]:
    """What was given and does nothing, with the reason."""
    if options.check_script and options.precheck == "off":
        return {"--check-script": "checks are off; say --precheck basic or full"}
    return {}

"""docs/operations.md names only what exists: commands, options, exit codes, fields and classes of time."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from dlrover_adapters.cli import main, options
from dlrover_core.history.status import Status
from dlrover_core.history.timeline import CLASSES

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
TEXT = PAGE.read_text()


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    found = {flag for action in parser._actions for flag in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                found |= _flags(sub)
    return found


def test_commands() -> None:
    """Every `dlrover VERB` is a command."""
    verbs = set(re.findall(r"(?<![\w/-])dlrover ([a-z]+)", TEXT)) - {"commands"}
    assert verbs <= {one.name for one in main.COMMANDS}
    assert verbs >= {"status", "events", "explain", "report", "scale", "drain", "stop", "suspend", "resume", "doctor"}


def test_options() -> None:
    """Every option is one of `dlrover-run`'s or of a command's."""
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert named <= _flags(main.build_parser()) | _flags(options.parser())


def test_exit_codes() -> None:
    """The table of `dlrover`'s exit codes has those that --help shows."""
    table = TEXT.split("| `dlrover` | meaning |")[1].split("\n\n")[0]
    told = {code for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(", ")}
    assert told == set(re.findall(r"^  (\d+)", main.EXIT_CODES, re.MULTILINE))


def test_fields_and_classes() -> None:
    """What to alert on are fields of the status, and time goes into classes that there are."""
    for name in ("state", "step_at", "restarts_left", "relaunches_left", "incidents"):
        assert f"`{name}`" in TEXT
        assert name in Status._fields
    for name in ("detecting", "deciding", "forming", "restarting", "rework", "finishing", "suspended"):
        assert re.search(rf"[*`]{name}[*`]", TEXT)
        assert name in CLASSES

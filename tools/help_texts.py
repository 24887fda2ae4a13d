"""Writes docs/commands.md from the commands' own --help, so that the two cannot differ: ``python -m tools.help_texts``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
VERBS = (
    *("status", "events", "explain", "report"),
    *("scale", "drain", "stop", "suspend", "resume"),
    *("master", "ckpt", "diagnose", "signatures", "doctor", "simulate", "conformance"),
)
COMMANDS = (
    ("dlrover-run", "dlrover_adapters.cli.run", ()),
    ("dlrover", "dlrover_adapters.cli.main", ()),
    *((f"dlrover {verb}", "dlrover_adapters.cli.main", (verb,)) for verb in VERBS),
    *(
        (f"dlrover ckpt {verb}", "dlrover_adapters.cli.main", ("ckpt", verb))
        for verb in ("ls", "verify", "export", "rm")
    ),
)
INTRODUCTION = (
    "# Commands\n\nGenerated from `--help` by `python -m tools.help_texts`; a test fails when this page is stale.\n"
)


def text_of(module: str, arguments: tuple[str, ...]) -> str:
    """What the command prints for --help, 100 columns wide and without colours."""
    program = f"import sys, {module} as command; sys.exit(command.main(sys.argv[1:]))"
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHON_COLORS": "0"}
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return run.stdout


def page() -> str:
    """The whole page."""
    parts = [f"## {name}\n\n```\n{text_of(module, arguments).rstrip()}\n```\n" for name, module, arguments in COMMANDS]
    return "\n".join([INTRODUCTION, *parts])


if __name__ == "__main__":
    PAGE.write_text(page())

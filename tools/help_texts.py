"""Writes docs/commands.md from the commands' own --help, so that the two cannot differ: ``python -m tools.help_texts``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
VERBS = (
    *("status", "events", "explain", "report", "data"),
    *("scale", "drain", "attach", "stop", "suspend", "resume"),
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


EACH = """
import importlib, os, sys
commands = [(importlib.import_module(name), words) for name, *words in map(str.split, sys.argv[1:])]
for command, words in commands:
    if not os.fork():
        sys.exit(command.main([*words, "--help"]))
    if os.wait()[1]:
        sys.exit("{} {} --help has failed".format(command.__name__, words))
    os.write(1, b"\\0")
"""
"""One process imports all of the commands, and a fork of it is each of them."""


def texts() -> list[str]:
    """What the commands print for --help, 100 columns wide and without colours."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHON_COLORS": "0"}
    lines = [" ".join((module, *words)) for _, module, words in COMMANDS]
    run = subprocess.run(
        [sys.executable, "-c", EACH, *lines], capture_output=True, text=True, check=True, env=environment
    )
    return run.stdout.split("\0")[:-1]


def page() -> str:
    """The whole page."""
    told = zip(COMMANDS, texts(), strict=True)
    parts = [f"## {name}\n\n```\n{text.rstrip()}\n```\n" for (name, _, _), text in told]
    return "\n".join([INTRODUCTION, *parts])


if __name__ == "__main__":
    PAGE.write_text(page())

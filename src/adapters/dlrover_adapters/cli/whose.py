"""Whose command this is: the import name and the commands of another distribution are close to ours."""

from __future__ import annotations

from importlib import metadata

OTHER = "dlrover"


def version_lines(command: str) -> list[str]:
    """What ``--version`` prints, with a warning where the other distribution is installed beside us."""
    lines = [f"dlrover-core {metadata.version('dlrover-core')} ({command})"]
    try:
        other = metadata.version(OTHER)
    except metadata.PackageNotFoundError:
        return lines
    warning = (
        f"warning: the distribution {OTHER!r} {other} is installed too and has a command {command!r} of its own; "
        "which one runs depends on the order of installation"
    )
    return [*lines, warning]

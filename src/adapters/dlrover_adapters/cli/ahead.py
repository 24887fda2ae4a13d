"""Agents started before anything else: torch's import begins with the command, and everything else happens meanwhile.

The final settings (addresses, folders) are not known by then: such an agent gets a draft, in which its workers are complete,
and the rest over its socket. Light to import.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from dlrover_adapters.agent.spawn import module_command
from dlrover_adapters.cli.scratch import MARK
from dlrover_backends.shared import orphans
from dlrover_backends.shared.process import LocalCommand, Started, blank

if TYPE_CHECKING:
    from dlrover_adapters.cli.settings import Settings

MODULE = "dlrover_adapters.cli.agent"


def agent_command(settings: Settings, papers: int, token: str, control: int, *more: str) -> LocalCommand:
    """How an agent is started that inherits the file ``papers`` with its settings and is told the rest at ``control``."""
    words = ("--config", f"/proc/self/fd/{papers}", "--job", settings.job.job, "--control", str(control), *more)
    return LocalCommand((*module_command(MODULE), *words), {"DLROVER_TOKEN": token, MARK: settings.mark}, fds=(papers,))


def later_agents(settings: Settings, token: str) -> Callable[[int], LocalCommand]:
    """How agents are started that get all of their ``settings``, whatever becomes of the disk; for this process's life."""
    papers = settings.in_memory()

    def command(control: int) -> LocalCommand:
        return agent_command(settings, papers, token, control)

    return command


@contextlib.contextmanager
def started(settings: Settings, token: str, counts: Mapping[str, int]) -> Iterator[dict[str, list[Started]]]:
    """So many agents of each group, which know the draft ``settings``; what still lives of them at the end is killed."""
    orphans.adopt()
    found: dict[str, list[Started]] = {}
    try:
        for group, count in counts.items():
            found[group] = []
            _start(settings.of_group(group), token, count, found[group])
        yield found
    finally:
        for one in (one for group in found.values() for one in group):
            one.end()


def _start(settings: Settings, token: str, count: int, found: list[Started]) -> None:
    """Start ``count`` agents of one group, each of which is ``found`` as soon as it runs."""
    draft = settings.in_memory()

    def command(control: int) -> LocalCommand:
        return agent_command(settings, draft, token, control, "--draft")

    try:
        for _ in range(count):
            found.append(blank(command))  # noqa: PERF401  # what was started before one that fails must be found
    finally:
        os.close(draft)

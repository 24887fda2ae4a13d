"""Agents started before anything else: torch's import begins with the command, and everything else happens meanwhile.

The final settings (addresses, folders) are not known by then: such an agent gets a draft, in which its workers are complete,
and the rest over its socket. Light to import.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dlrover_adapters.agent.spawn import module_command
from dlrover_adapters.cli.scratch import MARK
from dlrover_backends.local import orphans
from dlrover_backends.local.process import LocalCommand, Started, blank

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
def started(settings: Settings, token: str, count: int) -> Iterator[list[Started]]:
    """``count`` agents that know the draft ``settings``; what still lives of them at the end is killed."""
    orphans.adopt()
    draft = settings.in_memory()
    found: list[Started] = []
    try:

        def command(control: int) -> LocalCommand:
            return agent_command(settings, draft, token, control, "--draft")

        found += [blank(command) for _ in range(count)]
        os.close(draft)
        draft = -1
        yield found
    finally:
        if draft >= 0:
            os.close(draft)
        for one in found:
            one.end()

"""Agents started before anything else: torch's import begins with the command, and everything else happens meanwhile.

The final settings (addresses, folders) are not known by then: such an agent gets a draft, in which its workers are complete,
and the rest over its socket. Light to import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dlrover_adapters.agent.spawn import module_command
from dlrover_adapters.cli.scratch import MARK
from dlrover_backends.local.process import LocalCommand, Started, blank

if TYPE_CHECKING:
    from dlrover_adapters.cli.settings import Settings

MODULE = "dlrover_adapters.cli.agent"


def agent_command(settings: Settings, config: str, token: str, control: int, *more: str) -> LocalCommand:
    """How an agent is started that reads its settings in the file ``config`` and is told the rest at ``control``."""
    words = ("--config", config, "--job", settings.job.job, "--control", str(control), *more)
    return LocalCommand((*module_command(MODULE), *words), {"DLROVER_TOKEN": token, MARK: settings.mark})


@contextlib.contextmanager
def started(settings: Settings, token: str, count: int) -> Iterator[list[Started]]:
    """``count`` agents that know the draft ``settings``; what still lives of them at the end is killed."""
    draft = os.memfd_create("dlrover-settings")
    found: list[Started] = []
    try:
        with open(draft, "w", encoding="utf-8", closefd=False) as file:
            json.dump(dataclasses.asdict(settings), file)

        def command(control: int) -> LocalCommand:
            made = agent_command(settings, f"/proc/self/fd/{draft}", token, control, "--draft")
            return made._replace(fds=(draft,))

        found += [blank(command) for _ in range(count)]
        os.close(draft)
        draft = -1
        yield found
    finally:
        if draft >= 0:
            os.close(draft)
        for one in found:
            one.end()

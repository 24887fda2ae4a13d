"""The node host of a launcher: its agents by group, those that were started ahead first."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dlrover_adapters.cli.settings import Settings
    from dlrover_backends.local import LocalNodeHost
    from dlrover_backends.shared.process import Started


class Agents(NamedTuple):
    """The agents of this host by group: those that were started ``first``, and how many are kept warm as standbys."""

    first: Mapping[str, list[Started]]
    standby: Mapping[str, int]


def node_host(settings: Settings, config: Path, token: str, agents: Agents) -> LocalNodeHost:
    """The host of the nodes, not yet open; ``config`` is the file of the settings that agents started ahead still need."""
    from dlrover_adapters.agent import looks
    from dlrover_adapters.cli.ahead import later_agents
    from dlrover_backends.local import Ahead, LocalNodeHost

    made, job = dict[str, Ahead](), settings.job
    for group, first in agents.first.items():
        for one in first:
            with contextlib.suppress(OSError):  # dead already: the host will notice
                one.tell(settings=str(config))
        command = later_agents(settings.of_group(group), token)
        made[group] = Ahead(command, first, agents.standby[group], job.hung_s, looks.seen, job.ready_s)
    return LocalNodeHost(settings.node_host, made, masters=settings.masters)

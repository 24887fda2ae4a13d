"""The agent's process: ``python -m dlrover_adapters.cli.agent --config FILE --control FD``.

The zygote is started first of all, before the agent's own imports: it is what takes seconds. What was not known by then comes
over the launcher's socket: ``{"settings": FILE}`` where FILE was only a draft, and ``{"node": NAME}`` unless the master of a
joining job gives the names; ``{"masters": [ADDRESS, ...]}``, at any time, where the masters have moved. Back go
``{"warm": true}``, once workers could be started, ``{"node": NAME}`` with the first world of a joining job, ``{"here": true}``
for ``{"ask": true}``, and at the end ``{"ending": [...]}`` or ``{"error": WHAT, "refused": WHETHER FOR GOOD}``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from typing import Any

from dlrover_adapters.agent.config import LaunchConfig, Mode, Streams
from dlrover_adapters.agent.spawn import Spawned, spawn_zygote
from dlrover_adapters.cli import workers

EX_OK = 0
WORDS_BYTES_MAX = 64 * 1024


def launch_config(raw: dict[str, Any], job: str, node: str) -> LaunchConfig:
    """The launcher's configuration, as the launcher of the job wrote it down."""
    preload = raw["preload"]
    return LaunchConfig(
        argv=tuple(raw["argv"]),
        nproc=raw["nproc"],
        mode=Mode(raw["mode"]),
        job=job,
        node=node,
        role=raw["role"],
        preload=None if preload is None else tuple(preload),
        log_dir=raw["log_dir"],
        redirects=tuple(Streams(one) for one in raw["redirects"]),
        tee=tuple(Streams(one) for one in raw["tee"]),
        run_dir=raw["run_dir"],
        store_bind=raw["store_bind"],
        store_host=raw["address"],
        **workers.launch_fields(raw),
    )


def main() -> int:
    """Serve one node until told to leave."""
    parser = argparse.ArgumentParser(prog="dlrover-agent")
    parser.add_argument("--config", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--draft", action="store_true")
    options = parser.parse_args()
    with open(options.config, encoding="utf-8") as file:
        raw: dict[str, Any] = json.load(file)
    if options.config.startswith("/proc/self/fd/"):
        os.close(int(options.config.rpartition("/")[2]))
    control = socket.socket(fileno=options.control)
    control.set_inheritable(False)
    config = launch_config(raw, options.job, "")
    first = spawn_zygote(config) if config.warm else None
    return _serve(raw, config, first, control, options.draft)


def _serve(
    raw: dict[str, Any], config: LaunchConfig, first: Spawned | None, control: socket.socket, draft: bool
) -> int:
    # While torch is being imported on another core, and before anybody needs this one.
    from dlrover_adapters.cli.agent_process import serve

    if draft:
        said = control.recv(WORDS_BYTES_MAX)
        if not said:
            return EX_OK  # the launcher ended before it began
        with open(json.loads(said)["settings"], encoding="utf-8") as file:
            raw = json.load(file)
        final = launch_config(raw, config.job, config.node)
        config = config._replace(run_dir=final.run_dir, store_bind=final.store_bind, store_host=final.store_host)
    return serve(raw, config, first, control)


if __name__ == "__main__":
    sys.exit(main())

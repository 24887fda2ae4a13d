"""The agent's process: ``python -m dlrover_adapters.cli.agent --config FILE --node NODE``.

The zygote is started first of all, before the agent's own imports: it is what takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from dlrover_adapters.agent.config import LaunchConfig, Mode, Streams
from dlrover_adapters.agent.spawn import Spawned, spawn_zygote

EX_OK, EX_FAULT = 0, 1


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
    )


def main() -> int:
    """Serve one node until told to leave."""
    parser = argparse.ArgumentParser(prog="dlrover-agent")
    parser.add_argument("--config", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--node", required=True)
    options = parser.parse_args()
    with open(options.config, encoding="utf-8") as file:
        raw: dict[str, Any] = json.load(file)
    config = launch_config(raw, options.job, options.node)
    first = spawn_zygote(config) if config.warm else None
    return _serve(raw, config, first)


def _serve(raw: dict[str, Any], config: LaunchConfig, first: Spawned | None) -> int:
    import asyncio
    from pathlib import Path

    from dlrover_adapters.agent.process import set_name
    from dlrover_adapters.telemetry.logs import set_up

    set_name("dlrover-agent")
    set_up(Path(raw["control_log"]), raw["log_level"], role="agent", node=config.node)
    return asyncio.run(_run(raw, config, first))


async def _run(raw: dict[str, Any], config: LaunchConfig, first: Spawned | None) -> int:
    import asyncio
    import secrets
    import signal
    import socket

    import structlog

    from dlrover_adapters.agent.launcher import LinuxLauncher
    from dlrover_adapters.http.client import HttpDialer
    from dlrover_core.errors import CoreError
    from dlrover_core.runtime.agent import Agent

    agent = Agent(
        config.node,
        launcher=LinuxLauncher(config, first),
        dialer=HttpDialer(os.environ["DLROVER_TOKEN"]),
        masters=raw["masters"],
        boot=secrets.randbits(62),
        host=socket.gethostname(),
        address=raw["address"],
        run=raw["run"],
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.leave, f"the agent got {number.name}")
    try:
        await agent.run()
    except CoreError as error:
        structlog.get_logger("dlrover.agent").error("agent ends", error=f"{type(error).__name__}: {error}")
        print(f"dlrover agent {config.node}: {error}", file=sys.stderr)
        return EX_FAULT
    return EX_OK


if __name__ == "__main__":
    sys.exit(main())

"""`dlrover-run`: a training script, kept running on this host."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrover_adapters.cli import options as cli_options
from dlrover_core.errors import CoreError, SpecError

if TYPE_CHECKING:
    from dlrover_adapters.cli.settings import Settings

EX_OK, EX_FAILED, EX_USAGE, EX_SOFTWARE = 0, 1, 2, 70
SOCKET_PATH_MAX = 100
PERIOD_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job from the command line; the exit status says how it ended."""
    parser = cli_options.parser()
    options = parser.parse_args(argv)
    if options.version:
        return _version()
    if options.script is None:
        parser.error("name the script to run; see --help for examples")
    try:
        settings = prepare(options)
    except SpecError as error:
        parser.error(str(error))
    except (CoreError, OSError) as error:
        print(f"dlrover-run: {error}", file=sys.stderr)
        return EX_SOFTWARE
    return asyncio.run(_supervise(settings, _shows_progress(options.progress)))


def _version() -> int:
    from dlrover_adapters.cli.whose import version_lines

    print("\n".join(version_lines("dlrover-run")))
    return EX_OK


def _shows_progress(choice: str) -> bool:
    return choice == "on" or (choice == "auto" and sys.stderr.isatty())


def prepare(options: argparse.Namespace) -> Settings:
    """Check everything and write down what masters and agents need. Raises `SpecError`."""
    from dlrover_adapters.agent.config import Mode, parse_streams
    from dlrover_adapters.cli.places import log_url
    from dlrover_adapters.cli.settings import Settings
    from dlrover_core.logs.place import default_state_dir, private_dir, refuse_remote

    mode = _mode(options)
    if mode in (Mode.SCRIPT, Mode.RUN_PATH) and not os.path.isfile(options.script):
        raise SpecError("script", f"{options.script!r} is not a file; for a module say -m, for a program --no-python")
    nproc = cli_options.workers(options.nproc_per_node)
    job = options.job_id or default_job(options.script)
    spec = cli_options.spec(options, job, nproc)
    state = private_dir(Path(options.state_dir).absolute()) if options.state_dir else default_state_dir()
    refuse_remote(state)
    run = secrets.token_hex(6)
    directory = private_dir(private_dir(state / "jobs") / job)
    sockets = _sockets(directory)
    return Settings(
        spec=spec.to_json(),
        run=run,
        log=log_url(options.log, state),
        directory=str(directory),
        node_host=str(sockets / "nodes.sock"),
        masters=(),
        argv=(options.script, *options.arguments),
        nproc=nproc,
        mode=mode.value,
        role=options.role,
        preload=None
        if options.preload == "none"
        else tuple(one.strip() for one in options.preload.split(",") if one.strip()),
        log_dir=os.path.abspath(options.log_dir) if options.log_dir else None,
        redirects=tuple(int(one) for one in parse_streams("redirects", options.redirects, nproc)),
        tee=tuple(int(one) for one in parse_streams("tee", options.tee, nproc)),
        run_dir=str(sockets),
        log_level=options.log_level,
        control_log=str(directory / "control.log"),
    )


def _mode(options: argparse.Namespace) -> Any:
    from dlrover_adapters.agent.config import Mode

    chosen = [
        mode
        for flag, mode in (
            (options.module, Mode.MODULE),
            (options.no_python, Mode.COMMAND),
            (options.run_path, Mode.RUN_PATH),
        )
        if flag
    ]
    if len(chosen) > 1:
        raise SpecError("script", "-m, --no-python and --run-path exclude one another")
    return chosen[0] if chosen else Mode.SCRIPT


def default_job(script: str) -> str:
    """A new name for a job without one: the script's, the time, and a little chance."""
    stem = re.sub(r"[^a-z0-9_.]+", "-", Path(script).stem.lower()).strip("-._")[:30] or "job"
    return f"{stem}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _sockets(directory: Path) -> Path:
    """A private directory for sockets: their paths are limited to 108 bytes, whatever the state directory is."""
    return Path(tempfile.mkdtemp(prefix="dlrover-"))


async def _supervise(settings: Settings, progress: bool) -> int:
    import shutil
    import socket
    from dataclasses import replace

    from dlrover_adapters.cli.supervisor import MastersFailed, Supervisor, watch
    from dlrover_adapters.http.token import make_token
    from dlrover_adapters.telemetry.logs import set_up

    set_up(Path(settings.control_log), settings.log_level, role="launcher")
    token = os.environ.get("DLROVER_TOKEN") or make_token()
    port = socket.create_server(("127.0.0.1", 0), backlog=1024)
    address = f"127.0.0.1:{port.getsockname()[1]}"
    settings = replace(settings, masters=(address,))
    config = settings.write()
    line = Line(settings)
    job = settings.job.job
    print(f"dlrover-run: job {job}", file=sys.stderr)
    supervisor = Supervisor(settings, token, port, _node_host(settings, config, token))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.stop, number)
    watching = asyncio.ensure_future(watch(address, token, line.show, PERIOD_S)) if progress else None
    try:
        await supervisor.run()
    except MastersFailed as error:
        print(f"dlrover-run: {error}", file=sys.stderr)
        return EX_SOFTWARE
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            line.end()
        port.close()
        shutil.rmtree(settings.run_dir or "", ignore_errors=True)
    return await _conclude(settings, supervisor.stopped_by)


def _node_host(settings: Settings, config: Path, token: str) -> Any:
    from dlrover_backends.local import LocalCommand, LocalNodeHost
    from dlrover_core.job.state import NodeLaunch

    def command(node: NodeLaunch, _: int) -> LocalCommand:
        argv = (
            sys.executable,
            "-u",
            "-m",
            "dlrover_adapters.agent",
            "--config",
            str(config),
            "--job",
            settings.job.job,
            "--node",
            node.node,
        )
        return LocalCommand(argv, {"DLROVER_TOKEN": token})

    return LocalNodeHost(settings.node_host, command)


async def _conclude(settings: Settings, stopped_by: signal.Signals | None) -> int:
    """Say how it ended, the root cause of a failure first."""
    from dlrover_core.job.state import fold
    from dlrover_core.logs import open_log

    name = settings.job.job
    async with open_log(settings.log) as event_log:
        state = fold([record async for record in event_log.read(name)])
    say = f"dlrover-run: job {name} {state.job.state}"
    if state.job.state == "failed":
        print(f"dlrover-run: root cause: {state.job.root}", file=sys.stderr)
        say += f" ({state.job.reason})"
    if state.failures.number:
        say += f"; {state.failures.number} incidents, see: dlrover report {name}"
    print(say, file=sys.stderr)
    if stopped_by is not None and state.job.state != "succeeded":
        return 128 + stopped_by
    return EX_OK if state.job.state == "succeeded" else EX_FAILED


class Line:
    """The live line: state, step, rate, generation, last incident."""

    def __init__(self, settings: Settings) -> None:
        self._job = settings.job.job
        self._last: tuple[float, int] | None = None
        self._rate = 0.0
        self._shown = ""
        self._tty = sys.stderr.isatty()

    def show(self, status: Mapping[str, Any]) -> None:
        """Draw it over the last one; off a terminal, print it when it says something new."""
        text = self.text(status, time.monotonic())
        if self._tty:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            sys.stderr.write("\r" + text[: columns - 1].ljust(columns - 1))
        elif text != self._shown:
            sys.stderr.write(text + "\n")
        self._shown = text
        sys.stderr.flush()

    def text(self, status: Mapping[str, Any], at: float) -> str:
        """The line for a status seen at a moment."""
        step = int(status["step"])
        if self._last is not None and at > self._last[0] and step >= self._last[1]:
            fresh = (step - self._last[1]) / (at - self._last[0])
            self._rate = fresh if not self._rate else 0.7 * self._rate + 0.3 * fresh
        self._last = (at, step)
        parts = [
            f"[{self._job}] {status['state']}",
            f"step {max(step, 0)}",
            f"{self._rate:.1f}/s",
            f"generation {status['generation']}",
        ]
        if status["degraded"]:
            parts.append(f"control plane degraded: {status['degraded']}")
        if status["last_incident"]:
            parts.append(f"incident {status['last_incident']}")
        return "  ".join(parts)

    def end(self) -> None:
        """Leave the last one standing."""
        if self._tty and self._shown:
            sys.stderr.write("\n")

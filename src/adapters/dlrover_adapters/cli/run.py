"""`dlrover-run`: a training script, kept running on this host."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrover_adapters.cli import options as cli_options
from dlrover_core.errors import CoreError, SpecError

if TYPE_CHECKING:
    from dlrover_adapters.cli.settings import Settings
    from dlrover_adapters.cli.supervisor import Supervisor
    from dlrover_backends.local import LocalNodeHost

EX_OK, EX_FAILED, EX_USAGE, EX_SOFTWARE = 0, 1, 2, 70
PERIOD_S = 0.5
PROBE_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job from the command line; the exit status says how it ended."""
    parser = cli_options.parser()
    options = parser.parse_args(argv)
    if options.version:
        return _version()
    if options.script is None:
        parser.error("name the script to run; see --help for examples")
    try:
        return _run(options)
    except SpecError as error:
        parser.error(str(error))
    except (CoreError, OSError) as error:
        print(f"dlrover-run: {error}", file=sys.stderr)
        return EX_SOFTWARE
    except KeyboardInterrupt:  # before anything was started, or while the last words were said
        return 128 + signal.SIGINT


def _run(options: argparse.Namespace) -> int:
    from dlrover_adapters.cli import scratch

    settings = prepare(options)
    where = _where(options)
    with (
        scratch.claim(Path(settings.directory), settings.job.job) as claim,
        scratch.folder(settings.run, claim) as folder,
    ):
        settings = settings.placed(folder)
        return asyncio.run(_supervise(settings, _shows_progress(options.progress), where))


def _where(options: argparse.Namespace) -> str:
    """The options that lead `dlrover report` to this log."""
    if options.log:
        return f" --log {shlex.quote(options.log)}"
    return f" --state-dir {shlex.quote(options.state_dir)}" if options.state_dir else ""


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

    mode = _mode(options)
    if mode in (Mode.SCRIPT, Mode.RUN_PATH) and not os.path.isfile(options.script):
        raise SpecError("script", f"{options.script!r} is not a file; for a module say -m, for a program --no-python")
    nproc = cli_options.workers(options.nproc_per_node)
    redirects = tuple(int(one) for one in parse_streams("redirects", options.redirects, nproc))
    tee = tuple(int(one) for one in parse_streams("tee", options.tee, nproc))
    job = options.job_id or default_job(options.script)
    spec = cli_options.spec(options, job, nproc)
    state, directory = _directories(options.state_dir, job)
    run = secrets.token_hex(6)
    return Settings(
        spec=spec.to_json(),
        run=run,
        log=log_url(options.log, state),
        directory=str(directory),
        argv=(options.script, *options.arguments),
        nproc=nproc,
        mode=mode.value,
        role=options.role,
        preload=None
        if options.preload == "none"
        else tuple(one.strip() for one in options.preload.split(",") if one.strip()),
        log_dir=os.path.abspath(options.log_dir) if options.log_dir else None,
        redirects=redirects,
        tee=tee,
        log_level=options.log_level,
        control_log=str(directory / "control.log"),
    )


def _directories(stated: str | None, job: str) -> tuple[Path, Path]:
    """The state directory and the job's own in it, made if need be. Raises `SpecError`."""
    from dlrover_core.logs.place import default_state_dir, private_dir, refuse_remote

    try:
        if stated:
            refuse_remote(Path(stated).absolute())
        state = private_dir(Path(stated).absolute()) if stated else default_state_dir()
        return state, private_dir(private_dir(state / "jobs") / job)
    except OSError as error:
        raise SpecError(
            "state-dir", f"cannot be made or written to: {error}; name a directory of yours with --state-dir"
        ) from error


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


async def _supervise(settings: Settings, progress: bool, where: str) -> int:
    import socket
    from dataclasses import replace

    from dlrover_adapters.cli.line import Line
    from dlrover_adapters.cli.supervisor import MastersFailed, Supervisor, watch
    from dlrover_adapters.http.token import make_token
    from dlrover_adapters.telemetry.logs import set_up

    set_up(Path(settings.control_log), settings.log_level, role="launcher")
    await _probe(settings)
    token = os.environ.get("DLROVER_TOKEN") or make_token()
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as port:
        address = f"127.0.0.1:{port.getsockname()[1]}"
        settings = replace(settings, masters=(address,))
        config = settings.write()
        print(f"dlrover-run: job {settings.job.job}", file=sys.stderr)
        line = Line(settings.job.job)
        supervisor = Supervisor(settings, token, port, _node_host(settings, config, token))
        _listen_to_signals(supervisor)
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
    return await _conclude(settings, supervisor.stopped_by, where)


async def _probe(settings: Settings) -> None:
    """Lead the job for a moment: what keeps masters from leading it is told before anything is started. Raises `SpecError`."""
    from dlrover_core.errors import LogUnavailable
    from dlrover_core.logs import open_log
    from dlrover_core.runtime.within import within

    if settings.log.startswith("memory:"):
        raise SpecError(
            "log", "a log in memory ends with its process, and masters are processes of their own; say sqlite"
        )
    name = settings.job.job
    try:
        async with open_log(settings.log) as event_log:
            try:
                lead = await within(PROBE_S, event_log.lead(name, "dlrover-run", PROBE_S))
            except asyncio.TimeoutError as error:
                raise SpecError(
                    "job-id",
                    f"a job {name!r} in {settings.log} is led by {await event_log.leader(name)}; "
                    "give this one another --job-id or --log",
                ) from error
            await lead.resign()
    except LogUnavailable as error:
        raise SpecError("log", f"{error} ({settings.log}); name another place with --log or --state-dir") from error


def _listen_to_signals(supervisor: Supervisor) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup a hangup is no reason to stop.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, supervisor.stop, number)


def _node_host(settings: Settings, config: Path, token: str) -> LocalNodeHost:
    from dlrover_adapters.agent.spawn import module_command
    from dlrover_adapters.cli.scratch import MARK
    from dlrover_backends.local import LocalCommand, LocalNodeHost
    from dlrover_core.job.state import NodeLaunch

    def command(node: NodeLaunch, _: int) -> LocalCommand:
        arguments = ("--config", str(config), "--job", settings.job.job, "--node", node.node)
        argv = (*module_command("dlrover_adapters.cli.agent"), *arguments)
        return LocalCommand(argv, {"DLROVER_TOKEN": token, MARK: settings.run})

    return LocalNodeHost(settings.node_host, command)


async def _conclude(settings: Settings, stopped_by: signal.Signals | None, where: str) -> int:
    """Say how it ended, the root cause of a failure first."""
    from dlrover_adapters.cli import ending
    from dlrover_core.job.state import fold
    from dlrover_core.logs import open_log

    async with open_log(settings.log) as event_log:
        records = [record async for record in event_log.read(settings.job.job)]
    state = fold(records)
    for words in ending.words(records, state, where):
        print(words, file=sys.stderr)
    if stopped_by is not None and state.job.state not in ("succeeded", "failed"):
        return 128 + stopped_by
    return EX_OK if state.job.state == "succeeded" else EX_FAILED

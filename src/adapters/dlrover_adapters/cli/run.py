"""`dlrover-run`: a training script, kept running on this host."""

from __future__ import annotations

import importlib
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlrover_adapters.cli import before, usage
from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.cli.torchrun_flags import Options
from dlrover_core.errors import CoreError, LogUnavailable, SpecError

if TYPE_CHECKING:
    from dlrover_adapters.cli.meeting import Meeting
    from dlrover_adapters.cli.settings import Settings
    from dlrover_backends.local import LocalNodeHost
    from dlrover_backends.local.process import Started

EX_OK, EX_FAILED, EX_SOFTWARE = 0, 1, 70


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job from the command line; the exit status says how it ended."""
    try:
        parser = cli_options.parser()
    except SpecError as error:  # a PET_ variable
        return usage.say("dlrover-run", error)
    options = cli_options.noted(parser, parser.parse_args(argv, namespace=Options()))
    if options.version:
        return _version()
    if options.script is None:
        return usage.say("dlrover-run", "name the script to run; see --help for examples")
    try:
        cli_options.check(options)
        if options.show_config:
            return _show_config(options)
        return _run(options)
    except SpecError as error:
        return usage.say("dlrover-run", error)
    except (CoreError, OSError, RuntimeError) as error:
        limit = usage.limit(error)
        if isinstance(error, RuntimeError) and not limit:
            raise
        print(f"dlrover-run: {limit or error}", file=sys.stderr)
        return usage.EX_LATER if limit or isinstance(error, LogUnavailable) else EX_SOFTWARE
    except KeyboardInterrupt:  # before anything was started, or while the last words were said
        return 128 + signal.SIGINT


def _show_config(options: Options) -> int:
    from dlrover_adapters.cli import places, show_config

    places.show_any_text()
    print(show_config.text(show_config.rows(options), options.show_config))
    return EX_OK


def _run(options: Options) -> int:
    from dlrover_adapters.cli import ahead

    before.check_kernel()
    settings, meeting = prepare(options), cli_options.meeting(options)
    token = _token(options, meeting, Path(settings.directory))
    # First of all: torch's import takes longest, and everything below happens meanwhile.
    with ahead.started(settings, token, options.local_nodes or 1) as first:
        importlib.import_module("dlrover_adapters.telemetry.light")
        say_unused(options)
        if meeting.joining:
            from dlrover_adapters.cli import join

            return join.run(options, settings, meeting, token, first, cli_options.where(options))
        return _run_here(options, settings, token, first)


def _run_here(options: Options, settings: Settings, token: str, first: list[Started]) -> int:
    """A job whose nodes are all on this host."""
    import asyncio

    from dlrover_adapters.cli import scratch

    with (
        scratch.claim(Path(settings.directory), settings.job.job) as claim,
        scratch.folder(settings.mark, claim) as folder,
    ):
        return asyncio.run(_lead(options, settings.placed(folder), token, first))


async def _lead(options: Options, settings: Settings, token: str, first: list[Started]) -> int:
    import socket
    from dataclasses import replace

    from dlrover_adapters.cli import lead
    from dlrover_adapters.telemetry.logs import set_up

    set_up(Path(settings.control_log), settings.log_level, role="launcher")
    settings = await lead.probed(settings)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as port:
        settings = replace(settings, masters=(lead.local_address(port),))
        nodes = _node_host(settings, settings.write(), token, first, options.standby)
        return await lead.supervise(
            settings, token, port, nodes, lead.How(cli_options.shows_progress(options), cli_options.where(options))
        )


def say_unused(options: Options) -> None:
    """Name the flags that were given and do nothing."""
    for flag, why in cli_options.notes(options).items():
        print(f"dlrover-run: {flag} does nothing here: {why}", file=sys.stderr)


def _token(options: Options, meeting: Meeting, directory: Path) -> str:
    """The job token: given; for launchers that meet at a loopback address the job's own; else made. Raises `SpecError`."""
    from dlrover_adapters.cli.hosts import literally_loops
    from dlrover_adapters.http.token import load_token, loopback_token, make_token, require_token

    token = load_token(os.environ, options.token_file)
    if token or not meeting.joining:
        return token or make_token()
    if meeting.host and literally_loops(meeting.host):
        return loopback_token(directory)
    return require_token(os.environ, options.token_file)


def _version() -> int:
    from dlrover_adapters.cli.whose import version_lines

    print("\n".join(version_lines("dlrover-run")))
    return EX_OK


def prepare(options: Options) -> Settings:
    """Check everything and write down what masters and agents need. Raises `SpecError`."""
    from dlrover_adapters.cli import check_flags, workers
    from dlrover_adapters.cli.places import directories, log_url
    from dlrover_adapters.cli.settings import Settings

    how = workers.settings(options)
    for words in before.warnings(options, how["nproc"]):
        print(f"dlrover-run: {words}", file=sys.stderr)
    how["log_dir"] = workers.log_dir(how)
    if how["log_dir"] and not options.log_dir:
        print(f"dlrover-run: output is kept in {how['log_dir']}", file=sys.stderr)
    job, met = cli_options.job_name(options), cli_options.meeting(options)
    spec = cli_options.spec(options, job, how["nproc"])
    state, directory = directories(options.state_dir, job)
    log = log_url(options.log, state)
    before.make_log_folder(log)
    tls = cli_options.TlsFiles()
    if met.joining:
        tls = cli_options.tls_files(options, shows=not met.masters, dials=True)
    run = secrets.token_hex(6)
    return Settings(
        spec=spec.to_json(),
        run=run,
        mark=run,
        joining=spec.joining,
        place=met.place,
        store_at=workers.store_at(met.store, typed=options.origin("master_addr").startswith("--")),
        tls_cert=tls.cert,
        tls_key=tls.key,
        tls_ca=tls.ca,
        log=log,
        directory=str(directory),
        imports=workers.imports(options.preload, str(state / "imports")),
        **how,
        detect=options.detect == "on",
        watch_grads=options.watch_grads,
        check_scripts=check_flags.scripts(options),
        log_level=options.log_level,
        control_log=str(directory / "control.log"),
    )


def _node_host(settings: Settings, config: Path, token: str, first: list[Started], standby: int) -> LocalNodeHost:
    import contextlib

    from dlrover_adapters.agent import looks
    from dlrover_adapters.cli.ahead import later_agents
    from dlrover_backends.local import Ahead, LocalNodeHost

    for one in first:
        with contextlib.suppress(OSError):  # dead already: the host will notice
            one.tell(settings=str(config))
    job = settings.job
    ahead = Ahead(later_agents(settings, token), first, standby, job.hung_s, looks.seen, job.ready_s)
    return LocalNodeHost(settings.node_host, ahead)

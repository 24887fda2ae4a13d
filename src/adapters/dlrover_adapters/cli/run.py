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

from dlrover_adapters.cli import backend_flags, backends, before, groups, in_pod, ray_flags, usage
from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.cli.local_nodes import Agents, node_host
from dlrover_adapters.cli.torchrun_flags import Options
from dlrover_core.errors import CoreError, LogUnavailable, SpecError

if TYPE_CHECKING:
    from dlrover_adapters.cli.ahead_master import AheadMaster
    from dlrover_adapters.cli.meeting import Meeting
    from dlrover_adapters.cli.settings import Settings

EX_OK, EX_FAILED, EX_SOFTWARE = 0, 1, 70
AGENT = ("DLROVER_NODE", "DLROVER_STANDBY")
"""In the environment: this command is the agent of that node, or a standby of that group; a scheduler has started it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job from the command line; the exit status says how it ended."""
    words = tuple(sys.argv[1:] if argv is None else argv)
    try:
        parser = cli_options.parser()
        options = cli_options.noted(parser, parser.parse_args(words, namespace=Options()))
    except SpecError as error:  # a variable
        return usage.say("dlrover-run", error)
    options.argv = words
    try:
        in_pod.taken_in(options)
    except SpecError as error:
        return usage.say("dlrover-run", error)
    if options.version:
        return _version()
    if options.job_schema:
        return _show_schema()
    if options.script is None and options.job_file is None and options.resume is None:
        return usage.say("dlrover-run", "name the script to run, or --job FILE.toml; see --help for examples")
    try:
        if any(map(os.environ.get, AGENT)) and not options.show_config:
            return _be_node(options)
        if options.resume is not None:
            return _resume(options)
        groups.taken_in(options)
        cli_options.check(options)
        if options.show_config:
            return _show_config(options)
        return _run(options)
    except SpecError as error:
        return usage.say("dlrover-run", groups.placed(options, error))
    except (CoreError, OSError, RuntimeError) as error:
        limit = usage.limit(error)
        if isinstance(error, RuntimeError) and not limit:
            raise
        print(f"dlrover-run: {limit or error}", file=sys.stderr)
        return usage.EX_LATER if limit or isinstance(error, LogUnavailable) else EX_SOFTWARE
    except KeyboardInterrupt:  # before anything was started, or while the last words were said
        return 128 + signal.SIGINT


def _show_schema() -> int:
    from dlrover_adapters.cli import job_schema

    print(job_schema.text())
    return EX_OK


def _show_config(options: Options) -> int:
    from dlrover_adapters.cli import places, show_config

    places.show_any_text()
    print(show_config.text(show_config.rows(options), options.show_config))
    return EX_OK


def _be_node(options: Options) -> int:
    from dlrover_adapters.cli import node

    before.check_kernel()
    return node.run(options)


def _run(options: Options) -> int:
    if not in_pod.is_pod(options):
        return _run_as(options, None)
    from dlrover_adapters.cli import ahead_master

    modules = ahead_master.modules(str(options.backend), options.log or "")
    with ahead_master.started(str(options.job_id), modules, os.environ) as master:
        return _run_as(options, master)


def _run_as(options: Options, master: AheadMaster | None) -> int:
    from dlrover_adapters.cli import ahead

    before.check_kernel()
    choice = backends.chosen(options)
    found = groups.plans(options)
    if options.detach and choice is not None and choice.name == backend_flags.KUBERNETES:
        from dlrover_adapters.cli import k8s_detach

        say_unused(options)
        return k8s_detach.run(options, choice, found)
    if options.detach and ray_flags.is_ray(options) and choice is not None:
        from dlrover_adapters.cli import ray_detach

        say_unused(options)
        return ray_detach.run(options, choice, found)
    if options.detach and (choice is not None or cli_options.meeting(options).joining):
        raise SpecError(
            "detach",
            "it is for a job whose nodes are all on this host, or a cluster's (--backend k8s, --backend ray); leave it out "
            "here",
        )
    settings, meeting = prepare(options, found), cli_options.meeting(options)
    if choice is not None:
        from dlrover_adapters.cli import apart

        say_unused(options)
        return apart.run(options, settings, choice, master)
    token = _token(options, meeting, Path(settings.directory))
    if options.detach:
        return _detach(options, settings, token, found)
    # First of all: torch's import takes longest, and everything below happens meanwhile.
    with ahead.started(settings, token, groups.nodes(found)) as first:
        importlib.import_module("dlrover_adapters.telemetry.light")
        say_unused(options)
        if meeting.joining:
            from dlrover_adapters.cli import join

            return join.run(options, settings, meeting, token, first[groups.WORKER], cli_options.where(options))
        return _run_here(options, settings, token, Agents(first, groups.standbys(found)))


def _detach(options: Options, settings: Settings, token: str, found: Sequence[groups.Plan]) -> int:
    from dlrover_adapters.cli.detached import record, start

    say_unused(options)
    known = record.Record(
        settings.mark, groups.nodes(found), groups.standbys(found), os.getcwd(), cli_options.where(options)
    )
    return start.run(settings, known, token)


def _resume(options: Options) -> int:
    """Go on with a detached job of which nothing runs any more."""
    from dlrover_adapters.cli.detached import start
    from dlrover_adapters.http.token import load_token, make_token

    before.check_kernel()
    if options.script is not None or options.job_file is not None:
        raise SpecError("resume", "the job's program and settings are kept; say --resume JOB alone, and --state-dir")
    settings, known = start.resumed(options.resume, options.state_dir)
    return start.run(settings, known, load_token(os.environ, options.token_file) or make_token())


def _run_here(options: Options, settings: Settings, token: str, agents: Agents) -> int:
    """A job whose nodes are all on this host."""
    import asyncio

    from dlrover_adapters.cli import scratch

    with (
        scratch.claim(Path(settings.directory), settings.job.job) as claim,
        scratch.folder(settings.mark, claim) as folder,
    ):
        return asyncio.run(_lead(options, settings.placed(folder), token, agents))


async def _lead(options: Options, settings: Settings, token: str, agents: Agents) -> int:
    import socket
    from dataclasses import replace

    from dlrover_adapters.cli import lead
    from dlrover_adapters.telemetry.logs import set_up

    set_up(Path(settings.control_log), settings.log_level, role="launcher")
    settings = await lead.probed(settings)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as port:
        settings = replace(settings, masters=(lead.local_address(port),))
        nodes = node_host(settings, settings.write(), token, agents)
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


def prepare(options: Options, found: Sequence[groups.Plan]) -> Settings:
    """Check everything and write down what masters and agents need. Raises `SpecError`."""
    from dlrover_adapters.cli import check_flags, run_flags
    from dlrover_adapters.cli.places import directories, log_url
    from dlrover_adapters.cli.settings import Settings

    if not backend_flags.apart(options):
        groups.say(found)
    groups.make_log_dirs(found)
    job, met = cli_options.job_name(options), cli_options.meeting(options)
    spec = groups.spec(options, job, found)
    state, directory = directories(options.state_dir, job)
    log = log_url(options.log, state)
    before.make_log_folder(log)
    tls = cli_options.TlsFiles()
    if met.joining or backend_flags.apart(options):
        tls = cli_options.tls_files(options, shows=not met.masters, dials=True)
    owner, mark = run_flags.owner(options.owner), secrets.token_hex(6)
    return Settings(
        spec=spec.to_json(),
        run=owner or mark,
        mark=mark,
        owned=bool(owner),
        joining=spec.joining,
        place=met.place,
        store_at=groups.store_at(options, met),
        tls_cert=tls.cert,
        tls_key=tls.key,
        tls_ca=tls.ca,
        log=log,
        directory=str(directory),
        **groups.launch(found, str(state / "imports")),
        detect=options.detect == "on",
        watch_grads=options.watch_grads,
        check_scripts=check_flags.scripts(options),
        log_level=options.log_level,
        control_log=str(directory / "control.log"),
    )


if __name__ == "__main__":
    sys.exit(main())

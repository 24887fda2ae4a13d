"""`dlrover master`: only the masters of a job; its nodes are hosts that come with ``dlrover-run --master``."""

from __future__ import annotations

import argparse
import dataclasses
import os
import secrets
import sys
from pathlib import Path

from dlrover_adapters.cli import before
from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.cli.meeting import PORT, parse_endpoint
from dlrover_adapters.cli.settings import Settings
from dlrover_adapters.cli.torchrun_flags import Options
from dlrover_core.errors import SpecError

EXAMPLES = """\
  dlrover master --nnodes 2:4 --nproc-per-node 8 --job-id pretrain
  dlrover master --nnodes 2 --job-id pretrain --bind 10.0.0.1:29400 --token-file job.token
  dlrover master --nnodes 2:4 --nproc-per-node 8 --job-id pretrain --log etcd://e1:2379,e2:2379,e3:2379
                                          the same on two or three hosts: one leads, the others stand by;
                                          Ctrl-C hands over, and only 'dlrover stop' ends the job"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """What describes the job, and where its masters listen."""
    cli_options.job_arguments(parser.add_argument_group("the job"))
    parser.add_argument(
        "--bind",
        default=f"0.0.0.0:{PORT}",
        metavar="ADDR[:PORT]",
        help=f"where the masters listen (default: port {PORT} of every address)",
    )
    # A job that nobody launches, met at this very command.
    parser.set_defaults(master="here", rdzv_backend="dlrover", node_rank=0, local_addr=None)
    parser.set_defaults(local_nodes=None, standalone=False)
    parser.set_defaults(shutdown_timeout=None, signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT", script="job")


async def run(args: argparse.Namespace) -> int:
    """Lead the job, or stand by for it, until it is over. Ctrl-C stops it; where its log is shared, it hands it over."""
    from dlrover_adapters.cli import hosts, lead, scratch
    from dlrover_adapters.cli.supervisor import NoNodes
    from dlrover_adapters.http.tls import dialled
    from dlrover_adapters.http.token import require_token
    from dlrover_adapters.telemetry.logs import set_up

    before.check_kernel()
    options = Options()
    vars(options).update(vars(args))
    settings = _settings(options)
    token = require_token(os.environ, options.token_file)
    host, number = parse_endpoint("bind", options.bind)
    try:
        port = hosts.listen(host, number)
    except OSError as error:
        raise SpecError(
            "bind", f"cannot listen at {hosts.joined(host, number)}: {error.strerror}; name another place"
        ) from error
    with (
        port,
        scratch.claim(Path(settings.directory), settings.job.job) as claim,
        scratch.folder(settings.mark, claim) as folder,
    ):
        set_up(Path(settings.control_log), settings.log_level, role="launcher")
        settings = await lead.probed(settings.placed(folder))
        await lead.check_token(settings, token, dialled(options.tls_ca or ""))
        address = hosts.joined(hosts.outside(host), port.getsockname()[1])
        settings = dataclasses.replace(settings, masters=(address, *settings.masters))
        _say(settings, options)
        where = cli_options.where(options)
        return await lead.supervise(
            settings, token, port, NoNodes(), lead.How(where=where, command="dlrover master", leaves=True)
        )


def _settings(options: Options) -> Settings:
    from dlrover_adapters.cli.places import directories, log_url

    nproc = cli_options.workers(options.nproc_per_node)
    job = cli_options.job_name(options)
    spec = cli_options.spec(options, job, nproc)
    tls = cli_options.tls_files(options, shows=True, dials=False)
    state, directory = directories(options.state_dir, job)
    return Settings(
        spec=spec.to_json(),
        run=secrets.token_hex(6),
        mark=secrets.token_hex(6),
        log=log_url(options.log, state),
        directory=str(directory),
        argv=(),
        nproc=nproc,
        mode="script",
        joining=True,
        tls_cert=tls.cert,
        tls_key=tls.key,
        signals=tuple(int(one) for one in cli_options.signals(options.signals_to_handle)),
        log_level=options.log_level,
        control_log=str(directory / "control.log"),
    )


def _say(settings: Settings, options: Options) -> None:
    size, masters = cli_options.size(options), ",".join(settings.masters)
    tls = f" --tls-ca {options.tls_ca or 'CA.pem'}" if options.tls_cert else ""
    print(
        f"dlrover master: run this on each host, with the same token:\n"
        f"  dlrover-run --master {masters} --rdzv-id {settings.job.job} --nnodes {size} "
        f"--nproc-per-node {options.nproc_per_node}{tls} SCRIPT",
        file=sys.stderr,
    )
    if settings.shared:
        print(
            "  --master takes all masters, comma separated: those of other hosts, started with the same --log, stand by",
            file=sys.stderr,
        )

"""`dlrover master`: only the masters of a job.

Its nodes are hosts that come with ``dlrover-run --master``, or those that the scheduler of ``--backend`` starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dlrover_adapters.cli import backend_flags, backends, before, in_pod
from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.cli.meeting import PORT, parse_endpoint
from dlrover_adapters.cli.settings import Settings
from dlrover_adapters.cli.torchrun_flags import Options
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_core.runtime.backends import Choice

EXAMPLES = """\
  dlrover master --nnodes 2:4 --nproc-per-node 8 --job-id pretrain
  dlrover master --nnodes 2 --job-id pretrain --bind 10.0.0.1:29400 --token-file job.token
  dlrover master --nnodes 2:4 --nproc-per-node 8 --job-id pretrain --run 7c1f-42
                                          the run's owner is 7c1f-42: started again, it goes on; SIGTERM hands over (75)
  dlrover master --nnodes 2:4 --nproc-per-node 8 --job-id pretrain --log etcd://e1:2379,e2:2379,e3:2379
                                          the same on two or three hosts: one leads, the others stand by;
                                          Ctrl-C hands over, and only 'dlrover stop' ends the job
  dlrover master --backend mypackage.slurm:Slurm --nnodes 4 --nproc-per-node 8 --job-id pretrain train.py --lr 0.1
                                          the scheduler starts a node as 'dlrover-run train.py --lr 0.1' (docs/backends.md)"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """What describes the job, and where its masters listen."""
    cli_options.job_arguments(parser.add_argument_group("the job"))
    parser.add_argument(
        "--bind",
        default=f"0.0.0.0:{PORT}",
        metavar="ADDR[:PORT]",
        help=f"where the masters listen (default: port {PORT} of every address)",
    )
    backend_flags.arguments(parser.add_argument_group("nodes that a scheduler starts"))
    parser.add_argument(
        "agent",
        nargs=argparse.REMAINDER,
        metavar="ARGUMENTS",
        help="with --backend: what 'dlrover-run' is given on each node, its options, the script and the script's arguments "
        "(default: the backend has a command of its own)",
    )
    # A job that nobody launches, met at this very command.
    parser.set_defaults(master="here", rdzv_backend="dlrover", node_rank=0, local_addr=None)
    parser.set_defaults(local_nodes=None, standalone=False)
    parser.set_defaults(shutdown_timeout=None, signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT", script="job")


async def run(args: argparse.Namespace) -> int:
    """Lead the job, or stand by for it, until it is over. SIGTERM hands it over; Ctrl-C on a log of this host stops it."""
    from dlrover_adapters.cli import apart, hosts, lead, scratch
    from dlrover_adapters.cli.supervisor import NoNodes
    from dlrover_adapters.http.tls import dialled
    from dlrover_adapters.http.token import require_token
    from dlrover_adapters.telemetry.logs import set_up

    before.check_kernel()
    options = Options()
    vars(options).update(vars(args))
    in_pod.taken_in(options)
    choice = _chosen(options)
    settings = _settings(options)
    if choice is not None:
        settings = dataclasses.replace(settings, **backends.settled(choice, _words(options.agent))._asdict())
    token = require_token(os.environ, options.token_file)
    host, number = parse_endpoint("bind", options.bind)
    try:
        port = hosts.listen(host, number)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while ")[0]  # asyncio's own words follow the system's
        raise SpecError(
            "bind",
            f"cannot listen at {hosts.joined(host, number)}: {why}; "
            "name another port, or an address of this host, with --bind ADDR:PORT",
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
        masters = (*backends.masters(options, address), *settings.masters)
        settings = dataclasses.replace(settings, masters=tuple(dict.fromkeys(masters)))
        if choice is None:
            _say(settings, options)
        pod, place = in_pod.is_pod(options), in_pod.place(options)
        how = lead.How(where=cli_options.where(options), command="dlrover master", leaves=True, pod=pod, place=place)
        status = await lead.supervise(settings, token, port, NoNodes(), how)
        if pod and status not in apart.UNFINISHED:
            await apart.cleared(settings, token)
        return status


def _chosen(options: Options) -> Choice | None:
    """The scheduler's backend; None: hosts come by themselves. Raises `SpecError`."""
    choice = backends.chosen(options)
    if choice is None:
        for name, given in (("backend", options.backend), ("masters", options.masters), ("ARGUMENTS", options.agent)):
            if given:
                said = " ".join(given) if name == "ARGUMENTS" else given
                why = "with 'dlrover master' nodes are another scheduler's, or hosts that come by themselves"
                raise SpecError(name, f"{said!r}: {why}; name a --backend that starts them, or leave this out")
        return None
    if options.job_id is None and options.rdzv_id in ("", "none"):
        raise SpecError("job-id", "missing: name the job, the same on every host that has masters of it")
    options.master = None  # nobody joins
    return choice


def _words(agent: list[str]) -> list[str]:
    return agent[1:] if agent[:1] == ["--"] else agent


def _settings(options: Options) -> Settings:
    from dlrover_adapters.cli import run_flags
    from dlrover_adapters.cli.places import directories, log_url

    owner = run_flags.owner(options.owner)
    nproc = cli_options.workers(options.nproc_per_node)
    job = cli_options.job_name(options)
    spec = cli_options.spec(options, job, nproc)
    tls = cli_options.tls_files(options, shows=True, dials=False)
    state, directory = directories(options.state_dir, job)
    return Settings(
        spec=spec.to_json(),
        run=owner or secrets.token_hex(6),
        owned=bool(owner),
        mark=secrets.token_hex(6),
        log=log_url(options.log, state),
        directory=str(directory),
        argv=(),
        nproc=nproc,
        mode="script",
        joining=spec.joining,
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

"""The command line of `dlrover-run`: torchrun's spelling and meaning for what one host needs, and ours beside it."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any, NamedTuple

from dlrover_core.errors import SpecError
from dlrover_core.spec import GroupSpec, JobSpec

EPILOG = """\
examples:
  dlrover-run --nproc-per-node=2 train.py --lr 0.1      two workers; a killed one is back at its next step in a blink
  dlrover-run --nproc-per-node=8 -m my.package.train    a module instead of a script
  dlrover-run --local-nodes 2 --nproc-per-node=2 train.py
                                                        two nodes on this host: what happens when a whole node dies?
  dlrover-run --preload transformers,datasets train.py  import these once, not at every restart
  dlrover-run -r 3 -t 0:3 --log-dir logs train.py       every rank's output into files, rank 0's also here

afterwards:
  dlrover status JOB      what it is doing, or how it ended
  dlrover report JOB      what failed, what was done about it, where the time went
  dlrover explain JOB     why, down to the first evidence

exit status: 0 the job succeeded; 1 it failed (the root cause is printed first); 2 wrong usage;
  70 no master could run; 130 stopped by Ctrl-C; 143 by SIGTERM; 129 by SIGHUP

Ctrl-C: once, and the workers get SIGTERM and stop_grace_s (30 s) to end; twice, and they are killed.
"""


class Nodes(NamedTuple):
    """``--nnodes``: fewest and most."""

    fewest: int
    most: int


def _nodes(text: str) -> Nodes:
    low, colon, high = text.partition(":")
    try:
        fewest = int(low)
        return Nodes(fewest, int(high) if colon else fewest)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not N or MIN:MAX") from error


def parser() -> argparse.ArgumentParser:
    """The parser. Building it imports nothing slow, so that --help is instant."""
    made = argparse.ArgumentParser(
        prog="dlrover-run",
        usage="dlrover-run [options] SCRIPT [arguments of the script ...]",
        description="Run a distributed training script, in place of torchrun, and keep it running.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--version", action="store_true", help="say whose dlrover-run this is, and which version")
    _as_under_torchrun(made.add_argument_group("as under torchrun"))
    _ours(made.add_argument_group("of dlrover-core"))
    made.add_argument("script", nargs="?", help=argparse.SUPPRESS)
    made.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return made


def _as_under_torchrun(known: argparse._ArgumentGroup) -> None:
    known.add_argument(
        "--nnodes",
        type=_nodes,
        default=None,
        metavar="N|MIN:MAX",
        help="nodes of the job; on one host: of --local-nodes (default 1)",
    )
    known.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        default="1",
        metavar="N",
        help="workers per node: a number, or auto, cpu, gpu (default 1)",
    )
    known.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=int,
        default=3,
        metavar="N",
        help="restarts of the processes before the job fails (default 3; torchrun: 0)",
    )
    known.add_argument(
        "--standalone",
        action="store_true",
        help="accepted: one host with nothing else running is what this does anyway",
    )
    known.add_argument("--role", default="default", help="the workers' role name (default 'default')")
    known.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    known.add_argument(
        "--no-python", "--no_python", action="store_true", help="SCRIPT is a program of its own, not Python"
    )
    known.add_argument("--run-path", "--run_path", action="store_true", help="run SCRIPT by runpy.run_path")
    known.add_argument(
        "--log-dir", "--log_dir", default=None, metavar="DIR", help="where redirected and teed output goes"
    )
    known.add_argument(
        "-r",
        "--redirects",
        default="0",
        metavar="S",
        help="streams into files: 1 stdout, 2 stderr, 3 both; 0:1,1:3 by local rank (default 0)",
    )
    known.add_argument(
        "-t", "--tee", default="0", metavar="S", help="streams into files and here, as for -r (default 0)"
    )


def _ours(ours: argparse._ArgumentGroup) -> None:
    ours.add_argument(
        "--preload",
        default="",
        metavar="MODULES",
        help="modules to import once for all workers, comma separated; 'none': do not fork from a warm process",
    )
    ours.add_argument(
        "--local-nodes",
        type=int,
        default=1,
        metavar="N",
        help="nodes on this host, each with its own agent (default 1)",
    )
    ours.add_argument(
        "--job-id",
        default=None,
        metavar="NAME",
        help="the job's name; a new run of an old name forgets nothing (default: made from the script's)",
    )
    ours.add_argument(
        "--log", default=None, metavar="URL", help="the event log (default: sqlite in the state directory)"
    )
    ours.add_argument(
        "--state-dir", default=None, metavar="DIR", help="where logs and sockets live (default: ~/.local/state/dlrover)"
    )
    ours.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help="a duration of the job's spec, for instance stop_grace_s=60; a name it does not have lists all it has",
    )
    ours.add_argument(
        "--progress",
        choices=("auto", "on", "off"),
        default="auto",
        help="a live line about the job (auto: on a terminal)",
    )
    ours.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="detail of the control log (default info)",
    )


def workers(text: str) -> int:
    """``--nproc-per-node`` as a number. Raises `SpecError`."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if text not in ("auto", "cpu", "gpu"):
        raise SpecError("nproc-per-node", f"{text!r} is not a number, nor one of auto, cpu, gpu")
    gpus = 0 if text == "cpu" else _gpus()
    if text == "gpu" and not gpus:
        raise SpecError("nproc-per-node", "gpu: no CUDA device is visible; say cpu, or a number")
    return gpus or os.cpu_count() or 1


def _gpus() -> int:
    from dlrover_adapters.torch import devices  # only here: it imports torch, and a number needs none of it

    return devices.count()


def spec(options: argparse.Namespace, job: str, nproc: int) -> JobSpec:
    """The job that the options describe. Raises `SpecError`."""
    count = options.local_nodes
    asked = options.nnodes or Nodes(count, count)
    if asked.most != count:
        raise SpecError(
            "nnodes",
            f"{asked.most} nodes need {asked.most} hosts, which this version does not do yet; "
            f"--local-nodes {asked.most} runs them all on this one",
        )
    made = JobSpec(job, (GroupSpec("worker", asked.fewest, asked.most, nproc),), max_restarts=options.max_restarts)
    durations: dict[str, Any] = dict(_duration(text) for text in options.set)
    return dataclasses.replace(made, **durations)


def _duration(text: str) -> tuple[str, float]:
    known = {one.name: one for one in dataclasses.fields(JobSpec) if one.name.endswith("_s")}
    name, _, value = text.partition("=")
    if name not in known:
        listed = "".join(f"\n  {one.name}={one.default:g}  {one.metadata['doc']}" for one in known.values())
        raise SpecError("set", f"there is no duration {name!r}; there are, with their defaults in seconds:{listed}")
    try:
        return name, float(value)
    except ValueError as error:
        raise SpecError("set", f"{text!r} is not NAME=SECONDS") from error

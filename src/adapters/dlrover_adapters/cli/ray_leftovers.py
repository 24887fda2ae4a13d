"""`dlrover ray`: what jobs have in a Ray cluster, and the removal of what killed launchers have left there."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from dlrover_adapters.cli import ray_reach
from dlrover_adapters.cli.places import NOT_FOUND, OK
from dlrover_core.errors import CoreError, SpecError

if TYPE_CHECKING:
    from dlrover_backends.ray.cluster import Cluster

EXAMPLES = """\
  dlrover ray ls                          the runs that have actors or placement groups in the cluster of this host
  dlrover ray rm pretrain                 end and remove all that job 'pretrain' has there (a job that is led: dlrover stop)"""

LS, RM = "ls", "rm"
CLEAR_S = 20.0
LEFT = 1


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `ray` takes."""
    parser.add_argument("what", choices=(LS, RM), help="ls: list them; rm: end and remove all that a job has")
    parser.add_argument("job", nargs="?", metavar="JOB", help="with rm: the job's name")
    parser.add_argument("--all", action="store_true", help="with rm: all jobs")
    parser.add_argument(
        "--force",
        action="store_true",
        help="with rm: also a job whose dlrover-run still leads it; from then on its launches are refused",
    )
    parser.add_argument(
        "--ray-address",
        default="",
        metavar="HOST:PORT",
        help="the head of the cluster (default: RAY_ADDRESS, else the cluster that this host belongs to)",
    )


def run(args: argparse.Namespace) -> int:
    """`dlrover ray`. Raises `SpecError`."""
    if args.what == RM and bool(args.job) == args.all:
        raise SpecError("JOB", "say which job's leftovers are removed, or --all")
    if args.what == LS and (args.job or args.all or args.force):
        raise SpecError("JOB", "ls lists all jobs, and takes neither a name nor --all nor --force")
    from dlrover_backends.ray import settings

    settings.check_address(args.ray_address)
    return _on(args)


def _on(args: argparse.Namespace) -> int:
    ray_reach.connect(args.ray_address)
    from dlrover_backends.ray import cluster, masters, names

    found = {run: actors for space, actors in cluster.runs().items() if (run := names.run_of(space)) is not None}
    led = [job.record for name in masters.jobs() if (job := masters.find(name)) is not None]
    with_masters = {(one.job, one.run) for one in led} | masters.kept()
    found.update({run: [] for one in with_masters if (run := names.Run(*one)) not in found})
    if args.what == RM:
        wanted = [run for run in found if args.all or run.job == args.job]
        if not wanted and args.job:
            print(f"dlrover ray: job {args.job!r} has nothing in this cluster; dlrover ray ls shows what there is")
            return NOT_FOUND
        return max([_removed(cluster.Cluster(one), force=args.force) for one in wanted], default=OK)
    print(f"{'JOB':<24} {'RUN':<16} {'RUNNING':>7} {'PENDING':>7} {'ENDED':>7}")
    for one, actors in sorted(found.items()):
        living = [actor for actor in actors if not actor.is_dead]
        runs = sum(actor.state == "ALIVE" for actor in living)
        print(f"{one.job:<24} {one.run:<16} {runs:>7} {len(living) - runs:>7} {len(actors) - len(living):>7}")
    return OK


def _removed(run: Cluster, *, force: bool) -> int:
    """Remove a run, unless a command leads it, and say so; the exit status."""
    from dlrover_backends.ray import masters

    leader = "" if force else masters.led_outside(*run.run)
    if leader:
        job = run.run.job
        print(
            f"dlrover ray: job {job!r} is led by the dlrover-run at {leader}, and nothing of it is removed: dlrover stop "
            f"ray:{job}, or Ctrl-C there, ends it; --force removes it all the same",
            file=sys.stderr,
        )
        return LEFT
    try:
        run.fence.bar()  # masters beside a command, and desks whose orders are under way, cannot be ended from here
        masters.release(*run.run)  # before nodes, which masters would launch again
        run.clear(CLEAR_S)
    except CoreError as error:
        print(f"dlrover ray: {error}", file=sys.stderr)
        return LEFT
    print(f"removed job {run.run.job}, run {run.run.run}")
    return OK

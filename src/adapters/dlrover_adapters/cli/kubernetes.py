"""`dlrover k8s`: what a job would make in a cluster, without a cluster; and the operator."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import TYPE_CHECKING

from dlrover_adapters.cli import backend_flags, backends, groups, k8s_object
from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.cli.places import OK
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_adapters.cli.torchrun_flags import Options
    from dlrover_core.job.orders import NodeLaunch
    from dlrover_core.runtime.backends import Choice
    from dlrover_core.spec import JobSpec

EXAMPLES = """\
  dlrover k8s render --image registry/trainer:1 --nnodes 2:4 --nproc-per-node 8 train.py --lr 0.1
                                          every object that 'dlrover-run --backend k8s' with this line would make, as YAML
  dlrover k8s render --detach --backend k8s:claim=logs --image registry/trainer:1 --nnodes 2 train.py
                                          those of a job whose masters are pods
  dlrover k8s render --backend k8s:namespace=ml,template=pod.yaml --job job.toml | kubectl apply --dry-run=server -f -
  dlrover k8s render job.yaml             every object that an ElasticJob would begin with
  dlrover k8s operator --namespace ml     keep the ElasticJobs of a namespace; deploy/base runs this in a pod
  dlrover k8s operator --help             its options"""

RENDER, OPERATOR = "render", "operator"
RUN, TOKEN, PLACE = "RUN", "THE-TOKEN-OF-THE-JOB", "MASTERS:PORT"  # stand for what is only known when the job begins
PASSWORD, KEY = "THE-PASSWORD-OF-ETCD", "THE-KEY-FOR-ETCD"  # stand for secrets: what is printed is kept in files


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `k8s` takes."""
    parser.add_argument(
        "what",
        metavar=f"{RENDER}|{OPERATOR}",
        choices=(RENDER, OPERATOR),
        help="print the objects that a job would make; or keep the ElasticJobs of a namespace",
    )
    parser.add_argument(
        "line",
        nargs=argparse.REMAINDER,
        metavar="ARGUMENTS",
        help="with render what 'dlrover-run' is given: its options, the script and the script's arguments; --backend k8s may be "
        "left out. Or the file of an ElasticJob, and --image IMG before it, which is the operator's",
    )


def run(args: argparse.Namespace) -> int:
    """`dlrover k8s`. Raises `SpecError`."""
    if args.what == OPERATOR:
        from dlrover_adapters.cli import k8s_operator

        return k8s_operator.run(args.line)
    from dlrover_backends.k8s import render
    from dlrover_core.runtime.backend import sizes_of
    from dlrover_core.runtime.backends import BackendContext

    words = args.line[1:] if args.line[:1] == ["--"] else args.line
    if k8s_object.file_of(words):
        print(k8s_object.text(words, launches), end="")
        return OK
    options = cli_options.parse(words)
    options.argv = tuple(words)
    options.backend = options.backend or backend_flags.KUBERNETES
    if options.script is None and options.job_file is None:
        raise SpecError("ARGUMENTS", "name the script that the job runs, or --job FILE.toml")
    groups.taken_in(options)
    cli_options.check(options)
    choice = backends.chosen(options)
    if choice is None or choice.name != backend_flags.KUBERNETES:
        raise SpecError(
            "backend", f"{options.backend!r} makes nothing in a cluster of Kubernetes: say --backend k8s:..."
        )
    job = cli_options.job_name(options)
    spec = groups.spec(options, job, groups.plans(options))
    if options.detach:
        print(_detached(options, choice, spec), end="")
        return OK
    here = BackendContext(
        job,
        RUN,
        backends.masters(options, PLACE) if options.masters is None else backends.masters(options, "")[1:],
        TOKEN,
        arguments=backends.words(options),
        env=backends.passed(os.environ),
        cwd=os.getcwd(),
        args=choice.args,
        stop_grace_s=spec.stop_grace_s,
    )
    print(render.text(here, launches(spec), sizes_of(spec)), end="")
    return OK


def _detached(options: Options, choice: Choice, spec: JobSpec) -> str:
    """The masters' objects, and the nodes' pods that they would make. Raises `SpecError`."""
    from dlrover_adapters.cli import k8s_detach
    from dlrover_backends.k8s import masters, render, settings, yaml_text
    from dlrover_core.runtime.backend import sizes_of

    here = k8s_detach.context(options, choice, spec, TOKEN)
    plan = k8s_detach.plan(options, here, spec, settings.read(here).namespace or "default", password=PASSWORD, key=KEY)
    secret = {masters.LOG_KEY: plan.etcd, **plan.etcd_files}
    for word, what in ((PASSWORD, "etcd's password, escaped as in a URL"), (KEY, "the client's key for etcd")):
        for key in (key for key, value in secret.items() if word in value):
            print(
                f"dlrover k8s render: {word} in Secret {plan.called}, key {key}, stands for {what}: write it there. "
                "dlrover-run --detach does so by itself",
                file=sys.stderr,
            )
    made = masters.objects(plan)
    at = f"{plan.called}.{plan.namespace}.svc:{masters.PORT}"
    nodes = dataclasses.replace(here, run=plan.uid, masters=(at,), args=f"{here.args},secret={plan.called}")
    return yaml_text.written([*made, *render.pods_of(nodes, launches(spec), made[0], plan.namespace, sizes_of(spec))])


def launches(spec: JobSpec) -> list[NodeLaunch]:
    """The nodes that a job begins with."""
    from dlrover_core.job.orders import NodeLaunch

    return [
        NodeLaunch(
            f"{spec.job}-{group.name}-{index}-0",
            f"{group.name}-{index}-0",
            group.name,
            index,
            0,
            group.nproc,
            (),
            group.memory_mib,
            group.cpu_m,
            group.gpus,
        )
        for group in spec.groups
        for index in range(group.nodes_max)
    ]

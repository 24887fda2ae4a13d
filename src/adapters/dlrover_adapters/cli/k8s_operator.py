"""`dlrover k8s operator`: keeps the ElasticJobs of a namespace, or of all of them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlrover_adapters.cli import k8s_log, usage
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_backends.k8s.api import Api

NAMESPACE, POD, LOG = "DLROVER_OPERATOR_NAMESPACE", "DLROVER_OPERATOR_POD", "DLROVER_OPERATOR_LOG"
"""As deploy/base/operator.yaml sets them."""
OK, ENDED_S = 0, 10.0


def parser() -> argparse.ArgumentParser:
    """What the operator is told."""
    made = usage.Parser(
        prog="dlrover k8s operator", description="Keep the ElasticJobs of a namespace.", allow_abbrev=False
    )
    made.add_argument("--namespace", metavar="NAME", help=f"whose jobs (default: ${NAMESPACE}, else the kubeconfig's)")
    made.add_argument(
        "--all-namespaces", action="store_true", help="those of all namespaces, which takes a ClusterRole"
    )
    made.add_argument("--image", metavar="IMG", help="the masters' image (default: that of this operator's own pod)")
    made.add_argument(
        "--log",
        metavar="URL",
        help=f"etcd://HOST:2379 for the logs of all jobs (default: ${LOG}, else a claim for each job); the files that it names "
        "(?cacert=FILE&cert=FILE&key=FILE) are read here, and travel in each job's Secret",
    )
    made.add_argument("--storage-class", metavar="NAME", default="", help="of those claims (default: the cluster's)")
    made.add_argument(
        "--rack",
        metavar="LABEL",
        default="",
        help="the label of hosts that names their rack (default: the zone of each pod); it takes deploy/overlays/node-reader",
    )
    made.add_argument(
        "--annotated-only",
        action="store_true",
        help="take only jobs with the annotation dlrover-core/operator: dlrover-core; so it is where DLRover's own operator runs",
    )
    made.add_argument(
        "--look", metavar="SECONDS", type=float, default=5.0, help="how often masters are asked (default 5)"
    )
    made.add_argument(
        "--lease",
        metavar="SECONDS",
        type=float,
        default=15.0,
        help="after so long another operator takes the place of one that was killed (default 15, at least 3)",
    )
    made.add_argument(
        "--kubeconfig", metavar="FILE", default="", help="which cluster (default: KUBECONFIG, else this pod's own)"
    )
    made.add_argument("--context", metavar="NAME", default="", help="a context of it")
    return made


def run(words: Sequence[str]) -> int:
    """`dlrover k8s operator`, until SIGTERM. Raises `SpecError`, `CoreError`."""
    args = parser().parse_args(list(words))
    if args.all_namespaces and args.namespace:
        raise SpecError("namespace", f"{args.namespace!r}, but --all-namespaces; leave one of them out")
    if args.look <= 0:
        raise SpecError("look", f"{args.look:g}: say a number of seconds above 0")
    if args.lease < 3:
        raise SpecError("lease", f"{args.lease:g}: say 3 seconds or more, for it is renewed each third of that")
    from dlrover_backends.k8s.masters import FILES_PATH
    from dlrover_backends.k8s.settings import LABEL

    if args.rack and not LABEL.fullmatch(args.rack):
        raise SpecError("rack", f"{args.rack!r} is no label's key: write topology.kubernetes.io/rack, for example")
    log = args.log or os.environ.get(LOG, "")
    if log and not log.startswith("etcd"):
        raise SpecError("log", f"{log.partition(':')[0]}: is no log that masters in pods share; say etcd://HOST:2379")
    return asyncio.run(_run(args, k8s_log.read(log, FILES_PATH)))


async def _run(args: argparse.Namespace, log: k8s_log.Told) -> int:
    from dlrover_adapters.cli.k8s_lines import Lines
    from dlrover_adapters.cli.k8s_masters import HttpMasters
    from dlrover_backends.k8s.elasticjob.leader import Leader
    from dlrover_backends.k8s.elasticjob.operator import Operator
    from dlrover_backends.k8s.elasticjob.reconcile import Settings
    from dlrover_backends.k8s.transport import Transport

    api = Transport(args.kubeconfig, args.context)
    try:
        await api.open()
        home = args.namespace or os.environ.get(NAMESPACE) or api.namespace or "default"
        image = args.image or await _own_image(api, os.environ.get(NAMESPACE) or api.namespace or home)
        settings = Settings(image, log.url, args.storage_class, args.annotated_only, Lines(), log.files, args.rack)
        who = f"{os.environ.get(POD) or socket.gethostname()}_{os.getpid()}"
        leader = Leader(api, home, who, now=time.monotonic, wall=time.time, lease_s=args.lease)

        async def work() -> None:
            where = "" if args.all_namespaces else home
            forget = k8s_log.forgetting(args.log or os.environ.get(LOG, ""))
            await Operator(api, HttpMasters(), settings, where, look_s=args.look, forget=forget).run()

        leading = asyncio.ensure_future(leader.lead(work))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, leading.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await leading
        return OK
    finally:
        await api.close()


async def _own_image(api: Api, namespace: str) -> str:
    """The image of this operator's own pod, which is in that namespace, wherever its jobs are. Raises `SpecError`."""
    from dlrover_backends.k8s.errors import Forbidden, NotFound

    name = os.environ.get(POD, "")
    if not name:
        raise SpecError(
            "image", "missing: this is no pod, so say --image IMG, which has dlrover-core with its extras k8s and http"
        )
    try:
        found = await api.ask("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
    except (Forbidden, NotFound) as error:
        raise SpecError(
            "image", f"missing, and this operator's own pod {name} cannot be read: {error.message}; say --image IMG"
        ) from error
    return str(found["spec"]["containers"][0]["image"])

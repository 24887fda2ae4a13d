"""``kubectl dlrover``: `dlrover` for jobs in Kubernetes, found by kubectl as ``kubectl-dlrover`` on the PATH."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dlrover_adapters.cli import k8s_reach, usage
from dlrover_adapters.cli import main as dlrover
from dlrover_adapters.cli.places import USAGE

HELP = """\
kubectl dlrover COMMAND JOB [OPTIONS], as 'dlrover COMMAND k8s:NAMESPACE/JOB [OPTIONS]', with kubectl's own options:
  -n, --namespace NAME    the job's namespace (default: the kubeconfig context's)
  --kubeconfig FILE       the kubeconfig (default: $KUBECONFIG, else ~/.kube/config)
  --context NAME          a context of it (default: the current one)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of `dlrover` on a job in a cluster; its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    ours = usage.Parser(prog="kubectl dlrover", add_help=False, allow_abbrev=False)
    ours.add_argument("-n", "--namespace", default="")
    ours.add_argument("--kubeconfig", default="")
    ours.add_argument("--context", default="")
    told, rest = ours.parse_known_args(words)
    if not rest or rest[0] in {"-h", "--help"}:
        print(HELP, end="", file=sys.stdout if rest else sys.stderr)
        return 0 if rest else USAGE
    args = dlrover.build_parser().parse_args(rest)
    for variable, value in ((k8s_reach.KUBECONFIG, told.kubeconfig), (k8s_reach.CONTEXT, told.context)):
        if value:
            os.environ[variable] = value
    return dlrover.guarded(_placed(args, told.namespace))


def _placed(args: argparse.Namespace, namespace: str) -> argparse.Namespace:
    job = getattr(args, "job", None)
    if hasattr(args, "job") and not job:
        usage.Parser(prog=f"kubectl dlrover {args.command}").error("name the job")
    placed = args.command == "attach" or (hasattr(args, "log") and not args.log)
    if job and placed and ":" not in job:
        args.job = f"{k8s_reach.SCHEME}{namespace}{'/' if namespace else ''}{job}"
    return args


if __name__ == "__main__":
    sys.exit(main())

"""``k8s:NAMESPACE/JOB`` where a job's name is asked for: masters are reached through the API server, with a kubeconfig alone."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import re
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from dlrover_adapters.cli.places import FAILED, LATE, OK, QUIET_S, NotFound, through_masters
from dlrover_core.errors import ConnectionLost, NotLeading, Refused, SpecError

if TYPE_CHECKING:
    from dlrover_backends.k8s import jobs
    from dlrover_backends.k8s.reach import Reach

SCHEME = "k8s:"
FORM = "k8s:NAMESPACE/JOB"
_PLACE = re.compile(r"k8s:(?:([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)/)?(.+)", re.DOTALL)
STOP_S, ASK_S, GONE_S = 120.0, 20.0, 120.0
STOPPED, FORCED = "stopped", "removed without asking its masters"


def is_there(args: argparse.Namespace) -> bool:
    """Does the command name a job in Kubernetes?"""
    return str(getattr(args, "job", None) or "").startswith(SCHEME)


def read(text: str) -> tuple[str, str]:
    """The namespace, empty: the kubeconfig's; and the job. Raises `SpecError`."""
    found = _PLACE.fullmatch(text)
    if found is None:
        raise SpecError(
            "job", f"{text!r} names no job in Kubernetes; say {FORM}, or k8s:JOB for the kubeconfig's namespace"
        )
    return found[1] or "", found[3]


def run(args: argparse.Namespace) -> int:
    """The command, through the API server. Raises `SpecError`, `NotFound`, `CoreError`."""
    namespace, name = read(args.job)
    if not hasattr(args, "log") and args.command != "attach":
        raise SpecError("job", f"{args.job!r}: 'dlrover {args.command}' is for jobs of this host; see kubectl logs")
    if getattr(args, "log", None):
        raise SpecError("log", f"{args.job} names the log already; leave --log out")
    try:
        from dlrover_backends.k8s import jobs
        from dlrover_backends.k8s.reach import Reach
    except ImportError as error:
        raise SpecError("job", f"k8s: needs {error.name}: pip install 'dlrover-core[k8s]'") from error
    with Reach(os.environ.get(KUBECONFIG, ""), os.environ.get(CONTEXT, "")) as reach:
        reach.call(reach.api.open())
        where = namespace or reach.api.namespace or "default"
        try:
            found = reach.call(jobs.find(reach.api, where, name))
        except jobs.Missing as error:
            raise NotFound(str(error)) from error
        if args.command == "stop":
            return _stop(args, reach, found)
        if found.over:
            return _say_over(reach, found)
        if args.command == "attach":
            from dlrover_adapters.cli import k8s_attach

            return k8s_attach.run(reach, found, lambda ended: _say_over(reach, ended))
        return _through(args, reach, found)


KUBECONFIG, CONTEXT = "DLROVER_KUBECONFIG", "DLROVER_KUBE_CONTEXT"
"""Which kubeconfig and which context of it, where not the usual ones: `kubectl dlrover` says it so."""


def _through(args: argparse.Namespace, reach: Reach, found: jobs.Found) -> int:
    """Run the command as if the masters were at a port of this host."""
    from dlrover_adapters.http.token import VARIABLE
    from dlrover_backends.k8s import jobs

    address = reach.serve(found)
    os.environ[VARIABLE] = reach.call(jobs.token(reach.api, found))
    args.job, args.log = f"http://{address}/{quote(found.name, safe='')}", None
    args.place = f"{SCHEME}{found.namespace}/{found.name}"
    through_masters(args)
    if hasattr(args, "master"):
        args.master = address  # by the log the leader is at an address of the cluster's own
    done = args.run(args)
    return done if isinstance(done, int) else asyncio.run(done)


def _say_over(reach: Reach, found: jobs.Found) -> int:
    """The job is over, and nobody answers for it any more: what its masters said last."""
    print(f"job {found.name} has {'ended well' if found.over == 'Complete' else 'failed'}, and its masters are gone")
    if words := reach.last_words(found):
        print(words)
    elif found.why:
        print(found.why)
    place = f"{SCHEME}{found.namespace}/{found.name}"
    print(
        f"kubectl -n {found.namespace} logs job/{found.called} shows all that they said; dlrover stop {place} removes it"
    )
    return OK if found.over == "Complete" else FAILED


def _stop(args: argparse.Namespace, reach: Reach, found: jobs.Found) -> int:
    """Ask the masters, wait for the end, and remove all that was made for the job."""
    from dlrover_backends.k8s import jobs

    waits, force, args.wait, args.force = args.wait is not False, args.force, False, False
    limit_s = (STOP_S if waits else ASK_S) if math.isinf(args.timeout) else args.timeout
    until = time.monotonic() + limit_s
    say, how = f"dlrover stop: job {found.name}", ""
    try:
        if not found.over:
            found, how = _asked_to_stop(args, reach, found, until, force=force)
            if not waits and how == STOPPED:
                return OK
            if how != FORCED and not found.over:
                found = reach.call(jobs.await_over(reach.api, found, until - time.monotonic()), None)
                if not found.over:
                    print(f"{say}: {how}, and its masters have not ended within {limit_s:g} s", file=sys.stderr)
                    return LATE
        if found.owner:
            print(f"job {found.name}: {found.owner} owns it: delete that to remove what is left")
            return OK
        left = reach.call(jobs.remove(reach.api, found, GONE_S), None)
    except jobs.Missing:
        print(f"job {found.name}: somebody else has removed it meanwhile")
        return OK
    if left:
        print(f"{say}: {left} of its pods are still being deleted", file=sys.stderr)
        return LATE
    print(
        f"job {found.name}: {how if how in {STOPPED, FORCED} else _ended(found)}, and all that was made for it is removed"
    )
    return OK


def _ended(found: jobs.Found) -> str:
    return "had ended well before" if found.over == "Complete" else "had failed before"


def _asked_to_stop(
    args: argparse.Namespace, reach: Reach, found: jobs.Found, until: float, *, force: bool
) -> tuple[jobs.Found, str]:
    """Let the leading master stop the job, between two leaders too; the job as it is then, and how it ends.

    Raises `ConnectionLost` where no master answers until then, and `jobs.Missing`. Nothing is removed here.
    """
    from dlrover_adapters.http.client import Unanswered
    from dlrover_backends.k8s import jobs
    from dlrover_backends.k8s.errors import Busy, Unreachable

    quiet_until, heard = time.monotonic() + QUIET_S, False
    while True:
        try:
            _through(args, reach, found)
            return found, STOPPED
        except Refused as refused:
            return found, STOPPED if heard else refused.reason
        except (ConnectionLost, NotLeading, Unreachable, Busy) as error:
            why, heard = error, heard or isinstance(error, Unanswered)
        if force and not found.owner:
            return found, FORCED
        with contextlib.suppress(Unreachable, Busy):
            found = reach.call(jobs.find(reach.api, found.namespace, found.name))
        if found.over:
            return found, ""
        now = time.monotonic()
        if now >= until:
            remedy = "" if found.owner else "; --force removes the job without asking them"
            raise ConnectionLost(
                f"the masters of job {found.name} cannot be asked, and nothing was removed: {why}{remedy}"
            )
        if now >= quiet_until:
            print(f"dlrover stop: waiting: {why}", file=sys.stderr)
            quiet_until = until
        time.sleep(jobs.LOOK_S)

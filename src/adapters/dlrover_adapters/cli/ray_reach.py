"""``ray:JOB`` where a job's name is asked for: its masters are found by what the cluster keeps of them, on any of its hosts."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dlrover_adapters.cli.places import FAILED, JOBS_SHOWN_MAX, LATE, OK, NotFound, through_masters
from dlrover_core.errors import ConnectionLost, CoreError, Refused, SpecError
from dlrover_core.words import first_few

if TYPE_CHECKING:
    from dlrover_backends.ray.mastery import Record

SCHEME, FORM = "ray:", "ray:JOB"
STOP_S, ANSWER_S = 120.0, 3.0
MASTERS_S, LOOK_S = 20.0, 0.5


def is_there(args: argparse.Namespace) -> bool:
    """Does the command name a job in a Ray cluster?"""
    return str(getattr(args, "job", None) or "").startswith(SCHEME)


def connect(address: str, job: str = "", run_: str = "") -> Any:
    """The run in the cluster, joined from this process; it is a `Cluster`. Raises `SpecError`."""
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        raise SpecError("ray", "Ray's client library is not installed: pip install 'dlrover-core[ray]'")
    from dlrover_backends.ray import faults, names, settings

    faults.probe(address)
    os.environ.setdefault(settings.EVENTS, "0")
    from dlrover_backends.ray import cluster

    found = cluster.Cluster(names.Run(job, run_))
    try:
        found.connect(address)
    except (Exception, SystemExit) as error:  # Ray's library ends processes
        raise SpecError("ray-address", faults.of_connect(error, address).text) from error
    return found


def run(args: argparse.Namespace) -> int:
    """The command, through the masters that the cluster knows. Raises `SpecError`, `NotFound`, `CoreError`."""
    name = args.job.removeprefix(SCHEME)
    if not name:
        raise SpecError("job", f"{args.job!r} names no job in a Ray cluster; say {FORM}")
    if not hasattr(args, "log"):
        raise SpecError("job", f"{args.job!r}: 'dlrover {args.command}' is for jobs of this host; see dlrover events")
    if args.log:
        raise SpecError("log", f"{args.job} names the log already; leave --log out")
    connect("")
    from dlrover_backends.ray import masters

    found = masters.find(name)
    if found is None:
        known = first_few(masters.jobs(), JOBS_SHOWN_MAX) or "none"
        raise NotFound(f"no job {name!r} in this cluster; there are: {known}")
    record = found.record
    if args.command == "stop":
        return _stop(args, record)
    if record.over is not None:
        return _say_over(record)
    return _through(args, record)


def _through(args: argparse.Namespace, record: Record) -> int:
    """Run the command against the masters, wherever they are now. Raises `ConnectionLost` where none answers."""
    from dlrover_adapters.http.token import VARIABLE

    ca = _ca(args, record)
    address = asyncio.run(_answering(record, ca))
    os.environ[VARIABLE] = record.token
    args.job, args.log = f"{'https' if ca else 'http'}://{address}/{quote(record.job, safe='')}", None
    args.tls_ca = ca or None
    args.place = f"{SCHEME}{record.job}"
    through_masters(args)
    done = args.run(args)
    return done if isinstance(done, int) else asyncio.run(done)


def _ca(args: argparse.Namespace, record: Record) -> str:
    """The CA of the masters' certificate; empty: they do not encrypt. Raises `SpecError`."""
    ca = str(getattr(args, "tls_ca", None) or "")
    if record.encrypts and not ca:
        raise SpecError(
            "tls-ca", f"missing: the masters of {args.job} encrypt; say --tls-ca FILE, the CA of their certificate"
        )
    if ca and not record.encrypts:
        raise SpecError("tls-ca", f"{ca!r}: the masters of {args.job} do not encrypt; leave it out")
    return ca


async def _answering(record: Record, ca: str) -> str:
    """A master that answers, the leader's if it can be reached. Raises `ConnectionLost`, also `Untrusted`, and `SpecError`."""
    from dlrover_adapters.http.client import fetch_status
    from dlrover_adapters.http.tls import Untrusted, dialled

    encryption = dialled(ca)
    why = "none has said where it listens yet"
    standing_by, untrusted = "", None
    for address in record.masters:
        try:
            status = await fetch_status(address, record.token, timeout_s=ANSWER_S, tls=encryption)
        except CoreError as error:
            why = str(error)
            untrusted = error if isinstance(error, Untrusted) else untrusted
            continue
        if status.get("role", "leader") == "leader":
            return address
        standing_by = standing_by or address
    if standing_by:
        return standing_by
    if untrusted is not None:
        raise untrusted
    then = "the cluster starts another one"
    if record.driver and not record.addresses:
        then = f"none is kept in the cluster yet: if its command is dead, dlrover ray rm {record.job} removes them"
    raise ConnectionLost(f"no master of job {record.job!r} answers: {why}; its nodes go on, and {then}")


def _say_over(record: Record) -> int:
    """The job is over, and nobody answers for it any more: what its masters said last."""
    from dlrover_backends.ray import mastery

    assert record.over is not None
    print(f"job {record.job} has {mastery.told(record.over)}, and its masters are gone")
    if record.words:
        print(record.words)
    print(f"dlrover stop ray:{record.job} removes what the cluster keeps of it")
    return OK if record.over == 0 else FAILED


def _stop(args: argparse.Namespace, record: Record) -> int:
    """Ask the masters, wait for the end, and remove what the cluster keeps of the job."""
    from dlrover_backends.ray import cluster, masters, names

    limit_s = STOP_S if math.isinf(args.timeout) else args.timeout
    say, remove, how = f"dlrover stop: job {record.job}", args.wait is not False, "stopped"
    if record.driver and not record.addresses:
        return _through(args, record)  # the command that was typed leads it, and removes all of it
    if record.over is None:
        args.wait = False
        deadline = time.monotonic() + limit_s
        how = "stopped" if _asked_to_stop(args, record, min(MASTERS_S, limit_s)) else "had ended before"
        if not remove:
            return OK
        over = masters.await_over(record.job, deadline - time.monotonic())
        if over is None and masters.find(record.job) is not None:
            print(f"{say}: not over within {limit_s:g} s; --timeout waits longer", file=sys.stderr)
            return LATE
    cluster.Cluster(names.Run(record.job, record.run)).clear(cluster.CLEAR_S)
    masters.release(record.job, record.run)
    print(f"job {record.job}: {how}, and all that was made for it is removed")
    return OK


def _asked_to_stop(args: argparse.Namespace, record: Record, bound_s: float) -> bool:
    """Are the job's masters told to stop it? Not where it is over. Raises `ConnectionLost`.

    Those that somebody keeps are waited for, ``bound_s`` at most: others may be about to lead, or these have just ended, and that
    is not known yet. Raises `Unanswered` and `Untrusted` at once: the first may have been done, the second does not pass.
    """
    from dlrover_adapters.http.client import Unanswered
    from dlrover_adapters.http.tls import Untrusted
    from dlrover_backends.ray import masters

    deadline = time.monotonic() + bound_s
    while True:
        try:
            _through(args, record)
        except Refused:  # it is over; its masters stay for some seconds, and tell that at their end
            return False
        except (Unanswered, Untrusted):
            raise
        except ConnectionLost as error:
            found = masters.find(record.job)
            if found is None or found.record.over is not None:
                return False
            if not found.keepers or found.record.run != record.run or time.monotonic() > deadline:
                raise ConnectionLost(f"{error}. dlrover ray rm {record.job} ends it without them") from error
            record = found.record
            time.sleep(LOOK_S)
        else:
            return True

"""The commands that change something: `scale`, `drain`, `stop`, `suspend`, `resume`.

Whom to ask stands in the log: the leader announces where it can be reached. What came of it stands there too, so waiting is
following the log, whoever leads meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import math
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dlrover_adapters.cli.places import (
    FAILED,
    LATE,
    OK,
    QUIET_S,
    called,
    find_job,
    kept_token,
    log_arguments,
    log_url,
    said_when_slow,
    shown,
)

if TYPE_CHECKING:
    import ssl

    from dlrover_core.job.state import JobState
    from dlrover_core.kernel.events import Event
    from dlrover_core.kernel.log import EventLog

SCALE_EXAMPLES = """\
  dlrover scale digits worker=4           four nodes; the fewest to train with stay what they were, if that is no more
  dlrover scale digits worker=2:4         at most four, and train with two
  dlrover scale digits 4 --wait           return when the world of four runs"""
DRAIN_EXAMPLES = """\
  dlrover drain digits worker-1-0         stop its workers with their grace; a successor keeps off its host
  dlrover drain digits worker-1           the node that is in that place now
  dlrover drain digits worker-1 --wait    return when it is gone and the others train again"""
STOP_EXAMPLES = """\
  dlrover stop digits                     and wait until every worker is gone
  dlrover stop digits --no-wait           only ask
  dlrover stop digits --timeout 60
  dlrover stop k8s:ml/digits --force      remove it from the cluster, though its masters do not answer"""
SUSPEND_EXAMPLES = """\
  dlrover suspend digits                  save at a step boundary, write it to storage, give all nodes back
  dlrover suspend digits --wait           return when the last node has gone
  dlrover suspend digits --yes            also where what it has made is on no storage, and is lost
  dlrover suspend digits --keep-nodes     stop the workers: GPUs are free, nodes and agents stay"""
RESUME_EXAMPLES = """\
  dlrover resume digits
  dlrover resume digits --wait            return when all workers run again"""

LEADER_S = 10.0
ANSWER_S = 30.0
LOOK_AGAIN_S = 0.2
_SIZE = re.compile(r"(?:(?P<group>[a-z][a-z0-9]*)=)?(?:(?P<min>\d+):)?(?P<max>\d+)")

# What is still lacking before a command has its effect; empty: it is there. It is given the record that the command led to.
Lacks = Callable[["JobState", "Event"], str]


def job_arguments(parser: argparse.ArgumentParser) -> None:
    """What every one of these commands takes. The job is named: nobody should stop the newest one by accident."""
    parser.add_argument("job", metavar="JOB", help="the job's name")
    _common(parser)


def scale_arguments(parser: argparse.ArgumentParser) -> None:
    """What `scale` takes."""
    parser.add_argument("job", metavar="JOB", help="the job's name")
    parser.add_argument(
        "size",
        metavar="[GROUP=][MIN:]MAX",
        type=size,
        help="how many nodes; GROUP may be left out where the job has one group",
    )
    _common(parser)


def drain_arguments(parser: argparse.ArgumentParser) -> None:
    """What `drain` takes."""
    parser.add_argument("job", metavar="JOB", help="the job's name")
    parser.add_argument("node", metavar="NODE", help="a node or a place, as 'dlrover status' shows them")
    _common(parser)


def suspend_arguments(parser: argparse.ArgumentParser) -> None:
    """What `suspend` takes."""
    job_arguments(parser)
    parser.add_argument(
        "--keep-nodes",
        action="store_true",
        help="stop the workers and keep the nodes, from which the job goes on at once (default: nodes are given back)",
    )
    parser.add_argument(
        "--yes",
        action="store_true",
        help="give the nodes back even if what they have made is on no storage, and is lost (default: refused, with the reason)",
    )


def stop_arguments(parser: argparse.ArgumentParser) -> None:
    """What `stop` takes."""
    job_arguments(parser)
    parser.add_argument(
        "--force",
        action="store_true",
        help="of a job in Kubernetes (k8s:NAMESPACE/JOB) whose masters do not answer: remove it without asking them",
    )


def _common(parser: argparse.ArgumentParser) -> None:
    log_arguments(parser)
    asking_arguments(parser)
    parser.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="return once it is carried out, or once the log has the request (default: stop waits, others do not)",
    )


def asking_arguments(parser: argparse.ArgumentParser) -> None:
    """Whom to ask, with which token, how long, and why."""
    parser.add_argument(
        "--master",
        metavar="HOST:PORT[,HOST:PORT]",
        help="ask the leader among these masters (default: the leader, by the log)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="the job's token (default: $DLROVER_TOKEN, else what the launcher keeps for a job on this host)",
    )
    parser.add_argument(
        "--tls-ca", metavar="FILE", help="the CA of the masters' certificate, for a job that was started with one"
    )
    parser.add_argument("--reason", metavar="TEXT", help="why, for the log (default: command, user and host)")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=math.inf,
        help="wait no longer than this, for a leader too",
    )


def size(text: str) -> tuple[str, int, int]:
    """``worker=2:4`` as group, fewest, most; no group: the only one; fewest 0: as it was."""
    found = _SIZE.fullmatch(text)
    if found is None or int(found["max"]) < 1 or found["min"] == "0":
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: say worker=4, or worker=2:4 for at least 2")
    return found["group"] or "", int(found["min"] or 0), int(found["max"])


# ---- the commands


async def scale(args: argparse.Namespace) -> int:
    """`dlrover scale`."""
    group, fewest, most = args.size
    return await ask(args, {"group": group, "nodes_min": fewest, "nodes_max": most}, lacks_size)


async def drain(args: argparse.Namespace) -> int:
    """`dlrover drain`."""
    return await ask(args, {"node": args.node}, lacks_leave)


async def stop(args: argparse.Namespace) -> int:
    """`dlrover stop`. Raises `SpecError` for what is of jobs in Kubernetes alone."""
    from dlrover_core.errors import SpecError

    if args.force:
        raise SpecError(
            "force", f"it is for jobs in Kubernetes, dlrover stop k8s:NAMESPACE/JOB; leave it out for {args.job!r}"
        )
    if args.wait is None:
        # A master far away may be all that we can reach.
        args.wait = args.master is None
    return await ask(args, {}, lacks_end)


async def suspend(args: argparse.Namespace) -> int:
    """`dlrover suspend`."""
    return await ask(args, {"keep_nodes": args.keep_nodes, "lose": args.yes}, lacks_rest)


async def resume(args: argparse.Namespace) -> int:
    """`dlrover resume`."""
    return await ask(args, {}, lambda state, _: lacks_workers(state))


async def ask(args: argparse.Namespace, arguments: Mapping[str, Any], lacks: Lacks) -> int:
    """Let whoever leads do ``args.command`` with these arguments, and wait until nothing lacks, if asked to."""
    from dlrover_core.logs import open_log

    asked = {"command": args.command, "job": args.job, "reason": args.reason or _who(args.command), **arguments}
    if args.master is not None and not args.wait:
        seq = await _send(args, masters(args), asked)
        print(f"job {args.job}: {args.command} is done as event {seq}, and takes its course")
        return OK
    url = log_url(args.log, args.state_dir)
    async with contextlib.AsyncExitStack() as stack:
        with said_when_slow(f"dlrover {args.command}", f"no answer yet from {shown(url)}"):
            log = await stack.enter_async_context(open_log(url))
            await find_job(log, url, args.job)
        seq = await _tell(args, log, asked)
        if not args.wait:
            print(f"job {args.job}: {args.command} is done as event {seq}, and takes its course")
            return OK
        return await _wait(args, log, seq, lacks)


def _who(verb: str) -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        user = str(os.getuid())
    return f"dlrover {verb}, by {user}@{socket.gethostname()}"


def token(args: argparse.Namespace) -> str:
    """The job's token: from --token-file, the environment, or where the launcher of a one-host job keeps it; else empty."""
    from dlrover_adapters.http.token import load_token

    found = load_token(os.environ, args.token_file)
    if found:
        return found
    kept = kept_token(args.state_dir, args.job)
    return load_token({}, kept) if kept else ""


def masters(args: argparse.Namespace) -> list[str]:
    """The masters that ``--master`` names."""
    return [one.strip() for one in (args.master or "").split(",") if one.strip()]


def tls(args: argparse.Namespace) -> ssl.SSLContext | None:
    """How masters are checked; None: they are not. Raises `SpecError`."""
    from dlrover_adapters.http.tls import dialled

    return dialled(args.tls_ca or "")


async def _tell(args: argparse.Namespace, log: EventLog, asked: Mapping[str, Any]) -> int:
    """Let whoever leads do it; between two leaders, wait for the next one. Never asks again what may have been done."""
    from dlrover_adapters.cli.detached import record
    from dlrover_adapters.http.client import Unanswered
    from dlrover_adapters.http.tls import Untrusted
    from dlrover_core.errors import ConnectionLost

    loop = asyncio.get_running_loop()
    began = loop.time()
    quiet_until, deadline = began + QUIET_S, began + min(LEADER_S, args.timeout)
    while True:
        why = f"nobody leads job {args.job!r}; 'dlrover status {called(args)}' shows how it stands"
        leader = await log.leader(args.job)
        addresses = masters(args) or ([leader.address] if leader is not None and leader.address else [])
        if addresses:
            try:
                return await _send(args, addresses, asked)
            except (Unanswered, Untrusted):
                raise
            except ConnectionLost as lost:
                why = f"nobody leads job {args.job!r} now: {lost}"
        # A leader's address may outlive it in the log: whether there is anybody to ask, the history knows.
        run = await _run_unless_over(log, args.job)
        if gone := record.lost(args.state_dir, args.job, run):
            raise ConnectionLost(gone)
        if loop.time() > deadline:
            raise ConnectionLost(f"{why}; start a master again as the job's was started, then repeat this command")
        if loop.time() > quiet_until:
            print(f"dlrover {args.command}: waiting: {why}", file=sys.stderr)
            quiet_until = deadline
        await asyncio.sleep(LOOK_AGAIN_S)


async def _send(args: argparse.Namespace, addresses: Sequence[str], asked: Mapping[str, Any]) -> int:
    """Let the first of these masters do it that leads; never asks another one where one may have done it."""
    from dlrover_adapters.http.client import Unanswered, send_command
    from dlrover_adapters.http.tls import Untrusted
    from dlrover_core.errors import ConnectionLost

    encryption, timeout_s = tls(args), min(ANSWER_S, args.timeout)
    lost = ConnectionLost("no master was named")
    for address in addresses:
        try:
            with said_when_slow(f"dlrover {args.command}", f"the master at {address} has not answered yet"):
                return await send_command(address, token(args), asked, timeout_s=timeout_s, tls=encryption)
        except (Unanswered, Untrusted):
            raise
        except ConnectionLost as error:
            lost = error
    raise lost


async def _run_unless_over(log: EventLog, name: str) -> str:
    """The job's run. Raises `Refused` where it has ended."""
    from dlrover_core.errors import Refused
    from dlrover_core.job.state import FOLD

    state = FOLD.new()
    async for record in log.read(name):
        FOLD.apply(state, record)
    if state.job.over:
        raise Refused(f"the job has ended: it {'is' if state.job.state == 'stopped' else 'has'} {state.job.state}")
    return state.job.run


# ---- waiting


async def _wait(args: argparse.Namespace, log: EventLog, seq: int, lacks: Lacks) -> int:
    """Follow the log until nothing lacks any more; says what does, now and again, once it takes longer than a moment."""
    from dlrover_core.job.state import FOLD

    loop = asyncio.get_running_loop()
    state, lacking = FOLD.new(), f"event {seq} is not in the log yet"
    began, said = loop.time(), ""

    async def follow() -> None:
        nonlocal lacking
        asked: Event = ()
        async for record in log.follow(args.job):
            FOLD.apply(state, record)
            asked = record.event if record.seq == seq else asked
            if state.seq >= seq:
                lacking = "" if state.job.over else lacks(state, asked)
                if not lacking:
                    return

    following = asyncio.ensure_future(follow())
    try:
        while not following.done():
            left = began + args.timeout - loop.time()
            if left <= 0:
                print(f"dlrover {args.command}: not so within {args.timeout:g} s: {lacking}", file=sys.stderr)
                return LATE
            await asyncio.wait({following}, timeout=min(QUIET_S, left))
            if not following.done() and lacking != said and left > QUIET_S:
                said = lacking
                print(f"dlrover {args.command}: waiting: {lacking}", file=sys.stderr)
        following.result()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    print(f"job {args.job}: {outcome(state)}")
    return FAILED if state.job.state == "failed" else OK


def outcome(state: JobState) -> str:
    """How the job stands after the command, in a line."""
    from dlrover_core.words import count

    if state.job.over or state.job.state == "suspended":
        return f"{state.job.state} ({state.job.root or state.job.reason or 'as asked'})"
    worlds = [
        f"{group}: generation {one.generation}, {_nodes(len(one.members))}, {count(one.size, 'rank')}"
        for group, one in state.world.worlds.items()
        if one.active
    ]
    return f"{state.job.state}; {'; '.join(worlds) or 'no world'}"


def lacks_end(state: JobState, _asked: Event) -> str:
    """`stop`: the job is over; that is looked at for every command."""
    there = sum(node.joined for node in state.nodes.nodes.values())
    return f"workers of {_nodes(there)} have not stopped yet"


def lacks_rest(state: JobState, _asked: Event) -> str:
    """`suspend`: every worker of every world has stopped; where nodes are given back, the last one has gone."""
    if state.job.pausing:
        return "its ranks are on the way to a step boundary"
    if state.job.state != "suspended":  # resumed meanwhile
        return ""
    if state.job.freed:
        return _lacks_freedom(state)
    stopping = [
        member.node
        for one in state.world.worlds.values()
        for member in one.members
        if member.node not in one.stopped and (node := state.nodes.nodes.get(member.node)) is not None and node.joined
    ]
    return f"workers of {_nodes(len(stopping))} have not stopped yet" if stopping else ""


def _lacks_freedom(state: JobState) -> str:
    from dlrover_core.rules import suspension

    held = {state.set_of(node.node) for node in state.nodes.nodes.values() if not node.released}
    if held:
        return suspension.reason(state, min(held), state.at).words
    return f"{_nodes(len(state.nodes.nodes))} have not gone yet" if state.nodes.nodes else ""


def lacks_workers(state: JobState) -> str:
    """`resume`: every set's workers run."""
    from dlrover_core.rules import coupling

    if state.job.state == "suspended":
        return ""
    for name in coupling.sets(state):
        one = state.world.worlds.get(name)
        if one is None or not one.active:
            return f"{name}: no world yet, {_here(state, name)}"
        if len(one.started) < len(one.members):
            return f"{name}: {len(one.started)} of {len(one.members)} nodes run generation {one.generation}"
    return ""


def lacks_leave(state: JobState, asked: Event) -> str:
    """`drain`: the node is gone, and the others train again."""
    node = getattr(asked, "node", "")
    if node in state.nodes.nodes:
        return f"{node} has not gone yet"
    return lacks_workers(state)


def lacks_size(state: JobState, asked: Event) -> str:
    """`scale`: the world has the size; or, where a running one takes nobody in, the nodes are there for the next."""
    from dlrover_core.job.job import GroupScaled
    from dlrover_core.job.names import group_of
    from dlrover_core.rules import membership, slots

    assert isinstance(asked, GroupScaled)
    spec = state.job.spec.group(asked.group)
    if (spec.nodes_min, spec.nodes_max) != (asked.nodes_min, asked.nodes_max):  # another size was asked for meanwhile
        return ""
    if not spec.coupled:  # every node trains by itself
        return lacks_workers(state)
    name, on_join = spec.coupled, state.job.policy(spec.name).on_join
    wanted = slots.wanted(state, spec.name) // spec.unit * spec.unit
    one = state.world.at(name)
    members = sum(group_of(member.node) == spec.name for member in one.members)
    takes = on_join == "restart" or (on_join == "planned" and membership.able(state, name))
    waits = state.job.state == "suspended" or (one.active and members < wanted and (bool(one.finished) or not takes))
    if waits:
        ready = sum(node.group == spec.name for node in membership.ready_nodes(state, name))
        return "" if ready >= wanted else _here(state, name)
    if one.active and members != wanted:
        return f"{members} of {wanted} nodes train, {_here(state, name)}"
    return lacks_workers(state)


def _here(state: JobState, group: str) -> str:
    from dlrover_core.rules import coupling, membership

    return f"{len(membership.ready_nodes(state, group))} of {_nodes(coupling.wanted(state, group))} joined"


def _nodes(number: int) -> str:
    return f"{number} node{'' if number == 1 else 's'}"

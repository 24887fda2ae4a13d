"""What launchers and schedulers do to the rest once something has failed: closing signals, cancelled steps, echoes.

None of it is ever a cause while anything else is there, whatever stands first in a log.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from dlrover_core.diagnosis.evidence import CASC, ERROR, LOG, NET, Evidence
from dlrover_core.diagnosis.signatures import Table
from dlrover_core.diagnosis.watched import watched, where
from dlrover_core.spec import us

# Words of one rank within so much are one burst: of these the one that tells most is meant.
BURST_S = 30.0
# What an exit code alone says.
_BARE = re.compile(r"exit\.(sig(kill|term|segv|bus|abrt)|silent|signal\d*|code\d*)$")
_SELF_ENDED = re.compile(r"exit\.(sigabrt|silent|code\d*)$")
# A scheduler's cancelling: its owner's, if nothing failed before.
_CANCELS = ("slurm.cancelled",)
_SWITCH = re.compile(r"\bXid\b.{0,60}: 109\b", re.IGNORECASE)
# Kubernetes takes the pods off a node that does not answer.
_TAINTED = re.compile(r"\bTaint ?manager|\bMarking for deletion", re.IGNORECASE)
# A file server's or a mount's failure, told by the host that waits for it.
_SERVERS = ("host.nfs", "storage.gone", "storage.stale_handle")
# Words of a rank that cannot connect to another one, and how that one may have ended before, by no launcher's doing.
_CONNECTS = ("gloo.connect", "nccl.connect", "net.reset")
_KILLED = re.compile(r"exit\.(sigkill|sigsegv|sigbus|oom|signal\d*)$|cgroup\.oom$|host\.oom$")
# A platform's word on a worker that ended, whatever the reason.
_ECHOES = ("ray.system_error",)
# Raised in whoever waited for what another one gave up.
_CANCELLED = "exception.CancelledError"
# What a parent says of a child that ended, by type.
_PARENTS = tuple(f"exception.{one}" for one in ("ChildProcessError", "BrokenProcessPool", "TerminatedWorkerError"))
# What drivers of trainings raise over whatever their workers raised, by type.
_PASSED_ON = tuple(
    f"exception.{one}"
    for one in (
        "TrainingFailedError",
        "RayTrainWorkerError",
        "WorkerGroupError",
        "ControllerError",
        "TuneError",
        "RayTaskError",
    )
)
# A collective's own reports, after which the watchdog of the rank that writes them ends its process; and the one that all ranks'
# watchdogs make at about the same time.
_REPORTS = ("nccl.timeout", "nccl.aborted", "nccl.lagging")
_TIMED_OUT = "nccl.timeout"
# Launchers' words on what they did to a job, which no program said.
STOPPED = ("mpi.abort", "slurm.sweep", "launcher.sweep")
# A package's installer finds none. Scripts go on with what is there.
_UNINSTALLED = re.compile(
    r"\bNo matching distribution found\b|\bCould not find a version that satisfies\b", re.IGNORECASE
)
# An interpreter that finds its own threads at work when it ends.
_FINISHING = re.compile(r"\bat interpreter shutdown\b|\binterpreter (?:is )?(?:finaliz|shutting)", re.IGNORECASE)

# The end of a job's time, which ends whatever is left of it; and what is raised by a process that is being stopped.
TIME_IS_OVER = ("slurm.time_limit", "k8s.deadline")
_STOPPED_BY = ("dataloader.", "process.", "exit.", "exception.SignalException", "exception.KeyboardInterrupt")


class Case(Protocol):
    """What is judged: the observations still in question, all that were seen, and how one is set aside."""

    live: list[Evidence]
    seen: list[Evidence]
    table: Table

    def drop(self, no_cause: Callable[[Evidence], object], why: str) -> None:
        """Set aside what is no cause."""

    def action(self, one: Evidence) -> str:
        """What usually suffices."""

    def general(self, one: Evidence) -> bool:
        """Is it a symptom of many causes?"""


def reported(case: Case) -> None:
    """What a platform says of a worker's end, whatever its reason, is an echo where more is known of that end."""
    kinds = {one.signature for one in case.live}
    if not kinds.intersection((*_ECHOES, *_PARENTS, *_PASSED_ON)):
        return
    ended = [one.rank for one in case.live if _KILLED.match(one.signature) and one.signature != "exit.oom"]
    case.drop(
        lambda one: (
            one.signature in (*_ECHOES, *_PARENTS) and any(-1 in (one.rank, rank) or one.rank == rank for rank in ended)
        ),
        "an echo: it is known how that worker ended",
    )
    others = [one for one in case.live if one.verdict != CASC and one.signature not in _PASSED_ON]
    told = any(case.action(one) != "obs" and not _SELF_ENDED.match(one.signature) for one in others)
    case.drop(lambda one: told and one.signature in _PASSED_ON, "a report on others: their own words say why")
    raised = [one for one in case.live if one.source == ERROR and one.verdict != CASC and one.signature not in _ECHOES]
    case.drop(
        lambda one: (
            one.signature in _ECHOES
            and any(end.at <= one.at and (-1 in (one.rank, end.rank) or one.rank == end.rank) for end in raised)
        ),
        "an echo: the exception that ended that worker says why",
    )


def swept(case: Case) -> None:
    """What launchers and schedulers do to the rest once something has failed."""
    ends = ("exit.sigterm", "exit.sigkill", *_CANCELS)
    causes = [
        one for one in case.seen if one.signature not in ends and (one.verdict == CASC or case.action(one) != "obs")
    ]
    causes = [one for one in causes if case.table.get(one.signature) is None or not one.signature.endswith(".sweep")]
    kills = [one.at for one in case.seen if one.signature == "exit.sigkill"]
    case.drop(
        lambda one: (
            one.signature in _CANCELS
            and (
                any(cause.at <= one.at + (us(BURST_S) if " STEP " in one.text else 0) for cause in causes)
                or any(at < one.at for at in kills)  # whom the scheduler kills, it kills after it has said so
            )
        ),
        "swept: cancelled after something had failed",
    )
    _in_its_wake(case)
    # A line that speaks of a SIGTERM, of no rank's own end: whatever else is there tells more.
    said = [one for one in case.live if one.signature != "exit.sigterm"]
    case.drop(
        lambda one: one.signature == "exit.sigterm" and (watched(one) or one.rank < 0) and said,
        "swept: a launcher's closing signal",
    )
    # A worker that is gone after it complained about others, as its platform tells.
    complained = {where(one): one.at for one in reversed(case.live) if one.verdict == CASC}
    case.drop(
        lambda one: one.signature in _ECHOES and complained.get(where(one), one.at) < one.at,
        "an echo: words of the same place say what ended it",
    )
    kinds = {one.signature for one in case.live}
    if kinds.intersection(_SERVERS):
        served = {where(one) for one in case.live if one.signature in _SERVERS}
        case.drop(
            lambda one: one.signature == "host.blocked" and where(one) in served,
            "a consequence: tasks wait for a file server that does not answer",
        )
    if "cgroup.oom" in kinds:
        limited = {where(one) for one in case.live if one.signature == "cgroup.oom"}
        case.drop(
            lambda one: one.signature == "host.oom" and where(one) in limited and "invoked oom-killer" in one.text,
            "the kernel's first line of an OOM kill: the next ones say whose memory it was",
        )
    if "k8s.node_lost" in kinds:
        case.drop(
            lambda one: one.signature == "k8s.preempted" and _TAINTED.search(one.text) is not None,
            "a consequence: pods are taken off a node that is lost",
        )
    # A context switch that times out on a GPU whose program has just faulted.
    faults = {(where(one), one.subject): one.at for one in reversed(case.live) if one.signature == "xid.app"}
    case.drop(
        lambda one: (
            _SWITCH.search(one.text) is not None
            and 0 <= one.at - faults.get((where(one), one.subject), one.at + 1) <= us(BURST_S)
        ),
        "a consequence: the program on that GPU had faulted a moment before",
    )
    # How somebody ended whom nothing names, where the same log has words that explain it.
    worded = {where(one) for one in case.live if not bare(one) and one.source in (LOG, ERROR)}
    case.drop(
        lambda one: one.rank < 0 and _SELF_ENDED.match(one.signature) is not None and where(one) in worded,
        "only how it ended: words of the same log say why",
    )
    if kinds.intersection(_CONNECTS):
        _unanswered(case)
    _echoed(case)


def _in_its_wake(case: Case) -> None:
    """What processes say and do that end because another part of the job has failed."""
    kinds = {one.signature for one in case.live}
    if "exit.sigabrt" in kinds and kinds.intersection(_REPORTS):
        reports = [one for one in case.live if one.signature in _REPORTS]
        case.drop(
            lambda one: (
                one.signature == "exit.sigabrt"
                and any(
                    said.at <= one.at
                    and (said.signature == _TIMED_OUT or -1 in (said.rank, one.rank) or said.rank == one.rank)
                    for said in reports
                )
            ),
            "an echo: a collective's watchdog ends its process after its report",
        )
    if "mistake.version" in kinds:
        _done_without(case)
    if "native.python" in kinds:
        case.drop(
            lambda one: one.signature == "native.python" and _FINISHING.search(one.text) is not None,
            "a consequence: the interpreter was ending already",
        )
    if _CANCELLED in kinds:
        case.drop(lambda one: one.signature == _CANCELLED, "a consequence: whatever cancelled it says why")


def _done_without(case: Case) -> None:
    """A package that was not found is no cause of what ended a rank later, unless a script gave up in between."""

    def lacks(one: Evidence) -> bool:
        return one.signature == "mistake.version" and _UNINSTALLED.search(one.text) is not None

    gave_up = [one.at for one in case.seen if _SELF_ENDED.match(one.signature)]
    ends = [
        one.at
        for one in case.live
        if one.verdict != CASC
        and one.signature != "exit.sigterm"
        and case.action(one) != "obs"
        and not (_SELF_ENDED.match(one.signature) or lacks(one))
    ]
    case.drop(
        lambda one: lacks(one) and any(one.at < end and not any(one.at <= at <= end for at in gave_up) for end in ends),
        "lived through: whoever installs a package goes on to what else failed",
    )


def _unanswered(case: Case) -> None:
    """Whom another rank does not answer is no cause, where another rank was killed, or failed by itself."""
    killed = [one for one in case.live if one.rank >= 0 and _KILLED.match(one.signature)]
    case.drop(
        lambda one: one.signature in _CONNECTS and any(end.rank != one.rank and end.at <= one.at for end in killed),
        "a consequence: another rank had been killed before",
    )
    # Whoever should have listened may have failed before it did, and be heard later.
    failed = [
        one for one in case.live if one.source == ERROR and one.verdict not in (CASC, NET) and not case.general(one)
    ]
    case.drop(
        lambda one: (
            one.signature in _CONNECTS
            and one.rank >= 0
            and any(end.rank not in (-1, one.rank) and abs(end.at - one.at) <= us(BURST_S) for end in failed)
        ),
        "a consequence: another rank failed at that time by itself",
    )


def _echoed(case: Case) -> None:
    """How the only rank to fail ended says nothing, where the same log complained before and names nobody.

    In a job every line has its rank: only a text has words of which nobody is known.
    """
    causes = [one for one in case.live if one.verdict != CASC]
    if (
        not causes
        or len({one.rank for one in causes}) > 1
        or not all(_SELF_ENDED.match(one.signature) for one in causes)
    ):
        return
    first = min(one.at for one in causes)
    complaints = [one for one in case.live if one.verdict == CASC and one.signature not in STOPPED]
    spoken = {where(one) for one in complaints if one.rank < 0 and one.at <= first}
    case.drop(
        lambda one: one.verdict != CASC and where(one) in spoken,
        "an echo: the log complains of others, and then one rank ends itself",
    )


def bare(one: Evidence) -> bool:
    """Does it only say how something ended?"""
    return _BARE.match(one.signature) is not None


def raised(one: Evidence) -> bool:
    """Did a rank fail by itself, and say why?"""
    return one.source == ERROR and not one.signature.startswith(_STOPPED_BY)

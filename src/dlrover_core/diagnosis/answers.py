"""The answer on a log: the likeliest causes with their lines, why others were set aside, and what would decide.

The procedure names one root. What else it might have been is asked by judging again without it: the second and the third
answer are the roots of what is left. Where the first is less sure than `procedure.KNOWN`, the answer is "unknown", and says
where to look next.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dlrover_core.diagnosis import offline, procedure, signatures, vocabulary, who
from dlrover_core.diagnosis.evidence import CASC, ERROR, EXIT, KERNEL, LOG, NET, Evidence
from dlrover_core.diagnosis.found import Spot
from dlrover_core.diagnosis.procedure import Judgement
from dlrover_core.diagnosis.reading import Read
from dlrover_core.diagnosis.signatures import Table

CAUSES_MAX, LINES_MAX = 3, 4
# How sure an answer on a text is, where that was measured to be more than its signature alone tells: verdicts from 0.65 to 0.75
# were right 28 of 29 times by tables to which their own source had taught nothing (`bench_corpus.py`). Actions follow verdicts.
MEASURED_FROM, MEASURED = 0.65, 0.76
# Signatures whose own confidence is lower because a running job must not act on them alone. Tables that had learnt nothing from
# a log's own source were right on 39 of 42 such logs by the label alone, on 41 with what is right as well.
_RELIABLE = frozenset(("exit.sigkill", "exit.sigsegv", "nccl.connect"))
# What ranks say that wait in vain: the log's root where it holds no cause at all, and no more is claimed. Where such words were
# all that a table that had learnt nothing from the log's own source found, 48 of 48 answers were right, 41 by the label alone.
_WAITED = frozenset(("nccl.timeout", "store.timeout", "gloo.peer", "jax.peer_lost", "jax.barrier_timeout"))
# Not lifted so: words on how something ended or did not start, and not why. By tables to which their own family had taught
# nothing, none of seven and one of two named the cause.
_HOW = frozenset(("container.start", "exit.sigterm"))
# Types that libraries raise for whatever they find (`offline.ANYBODYS`). Known by type alone, they named the cause 2 of 15 times
# by such tables, types that the interpreter itself raises (`KeyError`, `IndexError`) 7 of 7 times.
BY_TYPE, DOUBTED = 0.8, 0.7
# What makes a connection one to a server: without, a reset or a time-out may as well be a peer's.
_SERVER = re.compile(r"https?|://|\b(?:host|url|endpoint|server|bucket|port|hdfs|s3|gs)\b", re.IGNORECASE)
# What kills a process: where one rank alone was killed, it was that one.
_KILLS = (".oom", ".preempted", ".evicted")

# Where to look next, by how a signature begins: the first that fits.
_NEXT = (
    (
        "exit.sigkill",
        "dmesg and memory.events of its host: the kernel's OOM killer, or a cgroup's limit? Then the scheduler's events",
    ),
    ("exit.sigterm", "who sent it: the scheduler's events, and the first line of any rank that failed before it"),
    ("exit.sigsegv", "the process's stack: PYTHONFAULTHANDLER=1, or its core file; dmesg of its host for an Xid"),
    ("exit.sigbus", "df of /dev/shm on its host, and the files that it maps"),
    ("exit.sigabrt", "the lines before it on that rank's stderr: who aborts says why"),
    ("exit.", "that rank's own stderr: --log-dir, or torchrun's --redirects 3 --tee 3; and its error file"),
    ("nccl.", "the first rank to fail: all ranks' stderr, the flight recorder's dump, dmesg of each host, ibstat"),
    ("gloo.", "the peer that it names, and what was last said there; dmesg of its host"),
    ("store.", "the rank that hosts the store (rank 0): was it there, and what did it say last?"),
    ("cuda.", "dmesg of its host for an Xid, then the same with CUDA_LAUNCH_BLOCKING=1"),
    ("xid.", "nvidia-smi -q on that host, and the program's own exception"),
    ("exception.ChildFailedError", "the failed rank's own stderr: the launcher only passes its end on"),
    ("exception.", "the traceback's innermost frame; the same line on other ranks: one fails, or all?"),
    ("ray.", "the dead worker's log (/tmp/ray/session_latest/logs/worker-*), and raylet.out of its node"),
    ("k8s.", "kubectl describe pod and kubectl get events, and the container's last state"),
    ("slurm.", "sacct -j JOB --format=JobID,State,ExitCode,NodeList, and slurmctld's log"),
    ("node.", "the host's console, and the platform's events of that time"),
    ("hang.", "all ranks' stacks (py-spy dump), taken twice"),
    ("", "the first failing rank's stderr, dmesg of its host, and the scheduler's events"),
)


class Cause(NamedTuple):
    """One likely cause.

    ``lines``: where it is said, the root's own line first; ``why_not``: why the first answer was preferred.
    """

    judgement: Judgement
    lines: tuple[Spot, ...]
    confidence: float
    why_not: str = ""


class Answer(NamedTuple):
    """What a log says.

    ``rank``, ``host``, ``device``: of the first cause; ``next``: what to look at; ``unknown``: nothing is sure.
    """

    causes: tuple[Cause, ...]
    seen: tuple[Evidence, ...]
    rank: int
    node: str
    host: str
    device: str
    next: str
    unknown: bool

    @property
    def judgement(self) -> Judgement:
        """The likeliest cause."""
        return self.causes[0].judgement


def answer(read: Read, extra: str = "") -> Answer | None:
    """The answer on what texts tell; None where nothing in them is known as a failure. ``extra``: a user's signatures."""
    table = signatures.table(extra)
    seen = tuple(one for one in offline.told(read.observations, extra) if one.verdict)
    if not seen:
        return None
    first = _unaccused(procedure.judge(seen, table), read)
    why = dict(first.discarded)
    causes = [Cause(first, _lines(read, seen, first.root), sureness(first))]
    left = seen
    weight = 1.0
    while len(causes) < CAUSES_MAX:
        root = causes[-1].judgement.root
        left = tuple(
            one for one in left if (one.signature, one.place) != (root.signature, root.place) and one.seq != root.seq
        )
        causes_left = [one for one in left if one.verdict != CASC] or ([] if first.verdict != CASC else list(left))
        if not causes_left:
            break
        found = _unaccused(procedure.judge(left, table), read)
        weight *= 0.5
        causes.append(
            Cause(
                found,
                _lines(read, seen, found.root),
                round(found.confidence * weight, 3),
                why.get(found.root.seq, "later, or less to the point"),
            )
        )
    rank, node, host, device = _where(read, seen, first, table)
    unknown = causes[0].confidence < procedure.KNOWN
    return Answer(tuple(causes), seen, rank, node, host, device, where_next(first), unknown)


def sureness(judgement: Judgement) -> float:
    """How sure the answer on a text is of its first cause, 0 to 1."""
    sure = judgement.confidence
    if judgement.signature in _HOW:
        return sure
    if judgement.signature in offline.ANYBODYS and sure <= BY_TYPE:
        return min(sure, DOUBTED)
    waited = judgement.signature in _WAITED and judgement.root.confidence > vocabulary.GUESSED
    if waited or (judgement.signature in _RELIABLE and not judgement.unknown):
        return max(sure, MEASURED)
    told = judgement.signature != "data.connection" or _SERVER.search(judgement.root.text) is not None
    return max(sure, MEASURED) if sure >= MEASURED_FROM and told else sure


def where_next(judgement: Judgement) -> str:
    """What to look at next, and which evidence would decide."""
    return next(words for start, words in _NEXT if judgement.signature.startswith(start))


def _unaccused(found: Judgement, read: Read) -> Judgement:
    """No file is a host: where no line names a node, none is at fault, and none is given up.

    Nothing is given up either for a line of which neither rank nor host nor kernel is known.
    """
    if found.host or (found.blamed and found.blamed not in read.files):
        return found
    local = found.rank >= 0 or found.root.source == KERNEL
    action = "check" if found.action in procedure.EVICTS and not local else found.action
    return found._replace(blamed="", suspects=(), action=action)


def _lines(read: Read, seen: Sequence[Evidence], root: Evidence) -> tuple[Spot, ...]:
    """The lines that say it, the root's first."""
    same = [
        one.seq for one in seen if (one.signature, one.place) == (root.signature, root.place) and one.seq != root.seq
    ]
    return tuple(read.spots[seq - 1] for seq in [root.seq, *same][:LINES_MAX])


def _where(read: Read, seen: Sequence[Evidence], found: Judgement, table: Table) -> tuple[int, str, str, str]:
    """Rank, node, host and device, as far as the log names them.

    Whoever only complains of others is not at fault: it is named where the procedure found a reason. A link has two ends: the
    host that tells of its failure is named only with a rank, or beside others, which do not tell of it.
    """
    root = found.root
    rank = found.rank
    if found.verdict == CASC and not found.blamed and rank < 0:
        peer = root.subject if root.signature == "mpi.peer_lost" else ""
        return (who.rank_named(root.text) if root.signature.startswith("jax.") else -1), "", peer, ""
    if rank >= 0 and root.source == EXIT:
        # One line that tells of several ranks' ends tells of none of them alone.
        said = read.spots[root.seq - 1][:2]
        rank = _only(
            one.rank for one in seen if one.signature == root.signature and read.spots[one.seq - 1][:2] == said
        )
    elif rank < 0 and root.source != KERNEL:
        rank = _only(one.rank for one in seen if one.signature == root.signature)
    ends = [one for one in seen if one.source == EXIT and one.exit_code in (-9, 137)]
    killed = next((one for one in ends if one.rank >= 0), None)
    if rank < 0 and killed is not None and root.signature.endswith(_KILLS) and _only(one.rank for one in ends) >= 0:
        return killed.rank, killed.node, root.host or killed.host, ""
    if rank < 0 and root.rank < 0 and root.verdict != CASC and root.source in (ERROR, LOG, EXIT):
        # Nobody's words, and one rank alone ended by itself: they were its.
        rank = _only(one.rank for one in seen if one.exit_code not in (0, -15, 143) and one.node == root.node)
    if rank < 0 and root.subject:
        rank = _rank_at(read.gpus, root.host, root.subject)
    host = found.host or root.host
    node = found.blamed if found.blamed not in read.files else ""
    if not node:
        node = dict(read.pods).get(root.node, "") if root.node in read.files else root.node
    known = table.get(root.signature)
    if (
        found.verdict == NET
        and known is not None
        and known.scope != "host"
        and rank < 0
        and not _beside(read, seen, root)
    ):
        return rank, "", "", _device(root)
    return rank, node, host, _device(root)


def _beside(read: Read, seen: Sequence[Evidence], root: Evidence) -> bool:
    """Does the log tell of other hosts, which do not tell of the same?"""
    alike = {one.host for one in seen if one.signature == root.signature}
    return bool(set(read.hosts) - alike - {root.host})


def _device(root: Evidence) -> str:
    """The GPU, port or disk that the root names: an address or a name, else an index on its host."""
    if root.signature.startswith(("xid.", "ib.", "net.", "nic.", "host.disk")):
        return root.subject
    index = who.device_named(root.text) if root.signature.startswith(("cuda.", "rocm.")) else -1
    return str(index) if index >= 0 else ""


def _only(ranks: Iterable[int]) -> int:
    """The one rank among them, or -1: there is none, or there are several."""
    named = {rank for rank in ranks if rank >= 0}
    return named.pop() if len(named) == 1 else -1


def _rank_at(gpus: Sequence[tuple[str, int]], host: str, address: str) -> int:
    """The rank that runs on a GPU at a PCI address, by what NCCL said when it started."""
    parts = address.lower().split(":")
    if len(parts) < 3:
        return -1
    bus = f"{parts[-2]}{parts[-1].split('.')[0]}0"
    known = {rank for key, rank in gpus if key.endswith(f" {bus}") and (not host or key.startswith(f"{host} "))}
    return known.pop() if len(known) == 1 else -1


def values(told: Answer | None, read: Read, table: Table, files: int) -> Mapping[str, object]:
    """The answer for programs; `docs/diagnose.schema.json` describes it."""
    if told is None:
        return {"files": files, "signature": None, "seen": []}
    rows = [_row(read, one) for one in told.seen]
    numbers = {one.seq: number for number, one in enumerate(told.seen)}
    first = told.judgement
    for seq, why in first.discarded:
        if seq in numbers:
            rows[numbers[seq]]["not_it"] = why
    named = table.get(first.signature)
    return {
        "files": files,
        "signature": first.signature,
        "title": named.title if named is not None else "",
        "class": first.verdict,
        "confidence": round(told.causes[0].confidence, 3),
        "unknown": told.unknown,
        "action": first.action,
        "rank": told.rank,
        "node": told.node,
        "host": told.host,
        "device": told.device,
        "rule": first.rule,
        "place": first.root.place,
        "next": told.next,
        "root": rows[numbers[first.root.seq]],
        "causes": [
            {
                "signature": one.judgement.signature,
                "class": one.judgement.verdict,
                "confidence": round(one.confidence, 3),
                "why_not": one.why_not,
                "lines": [spot._asdict() for spot in one.lines],
            }
            for one in told.causes
        ],
        "seen": rows,
        "aside": [{**spot._asdict(), "why": why} for spot, why in read.aside],
    }


def _row(read: Read, one: Evidence) -> dict[str, object]:
    spot = read.spots[one.seq - 1]
    return {
        "file": spot.file,
        "line": spot.number,
        "signature": one.signature,
        "rank": one.rank,
        "text": one.text or spot.line,
    }

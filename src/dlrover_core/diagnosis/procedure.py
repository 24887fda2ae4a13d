"""The decision procedure: from everything that was seen about one failure to its root, its class and whom to blame.

One death makes thousands of lines. Survivors complain about their peer, agents sweep what is left, the kernel and the
platform say what they did, and most of it comes late and out of order. The procedure is a pure function of the *set* of
observations. Its invariant, stage by stage, each of which only ever sets observations aside and says why:

1. *Window.* What happened more than eleven minutes (or a collective's timeout) before the first death, or five minutes
   after it, is another story; a node's end alone is seen late, because silence has to last.
2. *No anchors.* A warning is never a cause while anything else is there.
3. *Last words.* An exit code says how a rank ended; where the rank said why, the code adds nothing. A line of its output counts
   as that only if the rank died of it within seconds (`watched`); what was handled stands behind every death. A SIGTERM
   after somebody else's death is a sweep.
   So are a launcher's closing signals, and the cancelling of a step in which something failed before. A bare end of which
   no rank is known says nothing where the same log has words (`sweeps`).
4. *Copies.* The same from the same node within five seconds is one observation, however many ranks say it.
5. *Pre-emption wins* inside its failure domain, and over the errors that it causes elsewhere; not over a hardware fault of
   another node, and not over what broke well before it.
6. *A cascade is never a root* while any other cause is left.
7. Of what is left the strongest source decides: kernel's word on hardware > platform's reason > the host's resources > a node
   that vanished > what a rank says > a bare exit code; and within one source the earliest. One exception: an error of the
   program that several nodes raise at the same place is no single node's hardware.
   A general symptom (`Signature.general`) gives way to whatever tells more of the same rank within half a minute.
8. *Counting.* The same place on several nodes speaks for the program, a later incident on one node for its hardware.
9. *Only cascades left:* the rank they name, or that is behind the others, or that nobody has heard of is blamed, if it is at
   most two; else nobody.

No stage compares by order of arrival: sequence numbers break ties between observations that are alike in everything else.
And no eviction ever follows from a symptom that is global (`EVICTS`), nor from less than `SURE` confidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from dlrover_core.diagnosis import cascades, places, who
from dlrover_core.diagnosis.cascades import Member
from dlrover_core.diagnosis.evidence import (
    CASC,
    CGROUP,
    CHECK,
    DATA,
    ERROR,
    EXIT,
    HW,
    KERNEL,
    LOG,
    NODE,
    OPENING,
    PLAT,
    PLATFORM,
    USER,
    Evidence,
)
from dlrover_core.diagnosis.signatures import Table
from dlrover_core.diagnosis.sweeps import BURST_S, STOPPED, TIME_IS_OVER, bare, raised, reported, swept
from dlrover_core.diagnosis.watched import Lines, watched, where
from dlrover_core.spec import us

# Meta's RSC study joins what lies ten minutes before and five after a death ("Revisiting Reliability", arXiv 2410.21680). A
# minute more, because a collective waits for exactly ten, by NCCL's default in torch, and whoever waited dies a moment later.
# Delta's study coalesces repeats within 5 s.
BEFORE_S, AFTER_S, SAME_S = 660.0, 300.0, 5.0
# An error this much older than a pre-emption is not its doing. A notice may be read this long after its victims fell.
NOTICE_S = 60.0
_NEVER = 2**62
# Launchers give what is left of a world so long between SIGTERM and SIGKILL: torchrun 30 s.
SWEEP_S = 15.0
# A vanished node explains errors of others only if they did not come long before it.
VANISHED_S = 30.0
SUSPECTS_MAX = 2
# Less sure than this, no host is left and no living node is replaced; less than that, the cause counts as unknown.
SURE, KNOWN = 0.75, 0.5

# A node's end that nobody explains.
VANISHED = ("node.gone", "node.failed", "node.silent", "node.sigkill")
# Not the program's own for sure: any layer raises these.
_GENERIC = frozenset(
    f"exception.{one}" for one in ("RuntimeError", "Exception", "SystemExit", "unknown", "OSError", "Error")
)
# May be the program's or the hardware's: on several nodes the program's.
_EITHER = frozenset(("xid.app", "cuda.illegal_access", "cuda.launch_failure", "exit.sigsegv", "loss.nan"))
# Twice on one node speaks against the node.
TWICE = _EITHER | {
    "xid.gsp", "xid.nvlink", "xid.contained", "peermem.context", "cuda.not_ready", "cuda.nvlink", "cuda.contained",
    "exit.sigbus", "ib.retry_exceeded", "k8s.admission",
}  # fmt: skip
# On all nodes the image or the configuration is wrong; on one of several, that node is.
_ONE_OR_ALL = frozenset(
    (
        "cuda.driver", "cuda.unavailable", "nccl.no_interface", "k8s.image_pull", "k8s.config", "host.files",
        "exception.FileNotFoundError", "exception.PermissionError",
    )
)  # fmt: skip
# How a launcher ends those that it stops.
_SWEEPS = ("exit.sigterm", "exit.sigkill")
# What takes a node or a host out of the job.
EVICTS = ("isolate", "reset")
_TAKES_OUT = (*EVICTS, "relaunch")
# A launcher's own exception says no more than the exit codes that it passes on.
_REPORTS = frozenset(
    f"exception.{one}" for one in ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException")
)
# What a class asks for where its signature is not in the table.
_BY_CLASS = {PLAT: "relaunch", HW: "isolate", CASC: "proc"}


class Judgement(NamedTuple):
    """What it was, whose fault, and what usually suffices.

    ``blamed``: the node at fault, or empty; ``rank``: the rank, or -1; ``discarded``: of each observation that is no cause its
    seq and why; ``rule``: by which rule, in words; ``action``: the action hint of the signature (`signatures.ACTIONS`).
    ``suspects``: nodes of which one is at fault, where it cannot be said which; never more than two.
    """

    root: Evidence
    verdict: str
    signature: str
    confidence: float
    blamed: str = ""
    host: str = ""
    rank: int = -1
    discarded: tuple[tuple[int, str], ...] = ()
    rule: str = ""
    action: str = "proc"
    suspects: tuple[str, ...] = ()

    @property
    def unknown(self) -> bool:
        """Is the cause as good as unknown? What is named is then only the likeliest."""
        return self.confidence < KNOWN


class _Case:
    """The observations that are still in question, and why the others are not."""

    def __init__(self, evidence: Iterable[Evidence], table: Table, members: Sequence[Member]) -> None:
        self.table, self.members = table, members
        self.live = sorted(set(evidence), key=_order)
        self.dropped: dict[int, str] = {}
        self.seen = self.live
        self.said_on: set[str] = set()
        self.said_at, self.raised_at, self.vanished = _NEVER, _NEVER, 0
        self._nodes: set[str] = set()
        self.lines = Lines((), table, complete=True)

    def drop(self, no_cause: Callable[[Evidence], object], why: str) -> None:
        """Set aside what is no cause, unless nothing would be left. ``why`` may name the observation by ``{}``."""
        gone = {one for one in self.live if no_cause(one)}
        if len(gone) < len(self.live):
            self.live = [one for one in self.live if one not in gone]
            for one in gone:
                self.dropped.setdefault(one.seq, why)

    def action(self, one: Evidence) -> str:
        """What usually suffices."""
        known = self.table.get(one.signature)
        return known.action if known is not None else _BY_CLASS.get(one.verdict, "proc")

    def general(self, one: Evidence) -> bool:
        """Is it a symptom of many causes?"""
        known = self.table.get(one.signature)
        if known is None or one.confidence > known.confidence:  # its words say more than its type
            return False
        return one.signature in _GENERIC or known.general

    def nodes(self) -> set[str]:
        """Everybody who took part, as far as is known."""
        if not self._nodes:
            self._nodes = {member.node for member in self.members} or {where(one) for one in self.seen}
        return self._nodes - {""}

    def listen(self) -> None:
        """Note which nodes' ranks said why they failed, when the first did, and how many nodes vanished."""
        said = [one for one in self.live if one.source in (ERROR, LOG, EXIT) and not bare(one)]
        words = [one for one in said if one not in self.lines.handled]
        self.said_on = {where(one) for one in words}
        self.said_at = min((one.at for one in words), default=_NEVER)
        self.raised_at = min((one.at for one in words if raised(one)), default=_NEVER)
        self.vanished = len({where(one) for one in self.seen if one.signature in VANISHED})


def judge(
    evidence: Sequence[Evidence],
    table: Table,
    *,
    members: Sequence[Member] = (),
    history: Sequence[Evidence] = (),
    complete: bool = True,
) -> Judgement:
    """The judgement on one incident's evidence.

    ``members``: who took part, where that is known; ``history``: the roots of earlier incidents of the last 24 hours;
    ``complete``: nobody is about to say anything more, so that who is silent now is silent.

    Raises ValueError without any evidence.
    """
    if not evidence:
        raise ValueError("nothing was seen: there is nothing to judge")
    case = _Case(evidence, table, members)
    _window(case)
    case.seen = list(case.live)
    if any(case.action(one) != "obs" for one in case.live):
        case.drop(lambda one: case.action(one) == "obs" and one.verdict != CASC, "a warning, no cause")
    case.lines = Lines(case.live, table, complete=complete)
    _copied(case)
    reported(case)
    _last_words(case)
    swept(case)
    handled = case.lines.behind(case.live)
    case.drop(lambda one: one in handled, "handled: whoever wrote it lived on, or died of something else")
    _copies(case)
    _preemption(case)
    if all(one.verdict == CASC for one in case.live):
        return _only_cascades(case, complete=complete)
    case.drop(lambda one: one.verdict == CASC, "a consequence: other evidence names a cause")
    case.listen()
    root, rule = _strongest(case)
    _weaker(case, root)
    return _counted(case, root, rule, history)


# ---- the stages


def _window(case: _Case) -> None:
    deaths = [one.at for one in case.live if one.source in (EXIT, ERROR, PLATFORM, NODE, *OPENING)]
    before_s = cascades.waited_s(case.live, BEFORE_S)
    first = min(deaths, default=cascades.newest_burst(case.live, before_s))
    case.drop(lambda one: one.at < first - us(before_s), f"more than {before_s / 60:g} min before the first death")
    late, why = first + us(AFTER_S), f"more than {AFTER_S / 60:g} min after the first death"
    case.drop(lambda one: one.at > late and one.source not in (NODE, PLATFORM), why)


def _copied(case: _Case) -> None:
    """What a rank says at its end, and had said a moment before: its end tells it better, and began when it was said."""
    case.drop(lambda one: one in case.lines.copies, "a copy: its rank says the same at its end")
    since = case.lines.since
    if since:
        case.live = sorted((one._replace(at=since.get(one, one.at)) for one in case.live), key=_order)
        case.seen = sorted((one._replace(at=since.get(one, one.at)) for one in case.seen), key=_order)


def _copies(case: _Case) -> None:
    """Of what one node says again within five seconds the first is kept. Those that follow later are another time."""
    newest: dict[tuple[str, str, str, str], Evidence] = {}
    kept = []
    for one in case.live:
        key = (where(one), one.signature, one.place, one.subject if one.source == KERNEL else "")
        before = newest.get(key)
        newest[key] = one
        if before is not None and one.at - before.at <= us(SAME_S):
            case.dropped[one.seq] = "a copy: the same was seen on that node a moment before"
        else:
            kept.append(one)
    case.live = kept


def _last_words(case: _Case) -> None:
    telling = [one for one in case.seen if not bare(one) and one.signature not in _REPORTS and case.lines.counts(one)]
    words = {(where(one), one.rank) for one in telling if case.action(one) != "obs" or one.verdict == CASC}
    case.drop(
        lambda one: bare(one) and one.rank >= 0 and (where(one), one.rank) in words,
        "only how it ended: the rank says why",
    )
    placed = {(where(one), one.rank, one.signature) for one in case.seen if one.place and not watched(one)}
    case.drop(
        lambda one: not one.place and (where(one), one.rank, one.signature) in placed,
        "a copy: the same rank says the same, and where",
    )
    swept = ("exit.sigterm", "exit.sigkill")
    handled = {one for one in case.lines.handled if one.verdict != CASC}
    others = [one for one in case.live if one.signature not in swept and _ended(one) and one not in handled]
    causes = [one for one in others if one.verdict != CASC]
    first = min((one.at for one in others), default=None)
    if first is None:
        return
    case.drop(
        lambda one: one.signature == "exit.sigterm" and one.rank >= 0 and (causes or one.at > first),
        "swept: SIGTERM after another end",
    )
    case.drop(
        lambda one: one.signature == "exit.sigkill" and one.rank >= 0 and one.at > first + us(SWEEP_S),
        "swept: SIGKILL after another end",
    )


def _preemption(case: _Case) -> None:
    """Pre-emption wins in its own domain at once, elsewhere over what it causes."""
    taken = [one for one in case.live if _taken(one)]
    if not taken:
        return
    domains = {where(one) for one in taken} | {one.host for one in taken if one.host}
    at = min(one.at for one in taken)

    def collateral(one: Evidence) -> bool:
        if _taken(one):
            return False
        if where(one) in domains or (one.host and one.host in domains):
            return True
        return _tier(one) > _HARDWARE and one.at >= at - us(NOTICE_S)

    case.drop(collateral, "collateral: the platform took a node of this job")


def _only_cascades(case: _Case, *, complete: bool) -> Judgement:
    """Everybody complains about somebody else. Who is named, behind, or silent?"""
    root = next((one for one in case.live if one.signature not in STOPPED), case.live[0])
    for blame, rule, confidence in (
        (
            cascades.named(case.seen, case.members),
            "cascades.named: the ranks that the others wait for",
            0.8 if len({(one.rank, one.node) for one in case.seen if one.verdict == CASC}) > 1 else 0.7,
        ),
        (
            cascades.behind(case.seen, case.members),
            "cascades.behind: the rank that has enqueued fewest collectives",
            0.7,
        ),
        (
            cascades.ended(case.seen, case.members),
            "cascades.ended: the first rank to end, by the launcher's word",
            0.45,
        ),
        (
            cascades.unheard(case.seen, case.members) if complete else set(),
            "cascades.unheard: the only ones of whom nobody has heard",
            0.6,
        ),
    ):
        if 0 < len(blame) <= SUSPECTS_MAX:
            rank, node, host = min(blame)
            own = _telling(case, rank, node) or [root]
            _rest(case, own[0])
            found = _made(case, own[0], own[0].verdict, confidence, node, host, rank, rule, case.action(own[0]))
            suspects = {its for _, its, _ in blame} - {""}
            return found if len(suspects) == 1 else found._replace(suspects=tuple(sorted(suspects)))
    _rest(case, root)
    return _made(
        case, root, root.verdict, min(root.confidence, 0.3), "", "", -1, "cascades: cannot attribute", case.action(root)
    )


def _telling(case: _Case, rank: int, node: str) -> list[Evidence]:
    """What tells best of the one to blame: its own words, else those that name it. How it was swept away tells nothing."""
    own = [one for one in case.seen if one.rank == rank >= 0]
    words = [one for one in own if one.seq not in case.dropped or not bare(one)]
    named = [
        one for one in case.live if any((rank, node) == who[:2] for who in cascades.whom(case.seen, case.members, one))
    ]
    return words or sorted(named, key=lambda one: one.signature != "nccl.lagging") or own


def _strongest(case: _Case) -> tuple[Evidence, str]:
    everywhere = _everywhere(case)
    if everywhere and not any(_taken(one) and _tier(one, case) == _REASON for one in case.live):
        return min(everywhere, key=_order), "everywhere: the same place on several nodes is the program's"
    root = min(case.live, key=lambda one: (_tier(one, case), _vague(one), _order(one)))
    if case.general(root):
        root = min((one for one in case.live if _explains(case, one, root)), key=_order, default=root)
    if _taken(root):
        return root, "preemption: the platform's word wins over what it causes"
    return root, f"strongest: {_TIERS[_tier(root, case)]}"


def _explains(case: _Case, one: Evidence, symptom: Evidence) -> bool:
    """Does it tell more of the same burst of the same rank?"""
    near = where(one) == where(symptom) and (_tier(one, case) == _tier(symptom, case) or symptom.source == PLATFORM)
    if case.general(one) or bare(one) or not near:
        return False
    return (one.rank == symptom.rank or -1 in (one.rank, symptom.rank)) and abs(one.at - symptom.at) <= us(BURST_S)


def _everywhere(case: _Case) -> list[Evidence]:
    """Errors of the program that several nodes raise at the same place."""
    errors = [
        one
        for one in case.live
        if one.verdict == USER
        and one.place
        and one.signature.startswith("exception.")
        and one.signature not in _GENERIC
        and one not in case.lines.handled
    ]
    on: dict[tuple[str, str], set[str]] = {}
    for one in errors:
        on.setdefault(_print(one), set()).add(where(one))
    return [one for one in errors if len(on[_print(one)]) > 1]


def _weaker(case: _Case, root: Evidence) -> None:
    tier = _tier(root, case)
    case.drop(
        lambda one: one is not root and _print(one) != _print(root) and _tier(one, case) > tier, "weaker evidence"
    )
    case.drop(lambda one: one is not root and _print(one) != _print(root), "later, or less to the point, than the root")


def _counted(case: _Case, root: Evidence, rule: str, history: Sequence[Evidence]) -> Judgement:
    """Fingerprints by node: what repeats where?"""
    same = [one for one in case.seen if _print(one) == _print(root)]
    on = {where(one) for one in same}
    verdict, confidence, action = root.verdict, root.confidence, case.action(root)
    either = root.signature in _EITHER and (root.place or not bare(root))
    if len(on) > 1 and (either or (root.signature.startswith("exception.") and root.place)):
        verdict, rule = USER, f"{rule}; on {len(on)} nodes: the program"
    elif root.signature == "loss.nan" and root.source in (LOG, ERROR):
        # A program that checks its loss says so on whichever rank checks first: that speaks of no machine.
        verdict = USER
    elif root.signature == "ib.fatal" and places.between_hosts(root.text):
        action, rule = "check", f"{rule}; a path between hosts, no host of its own"
    elif action in _TAKES_OUT and root.verdict == PLAT and places.requested(root.text):
        action, rule = "retry", f"{rule}; what was asked for does not fit, whatever host is asked"
    elif root.signature == "disk.full" and places.shared(root.text):
        action, rule = "wait", f"{rule}; what all hosts share, and a new one would lack as well"
    elif root.signature in _ONE_OR_ALL:
        verdict, action, rule = _one_or_all(case, root, same, rule)
    elif root.signature in TWICE and _compared(case) and (times := _times(case, root, history)) > 1:
        verdict, action, confidence, rule = HW, "isolate", max(confidence, 0.8), f"{rule}; {times} times on this node"
    elif any(root.place and _print(one) == _print(root) and where(one) != where(root) for one in history):
        verdict, action, rule = USER, "fail", f"{rule}; before at the same place on another node"
    if action in EVICTS and _global(case, root):
        return _made(
            case, root, verdict, min(confidence, 0.5), "", "", -1, f"{rule}; everywhere: nobody is evicted", "check"
        )
    faultless = verdict in (USER, DATA)
    ranks = {one.rank for one in same}
    return _made(
        case,
        root,
        verdict,
        confidence,
        "" if faultless else root.node,
        "" if faultless else root.host,
        root.rank if not faultless or len(ranks) == 1 else -1,
        rule,
        action,
    )


def _one_or_all(case: _Case, root: Evidence, same: list[Evidence], rule: str) -> tuple[str, str, str]:
    """Missing on one node of several, that node lacks it; missing everywhere, the image does."""
    others = case.nodes() - {where(root)}
    alone = len({where(one) for one in same}) == 1 and bool(_passed(case, others))
    # One rank may do what no other does, such as writing checkpoints: a file is missing *on a node* if all its ranks say so.
    # And what it names is local: what all hosts share is missing for all of them.
    said = {one.rank for one in same}
    whole = not root.signature.startswith("exception.") or (len(said) > 1 and not places.shared(root.text))
    if _beyond(case, root):
        return USER, "fail", f"{rule}; it asks for a device that a host of this job has not"
    if alone and whole:
        return (HW if root.verdict == HW else PLAT), "isolate", f"{rule}; on one of {len(others) + 1} nodes only"
    everywhere = len({where(one) for one in same}) > 1
    if not everywhere and (others or not case.members):
        return root.verdict, "check" if case.action(root) in EVICTS else case.action(root), rule
    verdict = root.verdict if root.verdict == PLAT or not everywhere else USER
    return verdict, ("fail" if everywhere else case.action(root)), rule


def _beyond(case: _Case, root: Evidence) -> bool:
    """Does it name a device whose index is beyond what the hosts of this job have, by the ranks that the others run?"""
    index = who.device_named(root.text)
    ranks: dict[str, set[int]] = {}
    for one in case.seen:
        if one.rank >= 0 and where(one) != where(root):
            ranks.setdefault(where(one), set()).add(one.rank)
    counts = [member.nproc for member in case.members] or [len(of) for of in ranks.values() if len(of) > 1]
    return bool(counts) and index >= max(counts)


def _passed(case: _Case, others: set[str]) -> set[str]:
    """Of these nodes those that went past the point of failure: one that was only swept away, or told of, may not have."""
    seen = {where(one) for one in case.seen}
    told = [one for one in case.seen if one.source not in (PLATFORM, NODE) and one.signature not in _SWEEPS]
    spoke = {where(one) for one in told if not one.signature.endswith(".sweep") and one.signature not in STOPPED}
    return {node for node in others if node in spoke or node not in seen}


def _times(case: _Case, root: Evidence, history: Sequence[Evidence]) -> int:
    """How often this was seen on the root's node or host, repeats within seconds apart.

    One incident counts once, but for the kernel's word on hardware: words of several ranks are of one fault.
    """
    here = [one for one in case.live if one.signature == root.signature and where(one) == where(root)]
    if root.source != KERNEL or root.signature in _EITHER:
        here = here[:1]
    past = [
        one
        for one in history
        if one.signature == root.signature and (one.host == root.host if root.host else one.node == root.node)
    ]
    return len(here) + len(past)


def _compared(case: _Case) -> bool:
    """Is there another host than the one? With one host there is nothing to compare it with."""
    return len({member.host or member.node for member in case.members} or case.nodes()) > 1


def _global(case: _Case, root: Evidence) -> bool:
    """Is it seen on more than a few, or on all of several nodes? Evicting them would cure nothing."""
    on = {where(one) for one in case.seen if one.signature == root.signature}
    many = len(on) > SUSPECTS_MAX and root.source != CHECK
    return many or (len(on) > 1 and len(on) >= len(case.nodes()))


# ---- words for the stages


_HARDWARE, _REASON, _LATE = 0, 1, 5
_TIERS = (
    "the kernel's or the check's word on hardware",
    "the platform's reason",
    "the host's resources",
    "a node that vanished",
    "what the first rank to fail says",
    "a node that ended with its ranks",
    "a bare exit code",
    "a closing signal",
)


def _tier(one: Evidence, case: _Case | None = None) -> int:
    """How strong a source is: the lower, the stronger."""
    hardware = one.verdict == HW or one.signature.startswith(("xid.", "nvswitch."))
    if one.source == CHECK or (one.source == KERNEL and hardware and one.verdict != USER):
        return _HARDWARE
    if bare(one):
        return 7 if one.signature == "exit.sigterm" else 6
    if one.signature in VANISHED:
        return 3 if case is None or _by_itself(one, case) else _LATE
    if one.source in (PLATFORM, NODE):
        late = case is not None and (
            (_taken(one) and case.said_at < one.at - us(NOTICE_S))
            or (one.signature in TIME_IS_OVER and case.raised_at < one.at)
        )
        return _LATE if late else _REASON
    if one.source in (KERNEL, CGROUP) and one.verdict != USER:
        return 2
    return 4


def _by_itself(node: Evidence, case: _Case) -> bool:
    """Did this node vanish by itself? Not where its own ranks said why, or others long before, or most nodes went at once."""
    if where(node) in case.said_on or case.said_at < node.at - us(VANISHED_S):
        return False
    return case.vanished <= 1 or case.vanished * 2 <= len(case.nodes()) or not case.said_on


def _taken(one: Evidence) -> bool:
    """Did the platform say that it took the node?"""
    return one.signature.endswith(".preempted")


def _vague(one: Evidence) -> bool:
    """Could any layer have said it?"""
    return one.signature in _GENERIC


def _ended(one: Evidence) -> bool:
    """Does it tell of an end or of its cause, on whatever node?"""
    return one.source in (EXIT, ERROR, LOG, KERNEL, CGROUP, PLATFORM, NODE, *OPENING)


def _print(one: Evidence) -> tuple[str, str]:
    """The fingerprint."""
    return one.signature, one.place


def _order(one: Evidence) -> tuple[object, ...]:
    return (one.at, one.rank, one.node, one.host, one.signature, one.place, one.source, one.text, one.subject, one.seq)


def _rest(case: _Case, root: Evidence) -> None:
    case.drop(lambda one: one is not root, "a consequence")


def _made(
    case: _Case,
    root: Evidence,
    verdict: str,
    confidence: float,
    node: str,
    host: str,
    rank: int,
    rule: str,
    action: str,
) -> Judgement:
    if action in _TAKES_OUT and confidence < SURE and root.source not in (NODE, PLATFORM, CHECK):
        action, rule = ("check" if action in EVICTS else "proc"), f"{rule}; too unsure to take a node out"
    discarded = tuple(sorted((seq, why) for seq, why in case.dropped.items() if seq != root.seq))
    return Judgement(root, verdict, root.signature, confidence, node, host, rank, discarded, rule, action)

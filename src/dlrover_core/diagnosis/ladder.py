"""The action ladder: the cheapest rung that suffices and that the budgets still allow.

Act at once, judge at leisure: a needless restart costs less than waiting for certainty. What cannot be undone (failing the
job) is held until every rank's evidence is in. Leaving a host alone can be undone: it expires, and a later verdict ends it.

Who pays: the program's failures, and those that nobody explains, draw on ``restarts`` (``--max-restarts``, the general
ceiling); transient ones of the system on ``software``, a number per hour; a node's death on the ``relaunches`` of its place;
what the platform says it took, on nothing (``platform``). A SIGKILL that nobody explains is no proven pre-emption: it is
charged, or ``--max-restarts`` would bound nothing. ``--max-restarts 0`` means no restart, whoever is at fault.

An action has worked when steps are completed after it. One that has not is not repeated for ever: the next rung is taken.
"""

from __future__ import annotations

from dlrover_core.diagnosis.choices import Case, Choice, Context
from dlrover_core.diagnosis.evidence import DATA, HW, NET, PLAT, SOFT, USER
from dlrover_core.diagnosis.policy import Policy

RETRY = "RETRY"
RESTART_PROCESSES = "RESTART_PROCESSES"
RELAUNCH_NODE = "RELAUNCH_NODE"
RELAUNCH_MORE_MEMORY = "RELAUNCH_MORE_MEMORY"
ISOLATE_HOST = "ISOLATE_HOST"
SUSPECTS = "SUSPECTS"
GO_ON_SMALLER = "GO_ON_SMALLER"
AWAIT_EVIDENCE = "AWAIT_EVIDENCE"
FAIL_JOB = "FAIL_JOB"
GIVE_UP_SET = "GIVE_UP_SET"

# A new world of the same nodes; a new node in a place.
IN_PLACE = (RETRY, RESTART_PROCESSES)
RELAUNCHES = (RELAUNCH_NODE, RELAUNCH_MORE_MEMORY, ISOLATE_HOST)
# What a dead node is answered with: these take the place of a restart that was charged before the death was known.
FOR_NODES = (*RELAUNCHES, GO_ON_SMALLER)
# The end, once all evidence is in: of the job, or of a coupling set that may fail. Logs from before `GIVE_UP_SET` have
# `FAIL_JOB` for both.
ENDINGS = (FAIL_JOB, GIVE_UP_SET)

# What passes by itself, by what usually suffices.
PASSES = ("retry", "wait")
# Budgets, by the names that the log has.
RESTARTS, SOFTWARE, PLATFORM, PLACE = "restarts", "software", "platform", "relaunches"
# Restarts that look for a sample, or leave it out. Halving bounds them.
QUARANTINE = "quarantine"
# How the rule of an end without progress begins: the launcher's exit code tells it from others.
NO_PROGRESS = "progress.none"
# How the rules begin by which an error of the program ends the job with restarts left.
ENDS = ("user.at_once", "user.repeats", "data.poison")


def budget_of(verdict: str, signature: str) -> str:
    """Which budget a restart in place draws on."""
    if signature.startswith(("exit.", "node.", "peer.", "memory.")):
        return RESTARTS
    if verdict == PLAT:
        return PLATFORM
    return SOFTWARE if verdict in (SOFT, NET, HW) else RESTARTS


def choose(case: Case, context: Context, policy: Policy) -> Choice:
    """The rung for this failure."""
    return _for_workers(case, context, policy) if context.alive else _for_node(case, context, policy)


# ---- its workers died, or it stands still; the node lives


def _for_workers(case: Case, context: Context, policy: Policy) -> Choice:
    end = f"data.poison: {context.poison}" if context.poison else _hopeless(case, context, policy)
    if end and (context.poison or not context.samples):
        return Choice(AWAIT_EVIDENCE, end, 0)
    if not context.granted:
        return Choice(AWAIT_EVIDENCE, "workers.exhausted: no restarts left (--max-restarts)", 0, RESTARTS, 0)
    if context.samples and case.verdict == DATA:
        return Choice(RESTART_PROCESSES, f"data.samples: {context.samples}", 0, QUARANTINE, 0)
    node = _take_out(case, context, policy)
    if node is not None:
        return node
    budget = budget_of(case.verdict, case.signature)
    waits = case.hint in PASSES
    if waits or budget == SOFTWARE:
        if context.software > 0:
            return _by_software(case, context, policy, waits=waits)
        budget = RESTARTS
    if budget == PLATFORM:
        return Choice(
            RESTART_PROCESSES, "workers.platform: the platform's doing, charged to nobody", context.restarts, budget,
            context.restarts,
        )  # fmt: skip
    if context.restarts > 0:
        return Choice(
            RESTART_PROCESSES,
            "workers.restart: the node lives and restarts are left",
            context.restarts - 1,
            RESTARTS,
            context.restarts,
        )
    return Choice(AWAIT_EVIDENCE, "workers.exhausted: no restarts left (--max-restarts)", 0, RESTARTS, 0)


def _hopeless(case: Case, context: Context, policy: Policy) -> str:
    """Why another attempt would end as this one did; empty: it may not."""
    kind = case.signature.removeprefix("exception.")
    if case.verdict == USER and kind in policy.fail_at_once and not context.stepped and case.place:
        return f"user.at_once: {kind} before the first step ever; it cannot run"
    if case.hint == "fail" and case.signature in policy.fail_signatures and not context.stepped:
        return f"user.at_once: {case.signature} before the first step ever; no time cures it"
    known = bool(case.place) or case.hint == "fail"
    if case.verdict == USER and known and policy.user_repeats and context.repeats >= policy.user_repeats:
        return f"user.repeats: the same at the same place {context.repeats + 1} times, with nothing gained between"
    # What passes by itself is given its pause at least once.
    first = case.hint in PASSES and not context.retries
    if context.stale_max and context.stale >= context.stale_max and case.verdict != PLAT and not first:
        return f"{NO_PROGRESS}: {context.stale} cycles in a row have reached no new step"
    return ""


def _take_out(case: Case, context: Context, policy: Policy) -> Choice | None:
    """Restarting in place would not suffice: the node is replaced, if anybody can take its place."""
    replaceable = context.relaunches > 0 and (not context.joining or context.others >= context.floor)
    if case.hint in ("isolate", "reset") and case.blamed and case.confidence >= policy.isolate_confidence:
        if replaceable:
            return _relaunch(ISOLATE_HOST, "host.isolate: the host is at fault, and its place can be filled", context)
        if context.others >= context.floor:
            return _smaller("host.shrink: the host is at fault, and enough nodes are there without it")
        return None
    if context.leave and case.blamed and replaceable:
        return _relaunch(ISOLATE_HOST, context.leave, context)
    if case.hint == "mem+" and case.blamed and context.memory_mib and context.relaunches > 0:
        return _more_memory(context, policy)
    if case.hint == "relaunch" and case.blamed and not case.signature.startswith("exit.") and replaceable:
        return _relaunch(RELAUNCH_NODE, "node.fresh: a restart in place does not cure this", context)
    if case.hint == "shrink" and case.blamed and context.others >= context.floor:
        return _smaller("node.without: it is better to go on without this node")
    # What only an exit code says stays within --max-restarts: as often as it grants, and in place.
    doubted = budget_of(case.verdict, case.signature) == SOFTWARE and bool(case.blamed)
    doubted = doubted and 0 < policy.escalate_after <= context.tried
    if doubted and replaceable and context.relaunched:
        return _relaunch(ISOLATE_HOST, "host.escalate: neither restarts nor a fresh node led to a step here", context)
    if doubted and replaceable:
        rule = f"node.escalate: {context.tried} restarts in place led to no step"
        return _relaunch(RELAUNCH_NODE, rule, context)
    return None


def _by_software(case: Case, context: Context, policy: Policy, *, waits: bool) -> Choice:
    left = context.software - 1
    if not waits:
        rule = "workers.software: not the program's doing, and the hour's restarts are not used up"
        return Choice(RESTART_PROCESSES, rule, left, SOFTWARE, context.software)
    pause_s = min(policy.retry_pause_s * 2.0 ** min(context.retries, 30), policy.retry_pause_max_s)
    rule = f"workers.retry: {case.signature} passes by itself; again after {pause_s:g} s"
    return Choice(RETRY, rule, left, SOFTWARE, context.software, pause_us=round(pause_s * 1_000_000))


# ---- the node is gone


def _for_node(case: Case, context: Context, policy: Policy) -> Choice:
    enough = context.others >= context.floor
    if case.signature == "node.refused":
        if enough:
            return _smaller("node.refused: its backend will not start it, enough nodes without it")
        return Choice(
            AWAIT_EVIDENCE, "node.refused: its backend will not start it, and too few nodes are left without it", 0
        )
    if case.signature in policy.fail_nodes and not context.stepped:
        rule = f"node.at_once: {case.signature} before the first step ever; no relaunch cures it"
        return Choice(AWAIT_EVIDENCE, rule, 0)
    if proven(case.verdict, case.signature) and context.granted:
        rule = "node.preempted: the platform took it; charged to nobody"
        return Choice(RELAUNCH_NODE, rule, context.relaunches, PLATFORM, context.relaunches)
    if context.relaunches > 0 and context.granted:
        if case.hint in ("isolate", "reset") and case.host and case.confidence >= policy.isolate_confidence:
            return _relaunch(ISOLATE_HOST, "host.isolate: the host is at fault; its place is filled elsewhere", context)
        if case.hint == "mem+" and context.memory_mib:
            return _more_memory(context, policy)
        return _relaunch(RELAUNCH_NODE, "node.relaunch: its place is wanted and relaunches are left", context)
    if enough:
        return _smaller("node.shrink: no relaunches left, enough nodes without it")
    return Choice(AWAIT_EVIDENCE, "node.exhausted: no relaunches left and too few nodes without it", 0, PLACE, 0)


def proven(verdict: str, signature: str) -> bool:
    """Does the platform itself say that it took the node?"""
    return verdict == PLAT and not signature.startswith(("node.", "exit.", "k8s.image", "k8s.admission", "k8s.unsched"))


def _relaunch(action: str, rule: str, context: Context) -> Choice:
    return Choice(action, rule, context.relaunches - 1, PLACE, context.relaunches)


def _smaller(rule: str) -> Choice:
    return Choice(GO_ON_SMALLER, rule, 0)


def _more_memory(context: Context, policy: Policy) -> Choice:
    """A parameter server's memory grows with its share of the model, a worker's hardly."""
    now = context.memory_mib
    if context.serves:
        wanted = now * (policy.ps_memory_first if not context.relaunched else policy.ps_memory_then)
    else:
        wanted = max(now * policy.memory_factor, now + policy.memory_step_mib)
    more = min(round(wanted), policy.memory_max_mib)
    if more <= now:
        rule = f"memory.most: {now} MiB are the most that the policy allows"
        return _relaunch(RELAUNCH_NODE, rule, context)
    choice = _relaunch(RELAUNCH_MORE_MEMORY, f"memory.more: {now} MiB did not suffice, {more} may", context)
    return choice._replace(memory_mib=more)

"""Events in words: one line for a person who does not know the names of our fields.

An event without a phrase of its own is told by its fields. Text from outside (last lines, reasons, errors) passes `safe`
before it reaches a terminal: a worker's output may hold anything.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from dlrover_core.diagnosis import ladder
from dlrover_core.history.plain import fields_of
from dlrover_core.job import (
    budgets,
    checkpoints,
    checks,
    evidence,
    hosts,
    incidents,
    job,
    nodes,
    operations,
    plans,
    progress,
    silence,
    stragglers,
    world,
)
from dlrover_core.job.ranges import from_ranges
from dlrover_core.kernel.engine import CommandFailed, CommandRefused
from dlrover_core.kernel.events import Event
from dlrover_core.words import without_sequences

VALUE_CHARS_MAX = 80

VERDICTS = {
    "USER": "the program itself",
    "PLAT": "the platform took it away",
    "RES": "a resource ran out",
    "NET": "the network",
    "HW": "the hardware",
    "SOFT": "transient",
    "DATA": "the data",
    "CASC": "a consequence of another death",
}
CHECKED = {"unclear": "not told apart from its partners"}
SHOWN_GROUPS_MAX = 16
SHOWN_NODES_MAX = 8
ACTIONS = {
    ladder.RESTART_PROCESSES: "restart the processes",
    ladder.RETRY: "restart the processes after a pause",
    ladder.RELAUNCH_NODE: "relaunch the node",
    ladder.RELAUNCH_MORE_MEMORY: "relaunch the node with more memory",
    ladder.ISOLATE_HOST: "isolate the host and relaunch the node elsewhere",
    ladder.SUSPECTS: "report whom it suspects",
    ladder.GO_ON_SMALLER: "go on with fewer nodes",
    ladder.AWAIT_EVIDENCE: "wait for all evidence, then fail the job",
    ladder.FAIL_JOB: "fail the job",
}


def safe(text: str) -> str:
    """``text`` without escape sequences and control characters, but with its line breaks."""
    bare = without_sequences(text).replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    ")
    return "".join(one if one == "\n" or one.isprintable() else "?" for one in bare)


def one_line(text: str, chars_max: int = 200) -> str:
    """``text`` safe, in one line, cut with '...' where it is longer."""
    line = " ".join(safe(text).split())
    return line if len(line) <= chars_max else line[: chars_max - 3] + "..."


def duration(us: int) -> str:
    """Microseconds as a person says them: '0.081 s', '12.3 s', '4 min 05 s', '2 h 03 min', '5 d 07 h'."""
    if us < 0:
        return "-" + duration(-us)
    if us < 9_999_500:
        return f"{us / 1e6:.3f} s"
    if us < 59_950_000:
        return f"{us / 1e6:.1f} s"
    seconds = (us + 500_000) // 1_000_000
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02} s"
    if seconds < 48 * 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600:02} h"


def size(bytes_: int) -> str:
    """Bytes as a person says them: '512 B', '1.5 GiB'."""
    amount, unit = float(bytes_), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1000:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.3g} {unit}"


def count(number: int, one: str) -> str:
    """'1 node', '2 nodes'."""
    return f"{number} {one}{'' if number == 1 else 's'}"


def exit_of(exit_code: int) -> str:
    """'killed by SIGKILL', 'exit code 1'."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    known = {one.value: one.name for one in signal.Signals}
    return f"killed by {known.get(-exit_code, f'signal {-exit_code}')}"


def value(one: Any, chars_max: int = VALUE_CHARS_MAX) -> str:
    """One field's value, short."""
    if isinstance(one, str):
        text = one_line(one, chars_max)
        return text if text and " " not in text and "=" not in text else '"' + text.replace('"', "'") + '"'
    if isinstance(one, list):
        return one_line("[" + ",".join(value(item) for item in one) + "]", chars_max)
    if isinstance(one, dict):
        return one_line("{" + ",".join(f"{name}:{value(item)}" for name, item in one.items()) + "}", chars_max)
    return str(one)


def key_values(event: Event) -> str:
    """Every field of an event as ``name=value``, long values cut."""
    return " ".join(f"{name}={value(one)}" for name, one in fields_of(event).items())


def say(event: Event) -> str:
    """An event in words."""
    phrase = _PHRASES.get(type(event))
    return one_line(phrase(event), 1000) if phrase is not None else key_values(event)


def verdict(name: str) -> str:
    """A verdict in words."""
    return VERDICTS.get(name, name)


def action(name: str) -> str:
    """An action in words."""
    return ACTIONS.get(name, name)


def _exited(fact: incidents.WorkerExited) -> str:
    how = exit_of(fact.exit_code) + (", as asked" if fact.asked else "")
    step = f", step {fact.step}" if fact.step >= 0 else ""
    late = f", reported {duration(fact.age_us)} later" if fact.age_us >= 1000 else ""
    return f"rank {fact.rank} on {fact.node}: {how} (generation {fact.generation}{step}){late}"


def _opened(fact: incidents.IncidentOpened) -> str:
    who = (
        f"rank{'s' if len(fact.ranks) > 1 else ''} {', '.join(map(str, fact.ranks))} on {fact.node}"
        if fact.ranks
        else f"node {fact.node}"
    )
    return f"incident {fact.incident}: {who} died in generation {fact.generation}"


def _diagnosed(fact: incidents.Diagnosed) -> str:
    revised = f", revising #{fact.revises}" if fact.revises else ""
    blamed = f", blaming node {fact.blamed}" if fact.blamed else ""
    blamed += f" on {fact.host}" if fact.host else ""
    blamed += f", rank {fact.rank}" if fact.rank >= 0 else ""
    evidence = ", ".join(f"#{seq}" for seq in fact.evidence)
    return (
        f"incident {fact.incident}: {fact.signature} ({fact.verdict}: {verdict(fact.verdict)}; confidence "
        f"{fact.confidence:g}{blamed}) from {evidence}{revised}"
    )


def _chosen(fact: incidents.ActionChosen) -> str:
    host = f" of host {fact.host}" if fact.host else ""
    budget = f"budget {fact.budget}: " if fact.budget else "budget left "
    before = f"{fact.budget_before} -> " if fact.budget_before >= 0 else ""
    return (
        f"incident {fact.incident}: {fact.action} ({action(fact.action)}) for {fact.node}{host}; "
        f"rule {fact.rule}; {budget}{before}{fact.budget_left}"
    )


def _seen(fact: evidence.EvidenceSeen) -> str:
    who = f"rank {fact.rank} on {fact.node}" if fact.rank >= 0 else f"node {fact.node}"
    late = f", {duration(fact.age_us)} earlier" if fact.age_us >= 1000 else ""
    return f"{who} ({fact.source}{late}): {one_line(fact.text)} ({fact.signature}, {fact.verdict})"


def _quarantined(fact: hosts.HostQuarantined) -> str:
    return f"host {fact.host} is kept off until {stamp(fact.until)}{', as asked' if fact.asked else ''}: {fact.reason}"


def stamp(at: int) -> str:
    """Microseconds since the epoch as UTC, to the second: the same wherever it is read."""
    return f"{datetime.fromtimestamp(at // 1_000_000, timezone.utc):%Y-%m-%d %H:%M:%S}Z"


def _formed(fact: world.WorldFormed) -> str:
    members = from_ranges(fact.group, fact.members)
    where = {checkpoints.MEMORY: " in memory", checkpoints.STORAGE: " on storage"}.get(fact.resume_tier, "")
    resume = f", resuming from step {fact.resume_step}{where} or a later one" if fact.resume_step >= 0 else ""
    why, size = fact.reason, members[-1].first_rank + members[-1].nproc
    return f"{fact.group} generation {fact.generation}: {count(len(members), 'node')}, {count(size, 'rank')}{resume} ({why})"


def _dissolved(fact: world.WorldDissolved) -> str:
    how = "stops as planned" if fact.planned else "cannot go on"
    return f"{fact.group} generation {fact.generation} {how}: {fact.reason}"


_LOOK = "ranks are to look for a step boundary"
_GO = "all ranks look for its step boundary: it may be chosen"


def _change(fact: plans.WorldPlanned) -> str:
    said = [("to join", fact.joining), ("to leave", fact.leaving)]
    who = "; ".join(f"{', '.join(names[:SHOWN_NODES_MAX])}{_more(names)} {verb}" for verb, names in said if names)
    return f"planned change {fact.plan} of {fact.group}, until {stamp(fact.deadline)}: {who}"


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - SHOWN_NODES_MAX} more" if len(names) > SHOWN_NODES_MAX else ""


def _closed(fact: incidents.IncidentClosed) -> str:
    lost = ", no step lost"
    if fact.steps_lost:
        lost = f", {count(fact.steps_lost, 'step')} to make again" if fact.steps_lost > 0 else ""
    return f"incident {fact.incident} is over: {duration(fact.down_us)} from death to next step{lost}"


def _failed(fact: nodes.NodeFailed) -> str:
    return f"node {fact.node} failed: {exit_of(fact.exit_code)}{', ' + fact.reason if fact.reason else ''}"


def _gone(fact: nodes.NodeGone) -> str:
    return f"node {fact.node} is gone{', as expected' if fact.expected else ''}: {fact.reason or 'no reason given'}"


def _scaled(fact: job.GroupScaled) -> str:
    places = "the place " if len(fact.revived) == 1 else "the places "
    again = f"; {places}{', '.join(map(str, fact.revived))} given up before, wanted again" if fact.revived else ""
    return f"{fact.group} is to have {operations.sizes(fact.nodes_min, fact.nodes_max)}{again} ({fact.reason})"


def _check(fact: checks.CheckStarted) -> str:
    names = [one.node for part in (fact.nodes, fact.partners) for one in from_ranges(fact.group, part)]
    said = [" with ".join(names[one] for one in group) for group in fact.groups[:SHOWN_GROUPS_MAX]]
    more = f", and {len(fact.groups) - len(said)} more" if len(fact.groups) > len(said) else ""
    return f"node check {fact.number} ({fact.kind}), round {fact.round}: {', '.join(said)}{more} ({fact.why})"


def _check_word(fact: checks.CheckReported) -> str:
    how = f"passed in {duration(fact.took_us)}" if fact.ok else f"failed: {fact.what}"
    return f"node check {fact.number}, round {fact.round}: {fact.node} {how}"


def _check_end(fact: checks.CheckJudged) -> str:
    passed = sum(many for _, many, _, _ in fact.passed)
    found = "; ".join(f"{node} is {CHECKED.get(kind, kind)}: {why}" for node, kind, why in fact.found)
    return f"node check {fact.number}: {count(passed, 'node')} passed{'; ' + found if found else ''}"


TIERS = {
    checkpoints.MEMORY: "its own memory",
    checkpoints.PEER: "the memory of peers",
    checkpoints.DISK: "the local disk",
    checkpoints.STORAGE: "storage",
}


def tier(name: str) -> str:
    """Where a state came from, in words."""
    return TIERS.get(name, name)


def _keeping(fact: checkpoints.KeepingStarted) -> str:
    often = f"every {count(fact.every, 'step')} in memory ({size(fact.node_bytes)} on each node)"
    stored = (
        f"every {count(fact.store_every, 'step')} to {fact.url}" if fact.store_every else f"to {fact.url} when told"
    )
    agreed = "" if fact.planned else "; its ranks cannot agree on a step boundary"
    return f"{fact.group} generation {fact.generation} saves {often}, {stored}{agreed}"


def _committed(fact: checkpoints.CheckpointCommitted) -> str:
    why = "" if fact.why == checkpoints.DUE else f"; {fact.why}"
    parts = f"{count(fact.parts, 'part')}, {size(fact.size)} in {duration(fact.took_us)}"
    return f"step {fact.step} of generation {fact.generation} is a checkpoint: {parts}, at {fact.url}{why}"


def _held(fact: checkpoints.StepsHeld) -> str:
    what = f"step{'s' if len(fact.steps) > 1 else ''} {', '.join(map(str, fact.steps))}" if fact.steps else "no step"
    copies = f" and copies of {count(len(fact.copies), 'peer')}" if fact.copies else ""
    when = f"waits at the boundary of plan {fact.plan} with" if fact.plan else "holds"
    return f"{fact.node} {when} {what} of generation {fact.generation} in memory{copies}"


def _restored(fact: checkpoints.Restored) -> str:
    fell = "".join(f"; {tier(name)} was not good: {why}" for name, why in fact.fell)
    if fact.tier == checkpoints.NOTHING:
        anew = "; what was saved before is of no use" if fell else ""
        return f"{fact.node} began generation {fact.generation} from nothing{anew}{fell}"
    return f"{fact.node} went on from step {fact.step} out of {tier(fact.tier)}, in {duration(fact.took_us)}{fell}"


def _planned(fact: nodes.NodePlanned) -> str:
    avoid = f", not on {', '.join(fact.avoid)}" if fact.avoid else ""
    return f"node {fact.node} should exist{avoid}"


_PHRASES: Mapping[type, Callable[[Any], str]] = {
    CommandRefused: lambda fact: f"{fact.command} was refused: {fact.reason}",
    CommandFailed: lambda fact: f"deciding {fact.command} failed, a bug of ours: {fact.error} in {fact.where}",
    job.JobCreated: lambda fact: f"job {fact.job}, run {fact.run}",
    job.JobAbandoned: lambda fact: f"whoever ran this run is gone: {fact.reason}",
    job.JobStarted: lambda _: "the first world formed",
    job.JobStopping: lambda fact: f"somebody asked the job to stop: {fact.reason}",
    job.JobSuspended: lambda fact: f"somebody suspended the job: {fact.reason}",
    job.JobResumed: lambda fact: f"somebody let the job go on: {fact.reason}",
    job.GroupScaled: _scaled,
    plans.NodeDrained: lambda fact: (
        f"somebody wants {fact.host} free of {fact.node}: {fact.reason}"
        if fact.host
        else f"{fact.node} leaves: {fact.reason}"
    ),
    job.JobStopped: lambda _: "every worker is gone, as asked",
    job.JobSucceeded: lambda fact: f"every worker of generation {fact.generation} ended with exit code 0",
    job.JobFailed: lambda fact: f"{f'incident {fact.incident}: ' if fact.incident else ''}{fact.root}; {fact.reason}",
    job.LeaderStarted: lambda fact: f"master {fact.holder} took over (version {fact.version})",
    job.MasterPaused: lambda fact: f"the master's loop was {duration(fact.late_us)} late; nobody's silence counts",
    job.Archived: lambda fact: f"events {fact.first}-{fact.last} are in the archive",
    nodes.NodePlanned: _planned,
    checks.CheckStarted: _check,
    checks.CheckReported: _check_word,
    checks.CheckJudged: _check_end,
    checks.CheckAsked: lambda fact: (
        f"{', '.join(fact.nodes) or f'all of {fact.group}'} are to be checked before the next world: {fact.why}"
    ),
    nodes.NodePending: lambda fact: f"node {fact.node} was accepted by its backend",
    nodes.NodeRunning: lambda fact: f"node {fact.node} runs{' on ' + fact.host if fact.host else ''}",
    nodes.NodeJoined: lambda fact: (
        f"the agent of {fact.node} joined from {fact.host} with {count(fact.nproc, 'worker')}"
    ),
    silence.NodeSuspected: lambda fact: f"node {fact.node} has been silent for {duration(fact.silent_us)}",
    silence.NodeHeard: lambda fact: f"node {fact.node} speaks again",
    nodes.NodeSucceeded: lambda fact: f"node {fact.node} ended well",
    nodes.NodeFailed: _failed,
    nodes.NodeGone: _gone,
    nodes.NodeLost: lambda fact: f"node {fact.node} was given up: {fact.reason}",
    nodes.NodeReleased: lambda fact: f"node {fact.node} should no longer exist: {fact.reason}",
    nodes.NodeLeft: lambda fact: f"the agent of {fact.node} stopped its workers and left",
    silence.MassSilence: lambda fact: (
        f"{fact.suspects} of {fact.nodes} nodes silent at once: the master suspects itself"
    ),
    nodes.PlaceReopened: lambda fact: (
        f"place {fact.group}-{fact.index} was given up long ago: any host may have it now"
    ),
    world.WorldFormed: _formed,
    world.WorldDissolved: _dissolved,
    plans.WorldPlanned: _change,
    plans.WorldPlanDropped: lambda fact: f"planned change {fact.plan} of {fact.group} is off: {fact.reason}",
    plans.BoundaryAsked: lambda fact: f"planned change {fact.plan} of {fact.group}: {_GO if fact.go else _LOOK}",
    world.WorkersStarted: lambda fact: f"the workers of {fact.node} run in generation {fact.generation}",
    world.WorkersStopped: lambda fact: (
        f"the workers of {fact.node} in generation {fact.generation} were stopped, as ordered"
    ),
    world.WorkersFinished: lambda fact: (
        f"the workers of {fact.node} in generation {fact.generation} ended with exit code 0"
        f"{fact.unstored and f', but {fact.unstored}'}"
    ),
    world.StoreOffered: lambda fact: f"{fact.node} offers a store at {fact.address}",
    world.StoreWithdrawn: lambda fact: f"{fact.node} has lost its store at {fact.address}",
    incidents.WorkerExited: _exited,
    incidents.IncidentOpened: _opened,
    budgets.RestartsSpent: lambda fact: (
        f"{fact.node}: whoever starts its workers has no restarts left (generation {fact.generation})"
    ),
    evidence.EvidenceSeen: _seen,
    hosts.HostQuarantined: _quarantined,
    hosts.HostReleased: lambda fact: f"host {fact.host} may be used again ({fact.how}): {fact.reason}",
    incidents.Diagnosed: _diagnosed,
    incidents.ActionChosen: _chosen,
    incidents.IncidentClosed: _closed,
    checkpoints.KeepingStarted: _keeping,
    checkpoints.CheckpointCommitted: _committed,
    checkpoints.StorageFailed: lambda fact: (
        f"{fact.node} cannot write checkpoints to {fact.url}: {fact.reason}; training goes on"
    ),
    checkpoints.StorageBack: lambda fact: f"{fact.node} writes checkpoints to {fact.url} again",
    checkpoints.ReplicaOffered: lambda fact: f"{fact.node} keeps copies of a peer's state, at {fact.address}",
    checkpoints.StepsHeld: _held,
    checkpoints.SaveOrdered: lambda fact: (
        f"step {fact.step} of generation {fact.generation}, whole in memory, is to be written to storage: {fact.why}"
    ),
    checkpoints.Restored: _restored,
    checkpoints.RanksArmed: lambda fact: f"all ranks of {fact.node} look for the boundary of plan {fact.plan}",
    progress.FirstStep: lambda fact: (
        f"generation {fact.generation} made its first step, step {fact.step}, on {fact.node}"
    ),
    stragglers.SlowRank: lambda fact: (
        f"rank {fact.rank} on {fact.node} computes {fact.now_us / max(1, fact.before_us):.2f}x slower than it did: "
        f"{fact.now_us / 1000:.3g} ms a step, {fact.before_us / 1000:.3g} ms before"
    ),
    stragglers.SlowEnded: lambda fact: (
        f"rank {fact.rank} on {fact.node} computes as it did again, after {duration(fact.slow_us)}"
    ),
    stragglers.SlowReplaced: lambda fact: (
        f"{fact.node} is replaced: its slow rank {fact.rank} has cost {duration(fact.lost_us)}, as much as replacing it: "
        f"{duration(fact.cost_us)}, {'measured' if fact.measured else 'by the spec'}"
    ),
    stragglers.LossBroken: lambda fact: (
        f"no finite loss from step {fact.step} on: {count(fact.ranks, 'rank')} of {fact.reporting} had it first, "
        f"rank {fact.rank} on {fact.node} among them"
    ),
    progress.Progressed: lambda fact: f"generation {fact.generation} reached step {fact.step}",
}

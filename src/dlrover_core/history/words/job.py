"""Events of the job's life in words."""

from __future__ import annotations

from dlrover_core.history.phrases import duration
from dlrover_core.history.words import Ends, Follows, Keys, Words
from dlrover_core.job import job, operations


def _scaled(fact: job.GroupScaled) -> str:
    places = "the place " if len(fact.revived) == 1 else "the places "
    again = f"; {places}{', '.join(map(str, fact.revived))} given up before, wanted again" if fact.revived else ""
    return f"{fact.group} is to have {operations.sizes(fact.nodes_min, fact.nodes_max)}{again} ({fact.reason})"


WORDS: Words = {
    job.JobCreated: lambda fact: f"job {fact.job}, run {fact.run}",
    job.JobAbandoned: lambda fact: f"the launcher of this run is gone: {fact.reason}",
    job.SetGivenUp: lambda fact: f"{fact.set} is given up, the job goes on without it: {fact.root}; {fact.reason}",
    job.JobStarted: lambda _: "the first world formed",
    job.JobStopping: lambda fact: f"the job was asked to stop: {fact.reason}",
    job.SuspensionPlanned: lambda fact: (
        f"the job will be suspended at its next step boundary, and its nodes released: {fact.reason}"
    ),
    job.JobSuspended: lambda fact: (
        f"the job was suspended{', and its nodes are released' if fact.frees else ''}: {fact.reason}"
    ),
    job.JobResumed: lambda fact: f"the job was resumed: {fact.reason}",
    job.GroupScaled: _scaled,
    job.JobStopped: lambda _: "every worker is gone, as asked",
    job.JobSucceeded: lambda fact: f"every worker of generation {fact.generation} ended with exit code 0",
    job.JobFailed: lambda fact: f"{f'incident {fact.incident}: ' if fact.incident else ''}{fact.root}; {fact.reason}",
    job.LeaderStarted: lambda fact: f"master {fact.holder} took over (version {fact.version})",
    job.MasterPaused: lambda fact: (
        f"the master's loop was {duration(fact.late_us)} late; silence of nodes does not count"
    ),
    job.Archived: lambda fact: f"events {fact.first}-{fact.last} are in the archive",
}

KEYS: Keys = dict.fromkeys((job.JobStopping, job.SuspensionPlanned, job.JobSuspended), lambda _: None)
ENDS: Ends = dict.fromkeys((job.JobSuspended, job.JobResumed), (job.SuspensionPlanned, lambda _: None))
FOLLOWS: Follows = {
    job.JobStopped: lambda _, known: (known.newest(job.JobStopping),),
    job.JobSuspended: lambda _, known: (known.newest(job.SuspensionPlanned),),
    job.JobResumed: lambda _, known: (known.newest(job.SuspensionPlanned) or known.newest(job.JobSuspended),),
}

"""A long hunt for faults: ``python -m tools.campaign NAME [--trials N] [--seed FIRST] [--jobs N] [--seconds S]``.

Each trial is one seed. The result grows in benchmarks/results/NAME.json after every trial or so; run the same command again
to go on where it stopped (Ctrl-C is fine). Exit 1 when any trial broke a promise; its seed and error are in the result.

campaigns:
  chaos    1,000 simulated jobs of 64 nodes under drawn faults, every promise asked after every event; what breaks one is shrunk;
           on all cores, some minutes
  seeds    random jobs and faults in virtual time, every invariant checked, each tenth seed told twice; thousands a minute
  joining_seeds
           the same for jobs whose hosts come by themselves: deaths, power cuts, silence, and who takes over
  groups_seeds
           the same for jobs of several groups, on too few hosts for a while: each tenth with the real masters and agents
  queue_seeds
           two jobs that share hosts which are too few for both, with the real masters and agents, under drawn faults: both must
           end well
  k8s_seeds
           the Kubernetes backend against an API server that refuses, loses answers, forgets its history, freezes and dies, while
           pods and masters die: one living pod per place at any time, one relaunch per death; about ten minutes
  operator_seeds
           the operator of ElasticJobs against such a server, while objects are edited and operators die: nothing is made twice,
           sizes and pauses are as asked, and a deleted job takes all of its own along; about ten minutes
  ray_seeds
           200 real jobs in Ray clusters of three raylets: workers, agents, actors, raylets, the desk and masters are killed,
           hosts drained and added, the state service is away for a while; no rank twice, nothing left; about three hours
  data_seeds
           random jobs with data under deaths, fail-overs, changes of their size, fallen tiers: no sample is lost or twice in the
           lineage of a model, the log says so of every state, and the audit proves it; about half an hour
  lease_seeds
           random jobs whose ranks draw leases at their own paces, under deaths, fail-overs, drains, changes of their size, lost
           parts of states: no sample is lost or twice in the lineage of a model, and the audit proves it; about half an hour
  data_kills
           200 real jobs that train on an ElasticDataset; workers, agents and masters are killed, the job is scaled; the samples
           that entered the steps of the lineage must be an undisturbed job's, and the audit's; about an hour
  lease_kills
           200 real jobs that lease samples, two of three with a model; workers, agents and masters are killed, the job is
           scaled; each sample is in the model once, or is used, twice only where the log says so; an hour and a half
  kafka_kills
           50 real jobs that train from a topic of a real broker; workers, agents and masters are killed, the broker is stopped
           for a while; each message is in the lineage once, and the audit proves it; about twenty minutes
  queue    six hours of virtual time in a queue for two jobs that want 96 of 64 hosts, 20 times: what waiting costs, and how soon
           each starts once there is room; a few minutes
  kills    one real job, and 200 (--trials) times SIGKILL for one of our processes at seeded moments; the loss curve must be an
           undisturbed run's, and nothing may be left; about ten minutes
  hangs    200 hangs of one rank in real jobs: in a receive, in a lock, with Python's lock held, stopped; each must be found,
           named and recovered from without help; about twenty minutes
  local_chaos
           50 real jobs, each under three to six faults of real processes, links and disks; every step has its value, the
           log keeps every promise, nothing is left; about fifteen minutes
  planted  bugs are planted in our code, one at a time, and up to 1,000 seeds each have to find them; how each was found, and what
           was left of it when it was shrunk, is in the result; about ten minutes
  misleading
           1,000 jobs that lose a rank or a host among evidence that misleads, told late and in any order; no innocent host may be
           kept off, and none of its nodes replaced; half a minute
  saves    1,000 times one or two of two or four ranks are killed at random instructions of a save into memory; a state that
           is whole on all ranks is always left, and none is mixed or torn; about ten minutes
  etcd_log a new etcd for each of 570 trials: its members are killed, stopped and cut off, its leases revoked, its space used up,
           while candidates write and others follow; nothing acknowledged is lost or doubled; about an hour
  corruption
           10,000 times one thing is damaged in a stored checkpoint or in a slot in memory: a bit, a file, a manifest; every one
           must be noticed, and nothing else be called damaged; some minutes
  borders  a million foreign words (half characters, NUL, escape sequences, 100 kB) as messages, names and lines at every border:
           no death, no hang, no traceback, and nothing that a terminal obeys; some minutes
  matrix   every cell of tests/matrix: 15 kinds of training on one and two nodes, each killed in five ways; the curve and all full
           tensors must be those of a run without us; nothing is drawn, --trials counts cells; under half an hour
  storms   5 real jobs of 2 nodes x 2 ranks, side by side: for 20 minutes their processes are killed and stopped at random; every
           loss, sampler position and random number must be an undisturbed run's, bit for bit; nothing may be left
  rough    5 real jobs, side by side, for an hour: kills, stops, clocks that jump, full and stalling disks, limits, strangers,
           and on several hosts a bad network and a bad etcd; a witness that imports nothing of ours finds nothing wrong
  ends     200 undisturbed jobs end right after a due save, their ranks up to 500 ms apart, with 10 to 500 MB; the last state must
           be on storage, for FlashCheckpoint, FlashTrainer and Lightning; about twenty minutes
  restarts 10 jobs of 2 nodes lose a worker or a node; every checkpoint that is due in the 60 s after must be on storage; some
           minutes
  masters  a real etcd of three members, masters on three hosts, training on two: members and masters are killed, stopped and
           cut off, 200 times, and 100 times two masters start at once; the logs of all must be one; about an hour
  mutations
           some forty bugs are planted in a copy of our code, one at a time, and the tests that are named for each must fail;
           about ten minutes
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
Trial = Callable[[int], dict[str, Any]]
SAVE_S = 2.0


def _seeds(seed: int) -> dict[str, Any]:
    from tests.chaos.seeds import trial

    told = trial(seed)
    assert seed % 10 or trial(seed) == told, "the same seed gave two histories"
    return told


def _joining_seeds(seed: int) -> dict[str, Any]:
    from tests.chaos.joining_seeds import trial

    told = trial(seed)
    assert seed % 10 or trial(seed) == told, "the same seed gave two histories"
    return told


def _groups_seeds(seed: int) -> dict[str, Any]:
    from tests.chaos.groups_seeds import trial

    told = trial(seed)
    assert seed % 10 or trial(seed) == told, "the same seed gave two histories"
    return told


def _queue_seeds(seed: int) -> dict[str, Any]:
    from tests.chaos.queue_seeds import trial

    told = trial(seed)
    assert seed % 10 or trial(seed) == told, "the same seed gave two histories"
    return told


def _k8s_seeds(seed: int) -> dict[str, Any]:
    from tests.chaos.k8s_seeds import trial

    return trial(seed)


def _operator_seeds(seed: int) -> dict[str, Any]:
    from tests.chaos.operator_seeds import trial

    return trial(seed)


def _data_seeds(seed: int) -> dict[str, Any]:
    from tests.chaos.data_seeds import trial

    told = trial(seed)
    assert seed % 10 or trial(seed) == told, "the same seed gave two histories"
    return told


def _lease_seeds(seed: int) -> dict[str, Any]:
    from tests.chaos.lease_seeds import trial

    told = trial(seed)
    assert seed % 10 or trial(seed) == told, "the same seed gave two histories"
    return told


def _data_kills(seed: int) -> dict[str, Any]:
    from tools.campaign_data import trial

    return trial(seed)


def _lease_kills(seed: int) -> dict[str, Any]:
    from tools.campaign_leases import trial

    return trial(seed)


def _kafka_kills(seed: int) -> dict[str, Any]:
    from tools.campaign_kafka import trial

    return trial(seed)


def _etcd_log(seed: int) -> dict[str, Any]:
    from tools.campaign_etcd import trial

    return trial(seed)


def _local_chaos(seed: int) -> dict[str, Any]:
    from tools.campaign_local import trial

    return trial(seed)


def _corruption(seed: int) -> dict[str, Any]:
    from tools.campaign_corruption import trial

    return trial(seed)


def _borders(seed: int) -> dict[str, Any]:
    from tools.campaign_borders import trial

    return trial(seed)


def _misleading(seed: int) -> dict[str, Any]:
    from tests.chaos.misleading_seeds import trial

    return trial(seed)


CAMPAIGNS: dict[str, tuple[Trial, int]] = {
    "borders": (_borders, 2_800),
    "corruption": (_corruption, 10_000),
    "seeds": (_seeds, 10_000),
    "joining_seeds": (_joining_seeds, 10_000),
    "groups_seeds": (_groups_seeds, 10_000),
    "data_seeds": (_data_seeds, 10_000),
    "lease_seeds": (_lease_seeds, 10_000),
    "data_kills": (_data_kills, 200),
    "lease_kills": (_lease_kills, 200),
    "kafka_kills": (_kafka_kills, 50),
    "queue_seeds": (_queue_seeds, 10_000),
    "k8s_seeds": (_k8s_seeds, 500),
    "operator_seeds": (_operator_seeds, 500),
    "etcd_log": (_etcd_log, 570),
    "local_chaos": (_local_chaos, 50),
    "misleading": (_misleading, 1_000),
}


def _kills(seed: int, trials: int) -> int:
    from tools.campaign_kills import KILLS, campaign

    return campaign(seed, trials or KILLS, machine())


def _hangs(seed: int, trials: int) -> int:
    from tools.campaign_hangs import TRIALS, campaign

    return campaign(seed, trials or TRIALS, machine())


def _masters(seed: int, trials: int) -> int:
    from tools.campaign_masters import TRIALS, campaign

    return campaign(seed, trials or TRIALS, machine())


def _matrix(seed: int, trials: int) -> int:
    from tools.campaign_matrix import campaign

    return campaign(seed, trials, machine())


def _saves(seed: int, trials: int) -> int:
    from tools.campaign_saves import TRIALS, campaign

    return campaign(seed, trials or TRIALS, machine())


def _chaos(seed: int, trials: int) -> int:
    from tools.campaign_chaos import TRIALS, campaign

    return campaign(seed, trials or TRIALS, machine())


def _planted(seed: int, trials: int) -> int:
    from tests.chaos.planted import TRIALS, campaign

    return campaign(seed, trials or TRIALS, RESULTS / "planted.json", machine())


def _queue(seed: int, trials: int) -> int:
    from tools.campaign_queue import TRIALS, campaign

    return campaign(seed, trials or TRIALS, machine())


WHOLE: dict[str, Callable[[int, int], int]] = {
    "chaos": _chaos, "hangs": _hangs, "kills": _kills, "masters": _masters, "matrix": _matrix, "planted": _planted,
    "queue": _queue, "saves": _saves,
}  # fmt: skip
"""Campaigns that save themselves."""


def _storms(options: argparse.Namespace) -> int:
    from tools.campaign_storms import JOBS, SECONDS, SEEDS, campaign

    seconds = options.seconds or SECONDS
    return campaign(options.seed, options.trials or SEEDS, machine(), options.jobs or JOBS, seconds)


def _rough(options: argparse.Namespace) -> int:
    from tools.campaign_rough import JOBS, SECONDS, SEEDS, campaign

    seconds = options.seconds or SECONDS
    return campaign(options.seed, options.trials or SEEDS, machine(), options.jobs or JOBS, seconds)


def _ends(options: argparse.Namespace) -> int:
    from tools.campaign_ends import JOBS, TRIALS, campaign

    return campaign(options.seed, options.trials or TRIALS, machine(), options.jobs or JOBS)


def _restarts(options: argparse.Namespace) -> int:
    from tools.campaign_restarts import JOBS, SECONDS, TRIALS, campaign

    seconds = options.seconds or SECONDS
    return campaign(options.seed, options.trials or TRIALS, machine(), options.jobs or JOBS, seconds)


def _ray_seeds(options: argparse.Namespace) -> int:
    from tools.campaign_ray import JOBS, SEEDS, campaign

    return campaign(options.seed, options.trials or SEEDS, machine(), options.jobs or JOBS)


def _mutations(options: argparse.Namespace) -> int:
    from tools.mutations import JOBS, MUTATIONS, campaign

    return campaign(options.seed, options.trials or len(MUTATIONS), machine(), options.jobs or JOBS)


SIDE: dict[str, Callable[[argparse.Namespace], int]] = {
    "ends": _ends, "mutations": _mutations, "ray_seeds": _ray_seeds, "restarts": _restarts, "rough": _rough,
    "storms": _storms,
}  # fmt: skip
"""Campaigns that save themselves, and run several trials side by side."""


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    return {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}


class Campaign:
    """One campaign's result, on disk and resumable."""

    def __init__(self, name: str, first: int, trials: int) -> None:
        self._path, self._trial = RESULTS / f"{name}.json", CAMPAIGNS[name][0]
        self._result: dict[str, Any] = {
            "campaign": name,
            "seed": first,
            "machine": machine(),
            "trials": 0,
            "failures": {},
            "sums": {},
            "took_s": 0.0,
        }
        if self._path.exists():
            before = json.loads(self._path.read_text())
            if before["seed"] == first and before["trials"] < trials:
                self._result = before
        self._end = first + trials

    def run(self) -> int:
        """All trials that are still missing; how many broke a promise in all."""
        result, saved = self._result, time.monotonic()
        for seed in range(result["seed"] + result["trials"], self._end):
            began = time.monotonic()
            try:
                for key, value in self._trial(seed).items():
                    if isinstance(value, int):
                        result["sums"][key] = result["sums"].get(key, 0) + value
            except Exception as error:  # noqa: BLE001  # whatever it is, it is a find
                result["failures"][str(seed)] = f"{type(error).__name__}: {error}"[:500]
            result["trials"] += 1
            result["took_s"] = round(result["took_s"] + time.monotonic() - began, 3)
            if time.monotonic() - saved > SAVE_S:
                saved = time.monotonic()
                self._save()
        self._save()
        print(file=sys.stderr)
        return len(result["failures"])

    def _save(self) -> None:
        result = self._result
        RESULTS.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(result, indent=1) + "\n")
        line = f"{result['campaign']}: {result['trials']} trials, {len(result['failures'])} failures, sums {result['sums']}"
        print(f"\r{line}", end="", file=sys.stderr, flush=True)


def main() -> int:
    """Hunt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted([*CAMPAIGNS, *WHOLE, *SIDE]))
    parser.add_argument("--trials", type=int, default=0, help="how many seeds (default: the campaign's full size)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=0, help=f"trials side by side, of {', '.join(sorted(SIDE))}")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help="of each storm (1200) or rough world (3600), or after each restart (60)",
    )
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        if options.name in SIDE:
            return SIDE[options.name](options)
        if options.name in WHOLE:
            return WHOLE[options.name](options.seed, options.trials)
        campaign = Campaign(options.name, options.seed, options.trials or CAMPAIGNS[options.name][1])
        return 1 if campaign.run() else 0
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

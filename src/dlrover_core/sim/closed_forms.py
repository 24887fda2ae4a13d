"""What theory says of goodput, for a simulation to be held against. All times in seconds.

``mttf``: mean time between failures of the job; ``tau``: useful time between two checkpoints; ``stall``: how long training stands
still for one; ``restart``: from a failure to training again.
"""

from __future__ import annotations

import math

DAY_S = 86_400.0


def mttf_s(nodes: int, rate: float) -> float:
    """The job's mean time to failure: hazards of independent nodes add up. ``rate``: failures per 1000 node-days.

    Kokolis et al., arXiv 2410.21680, section on job-level reliability: MTTF = 1 / (N r_f).
    """
    return math.inf if not nodes * rate else DAY_S * 1000 / (nodes * rate)


def young_s(stall: float, mttf: float) -> float:
    """The best time between checkpoints, to first order: sqrt(2 stall mttf).

    J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM 17 (1974).
    """
    return math.sqrt(2 * stall * mttf)


def daly_s(stall: float, mttf: float) -> float:
    """The same with higher orders, good until the stall is twice the mean time to failure.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006).
    """
    if stall >= 2 * mttf:
        return mttf
    ratio = stall / (2 * mttf)
    return young_s(stall, mttf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def ettr_first_order(mttf: float, tau: float, stall: float, restart: float, queue: float = 0.0) -> float:
    """Effective training time ratio where failures are rare: each costs a restart, a queue, half of ``tau``.

    Kokolis et al., arXiv 2410.21680, expected ETTR.
    """
    return max(0.0, 1 - (restart + queue + tau / 2) / mttf) / (1 + stall / tau)


def ettr_exact(mttf: float, tau: float, stall: float, restart: float, queue: float = 0.0) -> float:
    """Effective training time ratio of exponential failures; none strikes during a restart.

    A segment of ``tau + stall`` survives with p = exp(-(tau + stall) / mttf); p / (1 - p) of them are kept between two failures,
    that is per ``mttf + restart + queue`` of time. The renewal argument behind Daly's model.
    """
    cycle = (tau + stall) / mttf
    return tau / ((mttf + restart + queue) * math.expm1(cycle))


def replica_survival(nodes: int, group: int, lost: int) -> float:
    """The chance that peers' copies suffice when so many of the nodes are lost at once: no group of ``group`` is lost whole.

    To first order, as in Wang et al., GEMINI, SOSP 2023: 1 - (N/m) C(N-m, k-m) / C(N, k).
    """
    if lost < group:
        return 1.0
    return max(0.0, 1 - nodes / group * math.comb(nodes - group, lost - group) / math.comb(nodes, lost))

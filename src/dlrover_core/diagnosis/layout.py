"""Which rank of the job a host's local rank is, from what launchers print: their arguments, their tables, their summaries.

Ranks of a host are consecutive in all of these launchers: rank = first rank of the host + local rank. The first rank is told by a
summary that gives both (`rank: 11 (local_rank: 3)`), by a list of ranks, or by the host's number times the processes of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dlrover_core.diagnosis.launchers import Ended

# Words without which a line says nothing of it: a cheap test.
_MAY = re.compile(
    r"rank|RANK|nproc|num_local_procs|GPUS_PER_NODE|LOCAL_WORLD_SIZE|nnodes|NNODES|NODEID|group_world_size"
)
_FIRST = re.compile(r"\b(?<!_)global_ranks=\[(\d{1,6})[,\]]")
_NUMBER = re.compile(
    r"(?:--(?:node|machine)[_-]rank|\b(?:NODE|GROUP|MACHINE)_RANK|\bSLURM_NODEID|\bgroup_rank|\bnode_rank)[= :]{1,3}(\d{1,5})\b"
)
_EACH = re.compile(
    r"(?:--nproc[_-]per[_-]node|\bnproc_per_node|\bnum_local_procs|\bGPUS_PER_NODE|\bLOCAL_WORLD_SIZE)[= :]{1,3}(\d{1,3})\b"
)
_HOSTS = re.compile(
    r"(?:--(?:nnodes|num_machines)|\bnnodes|\bNNODES|\bgroup_world_size)[= :]{1,3}(?:\d{1,5}:)?(\d{1,5})\b"
)
_TABLE = re.compile(r"'([\w.-]{1,120})': \[(\d{1,6})[,\]]")


class Layout(NamedTuple):
    """Who is where. ``first``: the first rank of each host; ``alone``: of the only host that wrote, -1 where it is not told;
    ``several``: the job has more hosts than one.
    """

    first: Mapping[str, int]
    alone: int = -1
    several: bool = False

    def rank(self, host: str, local: int) -> int:
        """The rank of a local rank. On a job's only host they are the same; -1: nobody says."""
        if host in self.first:
            return self.first[host] + local
        if self.alone >= 0:
            return self.alone + local
        return -1 if self.several else local


def learn(lines: Iterable[str], ends: Iterable[Ended]) -> Layout:
    """What the lines and the ends that they tell of say of it. What contradicts itself is not believed."""
    first: dict[str, set[int]] = {}
    alone: set[int] = set()
    numbers: set[int] = set()
    each: set[int] = set()
    hosts = 1
    for line in lines:
        if not _MAY.search(line):
            continue
        alone.update(map(int, _FIRST.findall(line)))
        numbers.update(map(int, _NUMBER.findall(line)))
        each.update(map(int, _EACH.findall(line)))
        hosts = max([hosts, *map(int, _HOSTS.findall(line))])
        if "rank_mapping" in line:
            for host, rank in _TABLE.findall(line):
                first.setdefault(host, set()).add(int(rank))
    for one in ends:
        if one.rank >= one.local >= 0:
            first.setdefault(one.host, set()).add(one.rank - one.local)
    told = {host: next(iter(ranks)) for host, ranks in first.items() if len(ranks) == 1 and host}
    if not alone and len(numbers) == len(each) == 1:
        alone = {numbers.pop() * each.pop()}
    elif not alone and len(told) == 1:
        alone = set(told.values())
    return Layout(told, alone.pop() if len(alone) == 1 else -1, hosts > 1)

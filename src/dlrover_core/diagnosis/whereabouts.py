"""Who is where, as far as one file tells: ranks, hosts, GPUs and pods, and whom a line is about."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from dlrover_core.diagnosis import launchers, layout, who
from dlrover_core.diagnosis.evidence import KERNEL, PLATFORM
from dlrover_core.diagnosis.offline import Observation
from dlrover_core.diagnosis.rows import Row, rank_of_file
from dlrover_core.diagnosis.who import Who

_BUS = re.compile(r"\brank (\d+) nranks (\d+) .{0,80}\bbusId (\w+)")
_NCCL_RANK = re.compile(r"\brank (\d+) nranks (\d+)\b")
_FILE_HOST = re.compile(
    r"(?:^|[._-])((?:node|gpu|host|dgx|hgx|cn|gn|nid|worker|compute|server|pod)[-_]?[a-z0-9-]*\d)(?:[._-](?:stdout|stderr|out|err|log|txt|gz|dmesg|kernel|journal))*$"
)


class Whereabouts:
    """Who is where.

    ``rows``: the file's, with the ranks that launchers told; ``hosts``: how many lines each host wrote.
    ``rank``, ``host``: of all of the file, or -1 and empty; ``surrogate``: the file's name, which stands for an unknown node.
    ``gpus``: the rank at a host's PCI address, by what NCCL said.
    """

    def __init__(self, name: str, rows: Sequence[Row], pod: str, ends: Sequence[launchers.Ended]) -> None:
        """``name``: the file's; ``pod``: the one that all of it is from, or empty; ``ends``: what launchers told in it."""
        self.host_of: dict[int, str] = {}
        self.rank_of: dict[tuple[str, int], int] = {}
        self.rank_of_pid: dict[tuple[str, int], int] = {}
        self.gpus: dict[str, int] = {}
        self.hosts: Counter[str] = Counter()
        self.pod = pod
        self.layout = layout.learn((row.body for row in rows), ends)
        self.rows = [self._ranked(row) for row in rows]
        self._learn(ends)
        self.rank = rank_of_file(name)
        self.surrogate = name.rsplit("/", 1)[-1]
        self.host = self._host()

    def _learn(self, ends: Sequence[launchers.Ended]) -> None:
        for row in self.rows:
            body, its = row.body, row.who
            if its.host:
                self.hosts[its.host] += 1
                if its.rank >= 0:
                    self.host_of.setdefault(its.rank, its.host)
            if "nranks" in body:
                ranked = _NCCL_RANK.search(body)
                if ranked is not None and its.host:
                    rank = int(ranked[1])
                    self.host_of.setdefault(rank, its.host)
                    self.rank_of_pid.setdefault((its.host, its.pid), rank)
                    if its.device >= 0:
                        self.rank_of.setdefault((its.host, its.device), rank)
                bus = _BUS.search(body)
                if bus is not None:
                    self.gpus.setdefault(f"{its.host} {bus[3].lower()}", int(bus[1]))
        for ended in ends:
            if ended.host:
                self.hosts[ended.host] += 1
                if ended.rank >= 0:
                    self.host_of[ended.rank] = ended.host
                    if ended.local >= 0:
                        self.rank_of[ended.host, ended.local] = ended.rank

    def _ranked(self, row: Row) -> Row:
        """A row of whose writer only the rank on its host is told, with the rank in the job."""
        its = row.who
        if its.local < 0 or its.rank != its.local:
            return row
        return row._replace(who=its._replace(rank=self.layout.rank(its.host, its.local)))

    def _host(self) -> str:
        """The machine that the whole file is about, or empty."""
        named = _FILE_HOST.search(self.surrogate)
        if len(self.hosts) == 1:
            return next(iter(self.hosts))
        return named[1] if named is not None and not self.hosts and self.rank < 0 else ""

    def placed(self, at_s: float, source: str, its: Who, text: str, line: str) -> Observation:
        """An observation with rank, node and host, as far as they are known."""
        host = its.host
        rank = its.rank if its.rank >= 0 else self.rank
        if rank < 0 and host and its.pid:
            rank = self.rank_of_pid.get((host, its.pid), -1)
        if rank < 0 and its.device >= 0 and host:
            rank = self.rank_of.get((host, its.device), -1)
        if source in (KERNEL, PLATFORM):
            host = host or who.host_named(line) or self.host
            pod = its.pod or who.pod_named(line.replace(self.pod, "") if self.pod else line)
            return Observation(at_s, source, pod or host or self.surrogate, host, -1, text)
        if rank < 0:
            rank = who.rank_named(line)
        host = host or (self.host_of.get(rank, "") if rank >= 0 else "") or self.host
        return Observation(at_s, source, its.pod or host or self.surrogate, host, rank, text)

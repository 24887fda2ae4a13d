"""Leases under deaths of workers, nodes and masters, slow nodes, lost and late words: nothing is lost, repetitions are told."""

from __future__ import annotations

from random import Random

import pytest
from drive import Drive

from dlrover_core.job.leases import Leased, LeaseGranted, LeaseReturned, Leases, RecallLease
from dlrover_core.job.nodes import ReportLeft
from dlrover_core.job.operations import DrainNode
from dlrover_core.job.shards import LEASE, RegisterDataset
from dlrover_core.rules.desired import desired
from dlrover_core.runtime.leasing import LeaseBeat, Leasing
from dlrover_core.runtime.levels import Beat
from dlrover_core.testing.leasing import Node, Uses

TICK_S = 0.1
MOST_TICKS = 6_000
SIZE, EPOCHS, SHARD = 700, 2, 4


class Play:
    """Three nodes, two workers each, one node slower than the others, and a seed that says who dies when."""

    def __init__(self, seed: int, *, deaths: int = 6, size: int = SIZE, recalls: float = 0.3) -> None:
        self.random, self.uses, self.size = Random(seed), Uses(), size
        self.drive = Drive(nodes_max=3, nproc=1, relaunch_max=50, max_restarts=100).up()
        self.leasing = Leasing()
        self.recalls = recalls
        self.nodes = {name: self._node(name) for name in self.drive.state.nodes.nodes}
        self.drive.do(RegisterDataset("worker-0-0", 1, "train", size, 7, "shuffled", "", EPOCHS, 0, LEASE))
        self.deaths = sorted(self.random.uniform(0, size * EPOCHS / 70) for _ in range(deaths))
        self.late: list[tuple[str, LeaseBeat]] = []
        self.ticks = 0

    def _node(self, name: str) -> Node:
        pace = 15.0 * (1 / 3 if name.startswith("worker-2") else 1)
        return Node(name, self.uses, self.random, shard=SHARD, rates=(pace, pace))

    @property
    def leased(self) -> Leased:
        """The dataset, as the log has it."""
        return self.drive.state.leases.of("worker")["train"]

    def play(self) -> Play:
        """Until all workers have heard the end."""
        while not all(worker.heard_end for node in self.nodes.values() for worker in node.workers):
            self.ticks += 1
            assert self.ticks < MOST_TICKS, f"it does not end: {self.leased}"
            self.drive.now += round(TICK_S * 1e6)
            while self.deaths and self.deaths[0] <= self.ticks * TICK_S:
                self.deaths.pop(0)
                self._strike()
            self._tick()
            assert not list(self.drive.state.leases.check())
        assert "CommandFailed" not in self.drive.names(self.drive.records)
        return self

    def _tick(self) -> None:
        now_s = self.ticks * TICK_S
        for name, node in self.nodes.items():
            starved = node.work(now_s)
            if any(worker.heard_end for worker in node.workers):
                assert self.leased.finished, "a worker heard of an end too soon"
            if starved or self.random.random() < 0.2:
                self._say(name, node.beat(now_s))
        self._decide()
        for name, node in self.nodes.items():
            if self.random.random() < 0.5:  # an order is a level: one that is lost comes again
                node.ordered(desired(self.drive.state).orders[name].part(Leases))

    def _say(self, node: str, said: LeaseBeat) -> None:
        if self.random.random() < 0.2:
            self.late.append((node, said))  # it comes again later, when it is not true any more
        if self.random.random() < 0.8:
            self._hear(node, said)
        if self.late and self.random.random() < 0.2:
            self._hear(*self.late.pop(self.random.randrange(len(self.late))))

    def _hear(self, node: str, said: LeaseBeat) -> None:
        if node in self.drive.state.nodes.nodes:
            self.leasing.heard(self.drive.state, node, Beat(1, 1, 0, (said,)))

    def _decide(self) -> None:
        for command in list(self.leasing.findings(self.drive.state, self.drive.now)):
            self.drive.do(command)
        if self.random.random() < self.recalls:  # a leader that asks for more, and more often, than ours does
            names = sorted(self.nodes)
            many = self.random.randrange(1, self.size)
            self.drive.do(RecallLease(self.random.choice(names), "train", many, names[0]))

    def _strike(self) -> None:
        kind = self.random.choice(("worker", "node", "master", "leave"))
        name = self.random.choice(sorted(self.nodes))
        if kind == "worker":
            self.nodes[name].kill_worker(self.drive.do)
        elif kind == "master":
            self.drive.take_over()
            self.leasing = Leasing()
        else:
            if kind == "leave":
                self.drive.do(DrainNode(name, "its host is repaired"))
                self.nodes.pop(name).leave(self.drive.do)
                self.drive.do(ReportLeft(name))
                self.drive.observe(name, "gone")
            else:
                self.nodes.pop(name).die()
                self.drive.observe(name, "gone", 137, "killed")
            self.leasing.forget(name)
            self.drive.wait(60)
            for new in [one for one in self.drive.state.nodes.nodes if one not in self.nodes and one != name]:
                self.drive.observe(new, "running")
                self.drive.join(new)
                self.nodes[new] = self._node(new)
            self.drive.run(1)

    def check(self) -> None:
        """Every position was used and acknowledged; what was used again was told."""
        assert self.leased.finished
        assert set(range(self.size * EPOCHS)) == set(self.uses.times)
        self.uses.compare(self.leased)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_and_repetitions_are_told(seed: int) -> None:
    """Six deaths of workers, nodes and masters, with words that are lost, late or said twice."""
    Play(seed).play().check()


def test_without_deaths_each_position_is_used_once() -> None:
    """And nothing is told to be repeated."""
    play = Play(1, deaths=0).play()
    play.check()
    assert set(play.uses.times.values()) == {1}
    assert (play.leased.again, play.leased.repeated) == (0, ())


def test_a_slow_node_gives_back_what_it_cannot_use_in_time() -> None:
    """One of three nodes is three times slower: the epochs end within 1.15 times the ideal, and the log has few grants."""
    play = Play(3, deaths=0, size=3_000, recalls=0.0).play()
    play.check()
    ideal_s = 3_000 * EPOCHS / (2 * 30 + 10)
    assert play.ticks * TICK_S <= 1.15 * ideal_s
    assert len(play.drive.facts(LeaseGranted)) <= 3 * (ideal_s / 10 + 10)
    assert len(play.drive.facts(LeaseReturned)) <= 12

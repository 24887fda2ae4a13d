"""Seeded histories of leases: what the smoke tests and the campaign `lease_seeds` do with a seed.

Most of a seed is a job whose model is restored (``lineage="model"``): nodes with ranks at paces of their own, which save what
they were trained on. Workers, nodes, loader processes and masters die, nodes are drained, the job grows and shrinks, parts of
states are lost with the memory of their node, older states are restored, and words are lost, late or of an earlier generation.
Afterwards each sample is in the model's lineage once, and the audit proves it from the log alone. Every second seed plays a job
whose ranks agree on step boundaries, too: there nodes leave and come by planned changes, which lose nothing. Every fourth seed
plays ``lineage="server"`` too: there nothing is lost, and what was used twice was told.
``python -m tests.chaos.lease_seeds SEED`` runs one again.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

from tests.unit.drive import Drive

from dlrover_core.data.trained import Counted, added, counted, pack_counted, unpack
from dlrover_core.history.lease_audit import LeaseAudit
from dlrover_core.job.checkpoints import CommitCheckpoint, ReportArmed, ReportHeld, ReportKeeping
from dlrover_core.job.leases import (
    Leased,
    Leases,
    LeasesRestored,
    RecallLease,
    RestoreLeases,
)
from dlrover_core.job.nodes import ReportLeft
from dlrover_core.job.operations import DrainNode, ScaleGroup
from dlrover_core.job.orders import Order
from dlrover_core.job.shards import LEASE, MODEL_LEASE, RegisterDataset
from dlrover_core.job.world import WorldFormed
from dlrover_core.kernel.engine import Tick
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime.leasing import LeaseBeat, Leasing
from dlrover_core.runtime.levels import Beat
from dlrover_core.testing.leasing import Node as ServerNode
from dlrover_core.testing.leasing import Uses
from dlrover_core.testing.restored_leases import NAME, SOURCE, Node, States

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

TICK_S, MOST_TICKS, SERVER_TICKS = 0.1, 4_000, 6_000
STORELESS_TICKS = 50
SIZE, SERVER_SIZE, EPOCHS, SHARD = 300, 700, 2, 4
NODES_MAX = 4
STRIKES = ("worker", "worker", "node", "leave", "master", "loader", "scale")


def audited(records: Any) -> Any:
    """What the log alone proves."""
    audit = LeaseAudit()
    for record in records:
        audit.feed(record)
    return audit.proofs()


class Play:
    """Nodes that lease samples, and a seed that says who dies when, and which words are lost or late."""

    dataset: str
    ticks_max: int
    late_share: float

    def __init__(self, seed: int, drive: Drive) -> None:
        self.random, self.drive, self.leasing = Random(seed), drive.up(), Leasing()
        self.strikes: list[float] = []
        self.late: list[tuple[str, LeaseBeat]] = []
        self.ticks = 0
        self._desired: tuple[tuple[int, int], Mapping[str, Order]] | None = None

    @property
    def _moment(self) -> tuple[int, int]:
        """Changes with every event, and with every master."""
        return self.drive.state.seq, self.drive.engine.token

    @property
    def orders(self) -> Mapping[str, Order]:
        """What nodes should do, by name. Only an event changes it, so it is worked out anew after events alone."""
        if self._desired is None or self._desired[0] != self._moment:
            self._desired = self._moment, desired(self.drive.state).orders
        return self._desired[1]

    @property
    def leased(self) -> Leased:
        """The dataset, as the log has it."""
        return self.drive.state.leases.of("worker")[self.dataset]

    def play(self) -> Self:
        """Until all workers have heard the end."""
        while not self._over():
            self.ticks += 1
            assert self.ticks < self.ticks_max, f"it does not end: {self.leased}"
            self.drive.now += round(TICK_S * 1e6)
            while self.strikes and self.strikes[0] <= self.ticks * TICK_S:
                self.strikes.pop(0)
                self._strike()
            before = self._moment
            self._tick()
            if self._moment != before:
                assert not list(self.drive.state.leases.check())
        assert "CommandFailed" not in self.drive.names(self.drive.records)
        return self

    def _over(self) -> bool:
        raise NotImplementedError

    def _strike(self) -> None:
        raise NotImplementedError

    def _tick(self) -> None:
        raise NotImplementedError

    def _say(self, node: str, said: LeaseBeat) -> None:
        if self.random.random() < self.late_share:
            self.late.append((node, said))  # it comes again later, when it is not true any more
        if self.random.random() < 0.8:
            self._hear(node, said)
        if self.late and self.random.random() < 0.2:
            self._hear(*self.late.pop(self.random.randrange(len(self.late))))

    def _hear(self, node: str, said: LeaseBeat) -> None:
        if node in self.drive.state.nodes.nodes:
            self.leasing.heard(self.drive.state, node, Beat(1, 1, 0, (said,)))


class ModelPlay(Play):
    """Three nodes, two ranks each, at paces of their own; a seed says who dies when, and which states are there to restore."""

    dataset, ticks_max, late_share = NAME, MOST_TICKS, 0.3
    planned = False

    def __init__(self, seed: int, *, strikes: int = 6, **settings: Any) -> None:
        sizes = {"nodes_min": 2, "nodes_max": 3, "nproc": 2, "relaunch_max": 50, "max_restarts": 100}
        super().__init__(seed, Drive(**sizes, **settings))
        self.states = States()
        self.nodes = {name: Node(name, self.states, shard=SHARD) for name in self.drive.state.nodes.nodes}
        self.drive.do(RegisterDataset("worker-0-0", 1, NAME, SIZE, 7, "shuffled", SOURCE, EPOCHS, 0, MODEL_LEASE))
        self.strikes = sorted(self.random.uniform(0, SIZE * EPOCHS / 60) for _ in range(strikes))
        self.said: list[RestoreLeases] = []
        self.started = 0
        self.struck: Counter[str] = Counter()
        self.compared = 0

    @property
    def running(self) -> list[Node]:
        """The nodes of the newest world."""
        return [self.nodes[name] for name in self.drive.members]

    def _over(self) -> bool:
        world = self.drive.world
        ranks = [rank for node in self.running for rank in node.ranks if node.generation == world.generation]
        return len(ranks) == 2 * len(self.running) > 0 and not any(rank.busy for rank in ranks)

    def _tick(self) -> None:
        now_s = self.ticks * TICK_S
        for name, node in self.nodes.items():
            starved = node.work(now_s)
            if any(rank.heard_end for rank in node.ranks) and node.generation == self.leased.generation:
                assert self.leased.finished, "a rank heard of an end too soon"
            if starved or self.random.random() < 0.2:
                self._say(name, node.beat(now_s))
        for command in list(self.leasing.findings(self.drive.state, self.drive.now)):
            self.drive.do(command)
        if self.random.random() < 0.2:
            names = sorted(self.nodes)
            self.drive.do(RecallLease(self.random.choice(names), NAME, self.random.randrange(1, SIZE), names[0]))
        if self.said and self.random.random() < 0.3:
            said = self.random.choice(self.said)  # said again until the leader knows it, and once more
            self.drive.do(said)
        world = self.drive.world
        if world.active and world.generation != self.started:
            self.started = world.generation
            self._formed()
            self.drive.run(1)
            keeping = self.drive.members[0], world.generation, "file:///ckpt", 1, 1, 0, self.planned, 0
            self.drive.do(ReportKeeping(*keeping))
        elif not world.active and self.ticks % STORELESS_TICKS == 0 and self.nodes:
            # A world that ended at once used its nodes' stores up. Real agents offer new ones.
            for name in sorted(self.nodes):
                self.drive.offer(name)
        if self.random.random() < 0.1:
            self._commit()
        orders = self.orders
        for name in list(self.nodes):
            if self.random.random() < 0.5:
                self._order(name, orders.get(name))

    def _formed(self) -> None:
        """There is a new world."""

    def _commit(self) -> None:
        """The newest whole state is on storage, and nodes say what their ranks were trained on."""
        if not (whole := self.states.whole()):
            return
        generation, step = whole[-1]
        nodes: dict[str, list[tuple[Counted, ...]]] = {}
        for part in self.states.parts[whole[-1]].values():
            nodes.setdefault(part.node, []).append(counted(unpack(part.packed)))
        world = self.states.worlds[generation]
        said = tuple(pack_counted(world, len(ranks), added(ranks)) for ranks in nodes.values())
        self.drive.do(CommitCheckpoint("worker", generation, step, len(nodes), 1, 1, (), said))

    def _order(self, name: str, order: Order | None) -> None:
        node = self.nodes[name]
        if order is None:
            return
        node.ordered(order.part(Leases))
        work = order.work
        if not work.generation or work.generation == node.generation or name not in self.drive.members:
            return
        if self.random.random() < 0.7:
            return  # its workers of before are not dead yet
        if work.generation not in self.states.bases:
            self._resume(work.generation, work.world_size)
        if work.first_rank == 0:
            (of, step), _, base = self.states.bases[work.generation]
            self.said = [*self.said[-1:], RestoreLeases(name, work.generation, NAME, of, step, base.pack())]
        slow = 1 / 3 if work.first_rank == 2 else 1
        node.start(work.generation, [(work.first_rank + at, 15.0 * slow / (1 + at)) for at in range(work.nproc)])

    def _resume(self, generation: int, world: int) -> None:
        """The newest state that is whole; sometimes an older one, as memory and storage may fail."""
        whole = [(0, 0), *self.states.whole()]
        back = self.random.randrange(3) if self.random.random() < 0.3 else 0
        self.states.resume(generation, world, whole[max(0, len(whole) - 1 - back)])

    def _strike(self) -> None:
        kind = self.random.choice(STRIKES)
        self.struck[kind] += 1
        if kind == "scale":
            self._scale()
        else:
            running = [node for node in self.running if node.ranks and node.generation == self.drive.world.generation]
            self._harm(kind, running)

    def _harm(self, kind: str, running: list[Node]) -> None:
        if kind == "master":
            self.drive.take_over()
            self.leasing = Leasing()
            return
        if not running:
            return
        node = self.random.choice(running)
        if kind == "loader":
            node.loader_dies(self.random)
        elif kind == "worker":
            rank = node.ranks.pop(self.random.randrange(len(node.ranks)))
            node.leases.gone(rank.session)  # in the other ranks of the node there is life for a while
            self.drive.exit(node.node, rank.rank)
        else:
            self._end(node, by_plan=kind == "leave")

    def _end(self, node: Node, *, by_plan: bool) -> None:
        name = node.node
        if by_plan:
            self.drive.do(DrainNode(name, "its host is repaired"))
            node.stop()
            for word in node.last_words():
                self.drive.do(word)
            self.drive.do(ReportLeft(name))
            self.drive.observe(name, "gone")
        else:
            self.states.lose(name, self.random)
            self.drive.observe(name, "gone", 137, "killed")
        del self.nodes[name]
        self.leasing.forget(name)
        self.drive.wait(self.random.choice((1, 60)))
        self._come()

    def _come(self) -> None:
        """Nodes that are planned start and join."""
        known = self.drive.state.nodes.nodes
        for new in [
            name for name, node in known.items() if name not in self.nodes and not (node.released or node.ended)
        ]:
            self.drive.observe(new, "running")
            self.drive.join(new)
            self.nodes[new] = Node(new, self.states, shard=SHARD)

    def _scale(self) -> None:
        """People ask for another size. Nodes that are too many leave in good order, some with the only copy of their parts."""
        self.drive.do(ScaleGroup("worker", 1, self.random.randrange(1, NODES_MAX + 1), "people ask"))
        for name in sorted(self.nodes):
            known = self.drive.state.nodes.nodes.get(name)
            if known is None or known.released:
                self._leave(name)
        self.drive.wait(self.random.choice((1, 60)))
        self._come()

    def _leave(self, name: str) -> None:
        """A node that is released leaves in good order, and its memory is lost."""
        node = self.nodes.pop(name)
        node.stop()
        for word in node.last_words():
            self.drive.do(word)
        self.drive.do(ReportLeft(name))
        self.drive.observe(name, "gone")
        self.leasing.forget(name)
        self.states.lose(name, self.random)

    def check(self) -> Self:
        """No state has a position twice, its ranks say what it has, and the last model has all."""
        for state in self.states.whole():
            self.states.check(state)
        generation = self.drive.world.generation
        _, before, _ = self.states.bases[generation]
        model = Counter(before)
        for node in self.running:
            for rank in node.ranks:
                model.update(rank.model)
        assert model == Counter(range(SIZE * EPOCHS)), "the last model was not trained once on each position"
        (proof,) = audited(self.drive.records)
        self.compared = proof.compared
        assert (proof.findings, proof.samples) == ((), SIZE * EPOCHS)
        for fact in self.drive.facts(LeasesRestored):
            state = self.states.bases[fact.generation][0]
            assert (fact.of, fact.step) == state, "the log says that it resumed from another state"
        return self


class PlannedPlay(ModelPlay):
    """The same where ranks can agree on a step boundary: nodes that leave, and newcomers, change the world there.

    All ranks publish the boundary's step and wait, and the next generation resumes from it: nothing is trained again.
    ``boundaries``: the worlds that were formed so.
    """

    planned = True

    def __init__(self, seed: int, *, strikes: int = 6) -> None:
        super().__init__(seed, strikes=strikes, plan_s=30.0, boundary_s=10.0, grow_window_s=1.0)
        self.boundaries = 0
        self.again: dict[int, int] = {}

    def _tick(self) -> None:
        super()._tick()
        due = MODEL.due(self.drive.state)
        if due is not None and due <= self.drive.now:
            self.drive.do(Tick())
        self._go_to_boundary()
        for name in sorted(self.nodes):
            if self.drive.state.nodes.nodes[name].released and self.random.random() < 0.3:
                self._leave(name)
        if self.random.random() < 0.3:
            self._come()
        expected = self.again.pop(self.leased.generation, self.leased.again)
        assert self.leased.again == expected, "a planned change made the ranks train samples again"

    def _go_to_boundary(self) -> None:
        """Ranks arm; rank 0 chooses the boundary; nodes whose ranks all wait there say so. After a dropped plan they go on."""
        plan, generation = self.drive.state.plans.by_group.get("worker"), self.drive.world.generation
        nodes = [node for node in self.running if node.generation == generation and len(node.ranks) == 2]
        if plan is None or not plan.go_at:
            for rank in (rank for node in nodes for rank in node.ranks):
                rank.boundary = 0
        if plan is None or not plan.asked_at:
            return
        ranks = [rank for node in nodes for rank in node.ranks]
        if plan.go_at and len(nodes) == len(self.running) and not all(rank.boundary for rank in ranks):
            begun = max(1, *(rank.step + (rank.span is not None) for rank in ranks))
            boundary = begun + self.random.randrange(1, 4)
            for rank in ranks:
                rank.boundary = boundary
        for node in nodes:
            if self.random.random() < 0.5:
                continue
            if not plan.go_at and node.node not in plan.armed:
                self.drive.do(ReportArmed(node.node, plan.number))
            elif plan.go_at and node.node not in plan.at_boundary and all(rank.waits for rank in node.ranks):
                held = node.ranks[0].boundary - 1
                self.drive.do(ReportHeld(node.node, generation, (held,), plan.number, (), b""))
            if self.drive.world.generation != generation:
                return

    def _formed(self) -> None:
        formed = self.drive.facts(WorldFormed)[-1]
        if not formed.reason.startswith("planned change"):
            return
        self.boundaries += 1
        state = formed.generation - 1, formed.resume_step
        assert state in self.states.whole(), "ranks waited at a boundary, and not all of them have its step"
        self.states.resume(formed.generation, self.drive.world.size, state)
        self.again[formed.generation] = self.leased.again

    def _strike(self) -> None:
        kind = self.random.choice((*STRIKES, "leave", "scale"))
        self.struck[f"planned_{kind}"] += 1
        running = [node for node in self.running if node.ranks and node.generation == self.drive.world.generation]
        if kind == "scale":
            self.drive.do(ScaleGroup("worker", 1, self.random.randrange(1, NODES_MAX + 1), "people ask"))
        elif kind == "leave" and running:
            self.drive.do(DrainNode(self.random.choice(running).node, "its host is repaired"))
        else:
            self._harm(kind, running)


class ServerPlay(Play):
    """Three nodes, two workers each, one node slower than the others, and a seed that says who dies when."""

    dataset, ticks_max, late_share = "train", SERVER_TICKS, 0.2

    def __init__(self, seed: int, *, deaths: int = 6, size: int = SERVER_SIZE, recalls: float = 0.3) -> None:
        super().__init__(seed, Drive(nodes_max=3, nproc=1, relaunch_max=50, max_restarts=100))
        self.uses, self.size, self.recalls = Uses(), size, recalls
        self.nodes = {name: self._node(name) for name in self.drive.state.nodes.nodes}
        self.drive.do(RegisterDataset("worker-0-0", 1, "train", size, 7, "shuffled", "", EPOCHS, 0, LEASE))
        self.strikes = sorted(self.random.uniform(0, size * EPOCHS / 70) for _ in range(deaths))

    def _node(self, name: str) -> ServerNode:
        pace = 15.0 * (1 / 3 if name.startswith("worker-2") else 1)
        return ServerNode(name, self.uses, self.random, shard=SHARD, rates=(pace, pace))

    def _over(self) -> bool:
        return all(worker.heard_end for node in self.nodes.values() for worker in node.workers)

    def _tick(self) -> None:
        now_s = self.ticks * TICK_S
        for name, node in self.nodes.items():
            starved = node.work(now_s)
            if any(worker.heard_end for worker in node.workers):
                assert self.leased.finished, "a worker heard of an end too soon"
            if starved or self.random.random() < 0.2:
                self._say(name, node.beat(now_s))
        self._decide()
        orders = self.orders
        for name, node in self.nodes.items():
            if self.random.random() < 0.5:  # an order is a level: one that is lost comes again
                node.ordered(orders[name].part(Leases))

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


def trial(seed: int) -> dict[str, Any]:
    """Run a seed; what came of it. Raises AssertionError (or `SpecError`) where a promise is broken."""
    play = ModelPlay(seed)
    play.drive.looks = seed % 10 == 0
    play.play().check()
    told: dict[str, Any] = {
        "samples": SIZE * EPOCHS,
        "again": play.leased.again,
        "compared": play.compared,
        "generations": play.drive.world.generation,
        "events": len(play.drive.records),
        **dict(sorted(play.struck.items())),
        "log": hashlib.blake2b(b"".join(one.payload for one in play.drive.batches), digest_size=8).hexdigest(),
    }
    if seed % 2:
        planned = PlannedPlay(seed)
        planned.drive.looks = seed % 10 == 1
        planned.play().check()
        told |= {
            "planned_samples": SIZE * EPOCHS,
            "boundaries": planned.boundaries,
            **dict(sorted(planned.struck.items())),
        }
    if seed % 4 == 0:
        server = ServerPlay(seed)
        server.drive.looks = seed % 10 == 0
        server.play().check()
        told |= {"server_samples": server.size * EPOCHS, "server_repeated": server.leased.again}
    return told


if __name__ == "__main__":
    sys.stdout.write(f"{trial(int(sys.argv[1]))}\n")

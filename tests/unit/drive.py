"""One job in memory, driven command by command: the real model and engine, a clock in the test's hand, and no I/O.

```python
job = Drive(nodes_min=2, nodes_max=2, nproc=2).up()
job.exit("worker-1-0", 3)
assert job.names() == ["WorkerExited", "IncidentOpened", "Diagnosed", "ActionChosen", "WorldFormed"]
```
"""

from __future__ import annotations

from typing import Any

from dlrover_core.job import incidents, job, nodes, progress, world
from dlrover_core.job.orders import Desired
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.engine import Accepted, Command, Engine, Reply, Tick
from dlrover_core.kernel.events import Batch, Origin, Record
from dlrover_core.kernel.state import pack, unpack
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL
from dlrover_core.spec import GroupSpec, JobSpec

SECOND = 1_000_000
BEGIN = 1_000 * SECOND
LOOKED_AT_MAX = 16  # nodes
PEER_LOST = "RuntimeError: [gloo] Connection closed by peer"

GROUP_FIELDS = ("nodes_min", "nodes_max", "nproc", "unit", "relaunch_max")


def spec_of(*, groups: tuple[GroupSpec, ...] = (), **settings: Any) -> JobSpec:
    """A spec of one group, its fields and the job's by name; or of ``groups``."""
    if groups:
        return JobSpec("j", groups, **settings)
    group = {name: settings.pop(name) for name in GROUP_FIELDS if name in settings}
    group.setdefault("nodes_max", max(2, group.get("nodes_min", 2)))
    group.setdefault("nodes_min", group["nodes_max"])
    group.setdefault("nproc", 2)
    return JobSpec("j", (GroupSpec(**group),), **settings)


class Drive:
    """An engine with its job created. Times are seconds after the job's beginning.

    ``looks``: compare what should be true before and after each command with whether it levels; half of a long play's time.
    """

    looks = True

    def __init__(self, *, numbered: bool = False, **settings: Any) -> None:
        self.spec = spec_of(**settings)
        self._tell = self.say if numbered else self.do
        self.batches: list[Batch] = []
        self.now = BEGIN
        self.engine: Engine[JobState] = Engine(MODEL, CODEC, MODEL.new(), token=1)
        self.records: list[Record] = []
        self.new: list[Record] = []
        self._numbers: dict[str, int] = {}
        self._stores = 0
        assert isinstance(self.do(job.CreateJob("run-1", self.spec.to_json())), Accepted)

    @property
    def state(self) -> JobState:
        """The working state."""
        return self.engine.state

    def do(self, command: Command, origin: Origin | None = None) -> Reply:
        """Handle one command now; its records are ``new``."""
        before, wanted = len(self.records), self._wanted()
        reply = self.engine.handle(command, self.now, origin)
        batch = self.engine.take()
        if batch is not None:
            self.batches.append(batch)
            self.records += batch.records
            if wanted is not None and not MODEL.levels(self.state, batch.records):
                assert desired(self.state) == wanted, f"{command} changes what should be true, and levels nothing"
        self.new = self.records[before:]
        return reply

    def _wanted(self) -> Desired | None:
        """What should be true now; None where that is not looked at: time alone ends quarantines, and large jobs take long."""
        small = self.looks and self.state.job.run and len(self.state.nodes.nodes) <= LOOKED_AT_MAX
        return desired(self.state) if small and not self.state.hosts.hosts else None

    def say(self, command: Any) -> Reply:
        """A command from the agent of its own node, numbered."""
        number = self._numbers[command.node] = self._numbers.get(command.node, 0) + 1
        return self.do(command, Origin(command.node, 7, number))

    def fork(self) -> Drive:
        """An independent copy of this moment: many continuations of one beginning, cheaply. It has no earlier records."""
        copy = object.__new__(Drive)
        copy.spec, copy.now, copy._stores = self.spec, self.now, self._stores
        copy.records, copy.new, copy.batches, copy._numbers = [], [], [], dict(self._numbers)
        copy._tell = copy.do
        copy.engine = Engine(MODEL, CODEC, unpack(JobState, pack(self.state)), token=self.engine.token)
        return copy

    def take_over(self) -> None:
        """The master dies; the next one folds the log and says so."""
        folded = MODEL.fold(record for batch in self.batches for record in CODEC.decode(batch.payload).records)
        self.engine = Engine(MODEL, CODEC, folded, token=self.engine.token + 1)
        self.do(job.TakeOver(f"master-{self.engine.token}", "0"))

    def wait(self, seconds: float) -> None:
        """Let time pass, ticking at every deadline on the way."""
        end = self.now + round(seconds * SECOND)
        seen: list[Record] = []
        for _ in range(1000):
            due = MODEL.due(self.state)
            if due is None or due > end or (seen and due <= self.now and not self.new):
                break
            self.now = max(self.now, due)
            self.do(Tick())
            seen += self.new
            if not self.new:
                break
        self.now = end
        self.do(Tick())
        self.new = [*seen, *self.new]

    # ---- the ordinary course

    def observe(self, node: str, phase: str, exit_code: int = 0, reason: str = "", host: str = "") -> Reply:
        """The backend says this of one node."""
        return self.do(nodes.ObserveNodes((nodes.Observed(node, phase, exit_code, reason, host),)))

    def listed(self, *seen: nodes.Observed) -> Reply:
        """The backend lists everything it has."""
        return self.do(nodes.ObserveNodes(seen, complete=True))

    def offer(self, node: str) -> str:
        """The node offers a store that nobody has seen before."""
        self._stores += 1
        self._tell(world.OfferStore(node, f"{node}:{self._stores}"))
        return f"{node}:{self._stores}"

    def join(self, node: str, host: str = "") -> Reply:
        """The node's agent reports and offers two stores."""
        reply = self._tell(nodes.ReportJoined(node, host or f"host-of-{node}", node, self.spec.groups[0].nproc))
        seen = self.new
        for _ in range(2):
            self.offer(node)
            seen = [*seen, *self.new]
        self.new = seen
        return reply

    def up(self, first_step: int = 1) -> Drive:
        """All planned nodes join, the world starts and makes its first step."""
        for node in list(self.state.nodes.nodes):
            self.observe(node, "running")
            self.join(node)
        return self.run(first_step)

    def run(self, first_step: int) -> Drive:
        """The newest world starts and makes a step."""
        current = self.world
        for member in current.members:
            self._tell(world.ReportStarted(member.node, current.generation))
        self._tell(progress.ReportFirstStep(current.members[0].node, current.generation, first_step))
        for member in current.members:
            self.offer(member.node)
        return self

    def exit(self, node: str, rank: int, code: int = -9, error: str = "", generation: int = 0, **more: Any) -> Reply:
        """A worker of the newest (or that) generation is dead, unasked."""
        return self._tell(
            incidents.ReportExit(node, generation or self.world.generation, rank, code, error=error, **more)
        )

    def cascade(self, node: str, rank: int, generation: int = 0) -> Reply:
        """A survivor's worker fails because a peer is gone."""
        return self.exit(node, rank, 1, PEER_LOST, generation)

    # ---- looking

    @property
    def world(self) -> world.World:
        """The newest world of the workers."""
        return self.state.world.at("worker")

    @property
    def members(self) -> list[str]:
        """The nodes of the active world in rank order; empty: none is active."""
        return [member.node for member in self.world.members] if self.world.active else []

    def names(self, records: list[Record] | None = None) -> list[str]:
        """The kinds of the newest records."""
        return [type(record.event).__name__ for record in (self.new if records is None else records)]

    def facts(self, cls: type) -> list[Any]:
        """All events of a kind so far."""
        return [record.event for record in self.records if type(record.event) is cls]

    @property
    def incident(self) -> incidents.Incident:
        """The newest incident."""
        return self.state.incidents.by_number[self.state.incidents.number]

"""A job's life, told command by command to a real engine: what tests of the read side read.

Times are seconds since `Life.EPOCH_US`; a refused command leaves its record, as in a real log.
"""

from __future__ import annotations

from dlrover_core.job import incidents, job, nodes, progress, world
from dlrover_core.job import names as names_job
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.engine import Command, Engine, Tick
from dlrover_core.kernel.events import Record
from dlrover_core.rules.model import MODEL
from dlrover_core.spec import JobSpec, us


class Life:
    """A history in the making; ``records`` is all of it. Every step of the story returns it, so that steps can be chained."""

    EPOCH_US = 1_763_640_000_000_000

    def __init__(self, spec: JobSpec, run: str = "run1") -> None:
        self.records: list[Record] = []
        self._engine: Engine[JobState] = Engine(MODEL, CODEC, MODEL.new(), token=1)
        self.do(0, job.CreateJob(run, spec.to_json()))

    @property
    def state(self) -> JobState:
        """The state now."""
        return self._engine.state

    def generation(self, group: str = "worker") -> int:
        """The newest generation of a group."""
        known = self.state.world.worlds.get(group)
        return known.generation if known is not None else 0

    def do(self, at: float, *commands: Command) -> Life:
        """Give commands at a time, each its own batch."""
        for command in commands:
            self._engine.handle(command, self.EPOCH_US + us(at))
            batch = self._engine.take()
            self.records.extend(batch.records if batch is not None else ())
        return self

    def tick(self, at: float) -> Life:
        """Let deadlines pass."""
        return self.do(at, Tick())

    def take_over(self, at: float, holder: str) -> Life:
        """The master dies; another one goes on."""
        self._engine = Engine(MODEL, CODEC, MODEL.fold(self.records), token=self._engine.token + 1)
        return self.do(at, job.TakeOver(holder, "0.1.0"))

    def join(self, at: float, *names: str) -> Life:
        """Nodes run, and their agents join, each with stores to offer."""
        for name in names:
            nproc = self.state.job.spec.group(names_job.group_of(name)).nproc
            self.do(at, nodes.ObserveNodes((nodes.Observed(name, "running", host=f"host-{name}"),)))
            self.do(at, nodes.ReportJoined(name, f"host-{name}", "10.0.0.1", nproc))
            self.do(at, *(world.OfferStore(name, f"{name}:{at:g}:{port}") for port in range(4)))
        return self

    def start(self, at: float, *names: str) -> Life:
        """The workers of the newest generation run on these nodes."""
        return self.do(at, *(world.ReportStarted(name, self.generation(names_job.group_of(name))) for name in names))

    def step(self, at: float, step: int, node: str) -> Life:
        """The newest generation makes its first step."""
        return self.do(at, progress.ReportFirstStep(node, self.generation(names_job.group_of(node)), step, told=True))

    def progress(self, at: float, step: int) -> Life:
        """The newest generation has reached a step."""
        return self.do(at, progress.NoteProgress("worker", self.generation(), step))

    def die(
        self,
        at: float,
        node: str,
        rank: int,
        exit_code: int = -9,
        *,
        step: int = -1,
        age_s: float = 0,
        error: str = "",
        tail: str = "",
    ) -> Life:
        """A worker of the newest generation dies unasked; the agent says so ``age_s`` later, at ``at``."""
        generation = self.generation(names_job.group_of(node))
        return self.do(at, incidents.ReportExit(node, generation, rank, exit_code, False, step, us(age_s), tail, error))

    def node_dies(self, at: float, node: str, exit_code: int = -9) -> Life:
        """A node's backend sees it fail, and then gone."""
        return self.do(
            at,
            nodes.ObserveNodes((nodes.Observed(node, "failed", exit_code),)),
            nodes.ObserveNodes((nodes.Observed(node, "gone"),)),
        )

    def finish(self, at: float, *names: str) -> Life:
        """The workers of these nodes end well."""
        return self.do(at, *(world.ReportFinished(name, self.generation(names_job.group_of(name))) for name in names))


def three_deaths(spec: JobSpec) -> Life:
    """The demo in small: two nodes; a worker, the master and a node die, and the job succeeds.

    A step takes a second. Restored are steps 51 (ten steps lost) and 112 (none).
    """
    life = Life(spec).join(2, "worker-0-0", "worker-1-0").start(2.5, "worker-0-0", "worker-1-0")
    life.step(3, 1, "worker-0-0")
    life.die(63.1, "worker-1-0", 3, step=61, age_s=0.1)
    life.do(
        63.15,
        incidents.ReportExit("worker-0-0", 1, 0, 1, step=61, error="RuntimeError: Connection reset by peer"),
    )
    life.start(63.3, "worker-0-0", "worker-1-0").step(63.6, 52, "worker-0-0")
    life.take_over(80, "master-2")
    life.progress(123.6, 112)
    life.node_dies(130, "worker-1-0").join(132, "worker-1-1").start(132.2, "worker-0-0", "worker-1-1")
    return life.step(132.5, 113, "worker-0-0").finish(140, "worker-0-0").finish(140.5, "worker-1-1")

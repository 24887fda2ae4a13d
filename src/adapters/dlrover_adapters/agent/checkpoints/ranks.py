"""What the ranks of this node have said in the generation that runs, and the reports that are made of it, once each."""

from __future__ import annotations

from typing import Any, NamedTuple

from dlrover_core.job.checkpoints import (
    FELL_MAX,
    TEXT_MAX,
    TIERS,
    ReportArmed,
    ReportHeld,
    ReportKeeping,
    ReportRestored,
    worth_telling,
)
from dlrover_core.job.lineage import readable
from dlrover_core.job.plans import Boundary
from dlrover_core.job.shards import DATASETS_MAX, Datasets, RegisterDataset, Terms

from .arenas import State
from .site import Keeping, Site
from .vault import Caller, Refused


class Began(NamedTuple):
    """From where a rank began, with the fields of `ReportRestored`."""

    step: int
    tier: str
    took_us: int
    fell: tuple[tuple[str, str], ...]
    made_in: int = 0
    cut: bytes = b""

    @classmethod
    def of(cls, body: dict[str, Any]) -> Began | None:
        """From a packet; None: it makes no sense."""
        step, tier, took_us, fell = (body.get(name) for name in cls._fields[:4])
        of, cut = body.get("of", 0), body.get("cut", b"")
        if type(step) is not int or type(took_us) is not int or not 0 <= step < 2**53 or not 0 <= took_us < 2**53:
            return None
        if tier not in TIERS or not isinstance(fell, list) or len(fell) > FELL_MAX:
            return None
        pairs = [tuple(one) if isinstance(one, list) else () for one in fell]
        if not all(len(one) == 2 and all(isinstance(text, str) for text in one) for one in pairs):
            return None
        if type(of) is not int or not 0 <= of < 2**53 or not isinstance(cut, bytes) or not readable(cut):
            return None
        return cls(step, tier, took_us, tuple((one[0][:TEXT_MAX], one[1][:TEXT_MAX]) for one in pairs), of, cut)


class Ranks:
    """All of one node's, by local rank; what was said in an older generation is forgotten when a newer one comes."""

    def __init__(self) -> None:
        self.generation = 0
        self.callers: dict[int, Caller] = {}
        self._keeping: dict[int, Keeping] = {}
        self._began: dict[int, Began] = {}
        self._acked: dict[int, int] = {}
        self._told: set[str] = set()
        self._datasets: dict[str, Terms] = {}
        self._registered: list[Terms] = []
        self._armed = self._waits = 0

    def greeted(self, caller: Caller) -> None:
        """A rank saves with us."""
        if caller.generation > self.generation:
            self.generation = caller.generation
            self.callers, self._keeping, self._began, self._acked = {}, {}, {}, {}
            self._told, self._datasets, self._registered = set(), {}, []
        self.callers[caller.local_rank] = caller

    def keeps(self, caller: Caller, keeping: Keeping) -> None:
        """How it does."""
        if caller.generation == self.generation:
            self._keeping[caller.local_rank] = keeping

    def dataset(self, site: Site, caller: Caller, terms: Terms) -> None:
        """A rank trains on this dataset.

        Raises `Refused` where another rank, or the job's log, has another one of that name, or as many as there may be.
        """
        if caller.generation != self.generation:
            return
        logged, here = self._logged(site, terms.name), self._datasets.get(terms.name)
        for known, who in ((logged, "the job has it"), (here, "another rank here has it")):
            grew = known is logged and known is not None and known.grew_to(terms)
            if known is not None and not (known.same(terms) or grew):
                remedy = "give all ranks the same data, and other data another name"
                raise Refused(f"dataset {terms.name!r}: {who} with {known}; this one has {terms}: {remedy}")
        if logged is None and (why := terms.clash((*site.order.part(Datasets).known, *self._datasets.values()))):
            raise Refused(f"name: {why}")
        names = {*self._datasets, *(one.name for one in site.order.part(Datasets).known)}
        if terms.name not in names and len(names) >= DATASETS_MAX:
            raise Refused(f"dataset {terms.name!r}: the job has {DATASETS_MAX} datasets already: mix several into one")
        self._datasets[terms.name] = terms.completed(here)

    @staticmethod
    def _logged(site: Site, name: str) -> Terms | None:
        return next((one for one in site.order.part(Datasets).known if one.name == name), None)

    def told(self, caller: Caller, body: dict[str, Any]) -> None:
        """Something else."""
        if caller.generation != self.generation:
            return
        match body:
            case {"op": "restored"}:
                began = Began.of(body)
                if began is not None:
                    self._began[caller.local_rank] = began
            case {"op": "acked", "plan": int(plan)}:
                self._acked[caller.local_rank] = plan

    def settled(self, site: Site) -> bool:
        """Has every rank of this node that saves with us said how?"""
        return self._expected(site) <= self._keeping.keys()

    @staticmethod
    def _expected(site: Site) -> set[int]:
        """The local ranks that save with us: those that have parts, as soon as one says which; until then all."""
        expected: set[int] = set()
        for one in site.mine():
            expected |= one.members or set()
        return expected or set(range(site.nproc))

    @property
    def writes(self) -> bool:
        """Has any of them parts to write?"""
        return any(one.writes for one in self._keeping.values())

    # ---- reports

    def report(self, site: Site) -> None:
        """Whatever is to be said now, and was not."""
        if self.generation and self.generation == site.generation:
            self._report_keeping(site)
            if self._expected(site) <= self._began.keys():
                self._report_restored(site)
            self._report_datasets(site)
            self._report_plan(site)

    def ended(self, site: Site, generation: int) -> None:
        """Its workers are gone: nothing more will be said."""
        if generation == self.generation and self._began:
            self._report_restored(site)

    def _once(self, what: str) -> bool:
        if what in self._told:
            return False
        self._told.add(what)
        return True

    def _report_keeping(self, site: Site) -> None:
        """By the node of rank 0."""
        if site.launch is None or site.launch.node_rank != 0 or not self.settled(site) or not site.mine():
            return
        if not any(one.ready for one in site.mine()) or not self._once("keeping"):
            return
        one = self._keeping[min(self._keeping)]
        planned = all(each.planned for each in self._keeping.values())
        site.desk.send(
            ReportKeeping(
                site.desk.node, self.generation, one.url, one.every, one.store_every, one.keep, planned, one.node_bytes,
                site.spread,
            )
        )  # fmt: skip

    def _report_datasets(self, site: Site) -> None:
        """By the node of rank 0: what the leader does not know yet."""
        if site.launch is None or site.launch.node_rank != 0:
            return
        for one in self._datasets.values():
            logged = self._logged(site, one.name)
            terms = one.completed(logged)
            if terms != logged and terms not in self._registered:
                self._registered.append(terms)
                site.desk.send(RegisterDataset(site.desk.node, self.generation, *terms))

    def _report_restored(self, site: Site) -> None:
        """All of them began from the same state; the slowest tier and the longest time count."""
        if site.launch is None or not self._once("restored"):
            return
        slowest = max(self._began.values(), key=lambda one: (TIERS.index(one.tier), one.took_us))
        fell = tuple(dict.fromkeys(pair for one in self._began.values() for pair in one.fell))[:FELL_MAX]
        if worth_telling(slowest.tier, fell, rank_0=site.launch.node_rank == 0):
            took_us = max(one.took_us for one in self._began.values())
            began = slowest.step, slowest.tier, took_us, fell, slowest.made_in, slowest.cut
            site.desk.send(ReportRestored(site.desk.node, self.generation, *began))

    def _report_plan(self, site: Site) -> None:
        """All look for the boundary; all wait at it. The words in the arenas say it where a packet was lost."""
        plan, own = site.order.part(Boundary).plan, [one.control for one in site.mine() if one.control is not None]
        expected = self._expected(site)
        if not plan or not expected <= {one.local_rank for one in own}:
            return
        for control in own:
            if control.acked:
                self._acked[control.local_rank] = max(control.acked, self._acked.get(control.local_rank, 0))
        if plan != self._armed and all(self._acked.get(local_rank) == plan for local_rank in expected):
            self._armed = plan
            site.desk.send(ReportArmed(site.desk.node, plan))
        boundaries = {control.boundary for control in own}
        step = min(boundaries) - 1
        # A rank that waits at the boundary of a plan that was dropped has not seen this one yet.
        seen = all(control.acked == plan for control in own)
        waits = seen and len(boundaries) == 1 and State(self.generation, step) in site.whole
        if waits and plan == self._armed and plan != self._waits:
            self._waits = plan
            cut = site.cut(State(self.generation, step))
            site.desk.send(ReportHeld(site.desk.node, self.generation, (step,), plan, (), cut))

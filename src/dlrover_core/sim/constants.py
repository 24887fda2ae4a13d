"""What everything takes that is not our engine: the constants of a simulation, each with its unit, and where it is from.

*measured*: by a benchmark of ours, read from `measured.json`, which ``python -m tools.measured_constants`` makes from
``benchmarks/results``. *assumed*: nothing here can measure it; with a source where somebody has published it. *chosen*: what
people set. A figure that rests on assumed constants is a range: all of them halved, and doubled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dlrover_core.checkpoint.cadence import young_s
from dlrover_core.errors import PlanError
from dlrover_core.sim.datasets import nearest
from dlrover_core.sim.scenario import Scenario
from dlrover_core.spec import JobSpec

MEASURED, ASSUMED, CHOSEN = "measured", "assumed", "chosen"
DAY_S = 86_400.0
MEASURED_FILE = Path(__file__).with_name("measured.json")
# Their sizes and their end follow from what is simulated.
_GIVEN = ("nodes", "workers_per_node", "steps", "spares", "settings")
_SPEC_GIVEN = ("job", "groups", "max_restarts", "on_join")


class Constant(NamedTuple):
    """One of them. ``source``: the benchmark's row, the publication, or why it is so."""

    name: str
    value: float
    unit: str
    mark: str
    source: str
    doc: str


def _assumed(name: str, value: float, unit: str, doc: str, source: str) -> Constant:
    return Constant(name, value, unit, ASSUMED, source, doc)


def _chosen(name: str, value: float, unit: str, doc: str, source: str) -> Constant:
    return Constant(name, value, unit, CHOSEN, source, doc)


_BYTEROBUST = "ByteRobust, arXiv 2509.16293"
_DECLARED = (
    _chosen("step_s", 6.0, "s", "one step of all nodes", "16 M tokens of 405 B parameters at 400 TFLOP/s a GPU, 16,384 of them"),
    _chosen("mttf_s", 0.0, "s", "what checkpoints are spaced for; 0: as the failure data have it", ""),
    _chosen("checkpoint_every_s", 0.0, "s", "between checkpoints of ours; 0: by Young's formula", ""),
    _chosen("all_checkpoint_every_s", 0.0, "s", "between checkpoints of restart-all; 0: by Young's formula", ""),
    _assumed("checkpoint_s", 0.04, "s", "training stands still for a checkpoint in memory", f"{_BYTEROBUST}: 0.01 to 0.04"),
    _assumed("stop_s", 3.0, "s", "from the order to the death of a worker that holds a GPU", "nobody's figure"),
    _assumed("context_s", 5.0, "s", "a worker's CUDA context and model, from a warm process", "nobody's figure"),
    _assumed("nccl_s_per_rank", 265 / 98_304, "s", "collectives set up, per rank", "Meta: 265 s at 96K GPUs"),
    _assumed("state_s", 5.0, "s", "state loaded from memory, its own or a peer's", "0.4 GB a GPU; nobody's figure"),
    _assumed("boot_s", 10.0, "s", "a node's agent on a spare host that is up", "nobody's figure; images are there"),
    _assumed("notice_s", 5.0, "s", "from a node's end to the scheduler's word", "nobody's figure"),
    _assumed("dark_s", 60.0, "s", "from a power cut to the scheduler's word", "Kueue: 30 s after NotReady, which takes 40 s"),
    _assumed("inspect_s", 10.0, "s", "from a broken device to its host taken away", f"{_BYTEROBUST}, table 3: GPU 10, NIC 30"),
    _assumed("reset_s", 300.0, "s", "a GPU is reset; cures 80 %", "1 to 10 min"),
    _assumed("reboot_s", 900.0, "s", "a host reboots", "10 to 20 min"),
    _assumed("rma_s", 3 * DAY_S, "s", "parts are replaced", "days"),
    _assumed("maintenance_s", 7200.0, "s", "unplanned maintenance of a host", "nobody's figure"),
    _assumed("switch_s", 3600.0, "s", "a switch or a cable is repaired", "nobody's figure"),
    _assumed("mend_s", 1800.0, "s", "somebody mends a program", "nobody's figure"),
    _assumed("slow_s", 600.0, "s", "a slow worker stays slow", f"{_BYTEROBUST}: found within minutes"),
    _chosen("slow_by", 1.34, "x", "how many times as long it computes", "Greyhound, USENIX ATC 2025"),
    _chosen("all_detect_s", 0.1, "s", "restart-all: until an agent sees a death", "torchrun's --monitor-interval"),
    _assumed("all_restart_s", 600.0, "s", "restart-all: a restart of 98,304 GPUs", "FT-HSDP, arXiv 2602.00277; by the root"),
    _assumed("all_checkpoint_s", 10.0, "s", "restart-all: training stands still to save", f"{_BYTEROBUST}: 6.8 to 13.0"),
    _assumed("async_stall_s", 1.0, "s", "restart-async: training stands still for the copy to the host", "nobody's figure"),
    _assumed("async_write_s", 60.0, "s", "restart-async: from the copy until storage has it", "nobody's figure"),
)  # fmt: skip
ALL_RESTART_GPUS = 98_304


@cache
def measured() -> tuple[Constant, ...]:
    """Those of our own benchmarks."""
    rows = json.loads(MEASURED_FILE.read_text(encoding="utf-8"))["constants"]
    return tuple(
        Constant(one["name"], one["value"], one["unit"], MEASURED, f"benchmarks/results/{one['source']}", one["doc"])
        for one in rows
    )


@dataclass(frozen=True)
class Constants:
    """All of them, and what somebody has set besides: fields of the scenario and settings of the `JobSpec`."""

    all: tuple[Constant, ...]
    scenario_fields: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def default(cls) -> Constants:
        """As they are shipped."""
        return cls((*_DECLARED, *measured()))

    def __getitem__(self, name: str) -> float:
        """A constant's value."""
        return next(one.value for one in self.all if one.name == name)

    def keys(self) -> tuple[str, ...]:
        """All names that `set` takes."""
        names = [one.name for one in self.all]
        names += [spot.name for spot in fields(Scenario) if spot.name not in _GIVEN]
        names += [spot.name for spot in fields(JobSpec) if spot.name not in _SPEC_GIVEN]
        return tuple(dict.fromkeys(names))

    def set(self, changes: Mapping[str, Any]) -> Constants:
        """With these values instead, each now chosen. A constant comes before a field of the same name. Raises `PlanError`."""
        constants = {one.name: one for one in self.all}
        scenario, settings = dict(self.scenario_fields), dict(self.settings)
        for key, value in changes.items():
            if key in constants:
                number = _number(key, value)
                constants[key] = constants[key]._replace(value=number, mark=CHOSEN, source="set for this run")
            elif key in {spot.name for spot in fields(Scenario)} and key not in _GIVEN:
                scenario[key] = _like(key, value, getattr(Scenario(), key))
            elif key in {spot.name for spot in fields(JobSpec)} and key not in _SPEC_GIVEN:
                settings[key] = _like(key, value, getattr(JobSpec("x"), key))
            else:
                raise PlanError(
                    f"nothing is called {key!r}{nearest(key, self.keys())} There are {', '.join(self.keys())}"
                )
        return Constants(tuple(constants.values()), tuple(scenario.items()), tuple(settings.items()))

    def scaled(self, factor: float) -> Constants:
        """With every assumed constant so many times as large."""
        changed = tuple(one._replace(value=one.value * factor) if one.mark == ASSUMED else one for one in self.all)
        return Constants(changed, self.scenario_fields, self.settings)

    def halved(self) -> Constants:
        """The better end of the range."""
        return self.scaled(0.5)

    def doubled(self) -> Constants:
        """The worse end."""
        return self.scaled(2.0)

    def checkpoint_steps(self, mttf: float) -> int:
        """Steps between two checkpoints of ours."""
        every = self["checkpoint_every_s"] or min(DAY_S, young_s(self["checkpoint_s"], mttf))
        return max(1, round(every / self["step_s"]))

    def scenario(
        self, nodes: int, workers_per_node: int, days: float, spares: int, mttf: float, nodes_min: int = 0
    ) -> Scenario:
        """The job, and the world around it: work for so many days on all nodes. ``mttf`` spaces checkpoints."""
        ranks = nodes * workers_per_node
        scenario: dict[str, Any] = {
            "nodes": nodes,
            "workers_per_node": workers_per_node,
            "steps": max(1, round(days * DAY_S / self["step_s"])),
            "spares": spares,
            "nodes_min": nodes_min,
            "step_s": self["step_s"],
            "checkpoint_steps": self.checkpoint_steps(mttf),
            "checkpoint_s": self["checkpoint_s"],
            "boot_s": self["boot_s"],
            "start_s": self["start_s"] + self["form_s_per_node"] * nodes,
            "load_s": self["context_s"] + self["nccl_s_per_rank"] * ranks + self["state_s"],
            "stop_s": self["stop_s"],
            "exit_s": self["exit_s"],
            "append_s": self["append_s"],
            "failover_s": self["failover_s"],
            "notice_s": self["notice_s"],
            "settings": self.settings,
        }
        return Scenario(**{**scenario, **dict(self.scenario_fields)})


def _number(key: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise PlanError(f"{key}: a number is needed, got {value!r}") from None
    if not 0 <= number < 10**9:
        raise PlanError(f"{key}: from 0 to 1e9, got {value!r}")
    return number


def _like(key: str, value: Any, sample: Any) -> Any:
    """The value in the sample's type."""
    if isinstance(sample, bool):
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(value).lower() not in words:
            raise PlanError(f"{key}: true or false, got {value!r}")
        return words[str(value).lower()]
    if isinstance(sample, str):
        return str(value)
    if key == "cascade_s":
        try:
            return float(value)
        except (TypeError, ValueError):
            raise PlanError(f"{key}: a number is needed, got {value!r}") from None
    number = _number(key, value)
    if isinstance(sample, int) and number != int(number):
        raise PlanError(f"{key}: a whole number is needed, got {value!r}")
    return int(number) if isinstance(sample, int) else number

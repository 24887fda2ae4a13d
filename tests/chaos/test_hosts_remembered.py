"""Hosts that are sick are left, and nobody else is: the real engine in a simulated cluster."""

from __future__ import annotations

import pytest

from dlrover_core.job import hosts, incidents, nodes
from dlrover_core.job.world import WorldFormed
from dlrover_core.rules import hosts as hosts_rules
from dlrover_core.sim.faults import ENGINE, Fault
from dlrover_core.sim.run import Run
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.sim.simulation import simulate
from dlrover_core.testing.invariants import check_history

SCENARIO = Scenario(nodes=4, workers_per_node=2, spares=2, steps=300, nodes_min=2, hosts_per_rack=2)


def run(*faults: Fault, scenario: Scenario = SCENARIO) -> Run:
    """A run with every promise asked after every event."""
    done = simulate(Plan(ENGINE, scenario, faults))
    check_history(done.records)
    return done


def of(done: Run, kind: type) -> list[object]:
    """The events of a kind."""
    return [record.event for record in done.records if type(record.event) is kind]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "RuntimeError: CUDA error: unspecified launch failure",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ],
)
def test_a_sick_host_is_left(words: str) -> None:
    """Workers that die on one host again and again, of whatever, move to a spare after three deaths at most, and train on."""
    done = run(Fault("step 100", "sick_host", 1, 0.0, words))
    assert (done.outcome, done.steps) == ("succeeded", SCENARIO.steps)
    (kept_off,) = of(done, hosts.HostQuarantined)
    assert isinstance(kept_off, hosts.HostQuarantined)
    assert kept_off.host == "host-1"
    assert len(of(done, incidents.IncidentOpened)) <= hosts_rules.LEMON
    assert len(of(done, WorldFormed)) <= hosts_rules.LEMON + 1
    successor = next(one for one in of(done, nodes.NodeRunning) if one.node == "worker-1-1")  # type: ignore[attr-defined]
    assert successor == nodes.NodeRunning("worker-1-1", "host-4", "rack-2")


def test_deaths_here_and_there_condemn_nobody() -> None:
    """Workers that are killed on every node in turn, three times each, speak against no host."""
    faults = [Fault(f"step {20 + 20 * turn}", "kill_worker", 2 * turn % 8) for turn in range(12)]
    done = run(*faults)
    assert done.outcome == "succeeded"
    assert of(done, hosts.HostQuarantined) == []


def test_preemptions_condemn_nobody() -> None:
    """A node that is pre-empted again and again is the platform's business, not its host's."""
    done = run(*(Fault(f"step {40 * (turn + 1)}", "preempt_now", 1) for turn in range(5)))
    assert done.outcome == "succeeded"
    assert of(done, hosts.HostQuarantined) == []

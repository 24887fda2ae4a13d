"""Lifecycles: the compiled table against `transitions`' own machine, and the diagrams that people see."""

from __future__ import annotations

import itertools
import re

import pytest
from tools import diagrams
from transitions import MachineError

from dlrover_core.errors import IllegalTransition
from dlrover_core.job import incident_lifecycle, job, node_lifecycle
from dlrover_core.kernel.lifecycle import Lifecycle

ALL = [job.LIFECYCLE, node_lifecycle.LIFECYCLE, incident_lifecycle.INCIDENT, incident_lifecycle.ACTION]


def _pairs(lifecycle: Lifecycle) -> list[tuple[str, str]]:
    """Every state with every trigger; there are some."""
    found = list(itertools.product(lifecycle.states, lifecycle.triggers))
    assert len(found) > 10
    return found


def _id(value: object) -> str:
    return value.name if isinstance(value, Lifecycle) else str(value)


def _machine_after(lifecycle: Lifecycle, state: str, trigger: str) -> str | None:
    """The state a `transitions.Machine` is in after the trigger; None: it refuses."""
    machine = lifecycle.machine()
    machine.set_state(state)
    try:
        machine.trigger(trigger)
    except MachineError:
        return None
    return str(machine.state)


@pytest.mark.parametrize("lifecycle", ALL, ids=_id)
def test_equals_transitions(lifecycle: Lifecycle) -> None:
    """The compiled table and a transitions.Machine of the same data agree on every (state, trigger)."""
    for state, trigger in _pairs(lifecycle):
        dest = _machine_after(lifecycle, state, trigger)
        assert lifecycle.may(state, trigger) == (dest is not None), (state, trigger)
        if dest is not None:
            assert lifecycle.fire("it", state, trigger) == dest, (state, trigger)


@pytest.mark.parametrize("lifecycle", ALL, ids=_id)
def test_no_silent_third_case(lifecycle: Lifecycle) -> None:
    """Every (state, trigger) is a transition, or ignored and changes nothing, or illegal and raises; never two of these."""
    for state, trigger in _pairs(lifecycle):
        moves, ignored = lifecycle.may(state, trigger), (state, trigger) in lifecycle.ignored
        assert not (moves and ignored), (state, trigger)
        if not moves and ignored:
            assert lifecycle.fire("it", state, trigger) == state, (state, trigger)
        elif not moves:
            with pytest.raises(IllegalTransition, match=f"it cannot take '{trigger}' in state '{state}'"):
                lifecycle.fire("it", state, trigger)


# What must never happen, by name: a new pair is a decision.
ILLEGAL = {
    "job": {
        *itertools.product(["created", "running", "suspended", "stopping"], ["create"]),
        *itertools.product(["new", "stopping", "succeeded", "failed", "stopped"], ["succeed", "fail"]),
        ("suspended", "succeed"),
        *itertools.product(["new", "succeeded", "failed", "stopped"], ["run", "stop"]),
        *itertools.product(["stopping", "suspended"], ["run", "suspend"]),
        *itertools.product(["new", "succeeded", "failed", "stopped"], ["suspend"]),
        *itertools.product(
            ["new", "created", "running", "stopping", "succeeded", "failed", "stopped"], ["resume", "reopen"]
        ),
        *itertools.product(["new", "created", "running", "suspended", "succeeded", "failed", "stopped"], ["end"]),
        *itertools.product(["new", "succeeded", "failed", "stopped"], ["abandon"]),
    },
    "node": set(),
    "incident": {
        *itertools.product(["open", "closed", "fatal"], ["act", "hold"]),
        *itertools.product(["open", "diagnosed", "acting", "closed", "fatal"], ["fail"]),
        *itertools.product(["open", "closed"], ["close"]),
    },
    "action": {
        *itertools.product(["waiting", "in_force", "superseded", "done"], ["take", "hold"]),
        *itertools.product(["chosen"], ["supersede", "finish"]),
    },
}


@pytest.mark.parametrize("lifecycle", ALL, ids=_id)
def test_illegal_pairs_are_listed(lifecycle: Lifecycle) -> None:
    """The pairs that raise are exactly those listed here; a node has none, because any observation may come at any time."""
    every = set(itertools.product(lifecycle.states, lifecycle.triggers))
    assert every - set(lifecycle.table) - lifecycle.ignored == ILLEGAL[lifecycle.name]


@pytest.mark.parametrize("lifecycle", ALL, ids=_id)
def test_terminal_states_absorb(lifecycle: Lifecycle) -> None:
    """Nothing leads out of a terminal state."""
    assert not [key for key in lifecycle.table if key[0] in lifecycle.terminal]


@pytest.mark.parametrize("lifecycle", ALL, ids=_id)
def test_every_state_is_reached(lifecycle: Lifecycle) -> None:
    """From the initial state every other can be reached, and a terminal one from every state."""
    reach = {state: {state} for state in lifecycle.states}
    for _ in lifecycle.states:
        for (source, _trigger), dest in lifecycle.table.items():
            reach[source] |= reach[dest]
    assert reach[lifecycle.initial] == set(lifecycle.states)
    if lifecycle.terminal:
        assert all(found & lifecycle.terminal for found in reach.values())


def test_an_ended_job_lives_again_only_as_a_new_run() -> None:
    """From succeeded, failed and stopped there is one way out: a new run."""
    out = {key[1] for key in job.LIFECYCLE.table if key[0] in job.OVER}
    assert out == {"create"}


@pytest.mark.parametrize("key", ["before", "after", "prepare", "queued"])
def test_callbacks_are_refused(key: str) -> None:
    """A row with a callback is refused: effects belong to decisions."""
    with pytest.raises(ValueError, match="callbacks belong to decisions"):
        Lifecycle("x", ["a", "b"], "a", [{"trigger": "go", "source": "a", "dest": "b", key: "act"}])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"transitions": [{"trigger": "go", "source": "a", "dest": "c"}]}, r"unknown states \['c'\]"),
        ({"transitions": [{"trigger": "go", "source": "a", "dest": "b"}] * 2}, "two transitions"),
        ({"ignored": [("a", "go")]}, "both a transition and ignored"),
        ({"terminal": ["a"]}, "terminal states absorb"),
        ({"initial": "z"}, r"unknown states \['z'\]"),
    ],
)
def test_a_wrong_table_is_refused(arguments: dict[str, object], complaint: str) -> None:
    """A table that contradicts itself does not load."""
    good: dict[str, object] = {
        "states": ["a", "b"],
        "initial": "a",
        "transitions": [{"trigger": "go", "source": "a", "dest": "b"}],
    }
    with pytest.raises(ValueError, match=complaint):
        Lifecycle("x", **{**good, **arguments})  # type: ignore[arg-type]


def test_star_means_every_state() -> None:
    """The source '*' stands for all states, as it does for transitions."""
    star = Lifecycle("x", ["a", "b"], "a", [{"trigger": "go", "source": "*", "dest": "b"}])
    assert [star.fire("it", state, "go") for state in ("a", "b")] == ["b", "b"]
    assert _machine_after(star, "b", "go") == "b"


def test_machine_over_a_model_of_ones_own() -> None:
    """An embedder's object gets a live machine of the same data."""

    class Mine:
        state = ""

    mine = Mine()
    node_lifecycle.LIFECYCLE.machine(mine)
    assert mine.state == "planned"
    mine.run()  # type: ignore[attr-defined]
    assert mine.state == "running"


@pytest.mark.parametrize("lifecycle", ALL, ids=_id)
def test_diagram_is_mermaid(lifecycle: Lifecycle) -> None:
    """The diagram is a Mermaid state diagram that has every transition and every state."""
    first, *rest = lifecycle.diagram().splitlines()
    assert first == "stateDiagram-v2"
    edge = re.compile(r"    (\[\*\]|\w+) --> (\[\*\]|\w+)(?:: (\w+(?:, \w+)*))?")
    found = {
        (row[1], trigger): row[2]
        for row in map(edge.fullmatch, rest)
        if row and row[3]
        for trigger in row[3].split(", ")
    }
    assert all(edge.fullmatch(line) for line in rest)
    assert found == dict(lifecycle.table)


def test_diagrams_are_not_stale() -> None:
    """docs/diagrams shows what the code says; `python -m tools.diagrams` makes it so."""
    assert diagrams.stale() == []
    assert sorted(diagrams.diagrams()) == ["action.mmd", "incident.mmd", "job.mmd", "node.mmd"]


GUARDED = Lifecycle(
    "door",
    states=["shut", "open", "locked"],
    initial="shut",
    transitions=[
        {"trigger": "push", "source": "shut", "dest": "open", "conditions": ["strong"], "unless": "stuck"},
        {"trigger": "push", "source": "shut", "dest": "locked", "conditions": "stuck"},
        {"trigger": "pull", "source": ["open", "locked"], "dest": "shut", "unless": ["stuck"]},
        {"trigger": "slam", "source": "*", "dest": "shut"},
    ],
    guards={"strong": lambda subject: subject["strong"], "stuck": lambda subject: subject["stuck"]},
)


@pytest.mark.parametrize("stuck", [False, True])
@pytest.mark.parametrize("strong", [False, True])
def test_guards_decide_as_a_machine_does(strong: bool, stuck: bool) -> None:
    """Over every state, trigger and guard outcome the table and a `transitions.Machine` of the same data agree."""
    subject = {"strong": strong, "stuck": stuck}
    for state, trigger in itertools.product(GUARDED.states, GUARDED.triggers):
        machine = GUARDED.machine()
        machine.set_state(state)
        try:
            machine.trigger(trigger, subject)
        except MachineError:
            with pytest.raises(IllegalTransition):
                GUARDED.fire("door", state, trigger, subject)
        else:
            assert GUARDED.fire("door", state, trigger, subject) == machine.state, (state, trigger)


def test_guards_must_exist() -> None:
    """A row that names a guard nobody gave is refused when the lifecycle is made."""
    with pytest.raises(ValueError, match="no guards"):
        Lifecycle("x", ["a"], "a", [{"trigger": "t", "source": "a", "dest": "a", "conditions": "missing"}])


def test_guards_are_drawn() -> None:
    """A diagram says on what a guarded transition depends."""
    assert "shut --> open: push [strong and not stuck]" in GUARDED.diagram()

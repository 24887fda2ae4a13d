"""`JobSpec`: what can never run is refused where it is written down."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.errors import CoreError, SpecError
from dlrover_core.spec import NODES_MAX, GroupSpec, JobSpec, Policy, us

DURATIONS = [one.name for one in dataclasses.fields(JobSpec) if one.name.endswith("_s")]


def test_defaults_run() -> None:
    """A name is all that must be given."""
    spec = JobSpec("a")
    assert spec.groups == (GroupSpec(),)
    assert (spec.max_restarts, spec.on_join) == (3, "restart")


@pytest.mark.parametrize("name", ["a", "train-7", "a.b_c-d", "0", "x" * 63])
def test_names(name: str) -> None:
    """Job names are what pods, files and sockets can all be called."""
    assert JobSpec(name).job == name


@pytest.mark.parametrize(
    "name", ["", "A", "a b", "-a", "a-", "a--b", "../a", "a/b", "a\n", "ä", "x" * 64, ".a", "a\x00"]
)
def test_bad_names(name: str) -> None:
    """Anything else is refused, naming the setting."""
    with pytest.raises(SpecError) as caught:
        JobSpec(name)
    assert caught.value.field == "job-id"


@pytest.mark.parametrize(
    ("group", "field"),
    [
        ({"nodes_min": 0}, "nnodes"),
        ({"nodes_min": 3, "nodes_max": 2}, "nnodes"),
        ({"nodes_max": NODES_MAX + 1}, "nnodes"),
        ({"nproc": 0}, "nproc-per-node"),
        ({"unit": 0}, "unit"),
        ({"nodes_max": 6, "unit": 4}, "unit"),
        ({"nodes_max": 2, "unit": 4}, "unit"),
        ({"relaunch_max": -1}, "relaunch_max"),
        ({"name": "Worker"}, "group.name"),
        ({"name": "a-b"}, "group.name"),
        ({"name": ""}, "group.name"),
        ({"cpu_m": -1}, "cpu_m"),
        ({"gpus": -1}, "gpus"),
        ({"set": "Train"}, "group.set"),
        ({"set": "train", "coupling": "each"}, "group.set"),
        ({"coupling": "alone"}, "group.coupling"),
        ({"coupling": "each", "unit": 2, "nodes_max": 2}, "unit"),
        ({"precheck": "some"}, "group.precheck"),
        ({"on_join": "maybe"}, "group.on_join"),
        ({"slow_action": "kill"}, "group.slow_action"),
        ({"hang_s": -1.0}, "group.hang_s"),
        ({"finish_s": math.nan}, "group.finish_s"),
        ({"max_restarts": -1}, "group.max_restarts"),
    ],
)
def test_bad_groups(group: dict[str, object], field: str) -> None:
    """Bounds of a group that could never be met are refused, naming the setting."""
    with pytest.raises(SpecError) as caught:
        GroupSpec(**group)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"groups": ()}, "groups"),
        ({"groups": (GroupSpec(), GroupSpec())}, "groups"),
        ({"max_restarts": -1}, "max-restarts"),
        ({"on_join": "maybe"}, "on-join"),
        ({"heartbeat_s": 6.0}, "silence_s"),
        ({"heartbeat_s": 0.0}, "heartbeat_s"),
    ],
)
def test_bad_settings(settings: dict[str, object], field: str) -> None:
    """Settings that contradict each other, or would spin, are refused, naming the setting."""
    with pytest.raises(SpecError) as caught:
        JobSpec("a", **settings)  # type: ignore[arg-type]
    assert caught.value.field == field


CHIEF, WORKER, ROLLOUT = GroupSpec("chief", set="train"), GroupSpec(set="train"), GroupSpec("rollout", coupling="each")


@pytest.mark.parametrize(
    ("groups", "field", "words"),
    [
        ((GroupSpec(uses=("ps",)),), "group.uses", "group 'worker' uses 'ps', and the groups are worker"),
        ((GroupSpec(ends=False), GroupSpec("ps", ends=False)), "group.ends", "no group of worker, ps both ends"),
        ((GroupSpec(critical=False),), "group.ends", "set ends and critical of one group to true"),
        ((GroupSpec(set="ps"), GroupSpec("ps", set="other")), "group.set", "'ps' of group 'worker' is the name of a group"),
        ((GroupSpec(set="ps"), replace(ROLLOUT, name="ps")), "group.set", "outside that set"),
        ((CHIEF, replace(WORKER, max_restarts=5)), "group.max_restarts", "'chief' (3) and 'worker' (5) share the set 'train'"),
        ((CHIEF, replace(WORKER, store=False)), "group.store", "'chief' (True) and 'worker' (False) share"),
        ((CHIEF, replace(WORKER, critical=False)), "group.critical", "must agree"),
        ((GroupSpec(precheck="full", store=False),), "group.precheck", "'basic' or 'off'"),
    ],
)  # fmt: skip
def test_groups_that_do_not_fit_together(groups: tuple[GroupSpec, ...], field: str, words: str) -> None:
    """Groups that contradict each other are refused: the message names the field, the values, and what would do."""
    with pytest.raises(SpecError) as caught:
        JobSpec("a", groups)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_sets_of_a_job() -> None:
    """Groups that name the same set share it, a group of its own is one, and nodes that are sets of their own are in none."""
    spec = JobSpec("a", (CHIEF, GroupSpec("ps"), WORKER, ROLLOUT))
    assert spec.sets == {"train": (CHIEF, WORKER), "ps": (GroupSpec("ps"),)}
    assert JobSpec("a", (GroupSpec("chief", set="worker"), GroupSpec())).sets.keys() == {"worker"}


def test_the_policy_in_force() -> None:
    """A group's own setting holds for it, and the job's where it has none; 0 is a setting."""
    spec = JobSpec("a", (GroupSpec(), GroupSpec("ps", hang_s=0.0, max_restarts=9)), hang_s=40.0, precheck="basic")
    assert spec.in_force("worker") == Policy("basic", "restart", 40.0, "report", 3600.0, 3)
    assert spec.in_force("ps") == Policy("basic", "restart", 0.0, "report", 3600.0, 9)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "1", None, 10**9])
def test_bad_durations(value: object) -> None:
    """Every duration is a number of seconds, not negative, not a lifetime."""
    assert len(DURATIONS) > 30
    for name in DURATIONS:
        with pytest.raises(SpecError) as caught:
            JobSpec("a", **{name: value})  # type: ignore[arg-type]
        assert caught.value.field == name, name


def test_spec_errors_are_of_our_tree() -> None:
    """A SpecError is a CoreError and a ValueError, and its message begins with the setting."""
    with pytest.raises(CoreError, match=r"^on-join: 'restart', 'planned' or 'never', got 'x'$"):
        JobSpec("a", on_join="x")
    assert issubclass(SpecError, ValueError)


@pytest.mark.parametrize(("least", "unit", "floor"), [(1, 1, 1), (1, 4, 4), (4, 4, 4), (5, 4, 8), (8, 4, 8)])
def test_floor(least: int, unit: int, floor: int) -> None:
    """The floor is nodes_min raised to a multiple of unit: never 0 and never above nodes_max."""
    group = GroupSpec(nodes_min=least, nodes_max=8, unit=unit)
    assert group.floor == floor <= group.nodes_max


def test_every_setting_is_documented() -> None:
    """Every setting has a default and one line of doc."""
    for cls in (JobSpec, GroupSpec):
        for one in dataclasses.fields(cls):
            if one.name not in {"job", "groups", "name"}:
                assert one.metadata.get("doc"), one.name
                assert one.default is not dataclasses.MISSING


def test_group_by_name() -> None:
    """A group is found by its name, and a wrong name is an error that says which job."""
    spec = JobSpec("a", (GroupSpec("ps"), GroupSpec("worker")))
    assert spec.group("ps").name == "ps"
    with pytest.raises(SpecError, match="no group 'chief' in job 'a'"):
        spec.group("chief")


@given(
    st.integers(1, 5),
    st.integers(0, 5),
    st.integers(1, 4),
    st.floats(0, 10**8),
    st.sampled_from(["restart", "never"]),
)
def test_json_round_trip(least: int, more: int, unit: int, launch_s: float, on_join: str) -> None:
    """A spec comes back from the log's first event as it went in."""
    group = GroupSpec(nodes_min=least, nodes_max=(least + more) * unit, unit=unit)
    spec = JobSpec("a", (group, GroupSpec("ps", uses=("worker", "ps"))), launch_s=launch_s, on_join=on_join)
    assert JobSpec.from_json(spec.to_json()) == spec


def test_settings_of_a_later_version_are_left_out() -> None:
    """A log written by a version with more settings is read; one with fewer gets today's defaults."""
    raw = json.loads(JobSpec("a").to_json())
    raw["new_setting"] = 1
    raw["groups"][0]["also_new"] = 2
    del raw["quarantine_s"]
    assert JobSpec.from_json(json.dumps(raw)) == JobSpec("a")


def test_specs_are_immutable() -> None:
    """A spec never changes within a run."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        JobSpec("a").job = "b"  # type: ignore[misc]


@pytest.mark.parametrize(("seconds", "micros"), [(0, 0), (1.5, 1_500_000), (1e-6, 1), (0.1 + 0.2, 300_000)])
def test_us(seconds: float, micros: int) -> None:
    """Seconds become whole microseconds, rounded."""
    assert us(seconds) == micros

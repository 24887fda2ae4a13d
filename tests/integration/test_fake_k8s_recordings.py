"""The fake Kubernetes API server answers as the real one did: every recorded exchange and watch is sent to it again.

What may differ is listed in data/k8s/allowed.txt, each line with its reason. A difference without a line fails, and so
does a line without a difference.
"""

from __future__ import annotations

import asyncio
import fnmatch
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from k8s_replay import DATA, END, Replay, recorded, started

from dlrover_backends.fake_k8s import Fault, What
from dlrover_backends.fake_k8s.kubelet import NodeController, Scheduler

PODS = "/api/v1/namespaces/train/pods"
SCENARIOS = sorted(path.stem for path in DATA.glob("*.jsonl"))
BOUND_S = 60.0
Hook = Callable[[Replay], Awaitable[None]]


async def seven_pods(replay: Replay) -> None:
    """Scenario 02 recorded the creation of the first of seven pods."""
    found = {}
    for one in recorded(replay.scenario):
        if one["seq"] in {15, 17, 18}:
            found.update({item["metadata"]["name"]: item for item in one["response"]["body"]["items"]})
    for name in sorted(found)[1:]:
        if name.startswith("w-"):
            await replay.make({"kind": "Pod", **found[name]})


def make(*names: str) -> Hook:
    """Create pods like the first one of the scenario."""

    async def hook(replay: Replay) -> None:
        first = next(one for one in recorded(replay.scenario) if one["request"]["method"] == "POST")
        for name in names:
            body = {**first["request"]["body"], "metadata": {"name": name, "labels": {"app": "train", "job": "j1"}}}
            await replay.send("POST", PODS, body)

    return hook


def remove(*paths: str) -> Hook:
    """Delete without grace, as the recorder cleaned up."""

    async def hook(replay: Replay) -> None:
        for path in paths:
            await replay.send("DELETE", f"{path}?gracePeriodSeconds=0")

    return hook


async def all_pods(replay: Replay) -> None:
    """The recorder cleaned up, in the order of names."""
    _, _, listed = await replay.send("GET", PODS)
    for one in listed["items"]:
        await replay.send("DELETE", f"{PODS}/{one['metadata']['name']}?gracePeriodSeconds=0")


async def five_pods(replay: Replay) -> None:
    """Scenario 04 begins with five pods."""
    events = next(one for one in recorded(replay.scenario) if one["seq"] == 14)["events"]
    for one in events:
        obj = one["event"]["object"]
        metadata = {
            key: value for key, value in obj["metadata"].items() if key not in {"annotations", "resourceVersion"}
        }
        await replay.make({**obj, "metadata": metadata})


async def annotate(replay: Replay) -> None:
    """All five pods change."""
    for index in range(5):
        more = {"Content-Type": "application/merge-patch+json"}
        await replay.send("PATCH", f"{PODS}/w-{index}", {"metadata": {"annotations": {"n": "1"}}}, **more)


async def stop(replay: Replay) -> None:
    """SIGTERM: watches end cleanly, new connections are refused."""
    await replay.events_seen(5)
    await replay.server.stop()


async def start(replay: Replay) -> None:
    """The server is back."""
    await replay.server.start()


async def kill(replay: Replay) -> None:
    """SIGKILL under an open watch, and back with an empty cache after a compaction."""
    await replay.events_seen(5)
    await replay.server.kill()
    replay.server.compact()
    await replay.server.start()


async def stalled(replay: Replay) -> None:
    """The store does not answer: writes and consistent reads time out."""
    for verbs in ({"create"}, {"list"}):
        replay.server.faults.add(Fault(What.ERROR, verbs=frozenset(verbs), code=504))
    replay.server.faults.add(Fault(What.REFUSED, verbs=frozenset({"get"}), name="w-0"))


async def established(replay: Replay) -> None:
    """A definition is served a moment after its creation."""
    replay.settle()


async def throttled(replay: Replay) -> None:
    """One request in flight is the limit, and a watcher of everything may do what pods need."""
    rules = ({"apiGroups": [""], "resources": ["pods"], "verbs": ["*"]},)
    tokens = replay.server.rights.tokens
    tokens["viewer-token"] = type(tokens["viewer-token"])("viewer", (), rules)
    for _ in range(2):
        replay.server.faults.add(Fault(What.THROTTLED, user="viewer", verbs=frozenset({"create", "patch"})))


async def second_definition(replay: Replay) -> None:
    """Another definition is established."""
    replay.settle()


def bound(pod: Any) -> Any:
    """Whether a pod has a node."""
    return pod["spec"].get("nodeName")


def leaving(pod: Any) -> Any:
    """Whether a pod is being deleted."""
    return pod["metadata"].get("deletionTimestamp")


async def schedule(replay: Replay) -> None:
    """A host with 8 GPUs, and the scheduler."""
    await replay.make_node("gpu-0")
    await replay.beside(Scheduler)


def await_pods(**holds: Callable[[Any], Any]) -> Hook:
    """Wait until the scheduler has come so far; names are written with underscores."""

    async def hook(replay: Replay) -> None:
        for name, condition in holds.items():
            await replay.until(f"{PODS}/{name.replace('_', '-')}", condition)

    return hook


async def scheduled_away(replay: Replay) -> None:
    """The recorder cleaned up; the pod that waited takes the room."""
    await replay.until(f"{PODS}/gate-0", bound)
    for name in ("gate-0", "high-0"):
        await replay.send("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")
    await replay.until(f"{PODS}/low-1", bound)
    for name in ("low-1", "sel-0"):
        await replay.send("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")


async def patience(replay: Replay) -> None:
    """Hosts take their time to fall silent."""
    replay.watch_s = "20"
    await replay.adopt(next(one for one in recorded(replay.scenario) if one["seq"] == 5))


async def control(replay: Replay) -> None:
    """One of two hosts stops its heartbeats."""
    replay.heartbeat("gpu-1")
    await replay.beside(NodeController, grace_s=1.0, collect_s=0.3)


async def cordoned(replay: Replay) -> None:
    """The taint of a cordon is there."""
    await replay.until("/api/v1/nodes/gpu-1", lambda node: node["spec"].get("taints"))


async def collected(replay: Replay) -> None:
    """Pods of the host that is gone are collected."""
    await replay.until(PODS, lambda listed: not listed["items"])


def custom(**spec: object) -> dict[str, object]:
    """The body that the recorder varied."""
    whole = {"minReplicas": 1, "maxReplicas": 4, "template": {"image": "t"}, "unknownField": 7, **spec}
    metadata = {"name": "j2"}
    return {"apiVersion": "train.example.test/v1alpha1", "kind": "ElasticJob", "metadata": metadata, "spec": whole}


BUDGET = "/apis/policy/v1/namespaces/train/poddisruptionbudgets/b"
HOOKS: dict[str, dict[int, Hook]] = {
    "02": {11: seven_pods},
    "03": {16: make("e-0", "e-1")},
    "04": {8: five_pods, 14: annotate, 19: stop, 21: start, 22: kill, 33: stalled},
    "06": {END: all_pods},
    "08": {44: remove(f"{PODS}/ev-0", f"{PODS}/ev-1", f"{PODS}/run-0", BUDGET), END: remove(f"{PODS}/dep-1")},
    "09": {
        5: schedule,
        9: await_pods(low_0=bound),
        11: await_pods(low_1=lambda pod: pod["status"].get("conditions")),
        12: await_pods(high_0=lambda pod: pod["status"].get("nominatedNodeName"), low_0=leaving),
        15: await_pods(high_0=bound),
        17: await_pods(sel_0=lambda pod: pod["status"].get("conditions")),
        END: scheduled_away,
    },
    "10": {3: patience, 7: control, 12: cordoned, 14: await_pods(short_0=leaving), 18: collected},
    "11": {10: established, 36: second_definition},
    "13": {55: throttled},
    "14": {END: remove(f"{PODS}/u-0")},
}
BODIES: dict[str, dict[int, object]] = {
    "05": {4: {"metadata": {"annotations": {"step": "2"}}}},
    "11": {15: custom(replicas=-1), 16: custom(replicas=9), 17: custom()},
}


def allowances() -> list[tuple[str, str, str, str]]:
    """Scenario, sequence number, path and reason of what may differ."""
    lines = [line for line in (DATA / "allowed.txt").read_text().splitlines() if line and not line.startswith("#")]
    rows = [line.split("|") for line in lines]
    assert all(len(row) == 4 for row in rows), "a line is: scenario|sequence number|path|reason"
    return [(row[0].strip(), row[1].strip(), row[2].strip(), row[3].strip()) for row in rows]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_fake_answers_as_the_real_server_did(scenario: str) -> None:
    """Status, body and events are those recorded, but for uids, versions, times and what is openly allowed."""
    number = scenario[:2]

    async def play() -> Replay:
        server = await started()
        replay = Replay(scenario, server, HOOKS.get(number, {}), BODIES.get(number, {}))
        replay.unscheduled = number in {"01", "02", "05"}
        try:
            await asyncio.wait_for(replay.run(), BOUND_S)
        finally:
            await server.stop()
        return replay

    replay = asyncio.run(play())
    rows = [row for row in allowances() if row[0] == number]
    used: set[tuple[str, str, str, str]] = set()
    unexpected = []
    for difference in replay.differences:
        found = [
            row for row in rows if fnmatch.fnmatchcase(str(difference[1]), row[1]) and _matches(difference[2], row[2])
        ]
        used.update(found)
        if not found:
            unexpected.append(difference)
    allowed = len(replay.differences) - len(unexpected)
    told = f"{replay.exchanges} exchanges, {replay.events} events; {allowed} differences allowed by {len(used)} lines"
    sys.stdout.write(f"{scenario}: {told}\n")
    assert not unexpected, "\n".join(str(one) for one in unexpected[:20])
    assert used == set(rows), f"allowed.txt names what no longer differs: {sorted(set(rows) - used)}"


def _matches(path: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(path.replace("[", "(").replace("]", ")"), pattern.replace("[", "(").replace("]", ")"))

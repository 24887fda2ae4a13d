"""Rough edges of pods as nodes: lost labels, a host in trouble, last words, what nodes print, and an API server that is dead."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any, cast

import pytest
from k8s_scripted import Server, failed

from dlrover_adapters.cli import apart, backends
from dlrover_backends.k8s import endings, names
from dlrover_backends.k8s.api import Api
from dlrover_backends.k8s.client import KubernetesBackend
from dlrover_backends.k8s.errors import ApiError, Request, Unreachable
from dlrover_backends.k8s.hosts import FRESH_S, RACK_S, Hosts, of_host
from dlrover_backends.k8s.outputs import FOLLOWED_MAX, Outputs
from dlrover_core import DELETED, BackendContext, LaunchRefused, Observation
from dlrover_core.diagnosis import signatures
from dlrover_core.diagnosis.classify import of_platform
from dlrover_core.testing.backend_stand import make_launch, watching

BOUND_S = 20.0
PODS = "/api/v1/namespaces/ml/pods"
HERE = BackendContext("conformance", "r1", ("m:1",), "t", arguments=("x.py",), args="image=i:1,namespace=ml")
SILENT = {
    "type": "Ready",
    "status": "Unknown",
    "reason": "NodeStatusUnknown",
    "message": "Kubelet stopped posting node status.",
}
TAINT = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}

CORDONED = {
    "unschedulable": True,
    "taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}],
}


def path_of(name: str) -> str:
    """Of a node's pod."""
    return f"{PODS}/{names.pod_name(name, 'r1')}"


# ---- labels


def test_a_pod_that_has_lost_its_labels_has_no_twin() -> None:
    """Its node is gone for the job; the successor is refused, not for good, until that pod, which is deleted, has ended."""

    async def story() -> None:
        server = Server()
        backend = KubernetesBackend(HERE, server)
        async with watching(backend) as watch:
            await backend.launch(make_launch(), 1)
            pod = server.objects[path_of(make_launch().name)]
            pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "node", "state": {"running": {}}}]}
            server.tell("MODIFIED", pod)
            await watch.running(make_launch().name)
            server.tell("DELETED", pod)  # it has left the selector
            await watch.gone(make_launch().name)
            pod["metadata"]["labels"] = {}
            for other in (backend, KubernetesBackend(HERE, server)):
                server.objects[path_of(make_launch().name)] = pod
                with pytest.raises(LaunchRefused, match="has lost its labels and still runs") as told:
                    await other.launch(make_launch(incarnation=1), 1)
                assert not told.value.permanent
                assert path_of(make_launch().name) not in server.objects
            await backend.launch(make_launch(incarnation=1), 1)
            assert len(server.pods()) == 1

    asyncio.run(asyncio.wait_for(story(), BOUND_S))


def test_a_successor_of_a_listed_pod_waits_for_nobody() -> None:
    """The pod of a lost host stays, labels and all: its place is filled at once; an ended one costs no question."""

    async def story() -> None:
        server = Server()
        backend = KubernetesBackend(HERE, server)
        await backend.launch(make_launch(), 1)
        await backend.launch(make_launch(incarnation=1), 1)
        assert len(server.pods()) == 2
        async with watching(backend) as watch:
            await watch.until(lambda seen: len(seen) == 2)
            await backend.delete(make_launch(incarnation=1).name, 1, 0)
            pod = {**server.pods()[0], "metadata": {**server.pods()[0]["metadata"], "deletionTimestamp": "x"}}
            server.tell("DELETED", pod)
            await watch.gone(make_launch().name)
        asked = len(server.asked)
        await KubernetesBackend.launch(backend, make_launch(index=1), 1)
        assert [one[0] for one in server.asked[asked:]] == ["POST"]

    asyncio.run(asyncio.wait_for(story(), BOUND_S))


def test_what_the_end_of_a_pod_says() -> None:
    """A person deleted it, the platform took it, its host is lost, or its labels are gone: only the first speaks for its host."""
    before = Observation("worker-0-0", "running", host="h1", domain="a")
    pod: dict[str, Any] = {"metadata": {"name": "p"}, "status": {}}
    deleted: dict[str, Any] = {**pod, "metadata": {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    disrupted = {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]}
    assert endings.removed(deleted, before) == before._replace(phase="gone", reason=DELETED)
    assert endings.removed({**deleted, "status": disrupted}, before).reason == "PreemptionByScheduler"
    assert endings.removed(deleted, before, "Evicted").reason == "Evicted"
    assert endings.removed(deleted, before._replace(phase="lost")).reason == ""
    assert endings.removed(pod, before).reason == ""


def test_all_who_begin_at_once_share_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master launches and observes at the same time: connections that nobody knows would never be closed."""
    opened = list[object]()

    class Slow:
        """A transport that takes its time to open."""

        namespace = "ml"

        def __init__(self, *_: str) -> None:
            opened.append(self)

        async def open(self) -> None:
            """Let others come meanwhile."""
            await asyncio.sleep(0)

    monkeypatch.setattr("dlrover_backends.k8s.transport.Transport", Slow)

    async def story() -> None:
        backend = KubernetesBackend(HERE)
        await asyncio.gather(*(backend._connected() for _ in range(3)))
        assert opened == [backend.api]

    asyncio.run(asyncio.wait_for(story(), BOUND_S))


# ---- hosts


def test_what_is_wrong_with_a_host() -> None:
    """Not ready, with the platform's words; tainted by the platform; cordoned; else nothing."""
    named = {"metadata": {"name": "h1"}}
    assert of_host({**named, "status": {"conditions": [SILENT]}, "spec": {"taints": [TAINT, TAINT]}}) == (
        "host h1 is not ready (NodeStatusUnknown: Kubelet stopped posting node status.), tainted "
        "node.kubernetes.io/unreachable:NoExecute"
    )
    assert of_host({**named, "spec": {"unschedulable": True}}) == "host h1 is cordoned"
    taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    assert (
        of_host({**named, "status": {"conditions": [{**SILENT, "status": "True"}]}, "spec": {"taints": [taint]}}) == ""
    )


def test_racks_are_read_from_hosts() -> None:
    """A label of its Node is a pod's failure domain, else its own zone is; a host is asked once, and who may not look goes on."""

    async def story() -> None:
        server, clock = Server(), 0.0
        node = make_launch()
        here = dataclasses.replace(HERE, args=f"{HERE.args},rack=example.com/rack")
        backend = KubernetesBackend(here, server)
        await backend.launch(node, 1)
        pod = server.objects[path_of(node.name)]
        pod["spec"]["nodeName"] = "h1"
        pod["metadata"]["labels"]["topology.kubernetes.io/zone"] = "zone-a"
        pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "node", "state": {"running": {}}}]}
        server.objects["/api/v1/nodes/h1"] = {"metadata": {"name": "h1", "labels": {"example.com/rack": "r7"}}}
        async with watching(backend) as watch:
            seen = await watch.until(lambda seen: seen[node.name].phase == "running")
            assert (seen[node.name].host, seen[node.name].domain) == ("h1", "r7")
            server.objects["/api/v1/nodes/h1"]["metadata"]["labels"] = {}
            server.tell("DELETED", pod)
            await watch.gone(node.name)
            assert watch.seen(node.name)[-1].domain == "r7"
        hosts = Hosts(lambda: clock)
        assert await hosts.rack(server, "h1", "example.com/rack") == ""
        server.objects["/api/v1/nodes/h1"]["metadata"]["labels"] = {"example.com/rack": "r8"}
        assert await hosts.rack(server, "h1", "example.com/rack") == ""
        clock = RACK_S
        server.faults["GET"] = deque([failed(500)])
        assert await hosts.rack(server, "h1", "example.com/rack") == ""
        assert await hosts.rack(server, "h1", "example.com/rack") == "r8"
        clock = 2 * RACK_S
        server.faults["GET"].append(failed(403))
        asked = len(server.asked)
        for _ in range(3):
            assert await hosts.rack(server, "h1", "example.com/rack") == "r8"
        assert len(server.asked) == asked + 1

    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_lost_node_says_what_its_host_is() -> None:
    """The cluster's word for the host stands beside the pod's; who may not read hosts asks once."""

    async def story() -> None:
        server, clock = Server(), 0.0
        node = make_launch()
        backend = KubernetesBackend(HERE, server)
        await backend.launch(node, 1)
        pod = server.objects[path_of(node.name)]
        pod["spec"]["nodeName"] = "h1"
        running = {"name": "node", "ready": True, "state": {"running": {}}}
        ready = {"type": "Ready", "status": "False"}
        pod["status"] = {"phase": "Running", "containerStatuses": [running], "conditions": [ready]}
        server.objects["/api/v1/nodes/h1"] = {"metadata": {"name": "h1"}, "status": {"conditions": [SILENT]}}
        async with watching(backend) as watch:
            seen = await watch.until(lambda seen: node.name in seen and seen[node.name].phase == "lost")
            assert seen[node.name].reason.startswith("its host is not ready; host h1 is not ready (NodeStatusUnknown")
        hosts = Hosts(lambda: clock)
        assert await hosts.wrong(server, "h2") == "host h2 is no longer in the cluster"
        clock = 60.0
        server.faults["GET"] = deque([failed(500)])
        assert await hosts.wrong(server, "h1") == ""
        clock = 120.0
        server.faults["GET"].append(failed(403))
        asked = len(server.asked)
        for _ in range(3):
            assert await hosts.wrong(server, "h1") == ""
        assert len(server.asked) == asked + 1

    asyncio.run(asyncio.wait_for(story(), BOUND_S))


@pytest.mark.parametrize("away", [False, True])
def test_a_deletion_on_a_cordoned_host_is_plain(away: bool) -> None:
    """A person has deleted the pod: the word stays alone, and is no strike, unless the host is away, too."""

    async def story() -> None:
        server, node = Server(), make_launch()
        backend = KubernetesBackend(HERE, server)
        status = {"conditions": [SILENT if away else {"type": "Ready", "status": "True"}]}
        server.objects["/api/v1/nodes/h1"] = {"metadata": {"name": "h1"}, "spec": CORDONED, "status": status}
        async with watching(backend) as watch:
            await backend.launch(node, 1)
            pod = server.objects[path_of(node.name)]
            pod["spec"]["nodeName"] = "h1"
            pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "node", "state": {"running": {}}}]}
            server.tell("MODIFIED", pod)
            await watch.running(node.name)
            pod["metadata"]["deletionTimestamp"] = "2026-11-20T12:00:00Z"
            server.tell("DELETED", pod)
            await watch.gone(node.name)
            reason = watch.seen(node.name)[-1].reason
            assert reason.startswith("Deleted; host h1 is not ready") if away else reason == DELETED

    asyncio.run(asyncio.wait_for(story(), BOUND_S))


def test_a_slow_api_holds_up_the_news_of_one_host_alone() -> None:
    """Of many lost hosts only the first waits for an answer that does not come; after a while they are looked up again."""

    async def story() -> None:
        clock, asked = 0.0, list[str]()

        class Slow:
            async def ask(self, verb: str, path: str) -> object:
                asked.append(path)
                await asyncio.Event().wait()

        api, hosts = cast(Api, Slow()), Hosts(lambda: clock, ask_s=0.01)
        for name in ("h1", "h2", "h3"):
            assert await hosts.wrong(api, name) == ""
            assert await hosts.rack(api, name, "example.com/rack") == ""
        assert asked == ["/api/v1/nodes/h1"]
        clock = FRESH_S
        assert await hosts.rack(api, "h2", "example.com/rack") == ""
        assert await hosts.wrong(api, "h3") == ""
        assert asked == ["/api/v1/nodes/h1", "/api/v1/nodes/h2"]

    asyncio.run(asyncio.wait_for(story(), BOUND_S))


# ---- what was printed


def test_last_words_are_the_node_s_own() -> None:
    """A dead agent's last words are told, their end where they are long, and are never taken for the platform's."""
    words = "x" * 400 + " Evicted: The node was low on resource: memory"
    state = {"terminated": {"exitCode": 1, "reason": "Error", "message": words}}
    pod = {
        "metadata": {"name": "p"},
        "status": {"phase": "Failed", "containerStatuses": [{"name": "node", "state": state}]},
    }
    seen = endings.observation(pod)
    assert seen.reason.startswith("exit code 1; printed last: xx")
    assert seen.reason.endswith("low on resource: memory")
    assert of_platform(signatures.table(), "failed", 1, seen.reason).signature == "exit.silent"
    state["terminated"] |= {
        "reason": "StartError",
        "message": 'exec: "dlrover-run": executable file not found in $PATH',
    }
    assert endings.observation(pod).reason == 'StartError: exec: "dlrover-run": executable file not found in $PATH'


class Texts(Server):
    """A server whose containers print: by a pod's name, answers in order, each lines that may end in an error."""

    def __init__(self, **printed: list[list[Any]]) -> None:
        super().__init__()
        self.printed = printed
        self.queries: list[Mapping[str, str]] = []

    async def lines(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """The next answer of that pod."""
        self.queries.append(query)
        for line in self.printed[path.split("/")[-2].replace("-", "_")].pop(0):
            if isinstance(line, ApiError):
                raise line
            yield line


def _running(name: str) -> dict[str, Any]:
    status = {"phase": "Running", "containerStatuses": [{"name": "node", "state": {"running": {}}}]}
    notes = {"kubectl.kubernetes.io/default-container": "node", names.NOTE_NAME: f"j-{name}"}
    return {"metadata": {"name": name, "uid": name, "annotations": notes}, "status": status}


def shown(server: Texts, until: str, *pods: dict[str, Any], earlier: bool = True) -> str:
    """What is written for these pods, until a text is among it."""
    server.objects |= {f"{PODS}/{one['metadata']['name']}": one for one in pods}
    text, enough = bytearray(), asyncio.Event()

    def write(line: bytes) -> None:
        text.extend(line)
        if until.encode() in text:
            enough.set()

    async def story() -> None:
        ours = lambda pod: pod["metadata"]["uid"] != "theirs"  # noqa: E731
        outputs = Outputs(server, PODS, "", ours, write, earlier=earlier)  # type: ignore[arg-type]
        running = asyncio.ensure_future(outputs.run())
        await enough.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(story(), BOUND_S))
    return text.decode()


def test_what_nodes_print_is_shown() -> None:
    """Lines of our pods whose containers have begun, as they are; agents' own log and strangers are left out."""
    log = b"timestamp=2026-01-01T00:00:00Z level=info role=agent event=x"
    server = Texts(a=[[b"[default0]: one", log, b"two"]], theirs=[[b"no"]])
    waiting = {**_running("w"), "status": {"phase": "Pending"}}
    assert shown(server, "two\n", _running("a"), _running("theirs"), waiting) == "[default0]: one\ntwo\n"
    assert server.queries == [{"follow": "true", "container": "node"}]


def test_who_attaches_later_sees_what_comes_from_then_on() -> None:
    """What a pod has printed before is left to kubectl logs."""
    server = Texts(a=[[b"new"]])
    assert shown(server, "new\n", _running("a"), earlier=False) == "new\n"
    assert server.queries == [{"follow": "true", "tailLines": "0", "container": "node"}]


def test_output_that_is_cut_off_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said where the rest is, and what comes later is shown; without the right that is said once."""
    monkeypatch.setattr("dlrover_backends.k8s.outputs.AGAIN_S", 0.0)
    cut = Unreachable(Request("GET", "/log"), 0, "cut")
    server = Texts(a=[[b"one", cut], [b"three"]], b=[[failed(403)]], c=[[failed(403)]], d=[[failed(404)]])
    told = shown(server, "three\n", *map(_running, "abcd"))
    assert "dlrover-run: the output of node j-a was cut off; kubectl logs a has all of it\n" in told
    assert told.count("verb get, resource pods/log") == 1
    assert {"follow": "true", "container": "node", "tailLines": "0"} in server.queries


def test_not_all_of_a_big_job_is_shown() -> None:
    """As many pods as a person can look at; it is said that there are more."""
    server = Texts(**{f"p{i}": [[]] for i in range(FOLLOWED_MAX)})
    told = shown(server, "kubectl logs", *(_running(f"p{i}") for i in range(FOLLOWED_MAX + 2)))
    assert (
        told
        == f"dlrover-run: the output of {FOLLOWED_MAX} nodes is shown here; kubectl logs shows that of the others\n"
    )


# ---- an API server that is dead at the end


class Stuck:
    """A backend that never comes to an end of clearing."""

    remedy = "remove it with: kubectl delete it"

    def __init__(self) -> None:
        self.began = asyncio.Event()

    async def clear(self) -> None:
        """For ever."""
        self.began.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("interrupted", [False, True])
def test_clearing_is_given_up(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a bound, or at Ctrl-C, with what a person types instead."""

    class Settings:
        class job:  # noqa: N801  # as the settings have it
            job = "digits"

    async def story() -> None:
        backend = Stuck()
        monkeypatch.setattr(backends, "made", lambda *_: backend)
        monkeypatch.setattr(apart, "CLEAR_S", 60.0 if interrupted else 0.01)
        clearing = asyncio.ensure_future(apart.cleared(Settings, "t"))  # type: ignore[arg-type]
        await backend.began.wait()
        if interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        await clearing

    asyncio.run(asyncio.wait_for(story(), BOUND_S))
    why = "interrupted" if interrupted else "it has not answered within 0.01 s"
    said = f"job digits: what its backend has made may be left behind: {why}; remove it with: kubectl delete it"
    assert said in capsys.readouterr().err


def test_clearing_is_tried_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that is away for a moment costs a moment; one that stays away is told with what it said."""

    class Settings:
        class job:  # noqa: N801  # as the settings have it
            job = "digits"

    class Moody:
        remedy = ""
        left = 2

        async def clear(self) -> None:
            self.left -= 1
            if self.left >= 0:
                raise Unreachable(Request("GET", "/x"), 0, "away")

    monkeypatch.setattr(apart, "CLEAR_AGAIN_S", 0.0)
    moody = Moody()
    monkeypatch.setattr(backends, "made", lambda *_: moody)
    asyncio.run(asyncio.wait_for(apart.cleared(Settings, "t"), BOUND_S))  # type: ignore[arg-type]
    assert moody.left == -1
    assert capsys.readouterr().err == ""
    moody.left = 10**9
    monkeypatch.setattr(apart, "CLEAR_S", 0.02)
    asyncio.run(asyncio.wait_for(apart.cleared(Settings, "t"), BOUND_S))  # type: ignore[arg-type]
    assert "may be left behind: Unreachable: GET /x: no answer  away" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("terminated", "health", "told"),
    [
        ({"exitCode": 1, "reason": "Error"}, "Unhealthy", "DeviceUnhealthy: nvidia.com/gpu GPU-3fa1"),
        ({"exitCode": 1, "reason": "Error"}, "Healthy", "exit code 1"),
        ({"exitCode": 137, "reason": "OOMKilled"}, "Unhealthy", "OOMKilled"),
        ({"exitCode": 0, "reason": "Completed"}, "Unhealthy", "exit code 0"),
    ],
)
def test_a_broken_device_speaks_against_its_host(terminated: dict[str, Any], health: str, told: str) -> None:
    """What ends by itself on a device that the kubelet calls unhealthy; the platform's own words come first."""
    devices = [
        {"resourceID": "GPU-3fa1", "health": health},
        {"resourceID": "GPU-9c02", "health": "Healthy"},
    ]
    container = {
        "name": "node",
        "state": {"terminated": terminated},
        "allocatedResourcesStatus": [{"name": "nvidia.com/gpu", "resources": devices}],
    }
    pod = {
        "metadata": {"name": "p", "annotations": {names.NOTE_NAME: "worker-0-0"}},
        "spec": {"nodeName": "h1"},
        "status": {"phase": "Failed" if terminated["exitCode"] else "Succeeded", "containerStatuses": [container]},
    }
    seen = endings.observation(pod)
    assert (seen.reason, seen.host) == (told, "h1")

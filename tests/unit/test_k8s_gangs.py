"""Gangs: which PodGroup a job has, how its pods name it, and what a cluster without the kind is told."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from contextlib import redirect_stdout
from typing import Any

import pytest
import yaml
from k8s_inside import Inside, pod_groups

from dlrover_adapters.cli import backends
from dlrover_adapters.cli import main as dlrover
from dlrover_adapters.cli import options as cli_options
from dlrover_backends.k8s import endings, gangs, names, refusals, settings
from dlrover_backends.k8s.client import KubernetesBackend
from dlrover_backends.k8s.errors import Request, of_answer
from dlrover_core import BackendContext, LaunchRefused
from dlrover_core.errors import SpecError
from dlrover_core.runtime.backend import GroupSize, Wanted
from dlrover_core.testing.backend_stand import JOB, make_launch

BOUND_S = 20.0
NATIVE, VOLCANO, PLUGINS = "scheduling.k8s.io", "scheduling.volcano.sh", "scheduling.x-k8s.io"
WORKERS = GroupSize("worker", "worker", 2, 4)


def backend(api: Inside, gang: str, more: str = "") -> KubernetesBackend:
    """The backend of a run with gangs."""
    here = BackendContext(JOB, "r1", ("m:1",), "t", arguments=("a.py",), args=f"image=i,namespace=ml,gang={gang}{more}")
    return KubernetesBackend(here, api, wall=lambda: 0.0)


def tell(story: Callable[[], Awaitable[None]]) -> None:
    """Run a story within a bound."""
    asyncio.run(asyncio.wait_for(story(), BOUND_S))


async def launched(api: Inside, gang: str, more: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """The PodGroup and the pod of a node."""
    one = backend(api, gang, more)
    await one.check()
    await one.sized(Wanted((WORKERS,)), 1)
    await one.launch(make_launch(3), 1)
    (group,) = api.objects("podgroups", gangs.KINDS[gang].group)
    (pod,) = api.objects("pods")
    return group, pod


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        (("v1alpha2",), "v1alpha2"),
        (("v1alpha2", "v1alpha3"), "v1alpha3"),
        (("v1alpha2", "v1alpha3", "v1beta1"), "v1beta1"),
    ],
)
def test_the_native_group_is_the_newest_that_is_served(versions: tuple[str, ...], chosen: str) -> None:
    """Discovery chooses the version; the group has MIN, and every pod names it, those above MIN too."""

    async def story() -> None:
        group, pod = await launched(Inside([pod_groups(NATIVE, one) for one in versions]), "native")
        assert group["apiVersion"] == f"scheduling.k8s.io/{chosen}"
        assert group["spec"] == {"schedulingPolicy": {"gang": {"minCount": 2}}}
        assert pod["spec"]["schedulingGroup"] == {"podGroupName": group["metadata"]["name"]}
        assert group["metadata"]["ownerReferences"] == pod["metadata"]["ownerReferences"]

    tell(story)


def test_volcano_has_its_annotation_and_scheduler() -> None:
    """Volcano's pods name the group in an annotation, and go to its scheduler; the queue is Volcano's own."""

    async def story() -> None:
        group, pod = await launched(Inside([pod_groups(VOLCANO)]), "volcano", ",queue=research")
        assert group["spec"] == {"minMember": 2, "queue": "research"}
        assert pod["metadata"]["annotations"][gangs.VOLCANO_GROUP] == group["metadata"]["name"]
        assert pod["spec"]["schedulerName"] == "volcano"

    tell(story)


def test_coscheduling_has_its_label_and_scheduler() -> None:
    """Pods of the scheduler plugins name the group in a label."""

    async def story() -> None:
        group, pod = await launched(Inside([pod_groups(PLUGINS, "v1alpha1")]), "coscheduling")
        assert group["spec"] == {"minMember": 2}
        assert pod["metadata"]["labels"][gangs.COSCHEDULING_GROUP] == group["metadata"]["name"]
        assert pod["spec"]["schedulerName"] == "scheduler-plugins-scheduler"

    tell(story)


def test_a_scheduler_that_the_template_names_stays() -> None:
    """Somebody's second scheduler under another name is the one that is meant."""
    pod: dict[str, Any] = {"metadata": {"annotations": {}, "labels": {}}, "spec": {"schedulerName": "mine"}}
    told = settings.Settings(gang="coscheduling")
    gangs.join(BackendContext(JOB, "r1", (), ""), told, pod, "worker", 2)
    assert pod["spec"]["schedulerName"] == "mine"


def test_a_cluster_without_the_kind_is_told_before_anything_starts() -> None:
    """The kind, its versions, what to install, and which one is there instead."""

    async def story() -> None:
        api = Inside([pod_groups(VOLCANO)])
        with pytest.raises(
            SpecError, match=r"gang: 'native' needs PodGroup of scheduling\.k8s\.io/v1beta1 or v1alpha3"
        ) as wrong:
            await backend(api, "native").check()
        assert "1.36 or newer with the feature gates GenericWorkload" in str(wrong.value)
        assert "say gang=volcano, which it serves" in str(wrong.value)
        with pytest.raises(SpecError, match=r"install the scheduler plugins.*; or leave gang out"):
            await backend(Inside(), "coscheduling").check()

    tell(story)


def test_masters_that_meet_a_cluster_without_the_kind_end_the_job() -> None:
    """Nobody has asked beforehand where masters are pods: then each node is refused for good, in the same words."""

    async def story() -> None:
        one = backend(Inside(), "volcano")
        with pytest.raises(LaunchRefused, match="not known yet") as refused:
            await one.launch(make_launch(), 1)
        assert not refused.value.permanent
        await one.sized(Wanted((WORKERS,)), 1)
        with pytest.raises(LaunchRefused, match="'volcano' needs PodGroup") as refused:
            await one.launch(make_launch(), 1)
        assert refused.value.permanent

    tell(story)


def test_a_group_follows_the_size_and_ends_with_the_job() -> None:
    """MIN that is scaled is patched; a group that somebody deleted is made anew; a job that is over removes it."""

    async def story() -> None:
        api = Inside([pod_groups()])
        await launched(api, "native")
        other = backend(api, "native")
        await other.sized(Wanted((WORKERS._replace(nodes_min=1),)), 2)
        (group,) = api.objects("podgroups", NATIVE)
        assert group["spec"]["schedulingPolicy"]["gang"]["minCount"] == 1
        version = group["metadata"]["resourceVersion"]
        await other.sized(Wanted((WORKERS._replace(nodes_min=1),)), 2)
        assert api.objects("podgroups", NATIVE)[0]["metadata"]["resourceVersion"] == version
        await api.ask("DELETE", f"/apis/{NATIVE}/v1beta1/namespaces/ml/podgroups/{group['metadata']['name']}")
        await other.sized(Wanted((WORKERS,)), 2)
        assert len(api.objects("podgroups", NATIVE)) == 1
        await other.sized(Wanted((WORKERS,), "succeeded"), 2)
        assert api.objects("podgroups", NATIVE) == []

    tell(story)


def test_groups_go_with_what_owns_them() -> None:
    """Clearing the run, from a launcher that knows nothing of its sizes, leaves no group."""

    async def story() -> None:
        api = Inside([pod_groups()])
        await launched(api, "native")
        await backend(api, "native").clear()
        await asyncio.sleep(0)
        assert api.objects("podgroups", NATIVE) == api.objects("secrets") == []

    tell(story)


def test_a_stranger_s_group_is_named() -> None:
    """A PodGroup of somebody else's under our name is no gang of ours."""

    async def story() -> None:
        api = Inside([pod_groups()])
        name = names.gang_name(JOB, "r1", "worker")
        await api.ask("POST", f"/apis/{NATIVE}/v1beta1/namespaces/ml/podgroups", body={"metadata": {"name": name}})
        one = backend(api, "native")
        await one.sized(Wanted((WORKERS,)), 1)
        with pytest.raises(LaunchRefused, match=f"PodGroup {name} in namespace ml is not of this run: delete it"):
            await one.launch(make_launch(), 1)

    tell(story)


def test_one_gang_for_each_coupling_set() -> None:
    """Groups that train together start together; nodes that train by themselves wait for nobody."""
    groups = (
        WORKERS,
        GroupSize("ps", "worker", 1, 1),
        GroupSize("eval", "", 1, 3),
        GroupSize("critic", "critic", 3, 3),
    )
    assert gangs.least(groups) == {"worker": 3, "critic": 3}
    pod: dict[str, Any] = {"metadata": {"annotations": {}, "labels": {}}, "spec": {}}
    api = Inside([pod_groups()])

    async def story() -> None:
        one = backend(api, "native")
        await one.sized(Wanted(groups), 1)
        assert one._gangs is not None
        one._gangs.admit("eval", pod)

    tell(story)
    assert pod["spec"] == {}
    assert len(api.objects("podgroups", NATIVE)) == 2


def test_a_pod_of_a_gang_says_what_it_waits_for() -> None:
    """A scheduler that holds a gang back says nothing at all of its pods; what it says otherwise counts."""

    async def story() -> None:
        _, pod = await launched(Inside([pod_groups()]), "native")
        assert endings.observation(pod).waits == "Gang: none starts before 2 can start together"
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
        assert endings.observation({**pod, "status": {"conditions": [condition]}}).waits == "Unschedulable: no room"
        assert endings.observation({**pod, "spec": {**pod["spec"], "nodeName": "h"}}).waits == ""

    tell(story)


def test_volcano_that_lets_no_pod_in_yet_is_waited_for() -> None:
    """Its admission may refuse pods until their group is enqueued: that is no rule that forbids them for good."""
    words = 'admission webhook "validatepod.volcano.sh" denied the request: failed to create pod, the podgroup phase is Pending'
    refused = refusals.of_launch(of_answer(Request("POST", "/api/v1/namespaces/ml/pods"), 403, {"message": words}, {}))
    assert refused is not None
    assert not refused.permanent


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--backend", "k8s:gang=lockstep"), "gang='lockstep': write native, volcano or coscheduling"),
        (("--backend", "k8s:queue=Mine"), "queue='Mine' is no queue: write lower-case letters"),
        (("--backend", "k8s:rack=a b"), "rack='a b' is no label's key: write topology.kubernetes.io/rack"),
        (("--gang", "native", "--backend", "slurm"), "'native' is for --backend k8s, and the backend is slurm"),
        (("--queue", "a,b", "--backend", "k8s"), "'a,b' is no queue: write the name of a LocalQueue"),
    ],
)
def test_gangs_and_queues_that_are_none(line: tuple[str, ...], said: str) -> None:
    """Each is told with its value, and with what to write."""
    options = cli_options.parse([*line, "train.py"])
    with pytest.raises(SpecError, match=said):
        backends.chosen(options)


def test_rendering_shows_the_gang() -> None:
    """`dlrover k8s render` prints the group with MIN before the pods that name it."""
    with redirect_stdout(io.StringIO()) as out:
        assert dlrover.main(["k8s", "render", "--image", "a", "--gang", "volcano", "--nnodes", "2:3", "train.py"]) == 0
    _, _, _, group, *pods = yaml.safe_load_all(out.getvalue())
    assert (group["apiVersion"], group["spec"]) == ("scheduling.volcano.sh/v1beta1", {"minMember": 2})
    assert {one["metadata"]["annotations"][gangs.VOLCANO_GROUP] for one in pods} == {group["metadata"]["name"]}
    assert len(pods) == 3


def test_rights() -> None:
    """What a Role must grant names the API group of the scheduler that was chosen."""
    (rule,) = gangs.rules("volcano")
    assert rule == {"apiGroups": [VOLCANO], "resources": ["podgroups"], "verbs": ["create", "delete", "get", "patch"]}
    assert gangs.rules("") == []

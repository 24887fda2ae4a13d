"""Making a job's masters in a cluster: all or nothing, whoever else makes a job of that name."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from k8s_scripted import Server, failed

from dlrover_backends.k8s import jobs, making, masters, names
from dlrover_backends.k8s.errors import Request, Unreachable
from dlrover_core.errors import SpecError

PLAN = masters.MasterPlan("ml", "digits", "trainer:1", ("train.py",), "a-secret", claim="logs")
JOB = "/apis/batch/v1/namespaces/ml/jobs/digits-masters"
SECRET = "/api/v1/namespaces/ml/secrets/digits-masters"
BOUND_S = 20.0


class Store(Server):
    """A server that patches metadata, and dates what it makes. ``before``: called before each create is done, with its path."""

    def __init__(self, *, age_s: float = 0.0) -> None:
        super().__init__()
        self.age_s = age_s
        self.before: Callable[[str], Awaitable[None]] | None = None
        self.after: Callable[[str], Awaitable[None]] | None = None

    async def ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        """As of any server."""
        if method == "PATCH":
            return self._patched(path, more["body"]["metadata"])
        if method == "POST" and self.before is not None:
            await self.before(path)
        answer = await super().ask(method, path, **more)
        if method == "POST":
            made = dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=self.age_s)
            answer["metadata"]["creationTimestamp"] = made.strftime("%Y-%m-%dT%H:%M:%SZ")
            if self.after is not None:
                await self.after(path)
        return answer

    def _patched(self, path: str, told: dict[str, Any]) -> dict[str, Any]:
        if path not in self.objects:
            raise failed(404, "not found", method="PATCH")
        found = self.objects[path]["metadata"]
        if told.get("uid", found["uid"]) != found["uid"]:
            raise failed(422, "metadata.uid: field is immutable", method="PATCH")
        found |= told
        return self.objects[path]

    def owners(self) -> set[str]:
        """Uids of the Secrets that own what is there."""
        references = [
            one["metadata"].get("ownerReferences") or [] for name, one in self.objects.items() if name != SECRET
        ]
        return {one["uid"] for found in references for one in found}


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "PAUSE_S", 0.0)


def test_all_is_made_and_goes_with_the_job() -> None:
    """Everything is owned by the Secret, and that by the Job; the job is found by its name, and made once."""
    server = Store()

    async def story() -> None:
        plan = await making.make(server, PLAN)
        assert len(server.objects) == len(masters.objects(PLAN))
        assert server.objects[SECRET]["metadata"]["uid"] == plan.uid
        assert server.objects[SECRET]["metadata"]["ownerReferences"][0]["kind"] == "Job"
        owners = {
            one["metadata"]["ownerReferences"][0]["uid"] for name, one in server.objects.items() if name != JOB
        } - {server.objects[JOB]["metadata"]["uid"]}
        assert owners == {plan.uid}
        with pytest.raises(SpecError, match="is there already; dlrover stop k8s:ml/digits"):
            await making.make(server, PLAN)
        found = await jobs.find(server, "ml", "digits")
        assert (found.called, found.over, found.owner) == ("digits-masters", "", "")
        with pytest.raises(jobs.Missing, match=r"no job 'other' .* there are: digits"):
            await jobs.find(server, "ml", "other")

    asyncio.run(asyncio.wait_for(story(), BOUND_S))


@pytest.mark.parametrize(
    ("status", "said"), [(403, "verb create, resource"), (404, "namespace=NAME"), (500, "500"), (422, "422")]
)
def test_half_a_job_is_none(status: int, said: str) -> None:
    """Where one object cannot be made those before it are removed, and the reason is told."""
    server = Store()

    async def no(path: str) -> None:
        if path.endswith("/poddisruptionbudgets"):
            raise failed(status, "no", method="POST")

    server.before = no

    async def story() -> None:
        with pytest.raises(Exception, match=said):
            await making.make(server, dataclasses.replace(PLAN, nodes_kept=1))
        assert server.objects == {}

    asyncio.run(asyncio.wait_for(story(), BOUND_S))


def test_leftovers_are_replaced_and_strangers_are_not() -> None:
    """What a killed command has left is made anew; an object of somebody else under our name is told."""
    server = Store()
    labels = {names.LABEL_BY: names.BY}
    server.objects[SECRET] = {"kind": "Secret", "metadata": {"name": "digits-masters", "uid": "old", "labels": labels}}

    async def story() -> None:
        plan = await making.make(server, PLAN)
        assert plan.uid not in {"old", masters.UID}
        assert await jobs.remove(server, await jobs.find(server, "ml", "digits"), 0) == 0
        assert SECRET not in server.objects
        server.objects.clear()
        path = "/api/v1/namespaces/ml/services/digits-masters"
        server.objects[path] = {"kind": "Service", "metadata": {"name": "digits-masters", "uid": "theirs"}}
        with pytest.raises(SpecError, match="Service digits-masters is not of this job"):
            await making.make(server, PLAN)
        assert list(server.objects) == [path]

    asyncio.run(asyncio.wait_for(story(), BOUND_S))


# ---- others who make a job of that name


COUNT = len(masters.objects(PLAN))


@pytest.mark.parametrize("age_s", [0.0, 1000.0], ids=["young", "left"])
@pytest.mark.parametrize("at", range(COUNT + 1))
def test_two_commands_make_one_job(at: int, age_s: float) -> None:
    """However they interleave, what is there afterwards is of one of them and whole; the other one fails with a reason."""
    server = Store(age_s=age_s)

    async def story() -> None:
        made, second = 0, list[Any]()

        async def between(_path: str) -> None:
            nonlocal made
            if made == at and not second:
                second.append(None)
                second[:] = await asyncio.gather(making.make(server, PLAN), return_exceptions=True)
            made += 1

        server.before = between
        if at == COUNT:  # the Job is there, and the Secret is not yet its own
            server.before = None

            async def after(path: str) -> None:
                if path.endswith("/jobs") and not second:
                    await between(path)

            made, server.after = at, after
        (first,) = await asyncio.gather(making.make(server, PLAN), return_exceptions=True)
        results = [first, *second]
        won = [one for one in results if isinstance(one, masters.MasterPlan)]
        lost = [one for one in results if isinstance(one, SpecError)]
        assert (len(won), len(lost)) == (1, 1), results
        assert len(server.objects) == COUNT
        assert server.objects[SECRET]["metadata"]["uid"] == won[0].uid
        assert server.owners() == {won[0].uid}
        assert server.objects[SECRET]["metadata"]["ownerReferences"][0]["uid"] == server.objects[JOB]["metadata"]["uid"]
        assert any(words in str(lost[0]) for words in ("is there already", "another command", "was deleted while"))

    asyncio.run(asyncio.wait_for(story(), BOUND_S))


@pytest.mark.parametrize("whole", [True, False])
def test_an_elastic_job_keeps_what_it_has(whole: bool) -> None:
    """What has a controller stays, though it bears our label; the refusal names the object that it belongs to."""
    server = Store(age_s=1000.0)
    owner = masters.Owner("elastic.iml.github.io/v1alpha1", "ElasticJob", "elasticjobs", "digits", "u-1")

    async def story() -> None:
        await making.make(server, dataclasses.replace(PLAN, owner=owner))
        if not whole:
            del server.objects[JOB]
        before = dict(server.objects)
        with pytest.raises(SpecError, match="is there already" if whole else "belongs to ElasticJob digits"):
            await making.make(server, PLAN)
        assert server.objects == before

    asyncio.run(asyncio.wait_for(story(), BOUND_S))


# ---- answers that are lost


@pytest.mark.parametrize("kind", ["secrets", "services", "jobs"])
def test_a_create_whose_answer_is_lost_counts(kind: str) -> None:
    """The object is there with this call's mark: the job is made, once."""
    server, lost = Store(), list[str]()

    async def after(path: str) -> None:
        if path.endswith(f"/{kind}") and not lost:
            lost.append(path)
            raise Unreachable(Request("POST", path), 0, "cut")

    server.after = after
    plan = asyncio.run(asyncio.wait_for(making.make(server, PLAN), BOUND_S))
    assert lost
    assert len(server.objects) == COUNT
    assert server.objects[SECRET]["metadata"]["uid"] == plan.uid
    assert server.owners() == {plan.uid}


@pytest.mark.parametrize("kind", ["secrets", "roles", "jobs"])
def test_a_command_that_is_cancelled_leaves_nothing(kind: str) -> None:
    """Not even the object whose answer it did not wait for; a delete that fails is tried again."""
    server = Store()

    async def story() -> None:
        reached, for_ever = asyncio.Event(), asyncio.Event()

        async def after(path: str) -> None:
            if path.endswith(f"/{kind}"):
                reached.set()
                await for_ever.wait()

        server.after = after
        making_it = asyncio.create_task(making.make(server, PLAN))
        await reached.wait()
        server.faults["DELETE"] = deque([failed(500, "once")])
        making_it.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making_it
        assert server.objects == {}

    asyncio.run(asyncio.wait_for(story(), BOUND_S))

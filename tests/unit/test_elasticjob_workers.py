"""Who works on an ElasticJob: one task for each, for as long as the object is there."""

from __future__ import annotations

import asyncio
import itertools
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from k8s_inside import Inside
from structlog.testing import capture_logs

from dlrover_backends.k8s.elasticjob.operator import Operator
from dlrover_backends.k8s.elasticjob.reconcile import Make, Outcome, Patch, Settings
from dlrover_backends.k8s.errors import Conflict
from dlrover_core.testing import virtual_loop


def test_a_job_that_was_gone_for_a_moment_is_worked_on_again() -> None:
    """It comes back while the task that has seen it go still ends: nobody else would ever look at it."""
    begun = list[str]()
    job: dict[str, Any] = {"metadata": {"uid": "u", "name": "mnist"}}

    async def story() -> None:
        nobody = cast(Any, None)
        operator = Operator(nobody, cast(Any, SimpleNamespace(forget=lambda _: None)), Settings("i:1"), "ml")
        shown = SimpleNamespace(objects={"u": job})
        operator._jobs = {"g": cast(Any, shown)}

        again = asyncio.Event()

        async def work(uid: str) -> None:
            begun.append(uid)
            if len(begun) > 1:
                shown.objects.clear()
                again.set()
            else:
                shown.objects.clear()
                operator._heard_job(job)
                shown.objects["u"] = job
                operator._heard_job(job)

        operator._work = work  # type: ignore[method-assign]
        operator._heard_job(job)
        await again.wait()

    asyncio.run(asyncio.wait_for(story(), 20))
    assert begun == ["u", "u"]


def test_work_that_ends_by_a_fault_begins_again_after_a_growing_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that nobody foresaw must not take the whole processor, and news of it shorten no pause."""
    monkeypatch.setattr(random, "random", lambda: 1.0)
    begun = list[float]()
    job: dict[str, Any] = {"metadata": {"uid": "u", "name": "mnist"}}

    async def story() -> None:
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        tells = cast(Any, SimpleNamespace(forget=lambda _: gone.set()))
        operator = Operator(cast(Any, None), tells, Settings("i:1"), "ml", now=loop.time)
        shown = SimpleNamespace(objects={"u": job})
        operator._jobs = {"g": cast(Any, shown)}

        async def work(uid: str) -> None:
            begun.append(loop.time())
            if len(begun) == 5:
                shown.objects.clear()
                return
            loop.call_later(0.1, operator._heard_job, job)
            raise AttributeError("'list' object has no attribute 'get'")

        operator._work = work  # type: ignore[method-assign]
        operator._heard_job(job)
        await gone.wait()
        assert not operator._falls

    with capture_logs() as logs:  # a terminal's rendering of a traceback holds the loop for longer than it may be
        virtual_loop.run(story(), limit_s=60)
    assert [one["log_level"] for one in logs] == ["error"] * 4
    pauses = [after - before for before, after in itertools.pairwise(begun)]
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6])


@pytest.mark.parametrize("makes", [False, True], ids=["patch", "make"])
def test_a_dead_operators_patch_is_refused_after_its_successors(makes: bool) -> None:
    """It was on its way when that operator died: what is in the ConfigMap is what the job's mark says."""
    where = "/api/v1/namespaces/ml/configmaps"
    kind = {"apiVersion": "v1", "kind": "ConfigMap"}

    async def story() -> None:
        inside, sent, late = Inside(), asyncio.Event(), asyncio.Event()

        class Delayed:
            async def ask(self, method: str, path: str, **more: Any) -> Any:
                if method == "PATCH":
                    sent.set()
                    await late.wait()
                return await inside.ask(method, path, **more)

        job = await inside.ask("POST", where, body={**kind, "metadata": {"name": "job"}})  # any object can own others
        owner = {**kind, "name": "job", "uid": job["metadata"]["uid"]}
        metadata = {"name": "mnist", "namespace": "ml", "ownerReferences": [owner]}
        named: dict[str, Any] = {**kind, "metadata": metadata}

        def writes(api: Any, text: str) -> Any:
            operator = Operator(api, cast(Any, None), Settings("i:1"), "ml")
            data = {"data": {"worker": text}}
            one = Make({**named, **data}) if makes else Patch(f"{where}/mnist", data, as_read=True)
            return operator._written("u", job, Outcome((one,)))

        await inside.ask("POST", where, body=named)
        dead = asyncio.ensure_future(writes(Delayed(), "old"))
        await asyncio.wait((dead, asyncio.ensure_future(sent.wait())), return_when=asyncio.FIRST_COMPLETED)
        await writes(inside, "new")
        late.set()
        with pytest.raises(Conflict):
            await dead
        assert (await inside.ask("GET", f"{where}/mnist"))["data"] == {"worker": "new"}

    asyncio.run(asyncio.wait_for(story(), 20))

"""Who works on an ElasticJob: one task for each, for as long as the object is there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from dlrover_backends.k8s.elasticjob.operator import Operator
from dlrover_backends.k8s.elasticjob.reconcile import Settings


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
